"""Notebook 14: what a matrix product reaches at best, on processors that the text does not show."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import NamedTuple

from ...performance.bounds import attainable
from ...performance.machines import BYTES, PROCESSORS
from ...units import amount_text
from ..checkers import because, reason
from ..ranks import alone, capital, real
from ..record import Answer, Broken, Exercise, Passed, Reason

SHOWN = "H100 SXM"  # by the text
WIDE = 8192  # rows and columns of the weights in the text
SHAPES = ((3, 4, 5), (24, 4096, 11008), (1, WIDE, WIDE), (4096, 4096, 14336), (8192, 64, 4096), (96, 320, 48))


class _Product(NamedTuple):
    """The arguments of attainable, in its order."""

    m: int
    k: int
    n: int
    bytes_each: int
    peak: float
    bandwidth: float

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    @property
    def parts(self) -> list[int]:
        """Bytes of x, of the weights and of the result."""
        return [self.bytes_each * size for size in (self.m * self.k, self.k * self.n, self.m * self.n)]

    @property
    def times(self) -> tuple[float, float]:
        """Seconds of arithmetic, and of memory."""
        return self.flops / self.peak, sum(self.parts) / self.bandwidth


def _products(names: Iterable[str]) -> Iterator[tuple[str, _Product]]:
    """Yield (where, product) on each processor in each dtype: fixed shapes, both sides of the ridge, a random one."""
    rng = random.Random(14)
    for name in names:
        for dtype, peak in PROCESSORS[name].peak.items():
            given = BYTES[dtype], peak, PROCESSORS[name].bandwidth
            batch = _least_batch(attainable, *given)
            drawn = tuple(2 ** rng.randint(0, 14) + rng.randint(0, 9) for _ in range(3))
            for m, k, n in (*SHAPES, (batch - 1, WIDE, WIDE), (batch, WIDE, WIDE), drawn):
                hardware = f"{name} ({peak:.4g} FLOP/s, {PROCESSORS[name].bandwidth:.4g} bytes/s)"
                yield f"with ({m}, {k}) @ ({k}, {n}) in {dtype} on {hardware}", _Product(m, k, n, *given)


def _least_batch(fn: Answer, bytes_each: int, peak: float, bandwidth: float) -> int:
    """Return the least m for which fn says that arithmetic bounds (m, WIDE) @ (WIDE, WIDE)."""
    return next(m for m in count(1) if fn(m, WIDE, WIDE, bytes_each, peak, bandwidth)[1] == "compute")


def _check_attainable(fn: Answer) -> Passed:
    others = {name: processor for name, processor in PROCESSORS.items() if name != SHOWN}
    cases = [*_products(others)]
    for where, product in cases:
        _check_product(fn, product, where)
    least = {
        name: _least_batch(fn, BYTES["bfloat16"], p.peak["bfloat16"], p.bandwidth)
        for name, p in others.items()
        if "bfloat16" in p.peak
    }
    return Passed(
        f"right for {len(cases)} products on {len(others)} processors, on both sides of each ridge",
        f"""the least batch at which decoding leaves the memory roof, with {WIDE:,} x {WIDE:,} weights in bfloat16:
        {", ".join(f"{name} {batch}" for name, batch in least.items())}""",
    )


def _check_product(fn: Answer, product: _Product, where: str) -> None:
    """Raise Broken unless fn says what a product reaches, and which roof bounds it."""
    got = alone(fn, *product, where=where)
    try:
        speed, bound = got
        speed = real(speed)
    except (TypeError, ValueError):
        text = f"returns: {capital(where)}, your function returned {got!r}: return (FLOP/s, bound)."
        raise Broken(text) from None
    right, name = attainable(*product)
    if not _same(speed, right):
        text = f"{capital(where)}, at most {right:.4g} FLOP/s can be reached, and you say {speed:.4g}."
        raise because(reason(speed, _speeds(product, right), _same) or "speed: ", text)
    compute, memory = (amount_text(seconds, "s") for seconds in product.times)
    text = f"bound: {capital(where)}, your FLOP/s are right, and your bound is {bound!r}"
    if bound not in ("compute", "memory"):
        raise Broken(f'{text}: return "compute" or "memory".')
    if bound != name and not _same(*product.times):
        raise Broken(f"{text}. Arithmetic takes {compute}, moving bytes takes {memory}.")


_same = partial(math.isclose, rel_tol=1e-9)


def _speeds(p: _Product, right: float) -> list[tuple[float, Reason]]:
    """Return (FLOP/s that may be said, why they are wrong) for each mistake."""
    (x, weights, result), (compute, memory), nbytes = p.parts, p.times, sum(p.parts)

    def moving(wrong: float) -> float:
        return p.flops / max(compute, wrong / p.bandwidth)

    once = "reuse: A number comes from memory once, and then stays on the chip. How large are the three matrices?"
    bits = "units: bytes_each and the bandwidth both count bytes: there are no bits."
    return [
        (p.flops / (compute + memory), "roofs: You add the two times, but bytes move while the processor computes."),
        (p.peak, "roofs: That is the peak. How long do the bytes take?"),
        (moving(x + weights), "traffic: The operands are read. What happens to the result?"),
        (moving(nbytes + result), "traffic: The result is written once; it is not read before."),
        (moving(weights), "traffic: Those are the bytes of the weights only, but there are three matrices."),
        (moving(x + weights * p.m + result), once),
        (moving(p.flops * p.bytes_each), once),
        (p.flops / 2 / max(compute / 2, memory), "flops: A multiplication and the addition after it are two FLOPs."),
        (moving(8 * nbytes), bits),
        (moving(nbytes / 8), bits),
        (moving(nbytes / p.bytes_each), "units: You count numbers, but the bandwidth counts bytes."),
        (min(p.peak, p.bandwidth * nbytes / p.flops), "ridge: Bytes per FLOP times bytes/s are not FLOP/s."),
        (max(compute, memory), "units: Those are seconds. How many FLOPs are done in them?"),
        (p.flops / nbytes, "units: Those are FLOPs per byte."),
        (right / 1e12, "units: That is right in teraFLOP/s: return FLOP/s."),
        (right / p.peak, "units: That is a share of the peak: return FLOP/s."),
        (p.flops, "units: Those are FLOPs: return FLOP/s."),
    ]


EXERCISES = (Exercise("14.2", "which roof bounds a product", attainable, 2, _check_attainable),)
