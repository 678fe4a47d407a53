"""Answers to the exercises of notebook 00 that a check must reject or accept; CI proves both."""

import os

import numpy as np


def in_other_words(comm):
    return "I am number " + str(comm.rank) + ", and we are " + str(comm.size)


def size_first(comm):
    return f"of {comm.size} ranks I am {comm.rank}"


def formatted_and_printed(comm):
    text = "Hello from rank %d/%d!" % (comm.rank, comm.size)  # noqa: UP031  an attendee may write it so
    print(text)
    return text


def as_a_list(comm, x):
    x.fill(comm.rank)
    comm.barrier()
    return [os.getpid(), x]


def one_by_one(comm, x):
    for i in range(len(x)):
        x[i] = comm.rank
    comm.barrier()
    comm.barrier()
    return os.getpid(), x


def adds_to_zeros(comm, x):
    x += comm.rank
    comm.barrier()
    return os.getpid(), x.copy()


WRONG = {
    "0.1": """
returns: print shows a text, return hands it back
    print(f"hello from rank {comm.rank} of {comm.size}")
rank: comm.rank is different on every rank
    {comm.rank} => 0
rank: ranks count from 0
    from rank {comm.rank} of {comm.size} => from rank {comm.rank + 1} of {comm.size}
size: the number of ranks is 4, which is comm.size
    {comm.size}' => {comm.size - 1}'
size: the number of ranks is 1
    {comm.size} => 4
rank: its number is 0, and 4 is the number of ranks
    {comm.rank} of {comm.size}' => {comm.size} of {comm.rank}'
rank: all of them returned
    rank {comm.rank} of {comm.size} => one of the ranks {list(range(comm.size + 1))}
rank: which is not in the text as a separate number
    hello from rank {comm.rank} of {comm.size} => hello from {comm.rank}{comm.size}
returns: a str was asked for, not int
    f'hello from rank {comm.rank} of {comm.size}' => comm.rank
raises: has no attribute 'Rank'
    {comm.rank} of => {comm.Rank} of
deadlock: all receive first
    if comm.size > 1:
        comm.recv(np.zeros(1), (comm.rank + 1) % comm.size)
    return f"hello from rank {comm.rank} of {comm.size}"
""",
    "0.2": """
order: an int and an array were asked for
    os.getpid(), x => x, os.getpid()
process: which is not the process that runs it
    getpid => getppid
returns: a tuple of two was asked for
    os.getpid(), x => x
element: That is one element
    x[:] => x[0]
object: x = ... gives the name x to
    x[:] = comm.rank => x = np.full(3, float(comm.rank))
rank: comm.rank is the number of this rank
    x[:] = comm.rank => x[:] = 0
rank: 4 is the number of ranks
    x[:] = comm.rank => x[:] = comm.size
rank: Ranks count from 0
    x[:] = comm.rank => x[:] = comm.rank + 1
sum: That is the sum over ranks
    comm.barrier() => comm.all_reduce(x)
barrier: rank 0 does not wait for the others
    x[:] = comm.rank
    return os.getpid(), x
deadlock: ranks 1-3 never called barrier
    x[:] = comm.rank
    if comm.rank == 0:
        comm.barrier()
    return os.getpid(), x
returns: returned nothing
    x[:] = comm.rank
    comm.barrier()
    print(os.getpid(), x)
""",
}
RIGHT = {
    "0.1": (in_other_words, formatted_and_printed, size_first),
    "0.2": (as_a_list, one_by_one, adds_to_zeros),
}
