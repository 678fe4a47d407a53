# %% [markdown]
# # 09 · Tensor parallelism
#
# **The number to reach:** the losses of a GPT on four ranks equal the losses of a single rank, to 10⁻¹⁰. Each layer of
# this GPT takes two all-reduces forward and two backward. Cut the two linear layers of an MLP ([00](00_why.ipynb)) so
# that nothing is sent between the layers. A rank then sends less than a third of the bytes that two separately cut
# layers need.
#
# <!-- tracks -->
#
# In 06 a rank held the whole model, here a part of each layer.

# %%
from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# ## The idea <!-- 1 two days 10 -->
#
# One layer of GPT-3 has 12 d² weights with d = 12,288. Its attention has 4 d² (q, k, v and out, d × d each), its MLP
# has 8 d² (d × 4d and 4d × d).
#
# Adam in mixed precision keeps 16 bytes for each weight ([08](08_memory.ipynb)). The weight and its gradient take 2 + 2
# bytes, in 16 bits. A copy of the weight and Adam's two averages take 4 + 4 + 4 bytes, in 32 bits.

# %%
layer = 12 * 12_288**2 * 16 / 1e9  # GB
print(f"{layer:.0f} GB for a layer, {96 * layer / 1e3:.1f} TB for 96: that fills {96 * layer / 80:.0f} GPUs of 80 GB")

# %% [markdown]
# One layer fits into a GPU. But 96 GPUs with a layer each wait for each other ([10](10_pipeline_parallel.ipynb)), and a
# single sequence gets no faster. **Tensor parallelism** (tp) cuts each layer, so that several GPUs work on it at the
# same time. A linear layer y = x A can be cut in two ways:
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
# **Columns, then rows**: what the first layer computes on a rank is what the second layer needs on this rank. GELU,
# between the two layers, works on each number by itself. So two layers need one sum, at the end.
#
# Backward has one rule: **where forward copies, backward adds; where forward adds, backward copies.** Two functions are
# **conjugate** if each does forward what the other does backward. Three functions are given:
#
# | function | forward | backward |
# |---|---|---|
# | `copy_to(comm, x)`, Megatron's f | no message: every rank has the same x | all-reduce of the gradient |
# | `reduce_from(comm, x)`, Megatron's g | all-reduce of x | no message: every rank has the same gradient |
# | `conjugate(x, forward, backward)`, for a pair of your own | returns `forward(x)` | returns `backward(gradient)` |
#
# ## Predict
#
# A layer of a transformer has attention (two linear layers: q, k, v together, and out) and an MLP (two more). How many
# all-reduces does it take on four ranks, forward and backward?
#
# Now cut two linear layers, by columns and then by rows. x has 2 × 256 × 256 float32 numbers (524,288 bytes). How many
# bytes does a rank send, forward and backward together?

# %% guess=[4, 4, 3000000]
my_all_reduces = lab.guess("all-reduces of one layer of a transformer", {"forward": ..., "backward": ...})
my_bytes = lab.guess("bytes that one of four ranks sends", ...)

# %% [markdown]
# ## Exercise 9.1 ★★ A linear layer cut by its outputs <!-- 1 two days 12 -->
#
# Compute this rank's columns of y, with `copy_to`. `torch.nn.functional.linear(x, weight, bias)` is x @ weight.T +
# bias, so columns of A are rows of `weight`.

# %% exercise="hpdl_lab.parallel.tensor.linear:column_linear"

# %% check="hpdl_lab.parallel.tensor.linear:column_linear"

# %% [markdown]
# ## Exercise 9.2 ★★ A linear layer cut by its inputs <!-- 1 two days 12 -->
#
# Compute all of y from this rank's rows of A, with `reduce_from`. Where does the bias belong?

# %% exercise="hpdl_lab.parallel.tensor.linear:row_linear"

# %% check="hpdl_lab.parallel.tensor.linear:row_linear"

# %% [markdown]
# ## Measure: four ways to cut a layer <!-- 1 two days 5 -->
#
# Which way sends least? The next cell computes x + mlp(norm(x)) on four ranks in four ways, forward and backward:
#
# | way | what a rank does |
# |---|---|
# | whole on every rank | it holds all weights, and computes everything |
# | layer by layer | the simplest cut: columns of both linear layers, and each output is gathered |
# | columns, then rows | it calls your two functions |
# | sequence parallel (9.4) | between layers it keeps only its own positions |
#
# Orange marks predict bytes and time. A ring's all-reduce of n bytes sends 2(p-1)/p · n bytes. The predicted time is
# 1/p of the first way's time, plus the time of the messages, computed from α and β of a ping-pong (03).

# %%
ways = lab.tensor(column_linear, row_linear, prediction=my_bytes)
mine, naive = (ways[way]["forward"] + ways[way]["backward"] for way in ("pair", "by layer"))
assert mine < naive / 3
lab.reveal("bytes that one of four ranks sends", mine)
print(f"you send {mine / naive:.0%} of what layer by layer sends")
ways

# %% [markdown]
# On two ranks with a core each, the time follows the predictions.

# %%
lab.tensor(column_linear, row_linear, ranks=2)

# %% [markdown]
# The next picture predicts the time of one layer on H100s. Eight GPUs are in a node, InfiniBand joins the nodes, and
# matrix products reach half of the GPU's highest FLOP/s. Why should tp be at most 8? Which `link` is too slow even
# inside a node? What does a smaller d change?

# %%
lab.explore("tensor")

# %% [markdown]
# ## Exercise 9.3 ★★★ Attention with this rank's heads <!-- 1 homework 20 -->
#
# Heads need nothing from each other, so attention is cut by heads. The weight for q, k and v stacks three matrices, so
# the rows of one head are not contiguous. `rows_of_heads` lists the rows that a rank needs:

# %%
from hpdl_lab.parallel.tensor.transformer import rows_of_heads

print("4 heads of 2 rows each, rank 1 of 2:", rows_of_heads(1, 2, heads=4, width=8).tolist())

# %% [markdown]
# Compute attention with this rank's heads. `column_linear` makes q, k and v of these heads, and `row_linear` adds
# the outputs of all ranks. In between, `scaled_dot_product_attention(q, k, v, is_causal=...)` expects q, k and v of
# shape (b, heads, s, n): this rank's heads, n numbers each. See `hpdl_lab/models/transformer.py` for one rank.

# %% exercise="hpdl_lab.parallel.tensor.transformer:attention_heads"

# %% check="hpdl_lab.parallel.tensor.transformer:attention_heads"

# %% [markdown]
# ## A GPT on four ranks <!-- 1 two days 6 -->
#
# The whole model is cut: attention by heads, MLPs by columns and rows, and the token embedding by its rows. The
# model is trained on Moby-Dick in 64 bits, so that rounding does not hide a mistake. All ranks see the same batch.

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
# Each layer takes two all-reduces in each direction. The token embedding takes one more in forward, to look up tokens.
# The logits use the same weights, and take one more in backward. Each all-reduce moves b · s · d = 4 · 64 · 64 numbers.
#
# In the timeline of the last step, nothing hides the all-reduces, because the next layer needs the sum. (Asynchronous
# tensor parallelism sends one piece of a product while it computes the next.) The one all-gather between forward and
# backward collects the logits, a quarter from each rank:

# %%
begin = sorted(e.t0_ns for e in shared.events if e.op == "forward")[-4]  # of the last step on four ranks
lab.show([e for e in shared.events if e.t0_ns >= begin])

# %% [markdown]
# If ranks cannot have equally many heads, an error says so, before any message:

# %% tags=["raises-exception"]
lab.run(train_gpt, text, 1, 2)

# %% [markdown]
# ## Exercise 9.4 ★★★ Sequence parallel <!-- 1 homework 18 -->
#
# Send x through a layer, while each rank keeps only its own positions. Between the cut layers of 9.1 to 9.3, every
# rank computes norms and residual sums at all positions. In **sequence parallelism** a rank computes norms and sums
# only at its own positions. So take the all-reduce apart, into reduce-scatter and all-gather:
#
#     tensor parallel      norm ─── copy ─────── layer ── all-reduce ────── + ─── norm      (b, s, d) on every rank
#     sequence parallel    norm ─── all-gather ─ layer ── reduce-scatter ── + ─── norm      (b, s/p, d) between
#
# `gather(x)` collects the positions of all ranks. `scatter(x)` adds x over ranks, and returns this rank's positions of
# the sum. Autograd knows neither function, so use `conjugate`.

# %% exercise="hpdl_lab.parallel.tensor.linear:sequence_parallel"

# %% check="hpdl_lab.parallel.tensor.linear:sequence_parallel"

# %%
ways = lab.tensor(column_linear, row_linear, sequence_parallel, prediction=my_bytes)
pair, sequence = ways["pair"], ways["sequence"]
assert sequence["forward"] == pair["forward"] and sequence["kept"] < pair["kept"]
print(f"the same bytes sent, {sequence['kept'] / pair['kept']:.0%} of the activations kept")

# %% [markdown]
# Megatron-LM keeps even less: it drops the gathered input of a layer, and gathers this input once more in backward.

# %% [markdown]
# ## Exercise 9.5 ★★★ Convert this script: tensor parallel <!-- 1 homework 20 -->
#
# Split the layers of the script of 06 between two ranks, with `torch.distributed.tensor.parallel`.
# `parallelize_module(model, mesh, plan)` takes a mesh (the group of ranks) and a dict `plan`. A key is the name of a
# layer; `*` stands for any part of a name. A value is `ColwiseParallel()` or `RowwiseParallel()`: columns or rows of A
# in y = x A. Each rank gets a contiguous piece, which would mix q, k and v. So the script first cuts their common layer
# into three layers (9.3).
#
#     torchrun --standalone --nproc-per-node 2 train_tp.py
#
# The file that the script saves has to hold the whole model.

# %% script="train_tp"

# %% check_script="train_tp"

# %% [markdown]
# ## Take it home <!-- 1 homework 5 -->
#
# `parallelize_module` replaces each parameter of an unchanged model by a DTensor, which holds this rank's part, its
# **shard**. `ColwiseParallel` is your `column_linear`, `RowwiseParallel` your `row_linear`. Here the MLPs are cut.
# Attention in this GPT has q, k and v in one matrix: contiguous pieces are wrong (9.3).

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
# times per layer, and nothing hides them. NVLink 4, inside a node, carries 450 GB/s per direction; InfiniBand (400
# Gbit/s) carries 50 GB/s. Which parallelism would you use on which link? And what does tensor parallelism gain from a
# batch twice as large?
#
# ## Where to read the real code
#
# - `hpdl_lab/parallel/tensor/linear.py`, `hpdl_lab/parallel/tensor/transformer.py`,
#   `hpdl_lab/parallel/tensor/spatial.py`: f, g, your functions, the modules.
# - `hpdl_lab/parallel/tensor/model.py`: whole models, unchanged, cut into shards;
#   `hpdl_lab/parallel/tensor/vocabulary.py`: the token embedding, and a cross-entropy of logits that ranks share.
# - Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053; Korthikanti et al. 2022 (sequence parallelism),
#   arXiv:2205.05198; Dryden et al. 2019 (LBANN's convolutions), arXiv:1903.06681.

# %% [markdown]
# ## Homework
#
# No other cell of this notebook needs exercise 9.6.
#
# ## Exercise 9.6 ★★★ Halos of a convolution <!-- 1 homework 12 -->
#
# Exchange the rows that a convolution needs from neighbors. Each rank has some rows of every image, a strip. A kernel
# of 5 × 5 looks two rows beyond the strip. These rows, the strip's **halo**, belong to a neighbor.
#
# `sending(comm, x, dst)` and `receiving(comm, x, src)` are given. Each starts a message, and returns a list of one
# Work: wait for it. If x is empty, nothing is sent, and the list is empty.

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
# 1. A linear layer can be split by columns (a rank has some outputs) or by rows (it has a part of a sum).
# 2. Columns, then rows: two layers need one all-reduce forward and one backward.
# 3. Where forward copies, backward adds; where forward adds, backward copies.
# 4. Attention is split by heads, the token embedding by its rows. A layer of a transformer takes two all-reduces
#    each way.
# 5. Nothing hides these all-reduces, so tensor parallelism stays on the fastest links, inside a node.
#
# <!-- terms -->
#
# **What you can do now:** split the layers of a transformer among ranks, count their all-reduces, and name the links
# that are fast enough.
#
# <!-- links -->
