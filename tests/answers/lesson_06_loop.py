"""Answers to train_steps of notebook 06 that a check must reject or accept; CI proves both."""

from contextlib import nullcontext

import torch

from . import WrongAnswer

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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "6.6": (
        WrongAnswer(averages_before_accumulation_ends, "accumulation", "has accumulated all of its"),
        WrongAnswer(a_step_for_each_micro_batch, "accumulation", "has accumulated all of its"),
        WrongAnswer(forgets_accumulating, "accumulating", "others follow, so it belongs into"),
        WrongAnswer(accumulates_the_last_as_well, "accumulating", "nothing can travel beside it"),
        WrongAnswer(adds_inside_accumulating, "accumulating", "nothing can travel beside it"),
        WrongAnswer(loops_over_its_own_steps, "lengths", "leaves the others waiting"),
        WrongAnswer(as_many_as_rank_0, "lengths", "as many as the rank with most"),
        WrongAnswer(as_few_as_the_one_with_fewest, "lengths", "who stops everybody earlier drops batches"),
        WrongAnswer(one_step_too_many, "lengths", "with most steps has: one step too many"),
        WrongAnswer(one_step_too_few, "lengths", "with most steps has: one step too few"),
        WrongAnswer(leaves_out_the_first_micro_batch, "lost", "uses 1 of its 2 micro-batches in step 0"),
        WrongAnswer(leaves_out_empty_steps, "lengths", "leaves the others waiting"),
        WrongAnswer(begins_again_from_the_front, "repeat", "twice: what is over is over"),
        WrongAnswer(never_zeroes, "zero", "counts a second time"),
        WrongAnswer(zeroes_only_with_a_batch, "zero", "Also where a rank has no batch"),
        WrongAnswer(zeroes_between_micro_batches, "zero", "what the first has added up is gone"),
        WrongAnswer(updates_only_with_a_batch, "apart", "the replicas drift apart"),
        WrongAnswer(averages_what_adds_up, "scale", "times as long: parts of the loss add up"),
        WrongAnswer(all_micro_batches_at_once, "memory", "something else than its micro-batches"),
        WrongAnswer(adds_up_the_loss, "memory", "all of them are kept in memory"),
    ),
}
RIGHT = {
    "6.6": (zeroes_behind_the_step, asks_before_every_step),
}
