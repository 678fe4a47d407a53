"""The points of `lab.scaling`: measured on engines, simulated with what was measured, and computed by the model."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..collectives import cost, ring
from ..collectives.calibrate import counted, fit_switch
from ..collectives.lookalike import lookalike, schedule_time
from ..collectives.native import gloo_all_reduce, mpi_all_reduce, ring_all_reduce, shm_all_reduce
from ..comm import sim
from ..comm.base import PerRank, best_all_reduce
from ..comm.network import Network, Switch
from ..comm.sim.torch_state import one_thread
from ..data.dataset import Dataset
from ..features import cores
from ..parallel.data_parallel import Strategy
from ..parallel.scaling.accounting import Account, account
from ..parallel.scaling.interference import interference
from ..parallel.scaling.overlap_model import StepProfile, median_of, profile_for, step_time
from ..parallel.scaling.profile import TINY, Timings, rehearse, require_sum, time_steps
from ..parallel.scaling.simulated_step import simulated_step
from .place import SIMULATED_DEADLINE, place

COMPILED = (best_all_reduce, gloo_all_reduce, mpi_all_reduce, ring_all_reduce, shm_all_reduce)
Row = dict[str, Any]  # a point: kind, ranks, cores, rate, p25, p75, exposed, overlap, imbalance, ...
POINT_S = 0.5  # s, about, that the steps of one measured point take
REHEARSALS_S = 0.5  # s, about, for the numbers of examples per rank that were not measured
FOLLOW_S = 0.3  # s of a core: where following every message of a step would take longer, its schedule is evaluated
FOLLOWED_TURNS = 15  # of the steps of one measured point, at most


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
    return Job(model, strategy, data, stand_in, lookalike(stand_in) if stand_in else None)


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
        sim.run(3, require_sum, job.all_reduce, trace=False, deadline=SIMULATED_DEADLINE)


def measure(job: Job, kind: str, n: int, p: int, deadline: float) -> "tuple[Row, Cluster | None, str]":
    """(row, Cluster, why) of p engines; the Cluster computes and talks as they do, None where there is none, and why.

    row["simulated"]: the median rate of simulated ranks, each step of which takes the times of another turn. A median
    of sums, because a sum of medians is too small where times have a tail to one side.
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
    some = turns[:: -(-len(turns) // FOLLOWED_TURNS)]
    profiles = [talk.disturbed(i) if timings.both else timings.profiles[i] for i in some]
    switches = [talk.switch([i]) if talk else Switch() for i in some]
    each = [Cluster(job, *one) for one in zip(switches, ([profile] for profile in profiles), strict=True)]
    rates = [found["rate"] for cluster in each if (found := cluster.simulate(kind, n, p))]
    alike = Cluster(job, talk.switch(turns) if talk else Switch(), [median_of(profiles)])
    return row | {"simulated": float(np.median(rates))}, alike, ""


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

    def disturbed(self, turn: int) -> StepProfile:
        """The StepProfile of one turn, with the interference of computing and messages in it."""
        profile, switch = self.timings.profiles[turn], self.switch([turn])

        def time_of(nbytes: int) -> float:
            messages, in_a_row = self.of[nbytes]
            return messages * switch.alpha + in_a_row * switch.beta

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
        self.pace = 0.0  # s of a core per squared rank, of the last step whose messages were followed
        self.times: dict[tuple[int, int], float] = {}  # (ranks, bytes) -> s, by schedule
        self.left_out: list[int] = []  # numbers of ranks that would take too long

    def simulate(self, kind: str, n: int, p: int) -> Row | None:
        """The row of one step on p ranks, or None where it would take too long and no schedule is known."""
        sizes = sizes_of(kind, n, p)
        if self.pace * p * p <= FOLLOW_S:
            begin = time.process_time()
            mine = PerRank([profile_for(self.profiles, size) for size in sizes])
            given = {"network": self.network, "deadline": SIMULATED_DEADLINE}
            run = sim.run(p, simulated_step, mine, self.job.all_reduce, **given)
            self.pace = (time.process_time() - begin) / (p * p)
            return self.row(kind, p, sizes, run.seconds, "messages", shares(account(run.events)))
        if self.job.algorithm is None:
            self.left_out.append(p)
            return None
        return self.modelled(kind, p, sizes, lambda nbytes: self.by_schedule(p, nbytes), "schedule")

    def model(self, kind: str, n: int, p: int) -> Row:
        """The row of the alpha-beta-overlap model: by the cost of the algorithm on paper, or of a ring."""
        alpha, beta = one_message(self.network)

        def on_paper(nbytes: int) -> float:
            price = self.job.algorithm(nbytes).cost if self.job.algorithm else cost.all_reduce
            return price(p, nbytes).seconds(alpha, beta)

        return self.modelled(kind, p, sizes_of(kind, n, p), on_paper, "model")

    def by_schedule(self, p: int, nbytes: int) -> float:
        """s of one all-reduce on this network, cached per message size."""
        if (p, nbytes) not in self.times:
            self.times[p, nbytes] = schedule_time(self.job.algorithm(nbytes), p, max(1, nbytes // 4), self.network)
        return self.times[p, nbytes]

    def modelled(self, kind: str, p: int, sizes: list[int], time_of: Callable[[int], float], how: str) -> Row:
        modelled = step_time(profile_for(self.profiles, max(sizes)), time_of)
        columns = {"exposed": modelled.exposed_share, "overlap": modelled.overlap_share, "imbalance": 1.0}
        return self.row(kind, p, sizes, modelled.seconds, how, columns)

    def row(self, kind: str, p: int, sizes: list[int], seconds: float, how: str, columns: Row) -> Row:
        return point(kind, p, p, np.array([sum(sizes) / seconds])) | columns | {"how": how}
