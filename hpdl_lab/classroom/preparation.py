"""What is there before a hub starts: checks, the state folder and its lock, accounts, notebooks, a rehearsal."""

import fcntl
import os
import ssl
import subprocess
import sys
from importlib.util import find_spec

from . import account_process, accounts, limits, ports, reach, release, settings

CONFIGURATION = reach.PACKAGE / "cluster" / "jupyterhub_config.py"
LOOK = """
from importlib.util import find_spec
for name in ("jupyterhub", "jupyterlab", "hpdl_lab"):
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # a folder of this name whose files cannot be read counts as a package
        raise ModuleNotFoundError(f"No module named {name!r}")
    open(spec.origin).close()
"""


def check(given):
    """Raise RuntimeError or ValueError where a hub like this cannot be, before anything is made."""
    for package in ("firstuseauthenticator", "jupyterhub"):
        if find_spec(package) is None:
            raise RuntimeError(
                f"JupyterHub is not installed ({package} is missing): make hub, or "
                "pip install -c constraints.txt -e '.[hub]'"
            )
    if not CONFIGURATION.is_file():
        raise RuntimeError(f"there is no {CONFIGURATION}: a hub is started from a clone, not from an installed package")
    if given.isolated and os.geteuid() != 0:
        raise RuntimeError(
            "without root all attendees would share your Unix account: each could read and change the files of all, "
            "yours too. Run it as root (sudo), or say --no-isolation where everybody trusts everybody"
        )
    if not given.isolated and os.geteuid() == 0:
        raise RuntimeError("--no-isolation is for those without root: attendees would be root; leave it out")
    if given.dummy and not given.loopback:
        raise ValueError(f"--dummy lets anybody in as anybody: on 127.0.0.1 only, not on {given.address}")
    if bool(given.certificate) != bool(given.key):
        raise ValueError("TLS needs both, --certificate and --key")
    for path in filter(None, (given.certificate, given.key)):
        open(path).close()  # OSError with its name
    if given.certificate:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(given.certificate, given.key, password="")
        except ssl.SSLError:
            raise ValueError(
                f"{given.certificate} and {given.key} are no certificate chain and its key, in PEM and without password"
            ) from None


def make_folders(given):
    """The state folder, which others may pass through only, and the part of it that is only the hub's.

    Raises: ValueError where it cannot be made, somebody else may have laid something into it, or it is not a hub's.
    """
    try:
        os.makedirs(given.state, 0o711, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{given.state} cannot be made ({error.strerror}): name a folder that you may write, --state"
        ) from None
    if not is_state_folder(given.state) and (there := sorted(os.listdir(given.state))):
        raise ValueError(
            f"{given.state} holds other things, such as {there[0]}, and would be closed to others: name a new folder, "
            "--state, or an empty one"
        )
    found = os.stat(given.state)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ValueError(
            f"{given.state} belongs to user {found.st_uid}, mode {found.st_mode & 0o777:o}: others could change what "
            "the hub keeps there: name another folder, --state, that only you may write"
        )
    for folder, mode in ((given.state, 0o711), (given.private, 0o700), (os.path.join(given.state, "homes"), 0o711)):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, mode)


def is_state_folder(folder):
    """Whether a hub has been here, by `hpdl hub` or by a site itself: other folders are neither taken nor removed."""
    return any(os.path.isfile(os.path.join(folder, "hub", name)) for name in ("lock", "settings.json"))


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
    """Have one attendee look for what a server imports. Raises RuntimeError with what keeps them from it."""
    argv = [sys.executable, "-c", LOOK]
    done = subprocess.run(
        account_process.command(given, account, argv),
        env=os.environ | account_process.environment(given, account),
        cwd="/",
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise RuntimeError(f"attendees could not start a server: {reason(done.stderr)}")


def reason(log):
    """The line of a log that tells most: the last that names an error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "cannot" in line]
    return (telling or lines or ["it said nothing"])[-1]
