"""What notebook 09 runs on its ranks: a GPT whose layers are shared, an image whose rows are. Functions of a comm."""

from itertools import islice
from typing import NamedTuple

import torch
from torch.nn.functional import conv2d, cross_entropy, pad

from ...data.sharding import batches
from ...models import build_for
from .cuts import add_partial_gradients
from .model import tensor_parallel
from .plugged import Plugged
from .spatial import edges_of

BATCH, LR = 4, 3e-3


class Trained(NamedTuple):
    """One rank after training.

    losses:  of the whole batch, one per step.
    held, whole: numbers in the parameters of this rank, and of the whole model.
    forward, backward: elements of every all_reduce of the last step, in order.
    """

    losses: list
    held: int
    whole: int
    forward: list
    backward: list


def train_gpt(comm, data, steps=3, heads=4, sequence=False):
    """Train a tiny GPT in float64, every layer of which is shared by all ranks; returns Trained.

    Args:    data: a data.dataset.Dataset of tokens, the same on every rank: all ranks see the whole batch.
             heads: of each layer, which the ranks must divide; sequence: sequence parallel.
    """
    calls = []

    def noted(comm, x):
        calls.append(x.numel())
        return comm.all_reduce(x)

    whole = build_for(data, "gpt", heads=heads, dtype="float64")
    model = tensor_parallel(Plugged(comm, all_reduce=noted), whole, sequence=sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, forward, backward = [], [], []
    for indices in islice(batches(len(data.train_y), BATCH), steps):
        x, y = data.train_x[indices], data.train_y[indices]
        calls.clear()
        with comm.trace.span("forward"):
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        forward = calls.copy()
        calls.clear()
        optimizer.zero_grad()
        with comm.trace.span("backward"):
            loss.backward()
        backward = calls.copy()
        with comm.trace.span("update"):
            add_partial_gradients(comm, model)
            optimizer.step()
        losses.append(loss.item())
    held, all_of_them = (sum(p.numel() for p in m.parameters()) for m in (model, whole))
    return Trained(losses, held, all_of_them, forward, backward)


class Convolved(NamedTuple):
    """off: the largest difference from one rank with the whole images; rows: of this rank; nbytes: that it sent."""

    off: float
    rows: int
    nbytes: int


def convolve_strips(comm, halo_exchange, images, kernel):
    """Convolve images of which this rank has a strip, with an attendee's halo_exchange; returns Convolved.

    Args:    images: (b, c, h, w), kernel: (c_out, c, k, k) with an odd k, both the same on every rank.
    """
    edges, halo = edges_of(images.shape[2], comm.size), kernel.shape[2] // 2
    mine = slice(edges[comm.rank], edges[comm.rank + 1])
    begun = len(comm.trace.log)
    strip = halo_exchange(comm, images[:, :, mine].contiguous(), [(halo, halo)] * comm.size)
    nbytes = sum(e.nbytes for e in comm.trace.events[begun:] if e.op == "send")
    y = conv2d(strip, kernel, padding=(0, halo))
    right = conv2d(pad(images, (halo,) * 4), kernel)[:, :, mine]
    return Convolved(float((y - right).abs().max()), y.shape[2], nbytes)
