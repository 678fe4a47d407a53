"""Notebook 06, buckets: which gradients share a message."""

import numpy as np

from .. import models
from ..parallel import reducer as reference
from .ranks import alone
from .record import Broken, Exercise, Passed

DRAWN = ([400, 40, 400, 40, 100, 10], 450, 120)  # (nbytes, limit, first): the case that the docstring draws
CASES = (
    DRAWN,
    ([50, 50, 50, 50], 100, 50),  # what just fits, fits
    ([400, 40, 400, 40, 100, 10], 10_000, 10_000),
    ([10, 900, 10], 100, 50),  # larger than the limit: a bucket of its own
    ([10, 10, 900], 100, 50),  # and it is the first
    ([400, 40, 400, 40, 100, 10], 1, 1),
    ([5], 100, 1),
    ([], 100, 10),
)
RANDOM = 20  # more cases, of 1 to 40 gradients


def cases():
    """(nbytes, limit, first) of every case, the one that the docstring draws first."""
    yield from CASES
    for seed in range(RANDOM):
        generator = np.random.default_rng(seed)
        yield generator.integers(0, 1000, generator.integers(1, 41)).tolist(), 700, 300


def check_assign_buckets(fn, runner=None):
    for nbytes, limit, first in cases():
        given = list(nbytes)
        where = f"for nbytes = {shown(nbytes)}, limit = {limit} and first = {first},"
        got = alone(fn, given, limit, first, where=where)
        if given != nbytes:
            raise Broken("input", f"{where.capitalize()} your function changed nbytes: the caller still needs it.")
        check_form(got, f"For{where[3:]}")
        check_cover(got, nbytes, f"For{where[3:]}")
        check_sizes(got, nbytes, limit, first, f"For{where[3:]}")
    return Passed((f"right in {len(CASES) + RANDOM} cases of up to 40 gradients", fact_about_a_gpt(fn)))


def shown(items):
    """A list as text, cut where it is long."""
    return f"{items}" if len(items) <= 8 else f"[{', '.join(map(str, items[:7]))}, ... {len(items)} numbers]"


def check_form(got, where):
    """Raise Broken unless `got` is a list of lists of indices."""
    if got is None:
        raise Broken("returns", f"{where} your function returned nothing: return the list of buckets.")
    if not isinstance(got, list) or not all(isinstance(bucket, list) for bucket in got):
        text = repr(got)
        message = (
            f"{where} your function returned {text[:60]}{'...' if len(text) > 60 else ''}: buckets are a list of lists."
        )
        raise Broken("returns", message)
    wrong = next((i for bucket in got for i in bucket if not isinstance(i, int) or isinstance(i, bool)), None)
    if wrong is not None:
        message = f"{where} a bucket holds {wrong!r}: it is a list of indices into nbytes, whole numbers."
        raise Broken("returns", message)


def check_cover(got, nbytes, where):
    """Raise Broken unless every index is in one bucket, in reverse order, and no bucket is empty."""
    n, flat = len(nbytes), [i for bucket in got for i in bucket]
    where = f"{where} your buckets are {shown(got)}:"
    if [] in got:
        raise Broken("empty", f"{where} one of them is empty, and would be a message about nothing.")
    outside = [i for i in flat if not 0 <= i < n]
    if outside:
        raise Broken("cover", f"{where} there is no gradient {outside[0]}: indices go from 0 to {n - 1}.")
    twice = next((i for i in flat if flat.count(i) > 1), None)
    if twice is not None:
        raise Broken("split", f"{where} gradient {twice} is in more than one place: it would be added twice.")
    lost = [i for i in range(n) if i not in flat]
    if lost:
        why = "every gradient has to travel"
        if flat and lost == list(range(len(lost))):
            why = "the last bucket was never put into the list"
            why = f"the loop ends one too early, or {why}" if len(lost) == 1 else why
        if lost == [n - 1]:
            why = "the loop begins one too late"
        which = f"gradient {lost[0]} is" if len(lost) == 1 else f"gradients {shown(lost)} are"
        raise Broken("cover", f"{where} {which} in none of them, {len(flat)} of {n} are: {why}.")
    if flat == list(range(n)) and n > 1:
        message = (
            f"{where} they are in the order of registration. Backward goes the other way: gradient {n - 1} is ready "
            "first, and gradient 0, for which your first bucket waits, is ready last."
        )
        raise Broken("order", message)
    if flat != list(reversed(range(n))):
        a, b = next((a, b) for a, b in zip(flat, flat[1:], strict=False) if b != a - 1)
        message = (
            f"{where} after {a} comes {b}. Only neighbors share a bucket, from {n - 1} down to 0: a bucket waits for "
            "the last of its gradients, however early the others are."
        )
        raise Broken("order", message)


def check_sizes(got, nbytes, limit, first, where):
    """Raise Broken for a bucket that holds too much, or less than it could."""
    where = f"{where} your buckets are {shown(got)}:"
    for b, bucket in enumerate(got):
        most, total = limit if b else first, sum(nbytes[i] for i in bucket)
        which = "the limit" if b else "first"
        if len(bucket) > 1 and total > most:
            raise Broken(*too_large(where, b, bucket, total, most, limit))
        after = got[b + 1][0] if b + 1 < len(got) else None
        if after is not None and total + nbytes[after] <= most:
            message = (
                f"{where} bucket {b} holds {total} bytes, and gradient {after}, of {nbytes[after]}, would have fitted: "
                f"{which} is {most}. Every bucket more is a latency more."
            )
            raise Broken("small", message)


def too_large(where, b, bucket, total, most, limit):
    """(invariant, message) for bucket `b`, of `total` bytes where `most` are allowed."""
    if b == 0 and total <= limit:
        return "first", (
            f"{where} the first bucket holds {total} bytes, and first is {most}: it is kept small so that something is "
            "under way soon after backward has begun."
        )
    return "limit", (
        f"{where} bucket {b}, {bucket}, holds {total} bytes, and {'the limit' if b else 'first'} is {most}. Look "
        "whether a gradient fits before you put it in, not after."
    )


def fact_about_a_gpt(fn):
    """What it means for a real model, in one sentence."""
    nbytes = [p.nbytes for p in models.build("gpt").parameters()]
    got = fn(nbytes, 100_000, 10_000)
    return (
        f"a tiny GPT has {len(nbytes)} gradients of {sum(nbytes):,} bytes: with buckets of 100,000 they are {len(got)} "
        f"messages per hop, the first one of {sum(nbytes[i] for i in got[0]):,} bytes"
    )


EXERCISES = (
    Exercise(
        id="6.3",
        title="cut the gradients into buckets",
        reference=reference.assign_buckets,
        stars=2,
        check=check_assign_buckets,
        explanation=(
            "Large buckets pay latency seldom; small ones leave early. PyTorch takes 25 MiB, and 1 MiB for the first, "
            "because until it leaves nothing is under way. It fills them in reverse order of registration, the order "
            "of backward for most models, and orders them anew once it has seen a step."
        ),
        parallel=False,
    ),
)
