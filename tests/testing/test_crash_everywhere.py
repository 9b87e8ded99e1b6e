"""`crash_everywhere` finds a planted bug of each kind, passes its clean twin, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from replaykit import Landed, NotLanded, Workflow, testing, workflow
from replaykit.errors import ConfigurationError, DatabaseUnreachable
from replaykit.testing import Doubt, Nursery, count_effect, crash_everywhere, effects_counted
from replaykit.testing.counting import Effect, tally
from replaykit.testing.crash_report import Crash, CrashReport, Difference, Ran, differences, facts, varying
from tests.proof import planted
from tests.proof.own_flows import sends_unasked
from tests.runtime.facts import eventually, lives
from tests.testing import crash_victims

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """For all tests of this file but those that look at processes."""
    with Nursery() as made:
        yield made


PLANTED: list[tuple[Workflow[..., Any], str]] = [
    (planted.keeps_state, "next_number#2: its output is 1, in a clean run 2"),
    (planted.acts_itself, "'mail' happened 2 times, in a clean run 1, by the workflow's own code"),
    (planted.draws, "add#2 was called with one input before the kill and with another after it"),
    (
        planted.charges,
        "'charge' happened 2 times, in a clean run 1, in step charge, whose body ran again: declare its effect=",
    ),
    (planted.walks_a_set, "the run is held, a clean one succeeded: step add"),
]


@pytest.mark.parametrize(("bug", "sentence"), PLANTED, ids=[bug.name for bug, _ in PLANTED])
def test_a_planted_bug_is_found(bug: Workflow[..., Any], sentence: str, dsn: str, nursery: Nursery) -> None:
    """And told in a sentence, with where the kill was that shows it."""

    report = crash_everywhere(bug, dsn=dsn, nursery=nursery)

    assert not report.ok
    with pytest.raises(AssertionError) as told:
        report.raise_if_not_ok()
    assert sentence in str(told.value)
    assert "killed before commit" in str(told.value) or "killed after commit" in str(told.value)


def test_what_chance_decides_is_found_though_no_two_clean_runs_agree(dsn: str, nursery: Nursery) -> None:
    """A single kill may meet the same throw of the dice again: there are five of each."""

    report = crash_everywhere(planted.decides_by_chance, dsn=dsn, nursery=nursery)

    assert not report.ok
    if any(path.startswith("journal.way-") for path in report.ignored):  # but for one time in sixteen
        assert sum(crash.commit == 1 and crash.side == "after" for crash in report.crashes) == 5
        assert any("way-" in (crash.held or "") for crash in report.crashes)


def test_what_a_run_leaves_in_its_process_for_the_next_is_found(dsn: str, nursery: Nursery) -> None:
    """No kill shows it: a process that takes over is as new as a first one. So one executes two runs."""

    report = crash_everywhere(planted.remembers, "ann", dsn=dsn, nursery=nursery)

    assert [(crash.commit, crash.kills) for crash in report.crashes if crash.differences] == [(0, 0)]
    assert str(report).splitlines()[:3] == [
        "remembers: killed 4 times at 2 commits: 1 of 5 runs comes to another end",
        "  look_up has no entry, which it has in a clean run",
        "      killed never, in a process that had executed a run of it before",
    ]
    crash_everywhere(planted.looks_up, "ann", dsn=dsn, nursery=nursery).raise_if_not_ok()


def test_what_one_run_counts_is_not_counted_for_the_next_of_its_process(dsn: str, nursery: Nursery) -> None:
    """Neither for the report nor for a reconciler."""

    report = crash_everywhere(crash_victims.pays_once, dsn=dsn, nursery=nursery)

    report.raise_if_not_ok()
    assert report.commits == ("intent of pay", "pay, the end")


TWINS: list[Workflow[..., Any]] = [
    planted.tells_state,
    planted.acts_in_step,
    planted.draws_from_run,
    planted.decides_by_run,
    planted.charges_by_key,
    planted.walks_in_order,
]


@pytest.mark.parametrize("twin", TWINS, ids=[twin.name for twin in TWINS])
def test_its_clean_twin_passes(twin: Workflow[..., Any], dsn: str, nursery: Nursery) -> None:
    """Killed on both sides of each commit."""

    report = crash_everywhere(twin, dsn=dsn, nursery=nursery)

    report.raise_if_not_ok()
    assert report.killed == 2 * len(report.commits)
    assert f"killed {report.killed} times at {len(report.commits)} commits: always the same end" in str(report)


def test_what_ran_again_is_told_with_its_commit(dsn: str, nursery: Nursery) -> None:
    """A body whose entry was not committed runs again; one whose entry stands does not."""

    report = crash_everywhere(planted.charges_by_key, dsn=dsn, nursery=nursery)

    assert report.commits == ("intent of charge_by_key", "charge_by_key", "add, the end")
    again = {(crash.commit, crash.side): crash.repeated for crash in report.crashes if crash.repeated}
    assert again == {(2, "before"): ("charge_by_key",), (3, "before"): ("add",)}
    assert report.repeated == {"charge_by_key": 1, "add": 1}


def test_the_process_that_takes_over_may_be_killed_as_well(dsn: str, nursery: Nursery) -> None:
    """At its own first commit; a third one goes on."""

    report = crash_everywhere(planted.charges_by_key, dsn=dsn, nursery=nursery, twice=True)

    report.raise_if_not_ok()
    assert [crash.kills for crash in report.crashes] == [2, 2, 2, 2, 2, 1]  # after the last commit nobody takes over


def test_one_side_and_ignored_steps(dsn: str, nursery: Nursery) -> None:
    """What is not asked for is not done, and what is ignored makes no difference."""

    report = crash_everywhere(
        planted.keeps_state, dsn=dsn, nursery=nursery, kill=["after"], ignore=["next_number*", "result"]
    )

    assert report.ok
    assert {crash.side for crash in report.crashes} == {"after"}
    assert "not compared: next_number*, result" in str(report)


def test_a_step_that_runs_ahead_of_the_journal_may_ask_otherwise_after_a_kill(dsn: str, nursery: Nursery) -> None:
    """What it had asked with was in no journal, and nobody else has seen it."""

    report = crash_everywhere(crash_victims.runs_ahead, dsn=dsn, nursery=nursery)

    report.raise_if_not_ok()
    assert "quick" in report.repeated


def test_an_input_of_the_process_is_told_unless_its_step_is_ignored(dsn: str, nursery: Nursery) -> None:
    """By what it is asked with before the kill and after it."""

    told = crash_everywhere(crash_victims.asks_with_process, dsn=dsn, nursery=nursery)
    ignored = crash_everywhere(crash_victims.asks_with_process, dsn=dsn, nursery=nursery, ignore=["qui*", "result"])

    assert "quick was called with one input before the kill and with another after it" in str(told)
    ignored.raise_if_not_ok()


def test_a_workflow_that_fails_without_a_kill_as_well_is_told_so(dsn: str, nursery: Nursery) -> None:
    """It may be meant, and it may be why nothing is found."""

    report = crash_everywhere(crash_victims.fails, dsn=dsn, nursery=nursery)

    assert (report.ok, report.end) == (True, "failed: builtins.ValueError: no such order")
    assert str(report).splitlines()[0].endswith("always the same end, failed: builtins.ValueError: no such order")
    assert crash_everywhere(planted.looks_up, "ann", dsn=dsn, nursery=nursery).end == "succeeded"


def test_arguments_a_lifespan_and_effects_of_ones_own(dsn: str, nursery: Nursery, tmp_path: Path) -> None:
    """The processes get what a worker gets; what the caller counts is compared."""
    asked: list[UUID] = []

    def lines(run: UUID) -> dict[str, int]:
        asked.append(run)
        return {"lines": (tmp_path / str(run)).read_text().count("\n")}

    options: Any = {"dsn": dsn, "nursery": nursery, "effects": lines, "lifespan": crash_victims.lifespan}
    report = crash_everywhere(crash_victims.writes, str(tmp_path), kwargs={"word": "there"}, **options)

    assert {crash.run_id for crash in report.crashes} <= set(asked)
    words = [difference.words for crash in report.crashes for difference in crash.differences]
    assert words == ["effects= lines says 2, of a clean run 1"]


def test_a_call_in_doubt_is_a_difference_unless_a_person_is_asked(dsn: str, nursery: Nursery) -> None:
    """The sentence names the step, and both ways out."""
    doubts: list[Doubt] = []

    def word(doubt: Doubt) -> Landed[Any] | BaseException:
        doubts.append(doubt)
        return (
            Landed("sent one" if doubt.key == "send_unasked" else "sent two") if doubt.counted("send") else NotLanded()
        )

    held = crash_everywhere(sends_unasked, False, dsn=dsn, nursery=nursery)
    asked = crash_everywhere(sends_unasked, False, dsn=dsn, nursery=nursery, resolve=word)

    assert "the run waits for a person: send_unasked may or may not have happened; give it reconcile=" in str(held)
    assert {crash.held is None for crash in held.crashes if crash.differences} == {False}
    asked.raise_if_not_ok()
    assert "asked a person: send_unasked (2), send_unasked#2 (2)" in str(asked)
    assert {doubt.counted("send") for doubt in doubts} == {0, 1}
    assert all(len(doubt.idempotency_key) == 32 for doubt in doubts)


def test_a_run_that_is_held_for_another_reason_says_so_though_a_call_is_open(dsn: str, nursery: Nursery) -> None:
    """Nobody is asked for a word: that would not help it."""
    asked: list[Doubt] = []

    def word(doubt: Doubt) -> NotLanded:
        asked.append(doubt)
        return NotLanded()

    report = crash_everywhere(
        crash_victims.diverges_beside_a_call, dsn=dsn, nursery=nursery, resolve=word, kill=["after"]
    )

    first = report.crashes[1]
    assert first.what == "quick"
    assert [d.words.split(":")[0] for d in first.differences] == ["the run is held, a clean one succeeded"]
    assert first.run_id not in {doubt.run_id for doubt in asked}


# ------------------------------------------------------------------ what cannot be tested


def test_a_workflow_that_no_other_process_finds_is_refused_in_a_sentence(dsn: str, nursery: Nursery) -> None:
    """It is defined in a function, or its module does not import."""

    @workflow
    async def hidden() -> None: ...

    with pytest.raises(ConfigurationError, match="no workflow 'hidden' in tests"):
        crash_everywhere(hidden, dsn=dsn, nursery=nursery, module="tests.testing.test_crash_everywhere")
    with pytest.raises(ConfigurationError, match="there is no module 'nowhere_at_all'"):
        crash_everywhere(planted.draws, dsn=dsn, nursery=nursery, module="nowhere_at_all")
    with Nursery() as closed:
        pass
    with pytest.raises(ConfigurationError, match="this Nursery is closed"):
        crash_everywhere(planted.draws, dsn=dsn, nursery=closed)


def test_a_clean_run_that_does_not_end_is_refused_in_a_sentence(dsn: str) -> None:
    """There is nothing to compare with."""

    with pytest.raises(ConfigurationError, match=r"a clean run of waits is still running after 0.5 s, so there"):
        crash_everywhere(crash_victims.waits, "", dsn=dsn, timeout=0.5)
    with pytest.raises(ConfigurationError, match=r"run of ends_process ended its process after leave had begun"):
        crash_everywhere(crash_victims.ends_process, dsn=dsn)
    with pytest.raises(
        ConfigurationError, match=r"(?s)ended its process; its last words:.*RuntimeError: no pool today"
    ):
        crash_everywhere(crash_victims.writes, "", kwargs={"word": ""}, dsn=dsn, lifespan=crash_victims.no_lifespan)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"kill": []}, r"kill= is a list of 'before', 'after' or both, not \[\]"),
    ({"kill": "before"}, "kill= is a list of 'before', 'after' or both, not 'before'"),
    ({"kill": ["beside"]}, "kill= is a list"),
    ({"ignore": "add"}, r"ignore= is a list of step keys, such as \['add'\]"),
    ({"timeout": 0}, "timeout= is seconds, more than 0, not 0"),
    ({"timeout": "5"}, "timeout= is seconds, more than 0, not '5'"),
    ({"jobs": 0}, "jobs= is how many runs at once, 1 at least, not 0"),
    ({"lifespan": lambda: None}, "another process cannot find lifespan="),
]


@pytest.mark.parametrize(("option", "sentence"), OPTIONS, ids=[str(option) for option, _ in OPTIONS[:-1]] + ["lambda"])
def test_an_option_that_says_nothing_is_told(option: dict[str, Any], sentence: str, dsn: str, nursery: Nursery) -> None:
    """At once, before anything runs."""
    with pytest.raises(ConfigurationError, match=sentence):
        crash_everywhere(planted.draws, dsn=dsn, nursery=nursery, **option)


def add_up(number: int) -> Workflow[..., Any]:
    @workflow(name="draws")
    async def adds() -> int:
        return number

    return adds


def test_what_is_no_workflow_of_a_module_is_told(dsn: str, nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another of the same name would be killed in its place."""
    inner = add_up(3)
    monkeypatch.setattr(sys.modules[__name__], "draws", add_up(4), raising=False)

    with pytest.raises(ConfigurationError, match=r"draws does not stand at the top level of .*test_crash_everywhere"):
        crash_everywhere(inner, dsn=dsn, nursery=nursery)
    for nothing in (crash_victims.write, "draws"):
        with pytest.raises(ConfigurationError, match=r"takes a workflow, and .* is none: decorate it with @workflow"):
            crash_everywhere(nothing, dsn=dsn, nursery=nursery)  # type: ignore[arg-type]


def test_a_database_that_goes_away_meanwhile_is_told(dsn: str, nursery: Nursery) -> None:
    """In the words of every other call."""

    with pytest.raises(DatabaseUnreachable, match="the database went away under crash_everywhere"):
        crash_everywhere(crash_victims.ends_connections, dsn, dsn=dsn, nursery=nursery)


# ------------------------------------------------------------------ processes

SCRIPT = """
import sys
from replaykit import testing, workflow, step
from tests.testing import crash_victims

async def double(n: int) -> int:
    testing.count_effect("double", once=True)
    return 2 * n

@workflow
async def doubles(n: int) -> int:
    return await step(double, n)

if __name__ == "__main__":
    if len(sys.argv) > 1:
        testing.crash_everywhere(crash_victims.waits, sys.argv[1], dsn=sys.argv[2])
    print(testing.crash_everywhere(doubles, 3))
"""


UNGUARDED = """
from replaykit import testing, workflow, step

async def double(n: int) -> int:
    return 2 * n

@workflow
async def doubles(n: int) -> int:
    return await step(double, n)

testing.crash_everywhere(doubles, 3, dsn={dsn!r})
"""


def test_a_script_that_calls_it_when_it_is_imported_is_told(tmp_path: Path, dsn: str) -> None:
    """Else its processes would make processes, which would make others."""
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED.format(dsn=dsn), encoding="utf-8")

    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=120)

    assert ran.returncode == 1
    assert 'call it in a test, or below `if __name__ == "__main__":`' in ran.stderr.splitlines()[-1]


def test_a_script_crashes_its_own_workflow_on_a_postgres_of_its_own(tmp_path: Path) -> None:
    """Without a dsn; nothing of it is left."""
    script = tmp_path / "doubling.py"
    script.write_text(SCRIPT, encoding="utf-8")

    ran = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert ran.returncode == 0, ran.stderr
    assert "doubles: killed 2 times at 1 commits: always the same end" in ran.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("replaykit-")] == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_parent(how: signal.Signals, tmp_path: Path, dsn: str) -> None:
    """Whatever ends that, and although a body blocks the event loop."""
    script = tmp_path / "doubling.py"
    script.write_text(SCRIPT, encoding="utf-8")
    pids = tmp_path / "pids"

    parent = subprocess.Popen(
        [sys.executable, script, str(pids), dsn],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    with parent:
        eventually(lambda: pids.exists() and len(pids.read_text().split()) >= 4, "two bodies block")
        parent.send_signal(how)
    everybody = {int(pid) for pid in pids.read_text().split()}

    eventually(lambda: not any(map(lives, everybody)), "all are gone")


# ------------------------------------------------------------------ counting


def test_count_effect_does_nothing_elsewhere() -> None:
    """In production, and in other tests."""

    with testing.step():
        count_effect("charge")
        assert effects_counted("charge") == 0
    with pytest.raises(ConfigurationError, match=r"once=True\) where there is no idempotency key"):
        count_effect("charge", once=True)
    with pytest.raises(ConfigurationError, match=r"effects_counted\('charge'\) outside of a step"):
        effects_counted("charge")


def test_what_is_counted_once_is_counted_once_for_each_key() -> None:
    """Others as often as they happen, for each step."""

    found = tally(
        [
            Effect("charge", "a", "k1", once=True),
            Effect("charge", "a", "k1", once=True),
            Effect("charge", "b", "k2", once=True),
            Effect("mail", "a", "k1"),
            Effect("mail", "a", "k1"),
            Effect("mail"),
        ]
    )

    assert found == Counter({("a", "charge"): 1, ("b", "charge"): 1, ("a", "mail"): 2, (None, "mail"): 1})


# ------------------------------------------------------------------ comparing


def ran(result: str | None, **what: Any) -> Ran:
    return Ran(uuid4(), "succeeded", result=result, **what)


def test_what_two_clean_runs_do_not_agree_on_is_not_compared() -> None:
    """A part of a result alone, or all of a list whose length varies; the rest is."""
    clean, twin = ran('{"at": 1, "n": [1, 2], "drawn": [1]}'), ran('{"at": 2, "n": [1, 2], "drawn": []}')
    vary = varying(facts(clean), facts(twin))

    def told(result: str) -> list[str]:
        return [d.words for d in differences(clean, ran(result), vary=vary, declared={})]

    assert told('{"at": 9, "n": [1, 2], "drawn": [3, 4, 5]}') == []
    assert told('{"at": 9, "n": [1, 3], "drawn": [1]}') == ["the run's result.n.1 is 3, of a clean run 2"]
    assert told('{"at": 9, "n": [1], "drawn": [1]}') == [
        'the run\'s result.n is "a list of 1", of a clean run "a list of 2"'
    ]


def test_an_effect_that_is_missing_or_outside_of_its_declaration_is_told_so() -> None:
    """Each kind of step has a sentence of its own."""
    clean = ran("1", effects=Counter({("pay", "pay"): 1, ("send", "send"): 1, ("book", "mail"): 1}))
    after = ran("1", effects=Counter({("pay", "pay"): 2, ("send", "send"): 2}))
    declared = {"pay": "idempotent", "send": "irreversible", "book": "transactional"}

    words = {d.words for d in differences(clean, after, vary=frozenset(), declared=declared)}

    assert words == {
        "'pay' happened 2 times, in a clean run 1, in step pay, which is declared idempotent: the other side took a second call"
        " of one key for another",
        "'send' happened 2 times, in a clean run 1, in step send, which is declared irreversible: did its reconcile= say that it"
        " had not?",
        "'mail' happened 0 times, in a clean run 1, in step book",
    }


def test_a_report_groups_kills_by_what_they_show() -> None:
    """Three places are named, the others counted."""
    crashes = tuple(
        Crash(uuid4(), n, "before", "add", 1, (), (), None, (Difference(("result",), "it differs"),))
        for n in range(1, 6)
    )

    text = str(CrashReport("adding", ("add",) * 5, crashes, ()))

    assert text.splitlines() == [
        "adding: killed 5 times at 5 commits: 5 of 5 runs come to another end",
        "  it differs",
        "      killed before commit 1 (add), before commit 2 (add), before commit 3 (add) and 2 more",
    ]


def test_the_package_offers_the_function_and_not_a_module_of_its_name() -> None:
    """The package's names are what they say, whichever is asked for first."""

    assert testing.crash_everywhere is crash_everywhere
    assert isinstance(testing.Nursery, type)


# ------------------------------------------------------------------ the page


def test_the_page_on_it_says_what_is(tmp_path: Path, dsn: str) -> None:
    """Its workflow and its test are run as a reader runs them, and the message is the one on the page."""
    page = (ROOT / "docs" / "how-to" / "crash-your-workflows.md").read_text(encoding="utf-8")
    shop, test, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (message,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "shop.py").write_text(shop, encoding="utf-8")
    fixture = f"import pytest\n\n@pytest.fixture\ndef replaykit_dsn():\n    return {dsn!r}\n"
    (tmp_path / "test_shop.py").write_text(f"{fixture}\n{test}", encoding="utf-8")

    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "test_shop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "1 failed" in ran.stdout, ran.stdout + ran.stderr
    assert [line for line in message.splitlines() if line.strip() not in ran.stdout] == []
