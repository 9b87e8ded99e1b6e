"""The command line. Parses, asks the runtime, prints, exits: 0 done, 1 failed or held, 2 usage.

Mistakes are one sentence on stderr. Imports are made where they are used: `replaykit --help` must not pay for psycopg.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import click

from replaykit.about import __version__
from replaykit.errors import ConfigurationError, DatabaseUnreachable, NotJournalable, ReplaykitError, SchemaMismatch
from replaykit.interfaces.output import console, print_json, say

if TYPE_CHECKING:
    from replaykit.limits import Settings
    from replaykit.runtime.target import Target

__all__ = ["cli", "main", "run"]

F = TypeVar("F", bound=Callable[..., Any])

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

SETTINGS: dict[str, tuple[type, str]] = {
    "lease_seconds": (float, "How long a silent worker keeps its runs."),
    "heartbeat_seconds": (float, "Time between two heartbeats."),
    "grace_seconds": (float, "How long bodies may finish after SIGTERM."),
    "evict_after_seconds": (float, "A run that waits longer leaves memory."),
    "poll_seconds": (float, "Time between two looks for work without a hint."),
    "recoveries_max": (int, "How often a run that ends its process is tried apart before it is held."),
    "payload_bytes_max": (int, "The largest single value in the journal."),
    "input_bytes_max": (int, "A plain step's larger input is kept as digest and head."),
    "drain_callbacks_max": (int, "Callbacks that a run may need between two entries."),
    "concurrency": (int, "Runs in memory at once, for each process."),
    "threads": (int, "Threads for sync step bodies, for each process."),
    "connections": (int, "Connections for transactional steps, for each process."),
}
"""A flag and a `REPLAYKIT_*` variable for each of `limits.Settings`, which is not imported before it is needed."""

RUNS_SHOWN = 50
STATES = ("pending", "running", "waiting", "held", "succeeded", "failed", "cancelled", "continued")


def main() -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Carry out one command line and return its exit code."""
    for argument in arguments:
        if not argument.isprintable() and any("\udc80" <= character <= "\udcff" for character in argument):
            say(f"{argument!r} is not text: it holds bytes that are no UTF-8")  # neither JSON nor Postgres takes them
            return USAGE
    try:
        code = cli.main(list(arguments), prog_name="replaykit", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return USAGE
    except click.UsageError as error:
        help_of = f" (see `{error.ctx.command_path} --help`)" if error.ctx is not None else ""
        say(error.format_message() + help_of)
        return USAGE
    except click.ClickException as error:
        say(error.format_message())
        return error.exit_code
    except ReplaykitError as error:
        say(str(error))
        mistaken = isinstance(error, ConfigurationError | NotJournalable) and not isinstance(
            error, DatabaseUnreachable | SchemaMismatch
        )
        return USAGE if mistaken else FAILED
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # click turns the first into the second, and stdout into a wrapper. The reader (head, less) has left; nothing is
        # to be flushed to it.
        if isinstance(error, SystemExit) and not type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return DONE


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="replaykit %(version)s")
def cli() -> None:
    """Durable execution for Python: plain async functions that survive crashes, journaled in Postgres.

    Without a database URL an embedded Postgres is used, which starts by itself.
    RUN is a run's id, the last 6 or more characters of one, or its key.
    MODULE is a dotted name or a path to a file.
    """


def _not_negative(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and value < 0:
        raise click.BadParameter(f"{value:g}: a run cannot begin before its start")
    return value


# --- options that several commands share ------------------------------------------------------------------------------


def database_options(command: F) -> F:
    """Which database; the command gets it as `target`."""

    @functools.wraps(command)
    def with_target(*, database_url: str | None, schema: str, home: Path | None, **rest: Any) -> Any:
        from replaykit.interfaces.logs import only_errors
        from replaykit.runtime.target import Target

        only_errors()
        target = Target(database_url, schema, home=home, say=say)
        try:
            return command(target=target, **rest)
        finally:
            target.close()

    for option in (
        click.option(
            "--home", envvar="REPLAYKIT_HOME", type=click.Path(path_type=Path), help="Embedded Postgres's data."
        ),
        click.option("--schema", envvar="REPLAYKIT_SCHEMA", default="replaykit", show_default=True, help="Its schema."),
        click.option("--database-url", envvar="REPLAYKIT_DATABASE_URL", metavar="URL", help="Where the database is."),
    ):
        with_target = option(with_target)
    return with_target  # type: ignore[return-value]


def worker_options(command: F) -> F:
    """What a worker may be told; the command gets `settings` beside queues, lifespan and logs."""

    @functools.wraps(command)
    def with_settings(**given: Any) -> Any:
        chosen = {name: value for name in SETTINGS if (value := given.pop(name)) is not None}
        return command(settings=_settings(chosen), **given)

    for name, (kind, words) in reversed(SETTINGS.items()):
        flag, variable = f"--{name.replace('_', '-')}", f"REPLAYKIT_{name.upper()}"
        with_settings = click.option(flag, name, type=kind, envvar=variable, help=words)(with_settings)
    for option in (
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            help="From which level on; info, and warning where dev draws its view.",
        ),
        click.option(
            "--log-format", envvar="REPLAYKIT_LOG_FORMAT", type=click.Choice(["console", "json"]), default="console"
        ),
        click.option("--poll-only", is_flag=True, envvar="REPLAYKIT_POLL_ONLY", help="Use no LISTEN: poll for work."),
        click.option(
            "--lifespan", metavar="MODULE:NAME", help="An async context manager, entered before the first claim."
        ),
        click.option(
            "--queue", "queues", multiple=True, default=("default",), show_default=True, help="May be repeated."
        ),
    ):
        with_settings = option(with_settings)
    return with_settings  # type: ignore[return-value]


def json_option(command: F) -> F:
    """`--json`: the rows with the SQL names."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, with the SQL names.")(command)


def _settings(chosen: dict[str, Any]) -> Settings:
    from pydantic import ValidationError

    from replaykit.limits import Settings

    try:
        return Settings(**chosen)
    except ValidationError as error:
        first = error.errors()[0]
        raise click.UsageError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from None


# --- running ----------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("modules", metavar="MODULE...", nargs=-1, required=True)
@click.option("--processes", type=click.IntRange(1), envvar="REPLAYKIT_PROCESSES", default=1, show_default=True)
@worker_options
@database_options
def worker(
    target: Target,
    modules: tuple[str, ...],
    queues: tuple[str, ...],
    processes: int,
    lifespan: str | None,
    poll_only: bool,
    log_format: str,
    log_level: str | None,
    settings: Settings,
) -> int:
    """Execute runs of the workflows in MODULE..., until SIGTERM or SIGINT."""
    from replaykit.interfaces.logs import SETUP, setup
    from replaykit.runtime.config import WorkerConfig
    from replaykit.runtime.inspect import Inspector
    from replaykit.runtime.modules import find_module
    from replaykit.runtime.supervisor import run_workers

    log_level = log_level or "info"
    setup(log_format, log_level)
    for module in modules:  # here what is not there at all is one sentence: a child's would come after five events
        find_module(module)
    with Inspector(target) as inspector:  # here a wrong database or schema is one sentence, not one for each child
        inspector.check()
    return run_workers(
        WorkerConfig(
            dsn=target.open(),
            schema_name=target.schema,
            modules=modules,
            queues=queues,
            processes=processes,
            lifespan=lifespan,
            settings=settings,
            poll_only=poll_only,
            log_format="json" if log_format == "json" else "console",
            log_level=log_level,
            log_setup=SETUP,
        )
    )


@cli.command()
@click.argument("module", metavar="MODULE")
@click.option("--reload", is_flag=True, help="Start anew when a .py file of MODULE's folder changes.")
@worker_options
@database_options
def dev(target: Target, module: str, reload: bool, **options: Any) -> int:
    """One worker in this terminal, with a live view of its runs.

    The view leaves log lines below `warning` out, unless --log-level says otherwise; they are written above it.
    """
    if reload:
        from replaykit.interfaces.reload import run_reloading

        return run_reloading(target, module, **options)
    from replaykit.interfaces.live import run_dev

    return run_dev(target, module, **options)


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("workflow")
@click.argument("values", metavar="[JSON ...] [NAME=JSON ...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--key", help="An idempotency key: a second start under it finds the first one's run.")
@click.option("--queue", help="Which workers may take it.")
@click.option("--priority", type=int, help="Smaller runs first.")
@click.option("--delay", type=float, metavar="SECONDS", callback=_not_negative, help="Begin that much later.")
@click.option("--wait", is_flag=True, help="Wait for the end and print the result.")
@click.option("--force", is_flag=True, help="Start it although no live worker has the workflow.")
@json_option
@database_options
def start(target: Target, workflow: str, values: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Start a run of WORKFLOW with these arguments, each a JSON value.

    The arguments are checked against what the live workers say of the workflow.
    """
    from replaykit.interfaces.starting import parse_values, start_run

    args, kwargs = parse_values(values)
    return start_run(target, workflow, args, kwargs, as_json=as_json, **options)


# --- looking ----------------------------------------------------------------------------------------------------------


@cli.command()
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@click.option("--workflow", help="Only those of this workflow.")
@click.option("--limit", type=click.IntRange(1), help=f"At most so many; {RUNS_SHOWN}, with --ids all.")
@click.option("--ids", is_flag=True, help="Print ids only, one a line: what cancel and retry read from stdin.")
@click.option("--watch", is_flag=True, help="Keep looking, with progress, until Ctrl-C.")
@json_option
@database_options
def runs(
    target: Target, state: str | None, workflow: str | None, limit: int | None, ids: bool, watch: bool, as_json: bool
) -> None:
    """List runs, newest first."""
    from replaykit.runtime.inspect import Inspector

    with Inspector(target) as inspector:
        if watch:
            from replaykit.interfaces.live import watch_runs

            watch_runs(inspector, state=state, workflow=workflow, limit=limit or RUNS_SHOWN)
            return
        if limit is None and not ids:
            limit = RUNS_SHOWN
        found = inspector.runs(state=state, workflow=workflow, limit=limit)
    if ids:
        for row in found:
            click.echo(row["id"])
    elif as_json:
        print_json(found)
    elif not found:
        say(
            "there are no such runs" if state or workflow else "there are no runs yet: start one with `replaykit start`"
        )
    else:
        from replaykit.interfaces.show import draw_runs

        screen = console()
        screen.print(draw_runs(found, short=screen.is_terminal))


@cli.command()
@click.argument("reference", metavar="RUN")
@click.option("--watch", is_flag=True, help="Keep looking until the run ends or is held.")
@click.option("--all", "every", is_flag=True, help="Draw every entry of a long journal.")
@json_option
@database_options
def show(target: Target, reference: str, watch: bool, every: bool, as_json: bool) -> None:
    """Draw one run: its steps with durations and attempts, what it does or waits for, how it ended.

    Of a journal of more than 200 entries the first 20 and the last 180 are drawn. JSON has all.
    """
    from replaykit.runtime.inspect import Inspector

    with Inspector(target) as inspector:
        run_id = inspector.find(reference)
        if watch:
            from replaykit.interfaces.live import watch_run

            watch_run(inspector, run_id, every=every)
            return
        report = inspector.show(run_id) if as_json else inspector.drawn(run_id, every=every)
    if as_json:
        print_json(report)
        return
    from replaykit.interfaces.show import draw_run

    console().print(draw_run(report))


@cli.command()
@click.argument("what", metavar="KIND:ID")
@json_option
@database_options
def find(target: Target, what: str, as_json: bool) -> None:
    """Find the steps that have observed an identifier of the world outside, such as `ticket:123`.

    ID alone finds it under each kind.
    """
    from replaykit.runtime.inspect import Inspector

    with Inspector(target) as inspector:
        found = inspector.observed(what)
    if as_json:
        print_json(found)
    elif not found:
        say(f"no step has observed {what}")
    else:
        from replaykit.interfaces.show import draw_observations

        screen = console()
        screen.print(draw_observations(found, short=screen.is_terminal))


@cli.command()
@click.option("--all", "stopped", is_flag=True, help="Those that have stopped too.")
@json_option
@database_options
def workers(target: Target, stopped: bool, as_json: bool) -> None:
    """List workers: where they run, what they have, how they are."""
    from replaykit.runtime.inspect import Inspector

    with Inspector(target) as inspector:
        found = inspector.workers(stopped=stopped)
    if as_json:
        print_json(found)
    elif not found:
        say("no worker runs: start one with `replaykit worker MODULE`")
    else:
        from replaykit.interfaces.show import draw_workers

        console().print(draw_workers(found))


# --- asking -----------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("references", metavar="RUN...", nargs=-1, required=True)
@click.option("--by", metavar="WHO", help="Who asks, for people; without it your login name.")
@json_option
@database_options
def cancel(target: Target, references: tuple[str, ...], by: str | None, as_json: bool) -> int:
    """Ask each RUN to end; `-` reads them from stdin, one a line. Prints each one's state after that.

    A run that nobody has begun is cancelled at once. The code of any other gets the request as asyncio cancels tasks, and
    may clean up. A run that has ended keeps its end.
    """
    from replaykit.interfaces.asking import cancel_runs

    return cancel_runs(target, references, by=by, as_json=as_json)


@cli.command()
@click.argument("references", metavar="RUN...", nargs=-1, required=True)
@click.option("--accept", type=click.Choice(["inputs"]), help="Recorded results stand although inputs differ now.")
@click.option("--by", metavar="WHO", help="Who asks, for people; without it your login name.")
@json_option
@database_options
def retry(
    target: Target, references: tuple[str, ...], accept: Literal["inputs"] | None, by: str | None, as_json: bool
) -> int:
    """Take each RUN on that failed or is held; `-` reads them from stdin, one a line.

    A failed run goes on from before the error that it died of: what succeeded is not run again. A held one is replayed
    by the code that the workers have now.
    """
    from replaykit.interfaces.asking import retry_runs

    return retry_runs(target, references, accept=accept, by=by, as_json=as_json)


@cli.command()
@click.argument("reference", metavar="RUN")
@click.argument("key", metavar="KEY")
@click.option("--landed", metavar="JSON", help="It happened, and the step returns this.")
@click.option("--not-landed", is_flag=True, help="It did not happen: the body runs again, or its error is raised.")
@click.option("--fail", is_flag=True, help="Nobody knows: the step raises InDoubt.")
@click.option("--by", metavar="WHO", help="Who says so, for people; without it your login name.")
@click.option("--comment", metavar="TEXT", help="How you know, for people.")
@json_option
@database_options
def resolve(
    target: Target,
    reference: str,
    key: str,
    landed: str | None,
    not_landed: bool,
    fail: bool,
    by: str | None,
    comment: str | None,
    as_json: bool,
) -> int:
    """Say what became of RUN's call KEY, which is in doubt: exactly one of --landed, --not-landed and --fail.

    `replaykit show RUN` says which calls are. The run goes on at once. A second, different word is refused.
    """
    from replaykit.interfaces.asking import resolve_call

    if (landed is not None) + not_landed + fail != 1:
        raise click.UsageError("say exactly one of --landed JSON, --not-landed and --fail")
    return resolve_call(
        target, reference, key, landed=landed, not_landed=not_landed, by=by, comment=comment, as_json=as_json
    )


# --- the database -----------------------------------------------------------------------------------------------------


@cli.group()
def db() -> None:
    """The database: migrate it, find it, open it."""


@db.command()
@json_option
@database_options
def migrate(target: Target, as_json: bool) -> None:
    """Bring the schema to the revision of this release. Any number of processes may do so at once."""
    changed = target.migrate(target.open())
    if as_json:
        print_json({"schema": target.schema, "revision": target.revision, "changed": changed})
    else:
        click.echo(f"schema {target.schema} {'is now' if changed else 'was already'} at revision {target.revision}")


@db.command()
@click.option("--from", "since", metavar="REVISION", help="From this revision on; without it from nothing.")
@click.option("--schema", envvar="REPLAYKIT_SCHEMA", default="replaykit", show_default=True)
def sql(since: str | None, schema: str) -> None:
    """Print the migration as a script, for those who run scripts by hand."""
    from replaykit.runtime.target import Target

    click.echo(Target(schema=schema).migration_sql(since))


@db.command()
@json_option
@database_options
def url(target: Target, as_json: bool) -> None:
    """Print the database's URL, password included."""
    found = target.open()
    if as_json:
        print_json({"url": found, "schema": target.schema})
    else:
        click.echo(found)


@db.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="[PSQL OPTION ...]", nargs=-1, type=click.UNPROCESSED)
@database_options
def psql(target: Target, arguments: tuple[str, ...]) -> int:
    """Open psql on the database; what follows is handed to it."""
    from replaykit.interfaces.psql import run_psql

    return run_psql(target, arguments)
