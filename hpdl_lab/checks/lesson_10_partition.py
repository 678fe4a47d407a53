"""Notebook 10, stages: which layers each one gets, so that the slowest is as fast as it can be."""

import numpy as np

from ..parallel.pipeline import partition as reference
from .ranks import alone, capital, count, number, tried
from .record import Broken, Exercise, Passed

DRAWN = ([5, 1, 1, 1, 4, 4], 3)  # (costs, stages): the case that the docstring draws
CASES = (
    DRAWN,
    ([1, 1, 1, 1, 1, 9], 3),  # equal numbers of layers are not equal work
    ([9, 1, 1, 1, 1, 1], 3),
    ([4, 3, 2, 6], 1),
    ([2, 3], 2),
    ([1, 0, 0, 0], 3),  # layers that cost nothing still belong somewhere
    ([0.5, 0.25, 0.5, 1.0], 2),
    ([7, 1, 7, 1, 7, 1], 4),
    ([3, 3, 3, 3, 4], 2),
)
RANDOM = 12  # more cases, of up to 12 layers, half of them in seconds, as layers are measured
A_GPT = [3.0, *[1.0] * 12, 6.0]  # about: a table of tokens, twelve blocks, and a head that makes logits


def cases():
    """(costs, stages) of every case."""
    yield from CASES
    for seed in range(RANDOM):
        generator = np.random.default_rng(seed)
        layers = int(generator.integers(3, 13))
        costs, stages = generator.integers(1, 30, layers).tolist(), int(generator.integers(2, layers))
        yield [cost / 1000 for cost in costs] if seed % 2 else costs, stages


def check_partition(fn, runner=None):
    for costs, stages in cases():
        given = list(costs)
        where = f"for costs = {costs} and {count(stages, 'stage')}"
        sizes = alone(fn, given, stages, where=f"{where},")
        if given != costs:
            raise Broken("input", f"{capital(where)} your function changed costs: the caller still needs it.")
        check_form(sizes, costs, stages, capital(where))
        check_balance(sizes, costs, stages, capital(where))
    check_refusal(fn)
    return Passed((f"right in {len(CASES) + RANDOM} cases of up to 12 layers", fact_about_a_gpt(fn)))


def check_form(sizes, costs, stages, where):
    """Raise Broken unless `sizes` are `stages` whole numbers, at least 1, that add up to all layers."""
    if sizes is None:
        raise Broken("form", f"{where} your function returned nothing: return the list of sizes.")
    try:
        items = [int(size) for size in sizes]
        whole = all(size == item for size, item in zip(sizes, items, strict=True))
    except (TypeError, ValueError):
        items, whole = [], False
    if not whole:
        raise Broken("form", f"{where} your function returned {str(sizes)[:60]}: sizes are a list of whole numbers.")
    told = f"{where} your sizes are {items}"
    if len(items) != stages:
        raise Broken("form", f"{told}: {count(len(items), 'part')} for {count(stages, 'stage')}.")
    if min(items) < 1:
        message = f"{told}: a stage without a layer would only pass on what it gets, and a rank would do nothing."
        raise Broken("empty", message)
    if sum(items) != len(costs):
        lost = len(costs) - sum(items)
        what = f"the last {lost} would be in no stage" if lost > 0 else f"that is {-lost} too many"
        raise Broken("form", f"{told}, {sum(items)} layers in all, and there are {len(costs)}: {what}.")


def parts_of(sizes, costs):
    """What each part costs."""
    ends = np.cumsum([int(size) for size in sizes]).tolist()
    return [sum(costs[end - int(size) : end]) for end, size in zip(ends, sizes, strict=True)]


def check_balance(sizes, costs, stages, where):
    """Raise Broken unless the most expensive part is as cheap as it can be."""
    best = reference.partition(costs, stages)
    parts, least = parts_of(sizes, costs), max(parts_of(best, costs))
    if max(parts) <= least * (1 + 1e-12):
        return
    slow = parts.index(max(parts))
    told = ", ".join(number(part) for part in parts)
    message = (
        f"{where} your sizes {[int(size) for size in sizes]} make stages that cost {told}: all wait for stage {slow} "
        f"with its {number(parts[slow])}, and {number(least)} is possible. "
    )
    if max(sizes) - min(sizes) <= 1:
        message += "Equal numbers of layers are not equal work."
    elif slow == stages - 1:
        message += "What the stages before left over has come together in the last one."
    elif slow == 0:
        message += "The first stage took more than its share."
    else:
        message += "A cut one layer further left or right would help."
    raise Broken("balance", message)


def check_refusal(fn):
    """Raise Broken unless more stages than layers are refused in a sentence."""
    sizes, error = tried(fn, [1.0, 2.0], 3, where="for 2 layers and 3 stages,")
    if error is None:
        message = f"2 layers cannot be shared by 3 stages, and your function returned {sizes}: raise ValueError."
    elif not isinstance(error, ValueError):
        message = f"For 2 layers and 3 stages your function raised {type(error).__name__}: {error}. Raise ValueError."
    elif "2" in str(error) and "3" in str(error):
        return
    else:
        message = (
            f"For 2 layers and 3 stages your function raised ValueError({str(error)!r}): say both numbers, so that "
            "whoever reads it knows what to change. The line with raise stood above your solution."
        )
    raise Broken("refusal", message)


def fact_about_a_gpt(fn):
    """What it means for a model whose head is expensive."""
    sizes = [int(size) for size in alone(fn, list(A_GPT), 4, where="for a GPT of 14 layers,")]
    equal = max(parts_of([4, 4, 3, 3], A_GPT))
    slowest = max(parts_of(sizes, A_GPT))
    return f"a GPT whose head costs six blocks: sizes {sizes}, slowest stage {number(slowest)}, not {number(equal)}"


EXERCISES = (
    Exercise(
        id="10.3",
        title="cut a model into stages that cost the same",
        reference=reference.partition,
        stars=2,
        check=check_partition,
        explanation=(
            "A pipeline goes at the pace of its slowest stage, whatever the schedule. n layers can be cut into p parts "
            "in C(n-1, p-1) ways; dynamic programming looks at p n² places. The costs are measured: forward and "
            "backward of each layer, on this machine."
        ),
        parallel=False,
    ),
)
