"""How the wait in Slurm's queue is shown: one line in place in a notebook, a line for each change in a terminal."""

import sys
import time


class QueueLine:
    """`with QueueLine() as line: line.show(text)`, again and again while the job waits."""

    def __init__(self):
        self._began = time.monotonic()
        self._shown = None
        self._handle = None

    def __enter__(self):
        return self

    def show(self, text):
        """Show the sentence `text`, to which the seconds so far are added in a notebook."""
        if not in_notebook():
            if text != self._shown:
                print(f"{text}. Ctrl-C ends the wait, and the job.", flush=True)
            self._shown = text
            return
        line = f"{text}. {time.monotonic() - self._began:.0f} s so far; the stop button ends the wait, and the job."
        if line == self._shown:
            return
        self._shown = line
        if self._handle is None:
            from IPython.display import display

            self._handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": line}, raw=True)

    def __exit__(self, *exc):
        """In a notebook the line goes away."""
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


def in_notebook():
    """Whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
