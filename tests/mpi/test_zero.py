"""ZeRO on real ranks, of mpiexec and of torchrun: the losses and the parameters of one process."""

import copy

import pytest
import torch

from hpdl_lab.bench import fsdp
from hpdl_lab.data.loading import shard_indices
from hpdl_lab.parallel.data_parallel import DataParallel, DataParallelOverlapped
from hpdl_lab.parallel.training import train_step
from hpdl_lab.parallel.zero import ZeRO1, ZeRO2, ZeRO3
from tests.test_zero import BATCH, adamw, assert_same, examples, train


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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [DataParallel, DataParallelOverlapped, ZeRO1, ZeRO2, ZeRO3])
def test_a_state_dict_holds_float32_masters_that_a_fresh_strategy_goes_on_from(comm, kind, precision):
    model, x, y = examples("gpt", "float32")
    mine = shard_indices(torch.arange(BATCH), comm.rank, comm.size)

    def begun(model):
        strategy = kind(precision=precision)
        strategy.start(comm, model)
        return strategy, strategy.optimizer(model, adamw)

    def stepped(model, strategy, optimizer):
        for _ in range(2):
            train_step(comm, model, strategy, optimizer, x[mine], y[mine], BATCH)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    first = copy.deepcopy(model)
    strategy, optimizer = begun(first)
    assert_same(dict(first.state_dict()), dict(model.state_dict()))
    state, its_optimizer = stepped(first, strategy, optimizer), copy.deepcopy(optimizer.state_dict())
    wanted = stepped(first, strategy, optimizer)
    strategy.finish(comm, first)
    strategy.stop()
    assert_same(dict(first.state_dict()), wanted)
    second = copy.deepcopy(model)
    strategy, optimizer = begun(second)
    second.load_state_dict(state)
    optimizer.load_state_dict(its_optimizer)
    assert_same(dict(second.state_dict()), state)
    assert_same(stepped(second, strategy, optimizer), wanted)
    strategy.stop()


def test_fsdp2_comes_to_the_same_on_both_back_ends(comm, ranks):
    """What `hpdl bench memory` compares, before it takes the time."""
    with fsdp.process_groups(comm) as made:
        steps = {name: fsdp.FsdpStep(comm, name, "tiny", 8, made) for name in fsdp.NAMES}
        assert fsdp.count_differing(comm, steps) == dict.fromkeys(fsdp.NAMES, 0)
        assert len({round(comm.all_reduce(torch.tensor([s.first])).item(), 4) for s in steps.values()}) == 1
        for step in steps.values():
            step.stop()
