r"""A hub: JupyterHub with its proxy, culler and attendees' servers, as one object that starts, stops and is removed.

    hpdl hub -- Hub             waits; starts JupyterHub again when that is killed, while servers go on
                 `-- jupyterhub -f cluster/jupyterhub_config.py
                        |-- proxy               the only one that browsers talk to
                        |-- idle culler
                        `-- server of ada       enter.py -> server.py -> JupyterLab -> kernels -> engines

    with Hub.start(Settings(users=("ada", "bob"), port=8000)) as hub:
        print(hub.settings.url)

Should this process itself be killed, the system tells JupyterHub to end, and JupyterHub ends the rest.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from . import account_process, accounts, limits, ports, reach, release, settings, users

CONFIGURATION = reach.PACKAGE / "cluster" / "jupyterhub_config.py"
START_SECONDS, STOP_SECONDS, STALE_SECONDS = 90, 60, 5
PR_SET_PDEATHSIG = 1  # linux/prctl.h
GREETING = (
    f"Take the name that you were given. Your first password here, {users.SHORTEST_PASSWORD} characters or more, "
    "becomes your password, unless you were given one."
)


class Hub:
    """A running hub. `with Hub.start(Settings(...)) as hub:` stops it, and every server, at the end; files stay."""

    def __init__(self, given, lock):
        self.settings = given
        self.process = None  # JupyterHub
        self._lock = lock

    @property
    def pid(self):
        """Of JupyterHub; proxy and servers are below it."""
        return self.process.pid

    @property
    def url(self):
        """For browsers on this machine."""
        return self.settings.local_url

    @classmethod
    def start(cls, given, passwords=None):
        """Start a hub on the state folder of `given`, or go on with the one that was there.

        Args:    given: Settings; passwords: {name: first password, or None}, as users.read returns it.
        Raises:  ValueError, RuntimeError, OSError: one sentence with the remedy.
        """
        check(given)
        self = cls(given, locked(given))
        try:
            end_stale_proxy(given)
            ports.check(given)
            self.settings = given = prepare(given)
            users.hand_out(given, passwords or {})
            self._launch()
        except BaseException:  # Ctrl-C as well: half a hub helps nobody
            self.stop()
            raise
        return self

    def _launch(self):
        """Start JupyterHub and return when it answers through its proxy."""
        log = self.settings.private / "hub.log"
        end_stale_proxy(self.settings)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTERHUB_", "CONFIGPROXY_"))}
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            begin = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterhub", "-f", str(CONFIGURATION)],
                cwd=self.settings.private,
                env=environment | {settings.VARIABLE: self.settings.state},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[self._lock],  # so that the state folder stays locked until JupyterHub has ended
                start_new_session=True,  # Ctrl-C in the terminal is for this process, which ends JupyterHub in order
                preexec_fn=end_with_parent,
            )
        give_up = time.monotonic() + START_SECONDS
        while not answers(self.url):
            if self.process.poll() is not None or time.monotonic() > give_up:
                with open(log, "rb") as file:
                    file.seek(begin)
                    why = reason(file.read().decode(errors="replace"))
                ended = "ended" if self.process.poll() is not None else f"did not answer within {START_SECONDS} s"
                raise RuntimeError(f"JupyterHub {ended}: {why} (all it said: {log})")
            time.sleep(0.1)

    def serve(self, say=print):
        """Return when JupyterHub has ended by itself; where something has killed it, start it again.

        Servers go on meanwhile, and the new hub takes them over.
        """
        while True:
            code = self.process.wait()
            if code >= 0:
                raise RuntimeError(f"JupyterHub ended with exit code {code}: see {self.settings.private / 'hub.log'}")
            say(f"JupyterHub was killed ({signal.Signals(-code).name}); attendees' servers go on. Starting it again.")
            self._launch()
            say("JupyterHub answers again.")

    def stop(self):
        """Stop JupyterHub, proxy, servers, kernels and engines. Files, accounts and passwords stay."""
        try:
            if self.process is not None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_SECONDS)
                self.process.kill()
                self.process.wait()
        finally:
            clear(self.settings)
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stop()


@contextlib.contextmanager
def private(names, **how):
    """A Hub of its own for `names`, on a free port of the loopback address, of which nothing is left afterwards.

    how: fields of Settings, such as engines=2. Names should be such that no other hub of this machine has them.
    """
    folder = tempfile.mkdtemp(prefix="hpdl-hub-", dir="/tmp")
    given = settings.Settings(users=tuple(names), state=folder, port=ports.free(), **how)
    try:
        with Hub.start(given) as hub:
            yield hub
    finally:
        remove(folder, names)


# -- before the start --------------------------------------------------------------------------------------------------


def check(given):
    """Raise RuntimeError or ValueError where a hub like this cannot be, before anything is made."""
    try:
        import firstuseauthenticator  # noqa: F401
        import jupyterhub  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"JupyterHub is not installed ({error.name} is missing): make hub, or "
            "pip install -c constraints.txt -e '.[hub]'"
        ) from None
    if not CONFIGURATION.is_file():
        raise RuntimeError(f"there is no {CONFIGURATION}: a hub is started from a clone, not from an installed package")
    if given.isolated and os.geteuid() != 0:
        raise RuntimeError(
            "without root all attendees would share your Unix account: each could read and change the files of all, "
            "yours too. Run it as root (sudo), or say --no-isolation where everybody trusts everybody"
        )
    if given.dummy and not given.loopback:
        raise ValueError(f"--dummy lets anybody in as anybody: on 127.0.0.1 only, not on {given.address}")
    if bool(given.certificate) != bool(given.key):
        raise ValueError("TLS needs both, --certificate and --key")
    for path in filter(None, (given.certificate, given.key)):
        open(path).close()


def make_folders(given):
    """The state folder, which others may pass through only, and the part of it that is only the hub's."""
    for folder, mode in ((given.state, 0o711), (given.private, 0o700), (os.path.join(given.state, "homes"), 0o711)):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, mode)


def locked(given):
    """Make the state folder where it is not there, and lock it. Raises RuntimeError where a hub runs on it."""
    make_folders(given)
    lock = os.open(given.private / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        said = settings.read(given.state)
        raise RuntimeError(
            f"a hub runs already on {given.state}: {said.url}. Stop it with Ctrl-C where it runs, or name another "
            "--state and --port"
        ) from None
    return lock


def prepare(given):
    """Make what a hub of these settings needs: folders, ports, groups, accounts, notebooks; returns them filled in.

    Raises: ValueError, RuntimeError, OSError: one sentence with the remedy.
    """
    make_folders(given)
    given = ports.inner(given)
    group, why_not = limits.find(given)
    given = given._replace(groups=tuple(group or ()), why_no_groups=why_not)
    mask = os.umask(0o022)  # attendees' accounts copy from it
    try:
        release.write(given.notebooks)
    finally:
        os.umask(mask)
    given.save()
    os.environ[settings.VARIABLE] = given.state
    for name in given.users:
        account = accounts.ensure(given, name)
    if given.users:
        rehearse(given, account)
    return given


def rehearse(given, account):
    """Have one attendee import what a server does. Raises RuntimeError with what keeps them from it."""
    argv = [sys.executable, "-c", "import jupyterhub.singleuser, jupyterlab, hpdl_lab"]
    done = subprocess.run(
        account_process.command(given, account, [], argv),
        env=os.environ | account_process.environment(given, account),
        cwd="/",
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise RuntimeError(f"attendees could not start a server: {reason(done.stderr)}")


def end_stale_proxy(given):
    """End the proxy of a JupyterHub that was killed: it holds the port. Its number may be another process's by now."""
    file = given.private / "proxy.pid"
    give_up = time.monotonic() + STALE_SECONDS
    while True:
        try:
            pid = int(file.read_text())
            command = Path("/proc", str(pid), "cmdline").read_bytes()  # empty where it has ended
        except (OSError, ValueError):
            break
        if b"configurable" not in command:
            break
        os.kill(pid, signal.SIGTERM if time.monotonic() < give_up else signal.SIGKILL)
        time.sleep(0.05)
    file.unlink(missing_ok=True)


def end_with_parent():
    """In JupyterHub's process: be asked to end when the process that started it is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def answers(url):
    """Whether JupyterHub answers through its proxy."""
    trusting = ssl._create_unverified_context()  # the certificate is for the site's name, not for this address
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting))
    try:
        with opener.open(f"{url}/hub/health", timeout=5) as reply:
            return reply.status == 200
    except (OSError, urllib.error.URLError):
        return False


def reason(log):
    """The line of a log that tells most: the last that names an error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "cannot" in line]
    return (telling or lines or ["it said nothing"])[-1]


# -- after the end -----------------------------------------------------------------------------------------------------


def clear(given):
    """End what is left of servers, and remove their sockets and groups."""
    group = limits.of(given)
    homes = Path(given.state, "homes")
    for name in sorted({*given.users, *(os.listdir(homes) if homes.is_dir() else ())}):
        with contextlib.suppress(ValueError):
            account = accounts.of(given, name)
            accounts.end_processes(given, account)
            accounts.close_run(account)
        if group:
            group.remove(name)
    if group:
        group.close()


def remove(state, names=()):
    """Remove a hub that has been stopped: accounts, files of attendees, passwords, everything.

    Raises: RuntimeError where it still runs, or where this is no state folder.
    """
    if not os.path.isdir(os.path.join(state, "hub")):
        raise RuntimeError(f"{state} is no state folder of a hub: nothing is removed")
    lock = locked(settings.Settings(state=state))
    try:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            given = settings.read(state)
            clear(given)
            for name in sorted({*names, *given.users, *os.listdir(os.path.join(state, "homes"))}):
                accounts.remove(given, name)
    finally:
        os.close(lock)
    shutil.rmtree(state)
