"""What the ranks print, streamed while they run; what several ranks print alike is printed once.

ranks 0-2 say hello
rank 3 says bye
"""

import sys
import time
from collections import deque

from ..comm.errors import name_ranks

PATIENCE = 0.3  # seconds that a line waits for the other ranks to say the same


class Collapser:
    """Gathers the lines of `ranks` and prints those that agree together.

    A line is printed when every rank that still runs has one to compare it with, or when it has waited for `PATIENCE`.
    """

    def __init__(self, ranks, clock=time.monotonic):
        self.clock = clock
        self.lines = {rank: deque() for rank in ranks}  # rank -> (time, stream, line)
        self.running = set(ranks)

    def add(self, rank, stream, text):
        """Take `text` of `rank`, one or more lines for `stream`, "stdout" or "stderr"."""
        now = self.clock()
        for line in text.splitlines():
            self.lines[rank].append((now, stream, line))

    def finish(self, rank):
        """`rank` will say nothing more."""
        self.running.discard(rank)

    def flush(self, everything=False):
        """Print what is ready."""
        if not any(self.lines.values()):
            return
        waiting = [len(q) for rank, q in self.lines.items() if q or rank in self.running]
        common = min(waiting, default=0)
        limit = self.clock() - PATIENCE
        said = {}
        for rank, queue in self.lines.items():
            ready = len(queue) if everything else max(common, sum(t <= limit for t, _, _ in queue))
            taken = [queue.popleft()[1:] for _ in range(min(ready, len(queue)))]
            for stream in ("stdout", "stderr"):
                if block := tuple(line for s, line in taken if s == stream):
                    said.setdefault((stream, block), []).append(rank)
        for (stream, block), ranks in said.items():
            print(attributed(ranks, block), file=getattr(sys, stream), flush=True)


def attributed(ranks, lines):
    """ "ranks 0-2 say hello", and below each other where there are several lines."""
    who = f"{name_ranks(ranks)} {'says' if len(ranks) == 1 else 'say'}"
    return f"{who} {lines[0]}" if len(lines) == 1 else "\n".join([f"{who}:", *(f"    {line}" for line in lines)])
