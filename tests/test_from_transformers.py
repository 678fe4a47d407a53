"""Weights of transformers: the same logits as its own classes with them, and what does not fit is refused by name."""

import logging

import pytest
import torch

from hpdl_lab import models
from hpdl_lab.models import deepseek
from tests.wording import raises

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2]])
IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CASES = {  # name -> what it reads, its fields, transformers' class and config, with the same numbers
    "gpt": (
        TOKENS,
        {"vocabulary": 11, "block": 16, "layers": 2, "heads": 2, "width": 16},
        "GPT2LMHeadModel",
        ("GPT2Config", {"vocab_size": 11, "n_positions": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}),
    ),
    "vit": (
        IMAGES,
        {"image": 8, "patch": 4, "channels": 3, "classes": 5, "layers": 2, "heads": 2, "width": 16},
        "ViTForImageClassification",
        (
            "ViTConfig",
            {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 5, "num_hidden_layers": 2}
            | {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 64},
        ),
    ),
    "llama": (
        TOKENS,
        {"vocabulary": 11, "block": 16, "layers": 2, "heads": 4, "kv_heads": 2, "width": 16, "hidden": 24},
        "LlamaForCausalLM",
        (
            "LlamaConfig",
            {"vocab_size": 11, "max_position_embeddings": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
            | {"num_key_value_heads": 2, "hidden_size": 16, "intermediate_size": 24, "rms_norm_eps": 1e-5}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        ),
    ),
    "deepseek": (
        TOKENS,
        {"vocabulary": 11, "block": 16, "layers": 3, "dense": 1, "heads": 2, "width": 16, "hidden": 24}
        | {"experts": 8, "top_k": 3, "groups": 4, "top_groups": 2, "shared": 2, "expert_hidden": 12}
        | {"q_rank": 12, "kv_rank": 8, "nope": 6, "rope": 4, "value": 5},
        "DeepseekV3ForCausalLM",
        (
            "DeepseekV3Config",
            {"vocab_size": 11, "max_position_embeddings": 16, "num_hidden_layers": 3, "first_k_dense_replace": 1}
            | {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16, "intermediate_size": 24}
            | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
            | {"moe_intermediate_size": 12, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6}
            | {"qk_rope_head_dim": 4, "v_head_dim": 5, "rope_interleave": True},
        ),
    ),
}


def theirs_of(name):
    """transformers' model with random numbers in all its tensors, also in biases and norms."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import transformers

    x, _, kind, (config, fields) = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, kind)(getattr(transformers, config)(**fields)).eval()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape) * (0.3 if tensor.ndim > 1 else 0.5) + (tensor.ndim == 1))
    return model


@pytest.mark.parametrize("name", CASES)
def test_the_same_weights_give_the_same_logits(name):
    x, fields, *_ = CASES[name]
    theirs = theirs_of(name)
    ours = models.load_transformers(models.build(name, **fields), theirs.state_dict())
    with torch.no_grad():
        expected, got = theirs(x).logits, ours(x)
    assert expected.std() > 0.1 and (got - expected).abs().max() < 1e-5 * max(1, expected.abs().max())
    if name == "deepseek":
        with torch.no_grad():
            absorbed = deepseek.absorb(ours)(x)
        assert (absorbed - expected).abs().max() < 1e-5 * max(1, expected.abs().max())


def test_weights_that_do_not_fit_are_refused_by_name_and_the_model_stays():
    weights = theirs_of("llama").state_dict()
    fields = CASES["llama"][1]
    model = models.build("llama", **fields)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = weights | {"model.norm.weight": torch.ones(17)}
    deeper = weights | {"model.layers.2.input_layernorm.weight": torch.ones(16)}
    flat = weights | {"model.layers.1.self_attn.k_proj.weight": torch.ones(8)}
    for state, facts in (
        (changed, ("model.norm.weight (17,)", "norm.weight of this Llama has shape (16,)")),
        (deeper, ("model.layers.2.input_layernorm.weight", "2 layers")),
        (flat, ("model.layers.1.self_attn.k_proj.weight (8,)", "(32, 16)")),
        ({"transformer.wte.weight": torch.ones(11, 16)}, ("model.embed_tokens.weight", "tokens.weight")),
    ):
        with raises(ValueError, *facts):
            models.load_transformers(model, state)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with raises(ValueError, "model.embed_tokens.weight (11, 16)", "(12, 16)"):
        models.load_transformers(models.build("llama", **fields | {"vocabulary": 12}), weights)
    with raises(ValueError, "Sequential"):
        models.load_transformers(models.build("mlp"), weights)
