# %% [markdown]
# # 13 · Inference
#
# **The number to reach:** with your cache, attention for token 1,024 of a text is more than ten times as fast. Your
# functions serve 16 requests in 30 passes through the model instead of 56, and two ranks generate the same tokens as
# one.
#
# <!-- tracks -->
#
# A model is trained once and used a billion times. To make one token, a GPU needs more time to read the weights from
# memory than to compute. And users wait for every token.

# %%
import torch

from hpdl_lab import lab

lab.start(4)
torch.set_num_threads(1)  # as on each rank: the products of one token are too small to be shared by threads

# %% [markdown]
# # Part one: a model that writes
#
# ## The idea <!-- 1 half day 5 -->
#
# A language model says how probable each next token is. One token is chosen and put at the end of the text, and the
# model runs again. Each new token needs the keys and values of all tokens before it, in every layer. Keys and values
# never change, so the model keeps them in a **KV cache**.
#
#     prefill                                     decode
#
#     "Call me Ish"  all tokens at once           "m"  one token        "a"  one token
#          |                                       |                     |
#     [ model ] ---- keys, values ----> cache --> [ model ] --> cache --> [ model ] --> ...
#          |                                       |                     |
#         "m"    the first token                  "a"                   "e"
#
#     products of matrices: FLOPs count           products with a vector: bytes count
#
# **Prefill** reads the prompt. All tokens of the prompt pass through the model at once, so each weight that is read is
# used for all of them. **Decode** generates one token at a time, so each weight is read for one token only.
#
# An H100 reads 3.35 · 10¹² bytes and does 989 · 10¹² operations per second. While it reads one 16-bit number, it can do
# 590 operations. So bytes limit decode: a token takes at least the time to read **weights and cache**. If many texts
# are decoded at once, the weights are read once for all of them, but each text has its own cache. So serving is a
# compromise: a larger batch gives more tokens per second in all, but each text waits longer between two tokens.
#
# ## Moby-Dick, token by token <!-- 1 half day 2 -->
#
# This GPT of 0.8 million parameters was trained on nine tenths of Moby-Dick. Its tokens are characters. An **inference
# engine** serves requests with a model. It gives each running request one of its **slots**, here four. `submit` returns
# tokens as they are generated. A `temperature` below 1 prefers likely tokens.

# %%
from hpdl_lab.inference import weights
from hpdl_lab.inference.engine import Engine
from hpdl_lab.inference.sampling import Sampling

moby_dick = weights.load("moby_dick")

# %%
engine = Engine(moby_dick, slots=4)
print("The great whale", end="")
for token in engine.submit(weights.encode("The great whale"), max_tokens=200, sampling=Sampling(temperature=0.6)):
    print(weights.decode([token]), end="", flush=True)

# %% [markdown]
# ## Predict
#
# Llama 3 8B has 32 layers, and each has 8 key heads. A key and a value have 128 numbers each, of 2 bytes. How many GB
# (10⁹ bytes) do the keys and values of 32 conversations of 8,192 tokens take? The weights take 16 GB.

# %% guess=[34]
my_cache = lab.guess("GB of cache for 32 conversations of 8,192 tokens, Llama 3 8B", ...)

# %% [markdown]
# ## What a cache takes <!-- 1 half day 4 -->
#
# A token takes 2 · layers · key heads · n numbers: a key and a value, of n numbers each, in every key head. DeepSeek-V3
# keeps one latent of 576 numbers per layer instead (12). A **step** is one pass through the model, and gives each
# running request a token. The picture assumes that a step takes the time of its bytes or of its FLOPs, whichever is
# longer. Messages are not counted.
#
# Why does throughput stop growing with the batch? Which models can serve one user with 128,000 tokens from one GPU?
# What does a cache with 8-bit numbers change?

# %%
lab.explore("kv_cache", prediction=my_cache)
numbers = 2 * 32 * 8 * 128  # that the cache keeps for a token
lab.reveal("GB of cache for 32 conversations of 8,192 tokens, Llama 3 8B", 32 * 8_192 * 2 * numbers / 1e9)

# %% [markdown]
# ## Predict
#
# The GPT of Moby-Dick runs on one rank of this machine, with up to eight requests at once. How many tokens per second
# does it generate at most?

# %% guess=[2000]
my_throughput = lab.guess("tokens/s of all requests together, at most", ...)

# %% [markdown]
# ## Measure: throughput against latency <!-- 1 half day 4 -->
#
# Requests arrive at random (a Poisson process), first slowly, then faster than the engine can serve them. Users feel
# two latencies: the **time to the first token**, and the **time between two tokens**. The pictures show both latencies
# over tokens per second, with a point for each rate of requests. The dotted line is computed for 1, 2, ... 8 requests
# that run all the time. Look for the **knee**, the rate above which latency grows, and throughput does not.

# %%
served = lab.serve(prediction=my_throughput)
lab.reveal("tokens/s of all requests together, at most", served.throughput)
served

# %% [markdown]
# Below the knee more requests cost little: tokens/s grow, and the time between two tokens hardly changes. Above the
# knee, requests wait in the queue, and the time to the first token grows without end. **Where would you run the
# engine?** Left of the knee, and further left if users come in bursts.
#
# The dotted line counts bytes and two measured constants: the Python overhead of a step, and the overhead of each
# further request in the step. Prompts take longer than assumed, so points may lie above the line. A large model on a
# GPU reads so many bytes that the overhead does not count.

# %% [markdown]
# # Part two: one request, faster
#
# ## Exercise 13.1 ★★ One token with a cache <!-- 2 two days 15 -->
#
# Compute one layer of attention for the newest token. Without a cache, a model computes queries, keys and values of all
# tokens so far, and uses one row of the result. `keys` and `values` hold what earlier calls have written. The check
# compares results, and counts multiplications.

# %% exercise="hpdl_lab.inference.decode:decode_step"

# %% check="hpdl_lab.inference.decode:decode_step"

# %% [markdown]
# ### Predict, then measure: token 1,024
#
# The layer is 256 wide. Divide the time for token 1,024 by the time for token 1. What is this factor without a cache,
# and with yours?

# %% guess=[1000, 3]
my_factors = lab.guess("times as long as token 1", {"without a cache": ..., "yours": ...})

# %%
from hpdl_lab.inference import decode

times = decode.compare_decode_steps({"without a cache": decode.without_cache, "yours": decode_step})
assert times["yours"][1024].median < times["without a cache"][1024].median / 10
lab.reveal("times as long as token 1", {how: times.factor(how) for how in my_factors})
lab.show(times, prediction=my_factors)

# %% [markdown]
# ## Exercise 13.2 ★★ Decode on several ranks <!-- 2 two days 12 -->
#
# Send one new token through layers that several ranks share. A token takes at least the time to read the weights, and
# two ranks read from two memories. Each rank has half of the heads with their cache, and half of the MLP (09).
# Pipelines (10) do not help: a token passes through one stage after the other. The check counts the bytes that ranks
# send.

# %% exercise="hpdl_lab.inference.decode:tensor_parallel_decode"

# %% check="hpdl_lab.inference.decode:tensor_parallel_decode"

# %% [markdown]
# ## The same tokens on two ranks <!-- 2 two days 3 -->
#
# Now the whole engine runs on a mesh (11): each rank has its heads of each layer, with their keys and values. Ranks
# exchange only two all-reduces per layer, and the logits at the end. Each request has one seed for all ranks, so both
# ranks draw the same random tokens.

# %%
from hpdl_lab.inference.stages import part_for_rank
from hpdl_lab.mesh import DeviceMesh

prompts = [weights.encode(text).tolist() for text in ("Call me Ishmael.", "The sea", "Captain Ahab")]
how = prompts, 60, Sampling(temperature=0.6)
alone = Engine(moby_dick).generate(*how)

# %%
shared = lab.run(
    lambda comm: Engine(part_for_rank(DeviceMesh(comm, pp=1, tp=2), moby_dick)).generate(*how), ranks=[0, 1]
)
assert shared[0] == shared[1] == alone
for prompt, new in zip(prompts, alone, strict=True):
    print(weights.decode([*prompt, *new]))

# %% [markdown]
# Are two ranks faster? Not here: a layer has 200,000 weights. Each core multiplies its half in a few microseconds, and
# an all-reduce between two processes takes longer. With 70 billion weights, reading them takes longer than an
# all-reduce. One H100 would read 141 GB of weights in 42 ms, if they fit into its memory. Eight H100s take 5.3 ms. The
# 160 all-reduces, two in each of 80 layers, take about 1.5 ms over NVLink. Each adds 8,192 numbers, 16 kB.
#
# ## Weights in 8 bits <!-- 2 two days 3 -->
#
# **Quantization** to int8 rounds each row of a weight matrix to whole numbers from -127 to 127, times one scale per
# row. Fewer bits are read faster. Embeddings, norms and biases stay in float32. Look for the first character that
# differs:

# %%
from hpdl_lab.inference.quantize import quantize, weight_bytes

for model in (moby_dick, int8 := quantize(weights.load("moby_dick"))):
    loss, (new,) = weights.held_out_loss(model), Engine(model).generate(prompts[2:], 60)
    print(f"{weight_bytes(model):,} B, loss {loss:.3f}: {weights.decode([*prompts[2], *new])!r}")
assert weight_bytes(int8) < 0.31 * weight_bytes(moby_dick) and abs(loss - weights.held_out_loss(moby_dick)) < 0.01

# %% [markdown]
# The int8 weights take 30% of the bytes. The loss grows by less than 0.001, and the first 56 new characters are the
# same.

# %% [markdown]
# # Part three: many requests
#
# ## Exercise 13.3 ★★★ The scheduler of continuous batching <!-- 3 two days 16 -->
#
# Choose how many tokens of each request the next step reads. **Static batching** fills all slots, and admits new
# requests only after all running requests have finished. In **continuous batching** a **scheduler** chooses requests
# before each step. A request that decodes reads one token per step; a request in prefill reads a **chunk** of its
# prompt. The **budget** limits the tokens of a step. The check looks for idle slots, and for requests that wait too
# long.

# %% exercise="hpdl_lab.inference.scheduler:schedule"

# %% check="hpdl_lab.inference.scheduler:schedule"

# %% [markdown]
# ## Exercise 13.4 ★ Pages without fragmentation <!-- 3 two days 6 -->
#
# Give a request the pages that its tokens need, or none if too few are free. The length of an answer is not known in
# advance. If each request reserves memory for the longest possible answer, most of it stays unused. This is
# **fragmentation**: in earlier engines keys and values filled 20 to 38% of the memory (Kwon et al. 2023). So the cache
# is cut into **pages** of some tokens. A request gets pages one by one, from anywhere in memory.

# %% exercise="hpdl_lab.inference.pages:reserve"

# %% check="hpdl_lab.inference.pages:reserve"

# %% [markdown]
# ## A cache in pages <!-- 3 two days 2 -->
#
# Three requests run with your scheduler, and their prompts begin alike. Only one copy of the full pages of the common
# beginning is kept. If no page is free, the youngest request gives its pages back, and reads its tokens again later:
# **preemption**. Look for the striped pages, which requests share:

# %%
engine = Engine(moby_dick, slots=4, pages=32, schedule=schedule)
beginning = "Call me Ishmael. Some years ago, never mind how long "
streams = [engine.submit(weights.encode(beginning), max_tokens=100)]
next(streams[0])  # its prompt has been read
streams += [engine.submit(weights.encode(beginning + end), max_tokens=100) for end in ("precisely", "it was")]

# %%
for stream in (streams * 30)[:90]:
    next(stream)
lab.show(engine)

# %% [markdown]
# ## Serve with your scheduler <!-- 3 two days 2 -->
#
# Requests arrive at two ranks, and your function decides which requests run. As in part two, two ranks are slower than
# one with this small model.

# %%
lab.serve(ranks=2, requests=16, schedule=schedule)

# %% [markdown]
# ## Prefill and decode on different ranks <!-- 3 two days 3 -->
#
# On one GPU, requests that decode wait while a prompt is read. **Disaggregated serving** reads prompts on some ranks
# and decodes on other ranks. The cache of each prompt is sent once. Here rank 0 reads three prompts, and ranks 1 to 3
# decode:

# %%
from hpdl_lab.inference.transfer import generate_disaggregated

ranks = lab.run(generate_disaggregated, moby_dick, prompts, 60)
assert ranks[1] | ranks[2] | ranks[3] == dict(enumerate(Engine(moby_dick).generate(prompts, 60)))

# %%
sent = [event for event in ranks.events if event.op == "send"]
print(*(f"rank {event.rank} to rank {event.peer}: {event.nbytes:,} B" for event in sent), sep="\n")
assert sum(event.nbytes for event in sent) == sum(4096 * len(prompt) + 4 * 81 for prompt in prompts)

# %% [markdown]
# The tokens are the same as on one rank. Each character takes 4,096 B: a key and a value in 4 layers, 128 numbers of 4
# B each. Each prompt adds 324 B, the logits for its first new token. With Llama 3 8B, the cache of 8,192 tokens takes
# 1.07 GB, or 21 ms at 50 GB/s.

# %% [markdown]
# ## Exercise 13.5 ★ What a draft is worth <!-- 3 homework 5 -->
#
# Predict how many tokens an **iteration** of **speculative decoding** brings, from one guess to the next. A small
# model, the **draft**, guesses γ tokens, one after the other. Then the model reads all guesses in one step, like a
# prompt. This costs hardly more time: one token also needs all weights from memory, and there are FLOPs to spare. The
# model keeps the guesses before the first rejected guess, and adds one token. A guess with probability p in the model,
# and q in the draft, is accepted with probability min(1, p/q). Then tokens have the same distribution as without a
# draft. **Greedy** decoding accepts only the model's likeliest token, so the text is the same with a draft and without.
# The probability that a guess is accepted is the **acceptance**.

# %% exercise="hpdl_lab.inference.speculative:expected_tokens"

# %% check="hpdl_lab.inference.speculative:expected_tokens"

# %% [markdown]
# Each guess takes c times as long as a step of the model, so an iteration takes γ c + 1 steps. The speed-up is the
# tokens of an iteration divided by γ c + 1. From which acceptance on does a draft pay? Why is more γ not always better?

# %%
lab.explore("speculation")

# %% [markdown]
# ## Speculation, measured <!-- 3 homework 3 -->
#
# The model has four layers; the draft has one, half as wide. For each possible token, q is the draft's probability and
# p the model's. So the acceptance is Σ q min(1, p/q) = Σ min(p, q), a sum over all tokens. The text here is new to both
# models.

# %%
draft = weights.load("moby_dick_draft")
share = weights.mean_acceptance(moby_dick, draft)
print(f"acceptance {share:.2f}: an iteration with γ = 2 brings {expected_tokens(share, 2):.2f} tokens, you say")

# %% [markdown]
# ### Predict
#
# Much of each step is Python, so a draft step takes more than a quarter of a model step. How many times as fast is
# generation with this draft?

# %% guess=[1.3]
my_speed_up = lab.guess("times as fast with a draft, γ = 2", ...)

# %%
from hpdl_lab.inference.speculative import Speculative
from hpdl_lab.measure import measure

drafted = Speculative(moby_dick, draft, gamma=2)
assert [*drafted.generate(prompts[0], 200)] == Engine(moby_dick).generate(prompts[:1], 200)[0]

# %%
how, drafted.iterations = (200, Sampling(temperature=1.0)), 0
plain = measure(lambda: Engine(moby_dick).generate(prompts[:1], *how), repeats=3).median
fast = measure(lambda: [*drafted.generate(prompts[0], *how)], repeats=3).median
print(f"{800 / drafted.iterations:.2f} tokens an iteration")
lab.reveal("times as fast with a draft, γ = 2", plain / fast)

# %% [markdown]
# Greedy tokens are the same with and without a draft. On two cores c is about a half, so γ c + 1 is close to the tokens
# of an iteration, and little is gained. On a GPU, a draft with 1/50 of the weights reads 1/50 of the bytes, but its
# launches and layers take time, too. If many requests share a batch, no FLOPs are left to spare, and a draft makes
# decode slower.

# %% [markdown]
# ## Take it home <!-- 3 homework 5 -->
#
# The next file decodes on two ranks with plain `torch.distributed`, one loop, and a list as cache. Its text must be the
# engine's text. First, the model, weights and prompt become files:

# %% tags=["take-home"]
from shutil import copy

from hpdl_lab.models import plain_gpt

copy(plain_gpt.__file__, "take_home_gpt.py")

# %% tags=["take-home"]
import torch

torch.save((moby_dick.state_dict(), prompts[0]), "take_home_13.pt")

# %% tags=["take-home"]
# %%writefile take_home_13.py
"""Decode on two ranks, each with half of the heads: torchrun --standalone --nproc-per-node 2 take_home_13.py"""

import torch
import torch.distributed as dist
from take_home_gpt import GPT
from torch.nn.functional import scaled_dot_product_attention

dist.init_process_group("gloo")
weights, tokens = torch.load("take_home_13.pt")
rank, size = dist.get_rank(), dist.get_world_size()
(model := GPT(81, block=256, layers=4, heads=4, width=128).double().requires_grad_(False)).load_state_dict(weights)
cache = [torch.empty(2, 4 // size, 0, 32, dtype=torch.float64) for _ in model.blocks]  # keys and values of my heads
for block in model.blocks:  # my rows of qkv and up, my columns of out and down; biases that are in the sum once
    qkv, out, up, down = block.attention.qkv, block.attention.out, block.mlp[0], block.mlp[2]
    parts = [x.view(3, size, -1, *x.shape[1:])[:, rank].flatten(0, 1) for x in (qkv.weight, qkv.bias)]
    qkv.weight.data, qkv.bias.data = parts
    up.weight.data, up.bias.data = up.weight.chunk(size)[rank], up.bias.chunk(size)[rank]
    out.weight.data, down.weight.data = (row.weight.chunk(size, 1)[rank] for row in (out, down))
    out.bias.data, down.bias.data = out.bias / size, down.bias / size
for place in range(75):
    x = model.tokens.weight[tokens[place]] + model.positions.weight[place]  # (d,)
    for i, block in enumerate(model.blocks):
        q, *kv = block.attention.qkv(block.norm1(x)).view(3, 4 // size, 1, 32)
        cache[i] = torch.cat([cache[i], torch.stack(kv)], 2)  # (2, heads, place + 1, 32)
        attended = scaled_dot_product_attention(q, *cache[i]).flatten()  # (d/p,)
        dist.all_reduce(x := block.attention.out(attended) + x / size)
        dist.all_reduce(x := block.mlp(block.norm2(x)) + x / size)
    tokens[place + 1 :] = tokens[place + 1 :] or [int((model.tokens.weight @ model.norm(x)).argmax())]
print("tokens", *tokens) if rank == 0 else None
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_13.py
print(out.n)

# %% tags=["take-home"]
tokens = [int(token) for token in out.grep("tokens")[0].split()[1:]]
print(weights.decode(tokens))
assert tokens == prompts[0] + Engine(moby_dick).generate(prompts[:1], max_tokens=60)[0]

# %% [markdown]
# In `transformers`, `model.generate` keeps a cache, and `tp_plan="auto"` under `torchrun` shards a model as in 13.2.
# Here a LLaMA with random weights generates with a cache and without. Which takes longer, and are the tokens the same?

# %% tags=["take-home"]
# %%writefile take_home_13_generate.py
"""A LLaMA of transformers generates, with a cache and without: python take_home_13_generate.py"""

import sys
import time

import torch

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("transformers is not installed here: pip install transformers")
sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=80, intermediate_size=512, **sizes)).eval()
prompt = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
texts = []
for cached in True, False:
    begin = time.perf_counter()
    texts += model.generate(prompt, max_new_tokens=200, do_sample=False, eos_token_id=None, use_cache=cached).tolist()
    print(f"use_cache={cached}: {time.perf_counter() - begin:.2f} s")
print("the same tokens" if texts[0] == texts[1] else f"{texts[0]} is not {texts[1]}")

# %% tags=["take-home"]
# out = !python take_home_13_generate.py
print(out.n)
assert "the same tokens" in out.n or "not installed" in out.n

# %% [markdown]
# This command starts vLLM on two GPUs. You cannot run it here:
#
#     vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 --max-num-seqs 16 --block-size 16 \
#         --max-num-batched-tokens 2048 --enable-prefix-caching
#
# The options set the number of ranks, of slots, of tokens in a page, and the budget. The last option shares pages.
#
# ## Question to discuss
#
# You have eight GPUs, and a model that fits on one. Do you run eight copies, tensor parallelism over all eight, or
# something between? What happens to the time to the first token, the time between two tokens, tokens per second, and
# room for caches? What would you gain with prefill and decode on different GPUs?
#
# ## Where to read the real code
#
# - `hpdl_lab/inference/decode.py`, `hpdl_lab/inference/scheduler.py`, `hpdl_lab/inference/pages.py`,
#   `hpdl_lab/inference/speculative.py`: your functions, and the code around them.
# - `hpdl_lab/inference/engine.py`, `hpdl_lab/inference/cache.py`: the engine, and attention that reads pages.
# - `hpdl_lab/inference/stages.py`: a mesh of tp and pp; `hpdl_lab/inference/quantize.py`: int8;
#   `hpdl_lab/inference/transfer.py`: prefill on another rank.
# - nano-vllm, an engine in a thousand lines; vLLM, `vllm/v1/core/sched/scheduler.py`.
# - Yu et al. 2022 (Orca), OSDI; Kwon et al. 2023 (PagedAttention), arXiv:2309.06180; Agrawal et al. 2023 (chunked
#   prefill), arXiv:2308.16369; Leviathan et al. 2023 (speculative decoding), arXiv:2211.17192; Dettmers et al. 2022
#   (LLM.int8), arXiv:2208.07339; Zhong et al. 2024 (DistServe), arXiv:2401.09670.

# %% [markdown]
# ## Recap
#
# 1. Keys and values never change. A cache keeps 2 · layers · key heads · n numbers per token, so each is computed once.
# 2. FLOPs limit prefill, bytes limit decode: weights are read once for the whole batch, and each text has its own
#    cache. Int8 weights take half the bytes of 16-bit weights.
# 3. Tensor-parallel decode takes two all-reduces of b d numbers per layer. Disaggregated serving sends each prompt's
#    cache once.
# 4. Continuous batching fills a slot as soon as it is free. With pages, less than one page per request is unused.
# 5. With acceptance a, a draft of γ guesses brings 1 + a + ... + a^γ tokens per iteration, and the text keeps its
#    distribution.
#
# <!-- terms -->
#
# **What you can do now:** compute the memory and time of serving from a model's shapes, read an engine's settings, and
# choose batch, ranks and draft.
#
# <!-- links -->
