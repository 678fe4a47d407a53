"""Answers to exercise 14.4 that the check must reject or accept; CI proves both."""

from functools import partial

import numpy as np
import torch

from hpdl_lab.performance.slow import train_quickly, train_slowly  # noqa: F401

ROWS = 40  # at least those of two texts


def pads_on_the_device(job):
    @partial(torch.compile, backend="eager", fullgraph=True)
    def mean_of_real_rows(x, weights, rows):
        return ((x @ weights).relu() - x).square().sum() / (rows * x.shape[1])

    torch.set_num_threads(int(job.cores / job.ranks))
    weights, losses = job.weights(), torch.zeros(len(job.batches))
    for step, batch in enumerate(job.batches):
        x = job.to_device(job.read(batch[job.rank :: job.ranks]), True, True)
        padded = torch.nn.functional.pad(x, (0, 0, 0, ROWS - len(x)))
        loss = mean_of_real_rows(padded, weights, torch.tensor(float(len(x))))
        (grad,) = torch.autograd.grad(loss, weights)
        weights = (weights - 0.1 * grad).detach().requires_grad_()
        losses[step] = loss.detach()
    return losses


def lets_torch_find_out(job):
    torch.set_num_threads(job.cores // job.ranks)
    loss_of = torch.compile(lambda x, weights: ((x @ weights).relu() - x).pow(2).mean(), backend="eager")
    weights, losses = job.weights(), []
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for batch in job.batches:
        mine = [text for i, text in enumerate(batch) if i % job.ranks == job.rank]
        optimizer.zero_grad()
        losses.append(loss_of(job.to_device(job.read(mine), pin_memory=True, non_blocking=True), weights))
        losses[-1].backward()
        optimizer.step()
    return tuple(torch.stack(losses).detach().numpy())


def returns_numpy(job):
    return np.float32(train_quickly(job))


WRONG = {
    "14.4": """
threads @train_slowly: turns on 12 cores
threads: PyTorch takes all cores unless
    torch.set_num_threads(job.cores // job.ranks) => pass
threads: have 3 threads for 12 cores
    job.cores // job.ranks => 1
reads: reads 36 texts and uses 12
    job.read(batch[job.rank::job.ranks]) => job.read(batch)[job.rank::job.ranks]
copies: copied from pageable memory
    pin_memory=True, non_blocking=True => non_blocking=True
copies: Does Python need to wait
    pin_memory=True, non_blocking=True => pin_memory=True
breaks: loss_of has 1 graph break
    -         hidden = (x @ weights).relu()
    +         hidden = (x @ weights).relu()
    +         print('forward')
breaks: and Python runs in between
    (x @ weights).relu() => (x @ weights).relu() if x.sum() < 1000000.0 else x
graphs: another number of rows, another
    dynamic=True => dynamic=False
graphs: runs in eager mode
    -     @partial(torch.compile, backend='eager', dynamic=True)
synchronizations: from tensors 7 times
    loss.detach() => torch.tensor(loss.item())
synchronizations: can one tensor hold them all
    torch.stack(losses).tolist() => [float(loss) for loss in losses]
detach: still holds the graph of its step
    -         losses.append(loss.detach())
    -     return torch.stack(losses).tolist()
    +         losses.append(loss)
    +     return losses
steps: 6 batches, and you return 5 losses
    in job.batches => in job.batches[:-1]
returns: returned something of type float
    torch.stack(losses).tolist() => losses[-1].item()
returns: returned nothing
    return torch.stack(losses).tolist() => torch.stack(losses).tolist()
returns: returned something of type str
    torch.stack(losses).tolist() => str(losses)
padding: your mean is over 40
    -         loss = loss_of(x, weights)
    +         loss = loss_of(torch.nn.functional.pad(x, (0, 0, 0, 40 - len(x))), weights)
texts: Which texts of a batch does the slow script use
    batch[job.rank::job.ranks] => batch
update: The first loss is right
    weights.grad = None => pass
update: between two steps
    weights -= 0.1 * weights.grad => pass
loss: but not what it computes
    .square().mean() => .square().sum()
loss: and you say nan
    .square().mean() => .square().mean() * float('nan')
""",
}
RIGHT = {"14.4": (pads_on_the_device, lets_torch_find_out, returns_numpy)}
