"""The directory of the sockets and files of a user's engine cluster: a private one that needs no writable home.

The directory is the same for every notebook of this user and this Python environment, which is how a second notebook
finds a running cluster. It is locked (flock) while a cluster starts; the supervisor removes it when the cluster ends.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager, suppress

from ..system import write_file
from .errors import EngineError

PREFIX = "hpdl-"  # of the names; the user's number and a hash of the environment follow
SOCKET_PATH_LIMIT = 104  # bytes of a Unix socket's path where the system allows least (108 on Linux)
LONGEST_NAME = len("/rank-9999.sock.new")
ENGINE_PROCESSES = ("engines", "controller", "hosts", "relay", "job")  # whose files bear their names
LONGEST_KERNEL_NAME = len("/kernel-00000000-0000-0000-0000-000000000000-ipc-5f")
PX_CHANNELS = 15  # sockets of ipyparallel's controller: 8 for engines, 6 for clients, 1 for itself


def find_session_dir() -> tuple[str, list[str]]:
    """Return the path of the session directory, which need not exist, and why better places were passed over.

    Returns: (path, reasons): reasons is a list of sentences, empty when the first choice is good.
    Raises:  EngineError when no place is writable.
    """
    return _first_fit(f"{PREFIX}{os.getuid()}-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]}")


def of_an_engine(rank: int) -> str:
    """Make a private directory for the sockets of engine `rank` on a node that is not the notebook's machine."""
    path, _ = _first_fit(f"{PREFIX}engine-{secrets.token_hex(4)}-{rank}")
    os.mkdir(path, 0o700)
    return path


@contextmanager
def of_an_agent() -> Generator[str]:
    """Yield a private directory for the files of this process on a host that is not the notebook's; it is removed."""
    path, _ = _first_fit(f"{PREFIX}agent-{secrets.token_hex(4)}")
    os.mkdir(path, 0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def of_kernels(usual: str) -> Generator[str]:
    """Yield the directory for the sockets of Jupyter's kernels: `usual`, or a private one if its path is too long.

    The private one is removed at the end.
    """
    if len(os.fsencode(usual)) + LONGEST_KERNEL_NAME <= SOCKET_PATH_LIMIT:
        yield usual
        return
    path, _ = _first_fit(f"{PREFIX}lab-{secrets.token_hex(4)}", LONGEST_KERNEL_NAME)
    os.mkdir(path, 0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _first_fit(name: str, longest: int = LONGEST_NAME) -> tuple[str, list[str]]:
    """Return (path, reasons) of the first place for a directory `name`; see above. longest: bytes of a name in it."""
    reasons: list[str] = []
    for label, root in _candidates():
        path = os.path.join(root, name)
        why = _unfit(label, root, path, longest)
        if why is None:
            return path, reasons
        reasons.append(why)
    raise EngineError(
        f"no place for the sockets of the engines: {'; '.join(reasons)}. "
        "Set XDG_RUNTIME_DIR to a short path of a directory that you can write."
    )


def _candidates() -> Iterator[tuple[str, str]]:
    """Yield the places to try, best first: memory-backed and private, then the usual temporary directories."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield "XDG_RUNTIME_DIR", runtime
    yield "the temporary directory", tempfile.gettempdir()
    yield "the temporary directory", "/tmp"
    yield "the temporary directory", "/var/tmp"


def roots() -> list[str]:
    """Return the directories in which session directories may be, each once."""
    return list(dict.fromkeys(root for _, root in _candidates()))


def _unfit(label: str, root: str, path: str, longest: int) -> str | None:
    """Return why the session directory cannot be at `path`; None when it can."""
    if len(os.fsencode(path)) + longest > SOCKET_PATH_LIMIT:
        most = SOCKET_PATH_LIMIT - longest - len(os.path.basename(path)) - 1
        return f"{label} {root} is {len(os.fsencode(root))} bytes long, and a socket's path allows {most}"
    if not os.path.isdir(root):
        return f"{label} {root} does not exist"
    if not os.access(root, os.W_OK | os.X_OK):
        return f"{label} {root} is not writable"
    if (mode := os.stat(root).st_mode) & 0o022 and not mode & stat.S_ISVTX:
        return f"in {label} {root} others may replace what is yours: chmod +t {root}"
    if not _has_locks(root):
        return f"{label} {root} is on a file system without locks"
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        return f"{path} belongs to someone else"
    return None


def _has_locks(folder: str) -> bool:
    """Return True if the file system locks folders: NFS mostly does not."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # some sites forbid listing /var/tmp, which can be used all the same
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def locked(path: str) -> Generator[None]:
    """Create `path` as a directory that only this user may enter, and hold its lock: one kernel starts at a time.

    The supervisor of a cluster that ends removes the directory; then the kernel that waited for the lock makes a new
    one. Raises EngineError if there is a link, or what is somebody else's.
    """
    while True:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            handle = open_session_dir(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise EngineError(
                f"{path} is no directory of yours ({error.strerror}): remove it, or have it removed"
            ) from None
        try:
            os.fchmod(handle, 0o700)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_at(path, handle):
                yield
                return
        finally:
            os.close(handle)


def open_session_dir(path: str) -> int:
    """Return a handle on the directory `path`. Raises OSError if there is none, a link, or somebody else's."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if os.fstat(handle).st_uid != os.getuid():
        os.close(handle)
        raise PermissionError(errno.EPERM, "it belongs to someone else", path)
    return handle


def _is_at(path: str, handle: int) -> bool:
    """Return True while the open directory is still at `path`: the supervisor of a cluster that ends moves it away."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def empty(path: str) -> None:
    """Remove what a cluster that ended badly left in its session directory. Raises OSError if that is another's."""
    handle = open_session_dir(path)
    try:
        for name in os.listdir(handle):
            if stat.S_ISDIR(os.lstat(name, dir_fd=handle).st_mode):
                shutil.rmtree(name, ignore_errors=True, dir_fd=handle)
            else:
                os.unlink(name, dir_fd=handle)
    finally:
        os.close(handle)


def readable_by_me(path: str, flags: int) -> int:
    """Open a file as an opener for `open`: what it creates, no other user can read."""
    return os.open(path, flags, 0o600)


def write_private_file(path: str, text: str) -> None:
    """Write a file that only this user can read, whole as soon as it is there."""
    write_file(path, text, 0o600)


def forget_engines(path: str, keep: Collection[str] = ()) -> None:
    """Remove what belongs to the engines of one start, before the next: sockets, statuses, logs, connection files.

    keep: names of processes that go on, and whose files stay.
    """
    names = ["rank-", "exit-", "px:", *(f"{process}." for process in ENGINE_PROCESSES if process not in keep)]
    for entry in os.scandir(path):
        if entry.name.startswith(tuple(names)):
            os.unlink(entry.path)
    shutil.rmtree(profile_dir(path), ignore_errors=True)


def engine_socket(path: str, rank: int) -> str:
    """Return the path of the socket on which engine `rank` takes tasks."""
    return os.path.join(path, f"rank-{rank}.sock")


def torch_lock(path: str) -> str:
    """Return the path of a file: each engine locks a byte of it while it imports torch in the background."""
    return os.path.join(path, "torch.lock")


def relay_socket(path: str) -> str:
    """Return the path of the socket on which the relay to engines on other machines takes orders (remote.py)."""
    return os.path.join(path, "relay.sock")


def relay_file(path: str) -> str:
    """Return the path of the JSON file that the relay writes when it is ready: {"addresses", "port", ...}."""
    return os.path.join(path, "relay.json")


def job_file(path: str) -> str:
    """Return the path of the JSON file that says how the process "job" and its hosts are doing (remote.py)."""
    return os.path.join(path, "job.json")


def job_request(path: str) -> str:
    """Return the path of the JSON file that says which cluster of ipyparallel is wanted (ipyparallel_job.py)."""
    return os.path.join(path, "job.request.json")


def supervisor_socket(path: str) -> str:
    """Return the path of the socket to which every attached kernel stays connected."""
    return os.path.join(path, "supervisor.sock")


def session_file(path: str) -> str:
    """Return the path of the JSON file with the layout of the engines, for a second notebook."""
    return os.path.join(path, "session.json")


def exit_file(path: str, rank: int | str) -> str:
    """Return the path of the file that holds the exit status of an engine that has ended, as the shell writes it."""
    return os.path.join(path, f"exit-{rank}")


def px_sockets(path: str) -> str:
    """Return the beginning of the paths of the controller's sockets; ":" and a number follow."""
    return os.path.join(path, "px")


def profile_dir(path: str) -> str:
    """Return ipyparallel's profile directory: its `security` folder holds the connection files."""
    return os.path.join(path, "ipp")


def connection_file(path: str, kind: str) -> str:
    """Return the path of the connection file that the controller writes for kind "client" or "engine"."""
    return os.path.join(profile_dir(path), "security", f"ipcontroller-{kind}.json")


def log_file(path: str, name: str) -> str:
    """Return the path of what the process `name` ("controller", "hosts", "engines") prints."""
    return os.path.join(path, f"{name}.log")


def tail(path: str, name: str) -> str:
    """Return the end of what process `name` printed."""
    return read_tail(log_file(path, name))


def read_tail(log: str, nbytes: int = 8000) -> str:
    """Return the end of the file `log`; "" if there is none."""
    with suppress(OSError), open(log, errors="replace") as file:
        return file.read()[-nbytes:]
    return ""


def last_line(log: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in log.splitlines() if re.search(r"\w", line)]
    return lines[-1] if lines else ""
