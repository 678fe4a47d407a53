# %% [markdown]
# # 12 · Models of today
#
# **The number to reach:** four ranks that share one sequence compute 100% of the time, not 57%. To generate text, a
# model keeps 576 numbers per token and layer, not 40,960. And if four ranks share experts, heads, layers or sequences,
# the losses are a single rank's losses, to 10⁻¹⁰.
#
# <!-- tracks -->
#
# Part one shows what LLaMA changed in GPT-2, and a **vision transformer** (ViT), which reads images. Part two explains
# the experts of DeepSeek-V3, and part three long sequences.

# %%
import torch

from hpdl_lab import lab, models

lab.start(4)

# %% [markdown]
# # Part one: LLaMA, and a ViT
#
# ## The idea <!-- 1 two days 4 -->
#
# Models have grown in three directions, each with its own axis of ranks:
#
# | what grows | how ranks share it | axis |
# |---|---|---|
# | parameters that every token uses | each rank has some layers (10), or some heads (09) | pp, tp |
# | parameters, but each token uses only a few | each rank has some experts; tokens travel | **ep**, expert parallel |
# | tokens in a sequence | each rank has some positions; keys travel | **cp**, context parallel |
#
# To generate text, a model keeps the keys and values of all earlier tokens, the **KV cache**. A GPT's cache has one key
# and one value per token and layer, each as wide as the model. Most changes to attention since 2020 shrink the cache.
#
# ## Predict
#
# In 16 bits, the weights of Llama 3 405B take 810 GB, and the weights of DeepSeek-V3 1,342 GB. How many GB does the
# cache of one text of 131,072 tokens take in each model?

# %% guess=[70, 10]
my_cache = lab.guess("GB of the cache of 131,072 tokens", {"Llama 3 405B": ..., "DeepSeek-V3": ...})

# %% [markdown]
# Each bar on the left is the memory of the fullest GPU in training. From left to right, more GPUs share one copy of the
# model, until each GPU's part fits. First, GPUs share heads (tp) or experts (ep), then also layers (pp). Further copies
# of the model are on other GPUs, and ZeRO-1 shards the optimizer's state over the copies. On the right is the cache,
# with stars at your guesses. Choose GPT-3, then DeepSeek-V3. Which side changes more? And how few GPUs can train each
# model?

# %%
lab.explore("published", prediction=my_cache)
numbers = {"Llama 3 405B": 126 * 2 * 8 * 128, "DeepSeek-V3": 61 * 576}  # that the cache keeps for a token
lab.reveal("GB of the cache of 131,072 tokens", {name: 131_072 * 2 * n / 1e9 for name, n in numbers.items()})

# %% [markdown]
# The cache changes more: it is 618 GB for GPT-3, and 9.2 GB for DeepSeek-V3.
#
# ## LLaMA and DeepSeek in shapes <!-- 1 two days 2 -->
#
# Both models are GPTs ([00](00_why.ipynb)). Find the new parts in the pictures:
#
# - **RMSNorm** divides x by its root mean square, and subtracts no mean.
# - **RoPE**, rotary positions: queries and keys are rotated by an angle that grows with the position. So q · k depends
#   on how far apart two tokens are.
# - **SwiGLU** is an MLP with a gate: (silu(x G) ⊙ x U) D, and ⊙ multiplies number by number. The gate silu(x G), a
#   smooth ReLU, scales each number of x U.
# - **Grouped queries** (GQA) in LLaMA: several query heads share a key head and a value head. `qkv` makes 4 query
#   heads, but only 2 key heads and 2 value heads.
# - **Latent attention** (MLA) in DeepSeek: `kv_down` makes one short vector per token, the latent. The keys and values
#   of all heads are made from the latent.

# %%
tokens = torch.arange(16)[None]
pictures = [lab.show(model, tokens) for model in (models.build("llama", layers=1), models.build("deepseek", layers=1))]

# %% [markdown]
# ## Exercise 12.1 ★★ Grouped queries <!-- 1 two days 12 -->
#
# Compute attention in which each key head serves a group of query heads. Do not copy key heads: to make one token, a
# model reads the whole cache, and copies would make the cache larger. The check looks at your largest tensor. Products
# q · k are multiplied by `scale`, or by 1/√d if `scale` is None.

# %% exercise="hpdl_lab.models.attention:grouped_query_attention"

# %% check="hpdl_lab.models.attention:grouped_query_attention"

# %% [markdown]
# Now your function runs inside a LLaMA. In each layer, the function `attend` computes attention. The next cell replaces
# the first layer's `attend` by your function, wrapped in `Causal`:

# %%
from hpdl_lab.models.attention import Causal, attentions_of

model = models.build("llama", dtype="float64")
by_torch, first = model(tokens), attentions_of(model)[0]
first.attend = Causal(grouped_query_attention)
assert (model(tokens) - by_torch).abs().max() < 1e-10

# %% [markdown]
# ## Measure: a ViT on four ranks <!-- 1 two days 2 -->
#
# A ViT cuts an image into patches and reads the patches like words, without a mask. As in notebook 11, the layers are
# cut into two stages (pp), and two ranks share the heads of each stage (tp). The ViT takes 44 steps on the digits, in
# 64 bits:

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
# ## A token goes where it is understood <!-- 2 two days 4 -->
#
# DeepSeek-V3 has 671 billion parameters, but a token uses only 37 billion. In 58 of its 61 layers, 256 small MLPs, the
# **experts**, replace the MLP. A small layer, the **router**, computes a token's score for each expert, sigmoid(x W),
# and chooses the 8 experts with the largest scores. Each expert's result is multiplied by a weight: 2.5 times the
# expert's share of the sum of the 8 scores. One more expert, the shared expert, gets every token.
#
# In one layer the experts take 11.3 GB in 8 bits (fp8), and 180 GB in training, with 16 bytes per parameter. So ranks
# share the experts, and **copies of tokens travel**. In an all-to-all, each rank sends different data to every other
# rank. One all-to-all takes copies to their experts (**dispatch**), another one brings the results back (**combine**):
#
#     rank 0: tokens → router → copies, by expert ──┐              ┌── experts 0 1 ──┐              ┌── weight, add
#                                                   ├─ all-to-all ─┤                 ├─ all-to-all ─┤
#     rank 1: tokens → router → copies, by expert ──┘   dispatch   └── experts 2 3 ──┘   combine    └── weight, add
#
# In backward, gradients travel the opposite way: the backward of combine is a dispatch, and the backward of dispatch is
# a combine. Each rank has its own tokens, and a replica of all parameters outside the experts. The replicas' gradients
# are added, as in notebook 06.
#
# ## Predict
#
# An untrained router chooses 4 of 16 experts for each of 512 tokens. An expert's load is its number of tokens. What is
# the largest load, divided by the mean load?

# %% guess=[2]
my_load = lab.guess("largest load over the mean load", ...)

# %% [markdown]
# ## Exercise 12.2 ★★★ Expert all-to-all <!-- 2 two days 18 -->
#
# Write a layer of experts, with one expert on each rank. You are given `dispatch(comm, copies, sent, received)` and
# `combine(comm, made, sent, received)`; both work with autograd. `sent[r]` copies go to rank r, and `received[r]`
# copies come from rank r. These sizes change in every step, so your function must exchange them first. Send a token
# only to its experts: the check rejects a function that sends all tokens to all ranks.

# %% exercise="hpdl_lab.parallel.experts:expert_layer"

# %% check="hpdl_lab.parallel.experts:expert_layer"

# %% [markdown]
# ## Measure: who is busy <!-- 2 two days 3 -->
#
# Your function runs on four engines, with one expert on each. Together, they have 512 tokens of 64 float32 numbers, and
# each token goes to 2 experts. A copy for another rank costs 256 bytes out and 256 back. Look for the busiest expert:
# the layer waits for it.

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
assert experts.bytes_per_token(8, 7168) == 172_032  # of a token of DeepSeek-V3 in one layer
lab.show(route)

# %% [markdown]
# Expert 3 is the busiest, with twice the mean load. In DeepSeek-V3 a token has 8 copies of 7,168 numbers. A number
# takes 1 byte on the way out (fp8) and 2 bytes back (bf16): at most 172,032 bytes per layer. To limit this traffic, the
# experts form 8 groups, one on each node. The router chooses a token's 8 experts from 4 groups only. So a token crosses
# to four nodes at most, and not to eight.
#
# A layer waits for its busiest rank, so loads have to be balanced. An extra loss can balance them, but its gradient
# disturbs what the model learns. DeepSeek-V3 gives this loss a tiny factor, and uses a **bias** for each expert. The
# router chooses the experts with the largest score plus bias, but a result's weight depends on the score alone. After
# each step the bias decreases by γ if the expert's load is above the mean, and increases by γ if the load is below.
# With γ = 0.005, do the loads of 16 experts reach the mean?

# %%
layer = MixtureOfExperts(64, 32, experts=16, top_k=4)
torch.nn.init.normal_(layer.router.weight, std=0.1)
balance = experts.balance(layer, x, steps=200, gamma=0.005)
assert balance.imbalances[-1] < 1.3 < balance.imbalances[0]
lab.reveal("largest load over the mean load", balance.imbalances[0])
lab.show(balance)

# %% [markdown]
# The largest load falls from 2.4 to 1.04 times the mean.
#
# Now a tiny DeepSeek-V3 reads Moby-Dick, with 2 of 8 experts on each of four ranks:

# %%
course = dict(model="deepseek", data="text", dtype="float64", steps=3, deadline=60)
alone = lab.train(**course, ranks=1)
routed = lab.train(**course, mesh={"ep": 4})
off = max(abs(a - b) for a, b in zip(alone.losses, routed.losses, strict=True))
assert off < 1e-10
print(f"DeepSeek, ep 4: losses differ by {off:.0e}")

# %% [markdown]
# # Part three: long contexts and their cache
#
# ## One sequence on many ranks <!-- 3 two days 2 -->
#
# In its last phase of training on plain text (pre-training), Llama 3 405B reads sequences of 131,072 tokens. The input
# of one layer is then 2 · 131,072 · 16,384 bytes = 4.3 GB, and there are 126 layers. So the sequence is cut: each rank
# of the axis cp has some positions. Only attention needs other ranks' keys and values. In **ring attention** keys and
# values go around a ring, one rank in each step (a **hop**), and queries stay where they are:
#
#     step 0    rank 0: q0 with k0    rank 1: q1 with k1    rank 2: q2 with k2    and k, v go to the next rank →
#     step 1    rank 0: q0 with k2    rank 1: q1 with k0    rank 2: q2 with k1    and k, v go to the next rank →
#     step 2    rank 0: q0 with k1    rank 1: q1 with k2    rank 2: q2 with k0
#
# With a causal mask q0 must not attend to k1 and k2. So rank 0 computes in one step only, and then waits: rank 2
# computes in all three steps.
#
# ## Predict
#
# Each of four ranks has a contiguous quarter of the sequence, and the mask is causal. Attention to an earlier rank's
# keys is one unit of work. Attention to a rank's own keys is half a unit, because half is masked. In each step all
# ranks wait for the slowest rank. What share of the time do ranks compute, on average?

# %% guess=[0.6]
my_used = lab.guess("share of the time that four ranks compute, contiguous quarters", ...)

# %% [markdown]
# ## Exercise 12.3 ★★★ Ring attention that keeps all ranks busy <!-- 3 two days 19 -->
#
# Compute ring attention of one sequence on p ranks. Cut the sequence into 2p chunks. When one chunk of queries attends
# to one chunk of keys, this is a block of work. Give each rank two chunks, so that every rank computes the same number
# of blocks.
#
# You are given `attend(q, k, v, causal)`, which computes attention to some keys, and returns `out` and `lse`. `out` is
# the mean of the values, weighted by exp(scores). **lse** is the logarithm of the sum of exp(scores). From `out` and
# `lse` of two sets of keys you can compute `out` and `lse` of both sets together. This is **online softmax**: no rank
# ever holds all keys, or a whole row of scores. The check also tests scores of about 1,000: exp(1,000) is infinite.

# %% exercise="hpdl_lab.parallel.context:attention_around_ring"

# %% check="hpdl_lab.parallel.context:attention_around_ring"

# %% [markdown]
# ## Measure: four ranks and one sequence <!-- 3 two days 2 -->
#
# Your function runs on the engines, with 256 positions:

# %%
answered = lab.run(attend_chunks, attention_around_ring)
assert all(rank.off < 1e-10 for rank in answered) and {rank.work for rank in answered} == {8}
print(f"off by {max(rank.off for rank in answered):.0e} at most, {answered[0].nbytes:,} bytes sent by each rank")

# %% [markdown]
# Next, four ranks are simulated: a block takes one second, a hop half a second. The first picture shows contiguous
# quarters, the second shows **zigzag**: rank r has chunks r and 2p - 1 - r. In which picture do ranks wait?

# %%
ring, hops = context.attention_around_ring, Ring(alpha=0.5, beta=0.0)
runs = [sim.run(4, attend_chunks, ring, contiguous, network=hops) for contiguous in (True, False)]
assert (used := [sum(rank.work for rank in run) / 4 / run.seconds for run in runs]) == [4 / 7, 1]
lab.reveal("share of the time that four ranks compute, contiguous quarters", used[0])
print(f"quarters compute {used[0]:.0%} of the time, zigzag {used[1]:.0%}")
pictures = [lab.show(run) for run in runs]

# %% [markdown]
# With contiguous parts, p ranks compute p/(2p - 1) of the time: half, if p is large. With zigzag no rank waits, because
# a hop takes less time than the blocks of a step.
#
# **Ulysses** needs no ring. An all-to-all gives each rank all positions of some heads. The rank computes ordinary
# attention for these heads, and a second all-to-all brings the results back.
#
# Which way sends less? For p ranks and G query heads per key head:
#
# | way | what travels | bytes sent per rank / bytes of all queries of the sequence |
# |---|---|---|
# | ring | keys and values | 2(p - 1)/(pG) |
# | Ulysses | queries, keys, values and outputs | (2 + 2/G)(p - 1)/p² |
#
# Ulysses sends less only if **p > G + 1**. And Ulysses cannot use more ranks than key heads. Llama 3 405B has G = 16
# and 8 key heads: on 8 ranks Ulysses sends 2.1 times as much as the ring.
#
# Now the DeepSeek of part two runs on two axes: two ranks share its experts, and two ranks share each sequence.

# %%
both = lab.train(**course, mesh={"ep": 2, "cp": 2})
off = max(abs(a - b) for a, b in zip(alone.losses, both.losses, strict=True))
assert off < 1e-10
print(f"DeepSeek, ep 2 × cp 2: losses differ by {off:.0e}")

# %% [markdown]
# ## Exercise 12.4 ★★ Latent attention's cache <!-- 3 homework 10 -->
#
# Attend to a cache of latents, without making keys and values of each head. A head's key is U · latent, and each head
# has its own matrix U. Since q · (U latent) = (qᵀ U) · latent, you can multiply one query by U, instead of all cached
# latents. Find the same trick for the values. In this **absorbed** form, the query absorbs U, and all query heads share
# the latents as keys. Pass the cache as one key head to `attend(q, k, v, scale)`, which works like your function of
# 12.1. In DeepSeek, RoPE rotates only a part of each key. This part is the same for all heads, and stands behind the
# latent in the cache.
#
# The check rejects keys or values that are computed from all cached latents, and any tensor with a vector for each head
# and each token.

# %% exercise="hpdl_lab.models.deepseek:latent_attention"

# %% check="hpdl_lab.models.deepseek:latent_attention"

# %% [markdown]
# How much memory do latents save? The next cell compares Llama 3 8B, DeepSeek-V3 with each head's keys, and DeepSeek-V3
# with latents. It prints how many numbers the cache keeps per token and layer, then the GB of 131,072 tokens. (On the
# device "meta" a tensor has a shape, but no memory.)

# %%
with torch.device("meta"):
    made = [llama.Llama(llama.SIZES["paper"]), *[deepseek.DeepSeek(deepseek.SIZES["paper"])] * 2]
caches = [attentions_of(deepseek.absorb(m, i == 2))[0].cache_shape for i, m in enumerate(made)]  # the last: latents
kept = [heads * (d_k + d_v) for heads, d_k, d_v in caches]
assert kept == [2048, 40_960, 576]
print(kept, "numbers; GB:", [round(n * len(m.blocks) * 262144e-9, 1) for n, m in zip(kept, made, strict=True)])

# %% [markdown]
# For one query and many cached tokens, the absorbed form reads 71 times less, so it is used to generate text. Training
# has as many queries as tokens. There the absorbed form would cost more: a product of query and key has 576 terms
# instead of 192. Tensor parallelism does not shrink the cache of latents: each rank has some of the heads, but needs
# the whole latent.

# %% [markdown]
# ## Take it home <!-- 3 homework 4 -->
#
# PyTorch's `context_parallel`, a prototype, shards tensors in zigzag and replaces attention's CUDA kernels by a ring.
# On a CPU, `context_parallel` does not replace attention: each rank attends to its own positions only, without a
# warning. So the next file calls PyTorch's ring itself, with the kernel for CPUs.

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
# In `transformers` each model has a plan, `tp_plan`, which cuts layers by columns or by rows. Under torchrun,
# `from_pretrained(..., tp_plan="auto")` follows this plan. The next file builds a LLaMA with random weights, and
# PyTorch's `parallelize_module` (notebook 09) cuts the model by its plan. Then the file compares the logits of the cut
# model and the whole model.

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
# 16 ranks on two nodes share a sequence of 131,072 tokens. Ring attention sends keys and values to the neighbor while a
# block is computed. Ulysses sends everything at once, and then computes. Llama 3 gathers all keys first. Which way do
# you choose inside a node, and which between nodes? What changes with 8 key heads, and with DeepSeek's single latent?
#
# ## Where to read the real code
#
# - `hpdl_lab/models/llama.py`, `hpdl_lab/models/deepseek.py`, `hpdl_lab/models/attention.py`: the models;
#   `hpdl_lab/models/published.py`: loads published weights into them.
# - `hpdl_lab/models/experts.py`: router, bias, experts on one rank; `hpdl_lab/parallel/experts.py`: dispatch, combine.
# - `hpdl_lab/parallel/context.py`: the ring with its backward, and Ulysses.
# - In PyTorch: `torch/distributed/tensor/experimental/_context_parallel/_attention.py`, with the same zigzag.
# - Grattafiori et al. 2024 (Llama 3), arXiv:2407.21783; DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437; Jacobs et al.
#   2023 (Ulysses), arXiv:2309.14509.

# %% [markdown]
# ## Recap
#
# 1. Grouped queries share key heads, so the cache is smaller, and each new token reads less.
# 2. Latent attention keeps one latent per token for all heads. The matrix that makes keys from latents multiplies the
#    query instead.
# 3. With experts, a token uses only a few of the parameters. A layer has two all-to-alls; each sends k · d numbers per
#    token (k experts, width d). Loads have to be balanced.
# 4. In context parallelism, keys and values go around a ring, and lse merges the partial results. With a causal mask,
#    zigzag gives all ranks the same work.
# 5. No axis changes the model: the losses are the losses of one rank.
#
# <!-- terms -->
#
# **What you can do now:** read the shapes of a new model, and choose an axis of ranks for each of its parts.
#
# <!-- links -->
