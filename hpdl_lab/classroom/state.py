"""The state folder of a hub: its parts, their owners, and its removal.

STATE/               root's
  hub/               root's only: manifest, settings, database, certificates, hashes of passwords, logs
  notebooks/         root's: the exercise forms from which each attendee gets a copy
  attendees/NAME/    root's: what the sandbox of an attendee is given, such as its certificate
  homes/NAME/        the attendee's files, of the attendee's user id

The manifest, hub/manifest.json, lists what this hub has made. A user id has no entry in /etc/passwd, so that only the
hub's server leads to it, and none is ever given to a second attendee.
"""

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import stat
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from . import limits, sandbox
from .sandbox import UnixAccount
from .settings import Settings, read_settings, write_whole

NAME = re.compile(r"[a-z][a-z0-9_-]{0,23}")
REHEARSAL = "-rehearsal-"  # an account of the hub's own, whose name no attendee can have
PARTS = ("attendees", "notebooks", "homes", "hub")  # in this order they are removed: "hub" marks the folder
BLOCK = 2**14  # user ids of one hub
UNUSED = (0x70000000, 0x7FFE0000)  # user ids that systemd's UIDS-GIDS.md lists as unused by Linux distributions
REMOVE_SECONDS = 120  # for the files of one attendee


@dataclass
class _Manifest:
    """The list of what one hub has made. place: (device, inode) of STATE/hub, by which a copy shows itself."""

    id: str
    place: list[int]
    made: bool  # whether the state folder itself was made by the hub
    first_uid: int
    names: list[str] = field(default_factory=lambda: [REHEARSAL])  # the user id of names[i] is first_uid + i
    ports: list[int] = field(default_factory=lambda: [0, 0])  # of the hub and of the proxy's interface, when last used


class HubState:
    """The state folder of a hub, open. Raises RuntimeError, ValueError in one sentence."""

    def __init__(self, folder: str, manifest: _Manifest, lock: int | None = None) -> None:
        self.folder, self.manifest, self.lock = folder, manifest, lock

    @classmethod
    def open(cls, folder: str) -> "HubState":
        """Open the state of a hub that exists; for the hub's own processes, which run while its lock is held."""
        try:
            manifest = _Manifest(**json.loads(Path(folder, "hub", "manifest.json").read_text()))
        except (OSError, ValueError, TypeError):
            raise RuntimeError(f"{folder} is no state folder of a hub of this version: nothing is done") from None
        for part in ("", *PARTS):
            with contextlib.suppress(FileNotFoundError):
                _require_own(os.path.join(folder, part))
        if _place(folder) != manifest.place:
            raise RuntimeError(
                f"{folder} is a copy of the state folder of hub {manifest.id}, or was restored: its user ids may be in "
                f'use elsewhere. If the original is gone for good, put {_place(folder)} as "place" into '
                f"{folder}/hub/manifest.json; remove a copy that is not needed with rm -r"
            )
        return cls(folder, manifest)

    @classmethod
    def lock_existing(cls, folder: str) -> "HubState":
        """Open it as `open` does, and lock it. Raises RuntimeError if a hub runs on it."""
        state = cls.open(folder)
        lock = os.open(os.path.join(folder, "hub", "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            said = read_settings(folder)
            raise RuntimeError(
                f"a hub runs already on {folder}: {said.url if said else 'it is starting'}. Stop it with Ctrl-C where "
                "it runs, or name another --state and --port"
            ) from None
        state.lock = lock
        return state

    @classmethod
    def make(cls, folder: str) -> "HubState":
        """Lock the state folder; make it first if it does not exist, or is empty."""
        made = not os.path.lexists(folder)
        if not os.path.lexists(os.path.join(folder, "hub", "manifest.json")):
            try:
                os.makedirs(folder, 0o711, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"{folder} cannot be made ({error.strerror}): name a folder that you may write, --state"
                ) from None
            _require_own(folder)
            if there := sorted(os.listdir(folder)):
                raise ValueError(f"{folder} holds other things, such as {there[0]}: name a new folder, --state")
            first_uid = _free_block()  # before anything is made: half a state folder is none
            for part in PARTS:
                os.mkdir(os.path.join(folder, part))
                os.chmod(os.path.join(folder, part), {"hub": 0o700, "notebooks": 0o755}.get(part, 0o711))
            state = cls(folder, _Manifest(uuid.uuid4().hex, _place(folder), made, first_uid))
            state.save()
        return cls.lock_existing(folder)

    def save(self) -> None:
        write_whole(Path(self.folder, "hub", "manifest.json"), json.dumps(asdict(self.manifest), indent=1))

    def account(self, name: str) -> UnixAccount:
        """Return the account of `name`; a new user id, home and folder are made for a name that is new.

        Raises: ValueError if the name is none, or if the home is not of that user id.
        """
        if name != REHEARSAL and not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name: a lower-case letter, then at most 23 of a-z 0-9 _ -")
        names = self.manifest.names
        if name not in names:
            if len(names) == BLOCK:
                raise RuntimeError(f"this hub has had {BLOCK:,} attendees: start another one, --state")
            names.append(name)
            self.save()
        number = names.index(name)
        uid = self.manifest.first_uid + number if os.geteuid() == 0 else os.getuid()
        home, given = (os.path.join(self.folder, part, name) for part in ("homes", "attendees"))
        account = UnixAccount(name, uid, home, given, f"127.77.{number >> 8}.{number & 255}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(given, 0o711)
        with contextlib.suppress(FileExistsError):
            os.mkdir(home, 0o700)
            own(home, uid)
        found = os.lstat(home)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
            raise ValueError(f"{home} is not the folder of user id {uid} that this hub has made: move it away")
        return account

    def remove(self) -> None:
        """End what runs as any of its user ids, and remove all that the manifest lists; other things stay.

        Raises: RuntimeError naming what could not be removed; the rest is gone, and a second try does the rest.
        """
        given = Settings(state=self.folder)
        left: list[str] = []
        limited = read_settings(self.folder) or given
        for name in list(self.manifest.names):
            home = os.path.join(self.folder, "homes", name)
            if not os.path.lexists(home):
                continue
            try:
                account = self.account(name)
                sandbox.end_all(account)
                os.chmod(home, 0o700)  # an attendee may have closed it
                clean = "chmod -R u+rwX . 2>/dev/null; find . -xdev -mindepth 1 -delete"
                sandbox.run_as(given, account, ["sh", "-c", clean], REMOVE_SECONDS)
                os.rmdir(home)
                limits.remove(limited, name)
            except (OSError, ValueError, RuntimeError) as error:
                left.append(f"{home} ({error})")
        limits.remove(limited, limits.HUB)
        limits.remove(limited)
        if left:
            raise RuntimeError(f"{len(left)} homes could not be removed, such as {left[0]}: mend that and try again")
        for part in ("attendees", "notebooks", "hub"):  # root's only: no link in them is somebody else's
            shutil.rmtree(os.path.join(self.folder, part))
        for folder in (os.path.join(self.folder, "homes"), *([self.folder] if self.manifest.made else [])):
            with contextlib.suppress(OSError):  # it holds what no hub has made
                os.rmdir(folder)
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def _place(folder: str) -> list[int]:
    found = os.stat(os.path.join(folder, "hub"))
    return [found.st_dev, found.st_ino]


def _require_own(folder: str) -> None:
    """Raise ValueError if `folder` is a link, or others may write it."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ValueError(
            f"{folder} is no folder of your own that only you may write (user {found.st_uid}, "
            f"{stat.filemode(found.st_mode)}): others could change what the hub keeps there: name another, --state"
        )


def own(path: str, uid: int) -> None:
    """Give a file that root has just made to an attendee."""
    if os.geteuid() == 0:
        try:
            os.chown(path, uid, uid, follow_symlinks=False)
        except OSError as error:
            raise RuntimeError(
                f"this container cannot have files of user id {uid} ({error.strerror}): start it without a user "
                "namespace, or with all user ids"
            ) from None


def _free_block() -> int:
    """Return the first of BLOCK user ids, drawn at random, as which nothing runs."""
    running: set[int] = set()
    for process in sandbox.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            running.add(process.uids().real)
    while True:
        first = random.randrange(*UNUSED, BLOCK)
        if not running & set(range(first, first + BLOCK)):
            return first
