"""Answers to exercise 15.4 that the check must reject or accept; CI proves both."""

from collections import Counter
from statistics import mean, median, median_low

import numpy as np

CORE = ("forward", "backward", "update")


def by_arrays(lanes, least=1.2):
    def seconds(steps, ops):
        return [sum(e.t1_ns - e.t0_ns for e in events if e.op in ops) for events in steps]

    def per_byte(rank):
        right = (rank + 1) % len(lanes)
        for mine, theirs in zip(lanes[rank], lanes[right], strict=True):
            sent, got = [e for e in mine if e.op == "send"], [e for e in theirs if e.op == "recv"]
            begins = np.maximum([e.t0_ns for e in sent], [e.t0_ns for e in got])
            yield (np.array([e.t1_ns for e in got]) - begins).sum() / sum(e.nbytes for e in sent)

    needs = {
        "link": [[*per_byte(rank)] for rank in range(len(lanes))],
        "core": [seconds(steps, CORE) for steps in lanes],
        "input": [seconds(steps, ("input",)) for steps in lanes],
    }
    usual = np.array([np.median(need, axis=1) for need in needs.values()])
    factors = usual / np.median(usual, axis=1, keepdims=True)
    cause, rank = np.unravel_index(factors.argmax(), factors.shape)
    return (rank, [*needs][cause]) if factors.max() >= least else (-1, "none")


def by_messages_one_by_one(lanes, least=1.2):
    found = []
    for cause in ("core", "input", "link"):
        usual = []
        for rank, steps in enumerate(lanes):
            needs = []
            for step, events in enumerate(steps):
                if cause == "link":
                    theirs = iter([e for e in lanes[(rank + 1) % len(lanes)][step] if e.op == "recv"])
                    for e in events:
                        if e.op == "send":
                            got = next(theirs)
                            needs.append((got.t1_ns - max(e.t0_ns, got.t0_ns)) / e.nbytes)
                else:
                    ops = CORE if cause == "core" else ("input",)
                    needs.append(sum(e.t1_ns - e.t0_ns for e in events if e.op in ops))
            usual.append(median(needs))
        found += [(need / median(usual), rank, cause) for rank, need in enumerate(usual)]
    return max(found)[1:] if max(found)[0] >= least else (-1, "none")


def by_counters(lanes, least=1.2):
    """Compare with the median of the other ranks, and let the receiver's list find its senders."""
    per_step = Counter()
    for rank, steps in enumerate(lanes):
        for step, events in enumerate(steps):
            for e in events:
                cause = "core" if e.op in CORE else e.op
                per_step[cause, rank, step] += e.t1_ns - e.t0_ns
            gots = [e for e in events if e.op == "recv"]
            sends = [e for e in lanes[gots[0].peer][step] if e.op == "send"]
            spent = sum(g.t1_ns - max(s.t0_ns, g.t0_ns) for s, g in zip(sends, gots, strict=True))
            per_step["link", gots[0].peer, step] = spent / sum(g.nbytes for g in gots)
    best = (0.0, -1, "none")
    for cause in ("core", "input", "link"):
        usual = [median_low(per_step[cause, r, s] for s in range(len(lanes[r]))) for r in range(len(lanes))]
        for rank, need in enumerate(usual):
            others = median(usual[:rank] + usual[rank + 1 :])
            best = max(best, (need / others, rank, cause))
    return best[1:] if best[0] >= least else (-1, "none")


def messages(steps, ops):
    """Seconds in these events, in all steps."""
    return sum(e.t1_ns - e.t0_ns for events in steps for e in events if e.op in ops)


WRONG = {
    "15.4": """
none: You never name a rank
    return found => return (-1, 'none')
none: You always name a rank
    least, (-1, => 0, (-1,
none: need 1.2 times the median of all ranks
    least, (-1, => 1.05, (-1,
step: the longest steps
    length = [sum(events[-1].t1_ns - events[0].t0_ns for events in steps) for steps in lanes]
    return length.index(max(length)), 'core'
wait: most time in its messages
    spent = [messages(steps, ('send', 'recv')) for steps in lanes]
    return spent.index(max(spent)), 'link'
wait: most time in its messages
    spent = [messages(steps, ('recv',)) for steps in lanes]
    return spent.index(max(spent)), 'core'
wait: most time in its messages
    spent = [messages(steps, ('send',)) for steps in lanes]
    return spent.index(max(spent)), 'link'
cause: The rank is right
    spent = [messages(steps, ('send', 'recv')) for steps in lanes]
    return (spent.index(min(spent)), 'link') if max(spent) > 1.2 * min(spent) else (-1, 'none')
least: only the default
    least, (-1, => 1.2, (-1,
rank: the rank after the straggler
    (usual.index(max(usual)), cause) => ((usual.index(max(usual)) + 1) % len(lanes), cause)
rank: the rank before the straggler
    (usual.index(max(usual)), cause) => ((usual.index(max(usual)) - 1) % len(lanes), cause)
rank: does it wait in them
    (usual.index(max(usual)), cause) => (usual.index(min(usual)), cause)
cause: never say input or link
    OPS.items() => {'core': OPS['core']}.items()
cause: never say link
    OPS.items() => {'core': OPS['core'], 'input': OPS['input']}.items()
cause: never say input
    OPS.items() => {'core': OPS['core'], 'link': OPS['link']}.items()
steps: at the first step only
    median(needs) => needs[0]
steps: at the last step only
    median(needs) => needs[-1]
steps: One very slow step
    median(needs) => mean(needs)
steps: by its slowest step
    median(needs) => max(needs)
usual: the mean of all ranks
    median(usual) => mean(usual)
missed: compared with the others
    least, (-1, => least + 0.2, (-1,
core: You look at forward only
    OPS.items() => (OPS | {'core': ('forward',)}).items()
core: You look at backward only
    OPS.items() => (OPS | {'core': ('backward',)}).items()
core: You leave out update
    OPS.items() => (OPS | {'core': ('forward', 'backward')}).items()
input: as work of the core
    OPS.items() => {'core': OPS['core'] + OPS['input'], 'link': OPS['link']}.items()
link: the sender waits for the receiver
    max(e.t0_ns, got.t0_ns) => e.t0_ns
link: the receiver waits for the sender
    max(e.t0_ns, got.t0_ns) => got.t0_ns
link: the two ends wait for each other
    got.t1_ns - max(e.t0_ns, got.t0_ns) => e.t1_ns - e.t0_ns
byte: You compare seconds of messages
    -                 seconds /= sum((e.nbytes for e in mine))
side: You blame the rank that receives
    OPS.items() => (OPS | {'link': ('recv',)}).items()
    e.op == 'recv' => e.op == 'send'
    got.t1_ns - max => e.t1_ns - max
returns: with cause "core", "input" or "link"
    return found => return found[::-1]
returns: your function returned None
    return found => found
returns: with cause "core", "input" or "link"
    return found => return found[0]
returns: or (-1, "none")
    (-1, 'none') => (0, 'none')
raises: index out of range
    lanes[mine[0].peer] => lanes[usual.__len__() + 1]
""",
}
RIGHT = {"15.4": (by_arrays, by_messages_one_by_one, by_counters)}
COMPLETED = {
    "15.4": [
        "mine = [e for e in events if e.op in OPS[cause]]\n"
        "theirs = [e for e in lanes[mine[0].peer][step] if e.op == 'recv'] if cause == 'link' else mine\n"
        "need = sum(b.t1_ns - max(a.t0_ns, b.t0_ns) for a, b in zip(mine, theirs))\n"
        "needs.append(need / sum(e.nbytes for e in mine) if cause == 'link' else need)",
        *("median(usual)", "usual.index(max(usual))"),
    ],
}
