"""Answers to exercises 7.1, 7.2 and 7.5 that the checks must reject or accept; CI proves both."""

import math

import torch


def by_clamping(step, batch, base_rate, base_batch, warmup):
    k = batch / base_batch
    share = min(1.0, step / warmup) if warmup else 1.0
    return base_rate * (1 + (k - 1) * share)


def in_torch(w, grad, trust, weight_decay):
    length, slope = torch.linalg.vector_norm(w), torch.linalg.vector_norm(grad)
    ratio = trust * length / (slope + weight_decay * length)
    return torch.where((length > 0) & (slope > 0), ratio, 1.0)


def by_squares(w, grad, trust, weight_decay):
    length, slope = math.sqrt((w**2).sum()), math.sqrt((grad**2).sum())
    return trust / (slope / length + weight_decay) if length and slope else 1


def by_examples(batch, ranks, job):
    examples = job.least_steps * (batch + job.noise_scale)
    return examples / batch * (math.ceil(batch / ranks) * job.example_s + job.fixed_s + job.all_reduce_s[ranks])


WRONG = {
    "7.1": """
scale: k times the batch needs k times that
    return base_rate
scale: grows with the root of the batch
    full = base_rate * batch / base_batch => full = base_rate * (batch / base_batch) ** 0.5
scale: A larger batch got a smaller rate
    base_rate * batch / base_batch => base_rate * base_batch / batch
scale: for base_batch examples, not for one
    base_rate * batch / base_batch => base_rate * batch
start: start from the base rate
    return base_rate + (full - base_rate) * step / warmup => return full * step / warmup
start: It starts from 0: start from the base rate
    return base_rate + (full - base_rate) * step / warmup => return full * (step + 1) / warmup
start: the first steps need a warm-up
    return base_rate * batch / base_batch
jump: It jumps from the base rate to the full one
    return base_rate + (full - base_rate) * step / warmup => return base_rate
shape: grow by the same amount
    k = batch / base_batch
    return base_rate * k ** (min(step / warmup, 1) if warmup else 1)
end: step 0 has the base rate
    * step / warmup => * (step + 1) / warmup
end: one increment below it
    * step / warmup => * step / (warmup + 1)
end: goes on growing
    full = base_rate * batch / base_batch
    return base_rate + (full - base_rate) * step / max(warmup, 1)
end: It falls back after the warm-up
    return full => return base_rate
raises: ZeroDivisionError
    full = base_rate * batch / base_batch
    return base_rate + (full - base_rate) * min(step / warmup, 1)
returns: returned None: return a rate
    return full => pass
    return base_rate + (full - base_rate) * step / warmup => rate = full * step
""",
    "7.2": """
returns: return the ratio of a layer, one number
    return trust * w.abs() / (grad.abs() + weight_decay * w.abs())
decay: add its length
    (slope + weight_decay * length) => slope
decay: multiply it by |w|
    weight_decay * length => weight_decay
decay: LARS adds the lengths
    (slope + weight_decay * length) => float((grad + weight_decay * w).norm())
trust: it says how long a step is
    return trust * length => return length
inverse: a longer gradient
    return trust * length / (slope + weight_decay * length) => return (slope + weight_decay * length) / length / trust
inverse: w and grad have changed places
    trust * length / (slope + weight_decay * length) => trust * slope / (length + weight_decay * slope)
norm: Those are squares of lengths
    trust * length / (slope + weight_decay * length) => trust * length ** 2 / (slope ** 2 + weight_decay * length ** 2)
norm: the root of the sum of all squares
    (float(w.detach().norm()), float(grad.norm())) => float(w.norm(1)), float(grad.norm(1))
norm: the root of the sum of all squares
    (float(w.detach().norm()), float(grad.norm())) => float(w.abs().max()), float(grad.abs().max())
ratio: That is plain SGD
    return trust * length / (slope + weight_decay * length) => return 1.0
zero: stay there forever
    if length == 0 or slope == 0: => if slope == 0:
zero: never compute 0 / 0
    if length == 0 or slope == 0: => if length == 0:
zero: stay there forever
    return trust * w.norm() / (grad.norm() + weight_decay * w.norm())
input: changed grad
    grad += weight_decay * w
    return trust * float(w.detach().norm()) / float(grad.norm())
""",
    "7.5": """
steps: this one needs more
    job.least_steps * (1 + job.noise_scale / batch) => job.least_steps
steps: never fewer than S_min
    (1 + job.noise_scale / batch) => (job.noise_scale / batch)
steps: That grows with the batch
    job.noise_scale / batch => batch / job.noise_scale
epochs: divide by the batch for steps
    (1 + job.noise_scale / batch) => (batch + job.noise_scale)
steps: the time of one step
    return steps * => return
step: how long does each of them take
    return steps * (share * job.example_s + job.fixed_s + job.all_reduce_s[ranks]) => return steps
step: every step ends with one
    job.fixed_s + job.all_reduce_s[ranks] => job.fixed_s
step: every step costs it
    + job.fixed_s + => +
step: not once
    (share * job.example_s + job.fixed_s + => job.fixed_s + steps * (share * job.example_s +
    return steps * => return
share: each has a part of it
    -(-batch // ranks) => batch
share: round up
    -(-batch // ranks) => batch // ranks
share: round up
    -(-batch // ranks) => batch / ranks
share: not its whole time
    return steps * => return steps / ranks *
seconds: or the time of a step, or both
    return job.least_steps * (batch + job.noise_scale) * job.example_s
share: to compute the examples
    share * job.example_s + => +
""",
}
RIGHT = {"7.1": (by_clamping,), "7.2": (in_torch, by_squares), "7.5": (by_examples,)}
COMPLETED = {
    "7.1": ["(full - base_rate)"],
    "7.2": ["weight_decay * length"],
    "7.5": ["job.all_reduce_s[ranks]"],
}
