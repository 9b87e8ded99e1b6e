"""Workflows of our own, of every kind that the docs describe, which come to the same end wherever their process is killed."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from replaykit import (
    Landed,
    NotLanded,
    Secret,
    StepInfo,
    Unknown,
    now,
    rng,
    saga,
    sleep,
    step,
    uuid4,
    workflow,
)
from replaykit.limits import Settings
from replaykit.testing import Doubt, count_effect, effects_counted

__all__ = ["CASES", "TABLE", "Case"]

TABLE: Final = "create table public.booked (run uuid, step text, what text)"
"""Of the transactional steps."""

EVICTING: Final = Settings(poll_seconds=0.05, evict_after_seconds=0.05)
"""Whoever waits leaves memory."""

AGAIN: Final = AsyncRetrying(stop=stop_after_attempt(4), wait=wait_fixed(0.01))
SLOWLY_AGAIN: Final = AsyncRetrying(stop=stop_after_attempt(3), wait=wait_fixed(0.15))


class Refused(Exception):
    """The other side says no."""


# ------------------------------------------------------------------ bodies


async def add(a: int, b: int) -> int:
    """At once."""
    return a + b


def add_in_thread(a: int, b: int) -> int:
    """In a thread, and not at once."""
    time.sleep(0.01)
    return a + b


async def add_slowly(a: int, b: int) -> int:
    """Takes a while."""
    await asyncio.sleep(0.02 * (a % 3))
    return a + b


async def never() -> None:
    """Nobody waits that long."""
    await asyncio.sleep(3_600)


async def third_time(number: int) -> int:
    """Fails twice."""
    if step.current().attempt < 3:
        raise ConnectionError(f"try {step.current().attempt}")
    return number


async def refuse(what: str) -> None:
    """Says no."""
    raise Refused(what)


@step.policy(effect="idempotent", not_landed=Refused)
async def pay(cents: int) -> str:
    """The other side knows the key."""
    count_effect("pay", once=True)
    return f"paid {cents}"


@step.policy(effect="idempotent")
def pay_in_thread(cents: int) -> str:
    """The same in a thread."""
    count_effect("pay", once=True)
    return f"paid {cents}"


async def find_sent(info: StepInfo) -> Landed[str] | NotLanded:
    """Whether it was sent."""
    return Landed(f"sent {info.input['what']}") if effects_counted("send") else NotLanded()


@step.policy(effect="irreversible", reconcile=find_sent)
async def send(what: str) -> str:
    """Twice is twice, and one can ask."""
    count_effect("send")
    return f"sent {what}"


@step.policy(effect="irreversible", reconcile=find_sent)
def send_in_thread(what: str) -> str:
    """The same in a thread."""
    count_effect("send")
    return f"sent {what}"


@step.policy(effect="irreversible")
async def send_unasked(what: str) -> str:
    """Twice is twice, and nobody can be asked but a person."""
    count_effect("send")
    return f"sent {what}"


@step.policy(effect="irreversible", not_landed=Refused, reconcile=find_sent)
async def send_at_last(what: str) -> str:
    """Is refused once; then it is sent."""
    if step.current().attempt == 1:
        raise Refused(what)
    count_effect("send")
    return f"sent {what}"


async def know_nothing(info: StepInfo) -> Unknown:
    """Cannot tell."""
    return Unknown("the other side keeps no list")


@step.policy(effect="irreversible", reconcile=know_nothing)
async def send_unknown(what: str) -> str:
    """One can ask, and gets no answer."""
    count_effect("send")
    return f"sent {what}"


async def find_ticket(info: StepInfo) -> Landed[str] | NotLanded:
    """By what the body has observed."""
    tickets = [id for kind, id in info.observed if kind == "ticket"]
    return Landed(tickets[-1]) if tickets and effects_counted("ticket") else NotLanded()


@step.policy(effect="irreversible", reconcile=find_ticket)
async def open_ticket(title: str) -> str:
    """Tells the ticket's number before it opens it."""
    await step.current().observe("ticket", f"T-{title}")
    count_effect("ticket")
    return f"T-{title}"


@step.policy(effect="transactional")
async def book_row(what: str) -> str:
    """A row of the journal's database."""
    info = step.current()
    connection = await info.connection()
    await connection.execute("insert into public.booked values (%s, %s, %s)", [info.run_id, info.key, what])
    return what


@step.policy(effect="transactional")
def book_row_in_thread(what: str) -> str:
    """The same in a thread."""
    import psycopg

    info = step.current()
    info.connection(psycopg.Connection).execute(
        "insert into public.booked values (%s, %s, %s)", [info.run_id, info.key, what]
    )
    return what


@step.policy(effect="transactional")
async def unbook_row(what: str) -> None:
    """Another row, which takes it back."""
    info = step.current()
    connection = await info.connection()
    await connection.execute(
        "insert into public.booked values (%s, %s, %s)", [info.run_id, info.key, f"no more {what}"]
    )


# ------------------------------------------------------------------ what a saga undoes


@dataclass
class Seat:
    """What a booking leaves."""

    where: str
    number: int


async def release(seat: Seat) -> None:
    """Nobody minds a second one."""


@step.policy(effect="idempotent")
async def refund(paid: str) -> None:
    """By key."""
    count_effect("refund", once=True)


async def find_recalled(info: StepInfo) -> Landed[None] | NotLanded:
    """Whether it is undone."""
    return Landed(None) if effects_counted("recall") else NotLanded()


@step.policy(effect="irreversible", reconcile=find_recalled)
async def recall(sent: str) -> None:
    """Once."""
    count_effect("recall")


@step.policy(compensate=release)
async def take_seat(where: str) -> Seat:
    """A plain step that is undone by one."""
    return Seat(where, len(where))


# ------------------------------------------------------------------ workflows


@workflow
async def chain(length: int) -> int:
    """One step after another."""
    total = 0
    for number in range(length):
        total = await step(add, total, number)
    return total


@workflow
async def nothing() -> str:
    """No step at all."""
    return "done"


@workflow
async def fan() -> int:
    """Side by side."""
    return sum(await asyncio.gather(*(step(add_slowly, number, 1) for number in range(5))))


@workflow
async def threads() -> list[int]:
    """In threads, side by side, beside coroutines."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_add_anywhere(number)) for number in range(4)]
    return [task.result() for task in tasks]


async def _add_anywhere(number: int) -> int:
    return await (step(add_in_thread, number, 1) if number % 2 else step(add_slowly, number, 1))


@workflow
async def nested_groups() -> int:
    """Groups in groups, each with steps of its own."""

    async def branch(number: int) -> int:
        async with asyncio.TaskGroup() as group:
            pair = [group.create_task(step(add_slowly, number, part)) for part in range(2)]
        return await step(add, pair[0].result(), pair[1].result())

    return sum(await asyncio.gather(branch(1), branch(2)))


@workflow
async def race() -> list[str]:
    """The first wins, and the other is cancelled."""
    tasks: set[asyncio.Task[Any]] = {asyncio.create_task(_add(1, 2)), asyncio.create_task(_never())}
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return [f"{task.result()}" for task in done] + [str(await step(add, 3, 4))]


async def _add(a: int, b: int) -> int:
    return await step(add, a, b)


async def _never() -> None:
    await step(never)


@workflow
async def late() -> str:
    """A step that takes too long, and what comes then."""
    try:
        async with asyncio.timeout(0.1):
            await step(never)
    except TimeoutError:
        return f"too late, {await step(add, 1, 2)}"
    return "in time"


@workflow
async def step_timeout() -> str:
    """The same as the step's own option."""
    try:
        await step.options(timeout=0.1)(never)
    except TimeoutError:
        return f"too late, {await step(add, 1, 2)}"
    return "in time"


@workflow
async def naps() -> list[Any]:
    """Short sleeps, and what the run takes the time from."""
    seen: list[Any] = []
    for number in range(3):
        before = now()
        await sleep(0.03)
        seen.append((now() - before >= dt.timedelta(milliseconds=30), await step(add, number, 1)))
    return seen


@workflow
async def chances() -> list[Any]:
    """The run's own chance and ids, which steps are given."""
    drawn = [rng().randrange(1_000) for _ in range(3)]
    ids = [str(uuid4()), str(uuid4())]
    total = 0
    for number in drawn:
        total = await step(add, total, number)
    return [total == sum(drawn), ids[0] != ids[1], await step(add, total, len(ids[1]))]


@workflow
async def insists(policy: str) -> int:
    """Fails twice, then does not."""
    retry = AGAIN if policy == "quickly" else SLOWLY_AGAIN
    total = await step(add, 1, 2)
    return await step.options(retry=retry)(third_time, total) + await step(add, 3, 4)


@workflow
async def fails() -> None:
    """Ends with an error of a step."""
    await step(add, 1, 2)
    await step(refuse, "no")


@workflow
async def copes() -> list[str]:
    """Errors that the code handles, and steps that clean up."""
    seen = []
    for what in ("one", "two"):
        try:
            await step(refuse, what)
        except Refused as error:
            seen.append(f"{error} {await step(add, 1, len(what))}")
        finally:
            seen.append(str(await step(add, 2, 2)))
    return seen


@workflow
async def gathers_errors() -> list[str]:
    """Errors among results."""
    results = await asyncio.gather(step(add, 1, 2), step(refuse, "no"), step(pay, 300), return_exceptions=True)
    return [repr(result) for result in results]


@workflow
async def part(number: int) -> int:
    """Called by the next."""
    return await step(add, number, 1) + await step(add, number, 2)


@workflow
async def whole() -> int:
    """Calls other workflows inline, side by side."""
    return sum(await asyncio.gather(part(1), part(10)))


@workflow
async def names() -> list[int]:
    """Names and keys of the author's own."""
    one = await step.options(name="first")(add, 1, 2)
    two = await step.options(key=f"second/{one}")(add, one, 2)
    return [one, two, await step.options(name="third")(lambda: two + 1)]


@workflow
async def cheaply() -> int:
    """Steps whose results go on before their commit."""
    cheap = step.options(durability="async")
    total = 0
    for number in range(6):
        total = await cheap(add, total, number)
    return await step(add, total, 1)


@workflow
async def queue() -> int:
    """Producers, consumers and a queue between them."""
    todo: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
    done: list[int] = []

    async def consume() -> None:
        while True:
            number = await todo.get()
            done.append(await step.options(key=f"work/{number}")(add, number, 1))
            todo.task_done()

    workers = [asyncio.create_task(consume()) for _ in range(2)]
    for number in range(4):
        await todo.put(number)
    await todo.join()
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    return sum(done)


@workflow
async def locks() -> int:
    """A lock around two steps, a semaphore around the next."""
    lock, gate, total = asyncio.Lock(), asyncio.Semaphore(2), 0

    async def one(number: int) -> None:
        nonlocal total
        async with lock:
            before = total
            total = await step.options(key=f"locked/{number}")(add_slowly, number, 1) + before
        async with gate:
            await step.options(key=f"gated/{number}")(add, number, 1)

    await asyncio.gather(*(one(number) for number in range(3)))
    return total


@workflow
async def pages() -> list[int]:
    """A generator that cleans up in a step."""

    async def read() -> AsyncGenerator[int, None]:
        try:
            for page in range(5):
                yield await step(add, page, 1)
        finally:
            await step(add, 0, 0)

    seen = []
    async with contextlib.aclosing(read()) as source:
        async for page in source:
            seen.append(page)
            if page == 3:
                break
    return seen


async def answer(messages: list[str]) -> str:
    """What comes next."""
    return f"answer {len(messages)}"


@workflow
async def chat() -> list[str]:
    """An input that grows from call to call."""
    messages = ["hello"]
    for _ in range(4):
        messages.append(await step(answer, messages))
    return messages


async def log_in(password: Secret[str]) -> bool:
    """Needs it, and leaves it nowhere."""
    return password.reveal() == "opensesame"


@workflow
async def secretly() -> bool:
    """A secret among a step's inputs."""
    return await step(log_in, Secret("opensesame")) and await step(add, 1, 2) == 3


@workflow
async def pays() -> list[str]:
    """Idempotent calls, one after another and side by side."""
    paid = [await step(pay, 100), await step(pay_in_thread, 200)]
    return [*paid, *await asyncio.gather(step(pay, 300), step(pay, 400))]


@workflow
async def sends() -> list[str]:
    """Irreversible calls whose reconcilers are asked."""
    sent = [await step(send, "one"), await step(send_in_thread, "two")]
    return [*sent, *await asyncio.gather(step(send, "three"), step(send, "four"))]


@workflow
async def sends_unasked(unknown: bool) -> list[Any]:
    """Irreversible calls of which a person is asked."""
    call = send_unknown if unknown else send_unasked
    return [await step(call, "one"), await step(add, 1, 2), await step(call, "two")]


@workflow
async def sends_at_last() -> str:
    """An irreversible call that is refused, and made again."""
    return await step.options(retry=AsyncRetrying(retry=retry_if_exception_type(Refused), stop=stop_after_attempt(3)))(
        send_at_last, "one"
    )


@step.policy(effect="irreversible", reconcile=find_sent)
async def send_slowly(what: str) -> str:
    """Nobody waits for it, and nobody stops it."""
    await asyncio.sleep(0.2)
    count_effect("send")
    return f"sent {what}"


@workflow
async def gives_up() -> str:
    """The wait for a call ends, the call goes on; one that was cut off is not made again."""
    total = 0
    try:
        async with asyncio.timeout(0.05):
            await step(send_slowly, "one")
    except TimeoutError:
        total = await step(add, 1, 2)
    return f"gave up, {await step(add, total, 1)}"


@step.policy(effect="idempotent", key_valid_for=0.001, reconcile=find_sent)
async def send_while_valid(what: str) -> str:
    """The other side forgets its keys at once: whoever comes later asks first."""
    count_effect("send")
    return f"sent {what}"


@workflow
async def outlives_keys() -> list[str]:
    """Idempotent calls that are not repeated blindly."""
    return [await step(send_while_valid, "one"), await step(send_while_valid, "two")]


@workflow
async def opens_tickets() -> list[str]:
    """Identifiers that are told before the call, and found again."""
    return [await step(open_ticket, "a"), await step(open_ticket, "b")]


@workflow
async def books_rows() -> list[str]:
    """Rows of the same database, in coroutines and threads."""
    booked = [await step(book_row, "bed"), await step(book_row_in_thread, "table")]
    return [*booked, *await asyncio.gather(step(book_row, "chair"), step(book_row_in_thread, "lamp"))]


@workflow
async def travels() -> list[Any]:
    """A saga that goes well."""
    async with saga():
        seat = await step(take_seat, "here")
        paid = await step.options(compensate=refund)(pay, 100)
        return [seat, paid, await step.options(compensate=recall)(send, "confirmation")]


@workflow
async def stays_at_home() -> str:
    """A saga that undoes what it has done, by every kind of step."""
    try:
        async with saga():
            await step(take_seat, "here")
            await step.options(compensate=refund)(pay, 100)
            await step.options(compensate=unbook_row)(book_row, "bed")
            await step.options(compensate=recall)(send, "confirmation")
            await step(refuse, "rain")
    except Refused as error:
        return f"at home: {error}, {await step(add, 1, 2)}"
    return "away"


@workflow
async def sagas_in_sagas() -> str:
    """The inner one is undone, and the outer goes on, and is undone then."""
    async with saga():
        await step.options(compensate=refund)(pay, 100)
        with contextlib.suppress(Refused):
            async with saga():
                await step.options(compensate=recall)(send, "inner")
                await step(refuse, "inner")
        await step.options(compensate=unbook_row)(book_row, "bed")
        raise Refused("outer")
    return "unreachable"


@workflow
async def saga_of_many() -> str:
    """An error leaves a saga with calls side by side in it."""
    try:
        async with saga():
            await asyncio.gather(
                step.options(compensate=refund)(pay, 100),
                step.options(compensate=recall)(send, "one"),
                step.options(compensate=recall)(send, "two"),
            )
            raise Refused("then")
    except Refused:
        return "undone"


@workflow
async def order() -> dict[str, Any]:
    """A bit of everything, as an order is."""
    id = uuid4()
    prices = await asyncio.gather(*(step(add, number, 10) for number in range(3)))
    async with saga():
        seat = await step(take_seat, "shelf")
        paid = await step.options(retry=AGAIN, compensate=refund)(pay, sum(prices))
        await sleep(0.02)
        booked = await step.options(compensate=unbook_row)(book_row, "order")
        sent = await step(send, "parcel")
    return {"paid": paid, "booked": booked, "sent": sent, "seat": seat.number, "id": len(str(id))}


# ------------------------------------------------------------------ cases


def word(doubt: Doubt) -> Landed[Any] | BaseException:
    """A person looks into the other side's books."""
    if doubt.counted("send"):
        return Landed("sent one" if not doubt.key.endswith("#2") else "sent two")
    return NotLanded()


@dataclass(frozen=True)
class Case:
    """A workflow, with what it is given.

    Attributes:
        quick: executed with each run of the tests.
    """

    name: str
    workflow: Any
    args: tuple[Any, ...] = ()
    options: dict[str, Any] | None = None
    quick: bool = False


CASES: Final = [
    Case("chain", chain, (5,)),
    Case("long chain", chain, (15,)),
    Case("nothing", nothing),
    Case("fan", fan),
    Case("threads", threads),
    Case("nested groups", nested_groups),
    Case("race", race),
    Case("late", late),
    Case("step timeout", step_timeout),
    Case("naps", naps),
    Case("naps, evicted", naps, (), {"settings": EVICTING}, quick=True),
    Case("chances", chances),
    Case("insists", insists, ("quickly",)),
    Case("insists, evicted", insists, ("slowly",), {"settings": EVICTING}),
    Case("fails", fails),
    Case("copes", copes),
    Case("gathers errors", gathers_errors),
    Case("inline", whole),
    Case("names", names),
    Case("cheaply", cheaply),
    Case("queue", queue),
    Case("locks", locks),
    Case("pages", pages),
    Case("chat", chat),
    Case("secretly", secretly),
    Case("pays", pays),
    Case("sends", sends, quick=True),
    Case("sends unasked", sends_unasked, (False,), {"resolve": word}, quick=True),
    Case("sends unknown", sends_unasked, (True,), {"resolve": word}),
    Case("sends at last", sends_at_last),
    Case("gives up", gives_up, (), {"ignore": ["send_slowly"]}),
    Case("outlives keys", outlives_keys),
    Case("opens tickets", opens_tickets),
    Case("books rows", books_rows, quick=True),
    Case("travels", travels),
    Case("stays at home", stays_at_home, quick=True),
    Case("sagas in sagas", sagas_in_sagas),
    Case("saga of many", saga_of_many),
    Case("order", order),
]
"""All of them."""
