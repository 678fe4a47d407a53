# %% [markdown]
# # 12 · Models of today
#
# **The number to reach:** a sequence that four ranks share keeps all of them at work all the time, in place of 57% of
# it; a cache of 576 numbers for a token in place of 40,960; and with experts, heads, layers and sequences dealt out
# over four ranks, the losses of a single one, to 10⁻¹⁰.
#
# <!-- tracks -->
#
# GPT-2 is from 2019. Part one has what LLaMA changed, and a ViT; part two the experts of DeepSeek-V3; part three long
# sequences, their cache, and DeepSeek's pipeline. Everything that you know from 06 to 11 still serves.

# %%
import torch

from hpdl_lab import lab, models, schedules

lab.start(4)

# %% [markdown]
# # Part one: LLaMA, and a ViT
#
# ## The idea <!-- 1 homework 4 -->
#
# Models have grown in three directions, and each of them asks for another axis of ranks:
#
# | what grows | what it asks for | axis |
# |---|---|---|
# | parameters that every token uses | layers and heads that are cut: 09, 10 | tp, pp |
# | parameters of which a token uses a few | experts on many ranks, to which tokens travel | **ep** |
# | tokens in a sequence | sequences that are cut, while attention still needs all keys | **cp** |
#
# And whoever writes a long text keeps the keys and values of all earlier tokens: the **cache**. In 2020 it was
# twice as wide as the model, in each layer. Since then most changes to attention were made to shrink it.
#
# ## Predict
#
# How many GB is the cache of one text of 131,072 tokens, in 16 bits? For Llama 3 405B (126 layers, 8 key heads of 128
# numbers), and for DeepSeek-V3 (61 layers, 576 numbers for a token in each of them).

# %% guess=[70, 10]
my_cache = lab.guess("GB of the cache of 131,072 tokens", {"Llama 3 405B": ..., "DeepSeek-V3": ...})

# %% [markdown]
# On the left the model is cut until it fits: over the GPUs of a node (tp), or by its experts (ep), then over stages
# (pp); what is left of the GPUs are replicas with ZeRO-1, and blocks are computed again in backward. On the right
# stars mark your guess. Which of the two panels has changed more from GPT-3 to DeepSeek-V3? And on how few GPUs can
# each of the two be trained at all?

# %%
lab.explore("published", prediction=my_cache)
numbers = {"Llama 3 405B": 126 * 2 * 8 * 128, "DeepSeek-V3": 61 * 576}  # that the cache keeps for a token
lab.reveal("GB of the cache of 131,072 tokens", {name: 131_072 * 2 * n / 1e9 for name, n in numbers.items()})

# %% [markdown]
# ## LLaMA and DeepSeek in shapes <!-- 1 homework 2 -->
#
# Both are GPT's decoder ([00](00_why.ipynb)) with other parts: a norm that only divides (RMSNorm); queries and keys
# that are turned by an angle for each position, so that their product depends on how far apart two tokens are; and an
# MLP with a gate, (silu(x G) · x U) D. Look at what leaves `qkv` in LLaMA: 4 query heads, but 2 key heads and 2 value
# heads. In DeepSeek keys and values of all heads are made of one **latent** per token (`kv_down`).

# %%
tokens = torch.arange(16)[None]
pictures = [lab.show(model, tokens) for model in (models.build("llama", layers=1), models.build("deepseek", layers=1))]

# %% [markdown]
# ## Exercise 12.1 ★★ Grouped queries <!-- 1 homework 12 -->
#
# A key head serves a group of query heads. Repeating it for each of them is right, and gives back in memory traffic
# all that was saved: each decoded token reads the whole cache once. The check looks at the largest tensor that you
# make. `scale` is what the products q · k are multiplied by; 1/√d if it is None.

# %% exercise="hpdl_lab.models.attention:grouped_query_attention"

# %% check="hpdl_lab.models.attention:grouped_query_attention"

# %% [markdown]
# Every attention here has an attribute `attend`, which says what a query sees: a cache, or keys on other ranks, can
# take its place. So can your function:

# %%
from hpdl_lab.models.attention import Causal, attentions_of

model = models.build("llama", dtype="float64")
by_torch, first = model(tokens), attentions_of(model)[0]
first.attend = Causal(grouped_query_attention)
assert (model(tokens) - by_torch).abs().max() < 1e-10

# %% [markdown]
# ## Measure: a ViT on four ranks <!-- 1 homework 2 -->
#
# An image is cut into patches, and a transformer without a mask reads them as if they were words. Nothing new is
# needed to split it: heads over two ranks, layers over two stages (11). 44 steps on the digits, in 64 bits:

# %%
course = dict(model="vit", data="digit_images", dtype="float64", steps=44, batch=32, deadline=60)
alone = lab.train(**course, ranks=1)
split = lab.train(**course, mesh={"pp": 2, "tp": 2})
off = max(abs(a - b) for a, b in zip(alone.losses, split.losses, strict=True))
assert off < 1e-10
print(f"ViT, pp 2 × tp 2: losses differ by {off:.0e}")

# %% [markdown]
# # Part two: experts
#
# ## A token goes where it is understood <!-- 2 homework 4 -->
#
# DeepSeek-V3 has 671 billion parameters, and a token uses 37 billion of them: in 58 of its 61 layers the MLP is 256
# **experts**, and a **router** sends each token to 8. The router's scores are sigmoid(x W); the 8 largest choose, in 4
# of 8 groups of experts, and, divided by their sum and times 2.5, weigh. One shared expert sees every token. The
# experts of one layer take 11.3 GB in fp8; those of 58 layers take 654 GB, and 180 GB a layer while they are trained
# (16 bytes). So ranks share them, and **copies of tokens travel**: out by an all-to-all (dispatch), and back by another
# (combine).
#
#     rank 0: tokens → router → copies, by expert ──┐              ┌── experts 0 1 ──┐              ┌── weigh, add
#                                                   ├─ all-to-all ─┤                 ├─ all-to-all ─┤
#     rank 1: tokens → router → copies, by expert ──┘   dispatch   └── experts 2 3 ──┘   combine    └── weigh, add
#
# The batch is dealt over the same ranks. In backward the gradient of a copy comes back by combine's way, so dispatch
# and combine are each other's backward, and an expert gets the gradient of every token that came to it. All other
# parameters are held by every rank, and their gradients are added, as in 06.
#
# ## Predict
#
# DeepSeek-V3: 8 copies of a token, 7,168 numbers each, 1 byte per number on the way out (fp8), 2 on the way back
# (bf16). How many bytes does a token move in a layer? And if 512 tokens choose 4 of 16 experts with a fresh router:
# how many times the mean is the load of the busiest expert?

# %% guess=[170000, 2]
my_token = lab.guess("bytes of a token in a layer of DeepSeek-V3, out and back", ...)
my_load = lab.guess("largest load over the mean load", ...)

# %% [markdown]
# ## Exercise 12.2 ★★★ Expert all-to-all <!-- 2 homework 18 -->
#
# One expert per rank. `dispatch(comm, copies, sent, received)` and `combine(comm, made, sent, received)` are given,
# and autograd knows them: lists of how many copies go to each rank, and come from there. They differ from step to
# step, so sizes go first. Only chosen copies may travel: sending all tokens to all ranks has the right sum and is
# refused.

# %% exercise="hpdl_lab.parallel.experts:expert_layer"

# %% check="hpdl_lab.parallel.experts:expert_layer"

# %% [markdown]
# ## Measure: who is busy <!-- 2 homework 3 -->
#
# Your function on the engines: 512 tokens of 64 float32, 2 of 4 experts each. A copy for another rank is 256 bytes
# out and 256 back. Below, every token and its experts; the bars are what each expert has to do, the busiest decides
# when the layer ends.

# %%
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Ring
from hpdl_lab.models import deepseek, llama
from hpdl_lab.models.experts import MixtureOfExperts
from hpdl_lab.parallel import context, experts
from hpdl_lab.parallel.scripts import attend_chunks, route_tokens

# %%
torch.manual_seed(0)
layer, x = MixtureOfExperts(64, 128, experts=4, top_k=2, shared=0), torch.randn(512, 64) + torch.randn(64)
torch.nn.init.normal_(layer.router.weight, std=0.1)
routed = lab.run(route_tokens, expert_layer, layer, x)
assert all(rank.off < 1e-4 for rank in routed)

# %%
route = experts.Routing(torch.cat([rank.chosen for rank in routed]), experts=4, ranks=4)
away = int(route.traffic.sum() - route.traffic.diagonal().sum())
nbytes = sum(rank.nbytes for rank in routed)
print(f"{nbytes:,} bytes sent: {away:,} copies × {experts.bytes_per_token(1, 64, 4, 4):,}, and the sizes")
lab.reveal("bytes of a token in a layer of DeepSeek-V3, out and back", experts.bytes_per_token(8, 7168))
lab.show(route)

# %% [markdown]
# That is the most that a token can move. DeepSeek-V3 lets it go to four nodes at most, once to each of them over
# InfiniBand and on by NVLink: 4 × 7,168 × 3 bytes between nodes. Copies for the rank's own experts do not move.
#
# An unbalanced layer waits for its busiest rank. Earlier models added an auxiliary loss, whose gradient disturbs what
# is learned. DeepSeek-V3 keeps a small one within each sequence, and balances by a **bias** on the scores that choose,
# not on those that weigh: after each step -γ for experts above the mean, +γ for those below. The bias has no gradient.
# With 16 experts, and γ = 0.005:

# %%
layer = MixtureOfExperts(64, 32, experts=16, top_k=4)
torch.nn.init.normal_(layer.router.weight, std=0.1)
balance = experts.balance(layer, x, steps=200, gamma=0.005)
assert balance.imbalances[-1] < 1.3 < balance.imbalances[0]
lab.reveal("largest load over the mean load", balance.imbalances[0])
lab.show(balance)

# %% [markdown]
# A whole DeepSeek-V3, tiny: 8 experts, 2 on each of four ranks, and Moby-Dick.

# %%
course = dict(model="deepseek", data="text", dtype="float64", steps=3, deadline=60)
alone = lab.train(**course, ranks=1)
routed = lab.train(**course, mesh={"ep": 4})
off = max(abs(a - b) for a, b in zip(alone.losses, routed.losses, strict=True))
assert off < 1e-10
print(f"DeepSeek, ep 4: losses differ by {off:.0e}")

# %% [markdown]
# # Part three: long contexts, and DeepSeek's pipeline
#
# ## One sequence on many ranks <!-- 3 homework 2 -->
#
# Llama 3 405B is trained at last with 131,072 tokens in a sequence. The input of a block is 2 · 131,072 · 16,384
# bytes = 4.3 GB then, and there are 126 blocks. So the sequence is cut: each rank of the axis **cp** has some
# positions of it. Norms and MLPs work on each position by itself; attention needs all earlier keys and values. In
# **ring attention** they go around, while queries stay where they are:
#
#     step 0    rank 0: q0 hears k0     rank 1: q1 hears k1     rank 2: q2 hears k2     and k, v are on their way →
#     step 1    rank 0: q0 hears k2     rank 1: q1 hears k0     rank 2: q2 hears k1     and k, v are on their way →
#     step 2    rank 0: q0 hears k1     rank 1: q1 hears k2     rank 2: q2 hears k0
#
# With a causal mask q0 must not hear k1 and k2: two thirds of what rank 0 could do falls away, and the others wait
# for the last rank, which computes in every step.
#
# ## Predict
#
# Four ranks, one contiguous quarter of the sequence each, a causal mask. Which share of the time do they compute, if
# all wait for the slowest? A block on the diagonal is half a block.

# %% guess=[0.6]
my_used = lab.guess("share of the time that four ranks compute, contiguous quarters", ...)

# %% [markdown]
# ## Exercise 12.3 ★★★ Ring attention that keeps all ranks busy <!-- 3 homework 19 -->
#
# Each rank reads two of 2p chunks. You choose which, so that all ranks compute equally many blocks. `attend(q, k, v,
# causal)` is attention to some keys, and returns two tensors: `out`, weighted by exp(scores) and divided by their
# sum, and `lse`, the logarithm of that sum. From (out, lse) of two sets of keys follows that of both (**online
# softmax**), so no rank ever holds all keys, nor a row of scores. One of the check's cases has scores of a thousand.

# %% exercise="hpdl_lab.parallel.context:attention_around_ring"

# %% check="hpdl_lab.parallel.context:attention_around_ring"

# %% [markdown]
# ## Measure: four ranks and one sequence <!-- 3 homework 2 -->
#
# On your engines, 256 positions. A block of two chunks is one unit of work:

# %%
answered = lab.run(attend_chunks, attention_around_ring)
assert all(rank.off < 1e-10 for rank in answered) and {rank.work for rank in answered} == {8}
print(f"off by {max(rank.off for rank in answered):.0e} at most, {answered[0].nbytes:,} bytes sent by each rank")

# %% [markdown]
# On a clock: four simulated ranks, a block takes a second and a hop half of one. First contiguous quarters, then
# zigzag, as your exercise has it. Where are hops to be seen, and where not?

# %%
ring, hops = context.attention_around_ring, Ring(alpha=0.5, beta=0.0)
runs = [sim.run(4, attend_chunks, ring, contiguous, network=hops) for contiguous in (True, False)]
assert (used := [sum(rank.work for rank in run) / 4 / run.seconds for run in runs]) == [4 / 7, 1]
lab.reveal("share of the time that four ranks compute, contiguous quarters", used[0])
print(f"quarters compute {used[0]:.0%} of the time, zigzag {used[1]:.0%}")
pictures = [lab.show(run) for run in runs]

# %% [markdown]
# P/(2P-1) of the time for P contiguous parts: for many ranks half of it. Backward goes around a second time, and the
# gradients of keys and values travel one hop behind them. **Ulysses** needs no ring: an all-to-all turns some positions
# of all heads into all positions of some heads, attention is the ordinary one, and another all-to-all goes back. Only
# keys and values go around the ring, and with G query heads for a key head these are small. In units of q of all
# positions a rank sends 2(p - 1)/(pG) in a ring and (2 + 2/G)(p - 1)/p² with Ulysses, which also moves q and the
# output. So Ulysses sends less only if **p > G + 1**, and it ends at as many ranks as there are key heads. Llama 3 405B
# has G = 16 and 8 key heads: on 8 ranks Ulysses sends 2.1 times as much. Here is the DeepSeek of part two, its
# sequences and its experts on two ranks each:

# %%
both = lab.train(**course, mesh={"ep": 2, "cp": 2})
off = max(abs(a - b) for a, b in zip(alone.losses, both.losses, strict=True))
assert off < 1e-10
print(f"DeepSeek, ep 2 × cp 2: losses differ by {off:.0e}")

# %% [markdown]
# ## Predict
#
# Now the text is written, token by token. How many numbers does the cache keep for a token and layer: in Llama 3 8B
# (d = 4,096, 32 query heads, 8 key heads), and in DeepSeek-V3, with keys of 128 + 64 and values of 128 numbers for
# each of 128 heads, or with a latent of 512 and the 64 that are turned by the position?

# %% guess=[2048, 40960, 576]
my_numbers = lab.guess("numbers per token and layer", {"Llama 3 8B": ..., "V3 by heads": ..., "V3 by latents": ...})

# %% [markdown]
# ## Exercise 12.4 ★★ Latent attention's cache <!-- 3 homework 10 -->
#
# A head's key is U · latent, with a matrix U of its own. q · (U latent) = (qᵀ U) · latent: the matrix can go to the
# one query instead of to all cached tokens. What is left looks like attention with a single key head, which all
# queries share; call `attend(q, k, v, scale)`, such as your function of 12.1. The check refuses tensors that have a
# row for each head and each token, and keys that are made anew for each token.

# %% exercise="hpdl_lab.models.deepseek:latent_attention"

# %% check="hpdl_lab.models.deepseek:latent_attention"

# %% [markdown]
# The published sizes, without their numbers: on the device "meta" a tensor has only a shape. How many tokens of
# context fill the memory that you would save?

# %%
with torch.device("meta"):
    made = [llama.Llama(llama.SIZES["paper"]), *[deepseek.DeepSeek(deepseek.SIZES["paper"])] * 2]
caches = [attentions_of(deepseek.absorb(m, i == 2))[0].cache_shape for i, m in enumerate(made)]  # the last: latents
kept = {form: heads * (d_k + d_v) for form, (heads, d_k, d_v) in zip(my_numbers, caches, strict=True)}
lab.reveal("numbers per token and layer", kept)
print("GB of 131,072 tokens:", [round(kept[n] * len(m.blocks) * 262144e-9, 1) for n, m in zip(kept, made, strict=True)])

# %% [markdown]
# Both are the same function of the same weights. DeepSeek-V3 trains in the naive form and decodes in the absorbed
# one: for one query and many cached tokens it reads 71 times less; for as many queries as tokens its longer products
# cost more. With tensor parallelism each rank has some heads; the latent is whole on all of them, so here it does not
# shrink.
#
# ## DualPipe: hide the all-to-all <!-- 3 homework 3 -->
#
# In every layer with experts a token waits twice for an all-to-all: dispatch and combine. Alone, a micro-batch can do
# nothing meanwhile. DeepSeek-V3 spends about as long on them as on computing, and so pairs two micro-batches: while
# the tokens of one travel, the other one computes. Forwards and backwards are at hand at the same time if
# micro-batches come from **both ends** of the pipeline, into two replicas that lie on the same ranks as GEMS's do in
# [10](10_pipeline_parallel.ipynb). In the picture a rank has a lane for each of its two stages.
#
# Where F, I and W take one unit each, DualPipe takes 2 units more than 3m, and a rank holds the activations of five
# micro-batches; weights are there twice. Zero-bubble V and DualPipe-V fold one model instead, so that a rank holds a
# stage near each of its ends.

# %%
for name in ("1f1b", "zero_bubble_h1", "zero_bubble_v", "dualpipe", "dualpipe_v"):
    plan = schedules.build(name, ranks=4, micro_batches=8)
    times = schedules.evaluate(plan)
    live = max(times.peak) / plan.chunks  # stages of V-shaped ones are half as long
    print(f"{name:15} {times.makespan:4g} units of time, bubble {times.bubble:.1%}, live at most {live:g}")
lab.show("dualpipe", micro_batches=8)

# %% [markdown]
# ## Predict
#
# A unit of a pair is not saved by the order itself, but by what overlaps. Now a small DeepSeek on 4 × 2 simulated
# ranks: four places of a pipeline, at each of which two ranks share the experts. An all-to-all takes about as long as
# attention or experts. If the two of a pair come one after the other, all of it is exposed: the rank computes nothing
# meanwhile. What share is left if they overlap?

# %% guess=[0.5]
my_share = lab.guess("share of the all-to-alls that stays exposed", ...)

# %%
run = lab.dualpipe(micro_batches=8, prediction=my_share)
lab.reveal("share of the all-to-alls that stays exposed", run.shares[1])
assert run.shares[0] > 0.99 and run.together.seconds < run.alone.seconds
run

# %% [markdown]
# ## Exercise 12.5 ★ Read it in the timeline <!-- 3 homework 5 -->
#
# Two lanes of one rank: what it computes, and its all-to-alls. Under what does one of these lie?

# %% exercise="hpdl_lab.parallel.pipeline.overlap:hidden_by"

# %% check="hpdl_lab.parallel.pipeline.overlap:hidden_by"

# %% [markdown]
# Your function reads the run above. Each all-to-all of a pair lies under its partner; those of the first forwards and
# of the last backwards have none. With more micro-batches a larger share are pairs, and less stays exposed:

# %%
found = {f"{bar.name} of {bar.action}": hidden_by(bar, run.together.computing) for bar in run.together.sending}
hidden = [f"{name} lies under {', '.join(under)}" for name, (under, _) in found.items() if under]
print(f"{len(hidden)} of {len(found)} all-to-alls are hidden:", *hidden, sep="\n  ")
longer = lab.dualpipe(micro_batches=16)
assert longer.shares[1] < run.shares[1]

# %% [markdown]
# ## Take it home <!-- 3 homework 4 -->
#
# PyTorch has context parallel as a prototype. `context_parallel` deals tensors out in zigzag, and puts a ring in the
# place of attention's CUDA kernels. On a CPU it deals out, and leaves attention as it is: each rank attends to
# its own positions only, without a warning. So this file calls the ring below it with the kernel for CPUs.

# %% tags=["take-home"]
# %%writefile take_home_12.py
"""PyTorch's context parallel: torchrun --standalone --nproc-per-node 2 take_home_12.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options, _templated_ring_attention
from torch.nn.functional import scaled_dot_product_attention

dist.init_process_group("gloo")
mesh, generator = init_device_mesh("cpu", (dist.get_world_size(),)), torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, 4, 32, 8, dtype=torch.float64, generator=generator) for _ in range(3))
positions, whole = torch.arange(32), scaled_dot_product_attention(q, k, v, is_causal=True)
_cp_options.convert_to_f32 = False  # keep all digits
with torch.no_grad(), context_parallel(mesh, buffers=[q, k, v, positions], buffer_seq_dims=[2, 2, 2, 0]):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    part = _templated_ring_attention(mesh.get_group(), 2, kernel, q, k, v, is_causal=True)[0]
    off = (part - whole[:, :, positions]).abs().max().item()
    print(f"rank {dist.get_rank()} has positions {positions.tolist()}, off by {off}\n", end="")
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_12.py
print(out.n)

# %% tags=["take-home"]
for rank in range(2):
    mine = context.positions_of(rank, 2, 16, zigzag=True).tolist()
    (line,) = [line for line in out if f"rank {rank} has positions {mine}," in line]
    assert float(line.split()[-1]) < 1e-10

# %% [markdown]
# `transformers` keeps a plan with each model, `tp_plan`: which layer is cut by columns, and which by rows. Under
# torchrun `from_pretrained(..., tp_plan="auto")` does the rest; here the plan of a LLaMA with random weights goes to
# PyTorch's own `parallelize_module` (09), after one rank has computed the logits of the whole model.

# %% tags=["take-home"]
# %%writefile take_home_12_tp.py
"""transformers' tp_plan: pip install transformers, then torchrun --standalone --nproc-per-node 2 take_home_12_tp.py"""

from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if not find_spec("transformers"):
    raise SystemExit(print("transformers is not installed: pip install transformers, and run this cell again"))
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
sizes = {"vocab_size": 80, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
rope = {"rope_type": "default", "rope_theta": 500_000.0}
torch.manual_seed(0)
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope)
model, tokens = LlamaForCausalLM(config).double(), torch.arange(64)[None]
whole = model(tokens).logits
styles = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()}
styles["embedding_rowwise"] = RowwiseParallel(input_layouts=Replicate())
styles["colwise_gather_output"] = ColwiseParallel(output_layouts=Replicate())
plan = {layer: styles[how] for layer, how in model.tp_plan.items()}
parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
print(f"logits differ by {(model(tokens).logits - whole).abs().max().item()}\n", end="")
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_12_tp.py
print(next(iter(out.grep("logits|not installed")), out.n))

# %% tags=["take-home"]
off = [float(line.split()[-1]) for line in out.grep("logits differ")]
assert out.grep("not installed") or (len(off) == 2 and max(off) < 1e-10)

# %% [markdown]
# ## Question to discuss
#
# A sequence of 131,072 tokens on 16 ranks of two nodes. Ring attention sends keys and values to the neighbor while a
# block is computed; Ulysses sends everything at once, and then computes; a third way is to gather all keys first,
# which is what Llama 3 does. Which of them do you choose inside a node, and which between nodes? What do 8 key heads
# change, and what does DeepSeek's single latent? DualPipe holds all weights twice: what do 64 ranks that share the
# experts make of that price?
#
# ## Where to read the real code
#
# - `hpdl_lab/models/llama.py`, `hpdl_lab/models/deepseek.py`, `hpdl_lab/models/attention.py`: models that read like
#   their papers; `hpdl_lab/models/published.py` makes ours of published models.
# - `hpdl_lab/models/experts.py`: router, bias, experts on one rank; `hpdl_lab/parallel/experts.py`: dispatch,
#   combine.
# - `hpdl_lab/parallel/context.py`: the ring with its backward, and Ulysses.
# - In PyTorch: `torch/distributed/tensor/experimental/_context_parallel/_attention.py`, whose zigzag is yours.
# - Grattafiori et al. 2024 (Llama 3), arXiv:2407.21783; DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437; Ainslie et
#   al. 2023 (grouped queries), arXiv:2305.13245; Liu et al. 2023 (ring attention), arXiv:2310.01889; Jacobs et al.
#   2023 (Ulysses), arXiv:2309.14509; Lepikhin et al. 2020 (GShard), arXiv:2006.16668.

# %% [markdown]
# ## Recap
#
# 1. Grouped queries share key heads: the cache shrinks by the size of the group, and so does what each token reads.
# 2. Latent attention keeps one latent per token for all heads; the matrices that make keys of it work on the query.
# 3. Experts: a token uses few parameters of many. Two all-to-alls per layer, k·d numbers each; loads have to be
#    balanced.
# 4. Context parallel: keys and values go around a ring, and partial results are merged by their lse; zigzag makes the
#    work equal under a causal mask.
# 5. Every axis leaves the model as it is: the losses are those of one rank.
#
# | term | what it means |
# |---|---|
# | grouped queries (GQA) | several query heads share one key head |
# | latent attention (MLA) | keys and values of all heads are made of one short vector per token |
# | absorbed | the matrices of keys and values are applied to queries and results, not to the cache |
# | expert, router | one of many MLPs of a layer; what chooses k of them for a token |
# | dispatch, combine | the all-to-all that sends copies of tokens to experts; the one that brings results back |
# | expert parallel (ep), context parallel (cp) | ranks share experts; ranks share a sequence |
# | lse, online softmax | the log of the sum of exp(scores), with which partial attentions are merged |
# | zigzag | rank r holds chunks r and 2p-1-r of a sequence |
# | DualPipe | a pipeline fed from both ends, whose all-to-alls hide behind another micro-batch |
#
# **What you can do now:** read the shapes of a new model, say which of its parts goes to which axis of ranks, and
# what it keeps and sends there.
#
# <!-- links -->
