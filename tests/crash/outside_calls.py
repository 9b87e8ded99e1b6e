"""The world outside in a process of its own: a server that bodies call over HTTP, which counts calls and what they did.

    POST /ACCOUNT/WHAT          a call: it does WHAT, once more each time, and answers with a receipt
    GET  /ACCOUNT/WHAT/KEY      what a reconciler asks: the receipt of that key, or 404
    GET  /ACCOUNT               the log, for tests
    PUT  /ACCOUNT               how the account behaves from now on, for tests: `Account`
    PUT  /ACCOUNT/release       answer the calls that are held, for tests
    PUT  /                      how accounts behave that are not there yet, for tests
    GET  /                      the calls of all accounts, for tests

A request whose caller is gone does nothing any more: before it acts the server asks the kernel. So once a process is dead
nothing that it began can land, which a reconciler's "it did not happen" stands on.

python -m tests.crash.outside_calls: prints its address, serves until its stdin ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import random
import select
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import unquote

from tests.runtime.facts import eventually

__all__ = ["Call", "Calls", "Log"]

ROOT: Final = Path(__file__).resolve().parents[2]

BEHAVIOURS: Final = frozenset(
    {
        "answer",  # does, answers
        "hold",  # waits for its release, or until its caller is gone; then does, answers
        "do-hold",  # does; waits likewise; then answers
        "cut",  # does nothing, closes the connection
        "do-cut",  # does, closes the connection
        "fail",  # does nothing, answers 503
    }
)


@dataclass(slots=True)
class Call:
    """One call, as the server saw it."""

    number: int  # from 1, over all accounts, by the arrival of its request
    what: str
    key: str | None  # its Idempotency-Key
    step: str
    attempt: int
    pid: int
    did: int | None = None  # its place among the account's effects, from 1
    ended: str | None = None  # "answered", "cut" by the server, "gone": its caller's connection was closed
    effect: str | None = None  # what its caller has declared
    at: float = 0.0  # `time.time()` at its arrival


@dataclass(slots=True)
class Effect:
    """Something that was done."""

    what: str
    key: str | None
    receipt: str


@dataclass
class Account:
    """One test's part of the world. `dedups`: what is done once for each key; `script`: what the next calls meet; `lag`: how
    long a call takes at most, in seconds; `chances`: what other calls meet, by probability."""

    dedups: list[str] = field(default_factory=list)
    script: deque[str] = field(default_factory=deque)
    lag: float = 0.0
    chances: dict[str, float] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # keys
    moments: int = 0  # calls that came, did something, or ended
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def find(self, what: str, key: str) -> Effect | None:
        """What was done under that key."""
        return next((e for e in self.effects if (e.what, e.key) == (what, key)), None)


class Server:
    """Serves until it is cancelled."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._usual = Account()
        self._numbers = itertools.count(1)
        self._chance = random.Random()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one answer: connections are not kept."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            answer = await self._answer(method, path, headers, body, reader, writer)
            if answer is not None:
                text = json.dumps(answer[1]).encode()
                writer.write(
                    f"HTTP/1.1 {answer[0]} -\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode()
                    + text
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> tuple[int, Any] | None:
        name, *rest = path.strip("/").split("/")
        account = self._account(name) if name else self._usual
        match method, rest:
            case "GET", [] if not name:
                return 200, {name: [asdict(call) for call in one.calls] for name, one in self._accounts.items()}
            case "POST", [what]:
                return await self._called(account, what, headers, reader, writer)
            case "GET", [what, key]:
                account.asked.append(unquote(key))
                found = account.find(what, unquote(key))
                return (404, None) if found is None else (200, found.receipt)
            case "GET", []:
                return 200, {
                    "calls": [asdict(call) for call in account.calls],
                    "effects": [asdict(effect) for effect in account.effects],
                    "asked": account.asked,
                    "moments": account.moments,
                }
            case "PUT", []:
                told = json.loads(body)
                account.dedups = told.get("dedups", account.dedups)
                account.script = deque(told.get("script", account.script))
                account.lag = told.get("lag", account.lag)
                account.chances = told.get("chances", account.chances)
                assert BEHAVIOURS.issuperset([*account.script, *account.chances])
                account.released = asyncio.Event()
                return 200, None
            case "PUT", ["release"]:
                account.released.set()
                return 200, None
            case _:
                return 400, f"{method} {path}?"

    def _account(self, name: str) -> Account:
        usual = self._usual
        new = Account(dedups=usual.dedups, script=deque(usual.script), lag=usual.lag, chances=usual.chances)
        return self._accounts.setdefault(name, new)

    def _meets(self, account: Account) -> str:
        """What the next call meets."""
        if account.script:
            return account.script.popleft()
        chance = self._chance.random()
        for behaviour, share in account.chances.items():
            chance -= share
            if chance < 0:
                return behaviour
        return "answer"

    async def _called(
        self,
        account: Account,
        what: str,
        headers: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> tuple[int, Any] | None:
        step, attempt, pid = headers["x-caller"].rsplit(" ", 2)
        key, effect = headers.get("idempotency-key"), headers.get("x-effect")
        call = Call(next(self._numbers), what, key, step, int(attempt), int(pid), effect=effect, at=time.time())
        account.calls.append(call)
        account.moments += 1
        behaviour = self._meets(account)
        try:
            answer = await self._do(account, call, behaviour, reader, writer)
            call.ended = "cut" if answer is None else "answered"
            return answer
        except ConnectionError:
            call.ended = "gone"
            raise
        finally:
            account.moments += 1

    async def _do(
        self,
        account: Account,
        call: Call,
        behaviour: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> tuple[int, Any] | None:
        if behaviour == "hold":
            await _held(account, reader)
        if behaviour == "cut":
            return None
        if behaviour == "fail":
            return 503, "not today"
        await self._lag(account)
        if _is_gone(writer):
            raise ConnectionError
        effect = account.find(call.what, call.key) if call.what in account.dedups and call.key is not None else None
        if effect is None:
            effect = Effect(call.what, call.key, f"{call.what}-{len(account.effects) + 1}")
            account.effects.append(effect)
            call.did = len(account.effects)
            account.moments += 1
        if behaviour == "do-cut":
            return None
        if behaviour == "do-hold":
            await _held(account, reader)
        await self._lag(account)
        return 200, effect.receipt

    async def _lag(self, account: Account) -> None:
        if account.lag:
            await asyncio.sleep(self._chance.uniform(0, account.lag / 2))


async def _held(account: Account, reader: asyncio.StreamReader) -> None:
    """Until the test releases it.

    Raises:
        ConnectionError: its caller is gone.
    """
    gone = asyncio.ensure_future(reader.read(1))
    released = asyncio.ensure_future(account.released.wait())
    await asyncio.wait([gone, released], return_when=asyncio.FIRST_COMPLETED)
    released.cancel()
    if gone.done():
        raise ConnectionError
    gone.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await gone


def _is_gone(writer: asyncio.StreamWriter) -> bool:
    """Whether the caller has closed its end, as far as the kernel knows at this moment."""
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


async def main() -> None:
    """Serve until stdin ends: with the test's process, however that ends."""
    served = await asyncio.start_server(Server().connected, "127.0.0.1", 0, backlog=1024)
    print(f"127.0.0.1:{served.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


# ---------------------------------------------------------------------- the test's side


@dataclass(slots=True)
class Log:
    """What an account has seen so far."""

    calls: list[Call]
    effects: list[Effect]
    asked: list[str]
    moments: int

    @property
    def open(self) -> list[Call]:
        """Calls that have not ended."""
        return [call for call in self.calls if call.ended is None]


class Calls:
    """The server's process, for the length of a `with`."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.outside_calls"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            self._process.kill()

    def url(self, account: str) -> str:
        """What bodies are given."""
        return f"http://{self.address}/{account}"

    def behave(self, account: str, **how: Any) -> None:
        """Set `dedups`, `script`, `lag`."""
        self._ask("PUT", f"/{account}", json.dumps(how))

    def behave_usually(self, **how: Any) -> None:
        """Set what accounts begin with: `dedups`, `lag`, `chances`."""
        self._ask("PUT", "/", json.dumps(how))

    def all(self) -> dict[str, list[Call]]:
        """Every call, by account."""
        return {name: [Call(**call) for call in calls] for name, calls in self._ask("GET", "/").items()}

    def release(self, account: str) -> None:
        """Let calls that are held go on."""
        self._ask("PUT", f"/{account}/release")

    def log(self, account: str) -> Log:
        """What has happened so far."""
        told = self._ask("GET", f"/{account}")
        return Log(
            [Call(**call) for call in told["calls"]],
            [Effect(**effect) for effect in told["effects"]],
            told["asked"],
            told["moments"],
        )

    def wait_call(self, account: str, number: int = 1, *, done: bool = False) -> Call:
        """The account's call of that number, from 1, once it has come; `done`: once it has done its deed."""

        def came() -> Call | None:
            calls = self.log(account).calls
            return calls[number - 1] if len(calls) >= number and (calls[number - 1].did or not done) else None

        found = eventually(came, f"call {number} of {account} {'is done' if done else 'comes'}")
        assert found is not None
        return found

    def _ask(self, method: str, path: str, body: str = "") -> Any:
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=30)) as connection:
            connection.request(method, path, body)
            answer = connection.getresponse()
            assert answer.status == 200, (answer.status, path)
            return json.loads(answer.read())


if __name__ == "__main__":
    asyncio.run(main())
