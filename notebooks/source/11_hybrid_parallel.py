# %% [markdown]
# # 11 · Hybrid parallelism
#
# **The number to reach:** a GPT on two meshes of four ranks with the same losses as a single rank, to 10⁻¹⁰, by three
# changed lines; and the fastest of 66 ways to put GPT-3 on 1,024 GPUs, within 15% of what was published.
#
# <!-- tracks -->
#
# Replicas (06), shards of layers (09) and stages (10) are three ways to use more ranks. Here they are put together,
# and the question is how many of each. Part one stands alone: in fifteen minutes you pick a grid with sliders. Part
# two: a mesh, gradients, three lines. Part three: the best grid for 1,024 GPUs.

# %%
from hpdl_lab import lab
from hpdl_lab.mesh import Grid

lab.start(4)

# %% [markdown]
# # Part one: pick a grid
#
# ## The idea <!-- 1 half day 6 -->
#
# | axis | what is split among its ranks | what they send | how often |
# |---|---|---|---|
# | **dp**, data parallel | the batch: each has its own examples | gradients | once per step, during backward |
# | **pp**, pipeline parallel | the layers, in stages | activations at the borders | once per micro-batch |
# | **tp**, tensor parallel | each layer | activations | four times per layer |
#
# A **mesh** gives every rank one coordinate per axis, and every axis its own communicators. Eight ranks are two
# replicas of two stages of two shards:

# %%
lab.show(Grid(dp=2, pp=2, tp=2))

# %% [markdown]
# The last axis varies fastest. Its ranks are neighbors, on the fastest links, so the axis that communicates most
# should vary fastest. Megatron's default order is `tp-cp-ep-dp-pp`, fastest first: there dp varies before pp, because
# gradients are more bytes than activations at the borders. Here the order is dp, pp, tp. torch's
# `init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=...)` leaves it to you: its last axis varies fastest, too.
#
# ## Predict
#
# A small GPT on your four engines: which grid takes a step fastest?

# %% guess=[2, 2, 1]
my_grid = lab.guess("the fastest grid of 4 ranks", {"dp": ..., "pp": ..., "tp": ...})

# %% [markdown]
# ## Pick a grid <!-- 1 half day 9 -->
#
# Move the sliders: what a rank has to hold, how long the pipeline is idle, what goes over which link, and the time of
# a step, all by formulas, using speeds measured on this machine. Then press **Run it**: a few real steps on your
# engines, drawn over the prediction. They train by SGD with momentum, whose state is as large as the parameters; that
# of Adam would be twice as large.
#
# Where four ranks share two cores, all arithmetic waits for these two, whatever the grid (light gray: waiting for a
# core). Then the predicted times hardly differ; memory and bytes do.

# %%
picker = lab.grid("gpt", batch=32)

# %%
picker.set(**my_grid)
picker.run()
print(picker)

# %% [markdown]
# *The half day and the full day end here.* You saw in 00 what dp, pp and tp send; how each works inside is the
# subject of [06](06_data_parallel.ipynb), [09](09_tensor_parallel.ipynb) and [10](10_pipeline_parallel.ipynb).
#
# # Part two: one mesh
#
# ## Exercise 11.1 ★ Where a rank stands <!-- 2 homework 8 -->
#
# Coordinates are the digits of the rank's number, with a separate base for every digit.

# %% exercise="hpdl_lab.mesh:coordinates"

# %% check="hpdl_lab.mesh:coordinates"

# %% [markdown]
# ## Exercise 11.2 ★ Who is in whose group <!-- 2 homework 8 -->
#
# Along an axis a rank talks to those that differ from it in this coordinate, and in no other.

# %% exercise="hpdl_lab.mesh:groups"

# %% check="hpdl_lab.mesh:groups"

# %%
stages = groups((2, 2, 2), 1)
assert stages == [[0, 2], [1, 3], [4, 6], [5, 7]]
print("with dp 2, pp 2, tp 2 these are pipelines:", stages)

# %% [markdown]
# ## Exercise 11.3 ★★★ Which gradient is added over which axes <!-- 2 homework 22 -->
#
# Backward leaves a gradient on every rank. Some of them are parts of a sum, and it depends on the parameter over
# which axes. A matrix that tp has cut is a different one on every tp rank. A norm is the same on all of them. The
# token embedding is on the first stage and on the last one. Add too little, and replicas drift apart; add too much,
# and they learn nonsense together.
#
# `mesh["dp"]` and `mesh["tp"]` are communicators. A `Placed` describes each parameter:
#
# - `placed.parameter`: the tensor of this rank, with its `.grad`;
# - `placed.over_tp`: True if each tp rank holds this parameter whole, and has a part of its gradient;
# - `placed.shared`: the communicator of the stages that hold this very parameter, or None.

# %% exercise="hpdl_lab.parallel.hybrid.gradients:reduce_gradients"

# %% check="hpdl_lab.parallel.hybrid.gradients:reduce_gradients"

# %% [markdown]
# ## Measure: three changed lines <!-- 2 homework 8 -->
#
# HyPar-Flow's promise in 2019 was that a model need not be rewritten to be cut and replicated. The same in this lab:
#
#     mesh = DeviceMesh(comm, dp=2, pp=2)                                        # 1
#     model = HybridParallel(model, mesh, example_x, micro_batches=4)            # 2
#     optimizer = torch.optim.AdamW(model.parameters())
#     for x, y in batches:
#         loss = model.step(x, y)                                                # 3, for forward, loss and backward
#         optimizer.step()
#
# torch's class has the same name and another signature: `init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",
# "pp"))`, and `mesh["dp"].get_group()` where we write `mesh["dp"]`. Replicas here hold the whole optimizer state; to
# shard it as well along dp is ZeRO: stage 1 shards the optimizer state, stage 2 also the gradients, stage 3 (FSDP)
# also the weights.
#
# A GPT that learns from Moby-Dick: the plain script on one rank, and the changed one on two meshes of your four
# engines. Numbers have 64 bits, so that rounding does not hide a mistake.

# %% shown="hpdl_lab.parallel.scripts:hybrid_script"

# %%
from hpdl_lab import data
from hpdl_lab.comm import sim
from hpdl_lab.parallel.scripts import script

text = data.load("text")
alone = sim.run(1, script, text)[0]

# %%
for grid in ({"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}):
    ranks = lab.run(hybrid_script, text, grid)
    off = max(abs(a - b) for a, b in zip(alone.losses, ranks[0].losses, strict=True))
    assert off < 1e-10
    print(f"{grid}: losses differ by {off:.0e}; parameters held: {[rank.held for rank in ranks]} of {alone.held:,}")

# %% [markdown]
# The two halves are not equally large: stages are cut so that they take equal time, and only between whole layers.
# This is the last step of the second mesh, sums over tp and messages over pp in one picture. A message is drawn from
# the moment it was started. Ranks start to receive early and work meanwhile, so a long bar does not mean that a rank
# stands still.

# %%
begin = sorted(e.t0_ns for e in ranks.events if e.op == "add gradients")[-8]  # where the step before has ended
lab.show([e for e in ranks.events if e.t0_ns > begin])

# %% [markdown]
# ## From one mesh into another <!-- 2 homework 4 -->
#
# A checkpoint holds the whole model and the whole optimizer, whatever the mesh. Three steps on one, three on another:

# %%
import tempfile

with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/gpt.checkpoint"
    lab.run(hybrid_script, text, {"dp": 2, "pp": 2}, 3, None, path)
    resumed = lab.run(hybrid_script, text, {"tp": 2, "pp": 2}, 3, path)[0].losses

# %%
through = sim.run(1, script, text, 6)[0].losses[3:]
assert max(abs(a - b) for a, b in zip(through, resumed, strict=True)) < 1e-10
print("one rank, six steps:", through, "\ntwo meshes, three each:", resumed)

# %% [markdown]
# # Part three: which grid for 1,024 GPUs
#
# GPT-3, 175 billion parameters, on 1,024 GPUs of 80 GB: how would you divide them, and how long does a step of 1,536
# sequences take?

# %% guess=[32, 32, 1, 100]
my_gpt3 = lab.guess("its fastest grid, and a step", {"dp": ..., "pp": ..., "tp": ..., "seconds": ...})

# %% [markdown]
# ## Exercise 11.4 ★★ Search the grid under a memory limit <!-- 3 homework 12 -->
#
# Nobody has to guess what can be computed: price every grid, and take the fastest that fits.

# %% exercise="hpdl_lab.parallel.grid.search:best_grid"

# %% check="hpdl_lab.parallel.grid.search:best_grid"

# %% [markdown]
# ## 1,024 GPUs <!-- 3 homework 8 -->
#
# Your function on GPT-3. `price` assumes A100 GPUs, eight to a node, with NVLink inside and one InfiniBand adapter
# each. NVIDIA published a run of this model on 1,024 such GPUs: dp 8, pp 16, tp 8, and 32 s a step (Megatron-LM,
# README.md, "GPT-3 Example"; the batch of 1,536 from `examples/pretrain_gpt3_175B.sh`). That run recomputed
# activations in backward, and so does `price`: a third more arithmetic, and a fraction of the memory.
#
# One number is assumed: that layers reach half of a GPU's peak of 312 teraFLOP/s if they neither wait nor send. The
# 15% are a statement about that number, too, as the cell below shows.

# %%
from hpdl_lab.parallel.scripts import price

best, published = best_grid(1024, price, 80e9), price(8, 16, 8)
assert abs(published.seconds / 32 - 1) < 0.15
lab.reveal("its fastest grid, and a step", dict(zip(my_gpt3, (*best, price(*best).seconds), strict=True)))
print(f"the published grid: {published.seconds:.1f} s by the model, 32 s as published, {published.nbytes / 1e9:.0f} GB")

# %% [markdown]
# The same grid, if layers reach another share of the peak:

# %%
{f"{share:.0%} of the peak": f"{price(8, 16, 8, of_peak=share).seconds:.0f} s" for share in (0.4, 0.45, 0.5, 0.55)}

# %% [markdown]
# And every share between, for the fastest grids that fit as well. The green band is 15% around what was published. For
# which shares does the model stay within it, and does the order of the grids change?

# %%
lab.explore("share", prediction=my_gpt3)

# %% [markdown]
# All grids at once, each with and without recomputing: what lies to the right of the red line does not fit. Some of
# the 66 are impossible: tp must divide 96 heads, and pp cannot be more than the layers. Where is yours?

# %%
lab.search("gpt3", prediction=my_gpt3)

# %% [markdown]
# The model adds and multiplies. Does a simulation of 1,024 ranks agree with it, in which every single message waits
# for its link, in virtual time? One step of the published grid with 4 of its 192 micro-batches takes a few seconds:

# %%
from hpdl_lab.parallel.scripts import simulated_step

simulated, modelled = simulated_step(8, 16, 8, micro_batches=4)
assert abs(simulated / modelled - 1) < 0.05
print(f"1,024 simulated ranks: {simulated:.2f} s a step, by the model: {modelled:.2f} s")

# %% [markdown]
# ## HyPar-Flow's results, and yours <!-- 3 homework 5 -->
#
# "For ResNet-1001, an ultra-deep model, HyPar-Flow provides: 1) Up to 1.6x speedup over Horovod-based data-parallel
# training, 2) 110x speedup over single-node on 128 Stampede2 nodes, and 3) 481x speedup over single-node on 512
# Frontera nodes." (Awan, Jain, Anthony, Subramoni, Panda: HyPar-Flow, ISC High Performance 2020, abstract;
# arXiv:1911.05146.)
#
# 110 of 128 nodes is an efficiency of 86%, 481 of 512 one of 94%. The 1.6 comes from small batches, where replicas
# have little to compute between two all-reduces of a deep model. Yours is four ranks and a small GPT: replicas only,
# against two replicas of two stages. If ranks share cores, this shows how work is divided, not how it scales.

# %%
replicas, hybrid = (lab.run(hybrid_script, text, grid, 6)[0].seconds for grid in ({"dp": 4}, {"dp": 2, "pp": 2}))
print(
    f"dp 4: {replicas * 1e3:.0f} ms a step; dp 2 x pp 2: {hybrid * 1e3:.0f} ms: {replicas / hybrid:.2f} times as fast"
)

# %% [markdown]
# ## Exercise 11.5 ★★★ Convert this script: data and tensor parallel <!-- 3 homework 20 -->
#
# The script of 06 and 09 once more, for four ranks: two replicas of two shards. `init_device_mesh` makes the mesh,
# `mesh["tp"]` goes to `parallelize_module`, `mesh["dp"]` to whatever averages gradients: `fully_shard` of
# `torch.distributed.fsdp` does, and shards what is left.
#
#     torchrun --standalone --nproc-per-node 4 train_hybrid.py
#
# Which ranks see the same examples, and which see others?

# %% script="train_hybrid"

# %% check_script="train_hybrid"

# %% [markdown]
# ## Take it home <!-- 3 homework 6 -->
#
# PyTorch's own mesh. `init_device_mesh` is `Grid`: the last axis varies fastest. `parallelize_module` cuts layers over
# "tp" (09). `fully_shard`, FSDP2, replaces `HybridParallel`'s replicas: each rank of "dp" keeps only its share of
# parameters, gradients and optimizer state; parameters are gathered before a block needs them, and gradients are
# added by a reduce-scatter. First everything that tp cuts, then FSDP around it: that is also how torchtitan does it.

# %% tags=["take-home"]
from shutil import copy

from hpdl_lab.models import plain_gpt

copy(plain_gpt.__file__, "take_home_gpt.py")  # plain torch: a GPT, and windows of a text

# %% tags=["take-home"]
# %%writefile take_home_11.py
"""Tensor parallel within pairs, FSDP2 across: torchrun --standalone --nproc-per-node 4 take_home_11.py"""

import torch
import torch.distributed as dist
from take_home_gpt import GPT, windows_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)  # so that the losses of 1 and 4 ranks agree to ten digits
torch.manual_seed(0)
size = dist.get_world_size()
mesh = init_device_mesh("cpu", (max(1, size // 2), min(2, size)), mesh_dim_names=("dp", "tp"))
windows, vocabulary = windows_of(__file__)  # it learns this file
model = GPT(vocabulary)
for block in model.blocks:
    parallelize_module(block.mlp, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)  # DTensors of two kinds: one at a time
for batch in torch.randperm(len(windows))[:48].split(16):
    loss = model(windows[batch].tensor_split(mesh["dp"].size())[mesh["dp"].get_local_rank()])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total := loss.detach() / size)
    if dist.get_rank() == 0:
        print("loss", total.item())
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 take_home_11.py
# one = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 take_home_11.py
print(out.n)

# %% tags=["take-home"]
losses = [[float(line.split()[-1]) for line in lines.grep("loss")] for lines in (one, out)]
assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-10

# %% [markdown]
# On GPUs write `"nccl"` and `"cuda"` in place of `"gloo"` and `"cpu"`, call
# `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before the mesh is made, and move model and batches there.
# Slurm starts it on two nodes with the script below: one `torchrun` for each node, which starts the ranks of that
# node. They find each other at the first node, the *rendezvous*. `--nproc-per-node` is the number of GPUs of a node,
# so that tp stays within it.

# %% [markdown]
# %%writefile take_home_11.sbatch
# ##!/bin/bash
# #SBATCH --job-name=take_home
# #SBATCH --nodes=2
# #SBATCH --ntasks-per-node=1
# #SBATCH --gpus-per-node=4
# #SBATCH --cpus-per-task=32
# #SBATCH --time=00:30:00
#
# export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / 4))
# head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 4 \
#     --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" take_home_11.py

# %% [markdown]
# Here it is only parsed. On a cluster, `!sbatch --test-only take_home_11.sbatch` asks Slurm when it could start, and
# `!sbatch take_home_11.sbatch` starts it.
#
# This notebook itself can use such nodes, too: `lab.start(8, where="slurm", partition="gpu", nodes=2, gpus=1)` waits in
# Slurm's queue and starts an engine for each GPU. With `device="cuda"` their tensors are on the GPUs, and travel by
# NCCL. `docs/clusters.md` and `docs/gpu.md` say what a site needs, and what has not been tried yet.

# %% tags=["take-home"]
# out = !bash -n take_home_11.sbatch
assert not out, out.n

# %% [markdown]
# ## Question to discuss
#
# On 1,024 GPUs the published grid has tp 8, and a node has 8 GPUs. What would change in the grid if a node had 4, or
# 72? And what if the batch had to be 192 instead of 1,536?
#
# ## Where to read the real code
#
# - `hpdl_lab/mesh.py`: your two functions, and communicators along axes.
# - `hpdl_lab/parallel/hybrid/gradients.py`: the rule, and the same during backward.
# - `hpdl_lab/parallel/hybrid/model.py`: three lines; `hpdl_lab/parallel/checkpoint.py`: from one mesh into another.
# - `hpdl_lab/parallel/grid/model.py`, `hpdl_lab/parallel/grid/memory.py`: what a grid costs;
#   `hpdl_lab/parallel/grid/search.py`.
# - `hpdl_lab/parallel/grid/simulation.py`, `hpdl_lab/predict/graph.py`: every message of 1,024 ranks.
# - Awan et al. 2020 (HyPar-Flow), arXiv:1911.05146; Narayanan et al. 2021 (Megatron-LM on thousands of GPUs),
#   arXiv:2104.04473; Jia et al. 2018 (FlexFlow), arXiv:1807.05358, which searches for the fastest way to parallelize a
#   model. Lu et al. 2017 (HPCA) call a CNN accelerator FlexFlow, too: syllabi that cite it for the search mean Jia.

# %% [markdown]
# ## Recap
#
# 1. A mesh gives each rank a coordinate on every axis: dp, pp and tp.
# 2. The axis that communicates most, tp, gets the fastest links; dp can live with the slowest.
# 3. A gradient is added over the axes along which its parameter is the same and its data are not.
# 4. Which grid is fastest follows from memory, bubble and links, and can be computed before anything runs.
# 5. A model of time has assumptions: here the share of the peak that layers reach.
#
# | term | what it means |
# |---|---|
# | mesh, device mesh | ranks on a grid with named axes |
# | process group | the ranks along one axis, with a communicator of their own |
# | hybrid, 3D parallelism | data, pipeline and tensor parallelism at once |
# | rank order | which axis varies fastest; Megatron's is tp, cp, ep, dp, pp |
# | MFU | model FLOP/s utilization: 6 N D over the time and the peak; recomputation does not count |
# | HFU | hardware FLOP/s utilization: recomputation counts, too |
# | checkpoint | model and optimizer in a file, here independent of the mesh |
# | micro-batch, global batch | what passes through a pipeline at once; all examples of one step |
#
# **What you can do now:** lay out a training on a mesh, say which gradient is added where, and choose a grid under a
# memory limit.
#
# <!-- links -->
