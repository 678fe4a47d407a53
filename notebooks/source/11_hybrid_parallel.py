# %% [markdown]
# # 11 · Hybrid parallelism
#
# **The number to reach:** change three lines of a script, and a GPT on four ranks has the same losses as on one, to
# 10⁻¹⁰. Your function finds the fastest of 66 ways to put GPT-3 on 1,024 GPUs. For the grid that NVIDIA published, your
# computed time is within 15% of the measured time.
#
# <!-- tracks -->
#
# Replicas (06), shards of layers (09) and stages (10) are three ways to use more ranks. **Hybrid parallelism** combines
# all three. A grid says how many there are of each. Part one picks a grid with sliders, part two trains on two grids,
# and part three searches the best grid for 1,024 GPUs.

# %%
from hpdl_lab import lab
from hpdl_lab.mesh import Grid

lab.start(4)

# %% [markdown]
# # Part one: pick a grid
#
# ## The idea <!-- 1 half day 6 -->
#
# | axis | what is split among its ranks | what ranks send | how often |
# |---|---|---|---|
# | **dp**, data parallel | the batch: each rank has its own examples | gradients | once per step, during backward |
# | **pp**, pipeline parallel | the layers, in stages | activations at the borders | once per micro-batch |
# | **tp**, tensor parallel | each layer | activations | four times per layer |
#
# A **mesh** is a grid of ranks: each rank has one coordinate per axis. Each axis has its own communicators. These eight
# ranks are two replicas, with two stages each, and each stage has two shards:

# %%
lab.show(Grid(dp=2, pp=2, tp=2))

# %% [markdown]
# The coordinate of the last axis changes fastest from rank to rank, as in torch's `init_device_mesh("cuda", (2, 2, 2),
# mesh_dim_names=...)`. Ranks along this axis have neighboring numbers, so most are in one node, on the fastest links.
# So the axis that communicates most should be last: our **rank order** is dp, pp, tp. Megatron writes the order the
# other way around, `tp-cp-ep-dp-pp` (cp and ep come in 12). Its slowest links are for pp, not dp: activations between
# stages are often fewer bytes than gradients.
#
# ## Predict
#
# Which grid of your four engines takes the least time for a step of a small GPT?

# %% guess=[2, 2, 1]
my_grid = lab.guess("the fastest grid of 4 ranks", {"dp": ..., "pp": ..., "tp": ...})

# %% [markdown]
# ## Pick a grid <!-- 1 half day 9 -->
#
# Move the sliders. Formulas show the bytes in each rank, the idle time of the pipeline, the load of each link, and the
# time of a step. The formulas use speeds of this machine. Then press **Run it**: your engines do a few real steps, and
# their times are drawn next to the prediction. Engines train by SGD with momentum, so the state is as large as the
# parameters.
#
# If four ranks share two cores, ranks wait for a core with any grid. The light gray part of a bar is this wait.
# Predicted times then hardly differ, but memory and bytes do.

# %%
picker = lab.grid("gpt", batch=32)

# %%
picker.set(**my_grid)
picker.run()
print(picker)

# %% [markdown]
# *The half day and the full day end here.* How the axes work: dp in [06](06_data_parallel.ipynb), pp in
# [10](10_pipeline_parallel.ipynb), tp in [09](09_tensor_parallel.ipynb).
#
# # Part two: one mesh
#
# ## Exercise 11.1 ★ Who is in whose group <!-- 2 homework 8 -->
#
# List the **process groups** along one axis of a mesh. `coordinates(rank, sizes)` is given. The check tries every axis
# of nine grids.

# %% exercise="hpdl_lab.mesh:groups"

# %% check="hpdl_lab.mesh:groups"

# %%
stages = groups((2, 2, 2), 1)
assert stages == [[0, 2], [1, 3], [4, 6], [5, 7]]
print("with dp 2, pp 2, tp 2 these are pipelines:", stages)

# %% [markdown]
# ## Exercise 11.2 ★★★ Which gradient is added over which axes <!-- 2 homework 22 -->
#
# Add each gradient over all ranks that have a part of it. These ranks are different for each kind of parameter. A
# matrix that tp has cut is different on every tp rank. A norm layer is the same on all tp ranks. The token embedding is
# also the matrix of the output layer, so the first and the last stage share it. If a sum leaves out an axis, replicas
# drift apart. If it has an axis too many, the gradients are wrong.
#
# `mesh["dp"]` and `mesh["tp"]` are communicators. A `Placed` describes each parameter:
#
# - `placed.parameter`: the tensor of this rank, with its `.grad`;
# - `placed.over_tp`: True if the gradients of the tp ranks have to be added. Such ranks hold the whole parameter, but
#   use it only for their own positions (09);
# - `placed.shared`: the communicator of the stages that hold the same parameter, or None.

# %% exercise="hpdl_lab.parallel.hybrid.gradients:reduce_gradients"

# %% check="hpdl_lab.parallel.hybrid.gradients:reduce_gradients"

# %% [markdown]
# ## Measure: three changed lines <!-- 2 homework 8 -->
#
# HyPar-Flow (2019) promised to cut and replicate a model without rewriting it. Here three lines of a script change:
#
#     mesh = DeviceMesh(comm, dp=2, pp=2)                                        # 1
#     model = HybridParallel(model, mesh, example_x, micro_batches=4)            # 2
#     optimizer = torch.optim.AdamW(model.parameters())
#     for x, y in batches:
#         loss = model.step(x, y)                                                # 3: forward, loss and backward
#         optimizer.step()
#
# In torch, `init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))` makes the mesh, and `mesh["dp"].get_group()`
# is our `mesh["dp"]`. Each replica here holds the whole optimizer state; ZeRO (08) would shard this state along dp.
#
# Train a GPT on Moby-Dick with the plain script on one rank, and with the changed script on two meshes. Numbers have 64
# bits, so rounding does not hide a mistake. Compare the losses:

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
# Stages hold different numbers of parameters: the cuts make their times equal, not their sizes.
# The picture shows the last step of the second mesh: sums over tp, and messages over pp. A bar begins when its message
# is started. Ranks start to receive early and compute meanwhile, so a long bar does not mean that a rank waits.

# %%
begin = sorted(e.t0_ns for e in ranks.events if e.op == "add gradients")[-8]  # where the step before has ended
lab.show([e for e in ranks.events if e.t0_ns > begin])

# %% [markdown]
# ## From one mesh into another <!-- 2 homework 4 -->
#
# A **checkpoint** is a file with the whole model and optimizer state, here independent of the mesh. Train three steps
# on one mesh, and three more on another mesh:

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
# GPT-3 has 175 billion parameters, and you have 1,024 GPUs of 80 GB. Which grid is fastest, and how many seconds does a
# step of 1,536 sequences take?

# %% guess=[32, 32, 1, 100]
my_gpt3 = lab.guess("its fastest grid, and a step", {"dp": ..., "pp": ..., "tp": ..., "seconds": ...})

# %% [markdown]
# ## Exercise 11.3 ★★ Search the grid under a memory limit <!-- 3 homework 12 -->
#
# Find the fastest grid that fits. To do this, compute the **price** of every grid: the seconds of a step, and the bytes
# of the fullest rank. In the check some grids are equally fast.

# %% exercise="hpdl_lab.parallel.grid.search:best_grid"

# %% check="hpdl_lab.parallel.grid.search:best_grid"

# %% [markdown]
# ## 1,024 GPUs <!-- 3 homework 8 -->
#
# `price` assumes nodes of eight A100 GPUs, with NVLink inside a node, and an InfiniBand adapter for each GPU. NVIDIA
# published a run of this model on 1,024 such GPUs: dp 8, pp 16, tp 8, and 32 s per step. (Megatron-LM, README.md,
# "GPT-3 Example"; the batch of 1,536 is in `examples/pretrain_gpt3_175B.sh`.) That run recomputed activations in
# backward, as `price` does. Recomputation costs a third more arithmetic, and saves most of the activations' memory.
#
# One number is assumed: while layers compute, they reach half of a GPU's peak of 312 teraFLOP/s. This share is **HFU**,
# hardware FLOP/s utilization: it includes recomputed FLOPs. **MFU**, model FLOP/s utilization, counts only the
# operations that training needs: 6 N D, for N parameters and D tokens (00).

# %%
from hpdl_lab.parallel.scripts import price

best, published = best_grid(1024, price, 80e9), price(8, 16, 8)
assert abs(published.seconds / 32 - 1) < 0.15
lab.reveal("its fastest grid, and a step", dict(zip(my_gpt3, (*best, price(*best).seconds), strict=True)))
print(f"the published grid: {published.seconds:.1f} s by the model, 32 s as published, {published.nbytes / 1e9:.0f} GB")

# %% [markdown]
# The predicted time depends on the assumed share:

# %%
{f"{share:.0%} of the peak": f"{price(8, 16, 8, of_peak=share).seconds:.0f} s" for share in (0.4, 0.45, 0.5, 0.55)}

# %% [markdown]
# The next slider changes the share. Each curve is the time of one grid: the published grid, or one of the fastest. The
# green band is 15% around the published time. For which shares is the published grid's curve in the band? Does the
# order of grids change?

# %%
lab.explore("share", prediction=my_gpt3)

# %% [markdown]
# The next picture shows all possible grids, with and without recomputation. Grids to the right of the red line do not
# fit. Some of the 66 are impossible: tp must divide 96 heads, and pp cannot be more than the layers. Where is your
# grid?

# %%
lab.search("gpt3", prediction=my_gpt3)

# %% [markdown]
# Does a simulation of 1,024 ranks agree with `price`? The simulation does not wait: it computes at what time each
# message would start and arrive, in **virtual time**. You wait a few seconds for one step of the published grid with 4
# of its 192 micro-batches:

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
# A speedup of 110 on 128 nodes is an efficiency of 86%, and 481 on 512 nodes is 94%. The speedup of 1.6 comes from
# small batches: replicas of a deep model then compute little between two all-reduces. Now compare a small GPT on four
# replicas, and on two replicas of two stages. If ranks share cores, more ranks are not faster.

# %%
replicas, hybrid = (lab.run(hybrid_script, text, grid, 6)[0].seconds for grid in ({"dp": 4}, {"dp": 2, "pp": 2}))
print(
    f"dp 4: {replicas * 1e3:.0f} ms a step; dp 2 x pp 2: {hybrid * 1e3:.0f} ms: {replicas / hybrid:.2f} times as fast"
)

# %% [markdown]
# ## Exercise 11.4 ★★★ Convert this script: data and tensor parallel <!-- 3 homework 20 -->
#
# Convert the script of 06 and 09 to four ranks: two replicas of two shards. `init_device_mesh` makes the mesh.
# `mesh["tp"]` goes to `parallelize_module`. `mesh["dp"]` goes to a function that averages gradients, for example
# `fully_shard` of `torch.distributed.fsdp`, which also shards all parameters along dp.
#
#     torchrun --standalone --nproc-per-node 4 train_hybrid.py
#
# Which ranks must read the same examples, and which must read different ones?

# %% script="train_hybrid"

# %% check_script="train_hybrid"

# %% [markdown]
# ## Take it home <!-- 3 homework 6 -->
#
# In PyTorch, `parallelize_module` cuts layers over "tp" (09). `fully_shard` (FSDP2) replaces `HybridParallel`'s
# replicas: each rank of "dp" keeps only its share of parameters, gradients and optimizer state, as in ZeRO-3 (08).
# First tp cuts layers, then FSDP shards all parameters, cut ones too.

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
# On GPUs write `"nccl"` and `"cuda"` in place of `"gloo"` and `"cpu"`. Call
# `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before the mesh is made, and move model and batches to the GPU.
# The next script starts the file on two nodes by Slurm. On each node one `torchrun` starts the ranks. Ranks find each
# other at the first node, the *rendezvous*. `--nproc-per-node` is the number of GPUs of a node, so tp stays inside a
# node.

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
# Here the script is only parsed. On a cluster, `!sbatch --test-only take_home_11.sbatch` asks Slurm when it could
# start, and `!sbatch take_home_11.sbatch` starts it.
#
# This notebook can use such nodes, too. `lab.start(8, where="slurm", partition="gpu", nodes=2, gpus=1)` waits in
# Slurm's queue and starts an engine for each GPU. With `device="cuda"` tensors are on the GPUs, and travel by NCCL.
# `docs/clusters.md` and `docs/gpu.md` say what a computing center needs, and which systems were never tested.

# %% tags=["take-home"]
# out = !bash -n take_home_11.sbatch
assert not out, out.n

# %% [markdown]
# ## Question to discuss
#
# On 1,024 GPUs the published grid has tp 8, and a node has 8 GPUs. What would change in the grid if a node had 4 GPUs,
# or 72? What would change if the batch had to be 192 instead of 1,536?
#
# ## Where to read the real code
#
# - `hpdl_lab/mesh.py`: your function, and communicators along axes.
# - `hpdl_lab/parallel/hybrid/gradients.py`: your sums, and the same sums during backward.
# - `hpdl_lab/parallel/hybrid/model.py`: `HybridParallel`; `hpdl_lab/parallel/checkpoint.py`: from one mesh into
#   another.
# - `hpdl_lab/parallel/grid/model.py`, `hpdl_lab/parallel/grid/memory.py`: the price of a grid.
# - `hpdl_lab/parallel/grid/simulation.py`, `hpdl_lab/predict/graph.py`: every message of 1,024 ranks.
# - Awan et al. 2020 (HyPar-Flow), arXiv:1911.05146; Narayanan et al. 2021 (Megatron-LM), arXiv:2104.04473; Jia et al.
#   2018 (FlexFlow), arXiv:1807.05358.

# %% [markdown]
# ## Recap
#
# 1. A mesh gives each rank a coordinate on every axis: dp, pp and tp.
# 2. The axis that communicates most, tp, gets the fastest links; dp or pp can live with the slowest.
# 3. A gradient is added over the ranks that hold the same parameter, but have read different data.
# 4. Memory, bubble and links decide which grid is fastest, and all three can be computed before anything runs.
# 5. A model of time has assumptions: here the share of the peak that layers reach.
#
# <!-- terms -->
#
# **What you can do now:** lay out a training on a mesh, say which gradient is added where, and choose a grid under a
# memory limit.
#
# <!-- links -->
