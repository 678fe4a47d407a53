"""Answers to train_steps of notebook 06 that a check must reject or accept; CI proves both."""

from contextlib import nullcontext

import torch


def most_of(comm, steps):
    return int(comm.all_gather(torch.tensor([len(steps)])).max())


def backward(model, strategy, parts, loss_of):
    for k, (x, y) in enumerate(parts):
        with nullcontext() if k == len(parts) - 1 else strategy.accumulating():
            loss_of(model, x, y).backward()


def zeroes_behind_the_step(comm, model, strategy, optimizer, steps, loss_of):
    for parts in steps + [[]] * (most_of(comm, steps) - len(steps)):
        *first, last = parts or [None]
        with strategy.accumulating():
            for x, y in first:
                loss_of(model, x, y).backward()
        if last:
            loss_of(model, *last).backward()
        strategy.add_gradients(comm, model)
        optimizer.step()
        optimizer.zero_grad()


def asks_before_every_step(comm, model, strategy, optimizer, steps, loss_of):
    """A message more in every step, and no rank needs the numbers before: for batches that come as a stream."""
    i = 0
    while comm.all_reduce(torch.tensor([float(i < len(steps))])).item() > 0:
        optimizer.zero_grad(set_to_none=False)
        backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()
        i += 1


def step_by_step(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()


WRONG = {
    "6.6": """
accumulation @step_by_step: has accumulated all of its
    -         backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
    -         strategy.add_gradients(comm, model)
    +         for x, y in steps[i] if i < len(steps) else []:
    +             loss_of(model, x, y).backward()
    +             strategy.add_gradients(comm, model)
accumulation: has accumulated all of its
    for i in range(most_of(comm, steps)):
        for x, y in steps[i] if i < len(steps) else []:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            strategy.add_gradients(comm, model)
            optimizer.step()
accumulating @step_by_step: others follow, so it belongs in
    -         backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
    +         for x, y in steps[i] if i < len(steps) else []:
    +             loss_of(model, x, y).backward()
accumulating @step_by_step: nothing can travel during it
    -         backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
    +         with strategy.accumulating():
    +             for x, y in steps[i] if i < len(steps) else []:
    +                 loss_of(model, x, y).backward()
accumulating @step_by_step: nothing can travel during it
    -         backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
    -         strategy.add_gradients(comm, model)
    +         with strategy.accumulating():
    +             for x, y in steps[i] if i < len(steps) else []:
    +                 loss_of(model, x, y).backward()
    +             strategy.add_gradients(comm, model)
lengths @step_by_step: leaves the others waiting
    i in range(most_of(comm, steps)) => parts in steps
    steps[i] if i < len(steps) else [] => parts
lengths @step_by_step: as many as the rank with most
    most_of(comm, steps) => int(comm.all_gather(torch.tensor([len(steps)]))[0])
lengths @step_by_step: stopping all ranks early drops batches
    most_of(comm, steps) => int(comm.all_gather(torch.tensor([len(steps)])).min())
    [i] if i < len(steps) else [], loss_of => [i], loss_of
lengths @step_by_step: with most steps has: one step too many
    (most_of(comm, steps)): => (most_of(comm, steps) + 1):
lengths @step_by_step: with most steps has: one step too few
    (most_of(comm, steps)): => (most_of(comm, steps) - 1):
lost @step_by_step: uses 1 of its 2 micro-batches in step 0
    [i] if => [i][1:] if
lengths: leaves the others waiting
    for i in range(most_of(comm, steps)):
        if i < len(steps):
            optimizer.zero_grad()
            backward(model, strategy, steps[i], loss_of)
            strategy.add_gradients(comm, model)
            optimizer.step()
repeat @step_by_step: twice: a rank without another one
    [i] if i < len(steps) else => [i % len(steps)] if steps else
zero: counts a second time
    for i in range(most_of(comm, steps)):
        backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()
zero @step_by_step: A rank without a batch needs zero_grad
    -         optimizer.zero_grad()
    -         backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
    +         if i < len(steps):
    +             optimizer.zero_grad()
    +             backward(model, strategy, steps[i], loss_of)
zero @step_by_step: what the first has accumulated is lost
    -         optimizer.zero_grad()
    -         backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
    +         parts = steps[i] if i < len(steps) else []
    +         for k, (x, y) in enumerate(parts):
    +             optimizer.zero_grad()
    +             with nullcontext() if k == len(parts) - 1 else strategy.accumulating():
    +                 loss_of(model, x, y).backward()
apart @step_by_step: the replicas drift apart
    -         optimizer.step()
    +         if i < len(steps):
    +             optimizer.step()
scale @step_by_step: times as long: parts of the loss add up
    -         strategy.add_gradients(comm, model)
    +         strategy.add_gradients(comm, model)
    +         for param in model.parameters():
    +             param.grad /= comm.size
memory @step_by_step: something other than its micro-batches
    -         backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
    +         if i < len(steps):
    +             x, y = (torch.cat(tensors) for tensors in zip(*steps[i], strict=True))
    +             loss_of(model, x, y).backward()
memory @step_by_step: all of them are kept in memory
    -         backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
    +         losses = [loss_of(model, x, y) for x, y in (steps[i] if i < len(steps) else [])]
    +         if losses:
    +             sum(losses).backward()
""",
}
RIGHT = {
    "6.6": (step_by_step, zeroes_behind_the_step, asks_before_every_step),
}
COMPLETED = {
    "6.6": ["for x, y in parts[-1:]:\n    loss_of(model, x, y).backward()"],
}
