"""Consensus of ranks: all mean the same before the first step, and all fail together, with one sentence that says who.

    together            what one rank raises inside, every rank raises
    require_same...     structure, values and options of models: each rank sends a digest of 8 bytes, and more only if
                        these differ
    require_sums_of     does the all_reduce add up? A sum that is wrong, and the same on every rank, leaves no trace
    GradientCheck       after the sum of gradients, before the update: has a rank NaN, or none when others have one?
    loss_of_all         the same after a step of a pipeline, with its loss

Every bucket carries a flag, added over ranks like the gradients (reducer.py): 0 if all is well on every rank. All see
the same flags, so all ask for more, or none.
"""

from __future__ import annotations

import hashlib
import math
import sys
import warnings
import zlib
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..comm.base import Comm, best_all_reduce
from ..comm.buffers import dtype_name, to_numpy
from ..comm.errors import CommError, WrongAnswer
from ..comm.status.report import name_ranks
from .reducer import AllReduce, Bucket, allocate, name_of, result_of

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def together(comm: Comm) -> Generator[None]:
    """Raise on every rank what any rank raises inside: its type, and a sentence that names the rank. Collective.

    Inside there are no messages: a rank that fails there would leave the others waiting.
    Steps: one all_gather of 8 bytes; only if a rank has failed, a second one of 8 and one of what it says.
    """
    error = None
    try:
        yield
    except CommError:
        raise
    except Exception as raised:
        error = raised
    if not any(failed for (failed,) in gather_integers(comm, [error is not None])):
        return
    kind = "" if error is None else f"{type(error).__module__}.{type(error).__qualname__}"
    texts = gather_items(comm, [] if error is None else [(kind, " ".join(str(error).split("\n")))])
    groups: dict[str, list[int]] = {}
    kinds = []
    for rank, pairs in enumerate(texts):
        for kind, text in (pair for pair in pairs if len(pair) == 2):
            kinds.append(kind)
            groups.setdefault(text, []).append(rank)
    everybody = len(groups) == 1 and len(kinds) == comm.size
    described = "; ".join(text if everybody else f"{name_ranks(ranks)}: {text}" for text, ranks in groups.items())
    raise _made(kinds[0], described) from error


def _made(kind: str, text: str) -> Exception:
    """Return the exception of this class, "builtins.ValueError"; a RuntimeError if it takes more than a text."""
    module, _, name = kind.rpartition(".")
    try:
        return getattr(sys.modules[module], name)(text)
    except (KeyError, AttributeError, TypeError):
        return RuntimeError(text)


# -- the same model ----------------------------------------------------------------------------------------------------


def require_same_model(comm: Comm, model: nn.Module, plan: str = "") -> None:
    """Raise ValueError on every rank unless all have a model of one structure. Collective.

    Structure: names, shapes and dtypes of parameters and buffers, which of them are one tensor, which need a gradient.
    Values that differ, from another seed, are no error, since rank 0's are sent to all: rank 0 warns, and names them.
    plan: what else must be the same, in words: the strategy and its options.
    Steps: one all_gather, if all agree.   Bytes per rank: as in an all_gather of 16 bytes.
    """
    table = {"strategy": plan} | _structure(model)
    sums = _checksums({**dict(model.named_parameters()), **dict(model.named_buffers())})
    digests = gather_integers(comm, [_digest(table), _digest(sums)])
    if len({structure for structure, _ in digests}) > 1:
        raise ValueError(_difference(comm, table))
    if len({values for _, values in digests}) > 1:
        ranks, name = _first_difference(gather_integers(comm, list(sums.values())), list(sums))
        if comm.rank == 0:
            warnings.warn(
                f"{ranks} started with other values than rank 0 (another seed?), first in {name}: rank 0's are taken",
                stacklevel=4,
            )


def require_same(comm: Comm, what: str, value: object) -> None:
    """Raise ValueError on every rank unless `str(value)`, called `what`, is the same on all ranks. Collective."""
    _require_same_table(comm, {what: str(value)})


def require_same_parameters(comm: Comm, params: Sequence[Tensor], names: Sequence[str], plan: str) -> None:
    """Raise ValueError on every rank unless all have parameters of the same names, shapes and dtypes in one order.

    plan: what else must be the same, in words, as of require_same_model. Collective: an all_gather of 8 bytes.
    """
    table = {name: f"number {i} of {_form_of(p)}" for i, (name, p) in enumerate(zip(names, params, strict=True))}
    _require_same_table(comm, {"strategy": plan} | table)


def require_same_values(comm: Comm, tensors: dict[str, Tensor], remedy: str) -> None:
    """Raise ValueError on every rank unless all have the same values in these tensors. Collective."""
    sums = _checksums(tensors)
    if len({d for (d,) in gather_integers(comm, [_digest(sums)])}) > 1:
        ranks, name = _first_difference(gather_integers(comm, list(sums.values())), list(sums))
        raise ValueError(f"{ranks} started with other values than rank 0, first in {name}: {remedy}")


def _require_same_table(comm: Comm, table: dict[str, str]) -> None:
    """Raise ValueError on every rank unless `table`, {name: what it is}, is the same on all ranks. Collective."""
    if len({d for (d,) in gather_integers(comm, [_digest(table)])}) > 1:
        raise ValueError(_difference(comm, table))


def _structure(model: nn.Module) -> dict[str, str]:
    """Return {name: what it is}, in words, of every parameter and buffer in the order of registration."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} of the model has no shape yet: give the model one batch before ranks share it")
        if tensor.is_meta:
            raise ValueError(f"{name} of the model is on torch's meta device and has no values: build it on the CPU")
    first: dict[int, str] = {}
    table = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        kind = "parameter" if p.requires_grad else "frozen parameter"
        same = first.setdefault(id(p), name)
        table[name] = f"a {kind} of {_form_of(p)}" if same == name else f"the same tensor as {same}"
    return table | {name: f"a buffer of {_form_of(b)}" for name, b in model.named_buffers()}


class _Formed(Protocol):
    """A tensor, or anything with its form."""

    @property
    def shape(self) -> Iterable[int]: ...

    @property
    def dtype(self) -> torch.dtype | np.dtype: ...


def _form_of(tensor: _Formed) -> str:
    """Return shape and dtype of a tensor, or of anything that has both, in words."""
    return f"shape {tuple(tensor.shape)} in {dtype_name(tensor.dtype)}"


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return {name: CRC-32 of its bytes}."""
    return {name: zlib.crc32(bytes_of(tensor)) for name, tensor in tensors.items()}


def _difference(comm: Comm, table: dict[str, str]) -> str:
    """Say the first thing in which the {name: what it is} of ranks differ: the few ranks, then the many. Collective."""
    tables: list[dict[str, str]] = [dict(pairs) for pairs in gather_items(comm, table.items())]
    name = next((name for table in tables for name in table if len({t.get(name) for t in tables}) > 1), None)
    if name is None:  # only their order differs, in which gradients are packed
        tables = [{f"number {i}, as registered,": name for i, name in enumerate(table)} for table in tables]
        name = next(name for table in tables for name in table if len({t.get(name) for t in tables}) > 1)
    groups: dict[str | None, list[int]] = {}
    for rank, table in enumerate(tables):
        groups.setdefault(table.get(name), []).append(rank)
    few_first = sorted(groups.items(), key=lambda group: len(group[1]))
    if name == "strategy" or len(tables[0]) == 1:
        parts = [f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {what}" for what, ranks in few_first]
        return f"the ranks do not agree on the {name}: {', '.join(parts)}"
    counts = sorted({len(table) - 1 for table in tables})
    parts = [f"{what or 'missing'} on {name_ranks(ranks)}" for what, ranks in few_first]
    numbers = f" (they have {' and '.join(map(str, counts))} parameters and buffers)" if len(counts) > 1 else ""
    return f"the ranks' models differ{numbers}: {name} is {', '.join(parts)}"


def _first_difference(rows: list[list[int]], names: Sequence[str]) -> tuple[str, str]:
    """Return (the ranks whose row is not rank 0's, in words; the first name at which one differs)."""
    others = [rank for rank, row in enumerate(rows) if row != rows[0]]
    return name_ranks(others), next(n for i, n in enumerate(names) if any(row[i] != rows[0][i] for row in rows))


def _digest(value: object) -> int:
    """Return 63 bits, which differ for values whose repr differs."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1


def gather_integers(comm: Comm, numbers: Sequence[int]) -> list[list[int]]:
    """Return the lists of integers of all ranks, in rank order: as many on every rank. Collective."""
    return comm.all_gather(torch.tensor(numbers, dtype=torch.int64, device=comm.device)).tolist()


def gather_items(comm: Comm, pairs: Iterable[tuple[str, str]]) -> list[list[list[str]]]:
    """Return the (name, text) pairs of all ranks, in rank order, of any number and length. Collective."""
    text = "\n".join(f"{name}\t{what}" for name, what in pairs).encode()
    longest = max(n for (n,) in gather_integers(comm, [len(text)]))
    mine = torch.tensor(list(text.ljust(longest, b"\n")), dtype=torch.uint8, device=comm.device)
    rows = comm.all_gather(mine).tolist()
    return [[line.split("\t", 1) for line in bytes(row).decode().rstrip("\n").split("\n")] for row in rows]


# -- an all_reduce that adds up ----------------------------------------------------------------------------------------


def require_sums_of(comm: Comm, all_reduce: AllReduce, dtypes: Iterable[torch.dtype]) -> None:
    """Raise WrongAnswer, a ValueError, on every rank unless `all_reduce` adds what it should.

    Once for each dtype that travels; the communicator's own is trusted. Collective.
    Steps: one all_reduce of 2p + 1 elements, which no chunks divide equally, and an all_gather of 8 bytes.
    """
    if all_reduce is best_all_reduce:
        return
    recording, comm.trace.enabled = comm.trace.enabled, False
    try:
        for dtype in dict.fromkeys(dtypes):
            _require_sum(comm, all_reduce, dtype)
    finally:
        comm.trace.enabled = recording


def _require_sum(comm: Comm, all_reduce: AllReduce, dtype: torch.dtype) -> None:
    """Raise WrongAnswer on every rank unless `all_reduce` makes a known sum of a few numbers of this dtype."""
    n = 2 * comm.size + 1
    x, want = allocate(comm, n, dtype), np.sum([_summand(rank, n) for rank in range(comm.size)], axis=0)
    x.copy_(torch.from_numpy(_summand(comm.rank, n)))
    got = np.asarray(to_numpy(result_of(all_reduce, comm, x).double()))
    with together(comm):
        for i in np.flatnonzero(~(np.abs(got - want) <= 4 * torch.finfo(dtype).eps * want)):
            raise WrongAnswer(
                f"{name_of(all_reduce)} does not add up: element {i} of {n} should be {want[i]:g}, the sum over "
                f"{comm.size} ranks, and is {got[i]:g}: lab.check finds out why"
            )


def _summand(rank: int, n: int) -> np.ndarray:
    """Return (n,) small whole numbers, whose sums are exact: other numbers on other ranks, in another order."""
    return 1.0 + np.arange(n) * (rank + 1) % 5


# -- gradients ---------------------------------------------------------------------------------------------------------


class GradientCheck:
    """The check of the gradients of one model. unused: {name: ranks that had no gradient for it} in the latest step."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.unused: dict[str, list[int]] = {}

    def check(
        self, comm: Comm, params: Sequence[nn.Parameter], buckets: Sequence[Bucket], totals: Sequence[Tensor]
    ) -> list[int]:
        """Return the indices of the parameters that no rank has a gradient for. Rank 0 warns of each of them once.

        Args:    buckets: what this rank has sent; totals: [(N + 1,)], what came back. The gradients of `params` are
                 still this rank's.
        Raises:  FloatingPointError on every rank if one of them has NaN or infinity.
        """
        if not any(float(total[-1]) for total in totals):  # NaN is true
            self.unused = {}
            return []
        with together(comm):
            self._require_finite(params, buckets)
        return self._unused_by_all(comm, [param.grad is None for param in params])

    def check_shards(self, comm: Comm, bad: Sequence[tuple[int, str]], missing: Sequence[int]) -> list[int]:
        """Do the same when no rank has the sums of all gradients. Collective: an all_gather of 8 bytes.

        Args:    bad: (index, NaN or infinity) of gradients of this rank that are not finite; missing: indices of those
                 that it has not.
        """
        if not any(any(row) for row in gather_integers(comm, [bool(bad or missing)])):
            self.unused = {}
            return []
        with together(comm):
            if bad:
                self._raise_not_finite(*max(bad), len(bad) - 1)
        return self._unused_by_all(comm, [index in missing for index in range(len(self.names))])

    def _unused_by_all(self, comm: Comm, mine: Sequence[bool]) -> list[int]:
        """Return the indices of the parameters for which `mine`, without a gradient here, is true on all ranks."""
        before, self.unused = self.unused, {}
        missing = gather_integers(comm, mine)
        for index, name in enumerate(self.names):
            if ranks := [rank for rank, row in enumerate(missing) if row[index]]:
                self.unused[name] = ranks
        if comm.rank == 0 and self.unused != before and self.unused:
            warnings.warn(self._unused_text(comm.size), stacklevel=6)
        return [i for i, name in enumerate(self.names) if len(self.unused.get(name, ())) == comm.size]

    def _require_finite(self, params: Sequence[nn.Parameter], buckets: Sequence[Bucket]) -> None:
        """Raise FloatingPointError if this rank has NaN or infinity: backward makes the last layer's first."""
        bad = sorted(i for b in buckets if not b.finite for i in b.indices if not is_finite(params[i].grad))
        if bad:
            last = params[bad[-1]].grad
            word = "NaN" if last is not None and torch.isnan(last).any() else "infinity"
            self._raise_not_finite(bad[-1], word, len(bad) - 1)

    def _raise_not_finite(self, index: int, word: str, later: int) -> None:
        """Raise FloatingPointError for `word`, NaN or infinity, of parameter `index` and in `later` more gradients."""
        more = f" and in {later} that backward reaches later" if later else ""
        raise FloatingPointError(
            f"{word} in the gradient of {self.names[index]}{more}. No rank has taken this step: look at the "
            "input and at the learning rate"
        )

    def require_no_overflow(self, index: int | None) -> None:
        """Raise FloatingPointError if a sum is beyond float16's 65504; index: of its parameter, by `overflowed`."""
        if index is not None:
            raise FloatingPointError(
                f"the sum of all ranks overflows float16 in the gradient of {self.names[index]}, though it is finite "
                "on every rank: scale the loss down. No rank has taken this step"
            )

    def _unused_text(self, size: int) -> str:
        """Say which parameters got no gradient, on which ranks."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in self.unused.items():
            groups.setdefault(tuple(ranks), []).append(name)
        parts = []
        for ranks, names in groups.items():
            everywhere = "on any rank: they are left as they are"
            where = everywhere if len(ranks) == size else f"on {name_ranks(ranks)}: zeros are added there"
            parts.append(f"{', '.join(names)} {where}")
        return f"the loss does not depend on all parameters. No gradient for {'; for '.join(parts)}"


def overflowed(buckets: Sequence[Bucket], totals: Sequence[Tensor]) -> int | None:
    """Return the index of the last parameter whose sum is not finite in float16; None if all are finite.

    Only float16 is looked at, whose range gradients reach: a look at all costs wide dtypes a pass over memory.
    """
    bad = [
        index
        for bucket, total in zip(buckets, totals, strict=True)
        if total.dtype == torch.float16 and not is_finite(total[:-1])
        for index, view in zip(bucket.indices, bucket.views_of(total), strict=True)
        if not is_finite(view)
    ]
    return max(bad, default=None)


def is_finite(tensor: Tensor | None) -> bool:
    """Return whether a tensor, if there is one, is without NaN and infinity."""
    return tensor is None or bool(torch.isfinite(tensor).all())


# -- a step of a pipeline ----------------------------------------------------------------------------------------------


def loss_of_all(
    comm: Comm, losses: dict[int, Tensor], params: dict[str, nn.Parameter], checksum: int | None = None
) -> float:
    """Return the sum over ranks of `losses`, the same float on every rank.

    Args:    losses: {micro_batch: scalar tensor} of this rank; params: {name: parameter} of this rank; checksum: of the
             batch, 16 bits, which must be the same on every rank; None: not looked at.
    Raises:  FloatingPointError on every rank if a loss, or a gradient, has NaN or infinity: which rank, what;
             ValueError on every rank if their checksums differ.
    Steps: one all_reduce.   Bytes per rank: as in an all_reduce of 16 bytes, 32 with a checksum.
    """
    total = torch.zeros((), dtype=torch.float64, device=comm.device)
    flag = total.clone()  # 0, or NaN if a gradient is not finite
    for loss in losses.values():
        total += loss
    for param in params.values():
        if param.grad is not None:
            flag += 0 * param.grad.sum(dtype=torch.float64 if param.dtype == torch.float64 else torch.float32)
    both = [] if checksum is None else [checksum, checksum**2]  # of variance 0 if all ranks have the same
    total, flag, *sums = comm.all_reduce(torch.stack([total, flag, *map(total.new_tensor, both)])).tolist()
    if sums and comm.size * sums[1] != sums[0] ** 2:
        require_same(comm, "batch", f"checksum {checksum:04x}: give every rank the same x and y, the whole batch")
    if not math.isfinite(total) or math.isnan(flag):
        grads = {name: param.grad for name, param in params.items()}
        for where, tensors in (
            ("parameter", params),
            ("loss of micro-batch", losses),
            ("gradient of", grads),
        ):  # first the likeliest source of all
            with together(comm):
                bad = [str(name) for name, tensor in tensors.items() if not is_finite(tensor)]
                if bad:
                    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
                    raise FloatingPointError(
                        f"NaN or infinity in the {where} {', '.join(bad[:3])}{more}. Take no step: look at the input, "
                        "and at the learning rate"
                    )
    return total


def require_answers(output: Sequence[int], y: Tensor, classes: int) -> None:
    """Raise ValueError unless cross-entropy can compare `y` with what the model makes of the batch.

    Args:    output: the shape of its output for the whole batch; classes: its dimension that holds classes.
    """
    wanted = tuple(size for dim, size in enumerate(output) if dim != classes % len(output))
    if tuple(y.shape) != wanted or y.dtype != torch.int64:
        raise ValueError(
            f"cross-entropy of an output of shape {tuple(output)} needs y of shape {wanted} in torch.int64, and y has "
            f"{_form_of(y)}: another y, or another loss"
        )
