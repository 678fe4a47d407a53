"""Sliders of 13 and 15: the cache of a published model, what a draft is worth, ranks that generate for others."""

import functools
from typing import NamedTuple

from ..comm.network import PRESETS
from ..inference.rollouts import round_seconds
from ..inference.speculative import expected_tokens
from ..parallel.grid.spec import SPECS, Spec, gpt
from ..plots import explore as drawing
from ..plots import explore_inference as pictures
from ..trace import number_text, seconds_text
from ..units import amount_text, counted
from .adjustable import Control, Value, doublings, logarithmic
from .explore import Answer
from .result import Picture, draw_picture

BITS = {"16 bits": 2.0, "8 bits": 1.0, "4 bits": 0.5}  # bytes of a number
SERVED = {
    "GPT-2 small": gpt("GPT-2 small", 12, 768, 12, 50257, 1024, "mixed adam"),
    "Llama 3 8B": SPECS["llama3_8b"],
    "Llama 3 70B": SPECS["llama3_70b"],
    "Llama 3 405B": SPECS["llama3_405b"],
    "GPT-3 175B": SPECS["gpt3"],
    "DeepSeek-V3": SPECS["deepseek_v3"],
}


class _Gpu(NamedTuple):
    """bytes/s from its memory, bytes in it, FLOP/s in 16 bits."""

    bandwidth: float
    memory: float
    flops: float


GPUS = {  # NVIDIA's data sheets, of the SXM modules; FLOP/s without sparsity
    "A100": _Gpu(2.039e12, 80e9, 312e12),
    "H100": _Gpu(3.35e12, 80e9, 989.4e12),
    "H200": _Gpu(4.8e12, 141e9, 989.4e12),
}
BATCHES = doublings(1, 512)


@functools.cache
def cached(model: str) -> float:
    """Return how many numbers the cache keeps for a token."""
    return SERVED[model].cached


def parameters_read(spec: Spec, batch: int) -> float:
    """Count the parameters that a step of so many sequences reads: of routed experts only the ones with a token."""
    routed = sum(layer.expert_parameters for layer in spec.layers)
    hit = 1 - (1 - spec.top_k / spec.experts) ** batch if routed else 0.0
    return spec.parameters - routed * (1 - hit)


def decode_seconds(model: str, context: int, batch: int, weights: str, cache: str, gpu: str, gpus: int) -> float:
    """Return s of one token for each sequence: everything is read once, or multiplied, whatever takes longer."""
    spec, on = SERVED[model], GPUS[gpu]
    nbytes = BITS[weights] * parameters_read(spec, batch) + BITS[cache] * cached(model) * context * batch
    return max(nbytes / on.bandwidth, 2 * spec.active * batch / on.flops) / gpus


def _kv_cache(model: str, context: int, batch: int, weights: str, cache: str, gpu: str, gpus: int) -> Picture:
    """Draw memory and time of decoding; messages between GPUs are not in it."""
    per_token = BITS[cache] * cached(model)
    kept, held = per_token * context * batch, BITS[weights] * SERVED[model].parameters
    room = gpus * GPUS[gpu].memory
    most = int(max(0, room - held) // (per_token * context))
    step = functools.partial(decode_seconds, model, context, weights=weights, cache=cache, gpu=gpu, gpus=gpus)
    took = step(batch)
    text = f"{amount_text(per_token)} of cache a token, {amount_text(kept)} for {batch} × {context:,}, next to "
    text += f"{amount_text(held)} of weights: {'fits' if kept + held <= room else 'does NOT fit'} into "
    text += f"{gpus} × {amount_text(GPUS[gpu].memory)}, which has room for {counted(most, 'sequence')}. "
    text += f"A token takes {seconds_text(took)}, all together {number_text(batch / took)} tokens/s."
    points = [(step(b), b / step(b)) for b in BATCHES]
    sizes = [per_token * context * b for b in BATCHES]
    args = BATCHES, sizes, held, room, points, most, batch
    return draw_picture(
        pictures.draw_kv_cache, *args, f"{model}, {context:,} tokens each, {gpus} × {gpu}", text=text, height=3.6
    )


GAMMAS, ACCEPTANCES = tuple(range(1, 13)), tuple(k / 100 for k in range(5, 100, 5))


def speed_up(acceptance: float, gamma: int, draft: float) -> float:
    """Return tokens of an iteration over the steps of the model that it takes: gamma of the draft, one of its own."""
    return expected_tokens(acceptance, gamma) / (gamma * draft + 1)


def _speculation(acceptance: float, gamma: int, draft: float) -> Picture:
    """Draw how much faster a draft makes decoding, against its length and against acceptance."""
    by_gamma = [speed_up(acceptance, g, draft) for g in GAMMAS]
    shares = sorted({*ACCEPTANCES, acceptance})
    by_acceptance = [speed_up(a, gamma, draft) for a in shares]
    best = GAMMAS[max(range(len(GAMMAS)), key=by_gamma.__getitem__)]
    tokens, now = expected_tokens(acceptance, gamma), speed_up(acceptance, gamma, draft)
    text = f"{number_text(tokens)} tokens an iteration of {number_text(gamma * draft + 1)} steps of the model: "
    text += f"{number_text(now)} times as fast. Best γ: {best}, {number_text(max(by_gamma))} times."
    args = GAMMAS, by_gamma, gamma, shares, by_acceptance, acceptance
    title = f"acceptance {acceptance:g}, γ = {gamma}, a draft of {draft:g} of the model's step"
    return draw_picture(pictures.draw_speculation, *args, title, text=text, height=drawing.HEIGHT)


NODE, ROLLOUTS = 8, 256  # GPUs; rollouts of one update
GENERATING = tuple(range(1, NODE - 1))  # 16 bytes of state per parameter, by ZeRO-3 (08), need two GPUs that train
EVERY = doublings(1, 16)
RL_MODEL, RL_GPU = "Llama 3 8B", "H100"
SHARE_OF_PEAK = 0.4  # in training, an assumption


def generate_seconds(ranks: int, length: int) -> float:
    """Return s in which so many GPUs generate all rollouts: in waves, if the caches of all do not fit."""
    gpu, weights = GPUS[RL_GPU], BITS["16 bits"] * SERVED[RL_MODEL].parameters
    each = -(-ROLLOUTS // ranks)
    room = int((gpu.memory - weights) // (BITS["16 bits"] * cached(RL_MODEL) * length))
    waves = -(-each // room)
    step = decode_seconds(RL_MODEL, length // 2, -(-each // waves), "16 bits", "16 bits", RL_GPU, 1)
    return waves * length * step


def update_seconds(ranks: int, length: int) -> float:
    """Return s in which so many GPUs train on all rollouts: 6 FLOPs per parameter and token, attention left out."""
    flops = 6 * SERVED[RL_MODEL].active * ROLLOUTS * length
    return flops / (ranks * SHARE_OF_PEAK * GPUS[RL_GPU].flops)


def rollout_rate(generating: int, every: int, length: int) -> float:
    """Return tokens/s, if the other GPUs of the node train."""
    times = generate_seconds(generating, length), update_seconds(NODE - generating, length)
    send = BITS["16 bits"] * SERVED[RL_MODEL].parameters * PRESETS["nvlink_4"].beta
    return every * ROLLOUTS * length / round_seconds(every, *times, send)


def _rollouts(generating: int, every: int, length: int) -> Picture:
    """Draw tokens/s against staleness; answers are all of one length, and messages of tokens take no time."""
    rate, training = rollout_rate(generating, every, length), NODE - generating
    in_turn = ROLLOUTS * length / (generate_seconds(NODE, length) + update_seconds(NODE, length))
    by_ranks = [rollout_rate(n, every, length) for n in GENERATING]
    points = [((k - 1) / 2, rollout_rate(generating, k, length)) for k in sorted({*EVERY, every})]
    text = f"{counted(generating, 'GPU')} of {NODE} generate {ROLLOUTS} × {length:,} tokens in "
    text += f"{seconds_text(generate_seconds(generating, length))}, an update on {training} takes "
    text += f"{seconds_text(update_seconds(training, length))}. {number_text(rate)} tokens/s, "
    text += f"staleness on average {(every - 1) / 2:g}, at most {every - 1}. "
    text += f"All {NODE} in turn: {number_text(in_turn)} tokens/s, staleness 0."
    title = f"{RL_MODEL} on {NODE} × {RL_GPU}, weights are sent every {counted(every, 'update')}"
    args = by_ranks, generating, points, ((every - 1) / 2, rate), in_turn, title
    return draw_picture(pictures.draw_rollouts, *args, text=text, height=3.6)


GUESSED: dict[str, Value] = {"model": "Llama 3 8B", "context": 8192, "batch": 32, "cache": "16 bits"}  # in the notebook
EXPLORERS: dict[str, tuple[dict[str, Control], Answer]] = {
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
        _kv_cache,
    ),
    "speculation": (
        {
            "acceptance": Control(ACCEPTANCES, 0.8),
            "gamma": Control(GAMMAS, 4),
            "draft": Control(logarithmic(0.01, 1, (1, 2, 5)), 0.1),
        },
        _speculation,
    ),
    "rollouts": (
        {
            "generating": Control(GENERATING, 4, lambda n: f"{n} of {NODE} GPUs"),
            "every": Control(EVERY, 4, lambda k: counted(k, "update")),
            "length": Control(doublings(256, 8192), 2048, "{:,} tokens".format),
        },
        _rollouts,
    ),
}
