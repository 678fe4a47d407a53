"""Who may log in: numbered names, or those of a file, with a password where the instructor hands them out."""

import dbm
import re
from pathlib import Path

MOST = 10_000  # attendees: a typing mistake beyond
NAME = re.compile(r"[a-z][a-z0-9_-]{0,23}")  # with accounts.PREFIX it is a Unix account; at most 32 characters there
COMMENT = re.compile(r"(^|\s)#.*")  # a "#" within a password is part of it
SHORTEST_PASSWORD = 8  # characters
LONGEST_PASSWORD = 72  # bytes: bcrypt looks at no more
ROUNDS = 10  # of bcrypt, log2: 40 passwords of a file in 3 s; those that attendees choose take its default


def numbered(n):
    """n names: attendee01, attendee02, ... Raises ValueError for more than MOST."""
    if n > MOST:
        raise ValueError(f"a hub has {MOST:,} attendees at most, not {n:,}")
    digits = max(2, len(str(n)))
    return [f"attendee{i:0{digits}}" for i in range(1, n + 1)]


def read(path):
    """{name: password, or None where the attendee chooses one} of a users file; " #" begins a comment.

    Raises: ValueError: one sentence with the first lines that are wrong.
    """
    users, seen_in, wrong = {}, {}, []
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        why = "not there" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or "no text"
        raise ValueError(f"there is no users file {path} ({why}): one name on each line is wanted") from None
    for number, line in enumerate(lines, 1):
        name, password = [*COMMENT.sub("", line).split(maxsplit=1), "", ""][:2]
        if not name:
            continue
        password = password.strip()
        if not NAME.fullmatch(name):
            wrong.append(f"line {number}: {name!r} is no name: a lower-case letter, then at most 23 of a-z 0-9 _ -")
        elif name in seen_in:
            wrong.append(f"line {number}: {name} is in line {seen_in[name]} already")
        elif password and (why := weakness(password)):
            wrong.append(f"line {number}: the password of {name} {why}")
        seen_in.setdefault(name, number)
        users[name] = password or None
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise ValueError(f"{path}: {'; '.join(wrong[:3])}{more}")
    if not users:
        raise ValueError(f"{path}: no names in it: one on each line is wanted, with a password behind it or without")
    return users


def weakness(password):
    """What is wrong with a password, or None."""
    if len(password) < SHORTEST_PASSWORD:
        return f"has {len(password)} characters: {SHORTEST_PASSWORD} at least"
    if len(password.encode()) > LONGEST_PASSWORD:
        return f"has {len(password.encode())} bytes: {LONGEST_PASSWORD} at most"
    return None


def passwords_file(settings):
    """Where FirstUseAuthenticator keeps bcrypt's hashes of passwords."""
    return str(settings.private / "passwords.dbm")


def hand_out(settings, users):
    """Store the passwords of a users file for those who have none yet: what an attendee has changed stays."""
    import bcrypt

    with dbm.open(passwords_file(settings), "c", 0o600) as stored:
        for name, password in users.items():
            if password and name.encode() not in stored:
                stored[name.encode()] = bcrypt.hashpw(password.encode(), bcrypt.gensalt(ROUNDS))


def forget_password(settings, name):
    """The next password that `name` logs in with is the new one. Raises ValueError where there is none to forget."""
    try:
        with dbm.open(passwords_file(settings), "w") as stored:
            del stored[name.encode()]
    except (KeyError, *dbm.error):
        raise ValueError(f"{name} has no password on this hub, so there is none to forget") from None
