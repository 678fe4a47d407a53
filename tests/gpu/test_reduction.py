"""Every rung of the reduction ladder on the GPU, against the CPU."""

import pytest
import torch

from hpdl_lab.kernels import reduction

SIZES = (0, 1, 7, 31, 32, 33, 255, 256, 257, 511, 513, 4095, 65_537, 1_000_003)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def ladder(cuda):
    return reduction.Ladder(cuda=cuda)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rung", range(8))
def test_sums_of_whole_numbers_are_exact(ladder, a_gpu, rung, dtype):
    for n in SIZES:
        for offset in (0, 1, 3):  # off any boundary of 16 bytes
            host = reduction.random_whole_numbers(n + offset, str(dtype)[6:])
            x = host.to(a_gpu)[offset:]
            found, _ = ladder.sum(rung, x)
            assert found == float(host[offset:].double().sum()), (n, offset)


@pytest.mark.parametrize("rung", range(8))
def test_sums_of_real_numbers_are_close_and_the_same_every_time(ladder, a_gpu, rung):
    host = torch.randn(3_000_001, generator=torch.Generator().manual_seed(1))
    x = host.to(a_gpu)
    sums = {ladder.sum(rung, x)[0] for _ in range(5)}
    assert len(sums) == 1
    assert abs(sums.pop() - float(host.double().sum())) <= 1000 * 2**-24 * float(host.abs().double().sum())


def test_the_bandwidth_is_plausible_and_no_kernel_beats_it(ladder):
    assert 50e9 < ladder.bandwidth < 50e12
    rows = [row for row in ladder.rows([512 << 20], ["float32"])]  # beyond every cache
    assert not any(row["wrong"] for row in rows)
    assert all(0 < row["of_bandwidth"] < 1.05 for row in rows)
    assert rows[-1]["time_us"] < rows[0]["time_us"]
