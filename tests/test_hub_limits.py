"""What keeps attendees of a hub apart on one machine, enforced for real: limits, accounts, and a view without walls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpdl_lab.classroom import account_process, accounts, limits, ports, reach, settings

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="accounts and control groups need root")
NAME = f"lim{os.getpid()}"
GIGABYTE, MEGABYTE = 10**9, 10**6


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A folder behind a wall: pytest's folders are closed to other accounts, as /root is."""
    folder = tmp_path_factory.mktemp("state")
    folder.chmod(0o711)
    for name in ("homes", "notebooks"):
        (folder / name).mkdir(mode=0o755)
    assert reach.walls([str(folder)]), "this test wants a wall"
    return folder


@pytest.fixture(scope="module")
def given(state):
    """Settings of a hub that does not run, with the control groups that this system allows."""
    made = settings.Settings(users=(NAME,), state=str(state), memory=GIGABYTE, cores=1, port=ports.free())
    group, why_not = limits.find(made)
    yield made._replace(groups=tuple(group or ()), why_no_groups=why_not)
    if group:
        group.close()


@pytest.fixture(scope="module")
def account(given):
    """A new Unix account with a home, removed afterwards."""
    yield accounts.ensure(given, NAME)
    accounts.remove(given, NAME)


def python(given, account, code, groups=(), seconds=100):
    """Run Python code as the attendee."""
    return subprocess.run(
        account_process.command(given, account, [sys.executable, "-c", code], groups),
        env={**os.environ, **account_process.environment(given, account)},
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )


TAKE = "x = bytearray({})\nfor i in range(0, len(x), 4096): x[i] = 1\nprint('took it')"


@ROOT
def test_an_account_is_nobody_elses_and_has_no_way_to_more_rights(given, account):
    code = "import os; print(os.getuid(), os.getgid(), os.getgroups(), os.getcwd(), os.environ['HOME'])"
    done = python(given, account, code)
    assert done.stdout.split() == [str(account.uid), str(account.gid), "[]", account.home, account.home], done.stderr
    assert account.uid != 0 and os.stat(account.home).st_mode & 0o777 == 0o700
    done = python(given, account, "import os; os.setuid(0)")
    assert "PermissionError" in done.stderr
    status = python(given, account, "print(open('/proc/self/status').read())").stdout
    assert "NoNewPrivs:\t1" in status and "CapEff:\t0000000000000000" in status


@ROOT
def test_the_view_has_what_a_server_needs_and_nothing_else_of_a_closed_folder(given, account, state):
    secret = state.parent / "secret"
    secret.write_text("of the site")
    wall = next(iter(reach.walls([str(state)])))
    code = f"""
import os, hpdl_lab
print(hpdl_lab.__file__)
print(os.listdir({wall!r}))
for path in ({str(secret)!r}, {os.path.join(hpdl_lab_folder(), "new")!r}):
    try:
        open(path, "a")
    except OSError as error:
        print(type(error).__name__)
open(os.path.expanduser("~/mine"), "w").write("kept")
"""
    done = python(given, account, code)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(hpdl_lab_folder()), done.stderr
    assert lines[2] in ("FileNotFoundError", "PermissionError") and lines[3] in ("PermissionError", "OSError")
    assert Path(account.home, "mine").read_text() == "kept" and secret.read_text() == "of the site"


def hpdl_lab_folder():
    return os.path.join(reach.PACKAGE, "hpdl_lab")


def test_a_folder_that_is_itself_closed_is_refused_with_the_remedy(tmp_path, monkeypatch):
    closed = tmp_path / "clone"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(reach, "walls", lambda paths: {str(closed): [str(closed)]})
    with pytest.raises(RuntimeError, match="accounts cannot read .*clone .mode drwx------.: chmod -R o.rX .*/opt"):
        reach.view(settings.Settings(state=str(tmp_path)), str(tmp_path / "home"))


def test_the_first_closed_folder_on_the_way_is_the_wall(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a").chmod(0o700)
    outermost = next(iter(reach.walls([str(tmp_path)])), None)
    assert reach.walls([str(inner), str(inner.parent)]) == {
        outermost or str(inner.parent): [str(inner), str(inner.parent)]
    }
    assert reach.walls(["/usr/bin", "/"]) == {}


@ROOT
def test_memory_is_limited_for_all_processes_of_an_attendee_together(given, account):
    group = limits.of(given)
    if group is None:
        pytest.skip(given.why_no_groups)
    joins = group.make(NAME, 200 * MEGABYTE, given.core_limit)
    take = TAKE.format(120 * MEGABYTE)
    alone = python(given, account, take, joins)
    assert alone.stdout == "took it\n", alone.stderr
    two = f"""
import subprocess, sys
held = {take!r} + "; sys.stdout.flush(); sys.stdin.read()"
command = [sys.executable, "-c", "import sys\\n" + held]
children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
for child in children:
    child.stdout.readline()
for child in children:
    child.stdin.close()
print(sorted(child.wait() for child in children))
"""
    both = python(given, account, two, joins)
    assert both.stdout == "[-9, 0]\n", both.stdout + both.stderr  # the one that came first, perhaps, when it had all
    group.remove(NAME)
    assert not any(os.path.exists(path) for path in joins)


@ROOT
def test_cpu_time_is_limited(given, account):
    group = limits.of(given)
    if group is None:
        pytest.skip(given.why_no_groups)
    joins = group.make(NAME, given.memory_limit, 0.2)
    burn = "import time; t0, c0 = time.monotonic(), time.process_time()\nwhile time.monotonic() < t0 + 1.5: pass\n"
    done = python(given, account, burn + "print((time.process_time() - c0) / (time.monotonic() - t0))", joins)
    assert float(done.stdout) < 0.3, done.stderr
    group.remove(NAME)


@ROOT
def test_without_groups_each_process_has_a_limit_that_it_cannot_raise(given, account):
    alone = given._replace(groups=())
    done = python(alone, account, TAKE.format(12 * GIGABYTE // 10))
    assert "MemoryError" in done.stderr and "took it" not in done.stdout
    code = "import resource as r; r.setrlimit(r.RLIMIT_DATA, (-1, -1))"
    assert "ValueError" in python(alone, account, code).stderr
    code = "import os, resource as r; print(os.nice(0), r.getrlimit(r.RLIMIT_NPROC)); os.nice(-1)"
    done = python(alone, account, code)
    assert (
        done.stdout == f"{limits.NICE} ({limits.PROCESSES}, {limits.PROCESSES})\n" and "PermissionError" in done.stderr
    )


@ROOT
def test_what_an_attendee_leaves_running_is_ended(given, account):
    code = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    time.sleep(600)
"""
    assert python(given, account, code).returncode == 0
    assert len(accounts.processes(account.uid)) == 1
    shared = Path(f"/dev/shm/left-by-{account.uid}")
    python(given, account, f"open({str(shared)!r}, 'w')")
    assert shared.exists()
    accounts.end_processes(given, account)
    assert accounts.processes(account.uid) == [] and not shared.exists()


@ROOT
def test_an_account_of_another_hub_is_not_taken_over(given, account, tmp_path):
    with pytest.raises(ValueError, match=f"the account hpdl-{NAME} lives in .*: it is of another hub"):
        accounts.ensure(given._replace(state=str(tmp_path)), NAME)


# -- which means are chosen --------------------------------------------------------------------------------------------


def test_groups_of_version_2_are_made_below_the_hubs_own_and_share_out_cores(tmp_path):
    mine = tmp_path / "system.slice" / "hub.service"
    mine.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    own = tmp_path / "own"
    own.write_text("0::/system.slice/hub.service\n")
    given = settings.Settings(port=8000)
    group, why_not = limits.find(given, str(tmp_path), str(own))
    assert why_not == "" and group == (2, {"all": str(mine / "hpdl-hub-8000")})
    assert (mine / "hpdl-hub" / "cgroup.procs").read_text() == "0"  # the hub itself leaves the group that gets children
    assert (mine / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    assert group.make("ada", 3 * GIGABYTE, 2) == [str(mine / "hpdl-hub-8000" / "ada" / "cgroup.procs")]
    ada = mine / "hpdl-hub-8000" / "ada"
    assert {file.name: file.read_text() for file in ada.iterdir()} == {
        "memory.max": "3000000000",
        "cpu.max": "200000 100000",
        "cpu.weight": "200",
        "pids.max": "1024",
    }


def test_what_is_in_force_is_said_with_the_reason_for_what_is_not(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/\n")
    given = settings.Settings(users=("ada",), memory=3 * GIGABYTE, cores=1)
    group, why_not = limits.find(given, str(tmp_path), str(own))
    assert group is None and why_not == "this system has no control groups for memory, cpu, pids"
    sentences = limits.said(given._replace(why_no_groups=why_not))
    assert (
        sentences[0]
        == f"Each process of an attendee has 3.0 GB of memory at most (RLIMIT_DATA), all together no limit: {why_not}."
    )
    assert "1 core each by affinity, which programs can change, and nice 5" in sentences[1]
    told = limits.said(given._replace(groups=(1, {"memory": "/x"})))
    assert told == [
        "Each attendee has 3.0 GB of memory, 1 core and 1,024 processes at most, by control groups (version 1)."
    ]


def test_cores_are_dealt_out_in_turns(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    given = settings.Settings(users=("ada", "bob", "eve"), cores=4)
    assert [limits.cores_of(given, name) for name in given.users] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert limits.cores_of(given._replace(cores=0, engines=8), "ada") == []  # all of them


def test_limits_that_nobody_named_follow_from_the_engines():
    assert settings.Settings(engines=4).memory_limit == 3 * GIGABYTE
    assert settings.Settings(engines=1000).core_limit == len(os.sched_getaffinity(0))
