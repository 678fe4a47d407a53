"""The points of `lab.scaling`: measured on engines, simulated with what was measured, and computed by the model."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..collectives import cost, ring
from ..collectives.calibrate import counted, fit_switch, infer_algorithm, schedule_time, virtual
from ..collectives.native import gloo_all_reduce, mpi_all_reduce, ring_all_reduce, shm_all_reduce
from ..comm import sim
from ..comm.base import best_all_reduce
from ..comm.network import Network, Switch
from ..comm.sim.torch_state import one_thread
from ..data.dataset import Dataset
from ..features import cores
from ..parallel.consensus import require_sums_of
from ..parallel.data_parallel import Strategy
from ..parallel.scaling.accounting import Account, account
from ..parallel.scaling.overlap import StepProfile, interference, median_of, profile_for, step_time
from ..parallel.scaling.profile import TINY, Timings, rehearse, time_steps
from .place import SIMULATED_DEADLINE, place

COMPILED = (best_all_reduce, gloo_all_reduce, mpi_all_reduce, ring_all_reduce, shm_all_reduce)
Row = dict[str, Any]  # a point: kind, ranks, cores, rate, p25, p75, exposed, overlap, imbalance, ...
POINT_S = 0.5  # s, about, that the steps of one measured point take
REHEARSALS_S = 0.5  # s, about, for the numbers of examples per rank that were not measured
LONGEST_S = 10.0  # s of a core, for an all-reduce on simulated ranks whose schedule is not known
MOST_TURNS = 15  # of the steps of one measured point that are modelled, at most


class Job(NamedTuple):
    """What is scaled: a training step. Simulated ranks have nothing compiled: they do `all_reduce` instead.

    algorithm: algorithm(nbytes), by whose schedule very many ranks are simulated; None where none is known.
    """

    model: torch.nn.Module
    strategy: Strategy
    data: Dataset
    all_reduce: Callable[..., Any] | None
    algorithm: Callable[[int], Any] | None


def job_of(model: torch.nn.Module, strategy: Strategy, data: Dataset) -> Job:
    """The Job of this model, strategy and data set; compiled all-reduces are simulated as a ring."""
    mine = getattr(strategy, "all_reduce", None)
    stand_in = ring.all_reduce if mine in COMPILED else mine
    return Job(model, strategy, data, stand_in, infer_algorithm(stand_in) if stand_in else None)


def sizes_of(kind: str, n: int, p: int) -> list[int]:
    """[examples] of every rank, in strong scaling of n over all ranks, in weak of n each."""
    if kind == "weak":
        return [n] * p
    small, extra = divmod(n, p)
    return [small + (r < extra) for r in range(p)]


# -- measured ---------------------------------------------------------------------------------------------------------


def require_sums(job: Job) -> None:
    """Raise WrongAnswer where the all-reduce does not add up on simulated ranks, where no engines run."""
    if job.all_reduce is not None:
        sim.run(3, require_sums_of, job.all_reduce, [torch.float32], trace=False, deadline=SIMULATED_DEADLINE)


def measure(job: Job, kind: str, n: int, p: int, deadline: float) -> "tuple[Row, Cluster | None, str]":
    """(row, Cluster, why) of p engines; the Cluster computes and talks as they do, None where there is none, and why.

    row["simulated"]: the rate of simulated ranks, by the median of steps, each with the times of another turn: not one
    step with medians, which would be too small where times have a tail to one side.
    """
    total = sum(sizes_of(kind, n, p))
    given = job.model, job.strategy, job.data, total, POINT_S
    results = place(p).run(time_steps, *given, deadline=deadline)
    timings = results[0]
    row = point(kind, p, cores(), total / np.array(timings.steps)) | shares(account(results.events))
    if timings.why:
        return row, None, timings.why
    talk = Talks(job, p, timings) if p > 1 else None
    turns = range(len(timings.steps))
    some = turns[:: -(-len(turns) // MOST_TURNS)]
    profiles = [talk.disturbed(i) if talk and timings.both else timings.profiles[i] for i in some]
    costs = [talk.time_of(talk.switch([i])) if talk else free for i in some]
    steps = [step_time(profile, cost).seconds for profile, cost in zip(profiles, costs, strict=True)]
    alike = Cluster(job, talk.switch(turns) if talk else Switch(), [median_of(profiles)])
    return row | {"simulated": total / float(np.median(steps))}, alike, ""


def free(nbytes: int) -> float:
    """What the all-reduce of a single rank takes."""
    return 0.0


class Talks:
    """What p engines took for the all-reduces of a step, as alpha and beta."""

    def __init__(self, job: Job, p: int, timings: Timings) -> None:
        self.timings = timings
        sizes = [message.nbytes for message in timings.profiles[0].messages]
        self.of = counted(p, job.all_reduce, {TINY, *sizes})
        self.counts = {"tiny": self.of[TINY], "step": np.sum([self.of[nbytes] for nbytes in sizes], axis=0)}

    def switch(self, turns: Iterable[int]) -> Switch:
        """The Switch on which simulated ranks take as long: the median of some turns."""
        step, tiny = (np.median([times[i] for i in turns]) for times in (self.timings.talks, self.timings.tiny))
        return fit_switch(self.counts, {"tiny": tiny, "step": step}, helpers=("tiny",))

    def time_of(self, switch: Switch) -> Callable[[int], float]:
        """time_of(nbytes) -> s of one all-reduce of the step."""
        return lambda nbytes: float(np.dot(self.of[nbytes], one_message(switch)))

    def disturbed(self, turn: int) -> StepProfile:
        """The StepProfile of one turn, with the interference of computing and messages in it."""
        profile, time_of = self.timings.profiles[turn], self.time_of(self.switch([turn]))
        return profile._replace(interference=interference(profile, time_of, self.timings.both[turn]))


def one_message(network: Network) -> tuple[float, float]:
    """(alpha, beta) of the network's links, as most networks have them."""
    return getattr(network, "alpha", 0.0), getattr(network, "beta", 0.0)


def point(kind: str, p: int, n_cores: int, rates: np.ndarray) -> Row:
    """The row of one point. rates: (samples,) units of work per s."""
    p25, median, p75 = (float(q) for q in np.percentile(rates, (25, 50, 75)))
    return {"kind": kind, "ranks": p, "cores": n_cores, "rate": median, "p25": p25, "p75": p75}


def shares(accounted: Account | None) -> Row:
    """The columns exposed, overlap and imbalance of an Account, or of nothing."""
    return {name: getattr(accounted, name, None) for name in ("exposed", "overlap", "imbalance")}


# -- simulated --------------------------------------------------------------------------------------------------------


def profiles(job: Job, counts: list[int], n: int, q: int, deadline: float) -> list[StepProfile]:
    """StepProfiles of this machine for the shards of the numbers of ranks `counts`, with q engines at work at a time.

    Without engines, q is 0: this process plays the one rank.
    """
    wanted = {n} | {max(1, size) for p in counts for size in (n // p, -(-n // p))}
    few = sorted(wanted)
    few = sorted({few[round(i * (len(few) - 1) / 4)] for i in range(5)})  # others lie on lines between
    given = job.model, job.strategy, job.data, few, REHEARSALS_S
    if q:
        return place(q).run(rehearse, *given, deadline=deadline)[0]
    with one_thread(torch):  # as on an engine
        return sim.run(1, rehearse, *given, trace=False, deadline=SIMULATED_DEADLINE)[0]


class Cluster:
    """Simulated ranks with a core each, joined by `network`, that compute as fast as `profiles` say."""

    def __init__(self, job: Job, network: Network, profiles: list[StepProfile]) -> None:
        self.job, self.network, self.profiles = job, network, profiles
        self.times: dict[tuple[int, int], float] = {}  # (ranks, bytes) -> s of an all-reduce
        self.pace = 0.0  # s of a core per squared rank, of the last all-reduce on simulated ranks
        self.left_out: list[int] = []  # numbers of ranks that would take too long

    def simulate(self, kind: str, n: int, p: int) -> Row | None:
        """The row of one step on p ranks, or None where it would take too long and no schedule is known."""
        if self.job.algorithm is None and self.pace * p * p > LONGEST_S:
            self.left_out.append(p)
            return None
        how = "schedule" if self.job.algorithm else "messages"
        return self.row(kind, p, sizes_of(kind, n, p), lambda nbytes: self.all_reduce_seconds(p, nbytes), how)

    def model(self, kind: str, n: int, p: int) -> Row:
        """The row of the alpha-beta-overlap model: by the cost of the algorithm on paper, or of a ring."""
        alpha, beta = one_message(self.network)

        def on_paper(nbytes: int) -> float:
            price = self.job.algorithm(nbytes).cost if self.job.algorithm else cost.all_reduce
            return price(p, nbytes).seconds(alpha, beta)

        return self.row(kind, p, sizes_of(kind, n, p), on_paper, "model")

    def all_reduce_seconds(self, p: int, nbytes: int) -> float:
        """s of one all-reduce on this network: of the algorithm's schedule, else of the function on simulated ranks."""
        if (p, nbytes) not in self.times:
            if self.job.algorithm:
                seconds = schedule_time(self.job.algorithm(nbytes), p, max(1, nbytes // 4), self.network)
            else:
                begin = time.process_time()
                seconds = virtual(p, self.job.all_reduce, nbytes, self.network)
                self.pace = (time.process_time() - begin) / (p * p)
            self.times[p, nbytes] = seconds
        return self.times[p, nbytes]

    def row(self, kind: str, p: int, sizes: list[int], time_of: Callable[[int], float], how: str) -> Row:
        longest = profile_for(self.profiles, max(sizes))
        step = step_time(longest, time_of)
        ends = [profile_for(self.profiles, size).end for size in (min(sizes), max(sizes))]
        few = sizes.count(min(sizes))
        mean = (few * ends[0] + (p - few) * ends[1]) / p
        columns = {
            "exposed": step.exposed_share,
            "overlap": step.overlap_share,
            "imbalance": max(ends) / mean if mean else 1.0,  # on a busy machine fewer examples may take longer
            "how": how,
        }
        return point(kind, p, p, np.array([sum(sizes) / step.seconds])) | columns
