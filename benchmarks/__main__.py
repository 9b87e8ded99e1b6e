"""`make bench`: must, goal and measured for every figure of the design; exits 1 if a must is missed.

Ratios are taken within one run on one server, as the median of alternating pairs, because machines are noisy.
`--quick` measures less of everything, to see that it works. `--layers` looks where the time goes, for the goals that it decides
about. `--markdown` prints the table as docs/performance.md has it, `--record` (`make bench RECORD=1`) writes it there, with the
machine and the day, and the layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import layers
from benchmarks.server import ROOT, database, run_part, scratch, server

console = Console()
BEGIN = "<!-- make bench RECORD=1 writes {} from here -->"
END = "<!-- to here -->"


@dataclass
class Row:
    """One figure. `met` and `reached` say whether the must and the goal hold."""

    figure: str
    must: str
    goal: str
    measured: str
    met: bool | None
    reached: bool | None


@dataclass
class Sizes:
    """How much is measured."""

    pairs: int = 5
    steps: int = 50
    single: int = 500
    short_runs: int = 5_000
    replay: int = 50_000
    waiting: int = 100_000
    killed: int = 1_000
    cancelled: int = 100
    kills: int = 5
    effects: int = 1_000
    wide: int = 10_000
    long: int = 100_000
    stored: int = 5_000


QUICK = Sizes(
    pairs=1,
    steps=20,
    single=100,
    short_runs=1_000,
    replay=10_000,
    waiting=5_000,
    killed=100,
    cancelled=20,
    kills=2,
    effects=100,
    wide=500,
    long=2_000,
    stored=500,
)


def one(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The only line."""
    (row,) = rows
    return row


def throughput(dsn: str, sizes: Sizes) -> list[Row]:
    """Steps a second with many runs, and the time of a step in one run, both over a bare INSERT."""
    many: list[float] = []
    single: list[float] = []
    statement: list[float] = []
    seen: list[tuple[float, float, float]] = []
    for n in range(sizes.pairs):
        raw = one(run_part("peers", "raw-single", scratch(dsn, f"raw_{n}")))
        fast = one(run_part("throughput", database(dsn, f"many_{n}"), "100", str(sizes.steps)))
        raw_again = one(run_part("peers", "raw-single", scratch(dsn, f"raw_{n}b")))
        alone = one(run_part("throughput", database(dsn, f"one_{n}"), "1", str(sizes.single)))
        entries = one(run_part("statement", database(dsn, f"statement_{n}"), str(sizes.single)))
        many.append(fast["steps_per_s"] / raw["steps_per_s"])
        single.append(alone["ms_per_step"] / raw_again["ms_per_step"])
        statement.append(raw_again["steps_per_s"] / entries["entries_per_s"])
        seen.append((fast["steps_per_s"], alone["ms_per_step"], raw["steps_per_s"]))
    a, b = statistics.median(many), statistics.median(single)
    steps, ms, raw_rate = (statistics.median(column) for column in zip(*seen, strict=True))
    return [
        Row(
            "durable steps/s, 100 runs, over raw-single",
            "4x",
            "8x",
            f"{a:.1f}x ({steps:,.0f}/s over {raw_rate:,.0f}/s)",
            a >= 4,
            a >= 8,
        ),
        Row("one run, ms a step over raw-single", "2.0x", "1.5x", f"{b:.2f}x ({ms:.3f} ms)", b <= 2.0, b <= 1.5),
        Row(
            "the statement of one entry, alone, over raw-single",
            "",
            "",
            f"{statistics.median(statement):.2f}x",
            None,
            None,
        ),
    ]


def replay(_: str, sizes: Sizes) -> list[Row]:
    """Replay in process."""
    rate = max(one(run_part("replay", str(sizes.replay)))["steps_per_s"] for _ in range(2))
    return [
        Row(
            "replay, steps/s, decode and digest included",
            "100,000",
            "200,000",
            f"{rate:,.0f}",
            rate >= 100_000,
            rate >= 200_000,
        )
    ]


def short_runs(dsn: str, sizes: Sizes) -> list[Row]:
    """Runs of three steps, started before."""
    rates = [
        one(run_part("throughput", database(dsn, f"short_{n}"), str(sizes.short_runs), "3"))["runs_per_s"]
        for n in range(min(3, sizes.pairs))
    ]
    rate = statistics.median(rates)
    return [
        Row(
            "3-step runs/s, claimed and finished by one process",
            "2,000",
            "5,000",
            f"{rate:,.0f}",
            rate >= 2_000,
            rate >= 5_000,
        )
    ]


def waiting(dsn: str, sizes: Sizes) -> list[Row]:
    """What waiting runs cost."""
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "worker.log")
        few, many = run_part("waiting", database(dsn, "waiting"), str(sizes.waiting), log, timeout=1_800)
    grown = many["rss_mb"] - few["rss_mb"]
    more = many["buffers"] / few["buffers"] - 1
    # A claim updates its rows, and an index of a hundred times the rows is one level deeper: "equal" is within a tenth.
    met = grown <= 20 and more <= 0.10
    measured = f"RSS {grown:+.1f} MB, buffers {few['buffers']} -> {many['buffers']} for a claim of 100"
    figure = f"waiting runs, {few['waiting']:,} to {many['waiting']:,}: worker RSS, buffers of a claim"
    reached = met if many["waiting"] >= 1_000_000 else None
    return [Row(figure, "+20 MB, equal", "same at 1,000,000", measured, met, reached)]


def recovery(dsn: str, sizes: Sizes) -> list[Row]:
    """How soon runs go on after kill -9."""
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "worker.log")
        child = one(run_part("recovery", "child", database(dsn, "child"), str(sizes.killed), "30", log))
        whole = one(run_part("recovery", "worker", database(dsn, "worker"), str(min(sizes.killed, 200)), "3", log))
    resumed = child["first_entry_s"] - child["body_s"]
    late = whole["first_entry_s"] - whole["body_s"]
    lease = whole["lease_seconds"]
    return [
        Row(
            f"kill -9 of a child, {sizes.killed:,} runs in flight: first resumed, all finish",
            "1 s",
            "0.2 s",
            f"{resumed:.2f} s, all finished: {child['all_finished']}",
            resumed <= 1 and child["all_finished"],
            resumed <= 0.2,
        ),
        Row(
            "kill -9 of a whole worker, another alive: first resumed",
            "lease + 1 s",
            "same",
            f"lease {late - lease:+.2f} s, all finished: {whole['all_finished']}",
            late <= lease + 1 and whole["all_finished"],
            late <= lease + 1,
        ),
    ]


def cancelling(dsn: str, sizes: Sizes) -> list[Row]:
    """How soon a run in memory is told to end."""
    found = one(run_part("cancelling", database(dsn, "cancelling"), str(sizes.cancelled)))
    median, longest = found["median_ms"], found["longest_ms"]
    return [
        Row(
            "cancel of a running run, commit to its CancelledError",
            "250 ms",
            "10 ms",
            f"{median:.1f} ms, longest of {sizes.cancelled}: {longest:.1f} ms",
            longest <= 250,
            median <= 10,
        )
    ]


def durability(dsn: str, sizes: Sizes) -> list[Row]:
    """What handing results on before their commit saves, and what it can lose."""
    found = one(run_part("durability", database(dsn, "durability"), str(sizes.single), str(sizes.kills), timeout=600))
    faster, again = found["dear"] / found["cheap"], found["bodies"] - found["recorded"]
    lost = again / found["kills"]
    return [
        Row(
            'one run, durability="async": steps over sync ones',
            "1.5x",
            "3x",
            f"{faster:.1f}x ({found['cheap'] * 1_000:.0f} us a step over {found['dear'] * 1_000:.0f} us)",
            faster >= 1.5,
            faster >= 3,
        ),
        Row(
            "the same, kill -9: steps that run again",
            "1,000 a kill",
            "100 a kill",
            f"{lost:.0f} a kill, of {found['recorded']:,} steps and {found['kills']} kills",
            lost <= 1_000,
            lost <= 100,
        ),
    ]


def effects(dsn: str, sizes: Sizes) -> list[Row]:
    """What intents cost."""
    found = one(run_part("effects", database(dsn, "effects"), str(sizes.effects), str(sizes.pairs), timeout=600))
    ratio, ten, twenty = found["ratio"], found["ten_with_intents"], found["twenty_plain"]
    return [
        Row(
            "runs of 10 idempotent steps over runs of 20 plain ones, 100 at once",
            "0.6x",
            "1x",
            f"{ratio:.2f}x ({ten:,.0f} over {twenty:,.0f} runs/s)",
            ratio >= 0.6,
            ratio >= 1,
        )
    ]


def scale(dsn: str, sizes: Sizes) -> list[Row]:
    """What many of something cost; no must."""
    wide = one(run_part("scale", database(dsn, "wide"), "fan-out", str(sizes.wide)))
    long = one(run_part("scale", database(dsn, "long"), "journal", str(sizes.long), timeout=1_800))
    many = one(run_part("scale", database(dsn, "concurrent"), "concurrent", str(sizes.killed)))
    more = one(run_part("scale", database(dsn, "processes"), "processes", "4"))
    size = one(run_part("scale", database(dsn, "bytes"), "bytes", str(sizes.stored)))
    alone, four = more["steps_per_s_1"], more["steps_per_s_4"]
    figures = {
        f"one run that gathers {wide['steps']:,} steps": f"{wide['seconds']:.1f} s, {wide['grown_mb']:+.0f} MB",
        f"a journal of {long['entries']:,} entries claimed by a fresh process": f"{long['seconds']:.1f} s, "
        f"{long['grown_mb']:+.0f} MB",
        f"{many['runs']:,} runs in memory at once": f"{many['kb_a_run']:.0f} KB a run ({many['grown_mb']:+.0f} MB)",
        "4 worker processes over one, 200 runs": f"{four / alone:.1f}x ({four:,.0f} over {alone:,.0f} steps/s)",
        "WAL a step, one run, 100 runs": f"{size['wal_1']:,.0f}, {size['wal_100']:,.0f} bytes",
        "journal and its index a step, one run, 100 runs": f"{size['stored_1']:,.0f}, {size['stored_100']:,.0f} bytes",
    }
    return [Row(figure, "", "", measured, None, None) for figure, measured in figures.items()]


def peers(dsn: str, _: Sizes) -> list[Row]:
    """The peers in the same run; no must, but what the figures stand beside."""
    python = ROOT / ".venv-peers" / "bin" / "python"
    rows: list[Row] = []
    raw = one(run_part("peers", "raw-single", scratch(dsn, "raw_peers")))
    batch = one(run_part("peers", "raw-batch", scratch(dsn, "batch_peers")))
    ours = {
        runs: one(run_part("throughput", database(dsn, f"beside_{runs}"), str(runs), str(steps)))
        for runs, steps in ((1, 200), (100, 20))
    }
    rows.append(
        Row(
            "raw-batch (100 rows an INSERT) over raw-single",
            "",
            "",
            f"{batch['steps_per_s'] / raw['steps_per_s']:.1f}x",
            None,
            None,
        )
    )
    for peer in ("dbos", "absurd"):
        if not python.exists():
            rows.append(Row(f"{peer}: not installed here (make bench makes .venv-peers)", "", "", "", None, None))
            continue
        try:
            found = run_part("peers", peer, scratch(dsn, f"peer_{peer}"), python=str(python), timeout=180)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            rows.append(Row(f"{peer}: did not run ({str(error).splitlines()[-1][:60]})", "", "", "", None, None))
            continue
        for line in found:
            mine = ours[line["runs"]]["steps_per_s"]
            text = f"{mine / line['steps_per_s']:.1f}x ({mine:,.0f} over {line['steps_per_s']:,.0f} steps/s)"
            rows.append(Row(f"replaykit over {peer}, {line['runs']} run(s)", "", "", text, None, None))
    return rows


PARTS: dict[str, Callable[[str, Sizes], list[Row]]] = {
    "throughput": throughput,
    "replay": replay,
    "short": short_runs,
    "recovery": recovery,
    "waiting": waiting,
    "cancelling": cancelling,
    "durability": durability,
    "effects": effects,
    "scale": scale,
    "peers": peers,
}


WORDS = {True: "yes", False: "NO", None: ""}


def as_markdown(rows: list[Row]) -> str:
    """The table as docs/performance.md has it."""
    lines = ["| figure | must | goal | measured | must met | goal reached |", "|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(f"| {r.figure} | {r.must} | {r.goal} | {r.measured} | {WORDS[r.met]} | {WORDS[r.reached]} |")
    return "\n".join(lines)


def machine() -> str:
    """What these figures are of: processor, cores, system, Python, day."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?"
    )
    name = next((line.partition("=")[2].strip('"') for line in _lines("/etc/os-release") if "PRETTY_NAME" in line), "?")
    python = platform.python_version()
    today = datetime.date.today().isoformat()
    return f"Measured by `make bench RECORD=1` on {today}: {os.cpu_count()} cores of {cpu}, {name}, Python {python}."


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def profile(dsn: str) -> str:
    """Where the time goes, as a table."""
    found: dict[str, dict[str, float]] = {}
    for name, scene in layers.SCENES.items():
        print(f"looking at {scene.title} ...", file=sys.stderr, flush=True)
        arguments = [database(dsn, f"layers_{name}")] if scene.has_database else []
        found[name] = run_part("layers", name, *arguments)[-1]
    return layers.as_markdown(found)


def record(texts: dict[str, str]) -> None:
    """Put each text into docs/performance.md, between its marks."""
    page = ROOT / "docs" / "performance.md"
    text = page.read_text(encoding="utf-8")
    for what, written in texts.items():
        before, begin, rest = text.partition(BEGIN.format(what))
        _, end, after = rest.partition(END)
        text = f"{before}{begin}\n\n{written}\n\n{end}{after}"
    page.write_text(text, encoding="utf-8")


def show(rows: list[Row], markdown: bool) -> None:
    """The table."""
    if markdown:
        print(as_markdown(rows))
        return
    table = Table("figure", "must", "goal", "measured", "must met", "goal reached", title="replaykit benchmarks")
    for r in rows:
        table.add_row(
            r.figure,
            r.must,
            r.goal,
            r.measured,
            WORDS[r.met],
            WORDS[r.reached],
            style="red" if r.met is False else None,
        )
    console.print(table)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="measure less of everything")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone (may be given several times)")
    parser.add_argument(
        "--waiting", type=int, metavar="N", help="so many waiting runs; for the goal 1,000,000, 10 minutes"
    )
    parser.add_argument("--layers", action="store_true", help="the layers alone (with --record: written, too)")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    parser.add_argument("--record", action="store_true", help="write the table into docs/performance.md")
    options = parser.parse_args()
    if options.record and (options.quick or options.only):
        parser.error("--record writes the whole table, as measured: not with --quick or --only")
    sizes = QUICK if options.quick else Sizes()
    if options.waiting:
        sizes = dataclasses.replace(sizes, waiting=options.waiting)
    rows: list[Row] = []
    texts: dict[str, str] = {}
    with server() as dsn:
        for name, part in PARTS.items():
            if options.layers or (options.only and name not in options.only):
                continue
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            rows += part(dsn, sizes)
        if options.layers or options.record:
            texts["layers"] = profile(dsn)
    if options.layers:
        print(texts["layers"])
    else:
        show(rows, options.markdown)
        texts["figures"] = f"{as_markdown(rows)}\n\n{machine()}"
    if options.record:
        record(texts)
    missed = [r.figure for r in rows if r.met is False]
    if missed and not options.quick:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
