"""Notebook 07, large batches: the rate that a batch needs, LARS's trust ratio, and the time to a target."""

import math
from itertools import product

import numpy as np
import torch
from torch import Tensor

from ...optim import large_batch as reference
from ...optim.large_batch import TrainingJob
from ...units import counted
from ..checkers import because, reason
from ..ranks import alone, capital, number, numbers_of
from ..record import Answer, Exercise, Passed, Rows

# -- 7.1 --------------------------------------------------------------------------------------------------------------

SCHEDULES = (  # batch, base_rate, base_batch, warmup
    (1024, 0.02, 32, 10),
    (8192, 0.1, 256, 7),
    (256, 0.1, 256, 5),
    (64, 0.4, 256, 4),
    (512, 0.1, 32, 1),
    (512, 0.1, 32, 0),
)
AFTER = 4  # steps that are looked at when the warm-up is over


def _check_learning_rate(fn: Answer) -> Passed:
    for case in SCHEDULES:
        _check_schedule(fn, *case)
    batch, rate, base, warmup = SCHEDULES[1]
    return Passed(
        f"right for {len(SCHEDULES)} pairs of batches, every step of their warm-ups and {AFTER} after it",
        f"""Goyal et al. 2017, batch {batch:,}: from {rate} to {rate * batch / base:g}; their warm-up takes 5 epochs,
        {5 * 1_281_167 // batch:,} steps on ImageNet's 1,281,167 images""",
    )


def _check_schedule(fn: Answer, batch: int, rate: float, base: int, warmup: int) -> None:
    """Raise Broken unless fn has the right rate at every step."""
    where = f"with a batch of {batch:,}, a base rate of {rate} for {base} examples, and {warmup} steps of warm-up"
    steps = np.arange(warmup + AFTER)
    answers = alone(lambda: [fn(int(s), batch, rate, base, warmup) for s in steps], where=where)
    got = np.array([numbers_of(answer, 1, where, "a rate, one number")[0] for answer in answers])
    right = np.array([reference.learning_rate(int(s), batch, rate, base, warmup) for s in steps])
    wrong = ~np.isclose(got, right, rtol=1e-9)
    if wrong.any():
        step = int(np.argmax(wrong))
        text = f"{capital(where)}, the rate of step {step} should be {number(right[step])} and is {number(got[step])}."
        raise because(reason(got, _schedules(steps, batch / base, rate, batch, warmup)) or "rate: ", text)


def _schedules(steps: np.ndarray, k: float, rate: float, batch: int, warmup: int) -> Rows:
    """Return rows of what else a rate may be, over all steps."""
    full = rate * k

    def ramp(first: float, last: float, share: np.ndarray) -> np.ndarray:
        return np.where(steps >= warmup, last, first + (last - first) * share)

    w = max(warmup, 1)
    fewer = "start: It starts at the full rate: the first steps need a warm-up."
    return (
        (np.full(len(steps), rate), "scale: That is always the base rate: k times the batch needs k times that."),
        (ramp(rate, rate * math.sqrt(k), steps / w), "scale: That grows with the root of the batch: make it linear."),
        (ramp(rate, rate / k, steps / w), "scale: A larger batch got a smaller rate: multiply by batch / base_batch."),
        (ramp(rate, rate * batch, steps / w), "scale: The base rate is for base_batch examples, not for one."),
        (np.full(len(steps), full), fewer),
        (ramp(0, full, steps / w), "start: It starts from 0, where nothing is learned: start from the base rate."),
        (ramp(0, full, (steps + 1) / w), "start: It starts from 0: start from the base rate, which is known to work."),
        (np.where(steps >= warmup, full, rate), "jump: It jumps from the base rate to the full one: grow gradually."),
        (rate * k ** np.minimum(steps / w, 1), "shape: It grows by a factor with each step; grow by the same amount."),
        (ramp(rate, full, (steps + 1) / w), "end: It grows before the first step: step 0 has the base rate."),
        (ramp(rate, full, steps / (w + 1)), "end: The last step of the warm-up should be one increment below it."),
        (rate + (full - rate) * steps / w, "end: It goes on growing when the warm-up is over."),
        (np.where(steps >= warmup, rate, rate + (full - rate) * steps / w), "end: It falls back after the warm-up."),
    )


# -- 7.2 --------------------------------------------------------------------------------------------------------------

LAYERS = (  # shape, trust, weight_decay, zeros in
    ((5, 3), 0.02, 0.1, ""),
    ((7,), 0.001, 0.0, ""),
    ((4, 2, 3), 1.0, 0.5, ""),
    ((5, 3), 0.02, 0.1, "w"),
    ((5, 3), 0.02, 0.1, "grad"),
    ((5, 3), 0.02, 0.0, "grad"),
)


def _check_trust_ratio(fn: Answer) -> Passed:
    for i, (shape, trust, decay, zeros) in enumerate(LAYERS):
        generator = torch.Generator().manual_seed(i)
        w, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        w, grad = w * (zeros != "w"), 3 * grad * (zeros != "grad")
        _check_ratio(fn, w, grad, trust, decay, zeros)
    return Passed(
        f"right for {len(LAYERS)} layers, also with zeros in w or in grad",
        "a gradient that is 1,000 times as long makes the ratio 1,000 times as small: without weight decay "
        "the step is the same",
    )


def _check_ratio(fn: Answer, w: Tensor, grad: Tensor, trust: float, decay: float, zeros: str) -> None:
    """Raise Broken unless fn has the right ratio for this layer."""
    about = f", and {zeros} all zeros" if zeros else ""
    where = f"with w of shape {tuple(w.shape)}, trust={trust}, weight_decay={decay}{about}"
    got = alone(fn, w, grad, trust, decay, where=where, keep="w grad")
    (got,) = numbers_of(got, 1, where, "the ratio of a layer, one number")
    right = reference.trust_ratio(w, grad, trust, decay)
    if not np.isclose(got, right, rtol=1e-6):
        text = f"{capital(where)}, the ratio should be {number(right)} and is {number(got)}."
        if zeros:
            raise because(f"zero: {AT_ZERO[zeros]}", text)
        raise because(reason(got, _ratios(w, grad, trust, decay), np.isclose) or "ratio: ", text)


AT_ZERO = {
    "w": "Weights that are 0 take steps of length 0, and stay there forever. Return 1 in that case.",
    "grad": "Without a gradient a ratio has no meaning: return 1, and never compute 0 / 0.",
}


def _ratios(w: Tensor, grad: Tensor, trust: float, decay: float) -> Rows:
    """Return rows of what else a ratio may be."""
    length, slope = float(w.norm()), float(grad.norm())
    right = trust * length / (slope + decay * length)
    return (
        (trust * length / slope, "decay: Weight decay is a part of the step: add its length."),
        (trust * length / (slope + decay), "decay: Weight decay pulls with weight_decay * |w|: multiply it by |w|."),
        (
            trust * length / float((grad + decay * w).norm()),
            "decay: That is the length of the sum. LARS adds the lengths: the ratio is never larger than that.",
        ),
        (right / trust, "trust: Multiply by `trust`: it says how long a step is, as a share of the weights."),
        ((slope + decay * length) / length / trust, "inverse: It is upside down: a longer gradient, a smaller ratio."),
        (trust * slope / (length + decay * slope), "inverse: w and grad have changed places."),
        (trust * length**2 / (slope**2 + decay * length**2), "norm: Those are squares of lengths: take their roots."),
        (trust * float(w.abs().sum() / (grad.abs().sum() + decay * w.abs().sum())), L2),
        (trust * float(w.abs().max() / (grad.abs().max() + decay * w.abs().max())), L2),
        (trust * abs(float(w.mean() / (grad.mean() + decay * w.mean()))), L2),
        (1.0, "ratio: That is plain SGD: a ratio of 1 is for layers of zeros only."),
    )


L2 = "norm: The length of a tensor is the root of the sum of all squares: x.norm()."

# -- 7.5 --------------------------------------------------------------------------------------------------------------

JOBS = (
    TrainingJob(100, 64, 1.1e-3, 2.3e-3, {1: 0.0, 2: 0.7e-3, 3: 1.3e-3, 8: 4.9e-3}),
    TrainingJob(14_000, 2_000, 2.5e-3, 0.0, {1: 0.0, 2: 8e-3, 3: 9e-3, 8: 1e-2}),
)
ASKED = tuple(product((100, 8192, 64, 1000, 10), (2, 3, 8, 1)))  # batches, ranks


def _check_seconds_to_target(fn: Answer) -> Passed:
    for job in JOBS:
        for batch, ranks in ASKED:
            where = f"with a batch of {batch:,} on {counted(ranks, 'rank')} and {job}"
            (got,) = numbers_of(alone(fn, batch, ranks, job, where=where), 1, where, "a time, one number")
            right = reference.seconds_to_target(batch, ranks, job)
            if not np.isclose(got, right, rtol=1e-9):
                text = f"{capital(where)}, the time should be {number(right)} s and is {number(got)} s."
                raise because(reason(got, _seconds(batch, ranks, job), np.isclose) or BOTH, text)
    job = JOBS[1]
    best = min(ASKED, key=lambda at: reference.seconds_to_target(at[0], at[1], job))
    least, most = (reference.seconds_to_target(batch, ranks, job) for batch, ranks in (best, (10, 1)))
    return Passed(
        f"right for {len(JOBS)} jobs and {len(ASKED)} pairs of batch and ranks",
        f"the second job is fastest with {best[0]:,} examples on {best[1]} ranks: {most / least:.0f} times as fast as "
        "with 10 on one",
    )


def _seconds(batch: int, ranks: int, job: TrainingJob) -> Rows:
    """Yield rows of what else a time may be: (steps, seconds of a step), one or both of them wrong."""
    share = -(-batch // ranks)
    steps = job.least_steps * (1 + job.noise_scale / batch)
    step = share * job.example_s + job.fixed_s + job.all_reduce_s[ranks]
    slowest = "share: A step waits for the rank with most examples: round up."
    yield from (
        (job.least_steps * step, "steps: Those are the steps of an endless batch: this one needs more."),
        (job.least_steps * job.noise_scale / batch * step, "steps: There are never fewer than S_min steps."),
        (job.least_steps * (1 + batch / job.noise_scale) * step, "steps: That grows with the batch: B_noise / batch."),
        (
            job.least_steps * (batch + job.noise_scale) * step,
            "epochs: least_steps * (batch + noise_scale) counts examples: divide by the batch for steps.",
        ),
        (step, "steps: That is the time of one step: how many are there?"),
        (steps, "step: Those are the steps: how long does each of them take?"),
        (steps * (step - job.all_reduce_s[ranks]), "step: The all-reduce is missing: every step ends with one."),
        (steps * (step - job.fixed_s), "step: fixed_s is missing: every step costs it, whatever its batch."),
        (steps * (step - job.fixed_s) + job.fixed_s, "step: fixed_s is paid in every step, not once."),
        (steps * (step - job.all_reduce_s[ranks]) + job.all_reduce_s[ranks], "step: Every step has an all-reduce."),
        (steps * (step - share * job.example_s), "share: The time to compute the examples is missing."),
        (steps * (step + (batch - share) * job.example_s), "share: The ranks share the batch: each has a part of it."),
        (steps * (step + (batch // ranks - share) * job.example_s), slowest),
        (steps * (step + (batch / ranks - share) * job.example_s), slowest),
        (steps * (batch * job.example_s + job.fixed_s + job.all_reduce_s[ranks]) / ranks, DIVIDED),
        (steps * step / ranks, "share: More ranks divide the examples of a step, not its whole time."),
    )


BOTH = "seconds: The number of steps, or the time of a step, or both, are wrong."
DIVIDED = "share: More ranks divide the computing; the fixed part and the all-reduce are paid by every rank."

EXERCISES = (
    Exercise("7.1", "linear scaling and warm-up", reference.learning_rate, 2, _check_learning_rate),
    Exercise("7.2", "LARS's trust ratio", reference.trust_ratio, 2, _check_trust_ratio),
    Exercise("7.5", "the time to a target", reference.seconds_to_target, 1, _check_seconds_to_target),
)
