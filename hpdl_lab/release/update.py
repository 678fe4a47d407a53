"""The attendee's folder: exercise forms and nothing else, updated without losing anything that the attendee did.

    FOLDER/04_ring_all_reduce.ipynb                 theirs
    FOLDER/04_ring_all_reduce.new.ipynb             the new form, if it could not be merged into theirs
    FOLDER/.hpdl-release/given/04_ring_all_reduce.ipynb     the form as last given: what an update starts from
    FOLDER/.hpdl-release/before/04_ring_all_reduce.ipynb    theirs as it was before the last merge

Every file is written under a new, unforeseeable name, then renamed; `given` comes last. So whatever ends this
half way, each notebook is as it was or as it will be, and the next run does the rest.

Each attendee's server runs this as it starts, mostly with nothing to merge: nbformat, which takes as long to import as
all the rest, comes in only if there is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import multiprocessing
import os
import secrets
import stat
import warnings
from collections.abc import Generator
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING

from . import forms

if TYPE_CHECKING:
    from nbformat import NotebookNode

HIDDEN = ".hpdl-release"
LARGEST = 64 << 20  # bytes of a notebook: reading one takes ten times its size
WHY = {errno.ELOOP: "is a symbolic link", errno.EISDIR: "is no file", errno.EACCES: "may not be read by you"}
NOT_SO_WRITTEN = (AssertionError, AttributeError, KeyError, TypeError, RecursionError)


def write_notebooks(
    folder: str | os.PathLike[str], source: str | os.PathLike[str] | None = None, lock: Path | None = None
) -> list[str]:
    """Write the exercise forms of `source` (None: of this clone) into `folder`, or update what it holds.

    lock: the folder that two such runs lock in turn; None: one in `folder`, which anybody who may read it can lock.
    Run by root on a folder of somebody else, or in somebody's home, it writes as they would, with no more rights.

    Returns: sentences, one for each notebook for which something was done or is to be said.
    Raises:  RuntimeError, one sentence: what could not be written, and that nothing is lost.
    """
    folder, source = Path(os.path.abspath(folder)), Path(source or forms.NOTEBOOKS).resolve()
    if source in (folder.resolve(), *folder.resolve().parents):
        raise RuntimeError(f"{folder} is where the notebooks come from: name another folder for an attendee")
    return update_forms(folder, forms.exercises(source), lock)


def update_forms(folder: Path, given: forms.Forms, lock: Path | None = None) -> list[str]:
    """Bring the files `given`, {path in the folder: bytes}, to an absolute folder, as `write_notebooks` does."""
    try:
        account = _somebody_else(folder)
        return _as_account(account, folder, given) if account else _bring_all(folder, given, lock)
    except OSError as error:
        raise RuntimeError(
            f"{error.filename or folder}: {error.strerror}. Nothing is lost: no notebook is left half written; "
            "mend that and run it again"
        ) from None


def _bring_all(folder: Path, given: forms.Forms, lock: Path | None = None) -> list[str]:
    (folder / HIDDEN).mkdir(parents=True, exist_ok=True)
    with exclusively(lock or folder / HIDDEN, folder):
        return [said for name, form in given.items() if (said := _bring(folder, name, form))]


class LeftAlone(Exception):
    """Something in the place of a notebook that cannot be read as one."""


def _bring(folder: Path, name: str, form: bytes) -> str | None:
    """Bring one notebook up to date. Returns a sentence, or None if there is nothing to do."""
    path, given = folder / name, folder / HIDDEN / "given" / name
    try:
        base, theirs = contents(given), contents(path)
        if theirs is None:
            said = f"{name}: written" if base is None else f"{name}: was missing, written anew"
            _replace(path, form)
        elif theirs in (form, base):
            said = None if theirs == form else f"{name}: updated, there was nothing of yours in it"
            if theirs != form:
                _replace(path, form, theirs)
        else:
            said = _update(folder, name, theirs, base, form)
    except LeftAlone as why:
        return f"{name} {why}: left alone"
    if base != form:
        _replace(given, form)
    return said


def contents(path: Path) -> bytes | None:
    """Return the bytes of the file at `path`, or None. Raises LeftAlone. Never waits, as for a pipe."""
    try:
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise LeftAlone("is no file")
            if len(text := file.read(LARGEST + 1)) > LARGEST:
                raise LeftAlone(f"is larger than {LARGEST >> 20} MiB")
            return text
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LeftAlone(WHY.get(error.errno or 0, f"cannot be read ({error.strerror})")) from None


def _update(folder: Path, name: str, theirs: bytes, base: bytes | None, form: bytes) -> str | None:
    """Merge the form into a notebook that the attendee has changed, or put it there under another name."""
    import nbformat

    from .merge import merge

    try:
        mine = parsed(theirs)
    except ValueError as error:
        return f"{name} cannot be read as a notebook ({error}): left alone; a fresh one is {_fresh(folder, name, form)}"
    if base == form:
        return None
    if (start := _started_from(base, mine)) is None:
        return f"{name} was here before: left alone; the one of the laboratory is {_fresh(folder, name, form)}"
    merged, conflicts = merge(start, mine, parsed(form))
    there = _fresh(folder, name, form) if conflicts else ""
    _replace(folder / HIDDEN / "before" / name, theirs)
    _replace(folder / name, (nbformat.writes(merged) + "\n").encode(), theirs)
    if conflicts:
        return (
            f"{name}: updated, but in {' and '.join(conflicts)} you and the update changed the same lines: yours "
            f"stand, the new ones are in {there}"
        )
    return f"{name}: updated, with all that you did in it"


def _started_from(base: bytes | None, mine: NotebookNode) -> NotebookNode | None:
    """Return the form that the attendee started from; None if it is not known, because what was kept of it is gone."""
    with contextlib.suppress(ValueError):
        return parsed(base or b"")
    return None if forms.is_edited(mine) else mine


def parsed(text: bytes) -> NotebookNode:
    """Return the notebook of these bytes. Raises ValueError, with the reason, if Jupyter could not open it."""
    import nbformat

    try:
        notebook = nbformat.v4.reads(text.decode())
        with warnings.catch_warnings(action="ignore"):  # of cells without ids, as older programs leave them
            nbformat.validate(notebook, version=4, relax_add_props=True)
        nbformat.writes(notebook).encode()
    except (*NOT_SO_WRITTEN, nbformat.ValidationError) as error:
        raise ValueError("this is not how the cells of a notebook are written") from error
    return notebook


def _fresh(folder: Path, name: str, form: bytes) -> str:
    """Put the form next to the attendee's notebook, over nothing. Returns its name."""
    number = 0
    while True:
        number += 1
        there = name.replace(".ipynb", ".new.ipynb" if number == 1 else f".new-{number}.ipynb")
        path = folder / there
        if not os.path.lexists(path):
            _replace(path, form)
        elif not path.is_file() or contents(path) != form:
            continue
        return there


def _replace(path: Path, text: bytes, theirs: bytes | None = None) -> None:
    """Put `text` at `path`, wholly or not at all; not over a file that has become another than `theirs` meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(aside, "xb") as file:
            if theirs is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(path.lstat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if theirs is not None and contents(path) != theirs:
            raise RuntimeError(f"{path} is being saved by somebody: left alone; run this again")
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


@contextlib.contextmanager
def exclusively(lock: Path, folder: Path) -> Generator[None]:
    """Keep other processes out, as of a second server of the attendee. Raises RuntimeError if another one is in."""
    handle = os.open(lock, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{folder} is being brought up to date by another process") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _somebody_else(folder: Path) -> tuple[int, int] | None:
    """Return (user id, group id) of the account that owns `folder`, or a link on its way, if this process is root's.

    Raises: RuntimeError if it is root's own, but others may put links there.
    """
    ways = [folder, folder.resolve()] if os.getuid() == 0 else []
    for path in [part for way in ways for part in (*reversed(way.parents), way) if os.path.lexists(part)]:
        info = path.lstat()
        if info.st_uid != 0:
            return info.st_uid, info.st_gid
        others = info.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if info.st_gid else 0))
        if others and not stat.S_ISLNK(info.st_mode) and (path in ways or not info.st_mode & stat.S_ISVTX):
            raise RuntimeError(f"other accounts may write to {path} of root's and lay links there: chmod go-w {path}")
    return None


def _as_account(account: tuple[int, int], folder: Path, given: forms.Forms) -> list[str]:
    """Call `_bring_all` in a child process of this account: links that the account has laid lead root nowhere.

    The child is forked and starts no program: the account may not be allowed to read this Python.
    """
    importlib.import_module(".merge", __package__)  # what the child may need is loaded here
    parsed(next(text for name, text in given.items() if name.endswith(".ipynb")))
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_as_child, *account, folder, given).result()


def _as_child(user: int, group: int, folder: Path, given: forms.Forms) -> list[str]:
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    return _bring_all(folder, given)
