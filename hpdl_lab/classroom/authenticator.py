"""Logins: names of a list, each with a password from the instructor, or one chosen at the first login."""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging.handlers
import os
import re
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jupyterhub.auth import Authenticator
from tornado.httputil import HTTPServerRequest
from tornado.web import HTTPError, RequestHandler
from traitlets import Unicode

from .settings import LOG_BYTES, LOGS, Settings, write_whole
from .state import NAME

if TYPE_CHECKING:
    from jupyterhub.user import User

MOST = 10_000  # attendees: a typing mistake beyond
COMMENT = re.compile(r"(^|\s)#.*")  # a "#" within a password is part of it
SHORTEST, LONGEST = 8, 256  # of passwords: characters, bytes
AT_ONCE, WAITING = 2, 100  # password checks that run, and that may wait: each takes a core for 50 ms
PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds after a wrong password, doubled with each one more
GREETING = (
    f"Take the name that you were given. Your first password here, {SHORTEST} characters or more, "
    "becomes your password, unless you were given one."
)
_writing = threading.Lock()


class AttendeeAuthenticator(Authenticator):
    """Passwords of attendees. Checks run outside of the event loop; guessing takes longer each time."""

    passwords = Unicode(config=True, help="The file with the hashes of passwords, which only root may read.")

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self._wrong: dict[tuple[str, str], tuple[int, float]] = {}  # (name, address): (how often, wait until)
        # Requests, which anybody can send by the million, do not fill it.
        self._logins = logging.handlers.RotatingFileHandler(
            Path(self.passwords).with_name("logins.log"), "a", LOG_BYTES, LOGS, delay=True
        )
        self._checks, self._waiting = ThreadPoolExecutor(AT_ONCE), 0  # not the threads that stop servers

    def add_user(self, user: "User") -> None:
        """Refuse a name off the list, also of the database, from which it is deleted at the start of the hub."""
        if user.name not in self.allowed_users:
            raise ValueError(f"{user.name} is not on the list")
        super().add_user(user)

    def delete_user(self, user: "User") -> None:
        """Keep the name on the list: `hpdl hub --forget-password` ends only its sessions and tokens."""

    async def authenticate(  # pyrefly: ignore[bad-override]  # the one above has no types, and returns nothing
        self, handler: RequestHandler, data: dict[str, str]
    ) -> str | None:
        """Return the name, or None for a wrong name or password. Raises HTTPError for who should wait."""
        if not {"username", "password"} <= data.keys():
            raise HTTPError(400, "A name and a password are wanted")
        name, password = data["username"], data["password"]
        if name not in self.allowed_users or len(password.encode()) > LONGEST:
            return None
        source = name, address(handler.request)
        wrong, until = self._wrong.get(source, (0, 0.0))
        if (pause := until - time.monotonic()) > 0 or self._waiting >= WAITING:
            raise HTTPError(429, f"Too many logins: try again in {max(1, pause):.0f} s", reason="Wait")
        # Before the check: who guesses does not get in a hundred of them meanwhile.
        self._wrong[source] = wrong + 1, time.monotonic() + min(PAUSE * 2**wrong, LONGEST_PAUSE)
        self._waiting += 1
        try:
            stored, loop = Path(self.passwords), asyncio.get_running_loop()
            why = await loop.run_in_executor(self._checks, check_password, stored, name, password)
        finally:
            self._waiting -= 1
        line = f"{datetime.now():%F %T} {name} {'came in' if why is None else 'was refused'} from {source[1] or 'here'}"
        self._logins.emit(logging.makeLogRecord({"msg": "%s", "args": (line,)}))
        if why is None:
            self._wrong.pop(source, None)
            return name
        if why:
            raise HTTPError(403, why, reason="Refused")
        return None


def address(request: HTTPServerRequest) -> str:
    """Return where a login comes from, as the hub's own proxy has it: the last address in its header.

    Anybody can send more headers, and who is on this machine has all addresses 127.x.x.x.
    """
    certificate = cast("dict[str, Any]", request.get_ssl_certificate() or {})
    subject = dict(row[0] for row in certificate.get("subject", ()))
    try:
        ip = ipaddress.ip_address(request.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip())
    except ValueError:
        return ""
    if ip.is_loopback or subject.get("commonName") not in (None, "proxy-client"):
        return ""
    return str(ipaddress.ip_network((ip, 64 if ip.version == 6 else 32), strict=False))


def check_password(path: Path, name: str, password: str) -> str | None:
    """Return None if the password is right, or becomes the one of `name`; else why not, "" for a wrong one."""
    if (stored := load_passwords(path).get(name)) is not None:
        salt = bytes.fromhex(stored.partition("$")[0])
        return None if hmac.compare_digest(_hashed(password, salt), stored) else ""
    if why := weakness(password):
        return f"Your password {why}"
    return None if store(path, {name: password}, keep=True)[name] else ""


def _hashed(password: str, salt: bytes) -> str:
    """Return "salt$digest" in hex, by scrypt with the cost that RFC 7914 gives for logins."""
    return f"{salt.hex()}${hashlib.scrypt(password.encode(), salt=salt, n=2**14, r=8, p=1).hex()}"


def load_passwords(path: Path) -> dict[str, str]:
    """Return {name: hash} of all who have a password."""
    return json.loads(path.read_text()) if path.exists() else {}


def store(path: Path, passwords: dict[str, str | None], keep: bool) -> dict[str, bool]:
    """Store hashes; return {name: whether this password was stored}. keep: existing ones stay as they are."""
    new = {name: _hashed(password, secrets.token_bytes(16)) for name, password in passwords.items() if password}
    with _writing:
        stored = load_passwords(path)
        done = {name: not (keep and name in stored) for name in new}
        write_whole(path, json.dumps(stored | {name: new[name] for name in new if done[name]}))
    return done


def numbered(n: int) -> list[str]:
    """Return n names: attendee01, attendee02, ... Raises ValueError for more than MOST."""
    if n > MOST:
        raise ValueError(f"a hub has {MOST:,} attendees at most, not {n:,}")
    digits = max(2, len(str(n)))
    return [f"attendee{i:0{digits}}" for i in range(1, n + 1)]


def read_users(path: str) -> dict[str, str | None]:
    """Return {name: password, or None if the attendee chooses one} of a users file; " #" begins a comment.

    Raises: ValueError: one sentence with the first line that is wrong, or that others can read the passwords.
    """
    users: dict[str, str | None] = {}
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        why = "not there" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or "no text"
        raise ValueError(f"there is no users file {path} ({why}): one name on each line is wanted") from None
    for number, line in enumerate(lines, 1):
        name, password = [*COMMENT.sub("", line).split(maxsplit=1), "", ""][:2]
        why = name and not NAME.fullmatch(name) and "is no name: a lower-case letter, then at most 23 of a-z 0-9 _ -"
        weak = password and weakness(password.strip())
        if why := why or (name in users and "is in the file already") or (weak and f"has a password that {weak}"):
            raise ValueError(f"{path}, line {number}: {name!r} {why}")
        if name:
            users[name] = password.strip() or None
    if not users:
        raise ValueError(f"{path}: no names in it: one on each line is wanted, with a password behind it or without")
    if any(users.values()):
        require_secret(path, "the first passwords in it")
    return users


def require_secret(path: str, what: str) -> None:
    """Raise ValueError if other accounts can read the file."""
    if (mode := os.stat(path).st_mode) & 0o077:
        raise ValueError(f"other accounts can read {path} (mode {mode & 0o777:o}), and {what}: chmod 600 {path}")


def weakness(password: str) -> str | None:
    """Return what is wrong with a password, or None."""
    if len(password) < SHORTEST:
        return f"has {len(password)} characters: {SHORTEST} at least"
    if len(password.encode()) > LONGEST:
        return f"has {len(password.encode())} bytes: {LONGEST} at most"
    return None


def renew(given: Settings, name: str) -> str:
    """Give `name` a new random password, and return it. Raises ValueError for who has none."""
    if name not in load_passwords(given.passwords):
        raise ValueError(f"{name} has no password on this hub: the first one that they log in with becomes theirs")
    password = secrets.token_urlsafe(9)
    store(given.passwords, {name: password}, keep=False)
    return password
