"""The text of a verb's error in a notebook: one line, or the attendee's own lines if these led to it."""

import functools
import inspect
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from ..comm.errors import CommError
from ..engines.errors import EngineError, is_bug
from ..trace import PACKAGE, line_of

P = ParamSpec("P")
R = TypeVar("R")


def plainly(verb: Callable[P, R], owner: str = "lab") -> Callable[P, R]:
    """Wrap `verb` so that a notebook shows what helps of its errors: see `_shorten`. Scripts show them as ever.

    owner: what it is called on, as in lab.run.
    """
    name = f"{owner}.{verb.__name__}"

    @functools.wraps(verb)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, TypeError) and getattr(error.__traceback__, "tb_next", None) is None:  # not entered
                error.args = (f"{name}: {misfit(verb, args, kwargs) or error}",)
            _shorten(error, f"{name} was stopped")
            raise

    return wrapped


def misfit(verb: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> TypeError | None:
    """Return why `verb` cannot be called with these arguments; None if it can."""
    try:
        inspect.signature(verb).bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None


def _shorten(error: BaseException, stopped: str) -> None:
    """Set what IPython shows of `error`; a bug of this package keeps its whole traceback, to be reported.

    An error that came from, or through, the attendee's function shows the lines of that, and of the cell; any other
    shows only its text, as does a stub, which says what is still to be written.

    Args:    stopped: the text for a KeyboardInterrupt.
    """
    if hasattr(error, "_render_traceback_"):
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raiser = next(frame for frame in reversed(frames) if _is_own(frame) or _is_ours(frame))
    led = any(map(_is_own, frames))
    if _is_ours(raiser) and is_bug(error) and not (led and isinstance(error, AttributeError)):  # comm.Send, say
        return
    if led and not isinstance(error, NotImplementedError):
        error._render_traceback_ = functools.partial(_own_lines, error)  # pyrefly: ignore[missing-attribute]
        return
    text = str(error) or (stopped if isinstance(error, KeyboardInterrupt) else "")
    shown = ": ".join(filter(None, [type(error).__name__, text]))
    error._render_traceback_ = lambda: [shown]  # pyrefly: ignore[missing-attribute]


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def _is_own(frame: FrameType) -> bool:
    """Return True if the attendee wrote the code of `frame`."""
    return not _is_ours(frame) and line_of(frame, 0) != ""


def _own_lines(error: BaseException) -> list[str]:
    """Return what IPython shows of `error` and of its causes, without the frames of libraries and of this package."""
    from IPython import get_ipython

    cause = error
    while cause is not None:
        cause.__traceback__ = _own_frames(cause.__traceback__)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    formatter = get_ipython().InteractiveTB
    return formatter.structured_traceback(type(error), error, error.__traceback__, tb_offset=0)


def _own_frames(entry: TracebackType | None) -> TracebackType | None:
    """Return the traceback with the attendee's frames only."""
    if entry is None:
        return None
    inner = _own_frames(entry.tb_next)
    return TracebackType(inner, entry.tb_frame, entry.tb_lasti, entry.tb_lineno) if _is_own(entry.tb_frame) else inner


def sentence(error: BaseException) -> str:
    """Return the first line of an error; with its type if it is none that this package says in a sentence."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0].strip() if lines else "no reason was given"
    plain = isinstance(error, EngineError | CommError | ValueError | KeyboardInterrupt)
    return text if plain else f"{type(error).__name__}: {text}"
