"""The kernels of notebook 05, compiled by numba for this GPU."""

import pytest
import torch

from hpdl_lab.checks.exercises import check, find
from hpdl_lab.kernels import ladder, on_gpu


@pytest.fixture(scope="module", autouse=True)
def cuda(a_gpu):
    pytest.importorskip("numba")
    if reason := on_gpu.why_not():
        pytest.skip(reason)
    from numba import cuda

    return cuda


@pytest.mark.parametrize("kernel", ladder.RUNGS, ids=lambda kernel: kernel.__name__)
def test_every_rung_adds_any_number_of_elements(cuda, a_gpu, kernel):
    run = on_gpu.compiled(kernel)
    for blocks, n in ((1, 1), (2, 100), (7, 1001), (300, 1_000_003)):
        x, out = torch.ones(n, device=a_gpu), torch.zeros(1, device=a_gpu)
        run[blocks, ladder.THREADS](cuda.as_cuda_array(x), cuda.as_cuda_array(out))
        torch.cuda.synchronize()
        assert float(out) == n, blocks


def test_one_pass(cuda, a_gpu):
    tensors = [torch.full((1000,), rank + 1.0, device=a_gpu) for rank in range(3)]
    on_gpu.compiled(ladder.add_slices)[4, ladder.THREADS](tuple(map(cuda.as_cuda_array, tensors)), 100, 500)
    torch.cuda.synchronize()
    for rank, x in enumerate(tensors):
        assert (x[100:600] == 6).all() and (x[:100] == rank + 1).all() and (x[600:] == rank + 1).all()


def test_rows_are_right_and_the_last_rung_is_faster_than_the_first():
    rows = list(on_gpu.rows(bandwidth=1.0))
    assert [row["wrong"] for row in rows] == [0] * len(ladder.RUNGS)
    assert rows[-1]["time_us"] < rows[0]["time_us"]


def test_the_check_times_a_kernel():
    assert "on this GPU: 256 MiB in" in str(check(find("5.3"), ladder.gpu_sum))
