"""Two attendees at once on the hub of `hpdl hub`: they work, apart from each other, and lose nothing by what ends."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import quote

import nbformat
import psutil
import pytest
from playwright.sync_api import expect

from hpdl_lab.classroom import sandbox, sockets
from hpdl_lab.classroom.attendee import Attendee
from hpdl_lab.classroom.state import HubState

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="user ids for attendees need root")

HERE = Path(__file__).resolve().parent
SOLVED = HERE.parent.parent / "notebooks" / "solutions" / "04_ring_all_reduce.ipynb"
ADA, BOB = "ada", "bob"
PASSWORDS = {ADA: "given by the instructor", BOB: "chosen at the first login"}
IDLE = "Python 3 (ipykernel) | Idle"
HUB_SECONDS, PAGE_MS, SERVER_MS, RUN_MS = 600, 600_000, 600_000, 600_000
CULL_MINUTES = 0.1
ENDED = (
    "SSLError",
    "SSLEOFError",
    "ConnectionResetError",
    "ConnectionError",
)  # a connection without the certificate that is wanted


class Command:
    """`hpdl hub` as an instructor starts it, and the lines that it prints."""

    def __init__(self, state, port, users_file, *options):
        command = [sys.executable, "-m", "hpdl_lab", "hub", "--users-file", users_file, "--state", state]
        self.process = subprocess.Popen(
            [*command, "--port", str(port), "--engines", "4", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines, self._heard = [], threading.Condition()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()
        self.wait_for("The hub is ready")

    def _listen(self):
        for line in self.process.stdout:
            with self._heard:
                self.lines.append(line)
                self._heard.notify_all()

    def wait_for(self, text):
        """Return when it has said this."""
        with self._heard:
            said = self._heard.wait_for(lambda: any(text in line for line in self.lines), HUB_SECONDS)
        assert said, f"no {text!r} within {HUB_SECONDS} s: {''.join(self.lines)}"

    def stop(self):
        """Ctrl-C; returns when all that it says has been heard."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self._listening.join(HUB_SECONDS)
        return self.process.wait(HUB_SECONDS)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """(address, state folder, what starts `hpdl hub` there) with a file of two users; nothing is left afterwards."""
    folder = tempfile.mkdtemp(prefix="hpdl-test-", dir="/tmp")
    state, free = os.path.join(folder, "state"), sockets.ReservedPort("127.0.0.1", 0)
    port = free.port
    free.close()
    users_file = tmp_path_factory.mktemp("room") / "users.txt"
    users_file.touch(mode=0o600)
    users_file.write_text(f"{ADA}   {PASSWORDS[ADA]}   # a password from the instructor\n{BOB}\n")
    started = []

    def start(*options):
        started.append(Command(state, port, users_file, *options))
        return started[-1]

    try:
        yield f"http://127.0.0.1:{port}", Path(state), start
        for command in started:
            command.stop()
    finally:
        for command in started:
            with contextlib.suppress(ProcessLookupError):
                command.process.kill()
        wait_until(lambda: removed(state))
        os.rmdir(folder)


def removed(state):
    with contextlib.suppress(RuntimeError):  # a hub that was killed is about to end
        HubState.lock_existing(state).remove()
    return not os.path.exists(state)


@pytest.fixture(scope="module")
def command(room):
    """`hpdl hub`, ready."""
    return room[2]()


@pytest.fixture(scope="module")
def pages(chromium):
    """{name: page}, each in a browser profile of its own."""
    found = {}
    for name in (ADA, BOB):
        context = chromium.new_context(viewport={"width": 1440, "height": 900})
        found[name] = context.new_page()
        found[name].set_default_timeout(PAGE_MS)
    expect.set_options(timeout=PAGE_MS)
    yield found
    for name, page in found.items():
        with contextlib.suppress(Exception):
            page.screenshot(path=HERE / f"hub_last_{name[:3]}.png")
        page.context.close()


@pytest.fixture(scope="module")
def attendees(room, command):
    """{name: Attendee}, logged in, each with a kernel of their own: for what is tried in Python."""
    found = {name: Attendee(room[0], name, PASSWORDS[name]) for name in (ADA, BOB)}
    yield found
    for attendee in found.values():
        attendee.leave()


def notebook(state, name):
    return state / "homes" / name / "notebooks" / "04_ring_all_reduce.ipynb"


def answer(state, name):
    """Write guesses and the first exercise's answer into the attendee's copy: two engines, nothing after its check."""
    answers = [cell.source for cell in nbformat.read(SOLVED, as_version=4).cells]
    path = notebook(state, name)
    theirs = nbformat.read(path, as_version=4)
    last = next(i for i, cell in enumerate(theirs.cells) if cell.id == "check-4-1")
    theirs.cells = theirs.cells[: last + 1]
    for cell, solved in zip(theirs.cells, answers, strict=False):
        cell.source = cell.source.replace("lab.start(4)", "lab.start(2)").replace('("ring", 4)', '("ring", 2)')
        if cell.id == "exercise-4-1":
            assert "NotImplementedError" in cell.source
            cell.source = solved
        elif "lab.guess(" in cell.source:
            assert "..." in cell.source
            cell.source = solved
    owner = path.stat().st_uid
    path.write_text(nbformat.writes(theirs))
    assert path.stat().st_uid == owner == account_of(state, name).uid


def account_of(state, name):
    return HubState.open(str(state)).account(name)


def pids_of(account):
    return {process.pid for process in sandbox.remaining_processes(account)}


def log_in(page, address, name):
    page.goto(address)
    expect(page.get_by_text("Your first password here")).to_be_visible()
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(PASSWORDS[name])
    page.get_by_role("button", name="Sign in").click()


def open_notebook(page, address, name, start=False):
    """start: the server first."""
    path = f"/user/{name}/lab/tree/04_ring_all_reduce.ipynb?reset"
    page.goto(f"{address}/hub/spawn?next={quote(path)}" if start else f"{address}{path}")
    expect(page.get_by_text(IDLE)).to_be_visible(timeout=SERVER_MS)


def run_all(page):
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).click()


def said(page, text):
    """Wait until an output says this, or until a cell fails, which is an error at once."""
    found = page.locator(".jp-OutputArea-output").get_by_text(text)
    failed = page.locator("[data-mime-type='application/vnd.jupyter.error']")
    expect(found.or_(failed).first).to_be_attached(timeout=RUN_MS)
    assert failed.count() == 0, "\n".join(failed.all_text_contents())


def wait_until(true, seconds=HUB_SECONDS):
    """Return what `true()` returns as soon as that is true."""
    give_up = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < give_up, f"not within {seconds} s"
        time.sleep(0.1)
    return found


def test_two_attendees_log_in_open_04_start_engines_and_pass_a_check(room, command, pages):
    address, state, _ = room
    for name, page in pages.items():
        log_in(page, address, name)
    for name, page in pages.items():
        expect(page.locator(".jp-DirListing-content")).to_contain_text("04_ring_all_reduce", timeout=SERVER_MS)
        page.screenshot(path=HERE / f"hub_lab_{name[:3]}.png")
        answer(state, name)
    for page in pages.values():
        page.locator(".jp-DirListing-item", has_text="04_ring_all_reduce").dblclick()
    for page in pages.values():
        expect(page.get_by_text(IDLE)).to_be_visible(timeout=SERVER_MS)
        run_all(page)
    for name, page in pages.items():
        said(page, "4.1 reduce_scatter: correct")
        said(page, "engines: right on 2 MPI ranks")
        expect(page.get_by_text(IDLE)).to_be_visible(timeout=RUN_MS)
        panel = page.locator(".jp-WindowedPanel-outer")
        assert panel.evaluate("panel => getComputedStyle(panel).overflowAnchor") == "none"  # plots grow downwards
        page.locator(".jp-CodeCell", has_text="lab.check(reduce_scatter)").scroll_into_view_if_needed()
        page.screenshot(path=HERE / f"hub_check_{name[:3]}.png")


PROBE = """
import json, os, socket, ssl

def tried(fn, *args):
    try:
        fn(*args)
    except OSError as error:
        return type(error).__name__
    return "done"

def ask(*certificate):
    context = ssl._create_unverified_context()
    if certificate:
        context.load_cert_chain(*certificate)
    with socket.create_connection(server, 60) as plain, context.wrap_socket(plain) as channel:
        channel.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        if not channel.recv(100):
            raise ConnectionError

print(json.dumps({
    "homes": os.listdir("/home"), "files": [path for path in paths if os.path.lexists(path)],
    "shared": [name for name in os.listdir("/dev/shm") if list(os.stat(f"/dev/shm/{name}")[1:3]) in shared],
    "kill": sorted({tried(os.kill, pid, 0) for pid in pids}), "bind": tried(socket.socket().bind, server),
    "stranger": tried(ask), "neighbor": tried(ask, *(os.environ[f"JUPYTERHUB_SSL_{n}FILE"] for n in ("CERT", "KEY"))),
}))
"""


def test_one_attendee_reaches_nothing_of_the_other(room, command, pages, attendees):
    """Tried from a notebook of ada's, while bob's engines run; and with ada's cookies, in her browser."""
    address, state, _ = room
    bob = account_of(state, BOB)
    listening = {}
    for process in sandbox.remaining_processes(bob):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                listening[cmdline(process.pid)[2]] = connection.laddr
    assert set(listening) == {"hpdl_lab.classroom.server"}  # kernels and engines listen on no port
    server = listening["hpdl_lab.classroom.server"]
    assert server.ip == bob.ip
    pids = sorted(pids_of(bob))
    memory = Path(f"/proc/{pids[0]}/root/dev/shm")
    shared = [[file.stat().st_ino, file.stat().st_dev] for file in memory.iterdir()]  # MPI may name both's alike
    assert shared
    paths = [bob.home, bob.given, str(notebook(state, BOB)), str(state / "hub"), f"/run/hpdl-{bob.uid}"]
    told = {"server": tuple(server), "pids": [pid for pid in pids if pid > 1000], "shared": shared, "paths": paths}
    ada = attendees[ADA]
    ada.log_in()
    ada.enter_server()
    ada.open_notebook("04_ring_all_reduce.ipynb")
    names = "".join(f"{name} = {value!r}\n" for name, value in told.items())
    found = json.loads(ada.run(names + PROBE, HUB_SECONDS))
    assert (found["homes"], found["files"], found["shared"]) == ([ADA], [], [])
    assert told["pids"] and found["kill"] == ["ProcessLookupError"]
    assert found["stranger"] in ENDED and found["neighbor"] in ENDED
    assert found["bind"] == "OSError"  # in use
    page = pages[ADA].context.new_page()
    for path in ("lab", "api/contents", "files/04_ring_all_reduce.ipynb"):
        reply = page.goto(f"{address}/user/{BOB}/{path}")
        assert reply.status in (403, 404), (path, reply.status, page.url)
    page.screenshot(path=HERE / "hub_forbidden.png")
    page.close()


def hub_of(command):
    """JupyterHub, which the command has started."""
    return next(
        p for p in psutil.Process(command.process.pid).children() if "hpdl_lab.classroom.sockets" in p.cmdline()
    )


def culler_of(hub):
    """[the process that stops idle servers], where there is one."""
    return [process for process in hub.children() if "jupyterhub_idle_culler" in " ".join(cmdline(process.pid))]


def cmdline(pid):
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def test_ctrl_c_leaves_no_process_and_an_idle_server_is_stopped_without_loss(room, command, pages):
    address, state, start = room
    accounts = {name: account_of(state, name) for name in (ADA, BOB)}
    pages[ADA].keyboard.press("Control+s")
    wait_until(lambda: "4.1 reduce_scatter: correct" in notebook(state, ADA).read_text())
    pages[BOB].goto("about:blank")  # or it asks for its server all through this test
    assert command.stop() == 0
    assert "Files and passwords stay" in command.lines[-1]
    assert all(pids_of(account) == set() for account in accounts.values())
    culling = start("--idle", str(CULL_MINUTES))
    page = pages[ADA]
    page.goto(f"{address}/hub/spawn")  # still logged in
    wait_until(lambda: pids_of(accounts[ADA]))
    page.goto("about:blank")
    wait_until(lambda: not pids_of(accounts[ADA]))
    # Then the hub would start another one.
    wait_until(lambda: "to stop" in (state / "hub" / "hub.log").read_text().partition("Culling server")[2])
    (culler,) = culler_of(hub_of(culling))
    culler.suspend()  # or it may stop a server whose page takes long to load
    open_notebook(page, address, ADA, start=True)
    expect(page.locator(".jp-DirListing-content")).to_contain_text("04_ring_all_reduce")
    outputs = page.locator(".jp-OutputArea-output")
    expect(outputs.get_by_text("4.1 reduce_scatter: correct").first).to_be_attached()
    page.screenshot(path=HERE / "hub_after_culling.png")
    page.goto("about:blank")
    culler.resume()
    assert culling.stop() == 0
