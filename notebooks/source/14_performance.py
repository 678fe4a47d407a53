# %% [markdown]
# # 14 · Where the time goes
#
# **The number to reach:** a chart that accounts for 95% of the time of a training step, and a step twice as fast.
#
# <!-- tracks -->
#
# A training step takes 200 ms. A **waterfall** is a chart of this time, with one bar for each use.

# %%
from hpdl_lab import lab
from hpdl_lab.performance.gpt_step import REPAIRS, gpt_step
from hpdl_lab.performance.machines import PROCESSORS

lab.start(4)

# %% [markdown]
# ## The idea <!-- 1 two days 5 -->
#
# At every moment of a step, each rank does one of seven things. The right column names the exercises:
#
#     waiting for input       |##                             14.5
#     Python and dispatch     |  ###                          14.4
#     memory-bound kernels    |     ######                    14.2
#     matrix products         |           #########           14.1, 14.2, 14.3
#     exposed communication   |                    #####      14.6, 14.7 (next notebook)
#     optimizer               |                         ##
#     imbalance               |                           ###
#
# - **Python and dispatch**: Python runs, or it starts an operation (dispatch).
# - **Memory-bound kernels** are all operations except matrix products. They move many bytes and compute little. Only
#   matrix products can reach the peak of a GPU.
# - **Exposed communication** is communication that no computation hides (06).
# - **Imbalance**: a rank waits for a message that another rank has not sent yet.
#
# A last bar, **unexplained**, is the measured time of the step minus all other bars.

# %% [markdown]
# ## Predict
#
# `gpt_step` trains a small GPT on two ranks. Its step is slow for six reasons. What share of the step do matrix
# products take?

# %% guess=[30]
my_products = lab.guess("% of the step in matrix products", ...)

# %%
first = lab.waterfall(gpt_step, ranks=2)
print(first)
products = first.share("matrix products")
print(f"explained {first.explained:.0%}")
lab.reveal("% of the step in matrix products", 100 * products)
assert 0 < products < 1

# %% [markdown]
# Most of the step is not spent in matrix products.
#
# The bars come from steps that `torch.profiler` recorded, minus the time that recording adds. Their sum should match
# the time of other steps, which ran without the profiler. If other programs use the machine, "unexplained" can exceed
# 5%: run the cell again.
#
# To measure your own step, call `lab.waterfall(make)`. Your `make(comm)` returns a function that makes one step per
# call.

# %% [markdown]
# ## Predict
#
# NVIDIA published a run of GPT-3 on 1,024 A100 GPUs: 32 s a step, at 44% of the peak (Megatron-LM, README.md; see 11).
# Backward recomputed all activations (08). The recomputed FLOPs keep the hardware busy, but the model does not need
# them. What share of the peak remains without them?

# %% guess=[33]
my_mfu = lab.guess("% of the peak that GPT-3 uses, without recomputation", ...)

# %% [markdown]
# ## Exercise 14.1 ★ MFU and HFU <!-- 1 two days 7 -->
#
# Compute which share of the peak a training uses, as MFU and as HFU.
#
# **MFU**, model FLOPs utilization, counts the FLOPs that the model needs: forward and backward, once. **HFU**, hardware
# FLOPs utilization, also counts recomputed FLOPs. A paper that states "45% of the peak" may mean MFU or HFU.
#
# Data sheets often print a peak with **sparsity**: 1,979 teraFLOP/s for an H100 in 16 bits. Only matrices with two
# zeros in every four numbers can reach this peak. Ordinary training is dense, with half the peak. The check compares
# your results with published trainings.

# %% exercise="hpdl_lab.performance.utilization:model_flops_utilization"

# %% check="hpdl_lab.performance.utilization:model_flops_utilization"

# %% [markdown]
# Your function on GPT-3: 96 layers of width 12,288, and steps of 1,536 sequences with 2,048 tokens.

# %%
a100, tokens_per_s = PROCESSORS["A100 SXM 80GB"].peak["bfloat16"], 1_536 * 2_048 / 32
mfu, hfu = model_flops_utilization(175e9, 96, 12_288, 2_048, tokens_per_s, 1_024, a100, recomputed=1)
assert abs(mfu - 0.332) < 0.001 and abs(hfu - 0.443) < 0.001
print(f"MFU {mfu:.1%}, HFU {hfu:.1%}")
lab.reveal("% of the peak that GPT-3 uses, without recomputation", 100 * mfu)

# %% [markdown]
# The 44% are an HFU; the MFU is 33%. With an MFU of 44%, the run would take three quarters of the time. So compare
# trainings by MFU.

# %% [markdown]
# ## Predict
#
# To generate a token, a language model multiplies one row per request by each weight matrix (13). An H100 reads 3.35
# TB/s from its memory and computes 989 teraFLOP/s in 16 bits. With few requests, reading the weights takes longer than
# the arithmetic. From which batch on does the arithmetic take longer? Take weights of 8,192 x 8,192 in 16 bits.

# %% guess=[300]
my_batch = lab.guess("least batch at which decoding on an H100 is bound by compute", ...)

# %% [markdown]
# ## Exercise 14.2 ★★ Which roof bounds a product <!-- 1 homework 12 -->
#
# Compute the FLOP/s that a matrix product reaches at best, and what bounds it: memory or compute.
#
# A **roofline** plots the best FLOP/s of a processor against the **arithmetic intensity**, the FLOPs per byte of memory
# traffic. The memory roof rises, and its slope is the bandwidth. The compute roof is flat: the peak. The two roofs meet
# at the **ridge**, where arithmetic and memory traffic take equally long. The check tries other processors.

# %% exercise="hpdl_lab.performance.bounds:attainable"

# %% check="hpdl_lab.performance.bounds:attainable"

# %% [markdown]
# Your function finds the batch:

# %%
h100 = PROCESSORS["H100 SXM"]
given = 2, h100.peak["bfloat16"], h100.bandwidth
batch = next(m for m in range(1, 8_192) if attainable(m, 8_192, 8_192, *given)[1] == "compute")
assert batch == 319
lab.reveal("least batch at which decoding on an H100 is bound by compute", batch)
print(f"ridge {h100.ridge('bfloat16'):.0f}")

# %% [markdown]
# If only weights moved, m rows would do 2 m FLOPs for each weight of 2 bytes: m FLOPs per byte. The ridge is 295 FLOPs
# per byte, so the batch would be 295 rows. Rows and results move as well, so it takes 319 rows.
#
# All requests of a batch share one read of the weights. Below 319 requests, memory takes longer than arithmetic, so one
# more request costs little time. Attention has no such gain: each request reads its own KV cache (13).

# %% [markdown]
# ## Predict
#
# A node has 56 cores: two processors, each with 28 cores and its own memory. One process with 56 threads can train on
# the cores, or 56 processes with one thread each, or any split between. A step has 448 images, and each image needs:
#
# - 5 ms of work that threads cannot divide, the **serial part**;
# - 0.3 s of arithmetic on one core, which threads divide;
# - 8 ms of memory traffic, which occupies one of the two memories.
#
# There are 100 MB of gradients, and all ranks together send 2 GB/s. (The cores are real; the other numbers are made
# up.) How many ranks train fastest?

# %% guess=[4]
my_ranks = lab.guess("ranks that train fastest on 56 cores", ...)

# %% [markdown]
# ## Exercise 14.3 ★★ Ranks and threads <!-- 2 homework 14 -->
#
# Choose how many ranks a node runs, so that a step is shortest. Three costs compete:
#
# - **Serial part**: while one thread does this work, the other threads of its rank wait.
# - **Communication**: more ranks send more bytes in the all-reduce.
# - **Memory**: on many nodes the cores are divided into **NUMA domains**, each with its own memory. Linux stores data
#   in the memory of the core that writes them first. So a rank with threads in several domains may use the memory of
#   only one domain.
#
# The check tries 11 other nodes. Your **regret** is how much longer a step takes with your split than with the best
# split. Up to 5% passes.

# %% exercise="hpdl_lab.performance.threads:split_cores"

# %% check="hpdl_lab.performance.threads:split_cores"

# %% [markdown]
# Your function on the node with 56 cores:

# %%
from hpdl_lab.performance.threads import measure_step, two_cores

ranks = split_cores(56, 28, 448, 5e-3, 0.3, 8e-3, 100e6, 2e9)
assert ranks in (4, 7, 8)  # with 7 or 8 ranks, the step is less than 5% longer
lab.reveal("ranks that train fastest on 56 cores", ranks)
print(f"{ranks} ranks x {56 // ranks} threads")

# %% [markdown]
# With one rank, a step takes 1.8 times as long as with the best split, and with 56 ranks 2.4 times as long. On
# Frontera, 2,048 such nodes trained ResNet-50 with 4 processes each (Jain et al. 2019, "Scaling TensorFlow, PyTorch,
# and MXNet using MVAPICH2"). For ResNet-152, several processes per node were up to 1.47 times as fast as one (Jain et
# al. 2019, "Performance Characterization of DNN Training").
#
# Now measure two cores of this machine. A small GPT trains with one rank of one thread, one rank of two threads, and
# two ranks of one thread. From these times, `two_cores` computes the arguments of your function. Two threads halve only
# the arithmetic. The time that is not halved is the serial part.

# %%
alone = [lab.run(measure_step, threads, ranks=[0])[0][0] for threads in (1, 2)]
computing, exchange = max(lab.run(measure_step, 1, ranks=[0, 1]))  # of the slower rank
assert min(*alone, computing, exchange) > 0
print(f"1 rank x 2 threads {alone[1]:.3f} s, 2 ranks x 1 {computing + exchange:.3f} s")
print("ranks that your function chooses:", split_cores(*two_cores(*alone, exchange)))

# %% [markdown]
# On idle cores, the two printed times are about equal. On busy cores, two threads in one rank can be slower than one
# thread: the threads wait for each other after every divided operation. Two ranks wait for each other only once per
# step.
#
# `OMP_NUM_THREADS=14 torchrun --nproc-per-node 4 train.py` starts 4 ranks x 14 threads. If you start
# several ranks without `OMP_NUM_THREADS`, `torchrun` gives each rank one thread. `numactl --cpunodebind=0 --membind=0`
# keeps a process and its data in domain 0.

# %% [markdown]
# ## Diagnose: six slow scripts <!-- 2 homework 4 -->
#
# Six scripts train the same model on the same texts, with the same losses. Each script has one fault that makes it
# slow. A **counter** counts events, and often shows the fault:
#
# - **syncs** (synchronizations): how often Python reads a number from a tensor. Python only queues work for a GPU, so
#   each read waits until the GPU has done all queued work.
# - **graphs, breaks**: `torch.compile` records a **graph** of operations at the first call, and runs the graph in later
#   calls. Another shape needs another graph: a **recompilation**. If Python has to act in the middle of a graph, this
#   graph ends and a second graph begins: a **graph break**. Each shape adds its own breaks.
# - **threads, cores**: how many threads all ranks of a node have together, and how many cores there are. With too few
#   cores, threads take turns.
# - **bytes waited for**: bytes that are copied to the GPU while Python waits. Ordinary memory is **pageable**: the
#   operating system may move it. So the driver first copies the bytes to **pinned** memory, which does not move.
# - **texts read, used**: how many texts one rank reads, and how many it trains on.
#
# There is no real GPU here: the CPU computes, and copies are counted. A seventh script has all six faults. Each of its
# six steps has another number of rows, and its compiled function calls `print`. How many graphs does `torch.compile`
# record?

# %% guess=[12]
my_graphs = lab.guess("graphs for six shapes, with a print in the middle", ...)

# %%
from hpdl_lab.performance import slow

counts = slow.table_of_runs()
print(counts)
assert counts.split()[-7:-4] == ["12", "6", "64"]  # graphs, breaks, threads
lab.reveal("graphs for six shapes, with a print in the middle", int(counts.split()[-7]))  # two for each shape

# %% [markdown]
# Which counter shows the fault of each script, A to F? Type numbers: 1 syncs, 2 graphs, 3 breaks, 4 threads, 5 bytes
# waited for, 6 texts read.

# %% guess=[2, 5, 3, 1, 4, 6]
my_counters = lab.guess("the counter that is wrong", {"A": ..., "B": ..., "C": ..., "D": ..., "E": ..., "F": ...})

# %%
print(slow.diagnosed(my_counters))

# %% [markdown]
# ## Exercise 14.4 ★★ Why is it slow? <!-- 2 homework 11 -->
#
# Repair the script with all six faults, and keep its losses. Check the script as it is, then repair one fault after the
# other. The check compares losses and counters.

# %% exercise="hpdl_lab.performance.slow:train_quickly"

# %% check="hpdl_lab.performance.slow:train_quickly"

# %% [markdown]
# `DataLoader(..., pin_memory=True)` collects batches in pinned memory, and `x.to("cuda",
# non_blocking=True)` copies without waiting. `DistributedSampler` gives each rank its own share of the examples.
# `TORCH_LOGS="graph_breaks,recompiles"` prints the reason of each graph break and recompilation.
# `torch.cuda.set_sync_debug_mode("warn")` warns at each synchronization.

# %% [markdown]
# ## Measure: `gpt_step` without three of its faults <!-- 2 homework 3 -->
#
# `gpt_step` computes with one sequence after the other, writes GELU as eight operations, and updates one parameter
# after the other. Each fault makes many small operations out of a few large ones. `gpt_step(comm, "dispatch", "memory",
# "optimizer")` has none of the three faults. The bars "Python and dispatch", "memory-bound kernels" and "optimizer"
# should be shorter than before (gray):

# %%
second = lab.waterfall(gpt_step, "dispatch", "memory", "optimizer", ranks=2, before=first)
print(second)

# %% [markdown]
# ## Input <!-- 3 homework 3 -->
#
# On a cluster, the examples of a training lie on one of three kinds of storage:
#
# - **node-local NVMe**: drives inside the node. Only processes of this node can read them, so a job first copies its
#   data there.
# - **burst buffer**: fast drives in front of the file system, reserved for a job while it runs.
# - **shared file system**, for example Lustre: all nodes read the same files. To open a file, a node asks a **metadata
#   server** which disks have the bytes of the file. All jobs share this server, so it sometimes answers slowly.
#
# If each example is a file, each example costs one request to the metadata server. A **shard**, a file with many
# examples, also costs one request. A **memory map** (`numpy.memmap`) presents a file as an array. A part is read at its
# first use, and all processes of the node share this part.
#
# In the last two columns, compare 1,000 files with one shard:

# %%
from hpdl_lab.performance import reading

print(reading.table_of_storages())
shared = reading.STORAGES[-1]
assert shared.seconds(1_000, 1e8) > 10 * shared.seconds(1, 1e8)

# %% [markdown]
# On the shared file system, the shard is 11 times as fast. The NVMe drives serve one node; the other two storages serve
# a whole cluster. The GB/s in the table are published. The lab assumes the time to open a file, and 1 to 2 GB/s for
# each reading process: typical values if few jobs use the storage.
#
# ## Predict
#
# **Workers** are processes that read batches while the step computes. A step takes 0.03 s, and a read 0.11 s on
# average. About 3 of 100 reads are slow: they take up to 8 times as long as usual. Memory has room for 24 batches. How
# many workers does the step need, so that waits add at most 1% to its time?

# %% guess=[8]
my_workers = lab.guess("workers for steps of 0.03 s and reads of 0.11 s, some of them slow", ...)

# %% [markdown]
# ## Exercise 14.5 ★★ Input that never starves <!-- 3 homework 14 -->
#
# Find the fewest workers with which a step hardly waits, and then the smallest **prefetch**: how many batches each
# worker reads ahead.
#
# A step **starves** if it waits for its input. Two arguments of torch's `DataLoader` prevent starving. `num_workers`
# says how many batches are read at the same time. `prefetch_factor` is the prefetch. Prefetched batches wait in memory.
# The step uses these batches while a read is slow.
#
# The times of reads vary: this is **jitter**. A slow server makes many slow reads in a row, and an average hides these
# reads. So simulate each batch of an epoch in **virtual time**: compute the times without waiting. To bridge even the
# slowest read, memory would need room for many batches. So this exercise lets waits add 1%. The check plays ten epochs.

# %% exercise="hpdl_lab.performance.reading:workers_and_prefetch"

# %% check="hpdl_lab.performance.reading:workers_and_prefetch"

# %% [markdown]
# Your function on the epoch of the prediction. Then torch's `DataLoader` reads 100 batches of this epoch from a real
# file. It sleeps to make each read as slow as planned.

# %%
reads, step = reading.trace(14), 0.03
pair = workers_and_prefetch(reads, step, 16, 24)
virtual, real = reading.play(reads[:100], step, *pair).seconds, reading.measure_loader(reads[:100], step, *pair)
assert [*pair] == [8, 3] and 0.9 * virtual < real < 10 * virtual
lab.reveal("workers for steps of 0.03 s and reads of 0.11 s, some of them slow", pair[0])
print(f"{pair}: {real:.2f} s, {real / virtual:.2f} of virtual time")

# %% [markdown]
# The printed ratio can exceed 1: real workers start one after another, but virtual workers start together.
#
# The average read needs 4 workers. With 4 workers and prefetch 6, waits add 5.1%: after a slow read, few batches are
# ready when the next slow read comes. With memory for 48 batches, 5 workers are enough. So memory can replace cores.
#
# The workers here only sleep, but workers that decode images keep their cores busy. If workers already read as fast as
# the storage delivers, more workers change nothing. The next epoch has other slow reads, so use a larger prefetch than
# this minimum.

# %% [markdown]
# ## Measure: two profilers, one step <!-- 3 homework 2 -->
#
# Can you trust a profiler? Two programs with different clocks record the same steps of DDP (06). `torch.profiler`
# records the operations of PyTorch. The laboratory's log records the messages. Both
# programs report the exposed communication of a step. Compare the two times:

# %%
from hpdl_lab.performance.two_profilers import ddp_step_seen_twice

seen = lab.run(ddp_step_seen_twice, ranks=[0, 1])
for rank, (by_torch, by_lab, step, _) in enumerate(seen):
    print(f"rank {rank}: torch.profiler {by_torch * 1e3:.1f} ms, the lab {by_lab * 1e3:.1f} ms, of {step * 1e3:.1f}")
    assert abs(by_torch - by_lab) < 0.05 * step

# %%
last = {rank: range(*found.last) for rank, found in enumerate(seen)}
lab.show([event for event in seen.events if event.t0_ns in last[event.rank]])

# %% [markdown]
# The two times agree within 5% of the step. In the timeline, the first bucket travels during backward. The second
# bucket is full only when backward has ended, so its communication is exposed.

# %% [markdown]
# ## Measure: the step twice as fast <!-- 3 homework 3 -->
#
# Three faults are left. Each sequence is in its own file. Each gradient is sent after backward, so no computation hides
# the communication. Rank 0 has three times as many sequences as rank 1. The next cell repairs all six faults. Which bar
# is now the longest?

# %%
last = lab.waterfall(gpt_step, *REPAIRS, ranks=2, before=first)
print(last)
print(f"{first.step_s / last.step_s:.1f} times as fast, {last.explained:.0%} explained")
assert last.step_s < first.step_s

# %% [markdown]
# Matrix products are the longest bar. On idle cores the step is typically more than twice as fast, and the bars
# explain more than 95%. To go on, you would use fewer bits, a larger batch, or a faster processor.

# %% [markdown]
# ## Take it home <!-- 3 homework 5 -->
#
# `profile_step.py` draws the same bars for any training script, and needs only torch. In the `torchrun` command, write
# `profile_step.py` before the name of your script. The tool also prints the share of the peak, and advice for the
# longest bars. Your script has to take at least 32 steps. Here is an example:

# %% tags=["take-home"]
# %%writefile take_home_14.py
"""A script with some faults: torchrun --standalone --nproc-per-node 2 profile_step.py take_home_14.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for (x,) in DataLoader(TensorDataset(torch.randn(40 * 128, 512)), batch_size=128):
    loss = model(x.requires_grad_()).square().mean()  # so that the first layer has two products in backward, too
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print("6 N D =", 6 * sum(w.numel() for w in model.parameters()) * len(x))
dist.destroy_process_group()

# %%
from shutil import copy

from hpdl_lab.performance import profile_step

tool = copy(profile_step.__file__, "profile_step.py")

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 profile_step.py take_home_14.py
print(out.n)

# %% tags=["take-home"]
# out is a list of lines, and out.grep(text) those that have this text
flops, needed = out.grep("FLOPs of a step")[0].split()[4][:-1], out.grep("6 N D")[0].split()[-1]
assert abs(float(flops) / float(needed) - 1) < 0.01
assert len(out.grep(" ms ")) == 9  # seven bars, unexplained, and the step

# %% [markdown]
# PyTorch's `FlopCounterMode` counts the FLOPs of the step. They are 6 N D, with N weights and D rows. Forward uses
# every weight once for each row, and backward twice. Each use is a multiplication and an addition. Recomputed FLOPs
# count too, as in HFU. The peak is measured with one large product.

# %% [markdown]
# ## Question to discuss
#
# A team's training reaches 22% MFU, and the team asks for twice as many GPUs. What do you measure first, and in which
# order? At which results do you say yes?
#
# ## Open issues, and what next
#
# - **Failures.** The training of Llama 3 on 16,384 GPUs was interrupted 466 times in 54 days: every three hours (Llama
#   Team 2024). How does a training go on without the lost ranks, and how often does it save its state?
# - **Stragglers.** All ranks wait for the slowest rank (03). Steps without this rank's gradient are faster, but change
#   the result.
# - **Slow links.** Clusters in different cities can share one training if they send less (DiLoCo in 07).
#
# **What next?** Profile a script of your own. Then make it data parallel (06), or divide its weights among the ranks
# (08). Compare its MFU before and after.
#
# ## Where to read the real code
#
# - `hpdl_lab/performance/profile_step.py` (the bars), `hpdl_lab/performance/gpt_step.py` (the slow step).
# - `utilization.py`, `bounds.py`, `threads.py`, `slow.py`, `reading.py` in the same folder: your five functions;
#   `machines.py`: processors with their sources; `two_profilers.py`.
# - Williams, Waterman and Patterson 2009 (roofline), doi:10.1145/1498765.1498785; Chowdhery et al. 2022 (PaLM, MFU and
#   HFU), arXiv:2204.02311.

# %% [markdown]
# ## Recap
#
# 1. A waterfall divides a step into bars. Their sum should match the time of a step without a profiler.
# 2. MFU counts the FLOPs that the model needs. HFU also counts recomputed FLOPs.
# 3. A product takes the longer of two times: FLOPs over the peak, or bytes over the bandwidth.
# 4. Counters show why a script is slow: synchronizations, graphs, threads, bytes, texts read.
# 5. Input has to be ready before the step needs it. Slow reads decide how many workers you need.
#
# <!-- terms -->
#
# **What you can do now:** find out where the time of a step goes, and why a script is slow.
#
# <!-- links -->
