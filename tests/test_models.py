"""Models: the same seed is the same network, in every dtype and on every rank; as many parameters as the papers say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import data, models
from hpdl_lab.data import text
from hpdl_lab.models import attention, batch_norm, cnn, deepseek, gpt, llama, mixer, plain_gpt, vit
from hpdl_lab.models.mlp import count_parameters, mlp
from tests.wording import raises

EXAMPLES = {  # five of what each tiny model reads, and the shape of what it answers
    "mlp": (torch.zeros(5, 64), (5, 10)),
    "cnn": (torch.zeros(5, 1, 8, 8), (5, 10)),
    "gpt": (torch.zeros(5, 64, dtype=torch.int64), (5, 64, 80)),
    "llama": (torch.zeros(5, 64, dtype=torch.int64), (5, 64, 80)),
    "deepseek": (torch.zeros(5, 64, dtype=torch.int64), (5, 64, 80)),
    "vit": (torch.zeros(5, 1, 8, 8), (5, 10)),
    "mixer": (torch.zeros(5, 1, 8, 8), (5, 10)),
}


def test_same_seed_same_network_and_the_callers_random_numbers_stay():
    torch.manual_seed(7)
    expected = torch.rand(3)
    for name in models.MODELS:
        torch.manual_seed(7)
        a, b, other = models.build(name, seed=1), models.build(name, seed=1), models.build(name, seed=2)
        assert torch.equal(torch.rand(3), expected)
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
        assert not all(torch.equal(p, q) for p, q in zip(a.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", models.MODELS)
def test_dtypes_start_from_the_same_network(name):
    wide, narrow = models.build(name, dtype="float64"), models.build(name)
    assert all(torch.equal(p.float(), q) for p, q in zip(wide.parameters(), narrow.parameters(), strict=True))
    assert any(not torch.equal(p, p.float().double()) for p in wide.parameters())  # drawn in float64


@pytest.mark.parametrize("name", models.MODELS)
def test_shapes_and_a_batch_of_nothing(name):
    """An empty shard must give a gradient of zeros to every parameter, not none and not NaN."""
    examples, shape = EXAMPLES[name]
    model = models.build(name)
    assert model(examples).shape == shape
    model(examples[:0]).sum().backward()
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters())


def on_paper(module, make):
    """How many parameters the paper's size has, without drawing them: on the "meta" device tensors have no numbers."""
    with torch.device("meta"):
        return count_parameters(make(module.SIZES["paper"]))


def test_as_many_parameters_as_the_papers_say():
    assert on_paper(gpt, gpt.GPT) == 124_439_808  # GPT-2 small
    assert on_paper(llama, llama.Llama) == 8_030_261_248  # Llama 3 8B
    assert on_paper(deepseek, deepseek.DeepSeek) == 671_026_404_352  # DeepSeek-V3
    assert on_paper(vit, vit.ViT) == 86_567_656  # ViT-B/16 for 1,000 classes
    assert on_paper(mixer, mixer.Mixer) == 59_880_472  # Mixer-B/16
    assert on_paper(cnn, cnn.CNN) == 269_722  # ResNet-20: "0.27M"
    assert count_parameters(models.build("mlp", "paper")) == 266_610  # LeNet-300-100
    assert count_parameters(mlp()) == count_parameters(models.build("mlp")) == 17_226  # the docstring of mlp


def test_a_token_of_deepseek_v3_uses_37_billion_parameters():
    """All but the experts that it does not go to."""
    with torch.device("meta"):
        model = deepseek.DeepSeek(deepseek.SIZES["paper"])
    idle = sum(count_parameters(block.mlp.experts) * (256 - 8) // 256 for block in model.blocks[3:])
    assert count_parameters(model) - idle == 37_552_282_624


def docstring_of_llama(V, d, layers, h, h_kv, hidden):
    return 2 * V * d + layers * (2 * d * d + 2 * h_kv * d * d // h + 3 * d * hidden + 2 * d) + d


def docstring_of_deepseek(V, d, layers, dense, h, hidden, k, E, shared, expert_hidden, q_rank, c, n, r, m):
    A = d * q_rank + q_rank + q_rank * h * (n + r) + d * (c + r) + c + c * h * (n + m) + h * m * d
    M = 3 * d * expert_hidden * (E + shared) + E * d
    return 2 * V * d + layers * (A + 2 * d) + dense * 3 * d * hidden + (layers - dense) * M + d


def test_as_many_parameters_as_docstrings_say():
    assert count_parameters(models.build("llama")) == docstring_of_llama(80, 64, 2, 4, 2, 128)
    assert count_parameters(models.build("deepseek")) == docstring_of_deepseek(
        80, 64, 2, 1, 4, 128, 2, 8, 1, 32, q_rank=32, c=16, n=16, r=8, m=16
    )


def test_what_a_cache_keeps_per_token_and_layer():
    """DeepSeek-V3: 576 numbers instead of 40,960, 71.1 times less; Llama 3 8B: a quarter of its 32 heads."""
    numbers = []
    with torch.device("meta"):
        model = deepseek.DeepSeek(replace(deepseek.SIZES["paper"], layers=1))
        grouped = llama.Llama(replace(llama.SIZES["paper"], layers=1))
    for absorbed in (False, True):
        (layer,) = attention.attentions_of(deepseek.absorb(model, absorbed))
        heads, d_k, d_v = layer.cache_shape
        numbers.append(heads * (d_k + d_v))
    assert numbers == [128 * (192 + 128), 512 + 64] == [40_960, 576]
    assert [layer.cache_shape for layer in attention.attentions_of(grouped)] == [(8, 128, 128)]


class Seen(attention.Causal):
    """Keeps the shapes of what it is given; tokens are further on, by `first` places."""

    def __init__(self, first=0):
        super().__init__()
        self.first, self.shapes = first, []

    def positions(self, s, device):
        return super().positions(s, device) + self.first

    def __call__(self, q, k, v, scale=None):
        self.shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return super().__call__(q, k, v, scale)


def test_absorbed_latent_attention_says_the_same_and_is_given_one_key_head():
    model = models.build("deepseek", dtype="float64")
    tokens = torch.arange(20).view(2, 10)
    expected = model(tokens)
    expected.sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    seen = [Seen(), Seen()]
    for layer, other in zip(attention.attentions_of(deepseek.absorb(model)), seen, strict=True):
        layer.attend = other
    absorbed = model(tokens)
    absorbed.sum().backward()
    assert (absorbed - expected).abs().max() < 1e-12
    assert all((p.grad - grads[name]).abs().max() < 1e-10 for name, p in model.named_parameters())
    assert seen[0].shapes == seen[1].shapes == [((2, 4, 10, 24), (2, 1, 10, 24), (2, 1, 10, 16))]


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_rotary_positions_tell_how_far_apart_tokens_are_and_not_where(name):
    model = models.build(name, dtype="float64")
    tokens = torch.arange(12)[None]
    at_first = model(tokens)
    for layer in attention.attentions_of(model):
        layer.attend = Seen(first=30)
    assert (model(tokens) - at_first).abs().max() < 1e-12
    for layer in attention.attentions_of(model):
        layer.attend.positions = lambda s, device: 2 * torch.arange(s, device=device)
    assert (model(tokens) - at_first).abs().max() > 1e-3


def test_grouped_queries_are_attention_with_each_key_head_repeated():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 7, n, generator=generator).double() for h, n in ((6, 4), (2, 4), (2, 3)))
    each = [x.repeat_interleave(3, 1) for x in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *each, is_causal=True)
    assert (attention.Causal()(q, k, v) - expected).abs().max() < 1e-13
    assert (attention.grouped_query_attention(q[:, :, 5:], k, v) - expected[:, :, 5:]).abs().max() < 1e-13
    model = models.build("llama", dtype="float64")
    by_torch = model(torch.arange(9)[None])
    for layer in attention.attentions_of(model):
        layer.attend = attention.Causal(attention.grouped_query_attention)
    assert (model(torch.arange(9)[None]) - by_torch).abs().max() < 1e-13
    with raises(ValueError, "4 key heads", "6 query heads"):
        attention.grouped_query_attention(q, k.repeat(1, 2, 1, 1), v)


def test_the_last_layer_of_gpt_is_its_token_embedding():
    model = models.build("gpt", vocabulary=11)
    logits = model(torch.tensor([[3, 5]]))
    logits[0, 1, 7].backward()
    assert model.tokens.weight.grad[7].abs().max() > 0  # as the last layer: 7 was not read
    assert model.tokens.weight.grad[3].abs().max() > 0  # as the first one: it was


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_gpt_that_has_learned_a_sentence_says_it(temperature):
    """Greedily it repeats what it was trained on; drawn, the same seed gives the same tokens of the alphabet."""
    sentence = text.encode("Call me Ishmael. Some years ago")
    model = models.build("gpt", vocabulary=len(text.vocabulary()), block=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = gpt.generate(model, sentence[:8], 23, temperature)
    windows = sentence.unfold(0, 17, 1)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).backward()
        optimizer.step()
    said = gpt.generate(model, sentence[:8], 23, temperature)
    assert text.decode(said).startswith("Call me ") and set(text.decode(said)) <= set(text.vocabulary())
    assert len(said) == len(before) == 31 and not torch.equal(said, before)
    assert torch.equal(said, gpt.generate(model, sentence[:8], 23, temperature)), "the same seed, other tokens"
    if temperature == 0:
        assert text.decode(said) == "Call me Ishmael. Some years ago"


def test_a_gpt_continues_tokens_and_nothing_else():
    model = models.build("gpt")
    for arguments in ((torch.zeros(0, dtype=int), 3), (torch.zeros(1, 3, dtype=int), 3), (torch.tensor([1]), -1)):
        with raises(ValueError):
            gpt.generate(model, *arguments)
    with raises(ValueError, "-1"):
        gpt.generate(model, torch.tensor([1]), 3, temperature=-1)
    assert gpt.generate(model, torch.tensor([1]), 0).tolist() == [1]


def test_decoders_do_not_look_ahead_and_models_of_patches_look_everywhere():
    tokens = torch.arange(20)[None]
    changed = tokens.clone()
    changed[0, 12] = 70
    for name in ("gpt", "llama", "deepseek"):
        model = models.build(name, dtype="float64")
        differs = (model(tokens) - model(changed)).abs().amax(2)[0] > 1e-12
        assert differs.tolist() == [False] * 12 + [True] * 8
    image = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    dark = image.clone()
    dark[0, 0, 7, 7] = 0
    for name in ("vit", "mixer"):
        model = models.build(name, dtype="float64")
        assert (model(image) - model(dark)).abs().max() > 1e-9


@pytest.mark.parametrize(
    ("name", "size", "fields", "error", "says"),
    [
        ("rnn", "tiny", {}, LookupError, ("'rnn'",)),
        ("gpt", "huge", {}, LookupError, ("'huge'",)),
        ("gpt", "tiny", {"depth": 3}, ValueError, ("'depth'",)),
        ("gpt", "tiny", {"heads": 5}, ValueError, ("5 heads", "64")),
        ("vit", "tiny", {"heads": 0}, ValueError, ("heads=0", "1")),
        ("mlp", "tiny", {"hidden": 5}, ValueError, ("hidden=5", "(128, 64)")),
        ("mlp", "tiny", {"dtype": "float33"}, ValueError, ("dtype='float33'", "'float16'", "'bfloat16'")),
        ("gpt", "tiny", {"seed": 1.5}, ValueError, ("seed=1.5",)),
        ("llama", "tiny", {"kv_heads": 3}, ValueError, ("3 key heads", "4 query heads")),
        ("llama", "tiny", {"width": 12}, ValueError, ("3", "odd")),
        ("deepseek", "tiny", {"qk_rope_head_dim": 5}, ValueError, ("5", "odd")),
        ("vit", "tiny", {"patch": 3}, ValueError, ("8", "8 pixels", "3", "3")),
        ("mixer", "tiny", {"patch": 3}, ValueError, ("8", "8 pixels", "3", "3")),
        ("cnn", "tiny", {"norm": "layer"}, ValueError, ("norm='layer'",)),
        ("cnn", "tiny", {"widths": (6, 12)}, ValueError, ("(6, 12)", "4 groups")),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_numbers(name, size, fields, error, says):
    with raises(error, *says):
        models.build(name, size, **fields)


def test_examples_of_another_size_are_refused_with_the_numbers():
    with raises(ValueError, "64 tokens", "65", "block=65"):
        models.build("gpt")(torch.zeros(1, 65, dtype=torch.int64))
    with raises(ValueError, "llama", "64 tokens", "65"):
        models.build("llama")(torch.zeros(1, 65, dtype=torch.int64))
    with raises(ValueError, "(64,)"):
        models.build("gpt")(torch.zeros(64, dtype=torch.int64))
    for name in ("vit", "mixer"):
        with raises(ValueError, "(1, 8, 8)", "(3, 8, 8)"):
            models.build(name)(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match="input and an output"):
        mlp((64,))


def test_a_model_is_made_for_its_data_and_other_data_is_refused():
    copy = data.load("copy", n=10, length=5, vocabulary=7)
    assert models.build_for(copy, "gpt")(copy.train_x).shape == (10, 9, 7)
    wide = data.load("synthetic", n=10, shape=(3, 6, 12), classes=4)
    assert models.build_for(wide, "cnn")(wide.train_x).shape == (10, 4)
    for name in ("vit", "mixer"):
        with raises(ValueError, "6", "12 pixels"):
            models.build_for(wide, name)
    with raises(ValueError, "(10, 3, 6, 12)", "float32"):
        models.build_for(wide, "gpt")
    with raises(ValueError, "(10, 9)", "int64"):
        models.build_for(copy, "mlp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_on_one_rank_is_that_of_torch(dtype):
    ours, theirs = batch_norm.BatchNorm(3).to(dtype), torch.nn.BatchNorm2d(3).to(dtype)
    exact = 1e-5 if dtype == torch.float32 else 1e-13
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = 5 + torch.randn(4, 3, 2, 5, generator=generator, dtype=dtype)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        weight = torch.randn(x.shape, generator=generator, dtype=dtype)
        (ours(a) * weight).sum().backward()
        (theirs(b) * weight).sum().backward()
        assert (a.grad - b.grad).abs().max() < exact
    assert (ours.weight.grad - theirs.weight.grad).abs().max() < 10 * exact
    assert (ours.running_mean - theirs.running_mean).abs().max() < exact
    assert (ours.running_var - theirs.running_var).abs().max() < exact
    ours.eval(), theirs.eval()
    assert (ours(x) - theirs(x)).abs().max() < exact


def test_the_gpt_to_take_home_takes_our_weights_and_needs_nothing_of_this_package(tmp_path):
    ours = models.build("gpt", dtype="float64")
    plain = plain_gpt.GPT(80, block=64, layers=2, heads=2, width=64).double()
    plain.load_state_dict(ours.state_dict())
    (tmp_path / "text.txt").write_text("abca" * 20)
    windows, vocabulary = plain_gpt.windows_of(str(tmp_path / "text.txt"), block=32)
    assert vocabulary == 3 and windows.shape == (48, 33)
    assert (plain.logits(windows[:, :-1]) - ours(windows[:, :-1])).abs().max() < 1e-12
    assert "hpdl_lab" not in Path(plain_gpt.__file__).read_text()
