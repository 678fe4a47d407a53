"""Copies between a GPU and pinned memory: asynchronous, and their Work says when they have ended."""

import torch

from hpdl_lab.kernels.staging import CudaDevice


def test_copies_go_both_ways_and_end(a_gpu):
    device = CudaDevice("cuda:0")
    values = torch.arange(1_000_001, dtype=torch.float32)
    x, y = device.put(values), device.put(torch.zeros_like(values))
    host = device.pinned(len(values), values.dtype)
    device.copy_out(x, host).wait()
    assert host.is_pinned() and torch.equal(host, values)
    device.copy_in(host, y).wait()
    assert torch.equal(device.get(y), values)


def test_a_copy_comes_behind_what_computes_its_vector(a_gpu):
    device = CudaDevice("cuda:0")
    x = torch.zeros(2**24, device="cuda:0")
    for _ in range(50):
        x += 1
    host = device.pinned(len(x), x.dtype)
    device.copy_out(x, host).wait()
    assert bool((host == 50).all())
