"""Reasons why a script hung or crashed: the first error of all ranks, collectives that differ, who waits for whom."""

from __future__ import annotations

import ast
import math
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..comm.errors import name_ranks
from .finding import Finding
from .places import COMMUNICATION
from .records import Event, RankRecord, WatchedRun, code_of, line_name

if TYPE_CHECKING:
    from .collectives import Entry
    from .places import NotedPlace, Place

CONSEQUENCE = re.compile(  # texts of exceptions that tell of another rank's end, or of a wait that was too long
    r"onnection (closed|reset|refused)|closed by peer|remote worker|imed? ?out|Broken pipe|heartbeat|DistNetworkError"
    r"|ProcessExitedException|ProcessRaisedException|Process \d+ terminated|ChildFailedError|enforce fail|preamble"
    r"|recvValue|wait_for|rank \d+ (has )?(ended|died|left)|KeyboardInterrupt"
)
SAME_SIZE = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "_allgather_base",
    "_reduce_scatter_base",
)
BACKWARD = os.path.join("torch", "autograd", "graph.py")
STILL = 3.0  # s in one call, after which an interrupted rank counts as one that waits
RULE = "A collective returns when all ranks of its group have called it"


def findings(run: WatchedRun) -> list[Finding]:
    """Return the causes for an early end of the run, the first one first."""
    differing = mismatch(run)
    causes = _errors(run)
    if differing:  # exceptions on the way are its consequences
        return [differing, *(cause for cause in causes if cause.name == "error" and _before(cause, differing))]
    return causes or [*_never_met(run), *_waiting(run)][:1]


def _before(one: Finding, other: Finding) -> bool:
    return bool(one.time_ns and other.time_ns and one.time_ns < other.time_ns)


def _errors(run: WatchedRun) -> list[Finding]:
    """Return the first error of all ranks, or of a rank that was ended by a signal."""
    # only the first one of a process: multiprocessing's own sys.exit(1) comes after it
    raised = [(event["time_ns"], rank, event) for rank in run.ranks if (event := rank.first("raised"))]
    first = sorted((row for row in raised if not _is_consequence(row[2])), key=lambda row: row[0])
    if first:
        return [_own_error(run, first)]
    if not raised and not any(code < 0 for _, _, code in run.failures):
        outside = [event for other in run.others for event in other.all("raised") if not _is_consequence(event)]
        if outside and not run.stalled:
            event = outside[0]
            return [Finding("hang", "error", f"before any rank: {_error_text(event)}", lines=_stack(event))]
    by_number = {rank.number: rank for rank in run.ranks}
    silent = [(r, code) for r, _, code in run.failures if r in by_number and not by_number[r].first("raised")]
    killed = [(r, code) for r, code in silent if code not in (-signal.SIGTERM, 0)]
    if killed and all(rank.ended for rank in run.ranks):
        text = (
            f"rank {killed[0][0]} was ended by {signal.Signals(-killed[0][1]).name} after the script was over"
            if (killed[0][1] < 0)
            else f"rank {killed[0][0]} ended with exit code {killed[0][1]}"
        )
        return [
            Finding("note", "at exit", f"{text}: torch's threads may outlive a process group that is not destroyed.")
        ]
    if killed and raised and by_number[killed[0][0]].ended:  # it has left, and Python ended in C++
        return gone(run, [rank for _, rank, _ in sorted(raised, key=lambda row: row[0])])
    if killed and not run.stalled and not run.interrupted:
        r, code = killed[0]
        if code == -signal.SIGABRT and (found := _aborted(run, by_number[r])):
            return [found]
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}, without an exception"
        place = by_number[r].place
        more = ": the kernel does that when memory is out" if code == -signal.SIGKILL else ""
        text = f"rank {r} was ended {how}{more}; it was last seen at {code_of(place)}."
        return [Finding("hang", "killed", text + _consequences(run, {r}), [r], place)]
    if raised and not run.interrupted:
        return gone(run, [rank for _, rank, _ in sorted(raised, key=lambda row: row[0])])
    return []


def _aborted(run: WatchedRun, rank: RankRecord) -> Finding | None:
    """Return the finding about a rank that gloo has ended, as a message had another size than it waited for."""
    calls = [
        function.strip("_") for name, _, function in rank.fault if name.endswith(COMMUNICATION) or BACKWARD in name
    ]
    calls = [call for call in calls if call != "wrapper"]
    if not calls:
        return None
    what = "backward" if "engine_run_backward" in calls else calls[-1]
    others = [other for other in run.ranks if other is not rank and other.entries]
    they = "; ".join(f"rank {other.number} called {_call_text(other.entries[-1])}" for other in others)
    text = f"""rank {rank.number} was ended within {what} at {code_of(rank.place)}: a message had another size than it
        waited for{f"; {they}" if they else ""}. All ranks of a group call the same collectives in the same order, with
        the same sizes and dtypes: has one of them left one out, or called it with another tensor?"""
    text += _swallowed([rank.place, *(other.entries[-1]["place"] for other in others)])
    return Finding("hang", "mismatch", text, [rank.number], rank.place)


def _swallowed(places: list[NotedPlace | None]) -> str:
    """Return a sentence if a function with one of these lines catches exceptions and goes on; else "".

    A rank that catches an exception which others do not have leaves out what they call.
    """
    for file, line in {(place[0], place[1]) for place in places if place}:
        try:
            tree = ast.parse(Path(file).read_text())
        except (OSError, SyntaxError):
            continue
        around: ast.AST = tree
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
                around = node
        for node in ast.walk(around):
            if isinstance(node, ast.ExceptHandler) and not any(isinstance(x, ast.Raise) for x in ast.walk(node)):
                kind = ast.unparse(node.type) if node.type else ""
                where = f"{Path(file).name}:{node.lineno}, `except {kind}`".replace("except `", "except`")
                return f" A rank that catches an exception there ({where}) leaves out what the others call."
    return ""


def _own_error(run: WatchedRun, first: list[tuple[int, RankRecord, Event]]) -> Finding:
    """Return the finding about an exception that a rank raised by itself."""
    time_ns, rank, event = first[0]
    same = sorted({r.number for _, r, e in first if (e["kind"], e["places"]) == (event["kind"], event["places"])})
    text = f"{name_ranks(same)} raised {_error_text(event)}"
    if "Expected to have finished reduction" in event["text"]:
        text += """ In the step before, DDP waited for gradients of parameters that the loss does not depend on: use
            them, take them out, or DDP(..., find_unused_parameters=True)."""
    if "process group has not been initialized" in event["text"]:
        text += " Every rank calls dist.init_process_group first."
    text += _consequences(run, set(same))
    return Finding("hang", "error", text, same, _place_of(event), _stack(event), time_ns)


def _error_text(event: Event) -> str:
    """Return "KeyError at train.py:12, `x["y"]`: 'y'."."""
    text = event["text"].strip().split("\n")[0][:300].rstrip(".")
    where = f" at {code_of(_place_of(event))}" if event["places"] else ""
    remedy = " How many ranks? hpdl watch --nproc-per-node 2 ..." if "RANK expected" in text else ""
    return f"{event['kind']}{where}{': ' if text else ''}{text}.{remedy}"


def _place_of(event: Event) -> Place | None:
    return (event["places"][-1][0], event["places"][-1][1], event["places"][-1][2]) if event["places"] else None


def _stack(event: Event) -> list[str]:
    """Return the author's lines that lead to an exception."""
    return [code_of(place) for place in event["places"]] if len(event["places"]) > 1 else []


def _is_consequence(event: Event) -> bool:
    return bool(CONSEQUENCE.search(f"{event['kind']}: {event['text']}"))


def _consequences(run: WatchedRun, own: set[int]) -> str:
    """Return a sentence about the other ranks."""
    others = [rank for rank in run.ranks if rank.number not in own and not rank.ended]
    if not others:
        return ""
    where = {line_name(rank.place) for rank in others if rank.place}
    at = f" at {where.pop()}" if len(where) == 1 else ""
    numbers = name_ranks([rank.number for rank in others])
    return f" What {numbers} {say(others, 'says', 'say')}{at} is a consequence."


def say(ranks: list[RankRecord], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def gone(run: WatchedRun, waited: list[RankRecord]) -> list[Finding]:
    """Return the finding about ranks that have ended while others, `waited`, still needed them."""
    rank = waited[0]
    left = [other for other in run.ranks if other.ended and other not in waited]
    event = rank.first("raised")
    if re.search("imed? ?out", event["text"]) and not left:
        return [*_waiting(run)] or [Finding("hang", "timeout", f"rank {rank.number} raised {_error_text(event)}")]
    if not left:
        return [Finding("hang", "error", f"rank {rank.number} raised {_error_text(event)}", [rank.number])]
    place, what = _place_of(event), _needed(rank)
    taken = f"; {_counts(left, waited)}" if _counts(left, waited) else ""
    text = f"""{name_ranks([r.number for r in left])} {say(left, "has", "have")} come to the end of the script, and
        rank {rank.number} still needs {say(left, "it", "them")} {what}at {code_of(place)}{taken}. {RULE}: as many steps
        on each rank (the same number of batches: drop_last=True, or DDP's join()), and nothing collective under `if
        rank == 0`."""
    return [Finding("hang", "left", text, [r.number for r in left], place)]


def _counts(left: list[RankRecord], waited: list[RankRecord]) -> str:
    """Return how many steps ranks have taken, if they differ."""
    took = {rank.number: rank.step_count for rank in [*left, *waited]}
    if len(set(took.values())) < 2:
        return ""
    return ", ".join(f"rank {number} took {n} steps" for number, n in sorted(took.items()))


def _needed(rank: RankRecord) -> str:
    pending = rank.pending
    return f"in {pending[0]['op']} " if pending else ""


# -- collectives that differ ----------------------------------------------------------------------------------------


def _members(run: WatchedRun) -> dict[tuple[str, tuple[int, ...]], list[RankRecord]]:
    """Return the ranks of each group: {(its name, its ranks): its ranks that are seen}."""
    found: dict[tuple[str, tuple[int, ...]], list[RankRecord]] = {}
    for rank in run.ranks:
        known = {name: tuple(ranks) for event in rank.all("groups") for name, ranks in event["groups"].items()}
        for name in {entry["group"] for entry in rank.entries if not entry.get("p2p")}:
            found.setdefault((name, known.get(name, ())), []).append(rank)
    for name, ranks in [key for key in found if not key[1]]:  # a rank that was ended has not noted its groups
        whole = next((key for key in found if key[0] == name and key[1]), None)
        if whole:
            found[whole] += [rank for rank in found.pop((name, ranks)) if rank.number in whole[1]]
    return found


def _numbered(rank: RankRecord, group: str) -> dict[int, Entry]:
    return {entry["seq"]: entry for entry in rank.entries if entry["group"] == group and not entry.get("p2p")}


def mismatch(run: WatchedRun) -> Finding | None:
    """Return the finding about the first collective of a group that is not the same on all its ranks."""
    found = []
    for (group, _), ranks in _members(run).items():
        table = {rank.number: _numbered(rank, group) for rank in ranks}
        common = set.intersection(*(set(entries) for entries in table.values())) if len(table) > 1 else set()
        for number in sorted(common):
            called = {r: entries[number] for r, entries in table.items()}
            r, one = next(iter(called.items()))
            odd = next((q for q, entry in called.items() if _differ(one, entry)), None)
            if odd is not None:
                found.append((max(entry["time_ns"] for entry in called.values()), r, odd, one, called[odd]))
                break
    if not found:
        return None
    time_ns, r, odd, one, other = min(found, key=lambda row: row[0])
    what = "another operation" if one["op"] != other["op"] else _differ(one, other)
    text = f"""rank {r} calls {_call_text(one)} and rank {odd} calls {_call_text(other)} as collective {one["seq"]} of
        the same group: {what}. All ranks of a group call the same collectives in the same order, with the same sizes
        and dtypes."""
    text += _swallowed([one["place"], other["place"]])
    return Finding("hang", "mismatch", text, [r, odd], other["place"] or one["place"], time_ns=time_ns)


def _differ(one: Entry, other: Entry) -> str:
    """Return the difference between two entries of one collective, "" if there is none that matters."""
    if one["op"] != other["op"]:
        return "operation"
    if one["op"] not in SAME_SIZE:
        return ""
    sizes = [[math.prod(size) for size in entry["sizes"]] for entry in (one, other)]
    if sizes[0] != sizes[1] and all(sizes):
        return "other sizes"
    return "other dtypes" if one["dtypes"] != other["dtypes"] and all(sizes) else ""


def _call_text(entry: Entry) -> str:
    sizes = ", ".join("x".join(map(str, size)) or "a number" for size in entry["sizes"][:2])
    dtype = entry["dtypes"][0] if entry["dtypes"] else ""
    return f"{entry['op']} of {sizes} {dtype} ({code_of(entry['place'])})".replace(" of  ", " ")


# -- who waits for whom ---------------------------------------------------------------------------------------------


def _never_met(run: WatchedRun) -> list[Finding]:
    """Return the finding about ranks that never came to init_process_group while others waited there."""
    waiting_there = [rank for rank in run.ranks if rank.first("meets") and not rank.first("met")]
    if not waiting_there or not (run.stalled or run.interrupted or waiting_there[0].first("raised")):
        return []
    others = [rank for rank in run.ranks if not rank.first("meets")]
    place = waiting_there[0].first("meets")["place"]
    if others:
        they = "; ".join(f"rank {rank.number} {_state(rank)}" for rank in others)
        text = f"""{name_ranks([r.number for r in waiting_there])} {say(waiting_there, "waits", "wait")} at
            {code_of(place)}, where all ranks meet; {they}. Every rank has to call it."""
        return [Finding("hang", "never met", text, [r.number for r in others], place)]
    numbers = name_ranks([r.number for r in waiting_there])
    text = f"""{numbers} {say(waiting_there, "waits", "wait")} at {code_of(place)} for ranks that do not exist, or that
        look for them at another address: is world_size the number of processes that were started, and are MASTER_ADDR
        and MASTER_PORT the same everywhere?"""
    return [Finding("hang", "never met", text, [r.number for r in waiting_there], place)]


def _state(rank: RankRecord) -> str:
    """Return the state of a rank, with its line: "waits in recv from rank 1 (train.py:12, `...`)"."""
    if rank.first("raised"):
        return f"raised {_error_text(rank.first('raised'))}"
    if rank.ended:
        return "has come to the end of the script"
    call, pending = rank.now.get("call"), rank.pending
    if pending:
        return f"waits in {pending[0]['op']} ({code_of(pending[0]['place'] or rank.place)})"
    if call:
        peer = f" {'to' if 'send' in call['name'] else 'from'} rank {call['peer']}" if "peer" in call else ""
        return f"waits in {call['name']}{peer} ({code_of(rank.place)})"
    return f"is at {code_of(rank.place)}" if rank.place else "was not seen in the script"


def _waiting(run: WatchedRun) -> list[Finding]:
    """Return the finding about ranks that wait for each other."""
    raised = any(rank.first("raised") for rank in run.ranks)
    if not (run.stalled or run.interrupted or raised):
        return []
    waits = [rank for rank in run.ranks if not rank.ended and (rank.pending or rank.now.get("call"))]
    if run.interrupted and not run.stalled and not raised:  # it may just be in a call, and go on
        waits = [rank for rank in waits if rank.still_s > STILL]
    if not waits:
        return []
    if run.stalled and all(rank.silent and rank.first("groups") for rank in waits):
        numbers = [rank.number for rank in waits]
        text = f"""{name_ranks(numbers)} {say(waits, "hangs", "hang")} in destroy_process_group or after it, in torch
            itself, when all was done: a thread of gloo and the end of Python can wait for each other. It comes and
            goes."""
        return [Finding("hang", "at exit", text, numbers, waits[0].place)]
    missing = [(rank, _lacking(run, rank)) for rank in waits]
    for rank, absent in missing:
        if absent:
            they = "; ".join(f"rank {other.number} {_state(other)}" for other in absent)
            same = [r.number for r, lacks in missing if lacks == absent]
            rule = f"{RULE}: none may leave one out, or call another one first."
            if not rank.pending and "peer" in (rank.now.get("call") or {}):
                rule = "A message is sent and received: each send needs its recv, in the same order, with the same tag."
            text = f"""{name_ranks(same)} {"waits" if len(same) == 1 else "wait"} {_state(rank).removeprefix("waits ")}
                for {name_ranks([r.number for r in absent])}: {they}. {rule}"""
            if note := _counts(absent, [rank]):
                text += f" {note[0].upper()}{note[1:]}."
            place = rank.pending[0]["place"] if rank.pending else rank.place
            text += _swallowed([place, *(other.place for other in absent)])
            return [Finding("hang", "deadlock", text, same, place)]
    they = "; ".join(f"rank {rank.number} {_state(rank)}" for rank in run.ranks)
    return [Finding("hang", "deadlock", f"{they}. None of them can go on.", [r.number for r in waits], waits[0].place)]


def _lacking(run: WatchedRun, rank: RankRecord) -> list[RankRecord]:
    """Return the ranks that have not called what `rank` waits in."""
    for entry in rank.pending:
        for (group, _), ranks in _members(run).items():
            if group == entry["group"] and rank in ranks:
                found = [r for r in ranks if entry["seq"] not in _numbered(r, group)]
                outside = [r for r in _everybody(run, group) if r not in ranks]
                return found + outside
    call = rank.now.get("call") or {}
    if "peer" in call:
        return [r for r in run.ranks if r.number == call["peer"]]
    return []


def _everybody(run: WatchedRun, group: str) -> Iterable[RankRecord]:
    """Return the ranks of a group as far as they are known; of the default group all."""
    known = {r for rank in run.ranks for e in rank.all("groups") for r in e["groups"].get(group, ())}
    return [rank for rank in run.ranks if rank.number in known or group == "0"]
