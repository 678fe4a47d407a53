"""Fewer bytes per step: gradients are rounded, thinned out or factored before they travel, the rest comes later.

    step t    g + e  --compress-->  sent  --over all ranks-->  update
              ^   e <-- g + e - sent                                       error feedback: what was held back
    step t+1  g + e  --compress-->  sent  ...                              travels with a later gradient

A compressor adds one bucket over ranks and remembers what it has held back. So each bucket has one of its own, and at
every step, over all ranks, what was sent and what is held back add up to all gradients so far.

              of n numbers a rank sends                 error feedback
    Cast      n numbers of 16 bits                      none
    TopK      k values and k places, to all others      yes
    PowerSGD  r(rows + columns) for each matrix         yes
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ..comm.base import Comm
from ..comm.buffers import dtype_name
from ..units import MIB, require_int, require_number
from .data_parallel import DataParallelBucketed
from .precision import SIXTEEN_BITS, dtype_called
from .reducer import AllReduce, Bucket, name_of, require_function, result_of

Shapes = Sequence[torch.Size]


def top_k_all_reduce(comm: Comm, grad: Tensor, error: Tensor, k: int) -> Tensor:
    """Add up the k largest numbers of each rank's `grad + error`; keep the others.

        grad + error     0.1  -2.0   0.3   1.0     k = 2
        sent                  -2.0         1.0     two values and their two places
        error            0.1    0    0.3    0      held back for the next step

    "Largest" is by magnitude. Every rank receives the values and places of all ranks.
    If two ranks have sent the same place, it adds both values.

    Args:    grad: (N,) float tensor, different per rank; overwritten by the sum over
             ranks of the numbers sent.
             error: (N,) float tensor, what this rank has held back so far, zeros at
             first; overwritten by what it holds back now.
             k: int, 1 to N, the same on every rank.
    Returns: grad, bitwise the same on every rank.
    Steps: two all_gathers.
    Bytes per rank: as in all_gathers of k values, and of k places of 4 bytes.
    Ref: Stich et al. 2018 (sparsified SGD with memory); Lin et al. 2018 (deep gradient
    compression).
    """
    ### BEGIN SOLUTION
    error += grad
    places = error.abs().topk(k).indices  # (k,)
    values = error[places]
    error[places] = 0
    all_values, all_places = comm.all_gather(values), comm.all_gather(places.int())  # (p, k) each
    grad.zero_()
    return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    ### END SOLUTION


def low_rank_sum(
    comm: Comm, matrices: Sequence[Tensor], qs: Sequence[Tensor], all_reduce: AllReduce
) -> list[tuple[Tensor, Tensor]]:
    """Add matrices over ranks, approximately, each as a product of two thin ones: one step of power iteration.

        M (n, m) of each rank, Q (m, r) the same on every rank
        P = orthonormal(sum over ranks of M Q)   (n, r)
        Q = sum over ranks of M^T P              (m, r)          sum over ranks of M  ~  P Q^T

    Exact if r is the number of rows or of columns; else the better, the fewer large singular values the sum has.

    Args:    matrices: [(n, m)] different per rank; qs: [(m, r)], r at most min(n, m).
    Returns: [(P, Q)], the same on every rank; Q is what the next step may start from.
    Steps: two all_reduces.   Bytes per rank: as in all_reduces of the r n, and of the r m, numbers of all matrices.
    Ref: Vogels, Karimireddy & Jaggi 2019 (PowerSGD).
    """
    ps = _added(comm, [m @ _orthonormal(q) for m, q in zip(matrices, qs, strict=True)], all_reduce)
    ps = [_orthonormal(p) for p in ps]
    sums = _added(comm, [m.T @ p for m, p in zip(matrices, ps, strict=True)], all_reduce)
    return list(zip(ps, sums, strict=True))


def _orthonormal(columns: Tensor) -> Tensor:
    """Return (n, r) orthonormal columns with the span of `columns` (n, r), r at most n; also if some of these are 0."""
    wide = torch.promote_types(columns.dtype, torch.float32)  # there is no QR in 16 bits
    return torch.linalg.qr(columns.to(wide))[0].to(columns.dtype)


def _added(comm: Comm, tensors: Sequence[Tensor], all_reduce: AllReduce) -> list[Tensor]:
    """Return the sums over ranks of tensors of one dtype, which travel in one message."""
    if not tensors:
        return []
    flat = result_of(all_reduce, comm, torch.cat([t.reshape(-1) for t in tensors]))
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


class Compressor(ABC):
    """The sum of one bucket of gradients over ranks in fewer bytes, with a memory of what is held back."""

    @abstractmethod
    def add(self, comm: Comm, flat: Tensor, shapes: Shapes, all_reduce: AllReduce) -> Tensor:
        """Return (N,), about the sum over ranks of `flat`, the same on every rank.

        Args:    flat: (N,) finite gradients of the tensors of these shapes, one after the other; may be overwritten.
                 all_reduce: f(comm, x), for the parts that can be added up as they are.
        """


@dataclass
class Cast(Compressor):
    """16 bits on the wire: float16 has 11 binary digits and ends at 65504, bfloat16 has 8 and the range of float32.

    Gradients are divided by the number of ranks first, so that a float16 sum does not overflow when the mean does not.
    A ring of this package sends partial sums in 32 bits, whatever it is given; the communicator's own all-reduce does
    not.
    Ref: torch's fp16_compress_hook and bf16_compress_hook.
    """

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self.dtype = dtype_name(dtype_called(self.dtype, "dtype", SIXTEEN_BITS))

    def add(self, comm: Comm, flat: Tensor, shapes: Shapes, all_reduce: AllReduce) -> Tensor:
        wire = (flat / comm.size).to(SIXTEEN_BITS[self.dtype])
        return result_of(all_reduce, comm, wire).to(flat.dtype) * comm.size


@dataclass(repr=False)
class TopK(Compressor):
    """The largest `share` of a bucket, with error feedback.

    add_up: f(comm, grad, error, k), as `top_k_all_reduce` does it.
    """

    share: float = 0.01
    add_up: Callable[[Comm, Tensor, Tensor, int], Tensor] = top_k_all_reduce
    error: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        require_number("share", self.share, above=0)
        if self.share > 1:
            raise ValueError(f"share={self.share:g}: it must be at most 1, which sends everything")
        require_function("add_up(comm, grad, error, k)", self.add_up)

    def __repr__(self) -> str:  # the same on every rank, as a function's own would be its address in memory
        mine = "" if self.add_up is top_k_all_reduce else f", add_up={name_of(self.add_up)}"
        return f"TopK(share={self.share:g}{mine})"

    def add(self, comm: Comm, flat: Tensor, shapes: Shapes, all_reduce: AllReduce) -> Tensor:
        if self.error is None:
            self.error = torch.zeros_like(flat)
        return self.add_up(comm, flat, self.error, max(1, round(self.share * len(flat))))


@dataclass
class PowerSGD(Compressor):
    """Every matrix as two thin ones of rank `rank`, with error feedback; what that does not save travels as it is.

    A tensor (n, ...) is a matrix of n rows. It is factored if its bytes shrink by more than `least`: r(n + m) least <
    nm. Q goes on from the Q of the step before; the first is random, the same on every rank by `seed`.
    The random numbers and `least` are as in torch's powerSGD_hook, which has the same losses.
    """

    rank: int = 1
    seed: int = 0
    least: float = 2
    qs: list[Tensor] = field(default_factory=list, init=False, repr=False)
    errors: list[Tensor] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        require_int("rank", self.rank, 1)

    def factored(self, shape: torch.Size) -> int:
        """Return the rank at which a tensor of this shape travels; 0 if it travels as it is."""
        rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
        r = min(self.rank, rows, columns)
        return r if r * (rows + columns) * self.least < rows * columns else 0

    def add(self, comm: Comm, flat: Tensor, shapes: Shapes, all_reduce: AllReduce) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        ranks = [self.factored(shape) for shape in shapes]
        matrices = [part.view(shape[0], -1) for part, shape, r in zip(parts, shapes, ranks, strict=True) if r]
        if not self.qs:
            seed = int(np.random.RandomState(self.seed).randint(1_000_000_000))
            generator = torch.Generator().manual_seed(seed)
            sizes = zip(matrices, filter(None, ranks), strict=True)
            self.qs = [torch.randn(m.shape[1], r, generator=generator, dtype=m.dtype).to(m.device) for m, r in sizes]
            self.errors = [torch.zeros_like(m) for m in matrices]
        for m, error in zip(matrices, self.errors, strict=True):
            m += error
        whole = [part for part, r in zip(parts, ranks, strict=True) if not r]
        for part, total in zip(whole, _added(comm, whole, all_reduce), strict=True):
            part.copy_(total)
        factors = low_rank_sum(comm, matrices, self.qs, all_reduce)
        self.qs = [q for _, q in factors]
        for m, error, (p, q) in zip(matrices, self.errors, factors, strict=True):
            total = p @ q.T
            error.copy_(m - total / comm.size)  # every rank takes an equal part of what was sent
            m.copy_(total)
        return flat


class DataParallelCompressed(DataParallelBucketed):
    """Buckets that travel in fewer bytes, each by a copy of `compressor`: Cast, TopK or PowerSGD.

        DataParallelCompressed(PowerSGD(rank=2))

    dense_steps: how many steps travel uncompressed first, while gradients still change fast.
    A flag of one number travels first: if a rank has NaN or infinity, no rank takes the step, and what is held back
    stays as it was.
    Steps: an all_reduce of the flag, and the steps of the compressor, per bucket.
    """

    def __init__(
        self,
        compressor: Compressor,
        all_reduce: AllReduce | None = None,
        dense_steps: int = 0,
        bucket_nbytes: float = 25 * MIB,
        first_nbytes: float = 1 * MIB,
    ) -> None:
        super().__init__(all_reduce, bucket_nbytes, first_nbytes)
        self.compressor, self.dense_steps = _require_compressor(compressor), require_int("dense_steps", dense_steps, 0)

    def start(self, comm: Comm, model: nn.Module) -> None:
        super().start(comm, model)
        self.compressors = {id(bucket): copy.deepcopy(self.compressor) for bucket in self.require_begun().buckets}
        self.taken = 0

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        super().add_gradients(comm, model)
        self.taken += 1

    def reduce_bucket(self, comm: Comm, bucket: Bucket) -> Tensor:
        if self.taken < self.dense_steps:
            return super().reduce_bucket(comm, bucket)
        flat = bucket.packed()
        flag = result_of(self.all_reduce, comm, flat[-1:].clone())
        if torch.isnan(flag):
            return torch.full_like(flat, torch.nan)
        shapes = [param.shape for param in bucket.params]
        return torch.cat([self.compressors[id(bucket)].add(comm, flat[:-1], shapes, self.all_reduce), flag])


def _require_compressor(value: Compressor) -> Compressor:
    """Return `value`. Raises TypeError unless it is a Compressor."""
    if not isinstance(value, Compressor):
        raise TypeError(f"compressor={value!r}: one of Cast(), TopK() and PowerSGD() is needed")
    return value
