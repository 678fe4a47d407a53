"""Answers to exercise 8.5 that the check must reject or accept; CI proves both."""

import torch


def by_the_sum(comm, grads, scaler):
    """A sum that is not finite says it; the gradients are divided afterwards."""
    total = torch.zeros(1)
    for grad in grads:
        total += (grad - grad).sum()
    good = float(comm.all_reduce(total)) == 0
    for grad in grads:
        grad.mul_(1 / scaler.scale)
    if not good:
        scaler.scale *= 0.5
        scaler.good_steps = 0
    elif scaler.good_steps + 1 < scaler.interval:
        scaler.good_steps += 1
    else:
        scaler.scale *= 2
        scaler.good_steps = 0
    return good


WRONG = {
    "8.5": """
decision: Ask all ranks before you decide
    comm.all_reduce(bad).item() => bad.item()
unscale: it still has the scale
    -     for grad in grads:
    -         grad /= scaler.scale
twice: was divided by the scale
    -         grad /= scaler.scale
    +         grad /= scaler.scale
    +         grad /= scaler.scale
reset: Count from 0 again
    scaler.scale, scaler.good_steps = (scaler.scale / 2, 0) => scaler.scale /= 2
grow: after which it is doubled
    if scaler.good_steps == scaler.interval: => if scaler.good_steps > scaler.interval:
grow: should be 2,048
    -     if scaler.good_steps == scaler.interval:
    -         scaler.scale, scaler.good_steps = (scaler.scale * 2, 0)
interval: it changes after 3 good steps
    if scaler.good_steps == scaler.interval: => if scaler.good_steps:
grow: in step 13, the scale is 1,024
    scaler.scale, scaler.good_steps = (scaler.scale * 2, 0) => scaler.scale *= 2
halve: it is halved once
    -     if comm.all_reduce(bad).item():
    -         scaler.scale, scaler.good_steps = (scaler.scale / 2, 0)
    +     if (n := comm.all_reduce(bad).item()):
    +         scaler.scale, scaler.good_steps = (scaler.scale / 2 ** n, 0)
halve: it has to come down
    (scaler.scale / 2, 0) => (scaler.scale, 0)
overflow: NaN in a gradient
    torch.isfinite(grad).all() => not torch.isinf(grad).any()
overflow: infinity in a gradient
    torch.isfinite(grad).all() => not torch.isnan(grad).any()
overflow: in every tensor
    for grad in grads)) => for grad in grads[:1]))
good: the step is skipped
    return True => return False
returns: True takes the step
    -     return True
order: divided by the scale of the next step
    -     for grad in grads:
    -         grad /= scaler.scale
    -     bad
    +     bad
    -     return True
    +     for grad in grads:
    +         grad /= scaler.scale
    +     return True
bytes: one number is enough
    good = True
    for i in range(2):
        whole = torch.zeros(500)
        if grads:
            whole[: len(grads[i])] = grads[i]
        good = bool(torch.isfinite(comm.all_reduce(whole)).all()) and good
    for grad in grads:
        grad /= scaler.scale
    scaler.good_steps = scaler.good_steps + 1 if good else 0
    scaler.scale = scaler.scale if good else scaler.scale / 2
    if scaler.good_steps == scaler.interval:
        scaler.scale, scaler.good_steps = scaler.scale * 2, 0
    return good
deadlock: there is a deadlock
    -     for grad in grads:
    -         grad /= scaler.scale
    +     if not grads:
    +         return True
    +     for grad in grads:
    +         grad /= scaler.scale
scales: the ranks leave with different scales
    -     if comm.all_reduce(bad).item():
    -         scaler.scale, scaler.good_steps = (scaler.scale / 2, 0)
    +     if comm.all_reduce(bad.clone()).item():
    +         if bad.item():
    +             scaler.scale, scaler.good_steps = (scaler.scale / 2, 0)
""",
}
RIGHT = {
    "8.5": (by_the_sum,),
}
COMPLETED = {
    "8.5": ["scaler.scale / 2, 0"],
}
