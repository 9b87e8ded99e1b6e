"""The lease: a thread that renews it, one that watches its end, and what happens when it cannot be renewed.

One row of `workers` for each incarnation of a worker carries the lease of all its runs (POSTGRES.md 3.4). Only the
database's clock decides whether it has run out; the process trusts it a little shorter, from the moment at which it
*sent* the last request that succeeded. Two threads, because the one that waits for the database cannot also look at
the time: `renew` talks, `watch` looks.

A worker whose event loop is stuck must lose its runs to one that lives, so the lease is not renewed before the loop
has ticked again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

from replaykit.events import log
from replaykit.limits import Settings
from replaykit.postgres import leases
from replaykit.postgres.database import Database, SyncConnection
from replaykit.runtime.clock import DatabaseClock, lease_clock

__all__ = ["EXIT_LEASE_LOST", "EXIT_LOOP_STUCK", "Heartbeat"]


EXIT_LEASE_LOST: Final = 75
"""Left because the lease ended through no fault of a run (EX_TEMPFAIL): not a recovery when runs are handed back."""

EXIT_LOOP_STUCK: Final = 70
"""Left because the event loop did not turn for a whole lease (EX_SOFTWARE): a run is to blame, so it is a recovery."""

MARGIN_SECONDS_MAX: Final = 2.0
"""The last part of a lease in which nothing is begun: for clocks that drift, and for the exit itself."""

BACKOFF_SECONDS_MAX: Final = 1.0
"""Longest wait between two attempts to reach the database: well inside the lease that reapers grant after an outage."""

WATCH_SECONDS_MAX: Final = 0.25
"""Longest time between two looks at the clock."""

STOP_SECONDS: Final = 1.0
"""How long `stop` waits for a request in flight before it cuts the connection."""


class Heartbeat:
    """Keeps the lease of one worker incarnation.

    Args:
        database: where; the thread opens a connection of its own.
        worker_id: id of this incarnation, never used before (a stable id would renew its replacement's lease).
        settings: `lease_seconds` and `heartbeat`.
        clock: is told the database's time with every answer.
        register: what the row says besides: keyword arguments of `leases.insert_worker`.
        snapshot: called in the thread before each request: `(in_flight, health)`, JSON values.
        on_lost: called once, in a thread, when the row is gone: someone took the runs.
        exit_on_expiry: end the whole process when the lease is about to end while bodies run (children do).
        busy: called in a thread: does any body run?
    """

    def __init__(
        self,
        database: Database,
        worker_id: UUID,
        *,
        settings: Settings,
        clock: DatabaseClock,
        register: Mapping[str, Any],
        snapshot: Callable[[], tuple[Any, Any]],
        on_lost: Callable[[], None],
        exit_on_expiry: bool,
        busy: Callable[[], bool],
    ) -> None:
        self._database = database
        self._worker_id = worker_id
        self._settings = settings
        self._clock = clock
        self._register = register
        self._snapshot = snapshot
        self._on_lost = on_lost
        self._exit_on_expiry = exit_on_expiry
        self._busy = busy
        self._lease = Lease(settings.lease_seconds, settings.heartbeat)
        self._request = leases.heartbeat(worker_id)  # as of the last snapshot
        self._connection: SyncConnection | None = None
        self._asked_at: float | None = None  # when the request that has no answer yet was sent
        self._gated_since: float | None = None  # since when a renewal waits for the loop
        self._armed_until: float | None = None
        self._pause = min(WATCH_SECONDS_MAX, settings.heartbeat / 8)
        self._ticked = threading.Event()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Writes the worker's row and begins to renew it. Blocks for the round trips.

        Raises:
            DatabaseUnreachable: no connection, or it was lost meanwhile.
        """
        self._connection = self._database.connect_sync()
        sent = lease_clock()
        self._connection.run(*leases.insert_worker(self._worker_id, **self._register))
        self._lease.renewed(sent)
        self._beat()
        for target in (self._renew, self._watch):
            thread = threading.Thread(target=target, name=f"replaykit-lease-{target.__name__.strip('_')}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends the threads and the connection; the row stays as it is (`leases.stop_worker` has the last word)."""
        self._stopping.set()
        self._ticked.set()
        for thread in self._threads:
            if thread is threading.current_thread():  # called from `on_lost`
                continue
            thread.join(timeout=STOP_SECONDS)
            if thread.is_alive():
                self._cut()
                thread.join(timeout=STOP_SECONDS)
        self._disconnect()
        if self._armed_until is not None:
            faulthandler.cancel_dump_traceback_later()

    def tick(self) -> None:
        """Called by the host's event loop, several times a heartbeat: it lives."""
        if not self._ticked.is_set():
            self._ticked.set()

    def valid(self) -> bool:
        """Whether the lease is ours beyond doubt. Nothing may be begun when it is not."""
        return self._lease.valid(lease_clock())

    def may_reap(self) -> bool:
        """Whether we may judge others: our own heartbeats had no gap for one whole lease."""
        return self._lease.may_reap(lease_clock())

    @property
    def valid_until(self) -> float:
        """End of the trusted part of the lease, on `lease_clock`."""
        return self._lease.valid_until

    def _renew(self) -> None:
        """Thread: one request a heartbeat, as long as the loop ticks; after a failure again, with a back-off."""
        failures = 0
        wait = self._settings.heartbeat
        while not self._stopping.wait(wait):
            self._await_tick()
            if self._stopping.is_set():
                return
            try:
                ours = self._beat()
            except Exception as error:  # whatever it is, a thread that ends here would lose the lease for good
                failures += 1
                self._lease.broken()
                self._disconnect()
                wait = min(BACKOFF_SECONDS_MAX, self._settings.heartbeat, 0.05 * 2**failures)
                log.warning("heartbeat_failed", worker=str(self._worker_id), error=error, failures=failures)
                continue
            if not ours:
                self._lose()
                return
            if failures:
                log.info("heartbeat_restored", worker=str(self._worker_id), failures=failures)
            failures, wait = 0, self._settings.heartbeat

    def _await_tick(self) -> None:
        """Waits until the loop has ticked since the last request was sent."""
        if not self._ticked.is_set():
            self._gated_since = lease_clock()
            self._ticked.wait()
        self._gated_since = None
        self._ticked.clear()

    def _beat(self) -> bool:
        """One request; False: the row is gone, the lease was taken."""
        with contextlib.suppress(Exception):  # the host's own bookkeeping must not cost the lease
            self._request = leases.heartbeat(self._worker_id, *self._snapshot())
        if self._connection is None:
            self._connection = self._database.connect_sync()
        sent = lease_clock()
        self._asked_at = sent
        try:
            rows = self._connection.run(*self._request)
        finally:
            self._asked_at = None
        received = time.monotonic()
        database_us = leases.parse_clock(rows)
        if database_us is None:
            return False
        self._clock.observe(database_us, received)
        self._lease.renewed(sent)
        return True

    def _lose(self) -> None:
        self._lease.lost()
        log.warning("lease_lost", worker=str(self._worker_id))
        if self._exit_on_expiry and self._bodies_run():
            os._exit(EXIT_LEASE_LOST)
        self._on_lost()

    def _watch(self) -> None:
        """Thread: looks at the time, never at the database."""
        while True:
            now = lease_clock()
            if self._exit_on_expiry and not self._lease.valid(now) and (self._stuck(now) or self._bodies_run()):
                # Stuck without a body: in the workflow's own code, which nobody can interrupt either. No word is written
                # first: a body may hold the lock of a log or of stderr. The parent tells.
                os._exit(EXIT_LOOP_STUCK if self._stuck(now) else EXIT_LEASE_LOST)
            asked_at = self._asked_at
            if asked_at is not None and now - asked_at > self._settings.lease_seconds / 3:
                self._cut()
            self._arm(now)
            left = self._lease.valid_until - now
            if self._stopping.wait(min(self._pause, left) if left > 0 else self._pause):
                return

    def _arm(self, now: float) -> None:
        """Sets the timer behind this thread, for a body that never lets go of the interpreter (a regex, a C library).

        No Python thread can end the process then; faulthandler's runs without the interpreter and shows where the
        body is. It fires only if this thread had no turn between the end of the trusted lease and half of the margin.
        """
        until = max(self._lease.valid_until, now + 2 * self._pause)
        if not self._exit_on_expiry or (self._armed_until is not None and until - self._armed_until < self._pause):
            return
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(until - now + self._lease.margin / 2, exit=True, file=sys.__stderr__)
            self._armed_until = until

    def _bodies_run(self) -> bool:
        try:
            return self._busy()
        except Exception:  # when in doubt a body runs: it must not outlive the lease
            return True

    def _stuck(self, now: float) -> bool:
        """Whether the loop, not the database, is why the lease was not renewed."""
        since = self._gated_since
        return since is not None and now - since >= self._settings.heartbeat

    def _cut(self) -> None:
        """Ends a request that has no answer, from another thread: the waiting one sees a closed socket."""
        connection = self._connection
        if connection is not None:
            connection.cut()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()


class Lease:
    """What is known of one's own lease, from the requests that succeeded. Pure: times are arguments, on one clock."""

    def __init__(self, lease_seconds: float, heartbeat_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self.margin = min(lease_seconds / 10, MARGIN_SECONDS_MAX)
        # A database that was away for less than this has cost nobody the lease: with at least two heartbeats a lease
        # everyone else still has time to come back.
        self._gap_seconds_max = max(lease_seconds / 2, 1.5 * heartbeat_seconds)
        self._last: float | None = None
        self._unbroken_since: float | None = None
        self.valid_until = -math.inf

    def renewed(self, sent: float) -> None:
        """A request sent then has succeeded: the database's lease began no earlier than that."""
        if self._last is None or self._unbroken_since is None or sent - self._last > self._gap_seconds_max:
            self._unbroken_since = sent
        self._last = sent
        self.valid_until = sent + self._lease_seconds - self.margin

    def broken(self) -> None:
        """A request has failed. The lease may still be ours; others may have lost theirs for the same reason."""
        self._unbroken_since = None

    def lost(self) -> None:
        """The row is gone."""
        self._unbroken_since = None
        self.valid_until = -math.inf

    def valid(self, now: float) -> bool:
        return now < self.valid_until

    def may_reap(self, now: float) -> bool:
        """After one whole lease of requests without a gap (DESIGN 5): the database was there, and was the same one,
        while whoever is judged had that long to say a word."""
        if self._unbroken_since is None or self._last is None:
            return False
        return now - self._last <= self._gap_seconds_max and now - self._unbroken_since >= self._lease_seconds
