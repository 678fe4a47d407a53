"""Answers to the exercises of notebook 00 that a check must reject or accept; CI proves both."""

import os
import socket

import numpy as np

from . import WrongAnswer

# -- hello: wrong ------------------------------------------------------------------------------------------------------


def prints_only(comm):
    print(f"hello from rank {comm.rank} of {comm.size}")


def always_rank_0(comm):
    return f"hello from rank 0 of {comm.size}"


def counts_from_one(comm):
    return f"hello from rank {comm.rank + 1} of {comm.size}"


def last_rank_as_size(comm):
    return f"hello from rank {comm.rank} of {comm.size - 1}"


def four_ranks_for_ever(comm):
    return f"hello from rank {comm.rank} of 4"


def size_and_rank_swapped(comm):
    return f"hello from rank {comm.size} of {comm.rank}"


def says_all_numbers(comm):
    return f"hello from one of the ranks {list(range(comm.size + 1))}"


def without_a_space(comm):
    return f"hello from {comm.rank}{comm.size}"


def returns_a_number(comm):
    return comm.rank


def misspells_rank(comm):
    return f"hello from rank {comm.Rank} of {comm.size}"


def waits_for_an_answer(comm):
    if comm.size > 1:
        comm.recv(np.zeros(1), (comm.rank + 1) % comm.size)
    return f"hello from rank {comm.rank} of {comm.size}"


# -- hello: right ------------------------------------------------------------------------------------------------------


def in_other_words(comm):
    return "I am number " + str(comm.rank) + ", and we are " + str(comm.size)


def size_first(comm):
    return f"of {comm.size} ranks I am {comm.rank}"


def formatted_and_printed(comm):
    text = "Hello from rank %d/%d!" % (comm.rank, comm.size)  # noqa: UP031  an attendee may write it so
    print(text)
    return text


# -- who_runs_where: wrong ---------------------------------------------------------------------------------------------


def host_first(comm):
    return socket.gethostname(), comm.rank, os.getpid()


def parent_process(comm):
    return comm.rank, socket.gethostname(), os.getppid()


def without_the_rank(comm):
    return socket.gethostname(), os.getpid()


def localhost(comm):
    return comm.rank, "localhost", os.getpid()


def everybody_is_rank_0(comm):
    return 0, socket.gethostname(), os.getpid()


def prints_the_place(comm):
    print(comm.rank, socket.gethostname(), os.getpid())


# -- who_runs_where: right ---------------------------------------------------------------------------------------------


def as_a_list(comm):
    return [comm.rank, socket.gethostname(), os.getpid()]


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "0.1": (
        WrongAnswer(prints_only, "returns", "print shows a text, return hands it back"),
        WrongAnswer(always_rank_0, "rank", "comm.rank is different on every rank"),
        WrongAnswer(counts_from_one, "rank", "ranks count from 0"),
        WrongAnswer(last_rank_as_size, "size", "the number of ranks is 4, which is comm.size"),
        WrongAnswer(four_ranks_for_ever, "size", "the number of ranks is 1"),
        WrongAnswer(size_and_rank_swapped, "rank", "its number is 0, and 4 is how many there are"),
        WrongAnswer(says_all_numbers, "rank", "all of them said"),
        WrongAnswer(without_a_space, "rank", "which does not stand there as a number of its own"),
        WrongAnswer(returns_a_number, "returns", "a str was asked for, not int"),
        WrongAnswer(misspells_rank, "raises", "has no attribute 'Rank'"),
        WrongAnswer(waits_for_an_answer, "deadlock", "all receive first"),
    ),
    "0.2": (
        WrongAnswer(host_first, "order", "in this order an int, a str and an int"),
        WrongAnswer(parent_process, "process", "which is not the process that runs it"),
        WrongAnswer(without_the_rank, "returns", "a tuple of three was asked for"),
        WrongAnswer(localhost, "host", "said that it runs on 'localhost'"),
        WrongAnswer(everybody_is_rank_0, "rank", "Rank 1 said that it is rank 0"),
        WrongAnswer(prints_the_place, "returns", "returned nothing"),
    ),
}
RIGHT = {
    "0.1": (in_other_words, formatted_and_printed, size_first),
    "0.2": (as_a_list,),
}
