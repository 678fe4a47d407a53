"""The check that a schedule can run: every action once, in an order that ends, within the memory that there is."""

from itertools import chain

from .evaluation import evaluate
from .schedule import KINDS, Schedule, require_schedule


def validate(schedule: Schedule, most_live: int | None = None) -> Schedule:
    """Refuse a schedule that would lose a micro-batch, deadlock, or hold too much.

    Args:    most_live: how many micro-batches' activations of a stage a rank has room for; None: any number.
    Returns: schedule.
    Raises:  ValueError, one sentence: the first action that is missing, doubled, out of range or before what it
             needs on its own rank; the cycle of ranks that wait for each other; the rank that holds too much.
    """
    require_schedule(schedule)
    if len(schedule.rows) != schedule.ranks:
        raise ValueError(f"{schedule.name} has {len(schedule.rows)} rows for {schedule.ranks} ranks")
    whole = schedule.ranks > 0 and schedule.stages % schedule.ranks == 0
    if not whole:
        raise ValueError(f"{schedule.stages} stages on {schedule.ranks} ranks: each holds as many as every other")
    if schedule.micro_batches < schedule.replicas:
        few = f"{schedule.micro_batches} micro-batch{'es' if schedule.micro_batches > 1 else ''}"
        raise ValueError(f"{schedule.name} has {schedule.replicas} replicas and {few}: each replica needs at least one")
    for check in (_in_range, _one_rank, _once, _complete, _pairs, in_order):
        check(schedule)
    times = evaluate(schedule)  # raises if ranks wait for each other
    if most_live is not None:
        rank = max(range(schedule.ranks), key=lambda r: times.peak[r])
        if times.peak[rank] > most_live:
            raise ValueError(
                f"{schedule.name}: rank {rank} holds the activations of {times.peak[rank]} micro-batches at once, and "
                f"there is room for {most_live}"
            )
    return schedule


def _in_range(schedule: Schedule) -> None:
    """Raise ValueError unless every action has a stage, a kind and a micro-batch that there are, of one replica."""
    stages = schedule.stages * schedule.replicas
    for rank, row in enumerate(schedule.rows):
        for action in row:
            where = f"{schedule.name}: rank {rank} does {action},"
            if action.kind not in KINDS:
                raise ValueError(f"{where} and {action.kind!r} is none of {', '.join(KINDS)}")
            if not 0 <= action.stage < stages:
                raise ValueError(f"{where} and stages go from 0 to {stages - 1}")
            if not 0 <= action.micro_batch < schedule.micro_batches:
                raise ValueError(f"{where} and micro-batches go from 0 to {schedule.micro_batches - 1}")
            if schedule.replica(action.stage) != schedule.replica_of(action.micro_batch):
                raise ValueError(
                    f"{where} of replica {schedule.replica(action.stage)}, and micro-batch {action.micro_batch} is for "
                    f"replica {schedule.replica_of(action.micro_batch)}"
                )


def _one_rank(schedule: Schedule) -> None:
    """Raise ValueError if a stage is on two ranks."""
    holders = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            owner = holders.setdefault(action.stage, rank)
            if owner != rank:
                raise ValueError(f"{schedule.name}: stage {action.stage} is on rank {owner} and on rank {rank}")


def _once(schedule: Schedule) -> None:
    """Raise ValueError if an action is done twice."""
    seen = set()
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action in seen:
                raise ValueError(f"{schedule.name}: rank {rank} does {action} twice")
            seen.add(action)


def _complete(schedule: Schedule) -> None:
    """Raise ValueError unless each stage has a forward and a whole backward of every micro-batch of its replica."""
    done = set(chain.from_iterable(schedule.rows))
    for stage in range(schedule.stages * schedule.replicas):
        for i in range(schedule.replica(stage), schedule.micro_batches, schedule.replicas):
            kinds = {kind for kind in KINDS if (stage, kind, i) in done}
            if "F" not in kinds:
                raise ValueError(f"{schedule.name}: no rank does {stage}F{i}")
            if kinds == {"F"}:
                raise ValueError(f"{schedule.name}: no rank does {stage}B{i}, nor {stage}I{i} and {stage}W{i}")
            if "B" in kinds and len(kinds) > 2:
                half = min(kinds & {"I", "W"})
                raise ValueError(
                    f"{schedule.name}: {stage}B{i} is the whole backward, and {stage}{half}{i} a half of it"
                )
            if len(kinds) == 2 and "B" not in kinds:
                lost = "W" if "I" in kinds else "I"
                raise ValueError(f"{schedule.name}: no rank does {stage}{lost}{i}, the other half of a backward")


def _pairs(schedule: Schedule) -> None:
    """Raise ValueError unless a pair is a forward, and the whole backward after it, of another micro-batch or stage."""
    for rank, row in enumerate(schedule.rows):
        for first, second in zip(row, (*row[1:], None), strict=True):
            if first not in schedule.paired:
                continue
            if (
                second is None
                or first.kind + second.kind != "FB"
                or (first.stage, first[2]) == (second.stage, second[2])
            ):
                raise ValueError(
                    f"{schedule.name}: on rank {rank} {first} would overlap with {second or 'nothing'}: a pair is a "
                    "forward and, behind it, the whole backward of another micro-batch"
                )


def in_order(schedule: Schedule) -> None:
    """Raise ValueError if a rank does an action before one of its own that it needs."""
    for rank, row in enumerate(schedule.rows):
        positions: dict[tuple[int, str, int], int] = {action: position for position, action in enumerate(row)}
        for position, action in enumerate(row):
            for stage, kinds, micro_batch in schedule.needs(action):
                for kind in kinds:
                    if positions.get((stage, kind, micro_batch), -1) > position:
                        raise ValueError(
                            f"{schedule.name}: rank {rank} does {action} before {stage}{kind}{micro_batch}"
                        )
