"""torch's optimizers work without torch's compiler, and the compiler works once it is used."""

import subprocess
import sys

PROBE = """
import gc, sys
gc.disable()  # or the imports take half as long again
from hpdl_lab.features.torch_compiler import StandIn, put_off_torch_compiler

put_off_torch_compiler()
put_off_torch_compiler()  # a second time, which changes nothing
import torch

NAME = "torch._dynamo"

def parts():
    return [name for name in sys.modules if name.startswith(NAME + ".")]

w = torch.ones(2, requires_grad=True)
optimizers = [kind([w], lr=0.5) for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor)]
for optimizer in optimizers:
    optimizer.zero_grad()
    w.sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
assert bool((w < 0.5).all()) and torch.is_grad_enabled()
w.expand(3, 2).backward(torch.ones(3, 2))
try:
    w.backward(torch.ones(3))
except RuntimeError as error:
    assert "Mismatch in shape" in str(error)
else:
    raise AssertionError("a gradient of another shape was taken")
assert isinstance(torch._dynamo, StandIn) and not parts(), parts()
shapes = torch.fx.experimental.symbolic_shapes
assert isinstance(shapes, StandIn) and "sympy" not in sys.modules
assert not hasattr(torch._dynamo, "__wrapped__"), "as inspect asks of every module"

given = torch._dynamo
import torch._dynamo.config  # a part before the whole

assert not isinstance(torch._dynamo, StandIn) and sys.modules[NAME] is torch._dynamo is not given
for name in parts():
    assert sys.modules[name].__spec__.name == name and not isinstance(sys.modules[name].__spec__.loader, StandIn)
assert given.config is torch._dynamo.config is sys.modules[NAME + ".config"]
assert given.graph_break is torch._dynamo.graph_break and given.disable is torch._dynamo.disable
add = torch.optim.Optimizer.add_param_group.__wrapped__
assert "__dynamo_disable" not in vars(add)

def step(x):
    torch.optim.SGD([w], lr=0.5).zero_grad()  # which is not to be compiled
    return x.sin() + 1

compiled = torch.compile(step, backend="eager")
assert compiled(torch.zeros(3)).tolist() == [1, 1, 1]
assert vars(add)["__dynamo_disable"] is not add, "which the compiler leaves out"
compiled = torch.compile(lambda x: x.reshape(-1, 2).sum(0), backend="eager", dynamic=True)
assert compiled(torch.ones(6)).tolist() == [3, 3]
assert shapes.expect_true is torch.fx.experimental.symbolic_shapes.expect_true and not isinstance(
    torch.fx.experimental.symbolic_shapes, StandIn
)
"""


def test_the_compiler_is_imported_when_it_is_used_and_no_earlier():
    found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
