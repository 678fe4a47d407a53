"""Attacks that once succeeded, by attendees with programs of their own on a real hub, or by strangers at its port.

docs/security.md names the test behind each of its claims. Eve is the attacker.
"""

import concurrent.futures
import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import requests

from hpdl_lab import cli
from hpdl_lab.classroom import authenticator, bounds, hub, limits, sandbox, settings, sockets
from hpdl_lab.classroom.attendee import Attendee, Trouble
from hpdl_lab.classroom.state import HubState
from hpdl_lab.cli import hub as command

pytestmark = [
    pytest.mark.slow,  # a hub, with attendees
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes of several user ids need root"),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bwrap"),
]
ADA, BOB, DAN, EVE, FAY = NAMES = [f"{name}{os.getpid()}" for name in ("ada", "bob", "dan", "eve", "fay")]
PASSWORD, SECRET = "correct horse", "the-secret-of-root"
MEGABYTE = 2**20
LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
PAGE = "PAGE OF THE ATTACKER"

# Runs four programs that want to stay: with the first thread ended, respawning, detached, and not to be looked at.
STAY = """
import ctypes, os, signal, threading, time
libc = ctypes.CDLL(None)
def ghost():
    threading.Thread(target=time.sleep, args=(1000,)).start()
    libc.syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)  # exit, of this thread alone
def respawn():
    while True:
        if os.fork():
            time.sleep(0.05)
            os._exit(0)
def detached():
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(1000)
def unseen():
    libc.prctl(4, 0)  # PR_SET_DUMPABLE
    libc.unshare(0x10000000 | 0x20000000)  # a user namespace, and a process namespace below it
    os.fork()
    time.sleep(1000)
for stay in (ghost, respawn, detached, unseen):
    if not os.fork():
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        os.closerange(0, 3)
        stay()
"""


@pytest.fixture(scope="module")
def running():
    """The hub of these tests. What root has in its environment and keyring is nobody else's."""
    libc = ctypes.CDLL(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        if os.uname().machine == "x86_64":
            libc.syscall(250, 1, None)  # a session keyring of this process, and a key in it
            libc.syscall(248, b"user", b"hpdl-attack", SECRET.encode(), len(SECRET), -3)
        with hub.private(NAMES, engines=2, idle=0, trust_attendees=False) as running:
            yield running


@pytest.fixture(scope="module")
def browser(running):
    """`browser(name)`: that attendee, logged in."""
    came = {}

    def come(name):
        if name not in came:
            came[name] = Attendee(running.url, name, PASSWORD)
            came[name].log_in()
        return came[name]

    yield come
    for one in came.values():
        one.leave()


@pytest.fixture(scope="module")
def at_work(browser):
    """`at_work(name)`: that attendee in a notebook."""

    def work(name):
        one = browser(name)
        if one.socket is None:
            one.start_server(120)
        else:
            one.leave()  # the server closes what has not answered it for a minute of other tests
        one.open_notebook("00_engines.ipynb")
        return one

    return work


@contextlib.contextmanager
def attack(given, account, code, joins=(), arguments=()):
    """Python code in the sandbox of an attendee, ended afterwards."""
    sandbox.write_names(account)
    with subprocess.Popen(
        sandbox.command(given, account, [sys.executable, "-I", "-c", code, *map(str, arguments)], groups=joins),
        env=sandbox.attendee_environment(given, account),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            sandbox.kill_tree(process.pid)


def of_user(uid):
    """Numbers of all processes of which some thread runs as this user, looked for without the product's help."""
    found = []
    for status in Path("/proc").glob("[0-9]*/task/[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if str(uid) in lines["Uid"].split() and not lines["State"].startswith(("Z", "X")):
                found.append(int(status.parts[2]))
    return found


class Command:
    """`hpdl hub` in a process of its own, which can be killed; `start` again goes on with the same folder and port."""

    def __init__(self, folder, names):
        self.state, self.said = f"{folder}/state", []
        with contextlib.closing(sockets.ReservedPort("127.0.0.1", 0)) as held:
            self.port = held.port
        users = Path(folder, "users")
        users.write_text("\n".join(names))
        self.argv = [sys.executable, "-m", "hpdl_lab", "hub", "--users-file", users, "--state", self.state]
        self.argv += ["--port", str(self.port), "--engines", "2", "--idle", "0"]

    def start(self):
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(self.argv, **pipe)
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            if "The hub is ready" in line:
                return
        raise AssertionError("".join(self.said))

    def kill(self, *words):
        """Kill the command and those of its children that have a word in their arguments, all before one can react."""
        children = psutil.Process(self.process.pid).children()
        victims = [child for child in children if any(word in arg for word in words for arg in child.cmdline())]
        assert len(victims) == len(words)
        for victim in victims:
            victim.suspend()
        self.process.kill()
        for victim in victims:
            victim.kill()
        self.process.wait()


@pytest.fixture
def by_command(eventually):
    """A Command that has started, with ada and eve."""
    folder = tempfile.mkdtemp(prefix="hpdl-test-", dir="/tmp")
    command = Command(folder, (ADA, EVE))
    try:
        command.start()
        yield command
    finally:
        command.process.send_signal(signal.SIGINT)
        command.process.wait()
        command.process.stdout.close()
        eventually(lambda: removed(command.state))
        shutil.rmtree(folder)


def removed(state):
    with contextlib.suppress(RuntimeError):  # a hub that was killed is about to end
        HubState.lock_existing(state).remove()
    return not os.path.exists(state)


@contextlib.contextmanager
def others_are_answered(running, within, seconds=1.0):
    """The hub answers everybody else meanwhile, each time within `seconds`."""
    worst, stop = [], []

    def ask():
        while not stop:
            begin = time.monotonic()
            assert requests.get(f"{running.url}/hub/health", timeout=300).status_code == 200
            worst.append(time.monotonic() - begin)
            time.sleep(0.05)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            stop.append(True)
    asking.result()
    assert max(worst) < within(seconds), sorted(worst)[-5:]


def where(running, name):
    """(address, port) that the hub has told the attendee's server to listen at, once it is started."""
    give_up, uid = time.monotonic() + 60, running.state.account(name).uid
    while time.monotonic() < give_up:
        for pid in of_user(uid):
            with contextlib.suppress(psutil.Error, KeyError):
                url = psutil.Process(pid).environ()["JUPYTERHUB_SERVICE_URL"]
                address, _, port = url.removeprefix("https://").partition("/")[0].partition(":")
                return address, int(port)
        time.sleep(0.02)
    raise AssertionError(f"no server of {name} was started")


# -- what an attendee can do to the machine ----------------------------------------------------------------------------


def test_a_sandbox_shows_nothing_of_root_and_opens_to_nobody(running, at_work):
    """Environment, keys, open files, terminal, processes, folders and control groups; also with a user namespace."""
    eve = at_work(EVE)
    code = f"""
import ctypes, json, os, subprocess
found, libc = {{}}, ctypes.CDLL(None)
found["environment"] = {SECRET!r} in str(os.environ)
found["key"] = os.uname().machine == "x86_64" and libc.syscall(250, 10, -3, b"user", b"hpdl-attack", 0) > 0
found["users"] = len({{os.stat(f"/proc/{{pid}}").st_uid for pid in os.listdir("/proc") if pid.isdigit()}})
for path in ("/dev/tty", "/run/hpdl/own/new", "/etc/new", "/sys/fs/cgroup/new", "/proc/sys/kernel/core_pattern"):
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT))
        found[path] = True
    except OSError:
        found[path] = False
found["state"] = os.path.exists({running.settings.state!r})
for program in ("mount -o remount,rw,bind /etc", "umount /etc/passwd", "mount -t cgroup x /mnt"):
    found[program] = subprocess.run(["unshare", "-Urm", *program.split()], capture_output=True).returncode == 0
print(json.dumps(found))
"""
    found = json.loads(eve.run(code, 60))
    assert found.pop("users") == 1  # hers
    assert [what for what, succeeded in found.items() if succeeded] == []
    opened = [os.fstat(fd) for fd in (running.state.lock, *(held.socket.fileno() for held in running._held))]
    mine, theirs = {(file.st_dev, file.st_ino) for file in opened}, set()
    for pid in of_user(running.state.account(EVE).uid):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                theirs.add((fd.stat().st_dev, fd.stat().st_ino))
    assert theirs and not mine & theirs


def test_no_attendee_makes_a_user_namespace_unless_the_class_has_emulated_hosts(running):
    """With one, Eve would be root to a large part of the kernel. Tried by each system call that makes one."""
    code = """
import ctypes, errno, os
libc, new_user = ctypes.CDLL(None, use_errno=True), 0x10000000
unshare, clone = {"x86_64": (272, 56)}.get(os.uname().machine, (97, 220))
arguments = (ctypes.c_uint64 * 11)(new_user, 0, 0, 0, 17)
tried = {"unshare": (unshare, new_user), "with more": (unshare, new_user | 0x00020000),
         "clone": (clone, new_user | 17, 0, 0, 0, 0), "clone3": (435, ctypes.byref(arguments), 88)}
if os.uname().machine == "x86_64":
    tried["x32"] = (0x40000000 | unshare, new_user)
for name, call in tried.items():
    if (done := libc.syscall(*call)) == 0:
        print(name, "done", flush=True)
        os._exit(0)
    elif done < 0:
        print(name, errno.errorcode[ctypes.get_errno()], flush=True)
"""
    account, given = running.state.account(EVE), running.settings
    said = sandbox.run_as(given, account, [sys.executable, "-I", "-c", code], 60).decode().split("\n")
    assert [line for line in said if line.endswith("done")] == [] and {"unshare EPERM", "clone EPERM"} < set(said)
    said = sandbox.run_as(given.replace(emulated=True), account, [sys.executable, "-I", "-c", code], 60).decode()
    assert said == "unshare done\n"


def test_no_attendee_takes_the_terminals_of_all(running):
    code = """
import os
try:
    for count in range(10_000):
        os.openpty()
except OSError:
    print(count)
"""
    for emulated in (False, True):
        given = running.settings.replace(emulated=emulated)
        said = sandbox.run_as(given, running.state.account(EVE), [sys.executable, "-I", "-c", code], 60)
        assert int(said) == sandbox.TERMINALS


def test_of_the_clone_an_attendee_sees_what_servers_need(at_work):
    """Not .git/config, in which a token may stand, nor the notebooks' solutions; what shows an exercise's is there."""
    code = f"""
import os
print([os.path.exists(os.path.join({str(settings.PACKAGE)!r}, part)) for part in
       (".git", ".ci", "tests", "README.md", "notebooks/solutions", "notebooks/source", "hpdl_lab", "notebooks/hints")])
from hpdl_lab import lab
lab.catch_up("04")
print("def reduce_scatter" in repr(lab.solution(reduce_scatter)), lab.hint(reduce_scatter) is not None)
from hpdl_lab.checks.scripts.table import SCRIPTS
print(all("import" in script.solution for script in SCRIPTS))
"""
    assert at_work(EVE).run(code, 60).split("\n")[:3] == [str([False] * 6 + [True] * 2), "True True", "True"]


def test_shared_memory_that_an_attendee_plants_reaches_no_engines_of_others(at_work):
    plant = """
import os
for pid in range(1, 3001):
    number = 0x811C9DC5
    for byte in f"kvs_{pid}_0".encode():
        number = (number ^ byte) * 0x01000193 % 2**32
    os.close(os.open(f"/dev/shm/mpich_shm_{number:x}_0", os.O_CREAT | os.O_RDWR, 0o600))
print(len(os.listdir("/dev/shm")))
"""
    assert int(at_work(EVE).run(plant, 60)) >= 3000
    ada = at_work(ADA)
    assert ada.run("import os; print(os.listdir('/dev/shm'))", 60).strip() == "[]"
    code = "from hpdl_lab import lab\nlab.start(2)\nprint(list(lab.run(lambda comm: comm.rank)))\nlab.stop()"
    assert "[0, 1]" in ada.run(code, 100)


@pytest.mark.parametrize(
    "take",
    [
        "os.makedirs('/dev/shm/a'); f = open('/dev/shm/a/b', 'wb', 0)\nfor _ in range(400): f.write(block)",
        "os.makedirs('/run/a'); f = open('/run/a/b', 'wb', 0)\nfor _ in range(400): f.write(block)",
        "m = mmap.mmap(-1, 400 * 2**20)\nfor _ in range(400): m.write(block)",
        "l = ctypes.CDLL(None); l.shmat.restype = ctypes.c_void_p\n"
        "for _ in range(400): ctypes.memset(l.shmat(l.shmget(0, 2**20, 0o1600), None, 0), 1, 2**20)",
    ],
    ids=["dev-shm", "run", "mmap-shared", "system-v"],
)
def test_memory_that_processes_share_is_bounded_and_ends_with_the_sandbox(running, take, eventually):
    small, account = running.settings.replace(memory=200 * MEGABYTE), running.state.account(DAN)
    joins = limits.make(small, DAN)
    if not joins:
        pytest.skip("no control groups here")
    with attack(
        small, account, f"import ctypes, mmap, os\nblock = bytes(2**20)\n{take}\nprint('all of it')", joins
    ) as it:
        assert "all of it" not in it.communicate()[0]  # no space left, or killed
    statistics = next(file for join in joins if (file := Path(join).with_name("memory.stat")).exists())
    eventually(lambda: int(dict(row.split() for row in statistics.read_text().splitlines())["shmem"]) < MEGABYTE)
    limits.remove(small, DAN)
    assert of_user(account.uid) == [] and not any(os.path.exists(join) for join in joins)
    assert str(account.uid) not in Path("/proc/sysvipc/shm").read_text().split()
    assert account.uid not in {entry.stat(follow_symlinks=False).st_uid for entry in os.scandir("/dev/shm")}


# -- what an attendee can do to others ---------------------------------------------------------------------------------

TAKE_PLACE = f"""
import socket, ssl, sys, time
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/run/hpdl/own/certfile", "/run/hpdl/own/keyfile")
while True:
    try:
        listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
        break
    except OSError:
        time.sleep(0.01)
print("listening", flush=True)
while True:
    try:
        with context.wrap_socket(listener.accept()[0], server_side=True) as channel:
            channel.settimeout(5)
            channel.recv(65536)
            channel.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: {len(PAGE)}\\r\\n\\r\\n{PAGE}")
    except OSError:
        pass
"""


def test_no_attendee_takes_the_place_of_a_server_that_starts_or_has_died(running, browser, at_work):
    """Eve has the port first, with the certificate of her own server. Nobody who asks for theirs sees her page."""
    at_work(EVE)  # so that she has a certificate
    eve, fay, bob = running.state.account(EVE), browser(FAY), browser(BOB)

    def seen(one):
        return one.http.get(f"{running.url}{one.server}/lab", timeout=300).text

    with concurrent.futures.ThreadPoolExecutor() as pool:
        starting = pool.submit(fay.start_server, 5)
        with attack(running.settings, eve, TAKE_PLACE, arguments=where(running, FAY)) as process:
            assert process.stdout.readline() == "listening\n"
            while not starting.done():
                assert PAGE not in seen(fay)
                time.sleep(0.2)
        assert isinstance(starting.exception(), Trouble)
    bob.start_server(100)
    assert "JupyterLab" in seen(bob)
    with attack(running.settings, eve, TAKE_PLACE, arguments=where(running, BOB)) as process:
        sandbox.end_all(running.state.account(BOB))  # as when memory has run out
        assert process.stdout.readline() == "listening\n"
        for _ in range(5):
            assert PAGE not in seen(bob)


def test_what_torchrun_starts_listens_on_this_machine_only(running, at_work):
    """Its stores have no password. As a take-home cell, and as a terminal, starts it."""
    script = """
import os, psutil, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    agent = psutil.Process(os.getppid())
    print({c.laddr.ip for p in (agent, *agent.children()) for c in p.net_connections("inet") if c.status == "LISTEN"})
dist.barrier()
dist.destroy_process_group()
"""
    code = f"""
open("listen.py", "w").write({script!r})
out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 listen.py; torchrun --nproc-per-node 2 listen.py
print([line for line in out if line.startswith("{{")])
"""
    assert at_work(EVE).run(code, 300) == str([str({"127.0.0.1"})] * 2) + "\n"


def test_a_certificate_of_ones_own_opens_no_other_server_and_not_the_proxy(running, at_work):
    eve, _ = at_work(EVE), at_work(ADA)
    own = where(running, EVE)
    code = f"""
import http.client, ssl
def ask(host, port, path):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain("/run/hpdl/own/certfile", "/run/hpdl/own/keyfile")
    try:
        connection = http.client.HTTPSConnection(host, port, context=context, timeout=300)
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError as error:
        return type(error).__name__
print([ask("127.0.0.1", {running.settings.hub_port}, "/hub/api/"), ask(*{where(running, ADA)}, "/user/{ADA}/api"),
       ask(*{own}, "/user/{EVE}/api"), ask("127.0.0.1", {running.settings.proxy_port}, "/api/routes")])
"""
    answers = eve.run(code, 60)
    assert answers.startswith("[200, 'SSL") and answers.count("Error") == 2
    assert answers.endswith(" 403]\n")  # the proxy wants its token as well


def test_silent_connections_of_an_attendee_stop_no_login(running, at_work, within):
    """Eve opens three thousand to the hub's inner port, without a certificate, from a soft limit of 1,024 files."""
    eve = at_work(EVE)
    soft, hard = resource.prlimit(running.pid, resource.RLIMIT_NOFILE)
    assert soft == hard
    code = f"""
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
silent = [socket.create_connection(("127.0.0.1", {running.settings.hub_port})) for _ in range(3000)]
print(len(silent))
"""
    before = psutil.Process(running.pid).num_fds()
    assert eve.run(code, 300) == "3000\n"
    taken = psutil.Process(running.pid).num_fds() - before
    assert taken <= bounds.CONNECTIONS + 20, taken  # and those of this test
    begin = time.monotonic()
    assert guess(running, FAY, PASSWORD) == 302
    assert time.monotonic() - begin < within(2)
    eve.run("silent.clear()", 60)


TAKE_PORTS = """
import socket, sys, time
tried = 0
while True:
    for port in map(int, sys.argv[1:]):
        for family, address in ((2, "127.0.0.1"), (2, "0.0.0.0"), (10, "::1"), (10, "::"), (10, "::ffff:127.0.0.1")):
            for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                with socket.socket(family) as listener:
                    if option:
                        listener.setsockopt(socket.SOL_SOCKET, option, 1)
                    if address == "::":
                        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    tried += 1
                    try:
                        listener.bind((address, port))
                        listener.listen()
                        print("took", address, port, option, flush=True)
                    except OSError:
                        pass
    print(tried, flush=True)
    time.sleep(0.01)
"""


class Enough(Exception):
    """The hub has been started again often enough."""


def test_the_ports_of_a_hub_that_is_killed_are_nobodys(running, at_work):
    """JupyterHub, then its proxy. Servers and sessions go on."""
    at_work(ADA).run("x = 'before'", 60)
    given, said = running.settings, []
    ports = given.port, given.hub_port, given.proxy_port

    def say(text):
        said.append(text)
        if "again." in text and text.startswith("JupyterHub answers"):
            if len(said) > 2:
                raise Enough
            os.kill(running.proxy.pid, signal.SIGKILL)

    with attack(given, running.state.account(EVE), TAKE_PORTS, arguments=ports) as eve:
        assert eve.stdout.readline()
        os.kill(running.process.pid, signal.SIGKILL)
        with pytest.raises(Enough):
            running.serve(say)
        sandbox.kill_tree(eve.pid)
        lines = eve.stdout.read().splitlines()
    assert [line for line in lines if line.startswith("took")] == []
    assert int(lines[-1]) > 1000
    for name in (ADA, EVE):
        at_work(name)
    assert at_work(ADA).run("print(x)", 60) == "before\n"


def test_nothing_of_an_attendee_survives_the_stop_of_the_server(running, at_work, browser, eventually, within):
    uid = running.state.account(EVE).uid
    eve = at_work(EVE)
    before = len(set(of_user(uid)))
    eve.run(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {STAY!r}])", 60)
    eventually(lambda: len(set(of_user(uid))) >= before + 4)
    with others_are_answered(running, within):
        eve._ask("DELETE", eve.api, xsrf="/hub/")
        eventually(lambda: not of_user(uid))
        ready = f"{running.url}/hub/api/users/{EVE}"
        eventually(lambda: eve.http.get(ready, timeout=300).json().get("server") is None)
    assert not any(os.path.exists(os.path.join(folder, EVE)) for folder in running.settings.groups)


# -- what strangers, and those who may not come any more, can do -------------------------------------------------------


def guess(running, name, password, **headers):
    """The HTTP status of one login by somebody without cookies."""
    with requests.Session() as http:
        http.headers.update({key.replace("_", "-"): value for key, value in headers.items()})
        http.get(f"{running.url}/hub/login", timeout=300)
        form = {"_xsrf": http.cookies.get("_xsrf", path="/hub/")}
        form |= {key: value for key, value in (("username", name), ("password", password)) if value is not None}
        return http.post(f"{running.url}/hub/login", data=form, timeout=300, allow_redirects=False).status_code


def test_who_guesses_waits_and_keeps_nobody_else_from_the_hub(running, browser, within):
    browser(BOB)
    with others_are_answered(running, within), concurrent.futures.ThreadPoolExecutor(40) as pool:
        codes = list(pool.map(lambda i: guess(running, BOB, f"wrong password {i}"), range(40)))
    assert set(codes) == {403, 429} and codes.count(403) <= 8, codes
    forged = [guess(running, BOB, "wrong again", X_Real_Ip=f"10.0.0.{i}", X_Forwarded_For="10.1.1.1") for i in range(9)]
    assert forged.count(429) >= 3, forged  # the address that a client claims changes nothing
    assert guess(running, FAY, "x" * 10_000) == 403 and guess(running, None, None) == 400


def posted(running, send):
    """What becomes of a login by a stranger who sends its body with `send(socket)`: the status line, or the error."""
    try:
        with socket.create_connection(("127.0.0.1", running.settings.port), timeout=300) as stranger:
            stranger.sendall(b"POST /hub/login HTTP/1.1\r\nHost: hub\r\n")
            send(stranger)
            return stranger.makefile().readline().strip()
    except OSError as error:
        return type(error).__name__


def large(stranger):
    stranger.sendall(b"Content-Length: 100000000\r\n\r\n")
    for _ in range(95):
        stranger.sendall(bytes(MEGABYTE))


def in_chunks(stranger):
    stranger.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(95):
        stranger.sendall(b"100000\r\n" + bytes(MEGABYTE) + b"\r\n")


def small_and_slow(stranger):
    stranger.sendall(b"Content-Length: 60000\r\n\r\n" + bytes(59_999))


@pytest.mark.parametrize("send", [large, in_chunks, small_and_slow], ids=lambda send: send.__name__)
def test_bodies_of_strangers_fill_no_memory_and_hold_up_no_login(running, browser, within, send):
    """Two hundred requests that do not come to an end. Memory is that of JupyterHub and that of its proxy."""
    browser(ADA)
    private = [psutil.Process(pid) for pid in running.pids]
    most, stop = [], []

    def watch():
        while not stop:
            most.append(max(process.memory_info().rss for process in private))
            time.sleep(0.02)

    def log_in():
        begin = time.monotonic()
        assert guess(running, ADA, PASSWORD) == 302
        return time.monotonic() - begin

    usual = log_in()
    with concurrent.futures.ThreadPoolExecutor(202) as pool:
        watching = pool.submit(watch)
        strangers = [pool.submit(posted, running, send) for _ in range(200)]
        times = [log_in() for _ in range(5)]
        ends = {stranger.result() for stranger in strangers}
        stop.append(True)
        watching.result()
    assert max(most) < 250 * MEGABYTE, max(most) / MEGABYTE
    assert max(times) < usual + within(2), times
    assert all(end.startswith(("HTTP/1.1 4", "HTTP/1.1 503")) or end.endswith("Error") for end in ends), ends


def test_upgrades_that_are_refused_keep_no_connection_of_the_proxy(running, eventually):
    """A WebSocket to somebody's server, to the hub, and one with a large body."""
    proxy = psutil.Process(running.proxy.pid)
    before = proxy.num_fds()
    for path in (f"/user/{ADA}/api/kernels/x/channels", "/hub/home", "/hub/home\r\nContent-Length: 70000") * 20:
        path, _, more = path.partition("\r\n")
        head = f"GET {path} HTTP/1.1\r\nHost: hub\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{more}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", running.settings.port), timeout=300) as stranger:
            stranger.sendall(head.replace("\r\n\r\n\r\n", "\r\n\r\n").encode())
            assert stranger.recv(12)[:9] in (b"HTTP/1.1 ", b"")
    eventually(lambda: proxy.num_fds() <= before + 5)


def test_a_page_of_a_server_that_was_stopped_hears_so(running):
    """By HTTP 424, as JupyterHub says it, upon which JupyterLab offers to start the server again."""
    fetch = {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty", "Sec-Fetch-Site": "same-origin"}
    reply = requests.get(f"{running.url}/user/nobody/api/kernels", headers=fetch, timeout=300)
    assert reply.status_code == 424


def test_of_a_clone_in_opt_nothing_more_is_seen(running, monkeypatch):
    """All of /opt is shown otherwise."""
    clone = Path(tempfile.mkdtemp(prefix="hpdl-test-", dir="/opt"))
    clone.chmod(0o755)
    for part in (".git", "hpdl_lab"):
        (clone / part).mkdir()
    monkeypatch.setattr(sandbox, "PACKAGE", clone)
    seen = sandbox.run_as(running.settings, running.state.account(EVE), ["ls", "-A", str(clone)], 60)
    shutil.rmtree(clone)
    assert seen == b"hpdl_lab\n"


def test_hub_and_proxy_have_limits_of_their_own(running):
    for join in limits.make(running.settings, limits.HUB):
        assert set(map(str, running.pids)) <= set(Path(join).read_text().split())
    files = [Path(folder, limits.HUB, file) for folder in running.settings.groups for file in LIMIT_FILES]
    (limit,) = [int(path.read_text()) for path in files if path.exists()]
    assert limit == pytest.approx(limits.HUB_MEMORY, abs=65536)


def test_a_connection_that_says_nothing_is_closed(running):
    """Also with a certificate, and by root, whose connections are not counted."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", running.settings.hub_port), timeout=300) as silent:
        with contextlib.suppress(ConnectionError):
            assert silent.recv(1) == b""
    assert bounds.SILENT_SECONDS - 1 < time.monotonic() - began < 10 * bounds.SILENT_SECONDS


def test_who_came_in_is_found_after_a_flood_of_requests(running, browser):
    """It stands in a file of its own, without the requests that anybody can send."""
    browser(BOB)
    guess(running, BOB, "a wrong password")
    guess(running, "nobody\n2026 bob came in", PASSWORD)
    lines = (running.settings.private / "logins.log").read_text().splitlines()
    assert any(line.endswith(f" {BOB} came in from here") for line in lines)
    assert any(line.endswith(f" {BOB} was refused from here") for line in lines)
    assert not [line for line in lines if "nobody" in line or line.startswith("2026 ")]


@pytest.mark.parametrize("form", ["{} ", " {}", "{}\0", "{}\0{}", "upper", "{}\u200b"])
def test_a_name_that_is_nearly_one_is_that_one_or_none(running, browser, form):
    browser(DAN)
    name = DAN.upper() if form == "upper" else form.format(DAN, ADA)
    with requests.Session() as http:
        http.get(f"{running.url}/hub/login", timeout=300)
        form = {"_xsrf": http.cookies.get("_xsrf", path="/hub/"), "username": name, "password": PASSWORD}
        reply = http.post(f"{running.url}/hub/login", data=form, timeout=300, allow_redirects=False)
        if name.strip(" \0") == DAN:
            whose = http.get(f"{running.url}/hub/api/user", timeout=300)
            assert reply.status_code == 302 and whose.json()["name"] == DAN
        else:
            assert reply.status_code == 403


def test_a_log_that_strangers_fill_stays_small(tmp_path, monkeypatch, eventually):
    monkeypatch.setattr(hub, "LOG_BYTES", 10_000)
    log = hub.Log(tmp_path / "hub.log")
    with open(log.write_end, "w") as lines:
        for number in range(10_000):
            print(f"line {number} of a stranger", file=lines)
    eventually(lambda: log.tail and "line 9999 " in log.tail[-1])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= (hub.LOGS + 1) * 10_000


def test_a_hub_with_a_host_name_checks_the_servers_address(running, at_work):
    at_work(ADA)
    for path in ("/hub/health", f"/user/{ADA}/api"):
        reply = requests.get(running.url + path, headers={"Host": "hub.example.org"}, timeout=300)
        assert reply.status_code == 200, reply.text


def token_of(running, one):
    """The token that an attendee's server has from the hub. Attendees can make none."""
    with pytest.raises(Trouble, match="no permissions to generate tokens"):
        one._ask("POST", f"/hub/api/users/{one.name}/tokens", json={"note": "for later"}, xsrf="/hub/")
    for pid in of_user(running.state.account(one.name).uid):
        with contextlib.suppress(psutil.Error, KeyError):
            return {"Authorization": f"token {psutil.Process(pid).environ()['JUPYTERHUB_API_TOKEN']}"}
    raise AssertionError(f"{one.name} has no server")


def is_in(running, one, token):
    """Whether an earlier session, or an earlier token, still opens anything of the hub."""
    session = one.http.get(f"{running.url}/hub/home", timeout=300, allow_redirects=False).status_code == 200
    return session or requests.get(f"{running.url}/hub/api/user", headers=token, timeout=300).status_code == 200


def test_a_forgotten_password_throws_everybody_out_and_lets_in_only_the_new_one(running, browser, eventually):
    dan = browser(DAN)
    dan.start_server(100)
    token = token_of(running, dan)
    assert is_in(running, dan, token)
    new = hub.forget_password(running.settings.state, DAN)
    assert not is_in(running, dan, token)
    eventually(lambda: not of_user(running.state.account(DAN).uid))
    assert [guess(running, DAN, password) for password in (PASSWORD, new)] in ([403, 302], [403, 429])
    eventually(lambda: guess(running, DAN, new) == 302)


def test_progress_is_read_as_the_attendee_whatever_lies_there(running, capsys):
    texts = {
        ADA: lambda path: os.symlink("/dev/zero", path),
        BOB: os.mkfifo,
        EVE: lambda path: os.symlink(running.settings.private / "cookie_secret", path),
        FAY: lambda path: path.write_text('{"kind": "\x1b]0;x\x07", "exercise": "\x9b31m"}\n' + "[" * 40_000 + "\n"),
    }
    for name, lay in texts.items():
        home = Path(running.state.account(name).home, ".hpdl")
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        lay(home / "progress.jsonl")
        shutil.chown(home, running.state.account(name).uid)
    begin = time.monotonic()
    assert cli.main(["hub", "--progress", "--state", running.settings.state]) == 0
    assert time.monotonic() - begin < 60
    said = capsys.readouterr().out
    assert said.count("\n") == len(NAMES) and said.isascii() and said.replace("\n", "").isprintable()
    assert (running.settings.private / "cookie_secret").read_text().strip()[:16] not in said


def test_behind_tls_in_front_no_cookie_of_another_port_lets_in(tmp_path_factory):
    """There a browser says what it fetches, and takes only by TLS the cookie that opens an attendee's server."""
    given = settings.Settings(users=(ADA,), state=str(tmp_path_factory.mktemp("front") / "state"), port=0, idle=0)
    with hub.Hub.start(given.replace(address="0.0.0.0", engines=1)) as front:
        ada = Attendee(front.url, ADA, PASSWORD)
        ada.log_in()
        ada.start_server(100)
        (plain,) = [cookie.value for cookie in ada.http.cookies if cookie.name == "hpdl-own"]
        browser = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document", "Sec-Fetch-Site": "none"}
        browser |= {"Host": "hub.example.org"}
        session = ada.http.cookies["jupyterhub-session-id"]
        page, how = f"{front.url}/user/{ADA}/api", {"timeout": 300, "allow_redirects": False}
        all_of_them = {"Cookie": "; ".join(f"{cookie.name}={cookie.value}" for cookie in ada.http.cookies)}
        proved = requests.get(f"{front.url}/hub/own?next=/user/{ADA}/api", headers=browser | all_of_them, **how)
        safe = proved.headers["Set-Cookie"]
        assert safe.startswith(f"__Host-hpdl-own={plain};") and "Secure" in safe
        for name, status in (("hpdl-own", 302), ("__Host-hpdl-own", 200)):
            cookies = {"Cookie": f"{name}={plain}; jupyterhub-session-id={session}"}
            assert requests.get(page, headers=browser | cookies, **how).status_code == status
        # A WebSocket, for which browsers do not all say so.
        upgrade = {"Host": "hub.example.org", "Connection": "Upgrade", "Upgrade": "websocket"} | cookies
        assert requests.get(page, headers=upgrade, **how).status_code == 200
        ada.leave()
    HubState.lock_existing(given.state).remove()


# -- a hub that was killed ---------------------------------------------------------------------------------------------

HOLD = """
import fcntl, os, socket, sys, time
for folder, _, files in os.walk("/run/hpdl/notebooks"):
    for path in (folder, *(os.path.join(folder, file) for file in files)):
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
while True:
    try:
        listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
        break
    except OSError:
        time.sleep(0.001)
print("took it", flush=True)
while True:
    listener.accept()[0].sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
"""


def test_attendees_of_a_hub_that_is_killed_end_before_its_port_is_free(by_command, until_ended, eventually):
    state = HubState.open(by_command.state)
    account = state.account(EVE)
    eve = Attendee(f"http://127.0.0.1:{by_command.port}", EVE, PASSWORD)
    eve.log_in()
    eve.start_server(100)
    with attack(settings.read_settings(state.folder), account, HOLD, arguments=[by_command.port]) as attacker:
        assert attacker.stdout.readline() == "locked\n"
        servers = [psutil.Process(pid) for pid in of_user(account.uid)]
        by_command.kill("classroom.sockets")
        until_ended(servers)
        assert attacker.stdout.read() == ""
    eve.leave()

    def starts():  # as soon as all has ended
        with contextlib.suppress(AssertionError):
            by_command.start()
            return True

    eventually(starts)


def test_a_crash_of_all_leaves_no_port_and_no_lock_to_an_attendee(by_command):
    """Also what ends attendees' programs is killed: Eve has the port and every lock that she can take."""
    account = HubState.open(by_command.state).account(EVE)
    with attack(settings.read_settings(by_command.state), account, HOLD, arguments=[by_command.port]) as attacker:
        assert attacker.stdout.readline() == "locked\n"
        by_command.kill("classroom.sockets", hub.SURVIVE, hub.PROXY)
        assert attacker.stdout.readline() == "took it\n"
        by_command.start()
        assert f"Port {by_command.port} was held by {EVE} since the last hub was killed: ended." in by_command.said[1]
        assert attacker.wait(60) != 0
    ada = Attendee(f"http://127.0.0.1:{by_command.port}", ADA, PASSWORD)
    ada.log_in()
    ada.leave()


# -- the life of a state folder ----------------------------------------------------------------------------------------


def plant(home, uid):
    """What an attendee lays where root might run Python, or a shell."""
    loot = "import os; open(os.path.expanduser('~/loot'), 'a').write(str(os.environ))\n"
    for file in ("importlib/__init__.py", "jupyterhub/__init__.py", "sitecustomize.py", ".profile", ".bashrc"):
        path = Path(home, file)
        path.parent.mkdir(exist_ok=True)
        path.write_text(loot if file.endswith("py") else "env > ~/loot\n")
    subprocess.run(["chown", "-hR", f"{uid}:{uid}", home], check=True)


def test_a_second_hub_with_the_same_names_and_who_is_off_the_list(running, at_work, tmp_path_factory, eventually):
    """Its start, its second start with another list, its stop and its removal reach nothing of the first."""
    at_work(ADA).run("open('/home/' + __import__('os').environ['USER'] + '/mine', 'w').write('kept')", 60)
    state = str(tmp_path_factory.mktemp("second") / "state")
    given = settings.Settings(users=(ADA, EVE), state=state, port=0, engines=1, idle=0)
    with hub.Hub.start(given) as second:
        eve = Attendee(second.url, EVE, PASSWORD)
        eve.log_in()
        eve.start_server(100)
        token = token_of(second, eve)
        assert is_in(second, eve, token)
        before = {name: second.state.account(name) for name in (ADA, EVE)}
        first = {running.state.account(name).uid for name in NAMES}
        assert not first & {account.uid for account in before.values()}
    plant(before[EVE].home, before[EVE].uid)
    rehearsal = second.state.account("-rehearsal-")
    plant(rehearsal.home, rehearsal.uid)  # more than an attendee could
    with hub.Hub.start(given.replace(users=(BOB, ADA))) as second:
        assert not is_in(second, eve, token) and guess(second, EVE, PASSWORD) == 403
        now = {name: second.state.account(name) for name in (ADA, BOB)}
        assert now[ADA] == before[ADA] and now[BOB].uid not in {account.uid for account in before.values()}
        assert os.listdir(now[BOB].home) == []
        hub.read_progress(state)
        assert not any(
            Path(account.home, "loot").exists() for account in map(second.state.account, second.state.manifest.names)
        )
        # Something of Bob's has left its sandbox: a process that the hub has not started, in no group.
        become = ["setpriv", f"--reuid={now[BOB].uid}", f"--regid={now[BOB].uid}", "--clear-groups"]
        subprocess.run([*become, sys.executable, "-I", "-c", STAY], cwd="/", check=True)
        eventually(lambda: len(set(of_user(now[BOB].uid))) >= 4)
    assert not of_user(now[BOB].uid)
    subprocess.run([*become, sys.executable, "-I", "-c", STAY], cwd="/", check=True)
    assert cli.main(["hub", "--remove", "--state", state]) == 0
    assert not os.path.exists(state) and not of_user(now[BOB].uid)
    read = "print(open('/home/' + __import__('os').environ['USER'] + '/mine').read())"
    assert at_work(ADA).run(read, 60) == "kept\n"


@pytest.fixture
def made(tmp_path):
    """The state folder of a hub that does not run, with work of Ada in it."""
    state = HubState.make(str(tmp_path / "state"))
    account = state.account(ADA)
    Path(account.home, "work").write_text("a week of it")
    os.chown(Path(account.home, "work"), account.uid, account.uid)
    state.close()
    yield state
    subprocess.run(["rm", "-rf", state.folder], check=True)  # also what is too deep for pytest


def test_removing_a_copy_leaves_the_original_and_its_programs_alone(made, tmp_path, capsys):
    account = made.account(ADA)
    copy = str(tmp_path / "copy")
    subprocess.run(["cp", "-a", made.folder, copy], check=True)
    command = ["setpriv", f"--reuid={account.uid}", "--clear-groups", "sleep", "100"]
    with subprocess.Popen(command) as working:
        assert cli.main(["hub", "--remove", "--state", copy]) == 1
        assert "is a copy" in capsys.readouterr().err and working.poll() is None
        working.kill()
    assert Path(account.home, "work").read_text() == "a week of it" and os.listdir(f"{copy}/homes")
    moved = str(tmp_path / "moved")
    os.rename(made.folder, moved)  # the same folder: it goes, and not what stands in its place now
    again = HubState.make(made.folder)
    again.account(ADA)
    again.close()
    HubState.lock_existing(moved).remove()
    assert not os.path.exists(moved) and os.path.isdir(account.home)


def test_removing_follows_no_links_and_no_names_that_were_tampered_with(made, tmp_path):
    other = tmp_path / "other"
    (other / "precious").mkdir(parents=True)
    os.rename(f"{made.folder}/homes", tmp_path / "homes")
    os.symlink(other, f"{made.folder}/homes")
    with pytest.raises((ValueError, RuntimeError), match="homes"):
        HubState.lock_existing(made.folder).remove()
    os.unlink(f"{made.folder}/homes")
    os.rename(tmp_path / "homes", f"{made.folder}/homes")
    made.manifest.names.append("../../other/precious")
    made.save()
    state = HubState.lock_existing(made.folder)
    with pytest.raises(RuntimeError, match="1 homes could not be removed"):
        state.remove()
    state.close()
    assert (other / "precious").is_dir()


def test_a_home_of_somebody_else_is_not_used(made):
    account = made.account(ADA)
    os.chown(account.home, account.uid + 1, account.uid + 1)
    with pytest.raises(ValueError, match=str(account.uid)):
        made.account(ADA)
    shutil.rmtree(account.home)
    os.symlink("/tmp", account.home)
    with pytest.raises(ValueError, match=str(account.uid)):
        made.account(ADA)


def test_no_home_is_too_deep_or_too_closed_to_be_removed(made):
    code = """
import os
os.makedirs("closed/inner"); open("closed/inner/file", "w"); open("-rf\\n*", "w")
os.symlink("/etc", "link"); os.mkfifo("fifo")
os.chmod("closed/inner", 0); os.chmod("closed", 0)
for _ in range(2500):
    os.mkdir("deep"); os.chdir("deep")
os.chmod(os.environ["HOME"], 0)
"""
    given = settings.Settings(state=made.folder, sandbox=True)
    Path(made.account(ADA).home, "of-root").touch(0o400)
    sandbox.run_as(given, made.account(ADA), [sys.executable, "-I", "-c", code], 60)
    HubState.lock_existing(made.folder).remove()
    assert not os.path.exists(made.folder)


def test_secrets_that_others_can_read_are_refused(tmp_path):
    users, key = tmp_path / "class.txt", tmp_path / "key.pem"
    users.write_text("ada correct-horse\n")
    key.write_text("")
    for mode in (0o644, 0o640):
        users.chmod(mode)
        key.chmod(mode)
        with pytest.raises(ValueError, match="600"):
            authenticator.read_users(str(users))
        with pytest.raises(ValueError, match="600"):
            command.check_options(settings.Settings(certificate=str(key), key=str(key)))
    users.chmod(0o600)
    assert authenticator.read_users(str(users)) == {"ada": "correct-horse"}
    users.write_text("ada\nbob\n")
    users.chmod(0o644)
    assert authenticator.read_users(str(users)) == {"ada": None, "bob": None}, "names are no secret"


def test_a_hub_that_stops_nobody_is_not_asked_each_second():
    assert settings.Settings(idle=0).look_seconds >= 5
