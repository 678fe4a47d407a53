"""ZeRO on real ranks, of mpiexec and of torchrun: the losses and the parameters of one process."""

import copy

import pytest
import torch

from hpdl_lab.bench import fsdp
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.zero import ZeRO1, ZeRO2, ZeRO3
from tests.test_zero import adamw, examples, train


@pytest.mark.parametrize("strategy", [ZeRO1(), ZeRO2(), ZeRO3(), ZeRO3(reshard_after_forward=True)], ids=repr)
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_losses_and_parameters_are_those_of_one_rank(comm, name, strategy):
    model, x, y = examples(name)
    x = x.double() if x.is_floating_point() else x
    losses, parameters = train(None, copy.deepcopy(model), None, adamw, x, y)
    found, its_parameters = train(comm, model, strategy, adamw, x, y, 2)
    assert found == pytest.approx(losses, abs=1e-10)
    assert (its_parameters - parameters).abs().max() < 1e-10


def test_the_same_bits_as_data_parallelism(comm):
    """In float32: reduce-scatter adds in the order in which all-reduce adds, also in memory that the ranks share."""
    model, x, y = examples("gpt", "float32")
    _, want = train(comm, copy.deepcopy(model), DataParallel(), adamw, x, y)
    for strategy in (ZeRO1(), ZeRO2(), ZeRO3()):
        assert torch.equal(train(comm, copy.deepcopy(model), strategy, adamw, x, y)[1], want)


def test_fsdp2_comes_to_the_same_on_both_back_ends(comm, ranks):
    """What `hpdl bench memory` compares, before it takes the time."""
    with fsdp.groups(comm) as made:
        steps = {name: fsdp.Step(comm, name, "tiny", 8, made) for name in fsdp.NAMES}
        assert fsdp.check(comm, steps) == dict.fromkeys(fsdp.NAMES, 0)
        assert len({round(comm.all_reduce(torch.tensor([s.first])).item(), 4) for s in steps.values()}) == 1
        for step in steps.values():
            step.stop()
