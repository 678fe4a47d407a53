"""After the sum, before the update: has a rank NaN in a gradient, or none where others have one? Which rank and layer?

Every bucket carries a flag, added over ranks like the gradients (packing.py): 0 where all is well on every rank. Only
where it is not do ranks tell each other what they have for every parameter, a byte each, in one all_gather. All see the
same flags, so all ask, or none.
"""

import warnings

import torch

from ..comm.waits import name_ranks

FINE, NONE, NAN, INFINITE = range(4)  # what a rank says of the gradient of one parameter
WORDS = {NAN: "NaN", INFINITE: "infinity"}


class Verdict:
    """Judges the gradients of one model. unused: {name: ranks that had no gradient for it} in the latest step."""

    def __init__(self, names):
        self.names, self.unused = names, {}

    def of(self, comm, params, buckets, totals):
        """Indices of the parameters that no rank has a gradient for. Rank 0 warns of each of them once.

        Args:    buckets: what this rank has sent; totals: [(N + 1,)], what came back. The gradients of `params` are
                 still those of this rank.
        Raises:  FloatingPointError on every rank where one of them has NaN or infinity.
        """
        before, self.unused = self.unused, {}
        if not any(float(total[-1]) for total in totals):  # NaN is true
            return []
        rows = comm.all_gather(
            torch.tensor(conditions(params, buckets), dtype=torch.uint8, device=comm.device)
        ).tolist()
        if any(condition in WORDS for row in rows for condition in row):
            raise FloatingPointError(self.not_finite(rows))
        for index, name in enumerate(self.names):
            ranks = [rank for rank, row in enumerate(rows) if row[index] == NONE]
            if ranks:
                self.unused[name] = ranks
        if comm.rank == 0 and self.unused != before and self.unused:
            warnings.warn(self.missing(comm.size), stacklevel=5)
        return [i for i, name in enumerate(self.names) if len(self.unused.get(name, ())) == comm.size]

    def require_finite_sums(self, buckets, totals):
        """Raise FloatingPointError where gradients that are finite on every rank have a sum beyond float16's 65504."""
        index = overflowed(buckets, totals)
        if index is not None:
            raise FloatingPointError(self.too_large(index))

    def too_large(self, index):
        return (
            f"the sum of all ranks overflows float16 in the gradient of {self.names[index]}, though it is finite on "
            "every rank: scale the loss down. No rank has taken this step"
        )

    def not_finite(self, rows):
        """Which rank, which layer. Backward goes from the last layer to the first, and so does NaN."""
        told = []
        for rank, row in enumerate(rows):
            bad = [index for index, condition in enumerate(row) if condition in WORDS]
            if bad:
                more = f" and in {len(bad) - 1} that backward reaches later" if len(bad) > 1 else ""
                told.append(f"rank {rank} has {WORDS[row[bad[-1]]]} in the gradient of {self.names[bad[-1]]}{more}")
        return f"{'; '.join(told)}. No rank has taken this step: look at that rank's input, and at the learning rate"

    def missing(self, size):
        """Which parameters got no gradient, on which ranks."""
        groups = {}
        for name, ranks in self.unused.items():
            groups.setdefault(tuple(ranks), []).append(name)
        told = []
        for ranks, names in groups.items():
            everywhere = "on any rank: they are left as they are"
            where = everywhere if len(ranks) == size else f"on {name_ranks(ranks)}: zeros are added there"
            told.append(f"{', '.join(names)} {where}")
        return f"the loss does not depend on all parameters. No gradient for {'; for '.join(told)}"


def overflowed(buckets, totals):
    """The index of the parameter, the last if several, whose sum is not finite in float16; None where all are finite.

    Only float16 is looked at, whose range gradients reach: a look at all costs wide dtypes a pass over memory.
    """
    bad = [
        index
        for bucket, total in zip(buckets, totals, strict=True)
        if not finite_in_float16(total[:-1])
        for index, view in zip(bucket.indices, bucket.views_of(total), strict=True)
        if not finite_in_float16(view)
    ]
    return max(bad, default=None)


def finite_in_float16(x):
    return x.dtype != torch.float16 or bool(torch.isfinite(x.sum(dtype=torch.float32)))


def conditions(params, buckets):
    """What this rank has to say of the gradient of every parameter."""
    said = [FINE if p.grad is not None else NONE for p in params]
    for bucket in buckets:
        if torch.isnan(bucket.flag):
            for index in bucket.indices:
                said[index] = condition_of(params[index].grad)
    return said


def condition_of(grad):
    """FINE, NONE, NAN or INFINITE: what a rank says of one gradient."""
    if grad is None:
        return NONE
    if torch.isfinite(grad).all():
        return FINE
    return NAN if torch.isnan(grad).any() else INFINITE
