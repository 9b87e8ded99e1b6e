"""The database's disk is full for a while."""

from __future__ import annotations

import shutil

import pytest

from tests.conftest import make_open_folder
from tests.crash.crew import WorkerProcess
from tests.faults.conftest import Loads
from tests.faults.server import Own, can_mount, small_disk
from tests.runtime.facts import eventually

MEGABYTES = 160
SETTINGS = {"max_wal_size": "32MB", "min_wal_size": "32MB", "wal_keep_size": "0"}


@pytest.mark.skipif(not can_mount(), reason="needs root, to mount a small tmpfs")
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_runs_survive_a_full_disk(loads: Loads, times: int) -> None:
    """Nothing can be written; the server may fall over. Once there is room (and a server) everything goes on."""
    folder = make_open_folder()
    try:
        with small_disk(folder / "disk", MEGABYTES) as disk:
            server = Own(folder / "server", SETTINGS, disk=disk.folder)
            try:
                server.start()
                load = loads(server.dsn, server.dsn)
                worker = load.hire(children=2)
                worker.wait_ready(2)
                for number in range(times):
                    load.more()
                    load.goes_on(10)
                    load.look()
                    disk.fill()
                    # Tables have pages that are half empty, and WAL files are there before they are used.
                    eventually(lambda: wears(server) or refused(worker) > number, "something is refused", 60)  # noqa: B023
                    disk.empty()
                    if not server.answers():
                        server.restart()
                load.finish()
                load.check()
            finally:
                server.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refused(worker: WorkerProcess) -> int:
    """How often it could not write."""
    return len(worker.events("journal_write_failed"))


def wears(server: Own) -> bool:
    """Ask for room; False: a look at the next moment."""
    try:
        server.ask("create table if not exists public.filler (text text)")
        server.ask("insert into public.filler select repeat('x', 1000) from generate_series(1, 1000)")
    except Exception:
        return not server.lives()
    return False
