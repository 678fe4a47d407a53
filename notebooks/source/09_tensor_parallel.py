# %% [markdown]
# # 09 · Tensor parallelism
#
# **The number to reach:** two all-reduces forward and two backward for each layer of a GPT that four ranks share,
# with the same losses as a single rank, to 10⁻¹⁰; and less than a third of the bytes that cutting layer by layer
# would send.
#
# <!-- tracks -->
#
# In 06 every rank held the whole model. Here no rank does: every layer is cut, and each rank has a part of it.

# %%
from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# ## The idea <!-- 1 homework 10 -->
#
# One layer of GPT-3 has 12 d² weights with d = 12,288: 4 d² in its attention (q, k, v and out, d × d each) and 8 d²
# in its MLP (d × 4d and 4d × d). Training with Adam in mixed precision keeps 2 + 2 + 4 + 4 + 4 = 16 bytes for each:
# the weight and its gradient in 16 bits, and in 32 bits a copy of the weight and Adam's two averages
# ([08](08_memory.ipynb)). A transformer block in shapes is drawn in [00](00_why.ipynb).

# %%
layer = 12 * 12_288**2 * 16 / 1e9  # GB
print(f"{layer:.0f} GB for a layer, {96 * layer / 1e3:.1f} TB for 96: that fills {96 * layer / 80:.0f} GPUs of 80 GB")

# %% [markdown]
# Activations come on top. A single layer would fit. But whole layers can be assigned to 96 GPUs at most, which then
# wait for each other (10), and a single sequence gets no faster that way. **Tensor parallelism** cuts each layer, so
# that several GPUs work on it at the same time. A linear layer y = x A can be cut in two ways:
#
#     by columns                                   by rows
#
#     x ──┬── A0 ──> y0   rank 0                   x0 ── A0 ──> x0 A0 ──┐
#         │                                                             ├── + ──> y
#         └── A1 ──> y1   rank 1                   x1 ── A1 ──> x1 A1 ──┘
#
#     every rank needs all of x,                   every rank needs its part of x,
#     and has a part of y                          and has a part of a sum
#
# **Columns, then rows**: what the first layer leaves on a rank is just what the second one needs there. GELU between
# them acts element by element. Two layers, and one sum at the end.
#
# Backward goes the same way in reverse, and there is one rule for all of it: **where forward copies, backward adds;
# where forward adds, backward copies.** Megatron calls such a pair f and g. You are given three functions that
# autograd knows:
#
# | function | forward | backward |
# |---|---|---|
# | `copy_to(comm, x)`, Megatron's f | nothing: x is the same on all ranks | all-reduce |
# | `reduce_from(comm, x)`, Megatron's g | all-reduce | nothing: the gradient is the same on all ranks |
# | `conjugate(x, forward, backward)` | `forward(x)` | `backward` of the gradient |
#
# ## Predict
#
# A transformer's layer is attention (two linear layers: q, k, v together, and out) and an MLP (two linear layers). On
# four ranks: how many all-reduces does it take, forward and backward? And for two layers as columns and rows, with x
# of 2 × 256 × 256 float32 (524,288 bytes), how many bytes does a rank send, forward and backward together?

# %% guess=[4, 4, 3000000]
my_all_reduces = lab.guess("all-reduces of one layer of a transformer", {"forward": ..., "backward": ...})
my_bytes = lab.guess("bytes that one of four ranks sends", ...)

# %% [markdown]
# ## Exercise 9.1 ★★ A linear layer cut by its outputs <!-- 1 homework 12 -->
#
# `torch.nn.functional.linear(x, weight, bias)` is x @ weight.T + bias: columns of A are rows of `weight`. From the
# table above you need `copy_to`.

# %% exercise="hpdl_lab.parallel.tensor.linear:column_linear"

# %% check="hpdl_lab.parallel.tensor.linear:column_linear"

# %% [markdown]
# ## Exercise 9.2 ★★ A linear layer cut by its inputs <!-- 1 homework 12 -->
#
# Its mirror image, with `reduce_from`. Where does the bias belong?

# %% exercise="hpdl_lab.parallel.tensor.linear:row_linear"

# %% check="hpdl_lab.parallel.tensor.linear:row_linear"

# %% [markdown]
# ## Measure: four ways to cut a layer <!-- 1 homework 5 -->
#
# x + mlp(norm(x)), forward and backward, on four ranks: whole on each of them; every layer by columns and gathered
# again; your two functions; and a fourth way, which you write below. Bytes are counted. The vertical lines show the
# model: 2(p-1)/p · n for each all-reduce on a ring, α and β from a ping-pong, and the arithmetic divided by p.

# %%
ways = lab.tensor(column_linear, row_linear, prediction=my_bytes)
mine, naive = (ways[way]["forward"] + ways[way]["backward"] for way in ("pair", "by layer"))
assert mine < naive / 3
lab.reveal("bytes that one of four ranks sends", mine)
print(f"you send {mine / naive:.0%} of what layer by layer sends")
ways

# %% [markdown]
# The same on two ranks, where each has a core if the machine has two: there the time follows the model, too.

# %%
lab.tensor(column_linear, row_linear, ranks=2)

# %% [markdown]
# And on GPUs, by the model: one layer on H100s that reach half of their peak, eight to a node, with InfiniBand
# between nodes. Why does tp end at the node? With which link does it not even get that far, and what does a smaller d
# change?

# %%
lab.explore("tensor")

# %% [markdown]
# ## Exercise 9.3 ★★ Which rows belong to a rank's heads <!-- 1 homework 12 -->
#
# Attention has heads that never talk to each other: that is where it is cut. q, k and v of all heads come out of one
# product, so its weight is three matrices stacked on top of each other. A contiguous piece of it is the wrong piece.

# %% exercise="hpdl_lab.parallel.tensor.transformer:rows_of_heads"

# %% check="hpdl_lab.parallel.tensor.transformer:rows_of_heads"

# %% [markdown]
# ## Exercise 9.4 ★★★ Attention with this rank's heads <!-- 1 homework 20 -->
#
# `scaled_dot_product_attention(q, k, v, is_causal=...)` expects q, k and v as (b, heads, s, d/heads). Look at how
# `hpdl_lab/models/transformer.py` does it on one rank; your `column_linear` and `row_linear` do the rest.

# %% exercise="hpdl_lab.parallel.tensor.transformer:attention_heads"

# %% check="hpdl_lab.parallel.tensor.transformer:attention_heads"

# %% [markdown]
# ## A GPT on four ranks <!-- 1 homework 6 -->
#
# The whole model, cut like this: attention by heads, MLPs as columns and rows, and the token embedding by its rows.
# It learns from Moby-Dick with 64 bits, so that rounding does not hide a mistake; all ranks see the same batch. One
# rank first, then four: that takes a few seconds.

# %%
from hpdl_lab import data
from hpdl_lab.comm import sim
from hpdl_lab.parallel.scripts import train_gpt

text = data.load("text")
alone, shared = sim.run(1, train_gpt, text)[0], lab.run(train_gpt, text)

# %%
off = max(abs(a - b) for a, b in zip(alone.losses, shared[0].losses, strict=True))
assert off < 1e-10
print(f"losses differ by {off:.0e} at most; a rank holds {shared[0].held:,} of {shared[0].whole:,} parameters")
print("all-reduces of a step, forward:", shared[0].forward, "backward:", shared[0].backward)
per_layer = {way: len(getattr(shared[0], way)) // 2 for way in my_all_reduces}  # of 2 layers, and one apart from them
lab.reveal("all-reduces of one layer of a transformer", per_layer)

# %% [markdown]
# Two for each layer, and one more in each direction for the token embedding at the two ends. Each moves b · s · d
# numbers: 4 · 64 · 64. Below is the last step as a timeline. Nothing hides the all-reduces, because the next layer
# needs the sum. (Recent systems cut a product into pieces and send one while they compute the next, called
# asynchronous tensor parallelism.) The one all-gather between forward and backward collects the logits, of which each
# rank has a quarter:

# %%
begin = sorted(e.t0_ns for e in shared.events if e.op == "forward")[-4]  # of the last step on four ranks
lab.show([e for e in shared.events if e.t0_ns >= begin])

# %% [markdown]
# If the heads cannot be divided by the ranks, you get a one-sentence error before any message is sent:

# %% tags=["raises-exception"]
lab.run(train_gpt, text, 1, 2)

# %% [markdown]
# ## Exercise 9.5 ★★★ Sequence parallel <!-- 1 homework 18 -->
#
# Between the cut layers there are norms and residual sums, and every rank computes and keeps all of them. An
# all-reduce is a reduce-scatter followed by an all-gather. Take it apart, and let each rank hold only its own
# positions in between:
#
#     tensor parallel      norm ─── copy ─────── layer ── all-reduce ────── + ─── norm      (b, s, d) on every rank
#     sequence parallel    norm ─── all-gather ─ layer ── reduce-scatter ── + ─── norm      (b, s/p, d) between
#
# `gather(x)` and `scatter(x)` are given, for tensors without autograd; `scatter` adds over ranks, too.

# %% exercise="hpdl_lab.parallel.tensor.linear:sequence_parallel"

# %% check="hpdl_lab.parallel.tensor.linear:sequence_parallel"

# %%
ways = lab.tensor(column_linear, row_linear, sequence_parallel, prediction=my_bytes)
pair, sequence = ways["pair"], ways["sequence"]
assert sequence["forward"] == pair["forward"] and sequence["kept"] < pair["kept"]
print(f"the same bytes sent, {sequence['kept'] / pair['kept']:.0%} of the activations kept")

# %% [markdown]
# Megatron-LM keeps even less: it drops the gathered input of a layer and gathers it again in backward. That is one
# more all-gather, which is hidden behind computing.

# %% [markdown]
# ## Exercise 9.6 ★★★ Convert this script: tensor parallel <!-- 1 homework 20 -->
#
# The script of 06 on one rank. Split its layers between two ranks with `torch.distributed.tensor.parallel`:
# `parallelize_module(model, mesh, plan)` takes a dict that says for the name of a layer how it is cut,
# `ColwiseParallel()` or `RowwiseParallel()`; `*` stands for any part of a name. Like this notebook, PyTorch counts
# the columns of A in y = x A. Each piece is contiguous, which is why the script first makes three layers of q, k and
# v (9.3).
#
#     torchrun --standalone --nproc-per-node 2 train_tp.py
#
# The file that it leaves has to be the whole model, as one rank would save it.

# %% script="train_tp"

# %% check_script="train_tp"

# %% [markdown]
# ## Take it home <!-- 1 homework 5 -->
#
# `parallelize_module` replaces the parameters of an unchanged model by sharded ones (DTensors). `ColwiseParallel` is
# your `column_linear`, `RowwiseParallel` your `row_linear`; f and g come with them. Here the MLPs are cut. Attention
# in this GPT has q, k and v in one matrix, which PyTorch would cut in contiguous pieces, the wrong ones (9.3). With
# three matrices in place of one, the plan is `ColwiseParallel()` for each, and `RowwiseParallel()` for `out`.

# %% tags=["take-home"]
from shutil import copy

from hpdl_lab.models import plain_gpt

copy(plain_gpt.__file__, "take_home_gpt.py")  # plain torch: a GPT, and windows of a text

# %% tags=["take-home"]
# %%writefile take_home_09.py
"""Cut the MLPs of a GPT: torchrun --standalone --nproc-per-node 2 take_home_09.py"""

import torch
import torch.distributed as dist
from take_home_gpt import GPT, windows_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)  # so that the losses of 1 and 2 ranks agree to ten digits
torch.manual_seed(0)  # the same model and the same batches on all ranks
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
windows, vocabulary = windows_of(__file__)  # it learns this file
model = GPT(vocabulary)
for block in model.blocks:
    parallelize_module(block.mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
for batch in torch.randperm(len(windows))[:12].split(4):
    loss = model(windows[batch])
    with CommDebugMode() as backward:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("loss", loss.item())
with torch.no_grad(), CommDebugMode() as forward:
    model(windows[:1])
print("all-reduces", forward.get_total_counts(), backward.get_total_counts()) if dist.get_rank() == 0 else None
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_09.py
# one = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 take_home_09.py
print(out.n)

# %% tags=["take-home"]
losses = [[float(line.split()[-1]) for line in lines.grep("loss")] for lines in (one, out)]
assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-10
assert out.grep("all-reduces") == ["all-reduces 2 2"]  # forward and backward: one for each MLP

# %% [markdown]
# ## Question to discuss
#
# Data parallelism sends gradients, once per step, and backward hides them. Tensor parallelism sends activations, four
# times per layer, and nothing hides them. On which links would you use which: NVLink 4 carries 450 GB/s per
# direction, InfiniBand NDR 50 GB/s? And what does tensor parallelism gain from a batch twice as large?
#
# ## Where to read the real code
#
# - `hpdl_lab/parallel/tensor/linear.py`: f, g, and how two plain functions become one that autograd knows.
# - `hpdl_lab/parallel/tensor/linear.py`, `hpdl_lab/parallel/tensor/transformer.py`: your functions, and the modules.
# - `hpdl_lab/parallel/tensor/model.py`: whole models, unchanged, cut into shards;
#   `hpdl_lab/parallel/tensor/vocabulary.py`: the token embedding, and a cross-entropy that no rank has all logits for.
# - `hpdl_lab/parallel/tensor/linear.py`, `hpdl_lab/parallel/tensor/spatial.py`: sequences and images that are cut.
# - Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053; Korthikanti et al. 2022 (sequence parallelism),
#   arXiv:2205.05198; Dryden et al. 2019 (LBANN's convolutions), arXiv:1903.06681.

# %% [markdown]
# ## Homework
#
# No other cell of this notebook needs it.
#
# ## Exercise 9.7 ★★★ Halos of a convolution <!-- 1 homework 12 -->
#
# Images can be cut, too: each rank has some rows of every image. A kernel of 5 × 5 looks two rows beyond the strip.
# Those rows belong to a neighbor. `sending(comm, x, dst)` and `receiving(comm, x, src)` are given: lists of one
# Work, or of none where x is empty.

# %% exercise="hpdl_lab.parallel.tensor.spatial:halo_exchange"

# %% check="hpdl_lab.parallel.tensor.spatial:halo_exchange"

# %%
import torch

from hpdl_lab.parallel.scripts import convolve_strips

# %%
strips = lab.run(convolve_strips, halo_exchange, torch.rand(4, 3, 64, 64), torch.rand(8, 3, 5, 5))
assert all(strip.off < 1e-4 for strip in strips)
print("rows and bytes sent:", [(strip.rows, strip.nbytes) for strip in strips], "of 196,608 bytes in all")

# %% [markdown]
# ## Recap
#
# 1. A linear layer can be split by columns (each rank has some outputs) or by rows (each has a part of a sum).
# 2. Columns, then rows: two layers need one all-reduce forward and one backward.
# 3. Where forward copies, backward adds; where forward adds, backward copies.
# 4. Attention is split by heads, the token embedding by its rows; each layer of a transformer takes two all-reduces
#    each way.
# 5. Nothing hides these all-reduces, so tensor parallelism stays on the fastest links, inside a node.
#
# | term | what it means |
# |---|---|
# | column-parallel, row-parallel | a linear layer whose outputs, or whose inputs, are split among ranks |
# | f and g | Megatron's pair: copy forward and all-reduce backward, and the reverse |
# | shard | the part of a tensor that one rank holds |
# | head | one of several attentions that work side by side on a share of the width |
# | sequence parallelism | between the split layers, each rank keeps its own positions only |
# | activation | what a layer hands to the next one, kept for backward |
# | halo | rows of a neighbor's part of an image that a convolution needs |
#
# **What you can do now:** split the layers of a transformer among ranks, count their all-reduces, and say on which
# links that pays.
#
# <!-- links -->
