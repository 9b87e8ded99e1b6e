"""The primary dies and its standby is promoted, with synchronous replication: nothing that was acknowledged is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import make_open_folder
from tests.faults.conftest import Loads
from tests.faults.server import Own
from tests.faults.wire import Wire


@pytest.fixture
def folder() -> Iterator[Path]:
    """For both servers."""
    made = make_open_folder()
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.parametrize(
    "by", ["several hosts in the URL", pytest.param("a wire that leads elsewhere", marks=pytest.mark.slow)]
)
def test_runs_survive_a_failover(folder: Path, loads: Loads, by: str) -> None:
    """Workers find the new primary, keep what their bodies returned, and write it there."""
    primary, standby = Own(folder / "primary"), None
    try:
        primary.start()
        standby = primary.standby(folder / "standby")
        now = [primary.dsn]
        with Wire(primary.dsn) as wire, Wire(standby.dsn) as other:
            url = wire.dsn
            if by == "several hosts in the URL":
                name = urlsplit(primary.dsn).path
                hosts = f"127.0.0.1:{wire.port},127.0.0.1:{other.port}"
                url = f"postgresql://postgres@{hosts}{name}?target_session_attrs=read-write&sslmode=disable"
            load = loads(lambda: now[0], url)
            load.hire(children=2).wait_ready(2)
            load.more(under_way=15)
            load.goes_on(40)
            load.look()

            primary.kill()
            standby.promote()
            now[0] = standby.dsn
            wire.lead_to(standby.dsn)
            load.more(under_way=15)
            load.finish()

            load.check()
    finally:
        primary.end()
        if standby is not None:
            standby.end()
