"""What a training loop did, in which order, and what cannot be right about it: the log of exercise 6.6."""

from .ranks import capital, count, off_by
from .record import Broken


class Log(list):
    """What one rank did: [(what, step, micro-batch)], the two numbers -1 where they say nothing.

    what: "forward", "backward", "last" (a backward outside accumulating), "zero", "add", "step".
    """

    def times(self, what):
        return sum(entry[0] == what for entry in self)

    def before(self, n, what):
        """The latest entry of this kind before entry n, or None."""
        return next((entry for entry in reversed(self[:n]) if entry[0] == what), None)

    def after(self, n):
        """What the rank does next, apart from backward: one of the other words, or None."""
        return next((what for what, *_ in self[n + 1 :] if what not in ("backward", "last")), None)

    def since(self, n, what):
        """The entries between the latest of this kind before entry n, and n; all before n where there is none."""
        begin = max((m for m in range(n) if self[m][0] == what), default=-1)
        return Log(self[begin + 1 : n])

    def goes_on(self, n):
        """Does a later forward belong to the step whose forward came last before entry n, and has not been before?"""
        last = self.before(n, "forward")
        seen = {entry[1:] for entry in self[:n] if entry[0] == "forward"}
        return last is not None and any(
            what == "forward" and place[0] == last[1] and tuple(place) not in seen for what, *place in self[n + 1 :]
        )


def judge(looped, shape, where, broken=None):
    """Raise Broken for the first thing that a rank did in a wrong order. broken: how the run ended, if it did not."""
    size, detail = len(looped), broken.detail if broken else ""
    for rank in sorted(looped):
        for failed, told in faults(Log(looped[rank].log), rank, shape[rank % len(shape)], size):
            raise Broken(failed, f"{capital(where)}, {told}", detail)
    adds = {rank: Log(left.log).times("add") for rank, left in sorted(looped.items())}
    most = max(len(shape[rank % len(shape)]) for rank in looped)
    if broken and broken.failed == "raises":
        return
    wrong = {rank: n for rank, n in adds.items() if n != most}
    if wrong:
        rank, n = next(iter(wrong.items()))
        told = (
            f"{capital(where)}, rank {rank} adds gradients {count(n, 'time')}, and {most} are needed, as many as the "
            f"rank with most steps has: {off_by(n, most, 'step')}."
        )
        if n < most:
            told += (
                " Adding is collective: who leaves the loop earlier leaves the others waiting, and who stops everybody "
                "earlier drops batches."
            )
        raise Broken("lengths", told, detail)
    for rank, n in adds.items():
        updates = Log(looped[rank].log).times("step")
        if updates != n:
            told = (
                f"{capital(where)}, rank {rank} adds gradients {count(n, 'time')} and takes {count(updates, 'step')}: "
                "every rank takes every step, also one without a batch, or the replicas drift apart."
            )
            raise Broken("apart", told, detail)
    for rank in looped:
        done = {tuple(place) for what, *place in looped[rank].log if what == "forward"}
        for i, parts in enumerate(shape[rank % len(shape)]):
            lost = [k for k in range(parts) if (i, k) not in done]
            if lost:
                told = (
                    f"{capital(where)}, rank {rank} uses {parts - len(lost)} of its {parts} micro-batches in step {i}: "
                    f"micro-batch {lost[0]} is left out, and missing in the gradient."
                )
                raise Broken("lost", told, detail)


def faults(log, rank, shape, size):
    """(invariant, sentence) for each entry of the log of a rank that cannot be right, in order.

    shape: numbers of micro-batches of its steps; size: ranks.
    """
    for n, (what, i, k) in enumerate(log):
        found = LOOKS[what](log, n, i, k, shape) if what in LOOKS else None
        if found:
            yield found[0], f"rank {rank} {found[1].replace('SIZE', str(size))}"


def look_at_forward(log, n, i, k, shape):
    if i < 0:
        return "memory", "gives the model something else than its micro-batches: one at a time fits into memory."
    if log.before(n, "forward") and not log.since(n, "forward"):
        return "memory", (
            f"makes the forward of micro-batch {k} of step {i} before the backward of the one before: all of them are "
            "kept in memory then, and one at a time is what micro-batches are for."
        )
    if ("forward", i, k) in log[:n]:
        return "repeat", f"uses micro-batch {k} of step {i} twice: what is over is over, give nothing."
    return None


def look_at_last(log, n, i, k, shape):
    if k < shape[i] - 1 and log.after(n) == "forward":
        return "accumulating", (
            f"lets the strategy send gradients in the backward of micro-batch {k} of step {i}, of {shape[i]}: others "
            "follow, so it belongs into `with strategy.accumulating():`."
        )
    return None


def look_at_add(log, n, i, k, shape):
    before = log.since(n, "add")
    worked = before.before(len(before), "backward")
    if log.goes_on(n):
        step = log.before(n, "forward")[1]
        return "accumulation", (
            f"adds gradients over ranks before step {step} has accumulated all of its {shape[step]} micro-batches. "
            "The sum of the first would lie in .grad when the next backward adds to it, and travel again, SIZE times "
            "as large."
        )
    if len(before) < n and not before.times("zero"):
        return "zero", (
            "adds gradients again without zero_grad: that of the step before is still in .grad, and counts a second "
            "time. Also where a rank has no batch."
        )
    if worked and not before.times("last"):
        return "accumulating", (
            f"accumulates in the backward of the last micro-batch of step {worked[1]} as well: nothing can travel "
            "beside it then, and all of the communication shows."
        )
    return None


def look_at_zero(log, n, i, k, shape):
    if log.goes_on(n) and log.since(n, "add").times("backward"):
        step = log.before(n, "forward")[1]
        return "zero", f"calls zero_grad between two micro-batches of step {step}: what the first has added up is gone."
    return None


LOOKS = {"forward": look_at_forward, "last": look_at_last, "add": look_at_add, "zero": look_at_zero}
