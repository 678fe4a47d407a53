"""One NCCL communicator: groups of calls run one after another on a stream, and none can block this process.

    submit -> NCCL's own thread issues it -> the GPU runs it -> done
              `state` says when              the event says when

A group is submitted when the one before it has been issued: NCCL wants it so.
"""

import hashlib
import threading
from contextlib import suppress

from .errors import CommError
from .interrupts import DeferredInterrupt
from .nccl_api import IN_PROGRESS, Config
from .polling import Polled

ABORT_S = 5.0  # for NCCL to end its kernels and threads; where it does not, they are left alone


class Clique:
    """The communicator that `unique_id` names, of `size` ranks; not ready before a `Connecting` has ended."""

    def __init__(self, api, gpu, rank, size, unique_id, config=None):
        self.api, self.gpu = api, gpu
        self.name = hashlib.sha256(unique_id).hexdigest()[:12]  # the same on every rank
        self.broken = ""  # what did not complete
        self.last = None  # the Launch submitted last
        with gpu.current():
            self.handle = api.start(unique_id, rank, size, config or Config.of())

    def submit(self, calls, keep=(), notes=()):
        """A Launch of `calls` as one group. keep: tensors that it uses. notes: see Launch.

        The last one must have been issued: see Issuing.
        """
        if self.broken:
            raise CommError(f"an earlier {self.broken} did not complete, and NCCL was aborted: run the function again")
        launch = Launch(self, calls, keep, notes)
        launch.start()
        self.last = launch
        return launch

    @property
    def idle(self):
        """True when everything that was submitted has been done."""
        return not self.broken and (self.last is None or self.last.done)

    def abort(self, why):
        """End what is on the GPU, here and so for the others too. Returns within ABORT_S."""
        if self.broken:
            return
        self.broken = why
        # Not by our own thread: ncclCommAbort waits for kernels and threads that it can only ask to end.
        ending = threading.Thread(target=self._end, daemon=True)
        ending.start()
        ending.join(ABORT_S)

    def _end(self):
        with suppress(CommError):  # what it was has been told already
            self.api.call("ncclCommAbort", self.handle)


class Connecting(Polled):
    """Until all ranks have come and NCCL has found the ways between them."""

    def __init__(self, clique):
        self.clique = clique

    def advance(self):
        return self.clique.api.state(self.clique.handle, "ncclCommInitRankConfig") != IN_PROGRESS


class Launch(Polled):
    """A group of calls under way.

    calls: (name, arguments ...) of NCCL functions, less the communicator and the stream that end all argument lists;
    without any it only waits for its notes. notes: objects whose `has_come()` is true when their end of a message is
    known to match the other, and which raise where it does not.
    """

    def __init__(self, clique, calls, keep, notes):
        self.clique, self.calls, self.keep, self.notes = clique, calls, keep, list(notes)
        self.event = None  # on the stream behind this group; until then NCCL's thread is at work
        self.done = False

    def advance(self):
        if self.done:
            return True
        self.notes = [note for note in self.notes if not note.has_come()]
        if not self.issued() or self.notes:
            return False
        if not self.event.query():
            self.clique.api.state(self.clique.handle, self._name())  # raises where another rank has failed
            return False
        self.done, self.keep = True, ()
        return True

    def issued(self):
        """True when the GPU has got it. Raises CommError where it never will."""
        clique = self.clique
        if clique.broken:
            raise CommError(
                f"an earlier {clique.broken} did not complete, and NCCL was aborted: run the function again"
            )
        if self.event is None and clique.api.state(clique.handle, self._name()) != IN_PROGRESS:
            self.event = clique.gpu.mark()
            self.progress += 1
        return self.event is not None

    def start(self):
        """Hand the group to NCCL, whole: an interrupt in the middle would leave it open for ever."""
        api, gpu = self.clique.api, self.clique.gpu
        with DeferredInterrupt() as interrupt, gpu.current():
            gpu.follow()
            api.call("ncclGroupStart")
            try:
                for name, *arguments in self.calls:
                    api.call(name, *arguments, self.clique.handle, gpu.handle)
            finally:
                api.call("ncclGroupEnd")
        if interrupt.came:
            raise KeyboardInterrupt

    def _name(self):
        return self.calls[0][0] if self.calls else "ncclGroupEnd"


class Issuing(Polled):
    """Until the GPU has got a Launch: not before its peers have come, where it is the first between them."""

    def __init__(self, launch):
        self.launch = launch

    def advance(self):
        return self.launch.issued()
