"""Answers to the exercises of notebook 00 that a check must reject or accept; CI proves both."""

import os
import socket

import numpy as np


def in_other_words(comm):
    return "I am number " + str(comm.rank) + ", and we are " + str(comm.size)


def size_first(comm):
    return f"of {comm.size} ranks I am {comm.rank}"


def formatted_and_printed(comm):
    text = "Hello from rank %d/%d!" % (comm.rank, comm.size)  # noqa: UP031  an attendee may write it so
    print(text)
    return text


def localhost(comm):
    return comm.rank, "localhost", os.getpid()


def as_a_list(comm):
    return [comm.rank, socket.gethostname(), os.getpid()]


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
rank: its number is 0, and 4 is how many there are
    {comm.rank} of {comm.size}' => {comm.size} of {comm.rank}'
rank: all of them said
    rank {comm.rank} of {comm.size} => one of the ranks {list(range(comm.size + 1))}
rank: which does not stand there as a number of its own
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
order: in this order an int, a str and an int
    return socket.gethostname(), comm.rank, os.getpid()
process: which is not the process that runs it
    getpid => getppid
returns: a tuple of three was asked for
    comm.rank, socket => socket
host: said that it runs on 'localhost'
    socket.gethostname() => 'localhost'
rank: Rank 1 said that it is rank 0
    comm.rank => 0
returns: returned nothing
    print(comm.rank, socket.gethostname(), os.getpid())
""",
}
RIGHT = {
    "0.1": (in_other_words, formatted_and_printed, size_first),
    "0.2": (as_a_list,),
}
