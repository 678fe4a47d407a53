"""The batches of tensor fusion: which gradients travel together, and behind them what ranks tell each other.

[ w3.grad ....... | w1.grad ... | lacking w3 | lacking w1 | more ]      (elements + len(params) + 1,), added over ranks
"""

import math
from typing import NamedTuple

import torch

from ..verdict import finite_in_float16


def fuse(order, nbytes, dtypes, threshold):
    """Cut `order` into batches of one dtype each: greedy first fit, up to `threshold` bytes.

        order a b c d, of 3, 4, 2, 1 bytes, threshold 6:   a + c + d | b        b does not fit any more, c and d do

    Args:    order: indices, the same on every rank; nbytes, dtypes: of every gradient, by index.
             threshold: bytes; a larger gradient travels alone, and with 0 each of them does.
    Returns: list of lists of indices.
    """
    left, batches = list(order), []
    while left:
        batch, total, rest = [left[0]], nbytes[left[0]], []
        for i in left[1:]:
            if dtypes[i] == dtypes[batch[0]] and total + nbytes[i] <= threshold:
                batch.append(i)
                total += nbytes[i]
            else:
                rest.append(i)
        left = rest
        batches.append(batch)
    return batches


class Told(NamedTuple):
    """What the sum over ranks tells. lacking: for each gradient, how many ranks have none.

    more: has a rank a gradient that was not asked for? not_finite: has one NaN or infinity? too_large: places, in the
    batch, of gradients whose sum overflows float16, though all ranks' are finite.
    """

    lacking: list
    more: bool
    not_finite: bool
    too_large: list


def pack(params, lacking, more, divisor):
    """The flat tensor of this rank. The last number is NaN where one of its gradients is not finite.

    Args:    lacking: for each of `params`, whether this rank has no gradient: zeros travel. more: has it one that is
             in no batch? divisor: of the gradients, before they are added.
    """
    grads = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params]
    told = [float(lacks) for lacks in lacking] + [float(more)]
    flat = torch.cat([*grads, grads[0].new_tensor(told)])
    values = flat[: -len(told)]
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    flat[-1] += 0 * values.sum(dtype=wide)  # 0 times a finite sum is 0, else NaN
    if divisor != 1:
        values /= divisor
    return flat


def unpack(flat, params):
    """([the part of `flat` that is the sum of each gradient], Told)."""
    *sums, told = flat.split([*(p.numel() for p in params), len(params) + 1])
    *lacking, more = told.tolist()
    too_large = [place for place, total in enumerate(sums) if not finite_in_float16(total)]
    not_finite = math.isnan(more)
    return sums, Told([round(n) for n in lacking], more > 0, not_finite, [] if not_finite else too_large)
