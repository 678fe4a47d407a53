"""Optimizer states in a file: bits of an optimizer in memory, and nothing left behind."""

import os
import re

import pytest
import torch

from hpdl_lab.comm import sim
from hpdl_lab.models import mlp
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.offload import Bandwidth, Offloaded, measure_bandwidth, measure_steps, seconds_of_step
from hpdl_lab.parallel.training import train_step
from tests.wording import raises

MAKERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}
STATES = {"adamw": 2, "amsgrad": 3, "momentum": 1, "sgd": 0, "rmsprop": 1}


def stepped(make, steps=4, through=None):
    """Parameters after some steps on random gradients, without one for the first parameter in step 1."""
    model = mlp.mlp([30, 50, 10], seed=1)
    optimizer, random = make(model.parameters()), torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.zero_grad()
        for i, p in enumerate(model.parameters()):
            grad = torch.randn(p.shape, generator=random)
            p.grad = None if (step, i) == (1, 0) else grad
        if through and step == steps - 1:
            optimizer = through(model, optimizer)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("block", [1 << 20, 64, 7])
def test_parameters_are_bit_equal(kind, block, tmp_path):
    want, _ = stepped(MAKERS[kind])
    got, optimizer = stepped(lambda params: Offloaded(params, MAKERS[kind], str(tmp_path), block))
    assert torch.equal(want, got)
    assert optimizer.state_nbytes == 4 * STATES[kind] * len(want)
    assert not os.listdir(tmp_path)  # the file has no name: whatever happens, it goes away


def test_states_are_in_the_file_and_not_in_memory(tmp_path):
    _, optimizer = stepped(lambda params: Offloaded(params, MAKERS["adamw"], str(tmp_path), 512))
    begin = torch.frombuffer(optimizer.file.map, dtype=torch.uint8).data_ptr()
    inside = [
        begin <= state.data_ptr() < begin + len(optimizer.file.map)
        for each in optimizer.optimizers
        for name, state in each.state[each.param_groups[0]["params"][0]].items()
        if name != "step"
    ]
    assert inside and all(inside)
    assert os.fstat(optimizer.file.file.fileno()).st_size == len(optimizer.file.map)


def test_memory_holds_the_states_of_about_one_block(tmp_path):
    param, block = torch.nn.Parameter(torch.zeros(1 << 18)), 1 << 15
    optimizer, param.grad = Offloaded([param], MAKERS["adamw"], str(tmp_path), block), torch.ones(1 << 18)
    for _ in range(2):
        optimizer.step()
    assert optimizer.state_nbytes == 8 << 18
    begin = torch.frombuffer(optimizer.file.map, dtype=torch.uint8).data_ptr()
    assert resident(begin) <= 8 * block  # an eighth


def resident(address):
    """Bytes of the mapping at this address that are in memory."""
    found = False
    for line in open("/proc/self/smaps"):
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"nothing is mapped at {address:#x}")


def test_a_run_goes_on_from_its_state_dict(tmp_path):
    def through(model, before):
        after = Offloaded(model.parameters(), MAKERS["adamw"], str(tmp_path), 64)
        after.load_state_dict(before.state_dict())
        return after

    make = lambda params: Offloaded(params, MAKERS["adamw"], str(tmp_path), 64)  # noqa: E731
    assert torch.equal(stepped(MAKERS["adamw"])[0], stepped(make, through=through)[0])


def test_it_is_the_optimizer_of_a_strategy_with_masters():
    def trained(comm, offload):
        model, strategy = mlp.mlp([16, 32, 10], seed=1), DataParallel(precision="bfloat16")
        strategy.start(comm, model)
        make = (lambda params: Offloaded(params, MAKERS["adamw"])) if offload else MAKERS["adamw"]
        optimizer = strategy.optimizer(model, make)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(comm.rank))
        for _ in range(3):
            train_step(comm, model, strategy, optimizer, x, torch.arange(8), 16)
        strategy.stop()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert all(map(torch.equal, sim.run(2, trained, False), sim.run(2, trained, True)))


def test_the_model_of_its_time_and_a_measured_bandwidth(tmp_path):
    assert seconds_of_step(8 * 7_000_000_000, Bandwidth(5e9, 5e9)) == pytest.approx(22.4)
    assert all(0 < speed < 1e13 for speed in measure_bandwidth(str(tmp_path), 1))
    assert all(0 < seconds < 10 for seconds in measure_steps(1000, str(tmp_path)))
    assert not os.listdir(tmp_path)


def test_what_cannot_be_is_said():
    with raises(ValueError, "(3, 2)", "cpu"):
        Offloaded([torch.nn.Parameter(torch.zeros(2, 3).t())])
    with raises(ValueError, "block", "0"):
        Offloaded([torch.nn.Parameter(torch.zeros(2))], block=0)
