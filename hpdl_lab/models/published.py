"""Published models: a config and the weights of transformers as one of our models with the same logits.

    from_transformers(LlamaForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B"))      -> Llama, tied, stretched angles

    theirs    q_proj (h n, d)   k_proj (h_kv n, d)   v_proj (h_kv n, d)
    ours      qkv ((h + 2 h_kv) n, d)                                      one below the other: one product

The fields of a config define the use of the weights. Each is taken, or must have a value that ours knows, or is
IGNORED because no logits depend on it, or must be its class's default: a field that is new to this file is not
dropped without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from . import DTYPES
from .deepseek import DeepSeek, DeepseekConfig
from .gpt import GPT, GPTConfig
from .llama import Decoder, Llama, LlamaConfig, RopeScaling
from .vit import ViT, ViTConfig

Values: TypeAlias = dict[str, Any]  # of fields, by name: of a config, or of one of our models


class _Source(NamedTuple):
    """The origin of a tensor. names: of theirs, "{}" is the number of the layer; make: f(tensors) -> ours."""

    names: tuple[str, ...]
    make: Callable[..., Tensor]


def _same(name: str) -> _Source:
    return _Source((name,), lambda x: x)


def _rows(*names: str) -> _Source:
    """Put tensors one below the other."""
    return _Source(names, lambda *parts: torch.cat(parts))


def _transposed(name: str) -> _Source:
    """Return a weight (in, out), as GPT-2's Conv1D has it."""
    return _Source((name,), lambda x: x.mT)


def _half(name: str, number: int) -> _Source:
    """Take the first or second half of the stacks (E, 2 hidden, d) of gates and ups."""
    return _Source((name,), lambda x: x.chunk(2, 1)[number])


def _biased(table: Callable[[str], _Source], ours: str, *names: str) -> dict[str, _Source]:
    """Return a layer's weight, by `table`, and its bias, one below the other."""
    return {
        f"{ours}.weight": table(*(f"{name}.weight" for name in names)),
        f"{ours}.bias": _rows(*(f"{name}.bias" for name in names)),
    }


LAYER, THEIRS = "blocks.{}.", "model.layers.{}."
DECODER = {
    "tokens.weight": _same("model.embed_tokens.weight"),
    "norm.weight": _same("model.norm.weight"),
    "head.weight": _same("lm_head.weight"),
    LAYER + "norm1.weight": _same(THEIRS + "input_layernorm.weight"),
    LAYER + "norm2.weight": _same(THEIRS + "post_attention_layernorm.weight"),
    **_biased(_same, LAYER + "attention.out", THEIRS + "self_attn.o_proj"),
    **{
        LAYER + f"mlp.{part}.{kind}": _same(THEIRS + f"mlp.{part}_proj.{kind}")
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
}
TABLES: dict[type[nn.Module], dict[str, _Source]] = {
    Llama: DECODER | _biased(_rows, LAYER + "attention.qkv", *(THEIRS + f"self_attn.{part}_proj" for part in "qkv")),
    DeepSeek: DECODER
    | {
        LAYER + f"attention.{ours}.{kind}": _same(THEIRS + f"self_attn.{name}.{kind}")
        for kind in ("weight", "bias")
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
        LAYER + f"mlp.shared.{part}.weight": _same(THEIRS + f"mlp.shared_experts.{part}_proj.weight")
        for part in ("gate", "up", "down")
    }
    | {
        LAYER + "mlp.router.weight": _same(THEIRS + "mlp.gate.weight"),
        LAYER + "mlp.router.bias": _same(THEIRS + "mlp.gate.e_score_correction_bias"),
        LAYER + "mlp.experts.gate": _half(THEIRS + "mlp.experts.gate_up_proj", 0),
        LAYER + "mlp.experts.up": _half(THEIRS + "mlp.experts.gate_up_proj", 1),
        LAYER + "mlp.experts.down": _same(THEIRS + "mlp.experts.down_proj"),
    },
    GPT: {
        "tokens.weight": _same("transformer.wte.weight"),
        "positions.weight": _same("transformer.wpe.weight"),
        **_biased(_same, "norm", "transformer.ln_f"),
        **_biased(_same, LAYER + "norm1", "transformer.h.{}.ln_1"),
        **_biased(_same, LAYER + "norm2", "transformer.h.{}.ln_2"),
        **_biased(_transposed, LAYER + "attention.qkv", "transformer.h.{}.attn.c_attn"),
        **_biased(_transposed, LAYER + "attention.out", "transformer.h.{}.attn.c_proj"),
        **_biased(_transposed, LAYER + "mlp.0", "transformer.h.{}.mlp.c_fc"),
        **_biased(_transposed, LAYER + "mlp.2", "transformer.h.{}.mlp.c_proj"),
    },
    ViT: {
        "answer": _same("vit.embeddings.cls_token"),
        "positions": _same("vit.embeddings.position_embeddings"),
        **_biased(_same, "patches", "vit.embeddings.patch_embeddings.projection"),
        **_biased(_same, "norm", "vit.layernorm"),
        **_biased(_same, "head", "classifier"),
        **_biased(_same, LAYER + "norm1", "vit.layers.{}.layernorm_before"),
        **_biased(_same, LAYER + "norm2", "vit.layers.{}.layernorm_after"),
        **_biased(_rows, LAYER + "attention.qkv", *(f"vit.layers.{{}}.attention.{part}_proj" for part in "qkv")),
        **_biased(_same, LAYER + "attention.out", "vit.layers.{}.attention.o_proj"),
        **_biased(_same, LAYER + "mlp.0", "vit.layers.{}.mlp.fc1"),
        **_biased(_same, LAYER + "mlp.2", "vit.layers.{}.mlp.fc2"),
    },
}
WITHOUT_Q_RANK = {LAYER + "attention.q_up.weight": _same(THEIRS + "self_attn.q_proj.weight")}
TIED = "lm_head.weight"  # the token embedding once more, if a model is tied


def _fill(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Overwrite the parameters of `model` by weights of transformers' class, in any dtype.

    Raises:  ValueError that names the first tensor which is missing, has another shape, or has no place in the model,
             which then stays as it is.
    """
    kind, table = type(model).__name__, TABLES[type(model)]
    used, found = set[str](), dict[str, Tensor]()
    own = model.state_dict()
    if isinstance(model, DeepSeek) and LAYER.format(0) + "attention.q_down.weight" not in own:
        table = table | WITHOUT_Q_RANK
    if _is_tied(model):
        own.pop("head.weight", None)
    for name, ours in own.items():
        pattern, layer = _pattern_of(name)
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
    if _is_tied(model) and TIED in state_dict:
        if not torch.equal(state_dict[TIED], found["tokens.weight"]):
            raise ValueError(f"the weights have {TIED}, and this {kind} is tied to tokens.weight, which differs")
        used.add(TIED)
    others = [text for text in state_dict if text not in used]
    if others:
        layers = len(cast("nn.Sequential", model.blocks))
        raise ValueError(f"the weights have {others[0]}, for which this {kind} of {layers} layers has no place")
    model.load_state_dict(found, strict=False)  # but for the second name of what is tied


def _is_tied(model: nn.Module) -> bool:
    """Return True if the last layer of a decoder is its token embedding."""
    return isinstance(model, GPT) or (isinstance(model, Decoder) and model.tied)


def _pattern_of(name: str) -> tuple[str, str]:
    """Return ("blocks.{}.norm1.weight", "3") for "blocks.3.norm1.weight"; for other names (the name, "")."""
    if not name.startswith("blocks."):
        return name, ""
    _, layer, rest = name.split(".", 2)
    return LAYER + rest, layer


# -- configs ----------------------------------------------------------------------------------------------------------


class Config(Protocol):
    """A config of transformers, 4 or 5."""

    model_type: str
    num_labels: int

    def to_dict(self) -> Values: ...


RENAMED = {  # ours -> theirs, of llama and deepseek
    "vocabulary": "vocab_size", "block": "max_position_embeddings", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "width": "hidden_size", "hidden": "intermediate_size",
    "kv_heads": "num_key_value_heads",
}  # fmt: skip
LLAMA_FIELDS, DEEPSEEK_FIELDS = (
    {f.name: RENAMED.get(f.name, f.name) for f in fields(config) if f.name not in ("rope_theta", "rope_scaling")}
    for config in (LlamaConfig, DeepseekConfig)
)
GPT_FIELDS = {
    "vocabulary": "vocab_size", "block": "n_positions", "layers": "n_layer", "heads": "n_head", "width": "n_embd",
    "hidden": "n_inner", "epsilon": "layer_norm_epsilon",
}  # fmt: skip
VIT_FIELDS = {
    "channels": "num_channels", "layers": "num_hidden_layers", "heads": "num_attention_heads", "width": "hidden_size",
    "hidden": "intermediate_size", "epsilon": "layer_norm_eps", "qkv_bias": "qkv_bias",
}  # fmt: skip
GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
DEFAULT_THETA = 10_000.0  # of a config that says none
IGNORED = {  # no logits depend on these
    "the file": "architectures auto_map dtype model_type name_or_path _name_or_path torch_dtype transformers_version "
    "_attn_implementation_autoset task_specific_params transformers.js_config is_llama_config",
    "outputs": "id2label label2id output_attentions output_hidden_states output_router_logits return_dict",
    "generation": "use_cache bos_token_id eos_token_id pad_token_id num_nextn_predict_layers num_mtp_layers",
    "training": "initializer_range attention_dropout attention_probs_dropout_prob hidden_dropout_prob attn_pdrop "
    "embd_pdrop resid_pdrop problem_type aux_loss_alpha seq_aux",
    "machines": "pretraining_tp ep_size reorder_and_upcast_attn",
    "heads of other classes": "encoder_stride pooler_act pooler_output_size summary_activation summary_first_dropout "
    "summary_proj_to_labels summary_type summary_use_proj",
    "what another field says": "n_ctx",
}


class _Fields:
    """The fields of a config: each is taken once, and the rest must be as by default."""

    def __init__(self, config: Config, ours: type[nn.Module]) -> None:
        self.config, self.ours, self.left = config, ours.__name__, config.to_dict()

    def refuse(self, name: str, value: object, why: str) -> NoReturn:
        raise ValueError(f"{type(self.config).__name__} says {name}={value!r}; this {self.ours} {why}")

    def take(self, name: str) -> Any:
        if name not in self.left:
            raise ValueError(f"this {type(self.config).__name__} has no {name}, which a {self.ours} needs")
        return self.left.pop(name)

    def all(self, names: Mapping[str, str]) -> Values:
        """Return {ours: value in the config} for {ours: theirs}."""
        return {ours: self.take(theirs) for ours, theirs in names.items()}

    def only(self, name: str, *known: object) -> None:
        """Raise ValueError unless the field has one of the known values, or there is none."""
        value = self.left.pop(name, known[0])
        if value not in known:
            self.refuse(name, value, f"knows {' and '.join(map(repr, known))} only")

    def end(self) -> None:
        """Raise ValueError for a field that is on no list and not as its class has it by default."""
        ignored, usual = " ".join(IGNORED.values()).split(), type(self.config)().to_dict()
        for name, value in self.left.items():
            if name not in ignored and value != usual.get(name):
                self.refuse(name, value, f"knows {usual[name]!r} only" if name in usual else "knows no such field")

    def rotary(self, *known: str) -> tuple[float, RopeScaling | None]:
        """Return (theta, RopeScaling of "llama3" or None) of rope_parameters, or of older fields."""
        rope = dict(self.left.pop("rope_parameters", None) or self.left.pop("rope_scaling", None) or {})
        said = rope.pop("rope_theta", None), self.left.pop("rope_theta", None)
        theta, *others = {theta for theta in said if theta is not None} or {DEFAULT_THETA}
        if others:
            self.refuse("rope_theta", said, "knows one theta")
        older, part = rope.pop("type", "default"), rope.pop("partial_rotary_factor", None)
        kind = rope.pop("rope_type", older)
        if kind not in known:
            self.refuse("rope_type", kind, f"knows {' and '.join(map(repr, known))} only")
        if part not in (None, 1):
            self.refuse("partial_rotary_factor", part, "turns all numbers of a head")
        scaling = None
        if kind == "llama3":
            rope.setdefault(RopeScaling._fields[-1], self.left["max_position_embeddings"])
            for name in RopeScaling._fields:
                if name not in rope:
                    self.refuse("rope_type", kind, f"needs {name} as well")
            scaling = RopeScaling(*(rope.pop(name) for name in RopeScaling._fields))
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            if not low < high:
                self.refuse("low_freq_factor", low, f"needs less than high_freq_factor={high!r}")
        for name, value in rope.items():
            self.refuse(name, value, f"knows no such field of rope_type={kind!r}")
        return float(theta), scaling

    def gelu(self, name: str) -> str:
        """Return the name in nn.GELU of the activation of this field."""
        said = self.take(name)
        return GELUS[said] if said in GELUS else self.refuse(name, said, f"knows {' and '.join(GELUS)} only")

    def side(self, name: str) -> int:
        """Return the side of an image or a patch: the field has a number, or a pair of equal ones."""
        said = self.take(name)
        side, *others = {said} if isinstance(said, int) else {*said}
        return self.refuse(name, said, "knows squares only") if others else side


def _llama_of(fields: _Fields) -> Llama:
    fields.only("hidden_act", "silu", "swish")
    fields.only("rope_interleaved", False)  # in the file of SmolLM2
    theta, scaling = fields.rotary("default", "llama3")
    config = LlamaConfig(rope_theta=theta, rope_scaling=scaling, **fields.all(LLAMA_FIELDS))
    fields.end()
    return Llama(config)


def _deepseek_of(fields: _Fields) -> DeepSeek:
    fields.only("hidden_act", "silu", "swish")
    for name, value in {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}.items():
        fields.only(name, value)  # in the file of DeepSeek-V3
    theta, _ = fields.rotary("default")
    config = DeepseekConfig(rope_theta=theta, **fields.all(DEEPSEEK_FIELDS))
    fields.only("num_key_value_heads", config.heads)
    fields.only("head_dim", config.qk_rope_head_dim)
    fields.only("qk_head_dim", config.qk_nope_head_dim + config.qk_rope_head_dim)
    fields.end()
    return DeepSeek(config)


def _gpt_of(fields: _Fields) -> GPT:
    for name in ("tie_word_embeddings", "scale_attn_weights"):
        fields.only(name, True)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        fields.only(name, False)
    config = GPTConfig(gelu=fields.gelu("activation_function"), **fields.all(GPT_FIELDS))
    fields.end()
    return GPT(config)


def _vit_of(fields: _Fields) -> ViT:
    config = ViTConfig(
        image=fields.side("image_size"),
        patch=fields.side("patch_size"),
        gelu=fields.gelu("hidden_act"),
        classes=fields.config.num_labels,
        **fields.all(VIT_FIELDS),
    )
    fields.end()
    return ViT(config)


KINDS: dict[str, tuple[type[nn.Module], Callable[[_Fields], nn.Module]]] = {
    "llama": (Llama, _llama_of),
    "deepseek_v3": (DeepSeek, _deepseek_of),
    "gpt2": (GPT, _gpt_of),
    "vit": (ViT, _vit_of),
}


def from_transformers(
    theirs: nn.Module | Config, state_dict: Mapping[str, Tensor] | None = None, dtype: str | None = None
) -> nn.Module:
    """Make a gpt, vit, llama or deepseek that has the logits of a model of transformers.

        from_transformers(LlamaForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B"))
        from_transformers(config, safetensors.torch.load_file("model.safetensors"), dtype="float32")

    Tied embeddings are shared: head.weight is tokens.weight, one parameter, also when it is trained: see llama.Decoder.

    Args:    theirs: GPT2LMHeadModel, ViTForImageClassification, LlamaForCausalLM, DeepseekV3ForCausalLM, or its config.
             state_dict: by default of `theirs`. dtype: of ours, by default as of the first of their weights.
    Returns: nn.Module with weights of its own, in training mode as models.build makes it.
    Raises:  ValueError that names the first field of the config which ours cannot have, or the first tensor which
             is missing, has another shape, or has no place in ours.
    """
    config = cast("Config", getattr(theirs, "config", theirs))
    name = type(config).__name__
    if getattr(config, "model_type", None) not in KINDS:
        raise ValueError(f"from_transformers knows {', '.join(KINDS)}; got a {name}")
    if state_dict is None:
        if not isinstance(theirs, nn.Module):
            raise ValueError(f"a {name} has no weights: give the state_dict as well")
        state_dict = theirs.state_dict()
    kind, make = KINDS[config.model_type]
    dtype = dtype or str(next(iter(state_dict.values()), torch.zeros(0)).dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(map(repr, DTYPES))} is needed")
    with torch.random.fork_rng(devices=[]):
        model = make(_Fields(config, kind)).to(getattr(torch, dtype))
    _fill(model, state_dict)
    return model
