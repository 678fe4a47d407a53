"""Calls before torch's backward ends, by the thread that has begun backward."""

from collections.abc import Callable

import torch
from torch.autograd import Variable


def before_backward_ends(function: Callable[[], None]) -> None:
    """Call `function()`, which may wait in Python, before DDP waits in C++, where no interrupt reaches the rank.

    From the node of a gradient: at the end of backward, by a callback. DDP asks for its last bucket there, and so its
    own callback comes later. With static_graph=True DDP's first step asks for all buckets from its own callback, behind
    which another would come too late: `function()` is called at once, as it is outside of backward.
    """
    if torch._C._current_autograd_node() is None:
        function()
    else:
        Variable._execution_engine.queue_callback(function)
