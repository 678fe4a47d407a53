"""Notebook 14: which share of the peak a training uses, for its model and in all."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import NamedTuple

from ...performance.machines import PROCESSORS
from ...performance.utilization import model_flops_utilization
from ..checkers import because, reason
from ..ranks import alone, capital, numbers_of
from ..record import Answer, Broken, Exercise, Passed, Reason


class _Training(NamedTuple):
    """The arguments of model_flops_utilization, in its order."""

    parameters: float
    layers: int
    width: int
    sequence: int
    tokens_per_s: float
    devices: int
    peak: float
    recomputed: float

    def __str__(self) -> str:
        return "with " + ", ".join(f"{name}={value:.6g}" for name, value in self._asdict().items())


A100 = PROCESSORS["A100 SXM 80GB"].peak["bfloat16"]
PUBLISHED = {  # name: (what is stated, published MFU, published HFU); None for what is not published
    # Chowdhery et al. 2022, arXiv:2204.02311; 48 heads of 256; what is recomputed follows from its HFU of 57.8%
    "PaLM 540B": (_Training(540.35e9, 118, 48 * 256, 2048, 238.3e3, 6144, 275e12, 0.75), 0.462, None),
    # Smith et al. 2022, arXiv:2201.11990: 1,920 sequences in 60.1 s, 126 teraFLOP/s; MFU: Chowdhery et al. 2022
    "MT-NLG 530B": (_Training(530e9, 105, 20480, 2048, 1920 * 2048 / 60.1, 2240, A100, 1.0), 0.302, 126e12 / A100),
    # NVIDIA, Megatron-LM, README.md, "GPT-3 Example"; 2021: 1,536 sequences in about 32 s, 138 teraFLOP/s
    "GPT-3 175B": (_Training(175e9, 96, 12288, 2048, 1536 * 2048 / 32, 1024, A100, 1.0), None, 138e12 / A100),
}


def _random_training(seed: int) -> _Training:
    rng = random.Random(seed)
    layers, width, sequence = rng.randint(8, 120), 128 * rng.randint(8, 160), 2 ** rng.randint(10, 17)
    parameters, devices = 12 * layers * width**2 + 128_000 * width, 2 ** rng.randint(1, 14)
    peak = PROCESSORS[rng.choice(["H100 SXM", "B200 SXM", "MI300X", "TPU v5p"])].peak["bfloat16"]
    flops = 6 * parameters + 12 * layers * sequence * width
    tokens_per_s = rng.uniform(0.2, 0.6) * devices * peak / flops
    recomputed = rng.choice([0.0, 1.0, round(rng.uniform(0.1, 0.9), 2)])
    return _Training(parameters, layers, width, sequence, tokens_per_s, devices, peak, recomputed)


def _check_utilization(fn: Answer) -> Passed:
    drawn = [_random_training(seed) for seed in range(20)]
    for training in (*(training for training, *_ in PUBLISHED.values()), *drawn):
        _check_training(fn, training)
    facts = [f"right for {len(PUBLISHED)} published trainings and {len(drawn)} drawn at random"]
    for name, (training, *published) in PUBLISHED.items():
        said = [
            f"{n:.1%}" + (f" (published: {p:.1%})" if p else "") for n, p in zip(fn(*training), published, strict=True)
        ]
        facts.append(f"{name} on {training.devices:,} devices: MFU {said[0]}, HFU {said[1]}")
    return Passed(*facts)


def _check_training(fn: Answer, training: _Training) -> None:
    """Raise Broken unless fn says both utilizations of a training."""
    where = capital(str(training))
    mfu, hfu = numbers_of(alone(fn, *training, where=where), 2, where, "(MFU, HFU), two numbers")
    right, in_all = model_flops_utilization(*training)
    if _same(mfu, in_all) and _same(hfu, right) and not _same(mfu, hfu):
        raise Broken(f"order: {where}, you return HFU first: return (MFU, HFU).")
    if not _same(mfu, right):
        text = f"{where}, the MFU should be {right:.4f}, and you say {mfu:.4g}."
        raise because(reason(mfu, _of_the_model(right, training), _same) or "mfu: ", text)
    if not _same(hfu, in_all):
        text = f"{where}, the MFU is right; the HFU should be {in_all:.4f}, and you say {hfu:.4g}."
        raise because(reason(hfu, _in_hardware(right, training), _same) or "hfu: ", text)


_same = partial(math.isclose, rel_tol=1e-9)


def _of_the_model(right: float, t: _Training) -> list[tuple[float, Reason]]:
    """Return (an MFU that may be said, why it is wrong) for each mistake."""
    n, attention, of_peak = t.parameters, t.layers * t.sequence * t.width, t.tokens_per_s / (t.devices * t.peak)
    again = "recomputation: The MFU counts what the model needs, even if a part of it is computed twice."
    missing = "attention: Some products of attention are missing. Which two are in forward, and how many in backward?"
    return [
        (100 * right, "units: That is in percent: return a fraction."),
        (right * t.devices * t.peak, "units: Those are FLOP/s: which share of the peak are they?"),
        ((8 * n + 16 * attention) * of_peak, again),
        (8 * n * of_peak, again),
        ((3 + t.recomputed) / 3 * right, again),
        (6 * n * of_peak, "attention: Products of queries, keys and values need no parameters, and they count, too."),
        ((6 * n + 6 * attention) * of_peak, missing),
        ((6 * n + 4 * attention) * of_peak, missing),
        (2 * n * of_peak, "backward: That is for parameters in forward. What does training compute besides?"),
        (right / 3, "backward: That is forward alone."),
        (right * 2 / 3, "backward: Backward takes more than forward: gradients of inputs and of parameters."),
        (right / 2, "factor: That is half. An addition is a FLOP as well, and `peak` is dense already."),
        (right * 2, "factor: That is twice as much. `peak` is dense already: sparsity has no part in it."),
        (right * t.devices, "devices: All devices together read these tokens, but `peak` is for one device."),
        (right * t.sequence, "tokens: tokens_per_s counts tokens, not sequences."),
    ]


def _in_hardware(mfu: float, t: _Training) -> list[tuple[float, Reason]]:
    """Return (an HFU that may be said, why it is wrong) for each mistake."""
    of_parameters = 2 * t.parameters * t.tokens_per_s / (t.devices * t.peak)
    return [
        (mfu, "recomputed: Backward computes a part of forward again. The hardware spends FLOPs on that, too."),
        (mfu * 4 / 3, "recomputed: That is for all of forward. `recomputed` says how much of it is repeated."),
        (mfu * (1 + t.recomputed), "recomputed: Only forward is repeated. Which share of a step is forward?"),
        (mfu + of_parameters * t.recomputed, "attention: Attention is computed again, too."),
        (mfu / (1 + t.recomputed / 3), "recomputed: The hardware does more than the model needs, not less."),
    ]


EXERCISES = (Exercise("14.1", "MFU and HFU", model_flops_utilization, 1, _check_utilization),)
