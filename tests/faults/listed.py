"""A run with `--pgbouncer` skips, on the pooler's account, exactly what docs/reference/pgbouncer.md lists: else it fails."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

__all__ = ["Listed", "reason_of"]

WORDS = ("pgbouncer", "pooler")
"""A reason with one of them is on its account."""


class Listed:
    """Plugin of the process that hears of every test, wherever it ran.

    Args:
        listed: ids of the page, with parameters or, for all of them, without.
        whole: nothing was left out of the run, so that each of them has to be there.
    """

    def __init__(self, listed: Iterable[str], *, whole: bool) -> None:
        self._listed = set(listed)
        self._whole = whole
        self._collected: set[str] = set()
        self._skipped: set[str] = set()
        self._found: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist."""
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """With it: of one of its workers."""
        self._collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test is over."""
        if any(word in reason_of(report).lower() for word in WORDS):
            self._skipped.add(report.nodeid)

    def complaints(self) -> list[str]:
        """Where the page and the run differ, a sentence each."""
        found = [
            f"{id} was skipped, and the page does not list it"
            for id in self._skipped
            if not {id, id.partition("[")[0]} & self._listed
        ]
        for entry in self._listed:
            ids = {id for id in self._collected if entry in (id, id.partition("[")[0])}
            found += [f"{id} is on the page, and was not skipped" for id in ids - self._skipped]
            if self._whole and not ids:
                found.append(f"{entry} is on the page, and there is no such test")
        return sorted(found)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A run that is broken off has not skipped all, and has failed anyway."""
        if exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
            self._found = self.complaints()
        if self._found:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say why."""
        if self._found:
            terminalreporter.section("docs/reference/pgbouncer.md", red=True)
            terminalreporter.write("\n".join([*self._found, ""]))


def reason_of(report: pytest.TestReport) -> str:
    """Why a test was skipped; nothing if it was not."""
    return str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple | list) else ""
