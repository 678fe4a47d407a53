"""The points of `lab.scaling`: measured on engines, simulated with what was measured, and computed by the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import numpy as np
import torch

from ..collectives import cost, ring
from ..collectives.calibrate import AllReduce, count_messages, fit_switch, infer_algorithm, schedule_time, virtual
from ..collectives.native import gloo_all_reduce, mpi_all_reduce, ring_all_reduce, shm_all_reduce
from ..collectives.table import Algorithm
from ..comm import sim
from ..comm.base import Row, best_all_reduce
from ..comm.network import Network, Switch
from ..comm.sim.torch_state import one_thread
from ..data.dataset import Dataset
from ..features import cores
from ..parallel.consensus import require_sums_of
from ..parallel.data_parallel import Strategy
from ..parallel.scaling.accounting import Account, account
from ..parallel.scaling.overlap import StepProfile, interference, median_of, profile_for, step_time
from ..parallel.scaling.profile import TINY, Timings, rehearse, time_steps
from .world import SIMULATED_DEADLINE, world_of

COMPILED = (best_all_reduce, gloo_all_reduce, mpi_all_reduce, ring_all_reduce, shm_all_reduce)
POINT_S = 0.5  # s, about, that the steps of one measured point take
REHEARSALS_S = 0.5  # s, about, for the numbers of examples per rank that were not measured
LONGEST_S = 10.0  # s of a core, for an all-reduce on simulated ranks whose schedule is not known
MOST_TURNS = 15  # of the steps of one measured point that are modelled, at most


class ScaledStep(NamedTuple):
    """A training step that is scaled. Simulated ranks have nothing compiled: they do `all_reduce` instead.

    algorithm: algorithm(nbytes), by whose schedule very many ranks are simulated; None if none is known.
    """

    model: torch.nn.Module
    strategy: Strategy
    data: Dataset
    all_reduce: AllReduce | None
    algorithm: Callable[[int], Algorithm] | None


def scaled_step(model: torch.nn.Module, strategy: Strategy, data: Dataset) -> ScaledStep:
    """Return the ScaledStep of this model, strategy and data set; compiled all-reduces are simulated as a ring."""
    mine = getattr(strategy, "all_reduce", None)
    stand_in = ring.all_reduce if mine in COMPILED else mine
    return ScaledStep(model, strategy, data, stand_in, infer_algorithm(stand_in) if stand_in else None)


def _sizes_of(kind: str, n: int, p: int) -> list[int]:
    """Return [examples] of every rank, in strong scaling of n over all ranks, in weak of n each."""
    if kind == "weak":
        return [n] * p
    small, extra = divmod(n, p)
    return [small + (r < extra) for r in range(p)]


# -- measured ---------------------------------------------------------------------------------------------------------


def require_sums(job: ScaledStep) -> None:
    """Raise WrongAnswer if the all-reduce does not add up on simulated ranks, for use if no engines run."""
    if job.all_reduce is not None:
        sim.run(3, require_sums_of, job.all_reduce, [torch.float32], trace=False, deadline=SIMULATED_DEADLINE)


def measure_point(
    job: ScaledStep, kind: str, n: int, p: int, deadline: float
) -> tuple[Row, SimulatedCluster | None, str]:
    """Return (row, cluster, why) of p engines; the cluster computes and sends as they do, None if there is none: why.

    row["simulated"]: the rate of simulated ranks, by the median of steps, each with the times of another turn: not one
    step with medians, which would be too small if times have a tail to one side.
    """
    total = sum(_sizes_of(kind, n, p))
    given = job.model, job.strategy, job.data, total, POINT_S
    results = world_of(p).run(time_steps, *given, deadline=deadline)
    timings = results[0]
    row = _point(kind, p, cores(), total / np.array(timings.steps)) | _shares(account(results.events))
    if timings.why:
        return row, None, timings.why
    talk = _Talks(job, p, timings) if p > 1 else None
    turns = range(len(timings.steps))
    some = turns[:: -(-len(turns) // MOST_TURNS)]
    profiles = [talk.disturbed(i) if talk and timings.both else timings.profiles[i] for i in some]
    costs = [talk.time_of(talk.switch([i])) if talk else _free for i in some]
    steps = [step_time(profile, cost).seconds for profile, cost in zip(profiles, costs, strict=True)]
    alike = SimulatedCluster(job, talk.switch(turns) if talk else Switch(), [median_of(profiles)])
    return row | {"simulated": total / float(np.median(steps))}, alike, ""


def _free(nbytes: int) -> float:
    """Return s that the all-reduce of a single rank takes."""
    return 0.0


class _Talks:
    """The times of p engines for the all-reduces of a step, as alpha and beta."""

    def __init__(self, job: ScaledStep, p: int, timings: Timings) -> None:
        self.timings = timings
        sizes = [message.nbytes for message in timings.profiles[0].messages]
        self.of = count_messages(p, cast(AllReduce, job.all_reduce), {TINY, *sizes})
        self.counts = {"tiny": self.of[TINY], "step": np.sum([self.of[nbytes] for nbytes in sizes], axis=0)}

    def switch(self, turns: Iterable[int]) -> Switch:
        """Return the Switch on which simulated ranks take as long: the median of some turns."""
        step, tiny = (np.median([times[i] for i in turns]) for times in (self.timings.talks, self.timings.tiny))
        return fit_switch(self.counts, {"tiny": tiny, "step": step}, helpers=("tiny",))

    def time_of(self, switch: Switch) -> Callable[[int], float]:
        """Return time_of(nbytes) -> s of one all-reduce of the step."""
        return lambda nbytes: float(np.dot(self.of[nbytes], one_message(switch)))

    def disturbed(self, index: int) -> StepProfile:
        """Return the StepProfile of one turn, with the interference of computing and messages in it."""
        profile, time_of = self.timings.profiles[index], self.time_of(self.switch([index]))
        return profile._replace(interference=interference(profile, time_of, self.timings.both[index]))


def one_message(network: Network) -> tuple[float, float]:
    """Return (alpha, beta) of the network's links, as most networks have them."""
    return getattr(network, "alpha", 0.0), getattr(network, "beta", 0.0)


def _point(kind: str, p: int, n_cores: int, rates: np.ndarray) -> Row:
    """Return the row of one point. rates: (samples,) units of work per s."""
    p25, median, p75 = (float(q) for q in np.percentile(rates, (25, 50, 75)))
    return {"kind": kind, "ranks": p, "cores": n_cores, "rate": median, "p25": p25, "p75": p75}


def _shares(accounted: Account | None) -> Row:
    """Return the columns exposed, overlap and imbalance of an Account, or of nothing."""
    return {name: getattr(accounted, name, None) for name in ("exposed", "overlap", "imbalance")}


# -- simulated --------------------------------------------------------------------------------------------------------


def profiles(job: ScaledStep, counts: list[int], n: int, q: int, deadline: float) -> list[StepProfile]:
    """Return StepProfiles of this machine for the shards of the numbers of ranks `counts`, q engines at work at a time.

    Without engines, q is 0: this process plays the one rank.
    """
    wanted = {n} | {max(1, size) for p in counts for size in (n // p, -(-n // p))}
    few = sorted(wanted)
    few = sorted({few[round(i * (len(few) - 1) / 4)] for i in range(5)})  # others lie on lines between
    given = job.model, job.strategy, job.data, few, REHEARSALS_S
    if q:
        return world_of(q).run(rehearse, *given, deadline=deadline)[0]
    with one_thread(torch):  # as on an engine
        return sim.run(1, rehearse, *given, trace=False, deadline=SIMULATED_DEADLINE)[0]


class SimulatedCluster:
    """Simulated ranks with a core each, joined by `network`, that compute as fast as `profiles` say."""

    def __init__(self, job: ScaledStep, network: Network, profiles: list[StepProfile]) -> None:
        self.job, self.network, self.profiles = job, network, profiles
        self.times: dict[tuple[int, int], float] = {}  # (ranks, bytes) -> s of an all-reduce
        self.pace = 0.0  # s of a core per squared rank, of the last all-reduce on simulated ranks
        self.left_out: list[int] = []  # numbers of ranks that would take too long

    def simulate(self, kind: str, n: int, p: int) -> Row | None:
        """Return the row of one step on p ranks, or None if it would take too long and no schedule is known."""
        if self.job.algorithm is None and self.pace * p * p > LONGEST_S:
            self.left_out.append(p)
            return None
        how = "schedule" if self.job.algorithm else "messages"
        return self.row(kind, p, _sizes_of(kind, n, p), lambda nbytes: self.all_reduce_seconds(p, nbytes), how)

    def model(self, kind: str, n: int, p: int) -> Row:
        """Return the row of the alpha-beta-overlap model: by the cost of the algorithm on paper, or of a ring."""
        alpha, beta = one_message(self.network)

        def on_paper(nbytes: int) -> float:
            price = self.job.algorithm(nbytes).cost if self.job.algorithm else cost.all_reduce
            return price(p, nbytes).seconds(alpha, beta)

        return self.row(kind, p, _sizes_of(kind, n, p), on_paper, "model")

    def all_reduce_seconds(self, p: int, nbytes: int) -> float:
        """Return s of one all-reduce on this network: by the algorithm's schedule, else by simulated ranks."""
        if (p, nbytes) not in self.times:
            if self.job.algorithm:
                seconds = schedule_time(self.job.algorithm(nbytes), p, max(1, nbytes // 4), self.network)
            else:
                begin = time.process_time()
                seconds = virtual(p, cast(AllReduce, self.job.all_reduce), nbytes, self.network)
                self.pace = (time.process_time() - begin) / (p * p)
            self.times[p, nbytes] = seconds
        return self.times[p, nbytes]

    def row(self, kind: str, p: int, sizes: list[int], time_of: Callable[[int], float], how: str) -> Row:
        """Return the row of a step in which ranks have `sizes` examples and an all-reduce takes time_of(bytes)."""
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
        return _point(kind, p, p, np.array([sum(sizes) / step.seconds])) | columns
