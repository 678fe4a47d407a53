"""Generating with the same LLaMA weights on the same cores: our engine, and transformers' generate with its cache."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from .. import models
from ..inference.engine import Engine
from ..inference.quantize import long_rows, quantize, weight_bytes
from ..models.llama import Decoder
from ..units import amount_text, counted
from . import launch
from .report import Column, Report, Row, Table, field
from .timing import quartiles

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

SIZES: dict[str, dict[str, int]] = {
    "small": {"vocabulary": 2048, "block": 512, "layers": 6, "heads": 6, "kv_heads": 2, "width": 192, "hidden": 512},
    "medium": {"vocabulary": 4096, "block": 512, "layers": 8, "heads": 8, "kv_heads": 4, "width": 512, "hidden": 1408},
}
THETA = 500_000
ONE = (64, 128)  # tokens of the prompt, and new ones
PROMPTS, NEW = (8, 128), (8, 256)  # of requests of mixed lengths, (least, most): as many below as above the root
STATIC = 4  # requests of a smaller static batch
OURS, INT8, THEIRS = "hpdl_lab", "hpdl_lab, int8", "transformers"

TABLE = Table(
    [
        field("name", width=30, left=True),
        field("tokens/s", "tokens_per_s", ",.0f"),
        field("p25", "p25", ",.0f", width=7),
        field("p75", "p75", ",.0f", width=7),
        field("per token", "ms", ".2f", unit="ms"),
        Column("speed", lambda row: f"{row['speed']:.2f}x"),
        Column("same tokens", lambda row: f"{row['same']:.0%}"),
        field("#wrong", "wrong", width=6),
    ],
    group="group",
)
Tokens = list[list[int]]


def inference(size: str, requests: int, rounds: int, report: Report = Report()) -> list[Row]:  # noqa: B008
    """Race both, print the table; returns its rows, and writes them as `report` says.

    Raises:  ValueError if transformers is not installed.
    """
    theirs, version = _transformers_llama(size)
    ours, small = (cast(Decoder, models.from_transformers(theirs)).eval() for _ in range(2))
    long_rows(ours)
    quantize(small)
    about = launch.about() | {
        "method": f"A LLaMA of {sum(p.numel() for p in ours.parameters()) / 1e6:.1f} million random weights, "
        f"{amount_text(weight_bytes(ours))} in float32 and {amount_text(weight_bytes(small))} with int8, the same for "
        f"all; greedy; transformers {version} with its cache; {counted(torch.get_num_threads(), 'thread')}. All take "
        f"turns, {counted(rounds, 'round')}; time includes reading the prompts. Mixed lengths: their logarithm is "
        "uniform. speed: over the faster of transformers; same tokens: as it says; #wrong: requests that differ."
    }

    def messages() -> Iterator[Row]:
        yield {"about": about}
        yield from _single(ours, small, theirs, rounds)
        yield from _mixed(ours, small, theirs, requests, rounds)

    return TABLE.tell(f"inference, a {size} LLaMA against transformers", messages(), report=report)


def _transformers_llama(size: str) -> tuple[LlamaForCausalLM, str]:
    """Return transformers' LLaMA of this size with random weights, and the version."""
    try:
        import transformers
    except ImportError as problem:
        where = "which is not installed: pip install transformers"
        raise ValueError(f"hpdl bench inference races transformers, {where}") from problem
    transformers.logging.set_verbosity_error()
    fields = SIZES[size]
    config = transformers.LlamaConfig(
        vocab_size=fields["vocabulary"],
        max_position_embeddings=fields["block"],
        num_hidden_layers=fields["layers"],
        num_attention_heads=fields["heads"],
        num_key_value_heads=fields["kv_heads"],
        hidden_size=fields["width"],
        intermediate_size=fields["hidden"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": float(THETA)},
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval(), transformers.__version__


def _single(ours: Decoder, small: Decoder, theirs: LlamaForCausalLM, rounds: int) -> list[Row]:
    """Run one request at a time."""
    prompt, new = _drawn(1, ONE[:1] * 2, ONE[1:] * 2, vocabulary=ours.tokens.num_embeddings)
    runs = {
        OURS: lambda: _engine(ours, prompt, new, slots=1),
        INT8: lambda: _engine(small, prompt, new, slots=1),
        THEIRS: lambda: static(theirs, prompt, new, 1),
    }
    return _race(f"one request, {ONE[0]} tokens and {ONE[1]} new", runs, new, rounds)


def _mixed(ours: Decoder, small: Decoder, theirs: LlamaForCausalLM, requests: int, rounds: int) -> list[Row]:
    """Run requests of mixed lengths, all there at the start."""
    prompts, new = _drawn(requests, PROMPTS, NEW, vocabulary=ours.tokens.num_embeddings)
    runs = {
        OURS: lambda: _engine(ours, prompts, new, slots=requests),
        f"{OURS}, {STATIC} slots": lambda: _engine(ours, prompts, new, slots=STATIC),
        INT8: lambda: _engine(small, prompts, new, slots=requests),
        f"{THEIRS}, a batch of {requests}": lambda: static(theirs, prompts, new, requests),
        f"{THEIRS}, batches of {STATIC}": lambda: static(theirs, prompts, new, STATIC),
    }
    lengths = f"{PROMPTS[0]} to {PROMPTS[1]} tokens and {NEW[0]} to {NEW[1]} new"
    return _race(f"{counted(requests, 'request')}, {lengths}", runs, new, rounds)


def _drawn(n: int, prompts: tuple[int, ...], new: tuple[int, ...], vocabulary: int) -> tuple[Tokens, list[int]]:
    """Return the prompts of n requests, and how many tokens each asks for; the logarithm of a length is uniform."""
    generator = random.Random(0)

    def length(least: int, most: int) -> int:
        return round(math.exp(generator.uniform(math.log(least), math.log(most))))

    found = [[generator.randrange(vocabulary) for _ in range(length(*prompts))] for _ in range(n)]
    return found, [length(*new) for _ in range(n)]


def _engine(model: nn.Module, prompts: Tokens, new: list[int], slots: int) -> Tokens:
    """Run ours; with a new engine, which finds no prefix of an earlier run."""
    ours = Engine(model, slots=slots)
    streams = [ours.submit(prompt, n) for prompt, n in zip(prompts, new, strict=True)]
    return [[*stream] for stream in streams]


@torch.inference_mode()
def static(theirs: LlamaForCausalLM, prompts: Tokens, new: list[int], batch: int) -> Tokens:
    """Run theirs: static batches, padded on the left; each goes on until its longest request has ended."""
    made = []
    for first in range(0, len(prompts), batch):
        some, most = prompts[first : first + batch], max(new[first : first + batch])
        longest = max(map(len, some))
        tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in some])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in some])
        out = theirs.generate(tokens, attention_mask=mask, max_new_tokens=most, do_sample=False, use_cache=True)
        made += [row[:n] for row, n in zip(out[:, longest:].tolist(), new[first : first + batch], strict=True)]
    return made


def _race(group: str, runs: dict[str, Callable[[], Tokens]], new: list[int], rounds: int) -> list[Row]:
    """Return the rows of all candidates, which take turns after a run of each, in which they are compared."""
    made = {name: run() for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    total, theirs = sum(new), [name for name in runs if name.startswith(THEIRS)]
    speeds = {
        name: quartiles([total / t for t in found]) if rounds > 1 else [total / t for t in found] * 3
        for name, found in times.items()
    }
    fastest = max(speeds[name][0] for name in theirs)
    rows = []
    for name, (median, p25, p75) in speeds.items():
        pairs = [
            (a, b) for one, two in zip(made[name], made[theirs[0]], strict=True) for a, b in zip(one, two, strict=True)
        ]
        same = sum(a == b for a, b in pairs) / total
        wrong = sum(a != b for a, b in zip(made[name], made[theirs[0]], strict=True)) if "int8" not in name else 0
        rows.append(
            {
                "group": group,
                "name": name,
                "tokens_per_s": median,
                "p25": p25,
                "p75": p75,
                "ms": 1e3 / median,
                "speed": median / fastest,
                "same": same,
                "wrong": wrong,
            }
        )
    return rows
