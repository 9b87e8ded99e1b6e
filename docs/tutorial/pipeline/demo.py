"""`make demo`: run the pipeline over this repository's docs, kill its process half-way, watch another one finish it.

Nothing is faked: a real Postgres, a real worker, real files, real HTTP, a real SIGKILL. The last line counts what the
journal says was published, what the receiver got, and how many different idempotency keys it saw; the exit code is 1 if
they differ.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString, TypeVar

import psycopg
from pipeline import find_documents
from receiver import Receiver

from replaykit.runtime.embedded import EmbeddedPostgres

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1]
PIPELINE = HERE / "pipeline.py"
REPLAYKIT = Path(sys.executable).with_name("replaykit")
PATIENCE_SECONDS = 60.0

T = TypeVar("T")


def main() -> int:
    """Run the demo; the exit code is 0 if every document was published once."""
    documents = len(find_documents(str(DOCS)))
    receiver = Receiver()
    receiver.start()
    with database() as dsn, worker(), psycopg.connect(dsn, autocommit=True) as connection:
        journal = Journal(connection)
        until(lambda: journal.workers() > 0, "a worker")
        say(f"publishing {documents} documents to {receiver.url}")
        started = replaykit("start", "publish_docs", json.dumps(str(DOCS)), json.dumps(receiver.url), "--json")
        run = str(json.loads(started)["id"])

        until(lambda: receiver.received >= documents // 2, "half of the documents")
        killed = [kill_between_two_publishes(journal, receiver, run)]
        until(lambda: journal.state(run) not in {"pending", "running", "waiting"}, "the end of the run")

        print(replaykit("show", run))
        for name, first, last in journal.writers(run):
            say(f"entries {first} to {last} were written by worker {name}")
        published = journal.published(run)
        state = journal.state(run)
    receiver.shutdown()
    say(f"the run {state}")
    print(f"published {published}, received {receiver.received}, distinct {receiver.distinct}, killed {len(killed)}")
    good = {published, receiver.received, receiver.distinct} == {documents} and state == "succeeded"
    return 0 if good else 1


def kill_between_two_publishes(journal: Journal, receiver: Receiver, run: str) -> int:
    """Send SIGKILL to the process that works on the run, while no request is on its way; returns the process's id.

    A kill between a request and its entry would be survived too, by sending the request again with the same key; but
    the receiver would then get one request more than there are documents, and the last line could not be foretold. So
    the process is stopped first. If the journal's last entry is a publish, its request is answered and no other begun.
    """
    while True:
        pid = until(lambda: journal.pid(run), "the process that works on the run")
        os.kill(pid, signal.SIGSTOP)
        if journal.last_name(run) == "publish" and journal.published(run) == receiver.received:
            break
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    say(f"killed process {pid} with SIGKILL after {receiver.received} documents")
    return pid


class Journal:
    """Questions that anyone can ask the database: every fact about a run is a row."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._connection = connection

    def workers(self) -> int:
        """How many workers are alive."""
        return int(self._ask("select count(*) from replaykit.workers where stopped_at is null")[0][0])

    def state(self, run: str) -> str:
        """Where the run is."""
        return str(self._ask("select state from replaykit.runs where id = %s", run)[0][0])

    def pid(self, run: str) -> int | None:
        """The process that works on the run now."""
        rows = self._ask(
            "select w.pid from replaykit.runs r join replaykit.workers w on w.id = r.worker"
            " where r.id = %s and r.state = 'running'",
            run,
        )
        return int(rows[0][0]) if rows else None

    def last_name(self, run: str) -> str:
        """The name of the last step in the journal."""
        rows = self._ask("select name from replaykit.journal where run_id = %s order by seq desc limit 1", run)
        return str(rows[0][0]) if rows else ""

    def published(self, run: str) -> int:
        """How many documents the journal says were published."""
        rows = self._ask(
            "select count(*) from replaykit.journal where run_id = %s and name = 'publish' and outcome = 'ok'", run
        )
        return int(rows[0][0])

    def writers(self, run: str) -> list[tuple[Any, ...]]:
        """Which worker wrote which entries: (worker, first seq, last seq)."""
        return self._ask(
            "select worker, min(seq), max(seq) from replaykit.journal where run_id = %s group by worker order by 2", run
        )

    def _ask(self, question: LiteralString, *parameters: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(question, parameters).fetchall()


@contextmanager
def database() -> Iterator[str]:
    """An embedded Postgres of the demo's own, new and migrated; yields its URL."""
    home = Path(tempfile.mkdtemp(prefix="replaykit-demo-"))
    home.chmod(0o755)  # as root, the server runs as another user, who must reach its folder
    os.environ["REPLAYKIT_HOME"] = str(home)
    os.environ.pop("REPLAYKIT_DATABASE_URL", None)
    say("starting Postgres")
    try:
        with EmbeddedPostgres(home, linger=0) as dsn:
            replaykit("db", "migrate")
            yield dsn
        until(lambda: not list(home.rglob("postmaster.pid")), "the end of Postgres")
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def worker() -> Iterator[None]:
    """`replaykit worker pipeline.py`, stopped with SIGTERM at the end."""
    process = subprocess.Popen([REPLAYKIT, "worker", PIPELINE])
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)


def replaykit(*arguments: str) -> str:
    """Run the command line; returns what it printed."""
    say("$ " + shlex.join(["replaykit", *arguments]))
    return subprocess.run([REPLAYKIT, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def until(look: Callable[[], T | None], what: str) -> T:
    """Look until there is something to see; returns it."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if seen := look():
            return seen
        time.sleep(0.02)
    raise SystemExit(f"demo: {what} did not come within {PATIENCE_SECONDS:.0f} s")


def say(text: str) -> None:
    """Print a line at once."""
    print(f"demo: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
