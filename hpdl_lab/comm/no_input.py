"""`input()` in a rank: it cannot be answered."""

import builtins
import threading
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_input() -> Generator[None]:
    """Let `input()` raise EOFError at once; in a notebook it would wait, and catch what is to end it.

    In the main thread only, where ranks run: a run of another thread leaves `input()` to the cells of the notebook.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, builtins.input = builtins.input, _refuse
    try:
        yield
    finally:
        builtins.input = before


def _refuse(prompt: object = "") -> str:
    raise EOFError("a rank cannot call input(): ask in a cell of its own, and hand the answer over as an argument")
