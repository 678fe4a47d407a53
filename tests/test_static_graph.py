"""The static graph of notebook 14: losses as in eager, values freed early, an `if` refused; the table of frameworks."""

import pytest
import torch

from hpdl_lab.performance.frameworks import BEFORE, FRAMEWORKS, SOURCES, branching, framework_history, two_layers
from hpdl_lab.performance.static_graph import gradients, placeholder, run_graph

SHAPES = {"x": (8, 4), "y": (8, 2), "w1": (4, 16), "b1": (16,), "w2": (16, 2), "b2": (2,)}
WEIGHTS = ("w1", "b1", "w2", "b2")


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.fixture
def nodes():
    return {name: placeholder(name) for name in SHAPES}


def test_training_has_the_losses_of_eager(tensors, nodes):
    loss = two_layers(**nodes)
    step = [loss, *gradients(loss, [nodes[name] for name in WEIGHTS])]
    eager = {name: tensor.clone().requires_grad_(name in WEIGHTS) for name, tensor in tensors.items()}
    for _ in range(20):
        (value, *grads), _ = run_graph(step, {nodes[name]: tensor for name, tensor in tensors.items()})
        expected = two_layers(**eager)
        expected.backward()
        assert abs(value.item() - expected.item()) < 1e-6 * expected.item()
        for name, grad in zip(WEIGHTS, grads, strict=True):
            tensors[name] = tensors[name] - 0.01 * grad
            eager[name] = (eager[name] - 0.01 * eager[name].grad).detach().requires_grad_()


def test_freeing_early_changes_no_value_and_keeps_less(tensors, nodes):
    loss = two_layers(**nodes)
    step, feed = [loss, *gradients(loss, [nodes["w1"], nodes["x"]])], {nodes[name]: tensors[name] for name in SHAPES}
    (freed, fewer), (kept, more) = run_graph(step, feed), run_graph(step, feed, free=False)
    assert all(map(torch.equal, freed, kept))
    assert len(step) <= fewer < more == len({node for output in step for node in output.order} - feed.keys())


def test_a_python_if_is_refused_while_the_graph_is_built_and_a_forgotten_feed_when_it_runs(tensors, nodes):
    with pytest.raises(TypeError, match="'gt' has no value yet"):
        branching(**nodes)
    assert branching(**tensors) == two_layers(**tensors).square()  # in eager, it decides by the value
    feed = {nodes[name]: tensors[name] for name in SHAPES}
    assert run_graph([two_layers(**nodes) > 1], feed)[0][0].item() is True  # recorded, a comparison is as good as any
    with pytest.raises(KeyError, match="placeholder w2"):
        run_graph([two_layers(**nodes)], {node: value for node, value in feed.items() if node is not nodes["w2"]})


def test_the_table_has_every_framework_its_year_and_a_source():
    lines = framework_history().split("\n")
    assert [line.split("  ")[0] for line in lines[1:]] == list(SOURCES) == [f.name for f in FRAMEWORKS]
    assert all(str(f.year) in line and f.graph in line for f, line in zip(FRAMEWORKS, lines[1:], strict=True))
    assert {f.name for f in FRAMEWORKS if f.graph == BEFORE} == {"Theano", "Caffe", "Caffe2", "CNTK", "TensorFlow 1"}
