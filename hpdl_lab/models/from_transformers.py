"""Weights of transformers' classes for the same architectures: which of their tensors make one of ours.

    theirs    q_proj (h n, d)   k_proj (h_kv n, d)   v_proj (h_kv n, d)
    ours      qkv ((h + 2 h_kv) n, d)                                      one below the other: one product

What weights do not say has to be the same: the fields of the model, and constants. A gpt, llama or deepseek has those
of GPT-2, Llama 3 (rms_norm_eps 1e-5) and DeepSeek-V3 (1e-6, rope_interleave). A vit takes those of transformers' class
when it takes its weights: the exact GELU, and 1e-12 in its norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .deepseek import DeepSeek
from .gpt import GPT
from .llama import Llama
from .vit import ViT


class Source(NamedTuple):
    """names: of their tensors, "{}" is the number of the layer; make: f(tensors) -> ours."""

    names: tuple[str, ...]
    make: Callable[..., Tensor]


def same(name: str) -> Source:
    return Source((name,), lambda x: x)


def rows(*names: str) -> Source:
    """One below the other."""
    return Source(names, lambda *parts: torch.cat(parts))


def transposed(name: str) -> Source:
    """A weight (in, out), as GPT-2's Conv1D has it."""
    return Source((name,), lambda x: x.mT)


def half(name: str, number: int) -> Source:
    """Of the stacks (E, 2 hidden, d) of gates and ups, the first or second half."""
    return Source((name,), lambda x: x.chunk(2, 1)[number])


def biased(table: Callable[[str], Source], ours: str, *names: str) -> dict[str, Source]:
    """A layer's weight, by `table`, and its bias, one below the other."""
    return {
        f"{ours}.weight": table(*(f"{name}.weight" for name in names)),
        f"{ours}.bias": rows(*(f"{name}.bias" for name in names)),
    }


LAYER, THEIRS = "blocks.{}.", "model.layers.{}."
DECODER = {
    "tokens.weight": same("model.embed_tokens.weight"),
    "norm.weight": same("model.norm.weight"),
    "head.weight": same("lm_head.weight"),
    LAYER + "norm1.weight": same(THEIRS + "input_layernorm.weight"),
    LAYER + "norm2.weight": same(THEIRS + "post_attention_layernorm.weight"),
    LAYER + "attention.out.weight": same(THEIRS + "self_attn.o_proj.weight"),
    **{LAYER + f"mlp.{part}.weight": same(THEIRS + f"mlp.{part}_proj.weight") for part in ("gate", "up", "down")},
}
TABLES: dict[type[nn.Module], dict[str, Source]] = {
    Llama: DECODER
    | {LAYER + "attention.qkv.weight": rows(*(THEIRS + f"self_attn.{part}_proj.weight" for part in "qkv"))},
    DeepSeek: DECODER
    | {
        LAYER + f"attention.{ours}.weight": same(THEIRS + f"self_attn.{name}.weight")
        for ours, name in {
            "q_down": "q_a_proj",
            "q_norm": "q_a_layernorm",
            "q_up": "q_b_proj",
            "kv_down": "kv_a_proj_with_mqa",
            "kv_norm": "kv_a_layernorm",
            "kv_up": "kv_b_proj",
        }.items()
    }
    | {
        LAYER + f"mlp.shared.{part}.weight": same(THEIRS + f"mlp.shared_experts.{part}_proj.weight")
        for part in ("gate", "up", "down")
    }
    | {
        LAYER + "mlp.router.weight": same(THEIRS + "mlp.gate.weight"),
        LAYER + "mlp.router.bias": same(THEIRS + "mlp.gate.e_score_correction_bias"),
        LAYER + "mlp.experts.gate": half(THEIRS + "mlp.experts.gate_up_proj", 0),
        LAYER + "mlp.experts.up": half(THEIRS + "mlp.experts.gate_up_proj", 1),
        LAYER + "mlp.experts.down": same(THEIRS + "mlp.experts.down_proj"),
    },
    GPT: {
        "tokens.weight": same("transformer.wte.weight"),
        "positions.weight": same("transformer.wpe.weight"),
        **biased(same, "norm", "transformer.ln_f"),
        **biased(same, LAYER + "norm1", "transformer.h.{}.ln_1"),
        **biased(same, LAYER + "norm2", "transformer.h.{}.ln_2"),
        **biased(transposed, LAYER + "attention.qkv", "transformer.h.{}.attn.c_attn"),
        **biased(transposed, LAYER + "attention.out", "transformer.h.{}.attn.c_proj"),
        **biased(transposed, LAYER + "mlp.0", "transformer.h.{}.mlp.c_fc"),
        **biased(transposed, LAYER + "mlp.2", "transformer.h.{}.mlp.c_proj"),
    },
    ViT: {
        "answer": same("vit.embeddings.cls_token"),
        "positions": same("vit.embeddings.position_embeddings"),
        **biased(same, "patches", "vit.embeddings.patch_embeddings.projection"),
        **biased(same, "norm", "vit.layernorm"),
        **biased(same, "head", "classifier"),
        **biased(same, LAYER + "norm1", "vit.layers.{}.layernorm_before"),
        **biased(same, LAYER + "norm2", "vit.layers.{}.layernorm_after"),
        **biased(rows, LAYER + "attention.qkv", *(f"vit.layers.{{}}.attention.{part}_proj" for part in "qkv")),
        **biased(same, LAYER + "attention.out", "vit.layers.{}.attention.o_proj"),
        **biased(same, LAYER + "mlp.0", "vit.layers.{}.mlp.fc1"),
        **biased(same, LAYER + "mlp.2", "vit.layers.{}.mlp.fc2"),
    },
}
TIED = {"lm_head.weight"}  # of GPT-2: the token embedding once more


def load_transformers(model: nn.Module, state_dict: Mapping[str, Tensor]) -> nn.Module:
    """Overwrite the parameters of a gpt, vit, llama or deepseek by weights of transformers; returns the model.

        load_transformers(models.build("llama", ...), LlamaForCausalLM.from_pretrained(...).state_dict())

    Args:    model: whole, as models.build makes it. state_dict: of GPT2LMHeadModel, ViTForImageClassification,
             LlamaForCausalLM or DeepseekV3ForCausalLM, in any dtype.
    Raises:  ValueError that names the first tensor which is missing, has another shape, or has no place in the model,
             which then stays as it is.
    """
    if type(model) not in TABLES:
        known = ", ".join(kind.__name__ for kind in TABLES)
        raise ValueError(f"load_transformers knows the weights of a {known}; got a {type(model).__name__}")
    kind, table, used, found = type(model).__name__, TABLES[type(model)], set(), {}
    for name, ours in model.state_dict().items():
        pattern, layer = pattern_of(name)
        theirs = [text.format(layer) for text in table[pattern].names]
        for text in theirs:
            if text not in state_dict:
                raise ValueError(f"the weights have no {text}, from which {name} of this {kind} is made")
        tensors = [state_dict[text] for text in theirs]
        try:
            made = table[pattern].make(*tensors)
        except (RuntimeError, IndexError):  # of shapes that do not go together
            made = None
        if made is None or made.shape != ours.shape:
            got = ", ".join(f"{text} {tuple(x.shape)}" for text, x in zip(theirs, tensors, strict=True))
            raise ValueError(f"the weights have {got}, and {name} of this {kind} has shape {tuple(ours.shape)}")
        found[name] = made
        used.update(theirs)
    others = [text for text in state_dict if text not in used and not (kind == "GPT" and text in TIED)]
    if others:
        layers = len(model.blocks)
        raise ValueError(f"the weights have {others[0]}, for which this {kind} of {layers} layers has no place")
    model.load_state_dict(found)
    if isinstance(model, ViT):
        as_theirs(model)
    return model


def pattern_of(name: str) -> tuple[str, str]:
    """ "blocks.3.norm1.weight" -> ("blocks.{}.norm1.weight", "3"); other names as they are, and ""."""
    if not name.startswith("blocks."):
        return name, ""
    _, layer, rest = name.split(".", 2)
    return LAYER + rest, layer


def as_theirs(vit: ViT) -> None:
    """Take the constants of transformers' ViT."""
    for module in vit.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-12
        if isinstance(module, nn.GELU):
            module.approximate = "none"
