"""Small programs with one fault each: a deadlock, a contradiction or a slow rank. Each has its repair and its reason.

comm/status/report.py finds the right reason for each program, on simulated ranks and on MPI ranks. In notebook 03,
attendees find it themselves, and repair two programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .comm.base import Comm
from .trace import user_files

user_files.append(__file__)  # a report names lines of this file as if the attendee had written them


@dataclass(frozen=True)
class Program:
    """A program with one fault.

    name:     the fault; title: what the program should do, in one line.
    ranks:    the number of ranks that it needs.
    broken:   broken(comm) has the fault; repaired(comm) returns the number returns[rank].
    reason:   a part of what the report says, the same on simulated ranks and on MPI ranks.
    deadline: seconds after which the report finds the reason; the repaired program takes far less.
    """

    name: str
    title: str
    ranks: int
    broken: Callable[[Comm], float]
    repaired: Callable[[Comm], float]
    reason: str
    returns: list[float]
    deadline: float = 1.0


# -- Two ranks receive before they send: each waits for what the other has not sent ------------------------------------


def swap_receiving_first(comm: Comm) -> float:
    """Swap a number with the other rank."""
    mine, theirs = torch.tensor([float(comm.rank)]), torch.zeros(1)
    other = 1 - comm.rank
    comm.recv(theirs, other)
    comm.send(mine, other)
    return theirs.item()


def swap(comm: Comm) -> float:
    """Swap a number with the other rank: sendrecv starts both messages before it waits for either."""
    mine, theirs = torch.tensor([float(comm.rank)]), torch.zeros(1)
    other = 1 - comm.rank
    comm.sendrecv(mine, other, theirs, other)
    return theirs.item()


# -- Two ranks send before they receive: a small message leaves at once, a large one waits for its receive -------------


def swap_sending_first(comm: Comm) -> float:
    """Swap a million numbers with the other rank; return the first one."""
    mine, theirs = torch.full((1_000_000,), float(comm.rank)), torch.zeros(1_000_000)
    other = 1 - comm.rank
    comm.send(mine, other)
    comm.recv(theirs, other)
    return theirs[0].item()


def swap_large(comm: Comm) -> float:
    """Swap a million numbers with the other rank: one sends first, the other receives first."""
    mine, theirs = torch.full((1_000_000,), float(comm.rank)), torch.zeros(1_000_000)
    other = 1 - comm.rank
    if comm.rank == 0:
        comm.send(mine, other)
        comm.recv(theirs, other)
    else:
        comm.recv(theirs, other)
        comm.send(mine, other)
    return theirs[0].item()


# -- The receiver expects one element more than the sender sends -------------------------------------------------------


def hand_over_with_bias(comm: Comm) -> float:
    """Hand 1,000 weights from rank 0 to rank 1, which returns their sum."""
    if comm.rank == 0:
        comm.send(torch.ones(1000), 1)
        return 0.0
    weights = torch.zeros(1001)
    comm.recv(weights, 0)
    return weights.sum().item()


def hand_over(comm: Comm) -> float:
    """Hand 1,000 weights from rank 0 to rank 1, which returns their sum: both ranks expect 1,000 elements."""
    if comm.rank == 0:
        comm.send(torch.ones(1000), 1)
        return 0.0
    weights = torch.zeros(1000)
    comm.recv(weights, 0)
    return weights.sum().item()


# -- The receiver expects floats, the sender sends integers: as many elements, but other bytes -------------------------


def hand_over_labels_as_floats(comm: Comm) -> float:
    """Hand 1,000 labels from rank 0 to rank 1, which returns their sum."""
    if comm.rank == 0:
        comm.send(torch.arange(1000), 1)
        return 0.0
    labels = torch.zeros(1000)
    comm.recv(labels, 0)
    return float(labels.sum())


def hand_over_labels(comm: Comm) -> float:
    """Hand 1,000 labels from rank 0 to rank 1, which returns their sum: both ranks expect integers."""
    if comm.rank == 0:
        comm.send(torch.arange(1000), 1)
        return 0.0
    labels = torch.zeros(1000, dtype=torch.int64)
    comm.recv(labels, 0)
    return float(labels.sum())


# -- Two messages are received in another order than they are sent; messages have no tags here -------------------------


def hand_over_layer_backwards(comm: Comm) -> float:
    """Hand 30 weights and 5 biases from rank 0 to rank 1, which returns the sum of all."""
    weights, bias = torch.zeros(30), torch.zeros(5)
    if comm.rank == 0:
        works = [comm.isend(weights + 1, 1), comm.isend(bias + 1, 1)]
    else:
        works = [comm.irecv(bias, 0), comm.irecv(weights, 0)]
    for work in works:
        work.wait()
    return (weights.sum() + bias.sum()).item()


def hand_over_layer(comm: Comm) -> float:
    """Hand 30 weights and 5 biases from rank 0 to rank 1, which returns the sum of all, in the order of sending."""
    weights, bias = torch.zeros(30), torch.zeros(5)
    if comm.rank == 0:
        works = [comm.isend(weights + 1, 1), comm.isend(bias + 1, 1)]
    else:
        works = [comm.irecv(weights, 0), comm.irecv(bias, 0)]
    for work in works:
        work.wait()
    return (weights.sum() + bias.sum()).item()


# -- On a ring every rank exchanges with its right neighbor first, which is busy with its own right neighbor -----------


def add_neighbors_all_alike(comm: Comm) -> float:
    """Exchange numbers with both neighbors on the ring: rank r has the number r."""
    mine, theirs = torch.tensor([float(comm.rank)]), torch.zeros(1)
    total = 0.0
    for step in (1, -1):
        neighbor = (comm.rank + step) % comm.size
        total += comm.sendrecv(mine, neighbor, theirs, neighbor).item()
    return total


def add_neighbors(comm: Comm) -> float:
    """Exchange numbers with both neighbors on the ring: rank r has the number r.

    Returns: the number of the right neighbor plus the number of the left one.
    """
    mine, theirs = torch.tensor([float(comm.rank)]), torch.zeros(1)
    total = 0.0
    for step in (1, -1) if comm.rank % 2 == 0 else (-1, 1):
        neighbor = (comm.rank + step) % comm.size
        total += comm.sendrecv(mine, neighbor, theirs, neighbor).item()
    return total


# -- Only one rank writes the log, so only this rank calls the collective that the log needs ---------------------------


def mean_loss_for_the_log(comm: Comm) -> float:
    """Write the mean loss into the log: rank r has the loss r + 1, and rank 0 alone prints."""
    loss = torch.tensor([comm.rank + 1.0])
    if comm.rank == 0:
        comm.all_reduce(loss)
        loss /= comm.size
        print(f"mean loss {loss.item():.2f}")
    return loss.item()


def mean_loss(comm: Comm) -> float:
    """Write the mean loss into the log: rank r has the loss r + 1, and rank 0 alone prints.

    Returns: the mean of the losses of all ranks, on every rank.
    """
    loss = torch.tensor([comm.rank + 1.0])
    comm.all_reduce(loss)
    loss /= comm.size
    if comm.rank == 0:
        print(f"mean loss {loss.item():.2f}")
    return loss.item()


# -- One rank skips a barrier, so that its next collective meets the barrier of the others -----------------------------


def count_samples_apart(comm: Comm) -> float:
    """Wait for all ranks, then add up 10 * rank samples; every rank returns the sum."""
    seen = torch.tensor([10.0 * comm.rank])
    if comm.rank != 2:
        comm.barrier()
    comm.all_reduce(seen)
    return seen.item()


def count_samples(comm: Comm) -> float:
    """Wait for all ranks, then add up 10 * rank samples: all ranks call the same collectives in the same order."""
    seen = torch.tensor([10.0 * comm.rank])
    comm.barrier()
    comm.all_reduce(seen)
    return seen.item()


# -- Every rank goes through its own numbers, and one rank has fewer: it leaves the loop one step early ----------------


def sum_of_own_steps(comm: Comm) -> float:
    """Add up the numbers 0 to 10: in each step every rank adds one of its own."""
    total = 0.0
    for number in range(comm.rank, 11, comm.size):
        x = torch.tensor([float(number)])
        comm.all_reduce(x)
        total += x.item()
    return total


def sum_of_steps(comm: Comm) -> float:
    """Add up the numbers 0 to 10: in each step every rank adds one of its own.

    The ranks take the numbers in turns. With 4 ranks, rank 0 has 0, 4 and 8, and rank 3
    has 3 and 7.

    Returns: the sum of all eleven numbers, 55, on every rank.
    """
    total = 0.0
    for first in range(0, 11, comm.size):
        number = first + comm.rank
        x = torch.tensor([float(number) if number < 11 else 0.0])
        comm.all_reduce(x)
        total += x.item()
    return total


# -- One rank names itself as the root of a broadcast ------------------------------------------------------------------


def share_seed_from_two(comm: Comm) -> float:
    """Give every rank the seed of rank 0, which is 7."""
    seed = torch.tensor([7.0 if comm.rank == 0 else 0.0])
    comm.broadcast(seed, root=1 if comm.rank == 1 else 0)
    return seed.item()


def share_seed(comm: Comm) -> float:
    """Give every rank the seed of rank 0, which is 7: all ranks name the same root."""
    seed = torch.tensor([7.0 if comm.rank == 0 else 0.0])
    comm.broadcast(seed, root=0)
    return seed.item()


# -- One rank raises an exception before the collective in which the others wait for it --------------------------------


def sum_of_means_of_some(comm: Comm) -> float:
    """Add up the means of all batches; the batch of rank 2 is empty."""
    batch = torch.full((0 if comm.rank == 2 else 5,), float(comm.rank))
    if len(batch) == 0:
        raise ValueError("the batch is empty")
    mean = batch.mean().reshape(1)
    comm.all_reduce(mean)
    return mean.item()


def sum_of_means(comm: Comm) -> float:
    """Add up the means of all batches; an empty batch counts as 0, and its rank takes part."""
    batch = torch.full((0 if comm.rank == 2 else 5,), float(comm.rank))
    mean = batch.mean().reshape(1) if len(batch) > 0 else torch.zeros(1)
    comm.all_reduce(mean)
    return mean.item()


# -- One rank does all the work: nothing is wrong, but the others wait for a long time ---------------------------------

SECONDS = 0.1  # of work per sample


def work_alone(comm: Comm) -> float:
    """Work on 30 samples, all of them on rank 2, then add up how many there were."""
    mine = range(30) if comm.rank == 2 else range(0)
    for _ in mine:
        time.sleep(SECONDS)
    done = torch.tensor([float(len(mine))])
    comm.all_reduce(done)
    return done.item()


def work_together(comm: Comm) -> float:
    """Work on 30 samples, each rank on its share, then add up how many there were."""
    mine = range(comm.rank, 30, comm.size)
    for _ in mine:
        time.sleep(SECONDS / 10)
    done = torch.tensor([float(len(mine))])
    comm.all_reduce(done)
    return done.item()


# -- Two ranks are in the same two communicators, and use them in opposite order ---------------------------------------


def add_in_both_groups_crosswise(comm: Comm) -> float:
    """Add up a 1 in two groups, one after the other; both groups have both ranks."""
    data, model = comm.split("data"), comm.split("model")
    x = torch.ones(1)
    if comm.rank == 0:
        data.all_reduce(x)
        model.all_reduce(x)
    else:
        model.all_reduce(x)
        data.all_reduce(x)
    return x.item()


def add_in_both_groups(comm: Comm) -> float:
    """Add up a 1 in two groups, in the same order on both ranks."""
    data, model = comm.split("data"), comm.split("model")
    x = torch.ones(1)
    data.all_reduce(x)
    model.all_reduce(x)
    return x.item()


# -- A receive is started, and the rank reads its tensor without waiting: it may find the old values -------------------


def read_before_it_has_come(comm: Comm) -> float:
    """Hand the number 42 from rank 0 to rank 1; both return it."""
    x = torch.zeros(1)
    if comm.rank == 0:
        x += 42
        comm.send(x, 1)
    else:
        comm.irecv(x, 0)
    return x.item()


def read_when_it_has_come(comm: Comm) -> float:
    """Hand the number 42 from rank 0 to rank 1; both return it, rank 1 after it has waited."""
    x = torch.zeros(1)
    if comm.rank == 0:
        x += 42
        comm.send(x, 1)
    else:
        comm.irecv(x, 0).wait()
    return x.item()


PROGRAMS = (
    Program(
        name="both_receive_first",
        title="two ranks swap a number",
        ranks=2,
        broken=swap_receiving_first,
        repaired=swap,
        reason="ranks 0 and 1 both receive first",
        returns=[1.0, 0.0],
    ),
    Program(
        name="head_to_head_sends",
        title="two ranks swap four megabytes",
        ranks=2,
        broken=swap_sending_first,
        repaired=swap_large,
        reason="ranks 0 and 1 both send first",
        returns=[1.0, 0.0],
    ),
    Program(
        name="counts_differ",
        title="rank 0 sends its 1,000 weights to rank 1",
        ranks=2,
        broken=hand_over_with_bias,
        repaired=hand_over,
        reason="counts differ: rank 0 sends 1,000 elements, rank 1 expects 1,001",
        returns=[0.0, 1000.0],
    ),
    Program(
        name="dtypes_differ",
        title="rank 0 sends its labels to rank 1",
        ranks=2,
        broken=hand_over_labels_as_floats,
        repaired=hand_over_labels,
        reason="dtypes differ: rank 0 sends int64, rank 1 expects float32",
        returns=[0.0, 499500.0],
    ),
    Program(
        name="wrong_order",
        title="rank 0 sends a layer, its weights and bias, to rank 1",
        ranks=2,
        broken=hand_over_layer_backwards,
        repaired=hand_over_layer,
        reason="are they received in the order in which they are sent?",
        returns=[0.0, 35.0],
    ),
    Program(
        name="ring_even_odd",
        title="every rank adds the numbers of its two neighbors on a ring",
        ranks=4,
        broken=add_neighbors_all_alike,
        repaired=add_neighbors,
        reason="ranks 0-3 all exchange with one who exchanges with another",
        returns=[4.0, 2.0, 4.0, 2.0],
    ),
    Program(
        name="branch_around_collective",
        title="write the mean loss into the log: rank 0 alone prints it",
        ranks=4,
        broken=mean_loss_for_the_log,
        repaired=mean_loss,
        reason="ranks 1-3 never called all_reduce",
        returns=[2.5, 2.5, 2.5, 2.5],
    ),
    Program(
        name="other_collective",
        title="all ranks wait for each other, then add up how many samples they have seen",
        ranks=4,
        broken=count_samples_apart,
        repaired=count_samples,
        reason="rank 2 calls all_reduce where ranks 0, 1, 3 call barrier",
        returns=[60.0, 60.0, 60.0, 60.0],
    ),
    Program(
        name="unequal_loops",
        title="add up the numbers 0 to 10, which the ranks take in turns",
        ranks=4,
        broken=sum_of_own_steps,
        repaired=sum_of_steps,
        reason="rank 3 left the loop one step early",
        returns=[55.0, 55.0, 55.0, 55.0],
    ),
    Program(
        name="wrong_root",
        title="every rank gets the seed of rank 0",
        ranks=4,
        broken=share_seed_from_two,
        repaired=share_seed,
        reason="rank 1 calls broadcast with root 1, ranks 0, 2, 3 with root 0",
        returns=[7.0, 7.0, 7.0, 7.0],
    ),
    Program(
        name="a_rank_raises",
        title="each rank takes the mean of its batch, and all means are added up",
        ranks=4,
        broken=sum_of_means_of_some,
        repaired=sum_of_means,
        reason="rank 2 raised ValueError at ",
        returns=[4.0, 4.0, 4.0, 4.0],
    ),
    Program(
        name="straggler",
        title="work on 30 samples, then add up how many samples there were",
        ranks=4,
        broken=work_alone,
        repaired=work_together,
        reason="rank 2 is still computing",
        returns=[30.0, 30.0, 30.0, 30.0],
    ),
    Program(
        name="opposite_communicators",
        title="add up a number in the data group, then in the model group",
        ranks=2,
        broken=add_in_both_groups_crosswise,
        repaired=add_in_both_groups,
        reason="two communicators in opposite order",
        returns=[4.0, 4.0],
    ),
    Program(
        name="forgotten_wait",
        title="rank 0 sends a number to rank 1, which works meanwhile",
        ranks=2,
        broken=read_before_it_has_come,
        repaired=read_when_it_has_come,
        reason="rank 1 never waited for its receive from rank 0",
        returns=[42.0, 42.0],
    ),
)


def find(name: str) -> Program:
    """Return the program called `name`. Raises ValueError with the names that there are."""
    for program in PROGRAMS:
        if program.name == name:
            return program
    raise ValueError(f"no program {name!r} in the zoo: {', '.join(p.name for p in PROGRAMS)}")


# -- notebook 03 ----------------------------------------------------------------------------------------------------

LABELS = {  # letter: name of the program, which would give its fault away
    "A": "both_receive_first",
    "B": "counts_differ",
    "C": "branch_around_collective",
    "D": "opposite_communicators",
    "E": "unequal_loops",
    "F": "straggler",
    "G": "a_rank_raises",
}

DIAGNOSES = {  # diagnosis: what it means
    "circle": "ranks wait in a circle, each in the same call",
    "mismatch": "a send and its receive do not agree about the message",
    "absent": "a rank never makes the call in which the others wait",
    "order": "all ranks make the same calls, but not in the same order",
    "error": "a rank raised an exception, and the others wait for it in vain",
    "slow": "there is no deadlock: one rank is late, and all others wait for it",
}


def diagnose() -> dict[str, str]:
    """Diagnose each of the programs A to G, which `lab.show("zoo")` shows.

        "circle"     ranks wait in a circle, each in the same call
        "mismatch"   a send and its receive do not agree about the message
        "absent"     a rank never makes the call in which the others wait
        "order"      all ranks make the same calls, but not in the same order
        "error"      a rank raised an exception, and the others wait for it in vain
        "slow"       there is no deadlock: one rank is late, and all others wait for it

    Returns: dict, such as {"A": "slow", "B": ...}. A diagnosis may fit more
             than one program.
    """
    return {
        "A": "circle",
        "B": "mismatch",
        "C": "absent",
        "D": "order",
        "E": "absent",
        "F": "slow",
        "G": "error",
    }
