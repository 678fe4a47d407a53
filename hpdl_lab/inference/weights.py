"""Real weights: a GPT that has read Moby-Dick, and a smaller one that drafts for it. `hpdl weights` trains both.

    model, draft = load("moby_dick"), load("moby_dick_draft")
    decode(generate(model, encode("Call me "), 200))

They are stored next to the text, in float16, and read characters of that text: `encode` and `decode` are its alphabet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax

from .. import models
from ..data import text
from ..data.dataset import DataError
from ..data.text import decode, encode
from ..units import require_int
from .speculative import acceptance

if TYPE_CHECKING:
    from ..models.gpt import LanguageModel

__all__ = ["TRAINED", "decode", "encode", "load_tensors", "held_out_loss", "load", "mean_acceptance", "save", "train"]

FOLDER = Path(text.__file__).parent
BATCH = 8  # windows per step
WARM_UP = 100  # steps, over which the learning rate rises; after it, it falls as a cosine
REPORTED = 100  # steps between two losses
HELD_OUT = 32  # windows of the last tenth of the text, for losses and acceptance


class _GptSizes(TypedDict):
    """The sizes of a GPT, see models/gpt.py."""

    block: int
    layers: int
    heads: int
    width: int


class _Training(NamedTuple):
    """The training behind a file of weights: a GPT of `fields`, trained for `steps` at learning rate `lr`."""

    fields: _GptSizes
    steps: int
    lr: float


TRAINED = {
    "moby_dick": _Training({"block": 256, "layers": 4, "heads": 4, "width": 128}, steps=3500, lr=3e-3),
    "moby_dick_draft": _Training({"block": 256, "layers": 1, "heads": 2, "width": 64}, steps=6000, lr=6e-3),
}


def train(
    name: str, steps: int | None = None, report: Callable[[int, float], None] = lambda step, loss: None
) -> nn.Module:
    """Train the GPT of this name on random windows of the first nine tenths of Moby-Dick; the same weights every time.

    Args:    name: of TRAINED; steps: default as in TRAINED; report: f(step, loss), called now and then.
    Returns: GPT in float32.
    """
    fields, usual, lr = TRAINED[name]
    steps = usual if steps is None else require_int("steps", steps, 1)
    tokens, block = text.in_bytes().long(), fields["block"]
    end = len(tokens) - len(tokens) // text.TEST_SHARE - block - 1
    model = models.build("gpt", vocabulary=len(text.vocabulary()), **fields)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = min(WARM_UP, steps // 2)

    def rate(step: int) -> float:
        return min((step + 1) / (warm_up + 1), 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm_up) / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(end, (BATCH, 1), generator=generator)
        window = tokens[starts + torch.arange(block + 1)]  # (b, block + 1)
        loss = cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORTED == 0 or step == steps - 1:
            report(step, loss.item())
    return model.eval()


def _held_out(block: int) -> tuple[Tensor, Tensor]:
    """Return windows that were not trained on, and the token after each of theirs: (HELD_OUT, block) int64 each."""
    data = text.load(block)
    return data.test_x[:HELD_OUT], data.test_y[:HELD_OUT]


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Return mean cross-entropy per character, in nats, on text that was not trained on."""
    x, y = _held_out(cast("LanguageModel", model).block)
    return cross_entropy(model(x).flatten(0, 1), y.flatten()).item()


@torch.no_grad()
def mean_acceptance(model: nn.Module, draft: nn.Module) -> float:
    """Return the probability that `model` keeps a token that `draft` has drawn, on average over held-out text."""
    x, _ = _held_out(min(cast("LanguageModel", one).block for one in (model, draft)))
    p, q = (softmax(one(x), -1) for one in (model, draft))  # (n, block, V)
    return acceptance(p, q).mean().item()


# -- files ------------------------------------------------------------------------------------------------------------


def save(model: nn.Module, path: Path, fields: Mapping[str, object], architecture: str = "gpt", **facts: float) -> None:
    """Write the parameters of `model` to `path` as float16, with the fields by which `load` builds it, and `facts`."""
    about = {"architecture": architecture, "fields": json.dumps(fields), "text": text.SHA256}
    tensors = {name: x.to(torch.float16).contiguous() for name, x in model.state_dict().items()}
    save_file(tensors, path, about | {name: f"{fact:.4f}" for name, fact in facts.items()})


def load(name: str | Path) -> nn.Module:
    """Return the model of this name, in float32 and eval mode. It reads the characters of Moby-Dick: see `encode`.

    Args:    name: of TRAINED, or the path of a file that `save` wrote.
    Raises:  LookupError for a name that is none; data.dataset.DataError for a file that is missing or damaged, or whose
             tokens are of another text.
    """
    path = FOLDER / f"{name}.safetensors" if name in TRAINED else Path(name)
    if path.suffix != ".safetensors":
        raise LookupError(f"no weights are called {str(name)!r}: {', '.join(TRAINED)}, or a .safetensors file")
    about = _read_about(path)
    if about.get("text") != text.SHA256:
        raise DataError(f"{path} holds no weights of a model that reads Moby-Dick: `hpdl weights` trains such ones")
    fields: dict[str, Any] = {"vocabulary": len(text.vocabulary()), **json.loads(about["fields"])}
    return load_tensors(models.build(about["architecture"], **fields), path).eval()


def _read_about(path: Path) -> dict[str, str]:
    """Return the metadata of a file of tensors. Raises DataError if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as problem:
        raise DataError(f"The weights {path} cannot be read: {problem}: `hpdl weights` trains them anew") from None


def load_tensors(model: nn.Module, path: Path) -> nn.Module:
    """Copy the tensors of a file into `model`; returns it.

    Raises:  ValueError, before anything is copied, if they are of another architecture or of other shapes.
    """
    stored, own = load_file(path), dict[str, Tensor](model.state_dict())
    kind = f"{path} holds weights of another model than this {type(model).__name__}"
    for name in sorted(stored.keys() ^ own.keys()):
        where = "the file" if name in stored else "the model"
        raise ValueError(
            f"{kind}: {len(stored.keys() ^ own.keys())} tensors are in one only, such as {name} of {where}"
        )
    for name, x in stored.items():
        if x.shape != own[name].shape:
            raise ValueError(f"{kind}: its {name} is {tuple(x.shape)}, the model's {tuple(own[name].shape)}")
    model.load_state_dict(stored)
    return model
