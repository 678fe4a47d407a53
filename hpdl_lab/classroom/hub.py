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
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from . import leftovers, ports, preparation, proxy, settings, users

START_SECONDS, STOP_SECONDS = 90, 60
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
GREETING = (
    f"Take the name that you were given. Your first password here, {users.SHORTEST_PASSWORD} characters or more, "
    "becomes your password, unless you were given one."
)


class Hub:
    """A running hub. `with Hub.start(Settings(...)) as hub:` stops it, and every server, at the end; files stay."""

    def __init__(self, given, lock):
        self.settings = given
        self.proxy = ""  # which one it is, in a sentence
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
        preparation.check(given)
        if not preparation.is_state_folder(given.state):  # else a proxy that was left may hold the port
            ports.check(given)
        argv, which = proxy.find()
        self = cls(given._replace(proxy=tuple(argv)), preparation.locked(given))
        self.proxy = which
        try:
            leftovers.end_proxy(given)
            ports.check(given)
            self.settings = given = preparation.prepare(self.settings)
            users.hand_out(given, passwords or {})
            self._launch()
        except BaseException:  # Ctrl-C as well: half a hub helps nobody
            self.stop()
            raise
        return self

    def _launch(self):
        """Start JupyterHub and return when it answers through its proxy."""
        log = self.settings.private / "hub.log"
        leftovers.end_proxy(self.settings)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTERHUB_", "CONFIGPROXY_"))}
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            begin = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterhub", "-f", str(preparation.CONFIGURATION)],
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
        # It answers a little earlier than it has found the servers that run, and than SIGTERM would end it in order.
        while not (answers(self.url) and catches(self.pid, signal.SIGTERM)):
            if self.process.poll() is not None or time.monotonic() > give_up:
                with open(log, "rb") as file:
                    file.seek(begin)
                    why = preparation.reason(file.read().decode(errors="replace"))
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
        with undisturbed():
            if self.process is not None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_SECONDS)
                self.process.kill()
                self.process.wait()
            leftovers.end_proxy(self.settings)  # of a JupyterHub that had to be killed, or was ended amid its start
            leftovers.clear(self.settings)
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
        with undisturbed():
            if preparation.is_state_folder(folder):
                leftovers.remove(folder, names)
            else:  # it was refused before anything was made
                os.rmdir(folder)


@contextlib.contextmanager
def undisturbed():
    """Heed no second Ctrl-C within it: what is being ended, which takes a minute at most, would stay half ended."""
    main = threading.current_thread() is threading.main_thread()  # the only one that may say so
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in INTERRUPTS if main}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def end_with_parent():
    """In JupyterHub's process, or its culler's: be asked to end when the process that started it is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def catches(pid, signum):
    """Whether a process has said what it will do on this signal."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (signum - 1) & 1)
    return False


def answers(url):
    """Whether JupyterHub answers through its proxy."""
    trusting = ssl._create_unverified_context()  # the certificate is for the site's name, not for this address
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting))
    try:
        with opener.open(f"{url}/hub/health", timeout=5) as reply:
            return reply.status == 200
    except (OSError, urllib.error.URLError):
        return False
