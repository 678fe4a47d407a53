"""What the ranks print, streamed while they run; what several ranks print alike is printed once.

ranks 0-3 say hello
ranks 0-2 say yes
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
        for line in text.rstrip("\n").split("\n"):
            self.lines[rank].append((now, stream, line))

    def finish(self, rank):
        """`rank` will say nothing more."""
        self.running.discard(rank)

    def flush(self, everything=False):
        """Print what is ready."""
        if not any(self.lines.values()):
            return
        waiting = [len(queue) for rank, queue in self.lines.items() if queue or rank in self.running]
        common, limit = min(waiting), self.clock() - PATIENCE
        ready = {}
        for rank, queue in self.lines.items():
            count = len(queue) if everything else max(common, sum(t <= limit for t, _, _ in queue))
            ready[rank] = [queue.popleft()[1:] for _ in range(min(count, len(queue)))]
        for stream, text in collapse(ready):
            print(text, file=getattr(sys, stream), flush=True)


def collapse(said):
    """What to print for {rank: [(stream, line)]}: [(stream, text)].

    Lines are compared by position. Neighboring lines that are shared by the same ranks stay together.
    """
    blocks = []  # {(ranks, stream): [lines]}, one for each stretch of lines with the same agreement
    for position in range(max(map(len, said.values()))):
        agreeing = {}
        for rank, lines in said.items():
            if position < len(lines):
                agreeing.setdefault(lines[position], []).append(rank)
        block = {(tuple(ranks), stream): [line] for (stream, line), ranks in agreeing.items()}
        if blocks and blocks[-1].keys() == block.keys():
            for who, lines in block.items():
                blocks[-1][who] += lines
        else:
            blocks.append(block)
    said = [(stream, ranks, lines) for block in blocks for (ranks, stream), lines in block.items()]
    return [(stream, attributed(ranks, lines)) for stream, ranks, lines in said if any(map(str.strip, lines))]


def attributed(ranks, lines):
    """ "ranks 0-2 say hello", and below each other where there are several lines."""
    who = f"{name_ranks(ranks)} {'says' if len(ranks) == 1 else 'say'}"
    return f"{who} {lines[0]}" if len(lines) == 1 else "\n".join([f"{who}:", *(f"    {line}" for line in lines)])
