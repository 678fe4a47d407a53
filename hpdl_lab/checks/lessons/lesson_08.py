"""Notebook 08: the ledger of a model, what every rank holds before it has seen an example."""

from __future__ import annotations

import numpy as np

from ...parallel.grid.machine import grid_of
from ...parallel.grid.memory import memory_of, state_bytes
from ...parallel.grid.spec import Layer, Spec
from ...units import GIB, amount_text, counted
from ..checkers import because, reason
from ..ranks import alone, capital, numbers_of
from ..record import Answer, Exercise, Passed

SEVEN = 7_000_000_000
CASES = ((SEVEN, 1, 0), *((SEVEN, 64, stage) for stage in range(4)), (120_000, 4, 1), (120_000, 4, 3))
KINDS = ("parameters", "gradients", "the optimizer")
TRAININGS = {True: "mixed adam", False: "adam"}


def _held(parameters: int, ranks: int, stage: int, mixed: bool) -> tuple[int, ...]:
    """Return (parameters, gradients, optimizer) in bytes, by the model that lab.memory measures."""
    layer = Layer("all of it", parameters, 0, 0.0, 0, 0, 0, 0)
    spec = Spec("a model", (layer,), training=TRAININGS[mixed])
    return memory_of(spec, grid_of(dp=ranks), stage=stage, micro_batches=1)[0][:3]


def _check_state_bytes(fn: Answer) -> Passed:
    for mixed in (True, False):
        for parameters, ranks, stage in CASES:
            _check_case(fn, parameters, ranks, stage, mixed)
    whole, *shares = (sum(_held(SEVEN, 64, stage, True)) for stage in range(4))
    each = [f"{nbytes / SEVEN:.4g}" for nbytes in (whole, *shares)]
    return Passed(
        f"right in {2 * len(CASES)} cases: stages 0 to 3, 1 to 64 ranks, 16 and 32 bits",
        f"""a model of 7 billion parameters in mixed precision: {amount_text(whole)} on every rank; on each of 64 with
        ZeRO 1, 2, 3: {", ".join(map(amount_text, shares))}""",
        f"bytes per parameter: {', '.join(each)}, which are 16, 4 + 12/N, 2 + 14/N and 16/N with N = 64",
    )


def _check_case(fn: Answer, parameters: int, ranks: int, stage: int, mixed: bool) -> None:
    """Raise Broken unless fn says what a rank holds."""
    bits = "mixed precision" if mixed else "32 bits"
    where = f"with {parameters:,} parameters, {counted(ranks, 'rank')}, stage {stage} and {bits}"
    got = alone(fn, parameters, ranks, stage, mixed, where=where)
    said = np.array(numbers_of(got, 3, where, "(bytes of parameters, bytes of gradients, bytes of the optimizer)"))
    right = np.array(_held(parameters, ranks, stage, mixed), dtype=float)
    wrong = ~np.isclose(said, right, rtol=1e-6)
    if not wrong.any():
        return
    i = int(np.argmax(wrong))
    text = f"{capital(where)} a rank holds {amount_text(right[i])} for {KINDS[i]}, and you say {amount_text(said[i])}."
    raise because(reason(said[i], _reasons(i, right[i], ranks, stage, mixed), np.isclose) or "bytes: ", text)


def _reasons(i: int, right: float, ranks: int, stage: int, mixed: bool) -> list[tuple[float, str]]:
    """Return Rows of what may be said of kind i, and why that is wrong."""
    divided = ranks if stage >= 3 - i else 1  # by what the kinds are divided: parameters from stage 3 on, and so on
    rows = [
        (right / 1e9, "units: That is right in GB; bytes are asked for."),
        (right / GIB, "units: That is in GiB, 2^30 bytes; bytes are asked for."),
        (right * 1e9 / GIB, "units: A GB has 10^9 bytes, a GiB 2^30: no factor between them belongs in here."),
        (right / 4 * 32, "units: That counts bits: a byte has 8 of them."),
    ]
    if divided == 1 and ranks > 1:
        rows += [
            (right / ranks, f"shares: Stage {stage} leaves {KINDS[i]} whole on every rank: what does it divide?"),
            (right * ranks, f"ranks: That is what all {ranks} ranks hold together: count for one of them."),
        ]
    elif divided > 1:
        rows += [(right * ranks, f"shares: Stage {stage} divides {KINDS[i]} among all {ranks} ranks.")]
    if i == 2 and mixed:
        rows += [
            (right * 8 / 12, "master weights: Adam's two averages are in it; what does Adam add its steps to?"),
            (right * 4 / 12, "states: One number of 32 bits for each parameter: Adam keeps two averages, and more."),
            (right * 6 / 12, "precision: Adam's numbers are in it with 16 bits: they have 32, or small steps vanish."),
            (right * 16 / 12, "states: That counts everything: parameters and gradients have places of their own."),
            (right * 10 / 12, "precision: The master weights have 32 bits, too: 16 bits are what they are a copy of."),
        ]
    elif i == 2:
        rows += [
            (right * 12 / 8, "master weights: In 32 bits Adam works on the parameters themselves: there is no copy."),
            (right * 4 / 8, "states: One number for each parameter: Adam keeps two averages."),
        ]
    elif mixed:
        rows += [(2 * right, f"precision: In mixed precision {KINDS[i]} have 16 bits: that is 2 bytes, not 4.")]
    else:
        rows += [(right / 2, f"precision: In 32 bits {KINDS[i]} have 4 bytes, not 2.")]
    return rows


EXERCISES = (Exercise("8.1", "the ledger of a 7B model", state_bytes, 1, _check_state_bytes),)
