"""Published models: the logits of transformers' classes, field by field, and what ours cannot be is refused by name."""

import copy
import logging

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hpdl_lab import models
from hpdl_lab.comm import sim
from hpdl_lab.inference.engine import Engine
from hpdl_lab.models import deepseek
from hpdl_lab.parallel.tensor.model import shard
from tests.wording import raises

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

TOKENS = torch.randint(11, (2, 40), generator=torch.Generator().manual_seed(0))
IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LLAMA = {"vocab_size": 11, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 72}
LLAMA |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500_000.0}
LLAMA |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "use_cache": True}
STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
STRETCH |= {"rope_type": "llama3"}
GPT = {"vocab_size": 11, "n_positions": 64, "n_ctx": 64, "n_layer": 3, "n_head": 2, "n_embd": 16, "resid_pdrop": 0.1}
GPT |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "task_specific_params": {"text-generation": {}}}
VIT = {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 5, "num_hidden_layers": 2, "hidden_size": 16}
VIT |= {"num_attention_heads": 2, "intermediate_size": 64, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
DEEPSEEK = {"vocab_size": 11, "max_position_embeddings": 4096, "num_hidden_layers": 3, "first_k_dense_replace": 1}
DEEPSEEK |= {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16, "intermediate_size": 24}
DEEPSEEK |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
DEEPSEEK |= {"moe_intermediate_size": 12, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "v_head_dim": 5}
DEEPSEEK |= {"qk_rope_head_dim": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid"}
DEEPSEEK |= {"topk_method": "noaux_tc", "moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1}
DEEPSEEK |= {"num_nextn_predict_layers": 1, "rope_theta": 10_000, "rms_norm_eps": 1e-6, "pretraining_tp": 1}
CLASSES = {  # kind -> what it reads, transformers' config and model
    "llama": (TOKENS, "LlamaConfig", "LlamaForCausalLM"),
    "gpt": (TOKENS, "GPT2Config", "GPT2LMHeadModel"),
    "vit": (IMAGES, "ViTConfig", "ViTForImageClassification"),
    "deepseek": (TOKENS, "DeepseekV3Config", "DeepseekV3ForCausalLM"),
}
CASES = {  # name -> kind, fields as in the config.json of the public model, but for sizes
    "Llama 2": ("llama", LLAMA | {"num_key_value_heads": 4, "rope_theta": 10_000.0, "rope_scaling": None}),
    "TinyLlama": ("llama", LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 1, "rope_theta": 10_000.0}),
    "Llama 3": ("llama", LLAMA),
    "Llama 3.1": (
        "llama",
        LLAMA | {"rope_scaling": STRETCH, "max_position_embeddings": 131_072, "eos_token_id": [1, 2, 3]},
    ),
    "Llama 3.2": (
        "llama",
        LLAMA | {"rope_scaling": STRETCH | {"factor": 32.0}, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "SmolLM2": (
        "llama",
        LLAMA
        | {"num_attention_heads": 15, "num_key_value_heads": 5, "hidden_size": 60, "tie_word_embeddings": True}
        | {"rope_theta": 130_000, "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}
        | {"initializer_range": 0.02, "pad_token_id": 2},
    ),
    "heads wider than d": ("llama", LLAMA | {"head_dim": 24, "rms_norm_eps": 1e-3}),
    "biases": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "rope_theta": 250_000}),
    "rope_parameters": (
        "llama",
        {name: value for name, value in LLAMA.items() if name != "rope_theta"}
        | {"rope_parameters": STRETCH | {"rope_theta": 20_000.0, "original_max_position_embeddings": 64}},
    ),
    "GPT-2": ("gpt", GPT | {"summary_type": "cls_index", "summary_use_proj": True, "embd_pdrop": 0.2}),
    "GPT-2 of n_inner": ("gpt", GPT | {"n_inner": 24, "activation_function": "gelu", "layer_norm_epsilon": 1e-3}),
    "ViT": ("vit", VIT | {"encoder_stride": 16, "qkv_bias": True}),
    "ViT without qkv_bias": (
        "vit",
        VIT | {"qkv_bias": False, "intermediate_size": 24, "layer_norm_eps": 1e-2, "image_size": [8, 8]},
    ),
    "DeepSeek-V3": ("deepseek", DEEPSEEK),
    "Moonlight": (
        "deepseek",
        DEEPSEEK
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "rope_theta": 50_000.0}
        | {"rms_norm_eps": 1e-3},
    ),
    "DeepSeek otherwise": (
        "deepseek",
        DEEPSEEK
        | {"norm_topk_prob": False, "rope_interleave": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


class Wide(TorchFunctionMode):
    """transformers computes norms, angles and the router in float32, whatever the weights; here in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(x):
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})


def theirs_of(kind, fields):
    """transformers' model in float64 with random numbers in all its tensors, also in biases and norms."""
    _, config, model = CLASSES[kind]
    config = getattr(transformers, config)(**copy.deepcopy(fields))  # it writes into them
    config._experts_implementation = "eager"
    with Wide(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, model)(config).double().eval()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape) * (0.3 if tensor.ndim > 1 else 0.5) + (tensor.ndim == 1))
    return model


def logits_of(kind, theirs):
    with torch.no_grad(), Wide():
        return theirs(CLASSES[kind][0]).logits


def off(expected, ours, kind):
    """The largest difference from what transformers answers, relative to its largest number."""
    assert expected.dtype == torch.float64 and expected.std() > 0.1
    with torch.no_grad():
        return float((ours(CLASSES[kind][0]) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_published_model_has_the_logits_of_transformers(name):
    kind, fields = CASES[name]
    theirs = theirs_of(kind, fields)
    ours = models.from_transformers(theirs)
    expected = logits_of(kind, theirs)
    assert off(expected, ours, kind) < 1e-10
    if kind == "deepseek":
        assert off(expected, deepseek.absorb(ours), kind) < 1e-10
    narrow = models.from_transformers(theirs.config, theirs.state_dict(), dtype="float32").double()
    assert off(expected, narrow, kind) < 1e-3  # but for tokens of which rounding changes the experts, as no token here


CHANGES = {  # each changes the logits of the same weights: case, fields
    "theta": ("Llama 3", {"rope_theta": 10_000.0}),
    "epsilon": ("Llama 3", {"rms_norm_eps": 1e-2}),
    "heads": ("Llama 3", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "stretch": ("Llama 3", {"rope_scaling": STRETCH}),
    "factor": ("Llama 3.1", {"rope_scaling": STRETCH | {"factor": 2.0}}),
    "low": ("Llama 3.1", {"rope_scaling": STRETCH | {"low_freq_factor": 0.5}}),
    "high": ("Llama 3.1", {"rope_scaling": STRETCH | {"high_freq_factor": 400.0}}),
    "original": ("Llama 3.1", {"rope_scaling": STRETCH | {"original_max_position_embeddings": 256}}),
    "gpt heads": ("GPT-2", {"n_head": 4}),
    "gpt gelu": ("GPT-2", {"activation_function": "gelu"}),
    "gpt epsilon": ("GPT-2", {"layer_norm_epsilon": 1e-2}),
    "vit heads": ("ViT", {"num_attention_heads": 4}),
    "vit gelu": ("ViT", {"hidden_act": "gelu_pytorch_tanh"}),
    "vit epsilon": ("ViT", {"layer_norm_eps": 1e-2}),
    "vit patch": ("ViT", {"patch_size": (4, 4), "layer_norm_eps": 1e-3}),
    "deepseek theta": ("DeepSeek-V3", {"rope_theta": 100.0}),
    "deepseek epsilon": ("DeepSeek-V3", {"rms_norm_eps": 1e-2}),
    "interleave": ("DeepSeek-V3", {"rope_interleave": False}),
    "groups": ("DeepSeek-V3", {"n_group": 2, "topk_group": 1}),
    "top groups": ("DeepSeek-V3", {"topk_group": 4}),
    "top k": ("DeepSeek-V3", {"num_experts_per_tok": 2}),
    "scale": ("DeepSeek-V3", {"routed_scaling_factor": 1.0}),
    "normal": ("DeepSeek-V3", {"norm_topk_prob": False}),
    "nope": ("DeepSeek-V3", {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 3, "kv_lora_rank": 8}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_field_that_changes_the_logits_changes_ours_alike(change):
    name, fields = CHANGES[change]
    kind, before = CASES[name]
    theirs = theirs_of(kind, before | fields)
    if change != "nope":  # another cut of the same weights, but for those of queries
        weights = theirs_of(kind, before)
        theirs.load_state_dict(weights.state_dict())
        assert (logits_of(kind, theirs) - logits_of(kind, weights)).abs().max() > 1e-7
    assert off(logits_of(kind, theirs), models.from_transformers(theirs), kind) < 1e-10


REFUSED = {  # case, fields, and what the error says
    "hidden_act": ("Llama 3", {"hidden_act": "gelu"}, ("LlamaConfig", "hidden_act='gelu'", "Llama", "'silu'")),
    "yarn": (
        "Llama 3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ("rope_type='yarn'", "Llama", "'llama3'"),
    ),
    "linear": ("Llama 2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_type='linear'",)),
    "partial": (
        "Llama 3",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ("partial_rotary_factor=0.5",),
    ),
    "low": (
        "Llama 3",
        {"rope_scaling": STRETCH | {"low_freq_factor": 4.0}},
        ("low_freq_factor=4.0", "high_freq_factor=4.0"),
    ),
    "beta": ("Llama 3", {"rope_scaling": STRETCH | {"beta_fast": 32}}, ("beta_fast=32", "'llama3'")),
    "interleaved": ("SmolLM2", {"rope_interleaved": True}, ("rope_interleaved=True", "Llama", "False")),
    "new field": ("Llama 3", {"sliding_window": 4096}, ("LlamaConfig", "sliding_window=4096", "Llama")),
    "default": ("Llama 3", {"is_encoder_decoder": True}, ("is_encoder_decoder=True", "False")),
    "quantized": ("Llama 3", {"quantization_config": {"bits": 4}}, ("quantization_config=",)),
    "untied": ("GPT-2", {"tie_word_embeddings": False}, ("GPT2Config", "tie_word_embeddings=False", "GPT", "True")),
    "relu": ("GPT-2", {"activation_function": "relu"}, ("activation_function='relu'", "gelu_new")),
    "by layer": ("GPT-2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx=True",)),
    "unscaled": ("GPT-2", {"scale_attn_weights": False}, ("scale_attn_weights=False",)),
    "cross": ("GPT-2", {"add_cross_attention": True}, ("add_cross_attention=True",)),
    "wide image": ("ViT", {"image_size": (8, 16)}, ("ViTConfig", "image_size=[8, 16]", "ViT")),
    "quick_gelu": ("ViT", {"hidden_act": "quick_gelu"}, ("hidden_act='quick_gelu'", "gelu")),
    "vit head": ("ViT", {"head_dim": 8}, ("head_dim=8",)),
    "deepseek yarn": (
        "DeepSeek-V3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 40, "mscale": 1.0}},
        ("DeepseekV3Config", "rope_type='yarn'", "DeepSeek", "'default'"),
    ),
    "softmax": ("DeepSeek-V3", {"scoring_func": "softmax"}, ("scoring_func='softmax'", "'sigmoid'")),
    "greedy": ("DeepSeek-V3", {"topk_method": "greedy"}, ("topk_method='greedy'", "'noaux_tc'")),
    "every other layer": ("DeepSeek-V3", {"moe_layer_freq": 2}, ("moe_layer_freq=2", "1")),
    "key heads": ("DeepSeek-V3", {"num_key_value_heads": 1}, ("num_key_value_heads=1", "2")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_field_that_ours_cannot_have_is_refused_by_name(what):
    name, fields, says = REFUSED[what]
    kind, before = CASES[name]
    config = getattr(transformers, CLASSES[kind][1])(**copy.deepcopy(before | fields))
    with raises(ValueError, *says):
        models.from_transformers(config, {})


class LlamaConfig:
    """A config as transformers 4 has it; `theta_in_rope`: of a model that says its theta twice."""

    model_type = "llama"

    def __init__(self, rope_theta=10_000.0, rope_scaling=None, theta_in_rope=None, **fields):
        new = transformers.LlamaConfig(**LLAMA | fields).to_dict()
        new.pop("rope_parameters")
        twice = {"rope_parameters": {"rope_theta": theta_in_rope}} if theta_in_rope else {}
        self.fields = new | {"rope_theta": rope_theta, "rope_scaling": rope_scaling} | twice

    def to_dict(self):
        return dict(self.fields)


def test_configs_of_transformers_4_have_theta_and_scaling_apart():
    kind, fields = CASES["Llama 3.1"]
    theirs = theirs_of(kind, fields)
    older = LlamaConfig(rope_theta=500_000, rope_scaling=STRETCH, max_position_embeddings=131_072)
    assert off(logits_of(kind, theirs), models.from_transformers(older, theirs.state_dict()), kind) < 1e-10
    assert models.from_transformers(LlamaConfig(theta_in_rope=10_000), theirs.state_dict())
    with raises(ValueError, "rope_theta=(20000", "10000", "one"):
        models.from_transformers(LlamaConfig(theta_in_rope=20_000), {})
    with raises(ValueError, "rope_type='llama3'", "factor"):
        models.from_transformers(LlamaConfig(rope_scaling={"rope_type": "llama3"}), {})
    both = LlamaConfig(theta_in_rope=10_000, rope_scaling=STRETCH)
    with raises(ValueError, "rope_scaling=", "None"):
        models.from_transformers(both, {})
    older.fields.pop("rms_norm_eps")
    with raises(ValueError, "LlamaConfig", "rms_norm_eps", "Llama"):
        models.from_transformers(older, {})


def test_what_is_no_model_of_the_four_or_has_no_weights_is_refused():
    with raises(ValueError, "llama, deepseek_v3, gpt2, vit", "MistralConfig"):
        models.from_transformers(transformers.MistralConfig(), {})
    with raises(ValueError, "llama", "Linear"):
        models.from_transformers(torch.nn.Linear(2, 2))
    with raises(ValueError, "LlamaConfig", "state_dict"):
        models.from_transformers(transformers.LlamaConfig())
    with raises(ValueError, "'int8'", "'float32'"):
        models.from_transformers(transformers.LlamaConfig(**LLAMA), {}, dtype="int8")
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA))
    with raises(ValueError, "lm_head.weight"):
        models.from_transformers(classifier)


@pytest.mark.parametrize("name", ["Llama 3.2", "DeepSeek otherwise", "GPT-2"])
def test_tied_embeddings_are_one_parameter(name):
    kind, fields = CASES[name]
    theirs = theirs_of(kind, fields)
    stored = {key: x for key, x in theirs.state_dict().items() if key != "lm_head.weight"}  # as in .safetensors
    ours = models.from_transformers(theirs.config, stored)
    assert off(logits_of(kind, theirs), ours, kind) < 1e-10
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    ours(TOKENS).square().mean().backward()
    torch.optim.SGD(ours.parameters(), lr=0.1).step()
    x = torch.randn(1, 1, ours.tokens.weight.shape[1], dtype=torch.float64)
    assert torch.equal(ours.logits(x), ours.norm(x) @ ours.tokens.weight.T)
    with raises(ValueError, "lm_head.weight", "tied", "tokens.weight"):
        models.from_transformers(theirs.config, stored | {"lm_head.weight": torch.zeros_like(ours.tokens.weight)})


def test_weights_are_ours_and_random_numbers_stay():
    theirs = theirs_of(*CASES["Llama 3"])
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    ours = models.from_transformers(theirs)
    assert torch.equal(torch.rand(3), expected)
    with torch.no_grad():
        ours.tokens.weight.zero_()
    assert theirs.model.embed_tokens.weight.abs().max() > 0


ODD = LLAMA | {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
ODD |= {"rope_scaling": STRETCH, "rms_norm_eps": 1e-3, "max_position_embeddings": 64}
PARALLEL = {
    "llama": ("llama", ODD),
    "deepseek": ("deepseek", DEEPSEEK | {"q_lora_rank": None, "attention_bias": True}),
    "gpt": ("gpt", GPT | {"n_inner": 24, "activation_function": "gelu"}),
    "vit": ("vit", VIT | {"qkv_bias": False, "intermediate_size": 24}),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_two_ranks_that_share_each_layer_have_the_same_logits(name):
    kind, fields = PARALLEL[name]
    ours = models.from_transformers(theirs_of(kind, fields))
    with torch.no_grad():
        expected = ours(CLASSES[kind][0])

    def off_of(comm):
        part = shard(comm, models.from_transformers(theirs_of(kind, fields)))
        with torch.no_grad():
            return float((part(CLASSES[kind][0]) - expected).abs().max())

    assert max(sim.run(2, off_of)) < 1e-10


def test_two_ranks_train_a_tied_model_as_one_does():
    ours = models.from_transformers(theirs_of("llama", ODD))

    def gradient_of(comm):
        part = shard(comm, copy.deepcopy(ours)) if comm else copy.deepcopy(ours)
        part(TOKENS).square().mean().backward()
        return part.tokens.weight.grad

    parts = sim.run(2, gradient_of, threads=True)
    assert (torch.cat([*parts])[: len(ours.tokens.weight)] - gradient_of(None)).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_an_engine_decodes_what_transformers_does(name):
    theirs = theirs_of(*PARALLEL[name])
    ours, prompt = models.from_transformers(theirs), TOKENS[0, :8].tolist()
    tokens = list(prompt)
    with torch.no_grad(), Wide():
        for _ in range(12):
            tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert prompt + Engine(ours).generate([prompt], max_tokens=12)[0] == tokens


def test_weights_that_do_not_fit_are_refused_by_name():
    theirs = theirs_of(*CASES["Llama 3"])
    weights = theirs.state_dict()
    changed = weights | {"model.norm.weight": torch.ones(17)}
    deeper = weights | {"model.layers.2.input_layernorm.weight": torch.ones(64)}
    flat = weights | {"model.layers.1.self_attn.k_proj.weight": torch.ones(8)}
    for state, facts in (
        (changed, ("model.norm.weight (17,)", "norm.weight of this Llama has shape (64,)")),
        (deeper, ("model.layers.2.input_layernorm.weight", "2 layers")),
        (flat, ("model.layers.1.self_attn.k_proj.weight (8,)", "(128, 64)")),
        ({"transformer.wte.weight": torch.ones(11, 64)}, ("model.embed_tokens.weight", "tokens.weight")),
    ):
        with raises(ValueError, *facts):
            models.from_transformers(theirs.config, state)
