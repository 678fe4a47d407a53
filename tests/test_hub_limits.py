"""What keeps attendees of a hub apart, for real: user ids, sandboxes, limits; and what is chosen on which machine."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpdl_lab.classroom import hub, limits, sandbox, settings
from hpdl_lab.classroom.state import BLOCK, HubState
from hpdl_lab.cli import hub as command

pytestmark = pytest.mark.slow  # sandboxes, as root

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes and control groups need root")
GIGABYTE, MEGABYTE = 10**9, 10**6


@pytest.fixture(scope="module")
def folder():
    """A folder that others may enter, unlike those of pytest."""
    path = tempfile.mkdtemp(prefix="hpdl-test-", dir="/tmp")
    os.chmod(path, 0o711)
    yield Path(path)
    os.rmdir(path)


@pytest.fixture(scope="module")
def state(folder):
    """The state folder of a hub that does not run."""
    made = HubState.make(str(folder / "state"))
    yield made
    made.remove()


@pytest.fixture(scope="module")
def given(state):
    """The settings of that hub."""
    return settings.Settings(state=state.folder, memory=GIGABYTE, cores=1, sandbox=True)


@pytest.fixture(scope="module")
def limited(given):
    """The same with control groups."""
    try:
        made = given.replace(groups=limits.make_cgroups(f"hpdl-test-{os.getpid()}"))
    except RuntimeError as error:
        pytest.skip(str(error))
    yield made
    limits.remove(made)


@pytest.fixture(scope="module")
def ada(state):
    account = state.account("ada")
    sandbox.write_names(account)
    return account


def run(given, account, argv, groups=(), seconds=50):
    """Run a program as the attendee."""
    return subprocess.run(
        sandbox.command(given, account, argv, groups=groups),
        env=sandbox.attendee_environment(given, account),
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
        cwd="/",
    )


def python(given, account, code, groups=()):
    return run(given, account, [sys.executable, "-c", code], groups)


# -- user ids and sandboxes --------------------------------------------------------------------------------------------


@ROOT
@pytest.mark.parametrize("walls", [True, False])
def test_a_program_of_an_attendee_has_a_user_id_of_its_own_and_no_way_to_more_rights(given, ada, walls):
    given = given.replace(sandbox=walls)
    done = run(given, ada, ["sh", "-c", "id -u; id -g; id -G; pwd; echo $HOME; cat /proc/self/status"])
    lines = done.stdout.splitlines()
    assert lines[:5] == [str(ada.uid)] * 3 + ["/home/ada" if walls else ada.home] * 2, done.stderr
    rights = dict(line.split(":\t") for line in lines if line.startswith(("Cap", "NoNewPrivs")))
    assert rights.pop("NoNewPrivs") == "1" and len(rights) == 5 and {int(value, 16) for value in rights.values()} == {0}


@ROOT
def test_a_sandbox_has_what_a_server_needs_and_little_else(given, state, folder, ada):
    state.account("bob")
    secret = folder / "secret"
    secret.write_text("of the site")
    tried = [str(secret), f"{state.folder}/homes/bob/x", f"{settings.PACKAGE}/new", "/etc/new", "/usr/new", "/new"]
    code = f"""
import json, os, pwd
import hpdl_lab
refused = []
for path in {tried!r}:
    try:
        open(path, "a")
    except OSError as error:
        refused.append(path)
for path in ("~/kept", "/tmp/lost", "/dev/shm/lost"):
    open(os.path.expanduser(path), "w").write("mine")
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
print(json.dumps([hpdl_lab.__file__, refused, os.listdir("/home"), pwd.getpwuid(os.getuid()).pw_name, len(pids)]))
"""
    done = python(given, ada, code)
    secret.unlink()
    assert done.returncode == 0, done.stderr
    file, refused, homes, name, count = json.loads(done.stdout)
    assert file.startswith(str(settings.PACKAGE)) and refused == tried
    assert (homes, name) == (["ada"], "ada") and count < 10  # not those of this machine
    assert Path(ada.home, "kept").read_text() == "mine"
    assert not any(os.path.exists(f"{place}/lost") for place in ("/tmp", "/dev/shm"))


@ROOT
@pytest.mark.parametrize("walls", [True, False])
def test_what_an_attendee_leaves_running_is_ended(given, ada, walls, eventually):
    daemon = "trap '' TERM; setsid sleep 600 >/dev/null 2>&1 &"
    argv = sandbox.command(given.replace(sandbox=walls), ada, ["sh", "-c", daemon])
    subprocess.run(argv, env=sandbox.attendee_environment(given, ada), stdin=subprocess.DEVNULL, check=True)
    if walls:
        eventually(lambda: sandbox.remaining_processes(ada) == [])  # it ends with the sandbox
        return
    assert [process.uids().real for process in sandbox.remaining_processes(ada)] == [ada.uid]
    sandbox.end_all(ada)
    assert sandbox.remaining_processes(ada) == []


@ROOT
@pytest.mark.parametrize("walls", [True, False])
def test_a_short_program_is_bounded_in_time_and_output(given, ada, walls, eventually):
    given = given.replace(sandbox=walls)
    assert sandbox.run_as(given, ada, ["sh", "-c", "echo me; id -u"], 20) == f"me\n{ada.uid}\n".encode()
    assert len(sandbox.run_as(given, ada, ["yes"], 20, most=5000)) == 5000
    with pytest.raises(RuntimeError, match="the last of all"):
        sandbox.run_as(given, ada, ["sh", "-c", "echo first; echo the last of all >&2; exit 1"], 20)
    with pytest.raises(RuntimeError, match="longer than 0.5 s"):
        sandbox.run_as(given, ada, ["sleep", "60"], 0.5)
    eventually(lambda: sandbox.remaining_processes(ada) == [])  # killed, and perhaps without a core to end on


# -- limits ------------------------------------------------------------------------------------------------------------

TAKE = "x = bytearray({})\nfor i in range(0, len(x), 4096): x[i] = 1\nprint('took it')"


@ROOT
def test_memory_is_limited_for_all_processes_of_an_attendee_together(limited, ada):
    given = limited.replace(memory=200 * MEGABYTE)
    joins = limits.make(given, "ada")
    take = TAKE.format(120 * MEGABYTE)
    alone = python(given, ada, take, joins)
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
    both = python(given, ada, two, joins)
    assert both.stdout in ("[-9, 0]\n", "[-9, -9]\n"), both.stdout + both.stderr  # the second while the first one ends
    limits.remove(given, "ada")
    assert not any(os.path.exists(path) for path in joins)


@ROOT
def test_memory_that_was_handed_on_counts_when_the_server_starts_again(limited, ada):
    """Another attendee could hold it, by a descriptor that came over an abstract socket."""
    given = limited.replace(memory=200 * MEGABYTE)
    held = os.memfd_create("held")
    try:
        write = f"import os; os.write({held}, bytes(120_000_000)); print('took it')"
        argv = sandbox.command(given, ada, [sys.executable, "-c", write], groups=limits.make(given, "ada"))
        env = sandbox.attendee_environment(given, ada)
        assert subprocess.run(argv, env=env, pass_fds=[held], capture_output=True).stdout == b"took it\n"
        again = python(given, ada, TAKE.format(120 * MEGABYTE), limits.make(given, "ada"))
        assert again.stdout == "" and again.returncode != 0
    finally:
        os.close(held)
    assert python(given, ada, TAKE.format(120 * MEGABYTE), limits.make(given, "ada")).stdout == "took it\n"
    limits.remove(given, "ada")


@ROOT
def test_cpu_time_is_limited(limited, ada):
    given = limited.replace(cores=0.2)
    burn = "import time; t0, c0 = time.monotonic(), time.process_time()\nwhile time.monotonic() < t0 + 1.5: pass\n"
    said = "print((time.process_time() - c0) / (time.monotonic() - t0))"
    done = python(given, ada, burn + said, limits.make(given, "ada"))
    assert float(done.stdout) < 0.3, done.stderr
    limits.remove(given, "ada")


@ROOT
def test_processes_are_limited(limited, ada, monkeypatch):
    monkeypatch.setattr(limits, "PROCESSES", 30)
    code = """
import os
r, w = os.pipe()
try:
    for count in range(100):
        if os.fork() == 0:
            os.close(w)
            os.read(r, 1)  # until the parent has ended
            break
except BlockingIOError:
    print(count)
"""
    done = python(limited, ada, code, limits.make(limited, "ada"))
    assert 10 < int(done.stdout) < 30, done.stderr
    limits.remove(limited, "ada")


@ROOT
def test_groups_go_with_the_state_folder_also_if_its_hub_was_killed(folder, limited):
    made = HubState.make(str(folder / "killed"))
    given = limited.replace(state=made.folder, groups=limits.make_cgroups(f"hpdl-test-{os.getpid()}-killed"))
    given.save()
    joins = limits.make(given, made.account("ada").name)
    assert all(os.path.exists(path) for path in joins)
    made.remove()
    assert not any(os.path.exists(path) for path in given.groups)


def test_groups_of_version_2_are_made_below_the_hubs_own(tmp_path):
    mine = tmp_path / "system.slice" / "hub.service"
    mine.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    own = tmp_path / "own"
    own.write_text("0::/system.slice/hub.service\n")
    given = settings.Settings(
        memory=3 * GIGABYTE, cores=1, groups=limits.make_cgroups("hpdl-x", str(tmp_path), str(own))
    )
    assert given.groups == (str(mine / "hpdl-x"),)
    assert (mine / "hpdl-hub" / "cgroup.procs").read_text() == "0"  # the hub itself leaves the group that gets children
    for folder in (mine, mine / "hpdl-x"):
        assert (folder / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    ada = mine / "hpdl-x" / "ada"
    wanted = {"memory.max": 3 * GIGABYTE, "memory.swap.max": 0, "cpu.max": "100000 100000", "cpu.weight": 100}
    wanted["pids.max"] = limits.PROCESSES
    os.mkdir(ada)
    for file in wanted:  # as the kernel makes them
        (ada / file).touch()
    assert limits.make(given, "ada") == [str(ada / "cgroup.procs")]
    assert {file.name: file.read_text() for file in ada.iterdir()} == {k: str(v) for k, v in wanted.items()}


def test_what_is_in_force_is_said_with_the_reason_for_what_cannot_be(tmp_path):
    own = tmp_path / "own"
    own.write_text("3:memory:/x\n0::/\n")
    with pytest.raises(RuntimeError, match="no control groups for cpu, pids"):
        limits.make_cgroups("hpdl-x", str(tmp_path), str(own))
    given = settings.Settings(memory=3 * GIGABYTE, cores=1)
    given = given.replace(users=("ada",))
    assert "NO LIMITS" in next(command.instructor_lines(given))
    assert "3.0 GB of memory, 1 core and 1,024 processes" in next(
        command.instructor_lines(given.replace(groups=("/x",)))
    )


def test_limits_that_nobody_named_follow_from_the_engines():
    assert settings.Settings(engines=4).memory_limit == 4.2e9
    assert settings.Settings(engines=1000).core_limit == len(os.sched_getaffinity(0))


# -- the state folder --------------------------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path):
    """A state folder that a test may spoil."""
    made = HubState.make(str(tmp_path / "state"))
    yield made
    made.close()
    if os.geteuid() == 0:
        for account in made.manifest.names:
            shutil.rmtree(tmp_path / "state" / "homes" / account, ignore_errors=True)


def test_each_name_has_a_user_id_and_an_address_for_good(other, monkeypatch):
    ada, bob = map(other.account, ("ada", "bob"))
    assert (ada.uid, bob.uid) != (0, 0) and (ada.uid != bob.uid or os.geteuid() != 0)
    assert ada.ip != bob.ip and ada.ip.startswith("127.77.")
    for account in (ada, bob):
        home = os.stat(account.home)
        assert (home.st_mode & 0o777, home.st_uid) == (0o700, account.uid)
    other.close()
    again = HubState.lock_existing(other.folder)
    assert again.account("bob") == bob and again.account("ada") == ada
    again.manifest.names += [f"a{i}" for i in range(BLOCK - len(again.manifest.names))]
    with pytest.raises(RuntimeError, match=f"{BLOCK:,} attendees"):
        again.account("one-more")
    again.close()


@pytest.mark.parametrize("name", ["", "Ada", "../ada", "a/b", "-rehearsal", "a" * 25])
def test_no_account_for_what_is_no_name(other, name):
    with pytest.raises(ValueError, match="no name"):
        other.account(name)
    assert os.listdir(f"{other.folder}/homes") == []


def test_a_copy_of_a_state_folder_is_not_taken_for_the_original(other, tmp_path):
    """Its attendees would have the user ids of those of the original, and --remove would end their programs."""
    shutil.copytree(other.folder, tmp_path / "copy")
    for use in (HubState.open, HubState.lock_existing, HubState.make):
        with pytest.raises(RuntimeError, match=f"copy is a copy of the state folder of hub {other.manifest.id}"):
            use(str(tmp_path / "copy"))


def test_one_hub_at_a_time(other):
    with pytest.raises(RuntimeError, match="a hub runs already on .*: it is starting"):
        HubState.lock_existing(other.folder)
    settings.Settings(state=other.folder, port=4321).save()
    with pytest.raises(RuntimeError, match="a hub runs already on .*: http://127.0.0.1:4321"):
        HubState.lock_existing(other.folder)
    other.close()
    HubState.lock_existing(other.folder).close()


@pytest.mark.parametrize(
    ("part", "how"), [("", "writable"), *itertools.product(["hub", "homes", "attendees"], ["writable", "link"])]
)
def test_a_folder_that_others_may_change_is_refused(other, tmp_path, part, how):
    path = Path(other.folder, part)
    if how == "writable":
        path.chmod(0o777)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="no folder of your own that only you may write"):
        HubState.open(other.folder)
    if how == "link":
        path.unlink()
        (tmp_path / "elsewhere").rename(path)


def test_what_no_hub_has_made_stays_when_its_folder_is_removed(folder):
    there = folder / "there"
    there.mkdir(mode=0o711)
    made = HubState.make(str(there))
    (there / "homes" / "somebody").mkdir()
    (there / "thesis.tex").write_text("years of work")
    ada = made.account("ada")
    Path(ada.home, "link").symlink_to(there / "thesis.tex")
    Path(ada.home, "closed").mkdir(mode=0o000)
    if os.geteuid() == 0:
        os.chown(f"{ada.home}/closed", ada.uid, ada.uid)
    made.remove()
    assert sorted(os.listdir(there)) == ["homes", "thesis.tex"] and os.listdir(there / "homes") == ["somebody"]
    shutil.rmtree(there)


# -- what is chosen on which machine -----------------------------------------------------------------------------------


@pytest.fixture
def able(monkeypatch):
    """A machine on which everything works, as long as a test does not change it. "rehearsed": settings that were."""
    rehearsed = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(limits, "make_cgroups", lambda name: ("/x",))
    monkeypatch.setattr(hub, "check_server_imports", lambda given, state: rehearsed.append(given))
    return rehearsed


def chosen(other, **how):
    made = hub.walled(settings.Settings(state=other.folder, **how), other)
    return made.sandbox, made.groups


def test_root_has_sandboxes_and_limits_that_were_tried(able, other):
    assert chosen(other) == (True, ("/x",))
    assert [given.sandbox for given in able] == [True]


def test_without_root_attendees_must_be_trusted(able, other, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="--trust-attendees"):
        chosen(other)
    assert chosen(other, trust_attendees=True) == (False, ())


def test_without_control_groups_attendees_must_be_trusted(able, other, monkeypatch):
    def find(name):
        raise RuntimeError("no groups here")

    monkeypatch.setattr(limits, "make_cgroups", find)
    with pytest.raises(RuntimeError, match="no groups here.*--trust-attendees"):
        chosen(other)
    assert chosen(other, trust_attendees=True) == (True, ())


def test_without_a_sandbox_attendees_must_be_trusted(able, other, monkeypatch):
    def rehearse(given, state):
        if given.sandbox:
            raise RuntimeError("there is no bwrap")

    monkeypatch.setattr(hub, "check_server_imports", rehearse)
    with pytest.raises(RuntimeError, match="there is no bwrap.*bubblewrap.*--trust-attendees"):
        chosen(other)
    assert chosen(other, trust_attendees=True) == (False, ("/x",))


@ROOT
def test_packages_that_attendees_cannot_import_are_named_before_any_of_them_comes(given, state, monkeypatch):
    hub.check_server_imports(given, state)
    monkeypatch.setattr(hub, "LOOK", "import " + "json, no_such_package")
    with pytest.raises(RuntimeError, match="could not start a server: .*ModuleNotFoundError.*no_such_package"):
        hub.check_server_imports(given, state)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="there is no bwrap"):
        hub.check_server_imports(given, state)
