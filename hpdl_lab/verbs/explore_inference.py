"""Sliders of notebook 13: what the cache of a published model takes, and what a draft is worth."""

import functools
from typing import Any, NamedTuple

from ..inference.speculative import expected_tokens
from ..parallel.grid.spec import SPECS, Spec, gpt, llama
from ..plots import explore as drawing
from ..plots import explore_inference as pictures
from ..trace import number_text, seconds_text
from ..units import amount_text, counted
from .explore import Control, doublings, logarithmic
from .result import Picture, drawn

BITS = {"16 bits": 2.0, "8 bits": 1.0, "4 bits": 0.5}  # bytes of a number
SERVED = {
    "GPT-2 small": gpt("GPT-2 small", 12, 768, 12, 50257, 1024, "mixed adam"),
    "Llama 3 8B": llama("Llama 3 8B", 32, 4096, 32, 8, 14336, 128256, 8192),
    "Llama 3 70B": SPECS["llama3_70b"],
    "Llama 3 405B": SPECS["llama3_405b"],
    "GPT-3 175B": SPECS["gpt3"],
    "DeepSeek-V3": SPECS["deepseek_v3"],
}


class Gpu(NamedTuple):
    """bytes/s from its memory, bytes of it, FLOP/s in 16 bits."""

    bandwidth: float
    memory: float
    flops: float


GPUS = {  # NVIDIA's data sheets, of the SXM modules; FLOP/s without sparsity
    "A100": Gpu(2.039e12, 80e9, 312e12),
    "H100": Gpu(3.35e12, 80e9, 989.4e12),
    "H200": Gpu(4.8e12, 141e9, 989.4e12),
}
BATCHES = doublings(1, 512)


@functools.cache
def cached(model: str) -> float:
    """Numbers that the cache keeps for a token."""
    return SERVED[model].cached


def read(spec: Spec, batch: int) -> float:
    """Parameters that a step of so many sequences reads: of routed experts those that any of its tokens is sent to."""
    routed = sum(layer.experts for layer in spec.layers)
    hit = 1 - (1 - spec.top_k / spec.experts) ** batch if routed else 0.0
    return spec.parameters - routed * (1 - hit)


def step_seconds(model: str, context: int, batch: int, weights: str, cache: str, gpu: str, gpus: int) -> float:
    """s of one token for each sequence: everything is read once, or multiplied, whatever takes longer."""
    spec, on = SERVED[model], GPUS[gpu]
    nbytes = BITS[weights] * read(spec, batch) + BITS[cache] * cached(model) * context * batch
    return max(nbytes / on.bandwidth, 2 * spec.active * batch / on.flops) / gpus


def kv_cache(model: str, context: int, batch: int, weights: str, cache: str, gpu: str, gpus: int) -> Picture:
    """Memory and time of decoding; messages between GPUs are not in it."""
    per_token = BITS[cache] * cached(model)
    kept, held = per_token * context * batch, BITS[weights] * SERVED[model].parameters
    room = gpus * GPUS[gpu].memory
    most = int(max(0, room - held) // (per_token * context))
    step = functools.partial(step_seconds, model, context, weights=weights, cache=cache, gpu=gpu, gpus=gpus)
    took = step(batch)
    text = f"{amount_text(per_token)} of cache a token, {amount_text(kept)} for {batch} × {context:,}, next to "
    text += f"{amount_text(held)} of weights: {'fits' if kept + held <= room else 'does NOT fit'} into "
    text += f"{gpus} × {amount_text(GPUS[gpu].memory)}, which has room for {counted(most, 'sequence')}. "
    text += f"A token takes {seconds_text(took)}, all together {number_text(batch / took)} tokens/s."
    points = [(step(b), b / step(b)) for b in BATCHES]
    sizes = [per_token * context * b for b in BATCHES]
    args = BATCHES, sizes, held, room, points, most, batch
    return drawn(pictures.kv_cache, *args, f"{model}, {context:,} tokens each, {gpus} × {gpu}", text=text, height=3.6)


GAMMAS, ACCEPTANCES = tuple(range(1, 13)), tuple(k / 100 for k in range(5, 100, 5))


def speed_up(acceptance: float, gamma: int, draft: float) -> float:
    """Tokens of an iteration over the steps of the model that it takes: gamma of the draft and one of its own."""
    return expected_tokens(acceptance, gamma) / (gamma * draft + 1)


def speculation(acceptance: float, gamma: int, draft: float) -> Picture:
    by_gamma = [speed_up(acceptance, g, draft) for g in GAMMAS]
    shares = sorted({*ACCEPTANCES, acceptance})
    by_acceptance = [speed_up(a, gamma, draft) for a in shares]
    best = GAMMAS[max(range(len(GAMMAS)), key=by_gamma.__getitem__)]
    tokens, now = expected_tokens(acceptance, gamma), speed_up(acceptance, gamma, draft)
    text = f"{number_text(tokens)} tokens an iteration of {number_text(gamma * draft + 1)} steps of the model: "
    text += f"{number_text(now)} times as fast. Best γ: {best}, {number_text(max(by_gamma))} times."
    args = GAMMAS, by_gamma, gamma, shares, by_acceptance, acceptance
    title = f"acceptance {acceptance:g}, γ = {gamma}, a draft of {draft:g} of the model's step"
    return drawn(pictures.speculation, *args, title, text=text, height=drawing.HEIGHT)


GUESSED = {"model": "Llama 3 8B", "context": 8192, "batch": 32, "cache": "16 bits"}  # what the notebook asks about
EXPLORERS: dict[str, Any] = {
    "kv_cache": (
        {
            "model": Control(tuple(SERVED), "Llama 3 8B"),
            "context": Control(doublings(256, 2**17), 8192, "{:,}".format),
            "batch": Control(BATCHES, 32),
            "weights": Control(tuple(BITS), "16 bits"),
            "cache": Control(tuple(BITS), "16 bits"),
            "gpu": Control(tuple(GPUS), "H100"),
            "gpus": Control(doublings(1, 64), 1),
        },
        kv_cache,
    ),
    "speculation": (
        {
            "acceptance": Control(ACCEPTANCES, 0.8),
            "gamma": Control(GAMMAS, 4),
            "draft": Control(logarithmic(0.01, 1, (1, 2, 5)), 0.1),
        },
        speculation,
    ),
}
