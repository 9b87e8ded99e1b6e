"""Draws runs: the list, one run with its journal, the workers. Takes rows by SQL name, gives rich renderables."""

from __future__ import annotations

import datetime as dt
import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from replaykit.interfaces.output import (
    STATE_STYLES,
    ago,
    duration,
    error_type,
    moment,
    one_line,
    printable,
    seconds_between,
)
from replaykit.runtime.inspect import error_words

__all__ = ["draw_observations", "draw_run", "draw_runs", "draw_workers", "state_text"]

Row = Mapping[str, Any]

_WORKER_STYLES = {"live": "green", "expired": "red", "stopped": "dim"}

_TABLE_ROWS_MAX = 500
"""Rows that rich folds into a table: 0.6 ms each."""

_UNDO = "~undo:"
"""How the key of an undoing begins; the key of the step that it undoes follows."""

_SHORT = 8
"""Characters of an id on a terminal: its end, which `show` and the others accept."""


def draw_runs(runs: Sequence[Row], *, short: bool, progress: bool = False) -> RenderableType:
    """The list of runs, one a line.

    Args:
        runs: rows of `runs`; with `progress`, with `in_flight` (keys of steps) too.
        short: ends of ids only.
        progress: with columns for how far each run is.
    """
    table = _table("run", "workflow", "key", "state", *(("entries", "now") if progress else ()), "created", "took")
    now = dt.datetime.now(dt.UTC)
    for run in runs:
        cells: list[RenderableType] = [
            _id(run["id"], short),
            Text(run["workflow"]),
            Text(run["key"] or "", "dim"),
            state_text(run),
        ]
        if progress:
            cells += [Text(str(run["entries"])), Text(", ".join(run.get("in_flight") or ()), "dim")]
        cells += [Text(ago(run["created_at"], now), "dim"), Text(_took(run, now))]
        table.add_row(*cells)
    return table


def draw_run(report: Row) -> RenderableType:
    """One run: header, journal, what was asked of it, what failed and is retried, what it does now or waits for, how it
    ended.

    Args:
        report: as of `Inspector.drawn`.
    """
    run = report["run"]
    parts: list[RenderableType] = [_header(run), Text()]
    requests = report.get("requests") or ()
    if report["journal"]:
        parts += [_journal(report["journal"], requests, report.get("tried") or ()), Text()]
    drawn = {entry["mailbox_id"] for entry in report["journal"]}
    for request in requests:
        if request["id"] not in drawn:
            parts.append(_sentence("asked", _request(request, run), "yellow"))
    last_tries = {attempt["key"]: attempt["attempt"] for attempt in report["attempts"]}
    for attempt in report["attempts"]:
        parts.append(_attempt(attempt, last=last_tries[attempt["key"]] == attempt["attempt"]))
    for body in report.get("in_flight") or ():
        parts.append(_sentence("now", f"{body['key']} (attempt {body['attempt']}), since {ago(body['since'])}", "blue"))
    if run["state"] == "waiting":
        until = moment(run.get("available_at"))
        when = f" until {_clock(run['available_at'])} ({ago(run['available_at'])})" if until is not None else ""
        parts.append(_sentence("waits", f"for {run['waiting_for'] or 'its turn'}{when}", "magenta"))
    if (missing := _missing(report)) is not None:
        parts.append(_sentence("waits", f"for a worker: {missing}", "magenta"))
    parts += _doubts(report)
    if run["state"] == "held":
        parts += [_undone(entry) for entry in report.get("undone") or ()]
    if run["reason"]:
        parts.append(_sentence("held" if run["state"] == "held" else "reason", run["reason"], "yellow"))
    if run.get("error") is not None:
        parts.append(_sentence("error", _error_text(run["error"]), "red"))
    elif run["state"] == "succeeded":
        parts.append(_sentence("result", one_line(run.get("output"), 400), "green"))
    return Group(*parts)


def _doubts(report: Row) -> list[RenderableType]:
    """The calls in doubt: when each may have landed, by what it is found outside, and how to say what became of it."""
    if report["run"]["state"] in ("pending", "running"):  # somebody has had a word, or a reconciler is asked
        return []
    seen = report.get("observed") or ()
    parts: list[RenderableType] = []
    for doubt in report.get("doubts") or ():
        evidence = doubt["evidence"] if isinstance(doubt["evidence"], dict) else {}
        if doubt["key"].startswith(_UNDO) and doubt["effect"] != "irreversible":
            what, words = _not_undone(report["run"], doubt, evidence)
        else:
            what, words = _in_doubt(report["run"], doubt, evidence)
        observed = [f"{one['kind']}:{one['value']}" for one in seen if one["key"] == doubt["key"]]
        lines = [
            *([what] if what else []),
            *([f"observed {', '.join(observed)}"] if observed else []),
            *([f"it ended with {_error_line(evidence['error'])}"] if evidence.get("error") else []),
            *words,
        ]
        parts.append(_sentence("doubt", "\n".join(lines), "bold yellow"))
    return parts


def _in_doubt(run: Row, doubt: Row, evidence: Row) -> tuple[str, list[str]]:
    begin, end = doubt["written_at"], doubt["until"]
    span = f"after {_clock(begin)} ({ago(begin)})"
    if end is not None:
        span = f"between {_clock(begin)} and {_clock(end)} ({duration(seconds_between(begin, end))}, {ago(begin)})"
    what = "\n".join(
        [
            f"{doubt['key']} (attempt {doubt['attempt']}, {doubt['effect']}) may have landed {span}",
            f"idempotency key {doubt['idempotency_key']}",
            f"input {one_line(doubt['input'], 400)}",
        ]
    )
    not_landed = "it did not: its error is raised" if evidence.get("error") else "it did not: the body runs again"
    return what, [
        _command("resolve", run, doubt["key"], "--landed JSON", "it happened, and the step returns this"),
        _command("resolve", run, doubt["key"], "--not-landed", not_landed),
        _command("resolve", run, doubt["key"], "--fail", "nobody knows: the step raises InDoubt"),
    ]


def _not_undone(run: Row, doubt: Row, evidence: Row) -> tuple[str, list[str]]:
    what = f"{doubt['key'].removeprefix(_UNDO)} is not undone: {doubt['name']} failed {ago(doubt['until'])}"
    return what, [
        f"replaykit retry {run['id']}   # {doubt['name']} runs again",
        _command("resolve", run, doubt["key"], "--landed null", "it is undone: go on"),
        _command("resolve", run, doubt["key"], "--fail", "it cannot be undone: go on with the rest"),
    ]


def _command(verb: str, run: Row, key: str, option: str, what: str) -> str:
    """A command to be copied. A key that begins like an option stands behind `--`."""
    word = shlex.quote(key)
    if key.startswith("-"):
        return f"replaykit {verb} {option} -- {run['id']} {word}   # {what}"
    return f"replaykit {verb} {run['id']} {word} {option}   # {what}"


def _undone(entry: Row) -> RenderableType:
    """An undoing that the journal holds: done, or let fail by a person."""
    key, how = entry["key"].removeprefix(_UNDO), f"{entry['name']} (entry {entry['seq']})"
    if entry["outcome"] == "ok":
        return _sentence("undone", f"{key} by {how}", "yellow")
    return _sentence("not", f"undone: {key}, {how} failed", "red")


def _missing(report: Row) -> str | None:
    """Why no live worker takes a pending run."""
    workflow, queue = report["run"]["workflow"], report["run"]["queue"]
    known, claimed = report.get("known"), report.get("claimed")
    if known is not None and workflow not in known:
        there = f"; they have {', '.join(known)}" if known else ""
        return f"no live worker has {workflow}{there}"
    if claimed and queue not in claimed:
        return f"no live worker takes {workflow} from the queue {queue}; they take it from {', '.join(claimed)}"
    return None


def draw_workers(workers: Sequence[Row]) -> RenderableType:
    """The workers, one a line."""
    table = _table("worker", "host", "pid", "state", "queues", "workflows", "runs", "heartbeat", "health")
    for worker in workers:
        table.add_row(
            _id(worker["id"], True),
            Text(worker["hostname"]),
            Text(str(worker["pid"])),
            Text(worker["state"], _WORKER_STYLES[worker["state"]]),
            Text(", ".join(worker["queues"] or ())),
            Text(", ".join(worker["workflows"] or {})),
            Text(str(worker["running"])),
            Text(ago(worker["heartbeat_at"]), "dim"),
            Text(_health(worker.get("health")), "dim"),
        )
    return table


def draw_observations(rows: Sequence[Row], *, short: bool) -> RenderableType:
    """What steps have observed, one a line; `short`: ends of ids only."""
    table = _table("run", "step", "try", "kind", "value", "observed")
    for row in rows:
        table.add_row(
            _id(row["run_id"], short),
            Text(printable(row["key"])),
            Text(str(row["attempt"])),
            Text(printable(row["kind"])),
            Text(printable(row["value"])),
            Text(f"{_clock(row['observed_at'])} ({ago(row['observed_at'])})", "dim"),
        )
    return table


def state_text(run: Row) -> Text:
    """A run's state in its colour, with what it waits for."""
    state = run["state"]
    text = Text(state, STATE_STYLES.get(state, ""))
    if state == "waiting" and run["waiting_for"]:
        text.append(f" {run['waiting_for']}", "dim")
    if run.get("recoveries"):
        text.append(f" ↻{run['recoveries']}", "yellow")
    return text


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("run", "worker", "state", "took", "created", "at"))
    return table


def _header(run: Row) -> RenderableType:
    now = dt.datetime.now(dt.UTC)
    first = Text.assemble((run["workflow"], "bold"), "  ", (run["id"], "cyan"), "  ")
    first.append_text(state_text(run))
    if took := _took(run, now):
        first.append(f" {'in' if run['finished_at'] else 'for'} {took}")
    facts = [f"key {run['key']}"] if run["key"] else []
    facts += [f"queue {run['queue']}"] if run["queue"] != "default" else []
    facts += [f"priority {run['priority']}"] if run["priority"] else []
    facts.append(f"created {_clock(run['created_at'])} ({ago(run['created_at'], now)})")
    facts += [f"{run['recoveries']} recoveries"] if run.get("recoveries") else []
    facts += [f"worker {run['worker'][-_SHORT:]}"] if run["worker"] else []
    lines: list[RenderableType] = [first, Text(" · ".join(facts), "dim")]
    if run.get("input") is not None:
        lines.append(Text.assemble(("input ", "dim"), one_line(run["input"], 400)))
    return Group(*lines)


def _journal(journal: Sequence[Row], requests: Sequence[Row], tried: Sequence[Row]) -> RenderableType:
    columns = ("#", "step", "at", "took", "try", "result")
    rows: list[list[Text]] = []
    who = {request["id"]: request["sent_by"] for request in requests}
    rewinds = [(entry["to_seq"], entry["seq"]) for entry in journal if entry["kind"] == "rewind"]
    rewinds += [(request["to_seq"], request["entry"]) for request in requests if request["to_seq"] is not None]
    for entry, before in zip(journal, (None, *journal), strict=False):
        left_out = entry["seq"] - before["seq"] - 1 if before is not None else 0
        if left_out:
            rows.append([Text("…", "dim"), Text(f"{left_out:,} left out: --all draws them", "dim italic")])
        tries = [one for one in tried if one["key"] == entry["key"] and one["attempt"] < entry["attempt"]]
        tried = [one for one in tried if one not in tries]
        rows += [_tried(one) for one in tries]
        aside = any(to_seq <= entry["seq"] < seq for to_seq, seq in rewinds)
        rows.append(_entry(entry, by=who.get(entry["mailbox_id"]), aside=aside))
    if len(rows) > _TABLE_ROWS_MAX:
        return _lines(columns, rows)
    table = _table(*columns)
    for row in rows:
        table.add_row(*row)
    return table


def _entry(entry: Row, *, by: str | None, aside: bool) -> list[Text]:
    failed = entry["outcome"] != "ok"
    mark = Text("✗ ", "red") if failed else Text("✓ ", "green")
    if aside:
        mark = Text("↶ ", "dim")  # a rewind has set it aside
    took = seconds_between(entry["started_at"], entry["at"]) if entry["reuses"] is None else None
    return [
        Text(str(entry["seq"]), "dim"),
        mark + Text(entry["key"]),
        Text(_clock(entry["at"]), "dim"),
        Text(duration(took)),
        Text(str(entry["attempt"]) if entry["kind"] == "step" else "", "" if entry["attempt"] == 1 else "yellow"),
        _failure(entry, by) if failed and entry["error"] else _result(entry, by),
    ]


def _tried(attempt: Row) -> list[Text]:
    """A try that failed, above the entry of its step."""
    return [
        Text(),
        Text("↻ ", "yellow") + Text(attempt["key"]),
        Text(_clock(attempt["ended_at"]), "dim"),
        Text(duration(seconds_between(attempt["started_at"], attempt["ended_at"]))),
        Text(str(attempt["attempt"]), "yellow"),
        Text(_error_line(attempt["error"]), "yellow"),
    ]


def _lines(columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> RenderableType:
    """As a table, without folding: a tenth of the time."""
    head = [Text(column, "dim") for column in columns]
    widths = [max(cell.cell_len for cell in column) for column in zip_longest(head, *rows, fillvalue=Text())]
    lines = []
    for row in (head, *rows):
        line = Text()
        for cell, width in zip(row, widths, strict=False):
            line.append_text(cell).append(" " * (width - cell.cell_len + 2))
        line.rstrip()
        lines.append(line)
    return Group(*lines)


def _result(entry: Row, by: str | None) -> Text:
    kind = entry["kind"]
    asked = f", asked by {by}" if by else ""
    if kind == "timer":
        return Text("timer", "dim")
    if kind == "cancel":
        untold = (entry["output"] or {}).get("untold")
        return Text(f"cancel{asked}{f'; its code could not be told: {untold}' if untold else ''}", "yellow")
    if kind == "rewind":
        return Text(f"retried: {_set_aside(entry['to_seq'], entry['seq'])}{asked}", "yellow")
    if entry["output"] is None and entry["outcome"] != "ok":
        return Text(entry["outcome"])
    result = _said_by(Text(one_line(entry["output"], 80)), by)
    return result.append(f"  of entry {entry['reuses']}", "dim") if entry["reuses"] is not None else result


def _failure(entry: Row, by: str | None) -> Text:
    return _said_by(Text(_error_line(entry["error"]), "red"), by)


def _said_by(text: Text, by: str | None) -> Text:
    """What became of a call in doubt, with the person who has said so."""
    return text.append(f"  says {by}", "yellow") if by else text


def _set_aside(first: int, rewind: int) -> str:
    last = rewind - 1
    if first > last:
        return "nothing set aside"
    return f"entry {first} set aside" if first == last else f"entries {first}-{last} set aside"


def _request(request: Row, run: Row) -> str:
    """`cancel by ada (3 s ago)`, and what came of it."""
    by = f" by {request['sent_by']}" if request["sent_by"] else ""
    body = request["body"] if isinstance(request["body"], dict) else {}
    of = f" of {request['name']}" if request["kind"] == "resolve" else ""
    text = f"{request['kind']}{of}{by} ({ago(request['sent_at'])})"
    if body.get("accept"):
        text += f", accepting {body['accept']}"
    if body.get("word"):
        text += f": {_word(body)}"
    if request["entry"] is not None:
        text += f": entry {request['entry']}"
    elif request["kind"] == "cancel" and run["state"] in ("succeeded", "failed", "continued"):
        text += ": it came too late"
    return text


def _word(body: Row) -> str:
    """`landed with {"cents": 5} (saw it)`."""
    if body["word"] == "landed":
        said = f"landed with {one_line(body.get('value'), 80)}"
    else:
        error = body.get("error")
        said = "not landed" if body["word"] == "not_landed" else f"fail with {_error_line(error)}" if error else "fail"
    return f"{said} ({body['comment']})" if body.get("comment") else said


def _attempt(attempt: Row, *, last: bool) -> RenderableType:
    due = moment(attempt["next_at"])
    again = f", again {ago(attempt['next_at'])}" if last and due is not None and due > dt.datetime.now(dt.UTC) else ""
    return _sentence(
        "retry", f"{attempt['key']} attempt {attempt['attempt']}: {_error_line(attempt['error'])}{again}", "yellow"
    )


def _sentence(label: str, text: str, style: str) -> RenderableType:
    return Text.assemble((f"{label:<8}", style), printable(text).replace("\n", f"\n{' ' * 8}"))


def _error_line(error: Any) -> str:
    """`CardDeclined: no funds (shop.py:42)`."""
    if not isinstance(error, dict):
        return one_line(error)
    line = f" ({error['line']})" if error.get("line") else ""
    message = error_words(error).partition("\n")[0]
    return printable(f"{error_type(error)}: {message}{line}")


def _error_text(error: Any) -> str:
    """The error in full: type, message, the user's line, and the notes, which hold the traceback of a step's body."""
    if not isinstance(error, dict):
        return json.dumps(error)
    lines = [f"{error_type(error)}: {error_words(error)}"]
    if error.get("line"):
        lines.append(f"at {error['line']}")
    notes = error.get("notes") or [error.get("traceback") or ""]
    return "\n".join([*lines, *(str(note).rstrip() for note in notes)]).rstrip()


def _health(health: Any) -> str:
    return "  ".join(f"{name} {value}" for name, value in health.items()) if isinstance(health, dict) else ""


def _id(value: str, short: bool) -> Text:
    return Text(f"…{value[-_SHORT:]}" if short else value, "cyan")


def _clock(text: str | None) -> str:
    then = moment(text)
    if then is None:
        return ""
    local = then.astimezone()
    today = local.date() == dt.datetime.now().astimezone().date()
    return local.strftime("%H:%M:%S.%f" if today else "%Y-%m-%d %H:%M:%S.%f")[:-3]


def _took(run: Row, now: dt.datetime) -> str:
    begin, end = moment(run["started_at"]), moment(run["finished_at"])
    if begin is None or (end is None and run["state"] != "running"):
        return ""
    return duration(((end or now) - begin).total_seconds())
