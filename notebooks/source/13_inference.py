# %% [markdown]
# # 13 · Inference
#
# **The number to reach:** token 1,024 of a text in less than a tenth of the time that it takes without a cache; 16
# requests on 4 slots in 30 steps, where static batching takes 56; and on two ranks, with pages, chunks and drafts the
# same tokens as on one.
#
# <!-- tracks -->
#
# A model is trained once and used a billion times. What is expensive then are not FLOPs but bytes that are read, and
# users who wait: for the first token, and from each token to the next.

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
# A language model says how probable each next token is. One is chosen, put at the end of the text, and the model is
# asked again. Every new token needs the **keys and values** of all tokens before it, in every layer. They do not
# change when the text goes on, so they are kept: the **KV cache**.
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
# In **prefill** each weight that is read from memory is used for every token of the prompt. In **decode** it is used
# for one. An H100 does 989 · 10¹² operations and reads 3.35 · 10¹² bytes per second, 590 operations for each 16-bit
# number, so decoding one text is a matter of bytes: **weights plus cache, over the memory's bandwidth**, is the least
# time of a token. Decoding many texts at once reads the weights once for all of them. What each brings along is its own
# cache.
#
# That is the whole trade of serving: a larger **batch** means more tokens per second for all, and more time between
# two tokens for each.
#
# ## Moby-Dick, token by token <!-- 1 half day 2 -->
#
# A GPT of 0.8 million parameters that has read nine tenths of Moby-Dick, by `hpdl weights`. `submit` returns a
# **stream**: its tokens, here characters, come while they are generated. `temperature` below 1 prefers likely ones.

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
# Llama 3 8B has 32 layers, and in each 8 key heads of 128 numbers; a number has 2 bytes. How many GB (10⁹ bytes) of
# keys and values are 32 conversations of 8,192 tokens? The weights are 16 GB.

# %% guess=[34]
my_cache = lab.guess("GB of cache for 32 conversations of 8,192 tokens, Llama 3 8B", ...)

# %% [markdown]
# ## What a cache takes <!-- 1 half day 4 -->
#
# 2 · layers · key heads · numbers of a head · bytes of a number, for each token; DeepSeek-V3 keeps one latent of 576
# numbers per layer in place of keys and values (12). The time is that of bytes alone, or of FLOPs where these take
# longer; it has no messages in it. Why does throughput stop growing with the batch? Which of these models can serve one
# user with 128,000 tokens from one GPU, and what do 8 bits for the cache change?

# %%
lab.explore("kv_cache", prediction=my_cache)
numbers = 2 * 32 * 8 * 128  # that the cache keeps for a token
lab.reveal("GB of cache for 32 conversations of 8,192 tokens, Llama 3 8B", 32 * 8_192 * 2 * numbers / 1e9)

# %% [markdown]
# ## Predict
#
# The same GPT on this machine, one rank, up to eight requests at once: how many tokens per second at most, all
# together?

# %% guess=[2000]
my_throughput = lab.guess("tokens/s of all requests together, at most", ...)

# %% [markdown]
# ## Measure: throughput against latency <!-- 1 half day 4 -->
#
# Requests arrive at random, as people do (a Poisson process), with prompts and answers of mixed lengths; first slowly,
# then faster than the engine can serve them. Each point is one rate. The line is the model: what a step takes if it
# reads weights and cache once, for 1, 2, ... 8 requests that run all the time.

# %%
served = lab.serve(prediction=my_throughput)
lab.reveal("tokens/s of all requests together, at most", served.throughput)
served

# %% [markdown]
# Up to a rate the engine keeps up, and more requests cost little: tokens/s go up, and the time between two tokens
# stays. Past the knee it cannot generate more, and requests wait in the queue: the time to the first token grows
# without end. **Where would you run it?** To the left of the knee, with as much of a margin as your users have bursts.
#
# Two constants of the model are no bytes: what Python takes in a step, and for each further request of it. Both are
# measured first. Do the points lie above the line? A prompt that is read takes Python longer than the model knows. A
# large model on a GPU has so many bytes to read that nothing else counts.

# %% [markdown]
# # Part two: one request, faster
#
# ## Exercise 13.1 ★★ One token with a cache <!-- 2 homework 15 -->
#
# One layer of attention. Without a cache a model is given all tokens so far and computes queries, keys and values of
# all of them, to use one row of the result. Write the step that computes only what is new. `keys` and `values` have
# room for the longest text; what earlier calls have put there is what you need.

# %% exercise="hpdl_lab.inference.decode:decode_step"

# %% check="hpdl_lab.inference.decode:decode_step"

# %% [markdown]
# ### Predict, then measure: token 1,024
#
# A layer 256 wide. Token 1,024 takes how many times as long as token 1, without a cache, and with yours? Attention
# itself still looks at all 1,024 keys.

# %% guess=[1000, 3]
my_factors = lab.guess("times as long as token 1", {"without a cache": ..., "yours": ...})

# %%
from hpdl_lab.inference import decode

times = decode.compare_decode_steps({"without a cache": decode.without_cache, "yours": decode_step})
assert times["yours"][1024].median < times["without a cache"][1024].median / 10
lab.reveal("times as long as token 1", {how: times.factor(how) for how in my_factors})
lab.show(times, prediction=my_factors)

# %% [markdown]
# ## Exercise 13.2 ★★ Decode on several ranks <!-- 2 homework 12 -->
#
# A token of one sequence cannot be computed faster than its weights are read. Two ranks read two memories: each holds
# half of the heads with their cache, and half of the MLP (09). Pipelines (10) do not help here: a single token passes
# one stage after the other. `norm` is a layer norm without parameters, `gelu` torch's.

# %% exercise="hpdl_lab.inference.decode:tensor_parallel_decode"

# %% check="hpdl_lab.inference.decode:tensor_parallel_decode"

# %% [markdown]
# ## The same tokens on two ranks <!-- 2 homework 3 -->
#
# The whole engine on a mesh (11): each rank has its heads of each layer, and the pages of their keys and values. Both
# run the same scheduler on the same requests, and choose the same token from the same logits, so that nothing but your
# two all-reduces travels, and the logits at the end. Tokens are drawn at random here, each request from a seed of its
# own, so that even these are the same.

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
# Is it faster? A layer of this model is 200,000 weights: two cores multiply its half in a few microseconds, and an
# all-reduce between two processes takes longer than that. With 70 billion weights it is the other way round: 141 GB in
# 16 bits take 42 ms from the memory of one H100, if they were in it, and 5.3 ms on eight, and 160 all-reduces of 16 kB
# over NVLink about 1.5 ms.

# %% [markdown]
# # Part three: many requests
#
# ## Exercise 13.3 ★★★ The scheduler of continuous batching <!-- 3 homework 16 -->
#
# A batch of requests, as many as there are slots: when all have ended, comes the next batch. That is **static
# batching**, and all wait for the longest. **Continuous batching** decides before each token who runs. The unit is a
# token to read: who decodes reads one, who is in the midst of its prompt reads a part of it, and the budget is what a
# step reads at most.

# %% exercise="hpdl_lab.inference.scheduler:schedule"

# %% check="hpdl_lab.inference.scheduler:schedule"

# %% [markdown]
# ## Exercise 13.4 ★★★ Pages without fragmentation <!-- 3 homework 12 -->
#
# How long an answer will be nobody knows. Reserve the longest for each, and most of the memory is never used: earlier
# engines held keys and values in 20 to 38% of it (Kwon et al. 2023). So the cache is cut into **pages** of some tokens,
# as an operating system's memory is, and a request gets them one by one. A page need not follow the one before.

# %% exercise="hpdl_lab.inference.pages:reserve"

# %% check="hpdl_lab.inference.pages:reserve"

# %% [markdown]
# ## A cache in pages <!-- 3 homework 2 -->
#
# Three requests with your scheduler, and the same beginning: full pages with equal tokens are held once, and counted
# how often they are shared. If pages run out, the youngest request gives its own back, and reads its tokens again later
# (**preemption**).

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
# ## Serve with your scheduler <!-- 3 homework 2 -->
#
# Such a load on two ranks, and it is your function that decides. With this little model they are slower than one: why
# was said in part two.

# %%
lab.serve(ranks=2, requests=16, schedule=schedule)

# %% [markdown]
# ## Exercise 13.5 ★ What a draft is worth <!-- 3 homework 5 -->
#
# Decode reads all weights for one token, and has FLOPs to spare. **Speculative decoding** spends them: a small
# **draft** model guesses γ tokens, one after the other, and the model reads all of them in one step, as it would read a
# prompt. It keeps those that it would have chosen itself, and adds one of its own. The likeliest tokens stay the same,
# and tokens that are drawn keep their distribution; only the time changes. How many tokens does a step bring, if each
# guess is accepted with the same probability?

# %% exercise="hpdl_lab.inference.speculative:expected_tokens"

# %% check="hpdl_lab.inference.speculative:expected_tokens"

# %% [markdown]
# The draft costs time, too: c of a step of the model for each guess. The speed-up is the tokens of an iteration over
# γ c + 1. With which acceptance does it pay at all, and why is more γ not better?

# %%
lab.explore("speculation")

# %% [markdown]
# ## Speculation, measured <!-- 3 homework 3 -->
#
# The draft has one layer where the model has four, and half the width. How probable it is that a token is accepted is
# Σ min(p, q) over both distributions, here on text that neither was trained on.

# %%
draft = weights.load("moby_dick_draft")
share = weights.mean_acceptance(moby_dick, draft)
print(f"acceptance {share:.2f}: an iteration with γ = 2 brings {expected_tokens(share, 2):.2f} tokens, you say")

# %% [markdown]
# ### Predict
#
# A draft step is not a quarter of a model step here, because much of both is Python. How many times as fast is it?

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
# The likeliest token each time is the same with and without a draft, which is asserted; tokens that are drawn have the
# same distribution. Four texts of 200 tokens are in the last line. Where γ c + 1 comes close to the tokens that an
# iteration brings, nothing is gained: on two cores c is about a half. On a GPU a draft of a fiftieth of the weights
# reads a fiftieth of the bytes, but its launches and its layers, one after the other, cost as well. And where many
# requests share a batch, FLOPs are not to spare any more: then a draft makes it slower.

# %% [markdown]
# ## Take it home <!-- 3 homework 5 -->
#
# Tensor-parallel decoding without this laboratory's engine: plain `torch.distributed`, one loop, a cache that is a
# list. Each rank takes its heads and its columns of the same weights. Its text has to be that of the engine. First
# the model, weights and prompt, as files:

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
# In `transformers` it is `model.generate`, which keeps a cache by itself, and a model that is loaded with
# `tp_plan="auto"` under `torchrun` is cut as yours in 13.2. Here a LLaMA with random weights generates with a cache and
# without: which of the two takes longer, and does it write the same? `transformers` is not part of this laboratory: if
# it is not installed, the cell says so, and compares nothing.

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
# An engine for many GPUs is one command, here only to be read:
#
#     vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 --max-num-seqs 16 --block-size 16 \
#         --max-num-batched-tokens 2048 --enable-prefix-caching
#
# You know what each of these words does: heads on two ranks, slots, tokens of a page, the budget, shared pages.
#
# ## Question to discuss
#
# Eight GPUs, and a model that fits on one. Eight copies, or tensor parallelism over all eight, or something between?
# What does each do for the time to the first token, the time between two tokens, tokens per second, and the room for
# caches? And what would you gain if prefill and decode ran on different GPUs, which have to send the cache?
#
# ## Where to read the real code
#
# - `hpdl_lab/inference/decode.py`: your two steps; `hpdl_lab/inference/scheduler.py`, `hpdl_lab/inference/pages.py`:
#   your scheduler, and pages with reference counts; `hpdl_lab/inference/speculative.py`.
# - `hpdl_lab/inference/engine.py`, `hpdl_lab/inference/cache.py`: the engine, and attention that reads pages.
# - `hpdl_lab/inference/stages.py`: the same on a mesh of tp and pp; `hpdl_lab/inference/load.py`: requests that arrive.
# - nano-vllm, the same in a thousand lines of its own; vLLM, `vllm/v1/core/sched/scheduler.py`.
# - Yu et al. 2022 (Orca), OSDI; Kwon et al. 2023 (PagedAttention), arXiv:2309.06180; Agrawal et al. 2023 (chunked
#   prefill), arXiv:2308.16369; Leviathan et al. 2023 (speculative decoding), arXiv:2211.17192; Pope et al. 2022,
#   arXiv:2211.05102; Shazeer 2019, arXiv:1911.02150.

# %% [markdown]
# ## Recap
#
# 1. A token's keys and values never change: with a cache each token is multiplied once, and 2 · layers · key heads ·
#    numbers of a head are kept for it.
# 2. Prefill is bound by FLOPs, decode by bytes: weights are read once for the whole batch, caches once for each.
# 3. Tensor-parallel decode takes two all-reduces of b d numbers for each layer; caches and weights stay on their ranks.
# 4. Continuous batching fills a slot as soon as it is free; pages leave less than one page of each request unused.
# 5. A draft of γ tokens brings 1 + a + ... + a^γ tokens a step, and changes none of them.
#
# | term | what it means |
# |---|---|
# | prefill, decode | reading the prompt, all tokens at once; generating, one token at a time |
# | KV cache | keys and values of all tokens so far, of each layer |
# | time to first token, time between tokens | what a user waits for at first, and then again and again |
# | continuous, iteration-level batching | who runs is decided anew for every token |
# | chunked prefill | a prompt is read in parts, so that those who decode need not wait |
# | page, paged attention | some tokens of a cache, anywhere in memory, and attention that finds them there |
# | preemption | a request gives its pages back, and reads its tokens again later |
# | speculative decoding, draft, acceptance | a small model guesses, the model checks; how often it agrees |
#
# **What you can do now:** say what a model takes to serve, from its shapes; read an engine's settings; and choose
# batch, ranks and draft for a latency.
#
# <!-- links -->
