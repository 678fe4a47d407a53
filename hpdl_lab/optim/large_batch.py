"""Large batches: the rate that a batch needs, LARS and LAMB, the noise of a gradient, and the time to a target.

steps    |‾-_                          batches far below the noise scale: twice the batch, half the steps
         |   ‾-_
         |      ‾--____                far above it: twice the batch, the same steps
S_min  --|------------------------
         +------------|-----------> batch
                 noise scale
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ..comm.base import Comm
from ..units import require_int, require_number

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

Rate: TypeAlias = Callable[[int, int, float, int, int], float]  # as learning_rate
Ratio: TypeAlias = Callable[[Tensor, Tensor, float, float], float]  # as trust_ratio
LossT = TypeVar("LossT")


def learning_rate(step: int, batch: int, base_rate: float, base_batch: int, warmup: int) -> float:
    """Compute the learning rate of a step, by linear scaling and warm-up.

        rate       _________  full rate, in proportion to the batch
                 /
               /
             /                base_rate at step 0
           +-------+-------> step
                 warmup

    In the warm-up, the rate grows by the same amount with every step. The gradient
    still changes fast then, so a large step cannot replace k small ones.

    Args:    step: from 0; batch: examples per step, over all ranks.
             base_rate: the rate that suits a batch of base_batch examples.
             warmup: the first step that has the full rate; 0: no warm-up.
    Returns: float.
    Ref: Goyal et al. 2017, arXiv:1706.02677, sections 2.1 and 2.2.
    """
    ### BEGIN SOLUTION
    full = base_rate * batch / base_batch
    if step >= warmup:
        return full
    return base_rate + (full - base_rate) * step / warmup
    ### END SOLUTION


def trust_ratio(w: Tensor, grad: Tensor, trust: float, weight_decay: float) -> float:
    """Compute the trust ratio, by which LARS multiplies the rate of one layer.

        ratio = trust * |w| / (|grad| + weight_decay * |w|)

    |w| is the length of w: its L2 norm. A step of SGD is long if the gradient is long.
    With the ratio, a step (without momentum) is at most rate * trust * |w| long.

    Args:    w: parameters of one layer, any shape; grad: their gradient, of the same
             shape. Do not change w or grad. trust: above 0, chosen by the user, to
             bound the step; weight_decay: at least 0.
    Returns: float; 1 if w or grad is all zeros. With a ratio of 0, weights that start
             at zero would stay there.
    Ref: You, Gitman & Ginsburg 2017, arXiv:1708.03888.
    """
    length, slope = float(w.detach().norm()), float(grad.norm())
    ### BEGIN SOLUTION
    if length == 0 or slope == 0:
        return 1.0
    return trust * length / (slope + weight_decay * length)
    ### END SOLUTION


class LARS(torch.optim.Optimizer):
    """SGD with momentum in which every parameter tensor has a rate of its own, by `trust_ratio`.

        v <- momentum * v + lr * ratio * (grad + weight_decay * w)
        w <- w - v

    Without weight decay a step does not change if the gradient is scaled. Vectors (biases, weights of norms) take plain
    steps of SGD, as usual in implementations, unless `vectors` is True.

    Args:    ratio: f(w, grad, trust, weight_decay) -> float, such as an answer to exercise 7.2.
    Ref: You, Gitman & Ginsburg 2017, arXiv:1708.03888, algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.02,
        vectors: bool = True,
        ratio: Ratio = trust_ratio,
    ) -> None:
        _require_options(lr=lr, momentum=momentum, weight_decay=weight_decay)
        require_number("trust", trust, above=0)
        super().__init__(
            params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust, vectors=vectors)
        )
        self.ratio = ratio

    @torch.no_grad()
    def step(self, closure: Callable[[], LossT] | None = None) -> LossT | None:  # pyrefly: ignore[bad-override]
        loss = _run_closure(closure)
        for group in self.param_groups:
            decay = group["weight_decay"]
            for w in (w for w in group["params"] if w.grad is not None):
                layer = w.ndim > 1 or group["vectors"]
                rate = group["lr"] * (self.ratio(w, w.grad, group["trust"], decay) if layer else 1.0)
                v = self.state[w].setdefault("momentum_buffer", torch.zeros_like(w))
                v.mul_(group["momentum"]).add_(w.grad + decay * w, alpha=rate)
                w.sub_(v)
        return loss


class LAMB(torch.optim.Optimizer):
    """Adam in which every parameter tensor moves by the share `lr` of its own length.

        u = m / (sqrt(v) + eps) + weight_decay * w          m, v: Adam's means, corrected for their start
        w <- w - lr * |w| / |u| * u

    With eps = 0 a step does not change if all gradients are scaled.
    Ref: You et al. 2019, arXiv:1904.00962, algorithm 2, with phi(x) = x.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        _require_options(lr=lr, weight_decay=weight_decay, eps=eps)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r}: two numbers in [0, 1) are needed")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], LossT] | None = None) -> LossT | None:  # pyrefly: ignore[bad-override]
        loss = _run_closure(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for w in (w for w in group["params"] if w.grad is not None):
                state = self.state[w]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(w), exp_avg_sq=torch.zeros_like(w))
                state["step"] += 1
                m = state["exp_avg"].lerp_(w.grad, 1 - first) / (1 - first ** state["step"])
                v = state["exp_avg_sq"].mul_(second).addcmul_(w.grad, w.grad, value=1 - second)
                u = m / ((v / (1 - second ** state["step"])).sqrt() + group["eps"])
                u = torch.nan_to_num(u) if group["eps"] == 0 else u  # 0 / 0 if there has been no gradient
                u += group["weight_decay"] * w
                length, stride = float(w.norm()), float(u.norm())
                w.sub_(u, alpha=group["lr"] * (length / stride if length and stride else 1.0))
        return loss


def _require_options(**options: float) -> None:
    for name, value in options.items():
        require_number(name, value, 0)


def _run_closure(closure: Callable[[], LossT] | None) -> LossT | None:
    """Call `closure`, if there is one: by torch's convention it computes the loss and its gradients again."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def lr_schedule(
    optimizer: torch.optim.Optimizer,
    batch: int,
    base_batch: int,
    warmup: int = 0,
    decay: Callable[[int], float] | None = None,
    rate: Rate = learning_rate,
) -> LambdaLR:
    """Make `learning_rate` a schedule of torch: the optimizer's lr is the base rate; call `.step()` after each step.

    Args:    decay: f(step), a factor for all steps, such as a cosine; rate: an answer to exercise 7.1.
    """
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        require_int(name, value, 1)
    require_int("warmup", warmup, 0)

    def factor(step: int) -> float:
        return rate(step, batch, 1.0, base_batch, warmup) * (decay(step) if decay else 1.0)

    return LambdaLR(optimizer, factor)


# -- what a batch is worth --------------------------------------------------------------------------------------------


class Noise(NamedTuple):
    """square: |G|^2 of the true gradient; variance: the sum of its variances, of one example. Unbiased; may be < 0."""

    square: float
    variance: float

    @property
    def scale(self) -> float:
        """The simple noise scale, in examples: a batch of that size has as much noise as gradient."""
        return self.variance / self.square if self.square > 0 else float("inf")


def gradient_noise_scale(small_square: float, large_square: float, small: int, large: int) -> Noise:
    """Estimate the noise of gradients from two batches' gradients.

        E |g_B|^2 = |G|^2 + variance / B          two batch sizes, two unknowns

    Args:    small_square: the mean of |g|^2 over batches of `small` examples; large_square: over batches of `large`.
    Raises:  ValueError unless small < large.
    Ref: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """
    if not 0 < small < large:
        raise ValueError(f"the noise is measured with two batch sizes, the first one smaller: got {small} and {large}")
    square = (large * large_square - small * small_square) / (large - small)
    return Noise(square, (small_square - large_square) / (1 / small - 1 / large))


def noise_of_ranks(comm: Comm, mine: Tensor, mean: Tensor, batch: int) -> Noise:
    """Estimate `gradient_noise_scale` from two gradients of data parallelism: of this rank, and the mean over ranks.

    Args:    mine: (N,) gradient of this rank's `batch` examples; mean: (N,) its mean over ranks.
    Returns: Noise, the same on every rank; average several steps before you divide.
    Steps: one all_reduce of 8 bytes.
    """
    square = comm.all_reduce(mine.double().square().sum().reshape(1)) / comm.size
    return gradient_noise_scale(float(square), float(mean.double().square().sum()), batch, batch * comm.size)


class TrainingJob(NamedTuple):
    """A training as a model of its time.

    least_steps: S_min, with an infinitely large batch; noise_scale: the batch that needs 2 S_min steps.
    example_s: s of one example on one rank; fixed_s: of a step, however small; all_reduce_s: {ranks: s of one}.
    """

    least_steps: float
    noise_scale: float
    example_s: float
    fixed_s: float
    all_reduce_s: dict[int, float]


def seconds_to_target(batch: int, ranks: int, job: TrainingJob) -> float:
    """Predict how long a training takes: the number of steps times the time of a step.

    An infinitely large batch needs S_min steps, and a batch as large as the noise scale
    needs 2 S_min. Far below the noise scale, half the batch needs twice the steps.
    The time of a step has three parts: the computation on the rank that has the most
    examples, a fixed cost, and one all-reduce.

    Args:    batch: examples per step over all ranks; ranks: how many share the batch.
             job: TrainingJob with least_steps (S_min), noise_scale (examples),
             example_s (s of one example on one rank), fixed_s (s of every step) and
             all_reduce_s (a dict: {ranks: s of one all-reduce}).
    Returns: float, s.
    Ref: McCandlish et al. 2018, arXiv:1812.06162 (steps = S_min (1 + B_noise / B)).
    """
    ### BEGIN SOLUTION
    steps = job.least_steps * (1 + job.noise_scale / batch)
    share = -(-batch // ranks)  # examples of the rank with most
    return steps * (share * job.example_s + job.fixed_s + job.all_reduce_s[ranks])
    ### END SOLUTION
