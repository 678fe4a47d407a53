"""Notebook 00: functions that run on every rank."""

import os
import re
import socket
from collections.abc import Callable

from ...comm import Results
from ...parallel import messages as reference
from ..checkers import engine_facts, in_all_cases, with_ranks
from ..ranks import on_engines, simulate
from ..record import Broken, Exercise, Passed, Runner


def check_hello(fn: Callable, runner: Runner = None) -> Passed:
    """Every rank says its own number and the number of ranks, in whatever words."""
    in_all_cases(fn, lambda comm, fn: fn(comm), ((4,), (1,), (3,)), with_ranks, check_sentences)
    facts = ["every rank says who it is, on 1, 3 and 4 simulated ranks"]
    return Passed(*facts, *engine_facts(runner, check_sentences, fn, say="{} said hello"))


def check_sentences(results: Results, where: str) -> None:
    p = len(results)
    for r, said in enumerate(results):
        if said is None:
            raise Broken(f"""returns: {where}, rank {r} returned nothing: print shows a text, return hands it
                back.""")
        if not isinstance(said, str):
            raise Broken(f"""returns: {where}, rank {r} returned {said!r}: a str was asked for, not
                {type(said).__name__}.""")
    if p > 1 and len(set(results)) == 1:
        raise Broken(f"rank: {where}, all of them said {results[0]!r}: comm.rank is different on every rank.")
    for r, said in enumerate(results):
        numbers = {int(digits) for digits in re.findall(r"\d+", said)}
        called = re.search(r"\brank\D?\D?(\d+)", said, re.IGNORECASE)
        if called and int(called[1]) == p != r and r in numbers:
            raise Broken(f"""rank: {where}, rank {r} said {said!r}: its number is {r}, and {p} is how many
                there are.""")
        if {r, p} <= numbers:
            continue
        if r in numbers:
            raise Broken(f"""size: {where}, rank {r} said {said!r}: the number of ranks is {p}, which is
                comm.size.""")
        why = "because ranks count from 0" if r + 1 in numbers else "which does not stand there as a number of its own"
        raise Broken(f"rank: {where}, rank {r} said {said!r}: its number is {r}, {why}.")


def check_who_runs_where(fn: Callable, runner: Runner = None) -> Passed:
    """(rank, host, process id), of the process that runs the rank."""
    results = simulate(4, fn, where="with 4 ranks")
    check_places(results, hosts={socket.gethostname()}, pids={os.getpid()})
    facts = [f"4 simulated ranks, all in this process, {os.getpid()}"]
    if runner is not None:
        truth, results = on_engines(runner, reference.who_runs_where), on_engines(runner, fn)
        check_places(results, {host for _, host, _ in truth}, {pid for _, _, pid in truth})
        pids = [pid for _, _, pid in results]
        if pids != [pid for _, _, pid in truth]:
            raise Broken(f"process: The engines are the processes {[pid for _, _, pid in truth]}, and you say {pids}.")
        facts.append(f"{len(pids)} engines, each a process of its own: {', '.join(map(str, pids))}")
    return Passed(*facts)


def check_places(results: Results, hosts: set[str], pids: set[int]) -> None:
    for r, place in enumerate(results):
        if place is None:
            raise Broken(f"returns: Rank {r} returned nothing: return a tuple of rank, host and process id.")
        if not isinstance(place, tuple | list) or len(place) != 3:
            raise Broken(f"""returns: Rank {r} returned {place!r}: a tuple of three was asked for, (rank, host, process
                id).""")
        rank, host, pid = place
        if not isinstance(rank, int) or not isinstance(host, str) or not isinstance(pid, int):
            kinds = ", ".join(type(part).__name__ for part in place)
            raise Broken(f"order: Rank {r} returned ({kinds}): in this order an int, a str and an int were asked for.")
        if rank != r:
            raise Broken(f"rank: Rank {r} said that it is rank {rank}.")
        if host not in hosts:
            raise Broken(f"host: Rank {r} said that it runs on {host!r}, but the host is {' or '.join(sorted(hosts))}.")
        if pid not in pids:
            raise Broken(f"process: Rank {r} gave {pid} as its process id, which is not the process that runs it.")


EXERCISES = (
    Exercise("0.1", "hello from every rank", reference.hello, 1, check_hello),
    Exercise("0.2", "who runs where", reference.who_runs_where, 1, check_who_runs_where),
)
