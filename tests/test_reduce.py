"""The compiled sums: right, and the same bits with every set of instructions that this processor has."""

import numpy as np
import pytest
import torch

from hpdl_lab import features
from hpdl_lab.comm.buffers import ADDED, TABLE
from tests.wording import raises

core = features.compiled_module()
COUNTS = (0, 1, 7, 15, 16, 17, 511, 512, 513, 5000)


def add(instructions, sources, destinations):
    """The sum of all sources, stored to all destinations."""
    core.Sum(instructions, sources, destinations)()


def tensors(number, count, dtype, seed=0):
    """`number` tensors of (count,) random values of every magnitude, which overflow now and then."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        parts = tensors(number, 2 * count, torch.float32 if dtype == torch.complex64 else torch.float64, seed)
        return [torch.view_as_complex(x.view(count, 2).clone()) for x in parts]
    if dtype.is_floating_point:
        exponents = torch.randint(-30, 17, (number, count), generator=generator)
        return list((torch.randn(number, count, generator=generator) * 2.0**exponents).to(dtype))
    low = 0 if dtype == torch.uint8 else torch.iinfo(dtype).min
    return list(torch.randint(low, torch.iinfo(dtype).max, (number, count), generator=generator, dtype=dtype))


def in_order(sources):
    """The sum as torch takes it, one after the other; 16-bit floats in float32, rounded once."""
    wide = [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in sources]
    total = wide[0].clone()
    for x in wide[1:]:
        total += x
    return total.to(sources[0].dtype)


def test_the_table_of_dtypes_is_one():
    assert core.dtypes() == [(name, *row) for name, row in TABLE.items()]
    assert all(getattr(torch, name).itemsize == nbytes for name, (nbytes, _) in TABLE.items())


@pytest.mark.parametrize("instructions", core.instructions())
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in ADDED], ids=ADDED)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 9])
def test_every_loop(instructions, dtype, ranks):
    for count in COUNTS:
        sources = tensors(ranks, count, dtype)
        expected = in_order(sources)
        apart = [torch.zeros(count + 1, dtype=dtype) for _ in range(2)]
        add(instructions, sources, [x[:count] for x in apart])
        add(instructions, sources, sources)  # in place
        for got in [*(x[:count] for x in apart), *sources]:
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)) or same(got, expected)
        assert all(x[count] == 0 for x in apart)


def same(got, expected):
    """Equal but for the bits of a NaN, of which there are many."""
    if got.is_complex():
        got, expected = torch.view_as_real(got), torch.view_as_real(expected)
    return torch.equal(got.nan_to_num(nan=0.125), expected.nan_to_num(nan=0.125))


@pytest.mark.parametrize("instructions", core.instructions())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_65536_values_of_16_bits(instructions, dtype):
    """x + 0 is x, for every x: subnormal numbers, both zeros, infinities; and NaN is NaN."""
    values = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16)).view(dtype)
    zero, got = torch.full_like(values, -0.0), torch.zeros_like(values)
    add(instructions, [values, zero], [got])
    assert torch.equal(got.isnan(), values.isnan())
    numbers = ~values.isnan()
    assert torch.equal(got[numbers].view(torch.int16), values[numbers].view(torch.int16))


@pytest.mark.parametrize("instructions", core.instructions())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits(instructions, dtype):
    """Sums that lie anywhere between two 16-bit numbers round as torch rounds."""
    x, y = tensors(2, 20_000, dtype, seed=1)
    got = torch.zeros_like(x)
    add(instructions, [x, y], [got])
    assert same(got, (x.float() + y.float()).to(dtype))


def test_unknown_instructions():
    with raises(ValueError, "AVX-1024"):
        core.Sum("AVX-1024", [], [])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda x: ([], [x]), "needs a source and a destination"),
        (lambda x: ([x], []), "needs a source and a destination"),
        (lambda x: ([x, x[1:]], [x]), "cannot add 8 float32 and 7 float32"),
        (lambda x: ([x, x.double()], [x]), "cannot add 8 float32 and 8 float64"),
        (lambda x: ([x[:7]], [x[1:]]), "memory that overlaps: 7 float32 and 7 float32 begin 4 bytes apart"),
        (lambda x: ([x.clone()], [x, x[:8].view(8)[:8]]), None),
        (lambda x: ([x[::2]], [x[::2]]), "cannot add a non-contiguous tensor"),
        (lambda x: ([x.view(torch.uint8)[1:29].numpy().view(np.float32)], [x]), "1 bytes beyond a multiple of 4"),
    ],
)
def test_what_cannot_be_added(make, why):
    """Refused before a loop could read or write what it must not."""
    arguments = make(torch.arange(8, dtype=torch.float32))
    if why is None:
        core.Sum(core.instructions()[0], *arguments)()
        return
    with pytest.raises(ValueError, match=why):
        core.Sum(core.instructions()[0], *arguments)
