"""Ranks whose tensors are on a device (DeviceComm), under torchrun and MPI, with a stand-in for NCCL.

The tensors of the CPU play those of the GPU; NumPy's arrays are the host's.
"""

import importlib.util
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpdl_lab.collectives import ring
from hpdl_lab.comm.device.comm import DeviceComm
from hpdl_lab.comm.device.groups import MpiGroups
from hpdl_lab.comm.errors import CommError, CommTimeout, Mismatch
from hpdl_lab.comm.torch.group import process_group
from hpdl_lab.comm.torch.transport import from_process_group

SPEC = importlib.util.spec_from_file_location("nccl_group", Path(__file__).parent.parent / "fakes" / "nccl_group.py")
nccl_group = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(nccl_group)


def stand_in(store, rank, size, device, sharing):
    return nccl_group.FakeNccl(store, rank, size, timedelta(seconds=60))


@pytest.fixture(params=["torchrun", "mpi", "host"])
def device(run, ranks, request):
    """A DeviceComm over the stand-in, or through the host, as for ranks that share a GPU."""
    if request.param == "host":
        comm = run(make=MpiGroups(ranks, "cpu", cuda=False, through_host=lambda sharing: True).comm)
        yield comm
        comm.close()
        return
    nccl_group.register()
    if request.param == "mpi":
        comm = run(make=MpiGroups(ranks, "cpu", stand_in, cuda=False).comm)
        yield comm
        comm.close()
        return
    with process_group(run(), nccl_group.NAME) as group:
        comm = from_process_group(group, deadline=10.0, device="cpu")
        yield comm
        comm.close()


class AnyOrder(list):
    """What the host has carried, which nobody counts."""

    def __eq__(self, other):
        return True


def carried(comm):
    """What the group has carried since the last look."""
    if comm.goes_through_host:
        return AnyOrder()
    seen, comm.device_group.carried = comm.device_group.carried, []
    return seen


def test_it_is_refused_where_it_moves_nothing_that_is_known(run):
    nccl_group.register()
    with (
        process_group(run(), nccl_group.NAME),
        pytest.raises(ValueError, match="neither tensors of the CPU nor of GPUs"),
    ):
        from_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int16, torch.complex64])
def test_collectives_go_through_the_group_and_the_host_agrees_elsewhere(device, dtype):
    assert isinstance(device, DeviceComm) and carried(device) == []
    r, p = device.rank, device.size
    x = torch.full((5,), r + 1, dtype=dtype)
    assert (device.all_reduce(x) == p * (p + 1) // 2).all() and carried(device) == ["allreduce"]
    assert (device.broadcast(torch.full((3,), r, dtype=dtype), p - 1) == p - 1).all()
    out = device.reduce(torch.full((3,), r, dtype=dtype), p - 1)
    assert out is None if r != p - 1 else (out == p * (p - 1) // 2).all()
    assert torch.equal(device.all_gather(torch.full((2,), r, dtype=dtype))[:, 1], torch.arange(p).to(dtype))
    rows = torch.arange(3 * p).to(dtype).view(p, 3)
    assert torch.equal(device.reduce_scatter(rows.clone()), p * rows[r])
    assert torch.equal(device.all_to_all(rows * (r + 1)), torch.stack([rows[r] * (s + 1) for s in range(p)]))
    told = ["broadcast", "reduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base"]
    assert carried(device) == told
    got = device.gather(torch.full((2,), r, dtype=dtype), 0)
    assert got is None if r else torch.equal(got[:, 0], torch.arange(p).to(dtype))
    assert torch.equal(device.scatter(rows if r == 0 else None, torch.zeros(3, dtype=dtype)), rows[r])
    assert carried(device) == ["gather", "scatter"]
    x = torch.tensor([True, r == 0])
    assert device.all_gather(x)[:, 1].tolist() == [True] + [False] * (p - 1)
    with pytest.raises(ValueError, match="cannot all_reduce bool, which has no sum: gather it as uint8"):
        device.all_reduce(x)
    x = torch.full((3,), float(r)).to(torch.float8_e4m3fn)
    assert (device.broadcast(x, p - 1).float() == p - 1).all()
    if p > 1:
        got = device.sendrecv(torch.full((2,), r, dtype=dtype), (r + 1) % p, torch.zeros(2, dtype=dtype), (r - 1) % p)
        assert (got == (r - 1) % p).all()
    carried(device)
    device.barrier()
    assert device.all_reduce(np.ones(3))[0] == p and device.all_gather(np.ones(2)).shape == (p, 2)
    assert device.all_reduce(torch.zeros(0)).numel() == 0 and carried(device) == [], "the host's own, and nothing"
    assert device.allocate((2, 3)).shape == (2, 3) and str(device.allocate(4).device) == device.device


def test_messages_go_through_the_group_in_batches_and_a_ring_stands_on_them(device):
    r, p = device.rank, device.size
    x = torch.arange(1001.0) * (r + 1)
    ring.all_reduce(device, x)
    assert torch.equal(x, torch.arange(1001.0) * (p * (p + 1) // 2))
    assert device.goes_through_host or sorted(carried(device)) == sorted(["send", "recv"] * 2 * (p - 1))
    y = np.zeros(3)
    if p > 1:
        device.sendrecv(np.full(3, r), (r + 1) % p, y.astype(np.int64), (r - 1) % p)
        empty = device.sendrecv(torch.zeros(0), (r + 1) % p, torch.zeros(0), (r - 1) % p)
        assert empty.numel() == 0 and carried(device) == [], "arrays, and messages without elements, need no GPU"
        before = device.isend(torch.full((2,), float(r)), (r + 1) % p)
        device.all_reduce(torch.ones(1))  # what was posted before it has started, and holds nobody up
        assert (device.recv(torch.zeros(2), (r - 1) % p) == (r - 1) % p).all()
        before.wait()
        late = device.irecv(torch.zeros(2), (r - 1) % p)
        assert not late.test()
        device.barrier()  # all have looked, before anybody sends
        device.send(torch.full((2,), float(r)), (r + 1) % p)
        late.wait()


def test_parts_have_groups_of_their_own(device):
    part = device.split(device.rank % 2, key=-device.rank)
    whole = [s for s in range(device.size) if s % 2 == device.rank % 2]
    assert part.size == len(whole) and (part.rank == 0) == (device.rank == max(whole))
    x = torch.full((3,), float(device.rank))
    part.all_reduce(x)
    assert (x == sum(whole)).all() and carried(device) == [] and carried(part) == ["allreduce"]
    y = part.broadcast(torch.full((1,), float(device.rank)), 0)
    assert y.item() == max(whole)


def test_ranks_that_disagree_are_told_before_anything_hangs(device):
    if device.size == 1:
        return
    with pytest.raises(Mismatch, match="counts differ"):
        device.all_reduce(torch.ones(3 + (device.rank == 0)))
    assert carried(device) == [] and (device.goes_through_host or not device.device_group.aborted)
    if device.rank == 0:
        device.send(np.zeros(3), 1)
    elif device.rank == 1:
        with pytest.raises(Mismatch, match="of the CPU|float64|uint8"):
            device.recv(torch.zeros(3), 0)


def test_what_does_not_come_ends_at_the_deadline_with_who_waits_for_whom(device, meet):
    if device.size == 1:
        return
    device.waiting.deadline = 0.6
    begin = time.monotonic()
    if device.rank == 0:
        with pytest.raises(CommTimeout, match="rank 1"):
            device.recv(torch.zeros(3), 1)
        assert device.goes_through_host or device.device_group.aborted
        with pytest.raises((CommError, RuntimeError)):
            device.all_reduce(torch.ones(1))
    meet()
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("device", ["host"], indirect=True)
def test_what_is_under_way_through_the_host_is_kept_until_mpi_has_done_with_it(device, ranks, meet):
    if device.size == 1:
        return
    group, x = device.device_group, torch.ones(1 << 20)
    if device.rank == 0:  # nobody receives the one, nobody sends the other
        group.send([x], 1, 0)
        group.recv([torch.zeros(1)], 1, 0)
        sends = [message for message in group._messages if message.sends]
        group.abort()
        assert sends and all(message in ranks.pending_sends for message in sends) and not group._messages
    meet()
    if device.rank == 1:
        group.recv([x], 0, 0).wait()


def test_nothing_of_it_is_left(run):
    nccl_group.register()
    with process_group(run(), nccl_group.NAME) as group:
        known = len(dist.distributed_c10d._world.pg_map)
        with from_process_group(group, device="cpu") as comm:
            comm.barrier()
            assert len(dist.distributed_c10d._world.pg_map) == known + 1
        assert len(dist.distributed_c10d._world.pg_map) == known


def test_a_step_as_it_is_recorded_on_gpus(run, ranks, monkeypatch):
    """`hpdl bench ddp --device cuda`: the strategies go through the stand-in; in DDP gloo plays nccl."""
    from hpdl_lab.bench import ddp

    monkeypatch.setattr(ddp, "nccl_group", lambda comm: dist.new_group(backend="gloo"))
    monkeypatch.setattr(ddp, "puller", lambda comm: None)  # as on GPUs
    rows = []
    comm = run(deadline=30.0, make=MpiGroups(ranks, "cpu", stand_in, cuda=False).comm, on_row=rows.append)
    ddp.on_ranks(comm, "tiny", 6, 2)
    assert "allreduce" in carried(comm)
    if comm.rank == 0:
        found = {row["name"]: row["wrong"] for row in rows}
        assert {ddp.BASELINE: 0, ddp.ON_NCCL: 0, "bucketed": 0, "overlapped": 0}.items() <= found.items()
        assert ddp.ON_HPDL not in found
