"""What happens to the calls of steps with an effect: bodies put off, reconcilers, observations, a person's word.

Each method is one event of a schedule, or a check of what a driver asks for; see `simulation.py`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from replaykit.limits import Settings
from replaykit.replay.actions import Reconcile, StartBody
from replaykit.replay.doubts import Answer
from replaykit.replay.driver import Driver, Phase
from replaykit.replay.entries import Effect, Intent, IntentState, Kind, Observation, Outcome, State, Unit
from replaykit.replay.outcomes import result_outcome
from replaykit.replay.requests import CallStep
from tests.simulator.database import Database, Mismatch, Row
from tests.simulator.hosts import Host, Worker
from tests.simulator.invariants import History
from tests.simulator.world import Call, World, in_doubt

__all__ = ["Outside"]

Event = tuple[Callable[..., None], tuple[Any, ...]]

_OTHER_INPUT: Final = "before the retry its call landed"


class Outside:
    """The world outside and those who speak for it, in one schedule.

    Args:
        dice: decide.
        database: the runs' rows.
        facts: what happened, counted.
        say: tells a line of the story.
        clock: a worker's idea of the time.
        obey: carries out what a host's driver asks for.
        history: of a run.
    """

    def __init__(
        self,
        dice: random.Random,
        database: Database,
        facts: Counter[str],
        *,
        settings: Settings,
        say: Callable[[Row | None, str], None],
        clock: Callable[[Worker], int],
        obey: Callable[[Host], None],
        history: Callable[[Row], History],
    ) -> None:
        self.world = World()
        self.dice, self.database, self.facts = dice, database, facts
        self.settings = settings
        self._say, self._clock, self._obey, self._history = say, clock, obey, history

    # ------------------------------------------------------------------ events

    def events(self) -> list[Event]:
        """Of calls on their way, whoever made them."""
        return [(self.drift, (call,)) for call in self.world.floating()]

    def events_of(self, host: Host, chaos: bool) -> list[Event]:
        """Of one host."""
        if host.driver.phase is not Phase.ACTIVE:
            return []
        events: list[Event] = [(self.tell_unbegun, (host, key)) for key in sorted(host.unbegun)]
        events += [(self.answer, (host, key)) for key in host.asking]
        events += [(self.observe, (host, key)) for key, body in host.bodies.items() if body.made and body.seen < 2]
        if host.worker.draining:
            events += [(self.put_back, (host, key)) for key in host.postponed]
            if chaos:
                events += [(self.stop_asking, (host, key)) for key in host.asking]
        return events

    def drift(self, call: Call) -> None:
        """A call on its way arrives, or is lost."""
        draw = self.dice.random()
        if draw < 0.6:
            self.facts["calls that landed on their own"] += 1
            self._say(self.database.rows[call.run], f"the call of {call.key} lands")
            self.world.land(call)
        elif draw < 0.75:
            self._say(self.database.rows[call.run], f"the call of {call.key} is lost")
            call.landed = False

    def tell_unbegun(self, host: Host, key: str) -> None:
        """A body never began."""
        self._say(host.row, f"{host.worker.name}: body of {key} never began")
        host.unbegun.discard(key)
        host.driver.body_unbegun(key, self._clock(host.worker))
        self._obey(host)

    def put_back(self, host: Host, key: str) -> None:
        """A body whose start was put off does not begin in a drain."""
        del host.postponed[key]
        host.unbegun.add(key)

    def withdraw(self, host: Host, key: str) -> None:
        """The code has given up a call: a body that has not begun does not begin."""
        self._say(host.row, f"{host.worker.name}: {key} is withdrawn")
        began = key in host.bodies
        self.facts[f"withdrawn {'too late' if began else 'in time'}"] += 1
        if host.postponed.pop(key, None) is not None:
            host.unbegun.add(key)

    def observe(self, host: Host, key: str) -> None:
        """A body tells an identifier."""
        body = host.bodies[key]
        body.seen += 1
        now = self._clock(host.worker)
        seen = Observation(key, body.attempt, "ticket", str(self.dice.randrange(1_000)), now)
        self._say(host.row, f"{host.worker.name}: body of {key} observes {seen.id}")
        self.facts["observations"] += 1
        host.told.setdefault(key, []).append(seen)
        host.driver.observe(seen, now)
        self._obey(host)

    # ------------------------------------------------------------------ reconcilers

    def ask(self, host: Host, action: Reconcile) -> None:
        """A reconciler is asked: its answer comes later."""
        key = action.call.key
        self._say(host.row, f"{host.worker.name}: what became of attempt {action.attempt} of {key}?")
        self.facts["reconcilers asked"] += 1
        if host.worker.draining:
            raise Mismatch(f"a reconciler of {key} is asked in a run that drains")
        if action.call.reconcile is None:
            raise Mismatch(f"{key} has no reconciler")
        if host.row.token == host.run.token:
            self.check_observed(host, key)
            stands = host.row.intents.get((key, action.attempt))
            if stands is None or stands.written_at > action.written_at:
                raise Mismatch(f"a reconciler is asked about attempt {action.attempt} of {key}, the row is {stands}")
            if stands.input != action.call.input.text or stands.idempotency_key != action.call.idempotency_key:
                raise Mismatch(f"a reconciler of {key} is asked about another call than that of {stands}")
        self._check_begun(host, key, action.attempt)
        host.asking[key] = action

    def answer(self, host: Host, key: str) -> None:
        """A reconciler answers: the truth, or nothing."""
        action = host.asking.pop(key)
        call, attempt, row = action.call, action.attempt, host.row
        intent = row.intents[key, attempt]
        if self.dice.random() < 0.2:
            answer = Answer(IntentState.UNKNOWN, None, "nobody answers the phone")
            self.world.unsaid.add((row.id, key, attempt))
        else:
            value = self.world.ask(row.id, intent)
            if value is None:
                answer = Answer(IntentState.NOT_LANDED)
            else:
                result = None if call.compensates is not None else value
                outcome = result_outcome(call.info, result, action.written_at, self.settings)
                outcome.call_state = IntentState.LANDED
                self._history(row).landed.add((key, outcome.output or ""))
                answer = Answer(IntentState.LANDED, outcome)
        self._say(row, f"{host.worker.name}: a reconciler says attempt {attempt} of {key} is {answer.state}")
        self.facts[f"reconcilers said {answer.state}"] += 1
        host.driver.reconciled(key, attempt, answer, self._clock(host.worker))
        self._obey(host)

    def stop_asking(self, host: Host, key: str) -> None:
        """A drain gives the question up."""
        del host.asking[key]
        self._say(host.row, f"{host.worker.name}: the question about {key} is given up")
        host.driver.reconcile_stopped(key, self._clock(host.worker))
        self._obey(host)

    # ------------------------------------------------------------------ a person's word

    def may_resolve(self, row: Row) -> list[Intent]:
        """Calls that a person may have a word on."""
        if row.state is State.HELD:
            return in_doubt(row)
        if row.state is State.RUNNING:
            return []
        return [
            i for i in row.intents.values() if not i.resolved and i.state in (IntentState.OPEN, IntentState.UNKNOWN)
        ]

    def resolve(self, row: Row, intent: Intent, now: int) -> None:
        """A person says what became of a call: the truth, that nobody knows, or something that does not fit."""
        draw, key = self.dice.random(), intent.key
        undoing, by_hand = key.startswith("~undo:"), False
        word, value = "landed", "null"
        if draw < 0.12:
            word = "fail"
        elif draw < 0.22 and not undoing and "odd" not in key:
            value = '"no number"'
        else:
            said = None
            if intent.effect in (Effect.IDEMPOTENT, Effect.IRREVERSIBLE):
                said = self.world.ask(row.id, intent)
            if said is not None:
                value = "null" if undoing else str(said)
            elif undoing and self.dice.random() < 0.4:
                by_hand = True
            else:
                word = "not_landed"
        if not self.database.resolve(row, intent, word, value, now):
            self.facts["words refused"] += 1
            return
        self._say(row, f"a person says of attempt {intent.attempt} of {key}: {word} {value}, by hand: {by_hand}")
        self.facts[f"words {word}"] += 1
        if word == "fail":
            self._history(row).failed.add(key)
        elif word == "landed":
            self._history(row).landed.add((key, value))
        if by_hand:
            self.world.by_hand.add((row.id, key))

    # ------------------------------------------------------------------ what must hold

    def check_start(self, host: Host, action: StartBody) -> Call | None:
        """A body that makes a call begins under a committed intent and a valid lease; it knows what was observed before."""
        row, call = host.row, action.call
        if call.effect is None:
            return None
        if row.token != host.run.token:
            raise Mismatch(f"the body of {call.key} makes a call after its worker has lost the lease")
        self.check_observed(host, call.key)
        if call.has_intent:
            stands = row.intents.get((call.key, action.attempt))
            if stands is None or stands.state != IntentState.OPEN:
                raise Mismatch(f"attempt {action.attempt} of {call.key} is made, its intent is {stands}")
            if stands.idempotency_key != call.idempotency_key or stands.input != call.input.text:
                raise Mismatch(f"attempt {action.attempt} of {call.key} is not the call of its intent {stands}")
            if action.written_at is None or stands.written_at > action.written_at:
                raise Mismatch(f"{call.key} is told that its intent is of {action.written_at}, it is {stands}")
        before = [e for e in row.entries if e.key == call.key and e.kind == Kind.STEP]
        if before and before[-1].outcome == Outcome.OK:
            raise Mismatch(f"{call.key} is made with {call.input.text}, it landed with {before[-1].input}")
        at = call.key, action.attempt
        new = action.attempt == 1 and at in host.wrote  # else an idempotent one runs again so that its outcome is known
        if call.abandoned and call.has_intent and (new or call.effect is Effect.IRREVERSIBLE):
            raise Mismatch(f"attempt {action.attempt} of {call.key} is made, the code has given it up")
        host.begun.add(at)
        self.facts[f"calls {call.effect}"] += 1
        return self.world.begin(row.id, call, action.attempt, self.dice.randrange(1_000))

    def check_observed(self, host: Host, key: str) -> None:
        """All committed observations are seen, and those of earlier tries here."""
        seen = host.driver.observed(key)
        told = [*(o for o in host.row.observations if o.key == key), *host.told.get(key, ())]
        lost = [o.id for o in told if (o.kind, o.id) not in seen]
        if lost:
            raise Mismatch(f"{key} does not see what was observed: {lost}, only {seen}")

    def check_commit(self, row: Row, unit: Unit, host: Host) -> None:
        """What was observed by a body is committed with its outcome at the latest; the world agrees with what is said."""
        self.world.check_commit(row, unit)
        for entry in unit.entries:
            for seen in host.told.get(entry.key, ()):
                if entry.kind == Kind.STEP and seen not in row.observations:
                    raise Mismatch(f"entry {entry.seq} ({entry.key}) is committed, what its body observed is not")

    def may_hold(self, host: Host, unit: Unit) -> bool:
        """Whether a run is held for a call in doubt, after who could be asked was asked."""
        row = host.row
        if row.token != host.run.token:
            return True  # another claim has gone on meanwhile: it will be refused
        if _OTHER_INPUT in getattr(unit.change, "reason", "") and host.run.rewinds:
            self.facts["held: landed with another input"] += 1
            return True
        doubts = {(i.key, i.attempt) for i in row.intents.values() if i.state == IntentState.UNKNOWN and not i.resolved}
        doubts |= {(i.key, i.attempt) for i in unit.intents if i.state == IntentState.UNKNOWN}
        for closing in unit.closings:
            at = closing.key, closing.attempt
            doubts.discard(at)
            if closing.state == IntentState.UNKNOWN and not closing.resolved:
                doubts.add(at)
                self._check_begun(host, *at)
                self._check_doubt(host, host.watched.open.get(closing.key), closing.attempt, closing.evidence or "{}")
        self.facts["held in doubt"] += 1
        return bool(doubts)

    def _check_begun(self, host: Host, key: str, attempt: int) -> None:
        """Nobody is asked about a call that this worker knows not to have begun."""
        if (key, attempt) in host.wrote - host.begun:
            raise Mismatch(f"attempt {attempt} of {key} is in doubt, and never began")

    def _check_doubt(self, host: Host, call: CallStep | None, attempt: int, evidence: str) -> None:
        if call is None or call.reconcile is None or call.compensates is not None:
            return
        known = json.loads(evidence)
        if host.row.intents[call.key, attempt].input != call.input.text:
            return  # it would be asked about another call
        if "misfit" in known or "NotJournalable" in evidence or "cannot journal" in evidence:
            return
        if (host.row.id, call.key, attempt) not in self.world.unsaid:
            raise Mismatch(f"a person is asked about {call.key}, its reconciler was not: {evidence}")


def driver_asks(driver: Driver) -> set[str]:
    """Keys of calls that a driver waits to be told about."""
    return set(driver._effects.asking)
