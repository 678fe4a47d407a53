"""The points of `lab.scaling`: measured on engines, simulated with what was measured, and computed by the model."""

import time
from typing import NamedTuple

import numpy as np
import torch

from ..collectives import cost, ring
from ..collectives.calibrate import counted, fit_switch
from ..collectives.lookalike import lookalike, schedule_time
from ..collectives.native import gloo_all_reduce, mpi_all_reduce, ring_all_reduce, shm_all_reduce
from ..comm import sim
from ..comm.base import PerRank
from ..comm.network import Switch
from ..comm.torch_state import one_thread
from ..features import cores
from ..parallel.reducer import best_all_reduce
from ..parallel.scaling.accounting import account
from ..parallel.scaling.interference import interference
from ..parallel.scaling.overlap_model import median_of, profile_for, step_time
from ..parallel.scaling.profile import TINY, rehearse, require_sum, time_steps
from ..parallel.scaling.simulated_step import simulated_step
from .ranks import SIMULATED_DEADLINE, place

COMPILED = (best_all_reduce, gloo_all_reduce, mpi_all_reduce, ring_all_reduce, shm_all_reduce)
POINT_S = 0.5  # s, about, that the steps of one measured point take
REHEARSALS_S = 0.5  # s, about, for the numbers of examples per rank that were not measured
FOLLOW_S = 0.3  # s of a core: where following every message of a step would take longer, its schedule is evaluated
FOLLOWED_TURNS = 15  # of the steps of one measured point, at most


class Job(NamedTuple):
    """What is scaled: a training step. Simulated ranks have nothing compiled: they do `all_reduce` instead.

    algorithm: algorithm(nbytes), by whose schedule very many ranks are simulated; None where none is known.
    """

    model: torch.nn.Module
    strategy: object
    data: object
    all_reduce: object
    algorithm: object


def job_of(model, strategy, data):
    """The Job of this model, strategy and data set; compiled all-reduces are simulated as a ring."""
    mine = getattr(strategy, "all_reduce", None)
    stand_in = ring.all_reduce if mine in COMPILED else mine
    return Job(model, strategy, data, stand_in, lookalike(stand_in) if stand_in else None)


def sizes_of(kind, n, p):
    """[examples] of every rank, in strong scaling of n over all ranks, in weak of n each."""
    if kind == "weak":
        return [n] * p
    small, extra = divmod(n, p)
    return [small + (r < extra) for r in range(p)]


# -- measured ---------------------------------------------------------------------------------------------------------


def require_sums(job):
    """Raise WrongAnswer where the all-reduce does not add up on simulated ranks, where no engines run."""
    if job.all_reduce is not None:
        sim.run(3, require_sum, job.all_reduce, trace=False, deadline=SIMULATED_DEADLINE)


def measure(job, kind, n, p, deadline):
    """(row, Cluster, why) of p engines; the Cluster computes and talks as they do, None where there is none, and why.

    row["simulated"]: the median rate of simulated ranks, each step of which takes the times of another turn. A median
    of sums, because a sum of medians is too small where times have a tail to one side.
    """
    total = sum(sizes_of(kind, n, p))
    told = job.model, job.strategy, job.data, total, POINT_S
    results = place(p).run(time_steps, *told, deadline=deadline)
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
    rates = [cluster.simulate(kind, n, p)["rate"] for cluster in each]
    alike = Cluster(job, talk.switch(turns) if talk else Switch(), [median_of(profiles)])
    return row | {"simulated": float(np.median(rates))}, alike, ""


class Talks:
    """What p engines took for the all-reduces of a step, as alpha and beta."""

    def __init__(self, job, p, timings):
        self.timings = timings
        sizes = [message.nbytes for message in timings.profiles[0].messages]
        self.of = counted(p, job.all_reduce, {TINY, *sizes})
        self.counts = {"tiny": self.of[TINY], "step": np.sum([self.of[nbytes] for nbytes in sizes], axis=0)}

    def switch(self, turns):
        """The Switch on which simulated ranks take as long: the median of some turns."""
        step, tiny = (np.median([times[i] for i in turns]) for times in (self.timings.talks, self.timings.tiny))
        return fit_switch(self.counts, {"tiny": tiny, "step": step}, helpers=("tiny",))

    def disturbed(self, turn):
        """The StepProfile of one turn, with the interference of computing and messages in it."""
        profile, switch = self.timings.profiles[turn], self.switch([turn])

        def time_of(nbytes):
            messages, in_a_row = self.of[nbytes]
            return messages * switch.alpha + in_a_row * switch.beta

        return profile._replace(interference=interference(profile, time_of, self.timings.both[turn]))


def point(kind, p, n_cores, rates):
    """The row of one point. rates: (samples,) units of work per s."""
    p25, median, p75 = (float(q) for q in np.percentile(rates, (25, 50, 75)))
    return {"kind": kind, "ranks": p, "cores": n_cores, "rate": median, "p25": p25, "p75": p75}


def shares(accounted):
    """The columns exposed, overlap and imbalance of an Account, or of nothing."""
    if accounted is None:
        return {"exposed": None, "overlap": None, "imbalance": None}
    return {name: getattr(accounted, name) for name in ("exposed", "overlap", "imbalance")}


# -- simulated --------------------------------------------------------------------------------------------------------


def profiles(job, counts, n, q, deadline):
    """StepProfiles of this machine for the shards of the numbers of ranks `counts`, with q engines at work at a time.

    Without engines, q is 0: this process plays the one rank.
    """
    wanted = {n} | {max(1, size) for p in counts for size in (n // p, -(-n // p))}
    few = sorted(wanted)
    few = sorted({few[round(i * (len(few) - 1) / 4)] for i in range(5)})  # others lie on lines between
    told = job.model, job.strategy, job.data, few, REHEARSALS_S
    if q:
        return place(q).run(rehearse, *told, deadline=deadline)[0]
    with one_thread(torch):  # as on an engine
        return sim.run(1, rehearse, *told, trace=False, deadline=SIMULATED_DEADLINE)[0]


class Cluster:
    """Simulated ranks with a core each, joined by `network`, that compute as fast as `profiles` say."""

    def __init__(self, job, network, profiles):
        self.job, self.network, self.profiles = job, network, profiles
        self.pace = 0.0  # s of a core per squared rank, of the last step whose messages were followed
        self.times = {}  # (ranks, bytes) -> s, by schedule
        self.left_out = []  # numbers of ranks that would take too long

    def simulate(self, kind, n, p):
        """The row of one step on p ranks, or None where it would take too long and no schedule is known."""
        sizes = sizes_of(kind, n, p)
        if self.pace * p * p <= FOLLOW_S:
            begin = time.process_time()
            mine = PerRank([profile_for(self.profiles, size) for size in sizes])
            told = {"network": self.network, "deadline": SIMULATED_DEADLINE}
            run = sim.run(p, simulated_step, mine, self.job.all_reduce, **told)
            self.pace = (time.process_time() - begin) / (p * p)
            return self.row(kind, p, sizes, run.seconds, "messages", shares(account(run.events)))
        if self.job.algorithm is None:
            self.left_out.append(p)
            return None
        return self.modelled(kind, p, sizes, lambda nbytes: self.by_schedule(p, nbytes), "schedule")

    def model(self, kind, n, p):
        """The row of the alpha-beta-overlap model: by the cost of the algorithm on paper, or of a ring."""
        alpha, beta = self.network.alpha, self.network.beta

        def on_paper(nbytes):
            price = self.job.algorithm(nbytes).cost if self.job.algorithm else cost.all_reduce
            return price(p, nbytes).seconds(alpha, beta)

        return self.modelled(kind, p, sizes_of(kind, n, p), on_paper, "model")

    def by_schedule(self, p, nbytes):
        """s of one all-reduce on this network; that of a size is evaluated once."""
        if (p, nbytes) not in self.times:
            self.times[p, nbytes] = schedule_time(self.job.algorithm(nbytes), p, max(1, nbytes // 4), self.network)
        return self.times[p, nbytes]

    def modelled(self, kind, p, sizes, time_of, how):
        modelled = step_time(self.slowest(sizes), time_of)
        told = {"exposed": modelled.exposed_share, "overlap": modelled.overlap_share, "imbalance": 1.0}
        return self.row(kind, p, sizes, modelled.seconds, how, told)

    def slowest(self, sizes):
        """The profile of the rank with most examples."""
        return profile_for(self.profiles, max(sizes))

    def row(self, kind, p, sizes, seconds, how, columns):
        return point(kind, p, p, np.array([sum(sizes) / seconds])) | columns | {"how": how}
