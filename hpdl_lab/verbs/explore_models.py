"""The slider of notebook 12: what published models take to train, the grid that they fit on, and their caches."""

import functools
import math
from collections.abc import Iterable, Iterator

from ..mesh import Grid
from ..parallel.grid.machine import grid_of
from ..parallel.grid.memory import memory_of
from ..parallel.grid.spec import SPECS, TRAININGS, Spec
from ..plots import explore_models as pictures
from ..trace import number_text
from ..units import amount_text
from .adjustable import Control, doublings
from .explore import Answer
from .result import Picture, draw_picture

MODELS: dict[str, Spec] = {
    SPECS[name].name: SPECS[name]
    for name in ("vit_h", "llama3_8b", "mixtral", "llama3_70b", "gpt3", "llama3_405b", "deepseek_v3")
}
AS_TRAINED = {  # grids in their papers, and Megatron's of GPT-3, arXiv:2104.04473, section 5.1
    "GPT-3 175B": "tp 8, pp 16 on 1,024 A100",
    "Llama 3 405B": "tp 8, pp 16 on 16,384 H100",
    "DeepSeek-V3": "ep 64, pp 16 on 2,048 H800",
}
NODE, MOST_STAGES, MOST_EP = 8, 32, 64
LENGTHS = doublings(1024, 2**20)
BYTES = 2  # of a number in the cache
GUESSED = 131072  # tokens


def _cached(model: str) -> float:
    """Return the bytes that the cache keeps for a token; 0: it writes none."""
    return 0.0 if model.startswith("ViT") else BYTES * MODELS[model].cached


def _ladder(spec: Spec, gpus: int) -> Iterator[Grid]:
    """Yield grids of so many GPUs, the model cut more and more: its experts over ep, or its layers over tp; then pp."""
    cuts = {"ep": 1, "tp": 1, "pp": 1}
    axes = {"ep": min(MOST_EP, spec.experts)} if spec.experts else {"tp": math.gcd(NODE, spec.kv_heads or spec.heads)}
    for axis, most in {"": 1, **axes, "pp": MOST_STAGES}.items():
        for n in doublings(2, most) if axis else (1,):
            cuts |= {axis: n} if axis else {}
            if math.prod(cuts.values()) > gpus:
                return
            yield grid_of(gpus // math.prod(cuts.values()), **cuts)


@functools.lru_cache(maxsize=1024)
def _fullest(model: str, grid: Grid) -> int:
    """Return bytes of the rank that holds most: ZeRO-1, blocks computed again, one sequence in a micro-batch."""
    every = memory_of(MODELS[model], grid, "1f1b", grid["pp"], recompute="blocks", sequence=grid["tp"] > 1, stage=1)
    return max(held.total for held in every)


def _named(grid: Grid, axes: Iterable[str]) -> str:
    """Return the sizes of these axes in words."""
    return " × ".join(f"{axis} {grid[axis]:,}" for axis in axes if grid[axis] > 1) or "uncut"


def _published(model: str, gpus: int, memory: int, positions: int) -> Picture:
    """Draw how far a model is cut until it fits, and the bytes of caches."""
    spec, limit, rows = MODELS[model], memory * 1e9, []
    for grid in _ladder(spec, gpus):
        rows.append((_named(grid, ("ep", "pp", "tp")), _fullest(model, grid)))
        if rows[-1][1] <= limit:
            break
    held, state = rows[-1][1], sum(TRAININGS["mixed adam"][:3]) * spec.parameters
    text = f"{number_text(spec.parameters / 1e9)} billion parameters"
    text += f", {number_text(spec.active / 1e9)} billion for a token" if spec.active < spec.parameters else ""
    text += f": {amount_text(state)} to train, {number_text(spec.flops / spec.positions / 1e9)} GFLOP a token. "
    fits = f"{_named(grid, grid.axes)} fits" if held <= limit else f"not even {_named(grid, grid.axes)} fits"
    text += f"On {gpus:,} GPUs {fits}, {amount_text(held)} each"
    text += f" (trained with {AS_TRAINED[model]}). " if model in AS_TRAINED else ". "
    text += (
        f"Cache of {positions:,} tokens: {amount_text(_cached(model) * positions)}." if _cached(model) else "No cache."
    )
    curves = {name: [_cached(name) * n for n in LENGTHS] for name in MODELS if _cached(name)}
    names, bars = zip(*rows, strict=True)
    args = names, bars, limit, curves, LENGTHS, model, positions, f"{model} on {gpus:,} GPUs"
    return draw_picture(pictures.draw_published, *args, text=text, height=3.6)


EXPLORERS: dict[str, tuple[dict[str, Control], Answer]] = {
    "published": (
        {
            "model": Control(tuple(MODELS), "Llama 3 405B"),
            "gpus": Control(doublings(8, 16384), 1024, "{:,}".format),
            "memory": Control((40, 80, 141, 192), 80, "{} GB".format),
            "positions": Control(LENGTHS, GUESSED, "{:,}".format),
        },
        _published,
    ),
}
