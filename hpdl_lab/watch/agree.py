"""Differences between a run and one rank: in weights, gradients, examples, evaluation, files.

Each judge takes the Run and its Strategy, and yields findings. In doubt it yields none: a false alarm is worse.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from ..comm.errors import name_ranks
from ..units import counted
from .finding import Finding
from .records import Event, RankRecord, WatchedRun, code_of, line_name
from .strategy import ObservedStrategy

if TYPE_CHECKING:
    from .collectives import Entry
    from .places import NotedPlace

EXACT = 1e-3  # relative, of the ratio of gradients
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?:[eE][-+]?\d+)?")
PROGRESS = re.compile(r"\d(it/s|s/it)|\d%\|")  # of tqdm
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def findings(run: WatchedRun) -> list[Finding]:
    """Return the faults, and notes about what may be meant so."""
    if run.size < 2 or not any(rank.step_count for rank in run.ranks):
        return []
    strategy = ObservedStrategy(run)
    judges = (
        _without_group,
        _not_averaged,
        weights,
        _scale,
        optimizer,
        examples,
        _epochs,
        uneven,
        evaluation,
        _files,
        notes,
    )
    found = [finding for judge in judges for finding in judge(run, strategy)]
    names = {finding.name for finding in found}
    if names & {"no process group", "not averaged"}:  # the others follow from it
        found = [finding for finding in found if finding.name not in ("weights", "batchnorm", "lr")]
    return found


def _without_group(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find ranks that never asked for a process group."""
    if not any(rank.first("meets") or rank.first("met") for rank in run.ranks):
        yield Finding(
            "wrong",
            "no process group",
            f"""each of the {run.size} ranks trains by itself: without dist.init_process_group none of them is connected
            to the others.""",
            place=_steps_at(run),
        )


def _steps_at(run: WatchedRun) -> NotedPlace | None:
    """Return the line at which rank 0 calls the step of its optimizer."""
    return run.ranks[0].first("optimizer").get("place")


def _not_averaged(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find gradients that are never averaged."""
    steps = min(rank.step_count for rank in run.ranks)
    if steps < 2 or not any(rank.first("met") for rank in run.ranks) or strategy.tensor_parallel or strategy.pipeline:
        return
    (before, _), odd = _differing(run, strategy)
    if not strategy.silent or strategy.fsdp or not odd or before < 0 and not strategy.ddp:
        return  # models that were never the same may be meant so
    inner = next((event for rank in run.ranks for event in rank.all("model") if event["inside"]), {})
    why, place = "between the first step and the last nothing is sent that could be gradients or weights.", None
    if strategy.ddp and inner:
        place = inner.get("place")
        why += f""" The forward at {code_of(place)} calls the model inside of DDP: call the DDP object itself, whose
            forward prepares the averaging."""
    elif strategy.ddp:
        why += " DDP averages in backward, but not within no_sync(): the last backward before a step belongs outside."
    else:
        why += (
            " DDP(model) averages them in backward; by hand it is one all_reduce of every p.grad, divided by the ranks."
        )
    text = f"the gradients of {run.size} ranks are never averaged: {why}"
    yield Finding("wrong", "not averaged", text, place=place or _steps_at(run))


def _replicated(strategy: ObservedStrategy, run: WatchedRun) -> set[str]:
    """Return the names of parameters that every rank holds whole."""
    rows = [m.get("parameters", {}) for m in strategy.models]
    common = set.intersection(*(set(row) for row in rows)) if rows else set()
    return {
        n for n in common if len({row[n]["held"] for row in rows}) == 1 and not any("mesh" in row[n] for row in rows)
    }


def _differing(run: WatchedRun, strategy: ObservedStrategy) -> tuple[tuple[int, int], list[str]]:
    """Return since when parameters differ between ranks: ((last step with equal ones or -1, first with others), names).

    No names: they never do.
    """
    names = _replicated(strategy, run)
    table = [{event["step"]: event for event in rank.all("weights")} for rank in run.ranks]
    before = -1
    common = sorted(set.intersection(*(set(row) for row in table)))
    for step in common:
        rows = [row[step]["hashes"] for row in table]
        odd = sorted(n for n in names if len({row[n] for row in rows if n in row}) > 1)
        if odd:
            later = [[row[other]["hashes"] for row in table] for other in common if other > step]
            if any(len({row[n] for row in rows if n in row}) == 1 for rows in later for n in odd):
                return (before, before), []  # ranks that average their weights every few steps
            return (before, step), odd
        before = step
    return (before, before), []


def weights(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find weights that should be the same on all ranks, and are not."""
    if not strategy.data_parallel or strategy.fsdp or not _in_step(run):
        return
    (before, step), odd = _differing(run, strategy)
    if odd:
        of = len(_replicated(strategy, run))
        place = _steps_at(run) if before >= 0 else strategy.models[0].get("place")  # of the first call of the model
        yield Finding("wrong", "weights", _weights_text(run, strategy, odd, of, before, step), place=place)
        return
    first = [rank.first("weights") for rank in run.ranks]
    if strategy.by_hand and all(first):
        rows = [event["buffers"] for event in first]
        odd = [name for name in rows[0] if len({row.get(name) for row in rows}) > 1 and not name.endswith(RUNNING)]
        if odd:
            yield Finding(
                "wrong",
                "weights",
                f"""the buffer {odd[0]} is not the same on all ranks in step {first[0]["step"]}: DDP broadcasts
                buffers of rank 0, by hand it is dist.broadcast(buffer, 0) for each of model.buffers().""",
                place=strategy.models[0].get("place"),
            )


def _in_step(run: WatchedRun) -> bool:
    """Return True if all ranks take as many steps: with DDP's join() they need not, and have no step in common."""
    return len({rank.step_count for rank in run.ranks}) == 1 or any(not rank.ended for rank in run.ranks)


def _weights_text(run: WatchedRun, strategy: ObservedStrategy, odd: list[str], of: int, before: int, step: int) -> str:
    which = f"the parameters {odd[0]} and {len(odd) - 1} more of {of}" if odd[1:] else f"the parameter {odd[0]} of {of}"
    verb = "are" if odd[1:] else "is"
    if before < 0:
        return f"""{which} {verb} not the same on all ranks before the first step: the ranks begin with different
            initial weights, and equal gradients keep them apart. dist.broadcast(p.data, 0) for each parameter, or the
            same seed before the model is made."""
    since = f"since step {before}" if step == before + 1 else f"since one of the steps {before} to {step - 1}"
    late = {name for rank in run.ranks for event in rank.all("weights") for name in event.get("late", ())}
    why = "their gradients are not averaged: which collective leaves them out?"
    if late & set(odd):
        why = f"""requires_grad of {sorted(late & set(odd))[0]} was set after DDP was made, which averages only what
            needed a gradient then: set it before."""
    elif len(odd) == of:
        why = "all of them differ: the gradients, or the steps of the optimizers, are not the same on all ranks."
    return f"{which} {verb} not the same on all ranks {since}: {why}"


def _scale(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find gradients that are added and not divided, or divided twice, by linear projections before and after."""
    if not strategy.data_parallel or strategy.fsdp:
        return
    ratios = []
    for step in (0, 1, 2):
        if (ratio := _ratio_of(run, step)) is not None:
            ratios.append(ratio)
    if len(ratios) < 2 or not all(abs(ratio - ratios[0]) < EXACT * ratios[0] for ratio in ratios):
        return
    p, ratio = run.size, ratios[0]
    losses = [rank.first("loss") for rank in run.ranks]
    backwards = max((event["backwards"] for event in run.ranks[0].all("local")), default=1)
    plain = all(loss.get("mean") and loss.get("by") is None for loss in losses)
    if abs(ratio - p) < EXACT * p and plain and backwards == 1:
        yield Finding(
            "wrong",
            "sum",
            f"""the gradients with which the optimizer steps are {p} times the mean over the {p} ranks: they are added,
            and not divided. Adam nearly hides it; SGD takes steps {p} times as long. p.grad /= {p}.""",
            place=strategy.adding,
        )
    some = any(event["examples"] == p for event in run.ranks[0].steps[:3])  # then it may be divided by these
    divided = all(loss.get("by") == p for loss in losses) and abs(ratio - 1) < EXACT and not some
    if divided and backwards == 1:
        how = "DDP averages" if strategy.ddp else "they are averaged as well"
        yield Finding(
            "wrong",
            "twice",
            f"""the loss is divided by {p} before backward, and {how}: the gradients with which the optimizer steps are
            1/{p} of the mean over the {p} ranks. Adam nearly hides it, SGD takes steps {p} times too short.""",
            place=losses[0].get("place"),
        )
    if abs(ratio - 1 / p) < EXACT / p and backwards == 1:
        yield Finding(
            "wrong",
            "twice",
            f"""the gradients with which the optimizer steps are 1/{p} of the mean over the {p} ranks: they are divided
            twice. DDP has divided already; Adam nearly hides it, SGD takes steps {p} times too short.""",
            place=_steps_at(run),
        )


def _ratio_of(run: WatchedRun, step: int) -> float | None:
    """Return the one factor between the gradients of a step and the mean after backward; None if there is none."""
    local = [[e for e in rank.all("local") if e["step"] == step][-1:] for rank in run.ranks]
    reduced = next((e for e in run.ranks[0].all("reduced") if e["step"] == step), None)
    if reduced is None or not all(local):
        return None
    found = []
    for name, value in reduced["projections"].items():
        parts = [rows[0]["projections"].get(name) for rows in local]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            continue
        mean, size = sum(known) / len(known), max(map(abs, known))
        if abs(mean) > 1e-3 * size and size > 0:  # otherwise rounding decides
            found.append(value / mean)
    if len(found) < 1:
        return None
    middle = median(found)
    return middle if all(abs(ratio - middle) <= EXACT * abs(middle) for ratio in found) and middle > 0 else None


def optimizer(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find an optimizer whose parameters do not belong to the model any more."""
    for rank in run.ranks:
        event = rank.first("optimizer")
        if event and event["stale"] > MOSTLY * event["parameters"] and (strategy.fsdp or strategy.meshes):
            yield Finding(
                "wrong",
                "optimizer",
                f"""{counted(event["stale"], "parameter")} of the {event["kind"]} of rank {rank.number} are not
                parameters of the model, and never get a gradient: sharding puts new ones in their place. Shard the
                model first (fully_shard, parallelize_module), then make the optimizer.""",
                [rank.number],
                event.get("place"),
            )
            return


MOSTLY = 0.5


# -- examples -------------------------------------------------------------------------------------------------------


def _rows_by_step(rank: RankRecord) -> dict[int, list[int]]:
    """Return {step: fingerprints of the examples it trained on}."""
    found: dict[int, list[int]] = defaultdict(list)
    for event in rank.all("forward"):
        if event["training"]:
            found[event["step"]] += event["rows"]
    return found


def _epochs_of(rank: RankRecord) -> list[Event]:
    """Return the passes over data loaders that were trained on, with "index": the examples in the whole data set."""
    read: dict[int, list[int]] = defaultdict(list)
    for event in rank.all("indices"):
        read[event["number"]] += event["index"]
    passes = [event for event in rank.all("epoch") if event["training"] and event["number"] in read]
    found = []
    for event in passes:
        later = [other["step"] for other in rank.all("epoch") if other["number"] > event["number"]]
        end = min(later, default=rank.step_count)
        if end > event["step"]:
            found.append({**event, "index": _mapped(event, read[event["number"]]), "steps": end - event["step"]})
    return found


def _mapped(event: Event, index: list[int]) -> list[int]:
    """Return indices into the data set from which the loader's is cut."""
    rows = event["rows"]
    if rows is None:
        return index
    if rows[0] == -1:
        return [rows[2 + i] for i in index]
    return [rows[0] + rows[1] * i for i in index]


def _whole_length(event: Event) -> int:
    rows = event["rows"]
    return int(event["length"] if rows is None else rows[1] if rows[0] == -1 else rows[2])


def examples(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find examples that several ranks read, or none."""
    if not (strategy.data_parallel or strategy.silent) or strategy.pipeline or strategy.tensor_parallel:
        return
    per_rank = [_epochs_of(rank) for rank in run.ranks]
    if all(per_rank):
        yield from _read_in_an_epoch(run, [passes[0] for passes in per_rank])
        return
    yield from _shared_shares(run)
    tables = [_rows_by_step(rank) for rank in run.ranks]
    steps = [step for step in tables[0] if all(step in table for table in tables)]
    same = [s for s in steps if all(table[s] and Counter(table[s]) == Counter(tables[0][s]) for table in tables)]
    news = len({row for step in same for row in tables[0][step]}) > sum(len(tables[0][s]) for s in same) / 2
    if len(same) >= 3 and len(same) == len(steps) and news:
        first = next(e for e in run.ranks[0].all("forward") if e["training"])
        yield Finding(
            "note",  # a script may draw examples that mean nothing
            "same data",
            f"""in each of {len(same)} steps all {run.size} ranks train on the same {len(tables[0][same[0]])} examples,
            so each does the work of one rank. A DistributedSampler, or a seed that depends on the rank, gives every
            rank its own.""",
            place=first["place"],
        )


def _share_of(rank: RankRecord) -> set[int]:
    """Return the examples that a rank goes through again and again, without a data loader; empty if it does not.

    Examples drawn at random repeat one by one; in a share that is shuffled none comes again before all have come.
    """
    rows = [row for event in rank.all("forward") if event["training"] for row in event["rows"]]
    seen: set[int] = set()
    for row in rows:
        if row in seen:
            break
        seen.add(row)
    n = len(seen)
    return seen if n > 1 and len(rows) >= 2 * n and set(rows[n : 2 * n]) == seen else set()


def _shared_shares(run: WatchedRun) -> Iterator[Finding]:
    """Find shares of ranks that have examples in common, if each rank goes through its own again and again."""
    shares = [_share_of(rank) for rank in run.ranks]
    if not all(shares) or all(share == shares[0] for share in shares):
        return
    many = Counter(row for share in shares for row in share)
    repeated = sum(n > 1 for n in many.values())
    if repeated > run.size + 0.01 * len(many):
        place = next(event["place"] for event in run.ranks[0].all("forward") if event["training"])
        yield Finding(
            "wrong",
            "overlap",
            f"""{repeated:,} of the {len(many):,} examples that are read at {code_of(place)} are in the shares of
            several ranks, so that they count more than once: where does the share of each rank begin and end?""",
            place=place,
        )


def _read_in_an_epoch(run: WatchedRun, passes: list[Event]) -> Iterator[Finding]:
    """Find examples that ranks share, or none reads, in their first epoch."""
    length, place = _whole_length(passes[0]), passes[0]["place"]
    if len({_whole_length(event) for event in passes}) > 1 or length <= 0:
        return
    if all(event["rows"] == passes[0]["rows"] for event in passes):  # one data set for all, wherever it is cut from
        length = passes[0]["length"]
    elif all(event["rows"][0] >= 0 for event in passes):  # shares: the first begins it, and the last ends it
        read = [i for event in passes for i in event["index"]]
        length = max(read) - min(read) + 1
    known = passes[0]["rows"] is not None or all(event["length"] == length for event in passes)
    if not known or not _content_agrees(run, passes):
        return
    sets = [set(event["index"]) for event in passes]
    many = Counter(i for one in sets for i in one)
    batch = max(event["batch"] or 1 for event in passes)
    plain = passes[0]["sampler"] == "DistributedSampler" and not passes[0]["drop_last"]
    slack = run.size * (1 if plain else batch)  # what fills up the last batch
    if any(len(set(event["index"])) + slack < len(event["index"]) for event in passes):
        return  # drawn with replacement
    repeated = sum(n > 1 for n in many.values())
    at = code_of(place)
    replicas = {event["replicas"] for event in passes}
    if all(event["index"] == passes[0]["index"] for event in passes) and sets[0]:
        yield Finding(
            "wrong",
            "same data",
            f"""all {run.size} ranks read the same {len(sets[0]):,} examples in the same order at {at}, so each does the
            work of one rank, and nothing is gained. DataLoader(..., sampler=DistributedSampler(data)) gives every
            rank its own.""",
            place=place,
        )
    elif repeated > slack + 0.01 * length:
        counts = (
            f" The sampler counts {replicas.pop()} replicas." if len(replicas) == 1 and None not in replicas else ""
        )
        apart = any(event["rows"] != passes[0]["rows"] for event in passes)
        none = 0 if apart else length - len(many)
        also = f", and {none:,} are read by none" if none > slack else ""
        remedy = (
            "A DistributedSampler with the rank and the number of ranks of this run gives each example to one rank."
        )
        if apart and all(event["sampler"] == "DistributedSampler" for event in passes):
            remedy = """The ranks share out data sets of their own: a random_split needs the same seed on all of them,
                generator=torch.Generator().manual_seed(0)."""
        yield Finding(
            "wrong",
            "overlap",
            f"""in an epoch at {at} {repeated:,} of {length:,} examples are read by several ranks{also}.{counts}
            {remedy}""",
            place=place,
        )
    elif length - len(many) > slack + 0.01 * length and _complete(passes):
        yield Finding(
            "wrong",
            "unread",
            f"""in an epoch at {at} {length - len(many):,} of {length:,} examples are read by no rank: do the shares of
            all ranks together make the whole?""",
            place=place,
        )


def _complete(passes: list[Event]) -> bool:
    """Return True if the loaders were read to their ends: a loop that breaks leaves out what it wants."""
    for event in passes:
        share = event["length"] if event["replicas"] is None else math.ceil(event["length"] / event["replicas"])
        if len(event["index"]) < share - (event["batch"] or 1):
            return False
    return True


def _content_agrees(run: WatchedRun, passes: list[Event]) -> bool:
    """Return True if the same index means the same example on all ranks, as far as fingerprints go.

    Data sets that ranks have cut by themselves have the same indices, and other examples.
    """
    if passes[0]["rows"] is not None:
        return True
    first = []
    for rank, event in zip(run.ranks, passes, strict=True):
        seen = next((e for e in rank.all("forward") if e["training"] and e["step"] >= event["step"]), None)
        if seen is None or not seen["rows"]:
            return False
        first.append(dict(zip(event["index"], seen["rows"], strict=False)))
    common = set(first[0]).intersection(*first[1:])
    if common:
        return any(all(row[i] == first[0][i] for row in first) for i in common)
    return passes[0]["replicas"] is not None  # nothing to compare: a sampler has shared out one data set


def _epochs(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find the same order in every epoch."""
    for rank in run.ranks[:1]:
        by_place: dict[str, list[Event]] = defaultdict(list)
        for event in _epochs_of(rank):
            by_place[code_of(event["place"])].append(event)
        for at, passes in by_place.items():
            shuffles = passes[0]["sampler"] == "DistributedSampler" and passes[0]["shuffle"]
            same = len(passes) > 1 and all(e["index"] == passes[0]["index"] for e in passes[1:])
            if shuffles and same and len(passes[0]["index"]) > 2:
                yield Finding(
                    "wrong",
                    "epoch",
                    f"""{len(passes)} epochs at {at} read their examples in the same order: a DistributedSampler
                    shuffles anew only if it knows the epoch, sampler.set_epoch(epoch).""",
                    place=passes[0]["place"],
                )


def uneven(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find ranks that take different numbers of examples in a step, whose means are averaged without weights."""
    if not strategy.data_parallel or not all(rank.first("loss").get("mean") for rank in run.ranks) or not _in_step(run):
        return
    counts: list[dict[int, int]] = [defaultdict(int) for _ in run.ranks]
    for table, rank in zip(counts, run.ranks, strict=True):
        for event in rank.steps:
            table[event["step"]] = event["examples"]
    usual = {Counter(table.values()).most_common(1)[0] for table in counts if table}
    if len({size for size, _ in usual}) != 1 or any(2 * n < len(counts[0]) for _, n in usual):
        return  # the first dimension does not count examples
    for step in range(min(rank.step_count for rank in run.ranks)):
        sizes = [table.get(step, 0) for table in counts]
        if len(set(sizes)) > 1 and min(sizes) > 0:
            yield Finding(
                "wrong",
                "uneven",
                f"""in step {step} the ranks take {" + ".join(map(str, sizes))} examples, and their gradients are
                averaged as if they were equally many: a mean of means is not the mean of all. drop_last=True, or
                weigh each rank's loss by its examples.""",
                place=run.ranks[0].first("epoch").get("place") or _steps_at(run),
            )
            return


def evaluation(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find an evaluation whose printed number is about one rank's share."""
    if not strategy.data_parallel:
        return
    rank = run.ranks[0]
    for event in rank.all("epoch"):
        began = event["time_ns"]
        later = min((e["time_ns"] for e in rank.all("epoch") if e["time_ns"] > began), default=math.inf)
        trains = any(began < step["till"] < later for step in rank.steps)
        if trains or event["sampler"] != "DistributedSampler" or (event["replicas"] or 1) < 2:
            continue
        trained = [e["time_ns"] for e in rank.all("forward") if e["training"] and e["time_ns"] > began]
        end = min(trained, default=math.inf)
        printed = [e for e in rank.all("prints") if began < e["time_ns"] < end and NUMBER.search(e["text"])]
        printed = [e for e in printed if not PROGRESS.search(e["text"])]
        own = [e for e in rank.all("forward") if not e["training"] and began < e["time_ns"] < end]
        if not printed or not own or not rank.entries:
            continue
        last = printed[-1]
        places = [e["place"] for other in run.ranks[1:] for e in other.all("prints") if began < e["time_ns"] < end]
        sent = rank.between(began, int(last["time_ns"]))
        if last["place"] in places or any(e["op"] != "barrier" and not _buffer_sent(e, own) for e in sent):
            continue  # each rank prints its own, or something was added
        share = math.ceil(event["length"] / event["replicas"])
        yield Finding(
            "wrong",
            "evaluation",
            f"""rank {rank.number} prints `{last["text"].strip()[:60]}` at {code_of(last["place"])} after
            it has evaluated its own {share:,} of {event["length"]:,} examples, and nothing was added over ranks in
            between: the number is of one share. all_reduce the sums and the counts, then divide.""",
            [rank.number],
            last["place"],
        )
        return


def _buffer_sent(entry: Entry, forwards: list[Event]) -> bool:
    """Return True if a broadcast is DDP's own, of buffers at the beginning of a forward."""
    return bool(entry["op"] == "broadcast" and entry["place"] in [event["place"] for event in forwards])


def _files(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find files that several ranks write."""
    writers: dict[str, dict[int, Event]] = defaultdict(dict)
    appended: dict[str, set[int]] = defaultdict(set)
    for rank in run.ranks:
        for event in rank.all("writes"):
            if event["append"]:
                appended[event["path"]].add(rank.number)
            else:
                writers[event["path"]].setdefault(rank.number, event)
    for path, events in writers.items():
        if len(events) > 1 and len(appended[path]) != 1:  # all may empty a log to which one of them appends
            place = next(iter(events.values()))["place"]
            yield Finding(
                "wrong",
                "file",
                f"""{name_ranks(sorted(events))} write the same file, {path.rpartition("/")[2]}, at {code_of(place)}:
                what is left in it is anybody's guess. Write `if rank == 0:` before it, and gather what is sharded
                first.""",
                sorted(events),
                place,
            )
            return


# -- notes ----------------------------------------------------------------------------------------------------------


def notes(run: WatchedRun, strategy: ObservedStrategy) -> Iterator[Finding]:
    """Find what may be meant so, and often is not."""
    seen = [[e for e in rank.all("forward") if e["training"] and e.get("rng") is not None] for rank in run.ranks]
    states = [{event["rng"] for event in events} for events in seen]
    dropout = strategy.models[0].get("dropout") and all(states)
    if dropout and strategy.tensor_parallel and not strategy.fsdp and any(state != states[0] for state in states):
        yield Finding(
            "note",
            "dropout",
            f"""the {run.size} ranks that share each layer have different random states in forward, so dropout leaves
            out other numbers of the same activations on each: the same torch.manual_seed(seed) on all of them, unless
            the activations are sharded too.""",
        )
    if not strategy.data_parallel:
        return
    yield from _loss_of_a_shard(run)
    yield from _same_lines(run)
    kinds = [kind for kind in strategy.models[0].get("batchnorm", ()) if kind != "SyncBatchNorm"]
    batch = next((e["count"] for e in run.ranks[0].all("forward") if e["training"]), 0)  # of a forward
    if kinds:
        yield Finding(
            "note",
            "batchnorm",
            f"""{counted(len(kinds), kinds[0])} normalize over the {batch} examples of each rank, not over the
            {batch * run.size} of a step, and the running statistics that are saved belong to one rank.
            nn.SyncBatchNorm.convert_sync_batchnorm(model) takes all.""",
        )
    if dropout and all(state == states[0] for state in states):
        yield Finding(
            "note",
            "dropout",
            f"""all ranks have the same random state in forward, so dropout leaves out the same numbers on all
            {run.size}: torch.manual_seed(seed + rank) after the model is made.""",
        )
    rate = max((event["rate"] for event in run.ranks[0].all("optimizer")), default=0.0)
    batch = next((event["examples"] for event in run.ranks[0].steps[:1]), 0)  # of all forwards of a step
    if rate and batch:
        yield Finding(
            "note",
            "lr",
            f"""a step takes {run.size} x {batch} = {run.size * batch} examples, with lr {rate:g}: one rank
            with this lr takes {batch}. A batch {run.size} times as large is another training: lr x {run.size} with a
            warmup is the usual start, or {batch} / {run.size} examples on each rank.""",
        )


def _loss_of_a_shard(run: WatchedRun) -> Iterator[Finding]:
    """Find a printed loss of one rank's examples: in the last step, or the mean since the line before."""
    rank = run.ranks[0]
    losses = [[event["loss"] for event in other.steps] for other in run.ranks]
    if any(loss is None for row in losses for loss in row):
        return
    begin = 0
    for event in rank.all("prints"):
        end = event["step"]
        for first in {begin, max(0, end - 1)}:
            means = [sum(row[first:end]) / (end - first) for row in losses if first < end <= len(row)]
            if len(means) < run.size or math.isclose(means[0], sum(means) / len(means), rel_tol=0.02):
                continue
            if any(_is_printed(means[0], text) for text in NUMBER.findall(event["text"])):
                yield Finding(
                    "note",
                    "loss",
                    f"""`{event["text"].strip()[:60]}` at {code_of(event["place"])} is the loss of the examples of rank
                    {rank.number}; the mean over all ranks is {sum(means) / len(means):.4f}. dist.all_reduce(loss),
                    divided by the ranks, on all of them.""",
                    [rank.number],
                    event["place"],
                )
                return
        begin = end


def _is_printed(value: float, text: str) -> bool:
    """Return True if a printed number with three digits or more is this one."""
    digits = len(text.lower().partition("e")[0].partition(".")[2])
    return digits >= 3 and abs(float(text) - value) <= 0.51 * 10.0**-digits


def _same_lines(run: WatchedRun) -> Iterator[Finding]:
    """Find lines that every rank prints."""
    texts = [
        {e["text"].strip(): e for e in rank.all("prints") if len(e["text"].strip()) > 5 and e["place"]}
        for rank in run.ranks
    ]
    common = [text for text in texts[0] if all(text in other for other in texts[1:])]
    if common:
        event = texts[0][common[0]]
        yield Finding(
            "note",
            "prints",
            f"all {run.size} ranks print `{common[0][:50]}` at {line_name(event['place'])}: `if rank == 0:` before it.",
            place=event["place"],
        )
