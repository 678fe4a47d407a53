"""Calls of MPI that can only block: somebody else makes them, so that this rank still sees deadlines and deaths."""

import threading


class InThread:
    """`function()` in a thread of its own, as an operation that can be waited for. The thread stays where it hangs."""

    progress = 0

    def __init__(self, function):
        self.result = self._error = None
        self._function = function
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="hpdl-mpi").start()

    def _run(self):
        try:
            self.result = self._function()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self, seconds, nap_s, crowded):
        """True when done. Raises what the function has raised."""
        if not self._ended.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait_among(self, seconds, nap_s, crowded, others):
        """The same: MPI looks after other messages while it is in the call of the thread."""
        return self.wait(seconds, nap_s, crowded)
