"""The alpha and beta with which simulated ranks take as long for an all-reduce as real ranks did.

A ping-pong says what a message costs between two ranks that do nothing else. In an all-reduce of an attendee, ranks
also add, call Python and share cores and memory. Fitted to the all-reduce itself, alpha and beta carry all of that:
they are what a message costs in this all-reduce on this machine, and are used for no other.

Which algorithm of the table a function does shows in its virtual time, too: messages and their order decide it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..comm import sim
from ..comm.network import Switch
from ..predict.messages import predict_rounds
from .selector import NATIVE, Selection
from .table import ALGORITHMS, Algorithm, find_algorithm

if TYPE_CHECKING:
    from ..comm.base import Comm
    from ..comm.network import Network

AllReduce: TypeAlias = Callable[["Comm", Tensor], Any]
What = TypeVar("What")

UNIT = Switch(alpha=1e-6, beta=1e-9)  # 1 us per message, 1 GB/s
LITTLE = 0.1  # the weight of helpers
DEADLINE = 600.0  # s of real time: a deadlock is proved at once, this only ends loops that never end
PROBES = ((5, 1001), (8, 4096))  # ranks, elements: chunks that differ, and chunks that are equal
SAME = 1e-3  # chunks that differ by an element
PROBED = Switch(alpha=3e-6, beta=1e-9)


def count_messages(p: int, all_reduce: AllReduce, sizes: Iterable[int]) -> dict[int, tuple[float, float]]:
    """Return {bytes: (messages in a row, bytes in a row)} of `all_reduce` on p simulated ranks: what makes its time.

        time(n) = messages(n) alpha + bytes(n) beta      found by two simulations for each size

    Args:    p: ranks, at least 2; all_reduce: f(comm, x); sizes: bytes of x.
    Raises:  ValueError for one rank.
    """
    if p < 2:
        raise ValueError(f"messages are counted among 2 ranks at least, got {p}")
    found = {}
    for nbytes in sizes:
        both = virtual(p, all_reduce, nbytes, UNIT)
        messages = virtual(p, all_reduce, nbytes, Switch(UNIT.alpha, 0.0)) / UNIT.alpha
        found[nbytes] = messages, (both - messages * UNIT.alpha) / UNIT.beta
    return found


def fit_switch(
    counts: Mapping[What, Sequence[float]], measured: Mapping[What, float], helpers: Sequence[What] = ()
) -> Switch:
    """Return the Switch on which an all-reduce takes `measured`.

    Least squares on relative errors, alpha and beta at least 0. What is only there to tell alpha from beta counts
    little, so that the others come out right if no straight line goes through all.

    Args:    counts: {what: (messages in a row, bytes in a row)}, such as `count_messages` gives, or sums.
             measured: {what: s}, of at least two things among these; helpers: the ones that count little.
    Returns: Switch.
    Raises:  ValueError for one thing.
    """
    if len(measured) < 2:
        raise ValueError(f"a fit needs 2 times, got {len(measured)}")
    weights = torch.tensor([LITTLE if what in helpers else 1.0 for what in measured], dtype=torch.float64)
    rows = [[count / seconds for count in counts[what]] for what, seconds in measured.items()]
    return Switch(*_nonnegative(torch.tensor(rows, dtype=torch.float64) * weights[:, None], weights))


def virtual(p: int, all_reduce: AllReduce, nbytes: int, network: "Network") -> float:
    """Return the virtual s of one all-reduce of `nbytes` on p simulated ranks."""
    x = torch.zeros(max(1, nbytes // 4))
    return sim.run(p, all_reduce, x, network=network, trace=False, deadline=DEADLINE).seconds


def _nonnegative(rows: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return (alpha, beta), each at least 0, with rows @ (alpha, beta) nearest to `wanted`: (m, 2), (m,) float64."""
    found = torch.linalg.lstsq(rows, wanted).solution
    if (found >= 0).all():
        return float(found[0]), float(found[1])
    alone = [float(column @ wanted / (column @ column)) if float(column @ column) else 0.0 for column in rows.T]
    errors = [float(((rows[:, i] * alone[i] - wanted) ** 2).sum()) for i in range(2)]
    return (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])


def infer_algorithm(all_reduce: AllReduce) -> Callable[[int], Algorithm] | None:
    """Return algorithm(nbytes), which gives the Algorithm that `all_reduce` does; None if the table has none.

    A Selection says it. Any other function is run on a few simulated ranks: it does the algorithm whose schedule takes
    as long, to a thousandth.
    """
    if isinstance(all_reduce, Selection):
        names = {part.name: "ring" if part.name == NATIVE else part.name for part in all_reduce.ranges}
        return lambda nbytes: find_algorithm(names[all_reduce.name_for(nbytes)])
    times = [virtual(p, all_reduce, 4 * n, PROBED) for p, n in PROBES]
    for algorithm in ALGORITHMS:
        if algorithm.collective == "all_reduce":
            known = [schedule_time(algorithm, p, n, PROBED) for p, n in PROBES]
            if all(abs(a - b) <= SAME * b for a, b in zip(times, known, strict=True)):
                return lambda nbytes: algorithm
    return None


def schedule_time(algorithm: Algorithm, p: int, n: int, network: "Network") -> float:
    """Return the virtual s of an all-reduce of n float32 elements among p ranks."""
    return predict_rounds(algorithm.steps(p, n), p, 4, network).seconds
