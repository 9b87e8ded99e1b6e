"""The files for production that the docs offer: their commands exist, and they give a worker time to end."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from replaykit.interfaces.cli import cli
from replaykit.runtime.supervisor import ABANDON_SECONDS, DRAIN_MARGIN_SECONDS, RELEASE_SECONDS_MAX
from tests.test_docs import DOCS, blocks

FOLDER = DOCS / "examples" / "deploy"


def dockerfile() -> dict[str, str]:
    """The last value of each instruction; comments and continued lines as Docker reads them."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.strip())


def compose() -> Any:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(FOLDER / "replaykit.service")
    return parser["Service"]


def shell_lines(page: Path) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("replaykit ")]


def commands() -> dict[str, list[str]]:
    """The arguments of each `replaykit` in the files and on the page, by where it stands."""
    image = dockerfile()
    assert json.loads(image["ENTRYPOINT"]) == ["replaykit"]
    program, *service = shlex.split(unit()["ExecStart"])
    assert Path(program).name == "replaykit"
    built = {name: service["command"] for name, service in compose().items() if "build" in service}
    pages = {line: shlex.split(line, comments=True)[1:] for line in shell_lines(DOCS / "how-to" / "deploy.md")}
    return {"Dockerfile": json.loads(image["CMD"]), "unit": service, **built, **pages}


def parsed(arguments: list[str]) -> click.Context:
    """What click makes of them, without carrying them out. Raises for what it does not know."""
    command: click.Command = cli
    rest = list(arguments)
    name = "replaykit"
    while isinstance(command, click.Group):
        name = rest.pop(0)
        command = command.commands[name]
    return command.make_context(name, rest)


@pytest.mark.parametrize("where", sorted(commands()))
def test_every_command_is_one_that_the_command_line_takes(where: str) -> None:
    """With its options and their values."""

    assert parsed(commands()[where]).command.name in ("migrate", "worker", "workers", "runs")


@pytest.mark.parametrize("where", ["unit", "worker"])
def test_the_supervisors_patience_is_longer_than_a_drain(where: str) -> None:
    """The grace period or the lease, whichever is longer, and what the parent then needs to end the children."""

    given = parsed(commands()[where]).params
    drain = max(given["grace_seconds"], given["lease_seconds"])
    patience = {
        "unit": float(unit()["TimeoutStopSec"]),
        "worker": float(compose()["worker"]["stop_grace_period"].removesuffix("s")),
    }

    assert patience[where] >= drain + DRAIN_MARGIN_SECONDS + ABANDON_SECONDS + RELEASE_SECONDS_MAX
    assert DRAIN_MARGIN_SECONDS + ABANDON_SECONDS + RELEASE_SECONDS_MAX <= 15  # as the page says


def test_signals_reach_the_parent() -> None:
    """No shell in front of it in the image; from systemd they go to the parent alone."""

    image = dockerfile()

    assert image["STOPSIGNAL"] == "SIGTERM"
    assert isinstance(json.loads(image["ENTRYPOINT"]), list) and isinstance(json.loads(image["CMD"]), list)
    assert compose()["worker"]["init"] is True
    assert (unit()["KillMode"], unit()["KillSignal"]) == ("mixed", "SIGTERM")


def test_a_worker_is_started_again_and_is_not_root() -> None:
    """By each of the supervisors."""

    assert dockerfile()["USER"] not in ("0", "root")
    assert unit()["User"] != "root"
    assert (unit()["Restart"], unit()["RestartPreventExitStatus"]) == ("always", "2")
    assert compose()["worker"]["restart"] == "unless-stopped"


def test_the_tables_are_made_before_a_worker_starts() -> None:
    """And the database takes connections before that."""

    services = compose()

    assert services["worker"]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert services["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert services["migrate"]["restart"] == "no"


def test_no_password_stands_in_the_files() -> None:
    """They come from the environment."""

    for service in compose().values():
        for name, value in service.get("environment", {}).items():
            if "PASSWORD" in name or "URL" in name:
                assert "${POSTGRES_PASSWORD:?}" in value
