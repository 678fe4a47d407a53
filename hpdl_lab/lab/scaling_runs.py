"""What `lab.scaling` does in which order: a training step, or any work of the attendee's, on more and more ranks."""

import numpy as np

from ..collectives.sweep import time_work
from ..comm import sim
from ..comm.network import Switch, title
from ..features import cores
from ..parallel.scaling.overlap_model import Interference
from ..trace import now_ns, number_text, seconds_text
from .cluster import running
from .ranks import SIMULATED_DEADLINE, place
from .scaling_points import FOLLOW_S, Cluster, measure, point, profiles, require_sums, shares

NETWORK_TEXT = "a 100 Gbit/s switch, 2 µs per message"  # the defaults of Switch, in words


class Training:
    """Training steps. rows, simulated, model: the points so far, see ScalingResult."""

    unit = "samples/s"

    def __init__(self, job, kinds, n, network, deadline):
        self.job, self.kinds, self.n, self.network, self.deadline = job, kinds, n, network, deadline
        self.rows, self.simulated, self.model, self.left_out = [], [], [], []
        self.alone = None  # what `measure` gave for one rank
        self.measured = {}  # ranks -> Cluster with the alpha and beta of as many engines
        self.why = ""  # why nothing is simulated
        self.joined = "" if network is None else title(network)  # what joins the simulated ranks, in words
        self.title = f"Scaling of a training step: {job.strategy!r}"

    def run(self, counts, every, changed):
        """Measure on `counts` engines, then simulate `every` number of ranks; changed() after each point."""
        engines = running() is not None
        if not engines:
            require_sums(self.job)
        for kind, p in ((kind, p) for kind in self.kinds for p in counts if engines):
            self.measure(kind, p)
            changed()
        if self.why:
            return
        q = min(cores(), max(counts)) if engines else 0
        speeds = profiles(self.job, every, self.n, q, self.deadline)
        disturbed = self.interference()
        speeds = [profile._replace(interference=disturbed) for profile in speeds]
        cluster = Cluster(self.job, self.network or self.switch(), speeds)
        there = {(r["kind"], r["ranks"]) for r in self.simulated}
        for p, kind in ((p, kind) for p in every for kind in self.kinds if (kind, p) not in there):
            self.add(cluster, kind, p)
            changed()
        self.left_out = cluster.left_out

    def measure(self, kind, p):
        """One point on p engines; on one rank strong and weak scaling are the same, and are measured once."""
        if p > 1 or self.alone is None:
            row, cluster, self.why = measure(self.job, kind, self.n, p, self.deadline)
            self.alone = (row, cluster) if p == 1 else self.alone
        else:
            row, cluster = self.alone
        self.rows.append(row | {"kind": kind})
        if cluster is not None and p > 1:
            self.measured.setdefault(p, cluster)
        if cluster is not None and self.network is None and p <= cores():
            self.add(cluster, kind, p, row["simulated"])

    def add(self, cluster, kind, p, rate=None):
        """The simulated point, where it does not take too long, and that of the model; rate: what is known already."""
        self.model.append(cluster.model(kind, self.n, p))
        row = cluster.simulate(kind, self.n, p)
        if row is not None:
            self.simulated.append(row if rate is None else row | dict.fromkeys(("rate", "p25", "p75"), rate))

    def switch(self):
        """The network of simulated ranks: as fast as the engines' messages, where two of them ran."""
        if not self.measured:
            self.joined = NETWORK_TEXT
            return Switch()
        p = self.like_simulated()
        switch = self.measured[p].network
        speed = f"1/β = {number_text(1e-9 / switch.beta)} GB/s" if switch.beta else "no cost per byte"
        self.joined = f"messages as between {place(p)}: α = {seconds_text(switch.alpha)}, {speed}"
        return switch

    def interference(self):
        """How much computing and messages beside it slow each other down on simulated ranks: as on the engines."""
        if not self.measured:
            return Interference()
        (profile,) = self.measured[self.like_simulated()].profiles
        return Interference(*(min(1.0, speed) for speed in profile.interference))

    def like_simulated(self):
        """The number of engines that are most like simulated ranks: the most that had a core each, else the fewest."""
        return max((p for p in self.measured if p <= cores()), default=min(self.measured))

    def foot(self):
        """The small print: what simulated ranks are, and what is not drawn."""
        if self.why:
            return f"Nothing is simulated: {self.why}."
        parts = [f"Simulated: a core per rank; {self.joined}." if self.joined else ""]
        if running() is None:
            parts.append("No engines run: lab.start(4) adds measured points.")
        if self.left_out:
            left = ", ".join(f"{p:,}" for p in sorted(set(self.left_out)))
            parts.append(f"{left} ranks would take too long, and the schedule of this all-reduce is not known.")
        if "strong" in self.kinds and self.simulated and self.simulated[-1]["ranks"] > self.n:
            parts.append(f"Strong: of more than {self.n:,} ranks some have no example.")
        return "  ".join(filter(None, parts))


class Work:
    """Any f(comm, n). What it computes is free on simulated ranks: they get the pace of one real rank instead."""

    unit = "units/s"

    def __init__(self, work, kinds, n, network, deadline):
        self.work, self.kinds, self.n, self.network, self.deadline = work, kinds, n, network, deadline
        self.rows, self.simulated, self.model, self.left_out = [], [], [], []
        self.title = f"Scaling of {getattr(work, '__name__', 'work')}"

    def run(self, counts, every, changed):
        """Measure on `counts` engines and simulate `every` number of ranks; changed() after each point."""
        pace, follow = pace_of_one_rank(self.work, self.n, self.deadline), 0.0
        engines = running() is not None
        for p, kind in ((p, kind) for p in every for kind in self.kinds):
            units = self.n if kind == "strong" else self.n * p
            if engines and p in counts:
                times = place(p).run(time_work, self.work, units, deadline=self.deadline)[0]
                self.rows.append(point(kind, p, cores(), units / times * 1e9) | shares(None))
            if follow * p * p > FOLLOW_S:
                self.left_out.append(p)
                continue
            begin = now_ns()
            told = {"network": self.network, "deadline": SIMULATED_DEADLINE}
            messages_ns = sim.run(p, time_work, self.work, units, 1, 0, **told)[0][0]
            follow = (now_ns() - begin) / 1e9 / (p * p)
            rate = units * 1e9 / (messages_ns + units / p * pace)
            self.simulated.append(point(kind, p, p, np.array([rate])) | shares(None) | {"how": "messages"})
            changed()

    def foot(self):
        """The small print: what simulated ranks are, and what is not drawn."""
        parts = [f"Simulated: a core per rank; {title(self.network) if self.network else NETWORK_TEXT}."]
        if running() is None:
            parts.append("No engines run: lab.start(4) adds measured points.")
        if self.left_out:
            left = ", ".join(f"{p:,}" for p in sorted(set(self.left_out)))
            parts.append(f"{left} ranks would take too long to simulate.")
        return "  ".join(parts)


def pace_of_one_rank(work, n, deadline):
    """Real ns per unit of work on one rank, where there are no messages: arithmetic is free on simulated ranks."""
    where = place(1)
    if not where.simulated:
        return float(np.median(where.run(time_work, work, n, deadline=deadline)[0])) / n
    times = []

    def clocked(comm, _):
        for _ in range(5):
            begin = now_ns()
            work(comm, n)
            times.append(now_ns() - begin)

    sim.run(1, clocked, None)
    return float(np.median(times[1:])) / n
