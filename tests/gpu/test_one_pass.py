"""The one-pass sum on one GPU, in one process: several tensors stand for those of several ranks."""

import pytest
import torch

from hpdl_lab.comm.base import sum_in_rank_order
from hpdl_lab.comm.buffers import ADDED, DTYPES
from hpdl_lab.comm.device.comm import View, slice_of


def run(cuda, tensors, first, count):
    dtype = DTYPES.index(str(tensors[0].dtype)[6:])
    stream = torch.cuda.current_stream().cuda_stream
    cuda.one_pass([x.data_ptr() for x in tensors], first, count, dtype, stream)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", ADDED)
@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_bitwise_the_sum_in_rank_order(cuda, a_gpu, ranks, dtype):
    for n in (1, 7, 64, 1001, 100_003):
        for offset in (0, 1):
            host = (torch.randn(ranks, n + offset, generator=torch.Generator().manual_seed(n)) * 9).to(
                getattr(torch, dtype)
            )
            tensors = [row.to(a_gpu)[offset:] for row in host]
            for rank in range(ranks):  # every rank its slice
                run(cuda, tensors, *slice_of(n, rank, ranks))
            expected = sum_in_rank_order(host[:, offset:]).to(host.dtype)
            for x in tensors:
                assert torch.equal(x.cpu(), expected), (n, offset)


def test_elements_outside_the_slice_stay(cuda, a_gpu):
    tensors = [torch.full((1000,), float(r + 1), device=a_gpu) for r in range(2)]
    run(cuda, tensors, 64, 128)
    for r, x in enumerate(tensors):
        assert (x[64:192] == 3).all() and (x[:64] == r + 1).all() and (x[192:] == r + 1).all()


def test_memory_of_the_module_is_a_tensor_of_torch(cuda, a_gpu):
    memory = cuda.DeviceMemory(0, 4096)
    x = torch.as_tensor(View(memory), device=a_gpu)
    assert x.shape == (4096,) and x.device.type == "cuda" and not x.any()
    floats = x.view(torch.float32).fill_(1.5)
    del memory, x
    assert floats.sum() == 1024 * 1.5
    assert len(cuda.DeviceMemory(0, 256).handle()) == 64


def test_what_does_not_fit_is_an_error_with_cudas_words(cuda):
    with pytest.raises(RuntimeError, match="cudaMalloc failed: cudaErrorMemoryAllocation: out of memory"):
        cuda.DeviceMemory(0, 1 << 50)
