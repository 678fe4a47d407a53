"""A vector from device to device through the hosts: its model against virtual time; what an emulated device refuses."""

import re

import pytest
import torch

from hpdl_lab import lab
from hpdl_lab.collectives.sweep import WrongAnswer
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.kernels import staging
from hpdl_lab.kernels.staging import StagingCosts, best_block, pipelined_copy, seconds, stages
from tests.wording import raises

N = 2**16  # bytes
COSTS = [
    StagingCosts(2e-6, 8e-11, 2e-6, 8e-11),
    StagingCosts(2e-6, 8e-11, 1e-6, 2e-11),
    StagingCosts(1e-6, 2e-11, 5e-6, 8e-11),
    StagingCosts(5e-6, 2e-11, 1e-6, 8e-11),
]


def moved(comm, costs, block):
    device = staging.device_of(comm, *costs[2:])
    values = torch.arange(N // 4, dtype=torch.float32)
    x = device.put(values * (comm.rank == 0))
    comm.barrier()
    begun = comm.trace.clock()
    pipelined_copy(comm, x, 0, 1, device, block // 4)
    assert torch.equal(device.get(x), values)
    return (comm.trace.clock() - begun) / 1e9


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("block", [N, N // 4, N // 64, 3000])
def test_virtual_time_is_that_of_the_graph_and_near_the_formula(costs, block):
    took = sim.run(2, moved, costs, block, network=Switch(*costs[:2]))[1]
    assert took == pytest.approx(stages(costs, N, block)[2][1][-1], abs=2e-9)  # clocks count whole ns
    assert took == pytest.approx(seconds(costs, N, block), rel=0.03 if N % block else 0, abs=2e-9)


@pytest.mark.parametrize("costs", COSTS)
def test_no_block_is_better_than_the_best(costs):
    best = best_block(costs, N)
    assert seconds(costs, N, best) <= min(seconds(costs, N, b) for b in range(64, N + 1, 64)) * (1 + 1e-9)
    if costs[:2] == costs[2:]:
        assert best == pytest.approx((N * costs.alpha / costs.beta / 2) ** 0.5)


def test_the_verb_finds_in_virtual_time_what_the_model_says():
    network = Switch(alpha=2e-6, beta=8e-11)
    found = lab.staging(nbytes="256KiB", network=network, prediction="64KiB")
    assert found.costs == pytest.approx(COSTS[0], rel=1e-3)
    assert found.best / 2 <= found.modelled <= 2 * found.best
    times = {row["block"]: row["seconds"] for row in found.rows}
    assert times[2**18] == pytest.approx(seconds(COSTS[0], 2**18, 2**18), rel=1e-3)  # blocking
    assert re.search(r"blocking.*pipelined.*without staging", repr(found), re.DOTALL) and found.figure


def test_what_does_not_arrive_is_not_timed():
    with pytest.raises(WrongAnswer, match="rank 1 has not got what rank 0 had"):
        lab.staging(lambda comm, x, src, dst, device, block: None, nbytes="16KiB", network=Switch())


def test_a_device_refuses_what_a_gpu_could_not_do():
    def tried(comm, act):
        device = staging.device_of(comm)
        x, host = device.put(torch.ones(8)), device.pinned(4, torch.float32)
        act(device, x, host)

    for kind, act in (
        (TypeError, lambda device, x, host: x[0]),
        (TypeError, lambda device, x, host: device.copy_out(host, x)),
        (ValueError, lambda device, x, host: device.copy_out(x[:4], torch.ones(4))),
        (ValueError, lambda device, x, host: device.copy_in(host, x)),
    ):
        with raises(kind):
            sim.run(1, tried, act)
