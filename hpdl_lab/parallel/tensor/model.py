"""Tensor parallel training: every rank holds a part of each layer, sees the whole batch, and all compute one model.

    model = tensor_parallel(comm, models.build("gpt"))       this rank's shard of an unchanged model
    loss = cross_entropy(model(x).flatten(0, 1), y.flatten())     x, y and the loss: the same on every rank
    loss.backward()                                          waits for the other ranks, as forward does
    add_partial_gradients(comm, model)                       only with sequence=True
    optimizer.step()

| model | how it is cut                                                      | messages of b s d (b c h w) elements |
|-------|--------------------------------------------------------------------|--------------------------------------|
| mlp   | linear layers in pairs, columns then rows; one that is left: whole | 1 all-reduce per pair, each way      |
| gpt   | heads, the mlp of each block, the vocabulary                       | 2 per block each way, 1 per end      |
| llama | key heads and their queries, hidden units, both tables of tokens   | 2 per block each way, 1 per end      |
| deepseek | heads, hidden units but of routed experts, both tables          | 2 per block forward, see decoders.py |
| vit   | heads, the mlp of each block                                       | 2 per block each way                 |
| cnn   | channels between the two convolutions of each block                | 1 per block each way                 |

On simulated ranks backward waits for others inside autograd: sim.run(..., threads=True).
Ref: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import torch
from torch import nn

from ...comm.base import Comm
from ...models import cnn, transformer
from ...models.cnn import CNN
from ...models.deepseek import DeepSeek
from ...models.gpt import GPT
from ...models.llama import Llama
from ...models.vit import ViT
from ..consensus import require_same_model
from ..data_parallel import replicate
from .decoders import shard_decoder
from .linear import ColumnLinear, RowLinear, require_positions
from .spatial import shard_convolutions
from .transformer import GatheredNorm, SplitBlock, TensorGPT, shard_block

NUMBER_BY_NUMBER = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)  # the same on a part as on the whole


def tensor_parallel(comm: Comm, model: nn.Module, sequence: bool = False, whole_logits: bool = True) -> nn.Module:
    """Return this rank's shard of `model`, which stays as it is. Collective.

    Args:    model: one of models/, of the same structure on every rank; rank 0's values are taken.
             sequence: between the layers of a transformer a rank holds s/p positions; add_partial_gradients after
             backward. whole_logits=False: a decoder returns this rank's logits, for vocabulary_cross_entropy.
    Returns: nn.Module, called as `model` is; parameters have the names of the whole model's. tensor.cuts.cuts_of says
             how each is cut, gather_parameters puts them together.
    Raises:  ValueError on every rank if it cannot be cut for comm.size ranks, or if the ranks' models differ.
    """
    shard(comm, copy.deepcopy(model), sequence, whole_logits)  # raises what it has to say before the first message
    require_same_model(comm, model, f"tensor_parallel(sequence={sequence})")
    whole = copy.deepcopy(model)
    replicate(comm, whole)
    return shard(comm, whole, sequence, whole_logits)


def shard(comm: Comm, whole: nn.Module, sequence: bool = False, whole_logits: bool = True) -> nn.Module:
    """Return this rank's shard of `whole`, which is used up. No messages: ranks have equal models, unchecked.

    Raises:  ValueError as tensor_parallel does.
    """
    if type(whole) not in KINDS:
        known = ", ".join(KINDS[kind].name for kind in KINDS)
        raise ValueError(f"tensor_parallel cannot cut a {type(whole).__name__}: it cuts {known}")
    kind = KINDS[type(whole)]
    options = {"sequence": sequence, "whole_logits": whole_logits}
    for option, value in options.items():
        if value != DEFAULTS[option] and option not in kind.options:
            able = ", ".join(other.name for other in KINDS.values() if option in other.options)
            raise ValueError(f"{option}={value} is for {able}: a {kind.name} has no such thing")
    with torch.random.fork_rng(devices=[]):  # new layers draw numbers before they get their values
        return kind.cut(comm, whole, **{option: options[option] for option in kind.options})


def _shard_mlp(comm: Comm, layers: nn.Sequential) -> nn.Sequential:
    """Cut linear layers in pairs, columns then rows; the last of an odd number stays whole."""
    for name, layer in layers.named_children():
        if not isinstance(layer, (nn.Linear, *NUMBER_BY_NUMBER)):
            text = ", ".join(kind.__name__ for kind in (nn.Linear, *NUMBER_BY_NUMBER))
            raise ValueError(f"layer {name} is a {type(layer).__name__}: an nn.Sequential can be cut if all are {text}")
    linears = [(i, layer) for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
    for (i, wide), (j, narrow) in zip(linears[::2], linears[1::2], strict=False):
        layers[i], layers[j] = ColumnLinear(comm, wide), RowLinear(comm, narrow)
    return layers


def _shard_vit(comm: Comm, vit: ViT, sequence: bool) -> ViT:
    """Cut the blocks; with `sequence` the first one takes this rank's positions, and the last norm gathers all."""
    if sequence:
        require_positions(comm, vit.positions.shape[1])
    for block in cast("Iterable[transformer.Block]", vit.blocks):
        shard_block(comm, block, sequence)
    if sequence:
        vit.blocks[0] = SplitBlock(comm, cast(transformer.Block, vit.blocks[0]))
        vit.norm = GatheredNorm(comm, vit.norm)
    return vit


def _shard_cnn(comm: Comm, whole: CNN) -> CNN:
    """Cut the channels between the two convolutions of each block."""
    for block in cast("Iterable[cnn.Block]", whole.blocks):
        shard_convolutions(comm, block)
    return whole


class _Kind(NamedTuple):
    """A way to cut a model. cut: f(comm, whole, **options) -> this rank's shard; options: some of tensor_parallel's."""

    name: str
    cut: Callable[..., nn.Module]
    options: tuple[str, ...] = ()


DEFAULTS = {"sequence": False, "whole_logits": True}
KINDS: dict[type[nn.Module], _Kind] = {
    nn.Sequential: _Kind("mlp", _shard_mlp),
    CNN: _Kind("cnn", _shard_cnn),
    GPT: _Kind("gpt", TensorGPT, ("sequence", "whole_logits")),
    Llama: _Kind("llama", shard_decoder, ("whole_logits",)),
    DeepSeek: _Kind("deepseek", shard_decoder, ("whole_logits",)),
    ViT: _Kind("vit", _shard_vit, ("sequence",)),
}
