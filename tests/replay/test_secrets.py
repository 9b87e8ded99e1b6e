"""Secrets reach the bodies they are meant for and nothing that is written (DESIGN 7)."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from typing import Annotated, Any

import pydantic
import pytest
from pydantic import BaseModel, Field, SecretBytes, SecretStr

import replaykit
from replaykit.errors import NotJournalable
from replaykit.replay.calls import step, workflow
from replaykit.replay.codec import codec_for, path_of_secret
from replaykit.replay.failures import decode_error, encode_error
from replaykit.replay.secrets import HIDDEN, Secret
from replaykit.replay.signature import describe, same_input, shorten_input
from replaykit.runtime.named import call_as_made
from tests.replay import drive


class Settings(BaseModel):
    url: str
    token: SecretStr | None = None
    pins: list[pydantic.Secret[int]] = []
    key: Secret[str] = Secret("")


@dataclasses.dataclass
class Account:
    name: str
    password: Secret[str]
    salt: Annotated[SecretBytes, Field(min_length=4)] = dataclasses.field(
        default_factory=lambda: SecretBytes(b"s3cret")
    )


class Client:
    """What no journal can hold."""


def login(account: Account, settings: Settings, options: dict, anything, *more: SecretStr, **named: Secret) -> None:  # type: ignore[no-untyped-def,type-arg]
    raise AssertionError


def everything() -> tuple[tuple[Any, ...], dict[str, Any]]:
    settings = Settings(url="u", token=SecretStr("s3cret"), pins=[pydantic.Secret(53)], key=Secret("s3cret"))
    args = (
        Account("a", Secret("s3cret")),
        settings,
        {"list": [Secret("s3cret"), {1: SecretStr("s3cret")}], "bytes": SecretBytes(b"s3cret")},
        (settings, Account("b", Secret("s3cret"))),
        SecretStr("s3cret"),
    )
    return args, {"again": Secret("s3cret")}


def test_it_prints_as_stars() -> None:
    """However it is printed or dumped; and it equals a secret of the same value."""
    secret = Secret("s3cret")

    class Holder(BaseModel):
        key: Secret[str]

    texts = [str(secret), repr(secret), f"{secret}", f"{secret!r:>5}", str([secret]), f"{Holder(key=secret)!r}"]
    assert all("***" in text and "s3cret" not in text for text in texts)
    assert Holder(key=secret).model_dump_json() == '{"key":"***"}'
    assert secret.reveal() == "s3cret"
    assert secret == Secret("s3cret") != Secret("other")
    assert {secret, Secret("s3cret")} == {copy.deepcopy(secret)}
    assert replaykit.Secret is Secret


def test_a_model_takes_the_value_or_the_secret() -> None:
    """Validated by its own type, from Python and from JSON."""

    class Holder(BaseModel):
        pin: Secret[int]

    assert Holder(pin=Secret(5)).pin == Secret(5)
    assert Holder.model_validate({"pin": "5"}).pin == Holder.model_validate_json('{"pin":5}').pin == Secret(5)
    with pytest.raises(pydantic.ValidationError):
        Holder.model_validate({"pin": "x"})


def test_a_body_gets_the_secret_and_the_record_has_stars() -> None:
    """Typed and untyped, in models, dataclasses, lists, dicts and `**kwargs`; the body's copy is its own."""
    info = describe(login)
    args, kwargs = everything()

    bound = info.bind(args, kwargs)
    fresh, named = info.fresh_arguments(bound)
    again, _ = info.fresh_arguments(bound)

    assert "s3cret" not in bound.text
    assert "s3cret" not in shorten_input(bound, 10)
    assert json.loads(bound.text)["account"] == {"name": "a", "password": "***", "salt": "***"}
    assert json.loads(bound.text)["named"] == {"again": "***"}
    assert (fresh, named) == (args, kwargs)
    assert fresh[0].password.reveal() == "s3cret"
    assert fresh[1].token.get_secret_value() == "s3cret"
    assert fresh[2]["list"][1][1].get_secret_value() == "s3cret"
    assert [a is b for a, b in zip(fresh, args, strict=True)][:4] == [False] * 4
    assert again[2]["list"] is not fresh[2]["list"]


def test_a_secret_is_no_part_of_the_digest() -> None:
    """A rotated key is the same input, and nobody can find a secret by trying digests; what lies beside it counts."""
    info = describe(login)
    args, kwargs = everything()
    rotated = (Account("a", Secret("other"), SecretBytes(b"another")), *args[1:])
    renamed = (Account("z", Secret("s3cret")), *args[1:])

    bound = info.bind(args, kwargs)

    assert bound.digest == info.bind(*everything()).digest == info.bind(rotated, {"again": Secret("other")}).digest
    assert bound.digest != info.bind(renamed, kwargs).digest
    assert same_input(info, info.bind(rotated, kwargs).text, bound)
    assert not same_input(info, info.bind(renamed, kwargs).text, bound)


def test_what_is_read_of_a_record_has_no_secret() -> None:
    """`step.current().input` has the rest, and a Secret that says that it was never written; not what needs the secret."""
    info = describe(login)

    read = info.decode_input(info.bind(*everything()).text)

    assert "account" not in read  # it is valid only with a salt of some length
    assert read["settings"].url == "u"
    assert read["anything"][1].name == "b"
    assert read["options"]["list"][0] is HIDDEN
    with pytest.raises(NotJournalable, match="never written"):
        read["anything"][1].password.reveal()
    assert Secret("***") != HIDDEN


def test_a_result_with_a_secret_is_refused_with_its_path() -> None:
    """By its annotation and without; a place for a secret that is empty is none."""
    args, _ = everything()
    for annotation, value, path in (
        (Settings, args[1], "$.token"),
        (Account, args[0], "$.password"),
        (Any, args[2], "$.list[0]"),
        (Secret[str], Secret("s3cret"), "$"),
        (SecretStr | str, SecretStr("s3cret"), "$"),
        (pydantic.Secret[str], pydantic.Secret("s3cret"), "$"),
        (str, SecretStr("s3cret"), "$"),
        (SecretStr, "s3cret", "$"),
    ):
        with pytest.raises(NotJournalable) as refused:
            codec_for(annotation).encode_checked(value)

        assert str(refused.value).startswith(f"{path}: ")
        assert "s3cret" not in str(refused.value)

    class Empty(BaseModel):
        token: SecretStr | None = None

    assert codec_for(Empty).encode_checked(Empty())[1] == Empty()


def test_a_run_takes_no_secret() -> None:
    """Its input is all that another process is handed: the refusal names the path and the way out."""
    args, kwargs = everything()

    for call in (
        lambda: describe(login).bind(args, kwargs, strict=True),
        lambda: call_as_made((), {"account": args[1]}),
        lambda: call_as_made((), {"account": {"token": Secret("s3cret")}}),
    ):
        with pytest.raises(NotJournalable, match=r"^\$\.account\.\w+: .*lifespan") as refused:
            call()
        assert "s3cret" not in str(refused.value)


def test_a_secret_beside_a_client_is_handed_over_as_it_is() -> None:
    """What can't be journaled for another reason has no record but its type's name."""

    @dataclasses.dataclass
    class Connected:
        client: Client
        key: Secret[str]

    def use(connected) -> None:  # type: ignore[no-untyped-def]
        raise AssertionError

    info = describe(use)
    connected = Connected(Client(), Secret("s3cret"))
    bound = info.bind((connected,), {})

    assert "s3cret" not in bound.text
    assert info.fresh_arguments(bound)[0][0] is connected


def test_text_that_looks_like_a_record_is_text() -> None:
    """Nobody gets at a secret by writing what the record would have."""
    text = codec_for(Any).encode({"~secret": "***0", "x": "***"})

    assert codec_for(Any).decode(text) == {"~secret": "***0", "x": "***"}
    with pytest.raises(ValueError, match="secret"):
        codec_for(Secret[str]).decode('"s3cret"')


def test_an_exception_leaves_its_secrets_out() -> None:
    """Attributes and arguments, also deep inside; a note has their names."""

    error = RuntimeError("denied", Secret("s3cret"))
    error.token = SecretStr("s3cret")  # type: ignore[attr-defined]
    error.request = {"headers": [Secret("s3cret")]}  # type: ignore[attr-defined]

    text = encode_error(error)
    twin = decode_error(text)

    assert "s3cret" not in text
    assert type(twin) is RuntimeError
    assert not hasattr(twin, "token")
    assert any(".token (" in note and ".request (" in note and "args[1] (" in note for note in twin.__notes__)


def test_a_replay_encodes_a_secret_the_same_way() -> None:
    """After a crash the code hands over the secret again, perhaps a rotated one: the entry still fits."""

    async def call(key: Secret[str], n: int) -> int:
        raise AssertionError

    keys = ["s3cret", "rotated"]

    @workflow
    async def flow(n: int) -> int:
        return await step(call, Secret(keys[0]), n) + await step(call, key=Secret(keys[0]), n=n)

    live = drive.begin(flow, 1)
    live.answer("call", 5)
    keys.reverse()
    later = drive.replay(flow, live.journal, 1)
    later.answer("call#2", 6)

    assert later.result == 11
    assert "s3cret" not in str(live.journal)
    assert json.loads(live.journal[0].input or "") == {"key": "***", "n": 1}


class ByField(BaseModel):
    key: SecretStr

    @pydantic.field_serializer("key", when_used="json")
    def _clear(self, key: SecretStr) -> str:
        return key.get_secret_value()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", pydantic.PydanticDeprecatedSince20)

    class ByEncoders(BaseModel):
        model_config = pydantic.ConfigDict(json_encoders={SecretStr: lambda key: key.get_secret_value()})
        key: SecretStr


class ByModel(BaseModel):
    key: SecretStr

    @pydantic.model_serializer
    def _clear(self) -> dict[str, str]:
        return {"key": self.key.get_secret_value()}


class ByPlain(BaseModel):
    key: Annotated[SecretStr, pydantic.PlainSerializer(lambda key: key.get_secret_value(), return_type=str)]


class ByWrap(BaseModel):
    key: Annotated[SecretStr, pydantic.WrapSerializer(lambda key, _: key.get_secret_value())]


class OfOurs(BaseModel):
    key: Secret[str]

    @pydantic.field_serializer("key")
    def _clear(self, key: Secret[str]) -> str:
        return key.reveal()


class OfNumbers(BaseModel):
    key: Annotated[pydantic.Secret[str], pydantic.PlainSerializer(lambda key: key.get_secret_value())]


class ByName(BaseModel):
    default: SecretStr

    @pydantic.field_serializer("default")
    def _clear(self, key: SecretStr) -> str:
        return key.get_secret_value()


class InAList(BaseModel):
    keys: list[SecretStr]

    @pydantic.field_serializer("keys")
    def _clear(self, keys: list[SecretStr]) -> list[str]:
        return [key.get_secret_value() for key in keys]


class Recursive(BaseModel):
    inner: list[Recursive] = []
    key: SecretStr | None = None

    @pydantic.model_serializer
    def _clear(self) -> dict[str, Any]:
        return {"inner": self.inner, "key": self.key and self.key.get_secret_value()}


class OutOfSight(BaseModel):
    """Its secret is no field."""

    a: str = ""
    _key: SecretStr = pydantic.PrivateAttr(SecretStr("s3cret"))

    @pydantic.model_serializer
    def _clear(self) -> dict[str, str]:
        return {"a": self._key.get_secret_value()}


class Holding(BaseModel):
    x: Any


class Wide(BaseModel):
    a: int = 1


class Narrow(Wide):
    key: SecretStr

    @pydantic.field_serializer("key")
    def _clear(self, key: SecretStr) -> str:
        return key.get_secret_value()


class Duck(BaseModel):
    x: pydantic.SerializeAsAny[Wide]


@dataclasses.dataclass
class Plain:
    key: Annotated[SecretStr, pydantic.PlainSerializer(lambda key: key.get_secret_value())]


KEY = SecretStr("s3cret")
MASKED: list[Any] = [
    ByField(key=KEY),
    ByEncoders(key=KEY),
    ByModel(key=KEY),
    ByPlain(key=KEY),
    ByWrap(key=KEY),
    OfOurs(key=Secret("s3cret")),
    OfNumbers(key=pydantic.Secret("s3cret")),
    ByName(default=KEY),
    InAList(keys=[KEY]),
    Recursive(inner=[Recursive(key=KEY)]),
    Plain(KEY),
]
NOT_RECORDED: list[Any] = [
    OutOfSight(),
    Holding(x=KEY),
    Holding(x=[KEY]),
    Holding(x=ByField(key=KEY)),
    Duck(x=Narrow(key=KEY)),
]


def one_parameter(annotation: Any) -> Any:
    def take(x):  # type: ignore[no-untyped-def]
        raise AssertionError

    take.__annotations__ = {"x": annotation, "return": annotation}
    return describe(take)


@pytest.mark.parametrize("value", MASKED + NOT_RECORDED, ids=lambda value: type(value).__name__)
def test_a_serializer_that_gives_a_secret_away_is_not_asked(value: Any) -> None:
    """However the author writes a secret for others: results and runs refuse it, a step's body gets it, the record never."""
    for annotation in (type(value), list[type(value)], Any):  # type: ignore[misc]
        given = [value] if annotation not in (type(value), Any) else value
        info = one_parameter(annotation)
        with pytest.raises(NotJournalable) as refused:
            info.encode_result(given)
        assert "s3cret" not in str(refused.value)
        with pytest.raises(NotJournalable) as refused:
            info.bind((given,), {}, strict=True)
        assert "s3cret" not in str(refused.value)
        with pytest.raises(NotJournalable):
            call_as_made((given,), {})

        bound = info.bind((given,), {})

        assert "s3cret" not in bound.text
        if any(value is one for one in MASKED):
            assert "***" in bound.text
            assert info.fresh_arguments(bound)[0][0] == given


def test_an_error_with_such_a_secret_has_none_in_its_record() -> None:
    """The step that was given it fails, and hands it on in what it raises."""
    for value in MASKED + NOT_RECORDED:
        error = RuntimeError("denied", value, [value])
        error.__dict__["settings"] = value
        assert "s3cret" not in encode_error(error)


def test_a_secret_at_the_end_of_a_large_input_is_found() -> None:
    """Behind any number of parts, also in a set; a cycle ends the search."""
    parts: list[Any] = [{"n": n, "at": object()} for n in range(5)] + [[n] for n in range(50_000)]

    assert path_of_secret(parts) is None
    assert path_of_secret([*parts, {"k": {SecretStr("s3cret")}}]) == "[50005].k[0]"
    parts.append(parts)
    assert path_of_secret(parts) is None
