"""Delays on purpose: a slow rank, a slow link. The timeline shows which ranks then wait for which."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

from ..trace import Trace, caller_line

END = "; lab.inject() ends it"
OP = "injected delay"  # how the trace calls the time that is spent so


class Slowed(Protocol):
    """A communicator of real ranks, as far as its rank loses time."""

    rank: int
    names: list[int]

    @property
    def trace(self) -> Trace: ...


@dataclass(frozen=True, repr=False)
class Injection:
    """The slow ranks and slow links of a run.

    delays:  {rank: seconds} that a rank loses before each message that it sends, and before each collective.
    links:   {(rank, rank): bytes per second}: messages between the two, in both directions, are not faster than this.
             Real ranks lose the time nbytes / bandwidth at either end when the message has come.
    """

    delays: dict[int, float] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, seconds in self.delays.items():
            if not _is_rank(rank):
                raise ValueError(f"inject(rank={rank!r}): a rank is a whole number from 0")
            if not _is_number(seconds) or not 0 < seconds < 1e6:
                raise ValueError(f"inject(delay={seconds!r}): seconds above 0, such as 0.005")
        for link, bandwidth in self.links.items():
            if not isinstance(link, tuple) or len(link) != 2 or not all(map(_is_rank, link)) or link[0] == link[1]:
                raise ValueError(f"inject(link={link!r}): a link is a pair of different ranks, such as (1, 2)")
            if not _is_number(bandwidth) or not 0 < bandwidth < float("inf"):
                raise ValueError(f"inject(bandwidth={bandwidth!r}): bytes per second above 0, such as 1e8")

    @classmethod
    def of(
        cls,
        rank: int | None = None,
        delay: float | None = None,
        link: tuple[int, int] | list[int] | None = None,
        bandwidth: float | None = None,
    ) -> Injection:
        """Return the Injection of a slow rank, a slow link, both or none. Raises ValueError for half of a pair."""
        if (rank is None) != (delay is None):
            raise ValueError(f"inject(rank={rank!r}, delay={delay!r}): a rank and its delay in s, such as (2, 0.005)")
        if (link is None) != (bandwidth is None):
            raise ValueError(f"inject(link={link!r}, bandwidth={bandwidth!r}): a link and its bytes per s")
        pair: Any = tuple(link) if isinstance(link, list) else link  # checked when it is made
        delays = {} if rank is None or delay is None else {rank: delay}
        return cls(delays, {} if link is None or bandwidth is None else {pair: bandwidth})

    def merged(self, other: Injection) -> Injection:
        """Return this and `other`, which wins if both name the same rank or link."""
        links = {link: b for link, b in self.links.items() if link[::-1] not in other.links}
        return Injection(self.delays | other.delays, links | other.links)

    def __str__(self) -> str:
        slow = [f"rank {r} loses {1e3 * s:g} ms before each message and collective" for r, s in self.delays.items()]
        slow += [f"ranks {a} and {b} are joined by {x / 1e9:g} GB/s" for (a, b), x in self.links.items()]
        return "; ".join(slow) or "nothing is slowed down"

    __repr__ = __str__

    def __bool__(self) -> bool:
        return bool(self.delays or self.links)

    def check(self, size: int) -> None:
        """Raise ValueError unless all ranks that are named are there in a run of `size` ranks."""
        for rank in self.delays:
            if rank >= size:
                raise ValueError(f"a delay is injected into rank {rank}: ranks here are 0 to {size - 1}{END}")
        for link in self.links:
            if max(link) >= size:
                raise ValueError(f"the link {link} is slowed down: ranks here are 0 to {size - 1}{END}")

    def delay(self, rank: int) -> float:
        """Return the seconds that `rank` loses before each message that it sends."""
        return self.delays.get(rank, 0.0)

    def seconds_per_byte(self, a: int, b: int) -> float:
        """Return how slow messages between ranks `a` and `b` are at least; 0 if that link was left alone."""
        bandwidth = self.links.get((a, b)) or self.links.get((b, a))
        return 1 / bandwidth if bandwidth else 0.0

    # -- on real ranks ------------------------------------------------------------------------------------------------

    def before(self, comm: Slowed) -> None:
        """Lose the delay of this rank of `comm`, which is about to send or to begin a collective."""
        _lose(comm, self.delay(comm.names[comm.rank]))

    def after(self, comm: Slowed, peer: int, nbytes: int) -> None:
        """Lose what a message of `nbytes` between this rank of `comm` and its rank `peer` takes on a slow link."""
        slow = self.seconds_per_byte(comm.names[comm.rank], comm.names[peer])
        _lose(comm, nbytes * slow, comm.names[peer])


def _lose(comm: Slowed, seconds: float, peer: int = -1) -> None:
    """Sleep, as one event of the trace; an interrupt ends it."""
    if seconds > 0:
        step, t0 = comm.trace.step(), comm.trace.clock()
        time.sleep(seconds)
        comm.trace.add(step, OP, t0, comm.trace.clock(), peer, line=caller_line())


def _is_rank(rank: object) -> TypeGuard[int]:
    return isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
