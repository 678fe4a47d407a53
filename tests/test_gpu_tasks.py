"""Tensors of a task on their way to the engine and back. The device "meta" stands for a GPU where that does."""

import pytest
import torch

from hpdl_lab.comm.device import comm_class
from hpdl_lab.comm.real import RealComm
from hpdl_lab.data.dataset import digits
from hpdl_lab.engines.messages import on_host, pack
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallel


def sent(value, where):
    return pack(value).value(where)


def test_everything_that_a_task_brings_moves():
    weights = torch.ones(3)

    def fn(comm, x, model):
        return weights, x, model

    received, args = sent((fn, [{"x": [torch.zeros(2)]}, mlp(), digits(), DataParallel()]), "meta")
    got, x, model = received(None, args[0]["x"][0], args[1])
    assert got.device.type == x.device.type == "meta"
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad and p.is_leaf for p in model.parameters())
    assert args[2].train_x.device.type == args[2].test_y.device.type == "meta"


def test_on_the_cpu_nothing_changes():
    x = torch.arange(5.0)
    got = sent({"x": x, "again": x}, "cpu")
    assert torch.equal(got["x"], x) and got["x"] is got["again"]


def test_a_tensor_that_is_named_twice_stays_one():
    x = torch.zeros(3)
    got = sent([x, x], "meta")
    assert got[0] is got[1]


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda:0")

    def detach(self):
        return self.as_subclass(torch.Tensor).detach()


def test_results_come_back_as_cpu_tensors():
    x = torch.arange(4.0).as_subclass(OnGpu)
    got = pack({"sum": [x], "text": "as it is", "fn": lambda: 3}).value()
    assert type(got["sum"][0]) is torch.Tensor and got["sum"][0].tolist() == [0, 1, 2, 3]
    assert got["sum"][0].device.type == "cpu" and got["text"] == "as it is" and got["fn"]() == 3


def test_a_parameter_stays_one():
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    copy = on_host(parameter)
    assert isinstance(copy, torch.nn.Parameter) and not copy.requires_grad
    assert not isinstance(on_host(torch.ones(2)), torch.nn.Parameter)


def test_the_kind_of_communicator():
    assert comm_class("cpu") is RealComm
    with pytest.raises(ValueError, match='device=\'gpu\': "cpu" or "cuda" is needed'):
        comm_class("gpu")
