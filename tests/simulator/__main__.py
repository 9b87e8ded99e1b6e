"""`python -m tests.simulator --seeds 10000 [--first N] [--jobs 2]`, or `--seed S --trace` for one schedule's story."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.simulator.simulation import play, trace

_CHUNK = 50


def main() -> int:
    """Run the schedules that the command line names; 1 if an invariant is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--trace", action="store_true", help="tell what happened, with a digest of the story")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    if options.seed is not None:
        lines, mismatch = trace(options.seed)
        print("\n".join(lines if options.trace else lines[-1:]))
        return tell(1, [] if mismatch is None else [(options.seed, mismatch)])
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs are at least 1: without a schedule nothing has been found out")
    started = time.perf_counter()
    facts, broken = play_all(options.first, options.seeds, options.jobs)
    seconds = time.perf_counter() - started
    print(", ".join(f"{name}: {count:,}" for name, count in sorted(facts.items())))
    print(f"{seconds:.1f} s, {seconds * 1000 * options.jobs / max(1, options.seeds):.1f} ms a schedule and process")
    return tell(options.seeds, broken)


def play_all(first: int, seeds: int, jobs: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """The schedules `first` to `first + seeds`, shared by `jobs` processes with hash seeds of their own."""
    chunks = [(at, min(_CHUNK, first + seeds - at)) for at in range(first, first + seeds, _CHUNK)]
    if jobs <= 1:
        results = [play(*chunk) for chunk in chunks]
    else:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            results = list(pool.map(play, *zip(*chunks, strict=True)))
    facts: Counter[str] = Counter()
    for happened, _ in results:
        facts += happened
    return facts, [item for _, items in results for item in items]


def tell(seeds: int, broken: list[tuple[int, str]]) -> int:
    """Print the verdict: each mismatch with the command that shows it, the shortest first."""
    for seed, mismatch in sorted(broken, key=lambda item: len(item[1]))[:10]:
        print(f"seed {seed}: {mismatch}\n    python -m tests.simulator --seed {seed} --trace")
    print(f"{seeds} schedules, {len(broken)} mismatches")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
