"""ZeRO on real ranks, of mpiexec and of torchrun: the losses and the parameters of one process."""

import copy

import pytest

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
