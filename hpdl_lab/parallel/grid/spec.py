"""A model as a grid of ranks sees it: layers that can be dealt to stages, each with what it computes, keeps and sends.

    Spec  =  a chain of Layers  =  [ tokens and positions | block | block | ... | block | norm, head ]
                                     pp cuts the chain between layers, tp and ep cut inside each, cp the positions

Numbers are counted per example (a sequence of a GPT, an image); `training` says how many bytes each of them has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...models.deepseek import SIZES as DEEPSEEK_SIZES
from ...models.deepseek import DeepseekConfig
from ...models.llama import SIZES as LLAMA_SIZES
from ...models.llama import LlamaConfig


class Training(NamedTuple):
    """Bytes per parameter of parameters, gradients and the optimizer's state, and bytes per number of an activation.

    activations: a parameter has as many bytes when it is gathered and when a layer computes with it.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int


TRAININGS = {
    "sgd": Training(4, 4, 0, 4),
    "momentum": Training(4, 4, 4, 4),
    "adam": Training(4, 4, 8, 4),
    "float64 momentum": Training(8, 8, 8, 8),
    "mixed adam": Training(2, 2, 12, 2),  # 16 in all; Ref: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054
    "fsdp2 adam": Training(4, 4, 8, 2),  # MixedPrecisionPolicy(bfloat16, reduce_dtype=float32), and torch.autocast
    "megatron adam": Training(2, 4, 12, 2),  # 18: 6 + 12/d; Ref: Megatron Core, "Distributed Optimizer"
}


class Layer(NamedTuple):
    """A layer of a chain.

    parameters: how many; cut: how many of them tp divides among its ranks, 0: every tp rank has and does all of it.
    flops:      of forward, per example, a multiplication and an addition counting as two; divided by tp if cut.
    saved:      numbers kept for backward; of these saved_cut are divided by tp, and saved_positions by sequence
                parallel alone.
    output:     numbers that it hands to the next layer; of these output_cut are divided by tp, and output_positions by
                sequence parallel alone.
    saved_input: numbers of its input that it keeps as the layer before does: they count once if both are together.
    attention_weights: of `saved`, the (s, s) weights of eager attention, which selective recomputation does not keep;
                all cut.
    forward_all_reduces, backward_all_reduces: sizes of the all-reduces over tp; forward_all_gathers: what each rank
                has of the all-gathers.
    expert_parameters: of `parameters`, routed experts', which ep divides, and tp does not; expert_flops: of `flops`.
    dispatched: numbers that go to experts by all-to-all, and as many come back.
    kv:         numbers of k and v, which cp passes around a ring; tp divides them. attention_flops: of `flops`, in
                attention's two products, behind which a ring hides its messages.

    cp divides all that is counted per example: each of its ranks has as many positions.
    """

    name: str
    parameters: int
    cut: int
    flops: float
    saved: int
    saved_cut: int
    saved_positions: int
    output: int
    output_cut: int = 0
    output_positions: int = 0
    saved_input: int = 0
    forward_all_reduces: tuple[int, ...] = ()
    backward_all_reduces: tuple[int, ...] = ()
    forward_all_gathers: tuple[int, ...] = ()
    attention_weights: int = 0
    expert_parameters: int = 0
    dispatched: int = 0
    kv: int = 0
    attention_flops: float = 0.0
    expert_flops: float = 0.0

    def parameters_on(self, tp: int, ep: int = 1) -> int:
        """Return how many of its parameters each of tp x ep ranks holds."""
        dense = self.parameters - self.cut - self.expert_parameters
        return dense + self.cut // tp + self.expert_parameters // ep

    def saved_on(self, tp: int, sequence: bool) -> int:
        """Return numbers per example that each of `tp` ranks keeps for backward."""
        divided = self.saved_cut + (self.saved_positions if sequence else 0)
        return self.saved - divided + divided // tp

    def output_on(self, tp: int, sequence: bool) -> int:
        """Return numbers per example that each of `tp` ranks hands on."""
        divided = self.output_cut + (self.output_positions if sequence else 0)
        return self.output - divided + divided // tp

    def flops_on(self, tp: int) -> float:
        """Return flops of forward of one example on each of `tp` ranks."""
        return (self.flops - self.expert_flops) / tp + self.expert_flops if self.cut else self.flops


@dataclass(frozen=True)
class Spec:
    """A model as a chain of layers.

    heads: of its attention, which tp must divide; 0: it has none. positions: of a sequence, which tp must divide if
    it is cut (sequence parallel). tied: how many parameters the last layer shares with the first: counted once on a
    rank that holds both, and added over both stages else. training: a key of TRAININGS.
    kv_heads: of keys and values, which tp must divide; 0: as many as heads. experts: routed ones of a layer, which ep
    must divide, a token uses top_k of them; 0: it has none. latent: numbers that a cache keeps of a token in place of
    its k and v, in all layers; 0: it keeps these. sent_bits: of a gradient in messages; 0: as many as in memory.
    """

    name: str
    layers: tuple[Layer, ...]
    heads: int = 0
    positions: int = 1
    tied: int = 0
    training: str = "momentum"
    kv_heads: int = 0
    experts: int = 0
    top_k: int = 0
    latent: int = 0
    sent_bits: int = 0

    @property
    def sent_each(self) -> float:
        """Bytes of a gradient in messages."""
        return self.sent_bits / 8 or self.bytes_each.gradients

    @property
    def updated(self) -> float:
        """Bytes of an updated parameter, which ZeRO sends back, over bytes of its gradient in messages."""
        return self.bytes_each.activations / self.sent_each

    @property
    def bytes_each(self) -> Training:
        """The Training: bytes of each kind of number."""
        return TRAININGS[self.training]

    @property
    def parameters(self) -> int:
        """The parameters of the whole model."""
        return sum(layer.parameters for layer in self.layers) - self.tied

    @property
    def active(self) -> int:
        """Parameters that one token uses: of routed experts top_k only."""
        routed = sum(layer.expert_parameters for layer in self.layers)
        return self.parameters - routed + (routed * self.top_k // self.experts if self.experts else 0)

    @property
    def cached(self) -> float:
        """Numbers that a cache keeps for a token: k and v of every layer, or the latents that they are made from."""
        return self.latent or sum(layer.kv for layer in self.layers) / self.positions

    @property
    def flops(self) -> float:
        """The flops of forward and backward of one example, without recomputation: backward counts twice forward."""
        return 3 * sum(layer.flops for layer in self.layers)


def transformer_block(name: str, width: int, heads: int, positions: int, eager: bool = False) -> Layer:
    """Return the block of models/transformer.py: 12 d^2 + 13 d parameters; it keeps 16 s d + (4 + h) s numbers.

        divided by tp          q, k, v: 3 s d; output of heads: s d; before and after GELU: 8 s d; softmax sums: h s
        by sequence parallel   the inputs of both norms: 2 s d; their means and deviations: 4 s
        by neither             what both norms put out, which every rank needs whole: 2 s d

    In 16-bit numbers 16 s d are 32 sbh bytes: the 34 sbh of Korthikanti et al. 2022, equation 1, without the 2 sbh of
    its dropout masks. Their 5 a s^2 b falls away, because torch's attention recomputes its (s, s) weights. Their
    sequence parallelism gathers what norms put out once more in backward, and divides that, too.
    eager: with dropout, and with attention that keeps its weights: their sbh (34 + 5 a s / h), a heads, h = d.
    flops: 24 s d^2 of the four linear layers, 4 s^2 d of attention's two products.
    """
    d, s = width, positions
    masks, weights = (s * d, 5 * heads * s * s // 2) if eager else (0, 0)
    return Layer(
        name,
        parameters=12 * d * d + 13 * d,
        cut=12 * d * d + 7 * d,  # all but two norms (4d) and the biases of the two layers behind a sum (2d)
        flops=24 * s * d * d + 4 * s * s * d,
        saved=16 * s * d + (4 + heads) * s + masks + weights,
        saved_cut=12 * s * d + heads * s + weights,
        saved_positions=2 * s * d + 4 * s + masks,
        output=s * d,
        output_positions=s * d,
        forward_all_reduces=(s * d, s * d),
        backward_all_reduces=(s * d, s * d),
        attention_weights=weights,
        kv=2 * s * d,
        attention_flops=4 * s * s * d,
    )


def gpt(
    name: str,
    layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    positions: int,
    training: str = "momentum",
    eager: bool = False,
) -> Spec:
    """Return the Spec of models/gpt.py, or of a GPT-3, with no number allocated; eager: see transformer_block.

    The token embedding is cut by vocabulary over tp, and used by the first and by the last layer, whose loss is
    a part: it keeps the probabilities of all tokens, s V.
    """
    d, s, v = width, positions, vocabulary
    n = s * d
    chain = [
        Layer("tokens", v * d, v * d, 0.0, 0, 0, 0, n, output_positions=n, forward_all_reduces=(n,)),
        Layer("positions", n, 0, 0.0, 0, 0, 0, n, output_positions=n),
        *(transformer_block(f"blocks.{i}", d, heads, s, eager) for i in range(layers)),
        Layer("norm", 2 * d, 0, 0.0, n + 2 * s, 0, n + 2 * s, n, output_positions=n),
        Layer(
            "tokens.weight",
            parameters=v * d,
            cut=v * d,
            flops=2 * n * v,
            saved=n + s * v,
            saved_cut=s * v,
            saved_positions=0,
            output=s * v,
            output_cut=s * v,
            forward_all_reduces=(2 * s,),
            backward_all_reduces=(n,),
            forward_all_gathers=(s,),
        ),
    ]
    return Spec(name, tuple(chain), heads, s, tied=v * d, training=training)


def _decoder(name: str, config: LlamaConfig | DeepseekConfig, blocks: Iterable[Layer], training: str) -> Spec:
    """Return the Spec of tokens, blocks, an RMSNorm and a head of its own, as LLaMA and DeepSeek-V3 have them."""
    d, s, v = config.width, config.block, config.vocabulary
    n = s * d
    tokens = Layer("tokens", v * d, v * d, 0.0, 0, 0, 0, n, output_positions=n, forward_all_reduces=(n,))
    norm = Layer("norm", d, 0, 0.0, n + s, 0, n + s, n, output_positions=n)
    head = Layer("head", v * d, v * d, 2 * n * v, n + s * v, s * v, 0, s * v, s * v)
    head = head._replace(forward_all_reduces=(2 * s,), backward_all_reduces=(n,), forward_all_gathers=(s,))
    return Spec(name, (tokens, *blocks, norm, head), config.heads, s, training=training)


def llama(name: str, config: LlamaConfig, training: str = "mixed adam", experts: int = 0, top_k: int = 1) -> Spec:
    """Return the Spec of models/llama.py, with sequences of config.block positions.

    experts: SwiGLUs of a block, a router sends each token to top_k of them, as in Mixtral; 0: it has one.

    A block has 2 d^2 + 2 d d_kv + 3 d hidden + 2 d parameters, d_kv = d kv_heads / heads, and keeps for backward

        divided by tp          q and output of heads: 2 s d; k, v: 2 s d_kv; softmax sums: h s; SwiGLU: 4 s hidden
        by sequence parallel   the inputs of both norms: 2 s d; their deviations: 2 s
        by neither             what both norms put out: 2 s d

    flops: 2 s of each parameter in a product, and 2 s^2 d of attention, whose kernels leave out what is masked.
    Ref: Grattafiori et al. 2024 (Llama 3), arXiv:2407.21783, table 3.
    """
    d, s, heads, hidden = config.width, config.block, config.heads, config.hidden
    kv = d * config.kv_heads // heads
    attention, mlp, scores = 2 * d * d + 2 * d * kv, 3 * d * hidden, 2 * s * s * d
    router, linear = d * experts, attention if experts else attention + mlp
    expert_flops, copies = (2 * s * mlp * top_k, top_k * s * (2 * d + 4 * hidden)) if experts else (0, 0)
    cut = 2 * s * d + 2 * s * kv + heads * s + (0 if experts else 4 * s * hidden)
    block = Layer(
        "",
        parameters=linear + router + mlp * experts + 2 * d,
        cut=linear,
        flops=2 * s * (linear + router) + expert_flops + scores,
        saved=cut + copies + 4 * s * d + 2 * s,
        saved_cut=cut,
        saved_positions=2 * s * d + 2 * s,
        output=s * d,
        output_positions=s * d,
        forward_all_reduces=(s * d, s * d),
        backward_all_reduces=(s * d, s * d),
        expert_parameters=mlp * experts,
        dispatched=top_k * s * d if experts else 0,
        kv=2 * s * kv,
        attention_flops=scores,
        expert_flops=expert_flops,
    )
    blocks = [block._replace(name=f"blocks.{i}") for i in range(config.layers)]
    spec = _decoder(name, config, blocks, training)
    return replace(spec, kv_heads=config.kv_heads, experts=experts, top_k=top_k if experts else 0)


def deepseek(name: str, config: DeepseekConfig, training: str = "mixed adam") -> Spec:
    """Return the Spec of models/deepseek.py with sequences of config.block positions: latent attention, MoE.

        q    d -> q_lora -> h (nope + rope)        k, v   d -> kv_lora + rope -> h (nope + v)      out   h v -> d

    Loads of experts are counted as balanced. The all-to-all counts as any activation does, copy by copy; DeepSeek-V3
    itself sends 8 bits there, 16 back, and one copy per node.
    Ref: DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, sections 2.1 and 4.2.
    """
    d, s, heads, q, c = config.width, config.block, config.heads, config.q_lora_rank or 0, config.kv_lora_rank
    nope, rope, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    experts, expert = config.n_routed_experts, config.moe_intermediate_size
    down = d * (q + c + rope)  # to both latents: whole on every tp rank
    up = q * heads * (nope + rope) + c * heads * (nope + v) + heads * v * d
    scores = s * s * heads * (nope + rope + v)  # as of llama
    keys = s * heads * (nope + rope + v)
    kept = keys + s * heads * (nope + rope + v) + heads * s  # k, v; q and the output of the heads; softmax sums
    latent = 2 * s * (q + c) + 2 * s  # before and behind their norms

    def block(i: int) -> Layer:
        dense, top_k = i < config.first_k_dense_replace, config.num_experts_per_tok
        hidden = config.hidden if dense else expert * config.n_shared_experts  # units of the SwiGLU of all tokens
        routed = 0 if dense else top_k
        in_experts, router = (3 * d * expert * experts, d * experts) if routed else (0, 0)
        expert_flops = 2 * s * 3 * d * expert * routed
        cut = up + 3 * d * hidden
        saved_cut = kept + 4 * s * hidden
        in_copies = routed * s * (2 * d + 4 * expert)  # inputs of experts, their SwiGLUs, outputs
        return Layer(
            f"blocks.{i}",
            parameters=cut + down + q + c + router + in_experts + 2 * d,
            cut=cut,
            flops=2 * s * (cut + down + router) + expert_flops + scores,
            saved=saved_cut + latent + in_copies + 4 * s * d + 2 * s,
            saved_cut=saved_cut,
            saved_positions=2 * s * d + 2 * s,
            output=s * d,
            output_positions=s * d,
            forward_all_reduces=(s * d, s * d),
            backward_all_reduces=(s * d, s * (q + c + rope)),
            expert_parameters=in_experts,
            dispatched=routed * s * d,
            kv=keys,
            attention_flops=scores,
            expert_flops=expert_flops,
        )

    spec = _decoder(name, config, map(block, range(config.layers)), training)
    top_k, latent = config.num_experts_per_tok, config.layers * (c + rope)
    return replace(spec, experts=experts, top_k=top_k, latent=latent)


def _vit(
    name: str, image: int, patch: int, channels: int, classes: int, layers: int, width: int, heads: int, training: str
) -> Spec:
    """Return the Spec of models/vit.py: patches and one position more, blocks, and classes of that position."""
    d, s, pixels = width, (image // patch) ** 2 + 1, channels * patch * patch
    n = s * d
    patches = Layer("patches", (pixels + 2 + s) * d, 0, 2 * s * pixels * d, s * pixels, 0, 0, n)
    blocks = (transformer_block(f"blocks.{i}", d, heads, s) for i in range(layers))
    norm = Layer("norm", 2 * d, 0, 0.0, n + 2 * s, 0, n + 2 * s, n)
    head = Layer("head", (d + 1) * classes, 0, 2 * d * classes, d + classes, 0, 0, classes)
    return Spec(name, (patches, *blocks, norm, head), heads, s, training=training)


LLAMA_8B = LLAMA_SIZES["paper"]
LLAMA_405B = replace(LLAMA_8B, layers=126, width=16_384, heads=128, hidden=53_248)
SPECS = {
    # NVIDIA, Megatron-LM, examples/pretrain_gpt3_175B.sh; 51,200 tokens: the same repository's README.md
    "gpt3": gpt("GPT-3 175B", 96, 12288, 96, 51200, 2048, "mixed adam"),
    # Dosovitskiy et al. 2020, arXiv:2010.11929, table 1
    "vit_h": _vit("ViT-H/14", 224, 14, 3, 1000, 32, 1280, 16, "mixed adam"),
    # Jiang et al. 2024, arXiv:2401.04088, table 1
    "mixtral": llama("Mixtral 8x7B", replace(LLAMA_8B, vocabulary=32_000, block=32_768), experts=8, top_k=2),
    # Llama 3, arXiv:2407.21783, table 3; the 405B also with the positions of its last phase, section 3.3.2
    "llama3_8b": llama("Llama 3 8B", LLAMA_8B),
    "llama3_70b": llama("Llama 3 70B", replace(LLAMA_8B, layers=80, width=8192, heads=64, hidden=28_672)),
    "llama3_405b": llama("Llama 3 405B", LLAMA_405B),
    "llama3_405b_long": llama("Llama 3 405B, 131,072 positions", replace(LLAMA_405B, block=131_072)),
    # DeepSeek-V3, arXiv:2412.19437, section 4.2, without its layer for a second token; 129,280 tokens: its config.json
    "deepseek_v3": deepseek("DeepSeek-V3", DEEPSEEK_SIZES["paper"]),
}
