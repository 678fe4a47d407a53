"""Answers to exercise 8.2 that the check must reject or accept; CI proves both."""

import torch


def by_grad(block, x):
    """Gradients are asked for one by one and added by hand."""
    state = torch.get_rng_state()
    with torch.no_grad():
        y = block(x)

    def backward(dy):
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        leaf, params = x.detach().clone().requires_grad_(True), list(block.parameters())
        with torch.enable_grad():
            out = block(leaf)
        torch.set_rng_state(now)
        dx, *grads = torch.autograd.grad(out, [leaf, *params], dy)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad if param.grad is None else param.grad + grad
        return dx

    return y, backward


def by_checkpoint(block, x):
    """torch does it."""
    leaf = x.detach().requires_grad_()
    torch.utils.checkpoint.set_checkpoint_early_stop(False).__enter__()
    y = torch.utils.checkpoint.checkpoint(block, leaf, use_reentrant=True)

    def backward(dy):
        torch.autograd.backward(y, dy)
        return leaf.grad

    return y.detach(), backward


WRONG = {
    "8.2": """
graph: y carries a graph
    -     with torch.no_grad():
    -         y = block(x)
    +     y = block(x)
kept: are held until backward
    leaf = x.detach().requires_grad_()
    y = block(leaf)

    def backward(dy):
        y.backward(dy)
        return leaf.grad

    return y.detach(), backward
random: Where was the generator
    -             torch.set_rng_state(random)
    +             pass
stream: put the generator back
    torch.random.fork_rng(devices=[]), torch.enable_grad() => torch.enable_grad()
random: of this micro-batch
    -     random = torch.get_rng_state()
    -     with torch.no_grad():
    -         y = block(x)
    +     with torch.no_grad():
    +         y = block(x)
    +     random = torch.get_rng_state()
dx: left in x.grad
    again = x.detach().requires_grad_() => again = x
flops: cost 1.66667 times
    -             out = block(again)
    +             block(again)
    +             torch.set_rng_state(random)
    +             out = block(again)
gradients: adds nothing to the parameters
    -         out.backward(dy)
    -         return again.grad
    +         return torch.autograd.grad(out, again, dy)[0]
gradients: what was there before, from another micro-batch, is lost
    -         out.backward(dy)
    +         block.zero_grad()
    +         out.backward(dy)
dx: With a block without dropout, dx of call 2
    out.backward(dy) => out.backward(torch.ones_like(dy))
output: y is not block(x)
    -         y = block(x)
    +         y = block.eval()(x) + 0 * block.train()(x) + 1
raises: does not require grad
    torch.enable_grad() => torch.no_grad()
returns: backward returned nothing
    -         return again.grad
    +         again.grad
returns: return (y, backward)
    return (y, backward) => return y
""",
}
RIGHT = {
    "8.2": (by_grad,),
}
COMPLETED = {
    "8.2": ["block(again)"],
}
