"""Answers to train_steps of notebook 06 that a check must reject or accept; CI proves both."""

from contextlib import nullcontext

import torch

# -- wrong -------------------------------------------------------------------------------------------------------------


def most_of(comm, steps):
    return int(comm.all_gather(torch.tensor([len(steps)])).max())


def backward(model, strategy, parts, loss_of):
    for k, (x, y) in enumerate(parts):
        with nullcontext() if k == len(parts) - 1 else strategy.accumulating():
            loss_of(model, x, y).backward()


def averages_before_accumulation_ends(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        for x, y in steps[i] if i < len(steps) else []:
            loss_of(model, x, y).backward()
            strategy.add_gradients(comm, model)
        optimizer.step()


def a_step_for_each_micro_batch(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        for x, y in steps[i] if i < len(steps) else []:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            strategy.add_gradients(comm, model)
            optimizer.step()


def forgets_accumulating(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        for x, y in steps[i] if i < len(steps) else []:
            loss_of(model, x, y).backward()
        strategy.add_gradients(comm, model)
        optimizer.step()


def accumulates_the_last_as_well(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        with strategy.accumulating():
            for x, y in steps[i] if i < len(steps) else []:
                loss_of(model, x, y).backward()
        strategy.add_gradients(comm, model)
        optimizer.step()


def adds_inside_accumulating(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        with strategy.accumulating():
            for x, y in steps[i] if i < len(steps) else []:
                loss_of(model, x, y).backward()
            strategy.add_gradients(comm, model)
        optimizer.step()


def one_step_too_many(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps) + 1):
        optimizer.zero_grad()
        backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()


def one_step_too_few(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps) - 1):
        optimizer.zero_grad()
        backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()


def leaves_out_the_first_micro_batch(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        backward(model, strategy, steps[i][1:] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()


def loops_over_its_own_steps(comm, model, strategy, optimizer, steps, loss_of):
    for parts in steps:
        optimizer.zero_grad()
        backward(model, strategy, parts, loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()


def as_many_as_rank_0(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(int(comm.all_gather(torch.tensor([len(steps)]))[0])):
        optimizer.zero_grad()
        backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()


def as_few_as_the_one_with_fewest(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(int(comm.all_gather(torch.tensor([len(steps)])).min())):
        optimizer.zero_grad()
        backward(model, strategy, steps[i], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()


def leaves_out_empty_steps(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        if i < len(steps):
            optimizer.zero_grad()
            backward(model, strategy, steps[i], loss_of)
            strategy.add_gradients(comm, model)
            optimizer.step()


def begins_again_from_the_front(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        backward(model, strategy, steps[i % len(steps)] if steps else [], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()


def never_zeroes(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()


def zeroes_only_with_a_batch(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        if i < len(steps):
            optimizer.zero_grad()
            backward(model, strategy, steps[i], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()


def zeroes_between_micro_batches(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        parts = steps[i] if i < len(steps) else []
        for k, (x, y) in enumerate(parts):
            optimizer.zero_grad()
            with nullcontext() if k == len(parts) - 1 else strategy.accumulating():
                loss_of(model, x, y).backward()
        strategy.add_gradients(comm, model)
        optimizer.step()


def updates_only_with_a_batch(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        if i < len(steps):
            optimizer.step()


def averages_what_adds_up(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        for param in model.parameters():
            param.grad /= comm.size
        optimizer.step()


def all_micro_batches_at_once(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        if i < len(steps):
            x, y = (torch.cat(tensors) for tensors in zip(*steps[i], strict=True))
            loss_of(model, x, y).backward()
        strategy.add_gradients(comm, model)
        optimizer.step()


def adds_up_the_loss(comm, model, strategy, optimizer, steps, loss_of):
    for i in range(most_of(comm, steps)):
        optimizer.zero_grad()
        losses = [loss_of(model, x, y) for x, y in (steps[i] if i < len(steps) else [])]
        if losses:
            sum(losses).backward()
        strategy.add_gradients(comm, model)
        optimizer.step()


# -- right -------------------------------------------------------------------------------------------------------------


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
    """A message more in every step, and nobody needs to know the numbers before: for batches that come as a stream."""
    i = 0
    while comm.all_reduce(torch.tensor([float(i < len(steps))])).item() > 0:
        optimizer.zero_grad(set_to_none=False)
        backward(model, strategy, steps[i] if i < len(steps) else [], loss_of)
        strategy.add_gradients(comm, model)
        optimizer.step()
        i += 1
