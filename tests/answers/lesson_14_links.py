"""Answers to exercise 14.6 that the check must reject or accept; CI proves both."""

import math

import numpy as np

from hpdl_lab.collectives import cost


def by_the_share(links, gradient_bytes, ranks, backward_s, hidden=0.9):
    for link in links:
        ring = 2 * (ranks - 1) * link[2] + 2 * (ranks - 1) / ranks * gradient_bytes / link[1]
        if min(ring, backward_s) / ring >= hidden:
            return np.str_(link[0])


def by_the_exposed_part(links, gradient_bytes, ranks, backward_s, hidden=0.9):
    chunk = math.ceil(gradient_bytes / ranks)
    times = {name: 2 * (ranks - 1) * (latency + chunk / bandwidth) for name, bandwidth, latency in links}
    return next((name for name, t in times.items() if max(0, t - backward_s) <= (1 - hidden) * t), None)


def by_the_library(links, gradient_bytes, ranks, backward_s, hidden=0.9):
    price = cost.all_reduce(ranks, gradient_bytes)
    fit = [name for name, b, a in links if np.float64(backward_s) >= hidden * price.seconds(a, 1 / b)]
    return fit[0] if fit else None


WRONG = {
    "14.6": """
units: there are no bits
    gradient_bytes / ranks => 8 * gradient_bytes / ranks
units: there are no bits
    gradient_bytes / ranks => gradient_bytes / 8 / ranks
latency: How long do messages without bytes take
    latency + gradient_bytes => gradient_bytes
latency: each step of the ring is a message
    steps * (latency + gradient_bytes / ranks / bandwidth) => latency + steps * gradient_bytes / ranks / bandwidth
bytes: but the ring sends one chunk
    gradient_bytes / ranks / bandwidth => gradient_bytes / bandwidth
bytes: all-gather sends as many
    gradient_bytes / ranks / bandwidth => gradient_bytes / ranks / bandwidth / 2
bytes: How many of 6 chunks
    gradient_bytes / ranks / bandwidth => gradient_bytes / (ranks - 1) / bandwidth
bytes: You send all gradients once
    gradient_bytes / ranks / bandwidth => gradient_bytes / steps / bandwidth
steps: That is reduce-scatter alone
    2 * (ranks - 1) => ranks - 1
steps: How often is a chunk passed on
    2 * (ranks - 1) => 2 * ranks
sum: How long is that together
    latency + gradient_bytes / ranks / bandwidth => max(latency, gradient_bytes / ranks / bandwidth)
hidden: 90% of the communication may be exposed
    if hidden * => if (1 - hidden) *
hidden: You ask for all of the ring
    hidden * communication_s <= => communication_s <=
hidden: you take a share of backward
    hidden * communication_s <= backward_s => communication_s <= hidden * backward_s
hidden: is only the default
    hidden * communication_s => 0.9 * communication_s
direction: only if backward is short
    <= => >=
time: How long does the ring take over
    if hidden * communication_s <= backward_s => if True
time: How many seconds does the ring
    if hidden * communication_s <= backward_s => if False
time: and how long is each
    latency + gradient_bytes / ranks / bandwidth => 3 * latency + 7 * gradient_bytes / ranks / bandwidth
first: Do you stop at a link
    -             return name
    -     return None
    +             return name
    +         return None
first: so does a cheaper one
    -     for name, bandwidth, latency in links:
    +     for name, bandwidth, latency in reversed(links):
order: That is the fastest link
    in links: => in sorted(links, key=lambda link: -link[1]):
order: the slowest link that hides enough
    in links: => in sorted(links, key=lambda link: link[1]):
none: return None
    return None => return name if len(links) > 1 else None
returns: one link in the list
    return name => return (name, bandwidth, latency)
""",
}
RIGHT = {"14.6": (by_the_share, by_the_exposed_part, by_the_library)}
COMPLETED = {
    "14.6": ["2 * (ranks - 1)", "hidden * communication_s"],
}
