# %% [markdown]
# # 14 · Where the time goes
#
# **The number to reach:** 95% of a training step explained, and the same step twice as fast.
#
# <!-- tracks -->
#
# A step takes 200 ms. Where are they? A **waterfall** shows it: one bar for each use of its time. The sections of
# this notebook explain the bars.

# %%
from hpdl_lab import lab
from hpdl_lab.performance.gpt_step import REPAIRS, gpt_step
from hpdl_lab.performance.machines import PROCESSORS

lab.start(4)

# %% [markdown]
# ## The idea <!-- 1 homework 5 -->
#
# At every moment of a step, each rank does one of these things:
#
#     waiting for input       |##                             14.5
#     Python and dispatch     |  ###                          14.4
#     memory-bound kernels    |     ######                    14.2
#     matrix products         |           #########           14.1, 14.2, 14.3
#     exposed communication   |                    #####      14.6, 14.7 (next notebook)
#     optimizer               |                         ##
#     imbalance               |                           ###
#
# - **Python and dispatch**: no operation runs, or one is being started (dispatch).
# - **Memory-bound kernels** are the operations that are no matrix products: they move many bytes, and compute little.
#   Only matrix products can reach the peak of a GPU.
# - **Exposed communication** is what no computing hides (06). Its two exercises are in
#   [14 · Frameworks, processors, links and their price](14_platforms.ipynb).
# - **Imbalance**: a rank waits for a message that another rank has not sent yet.
#
# A last bar, **unexplained**, is the measured time of a step minus all other bars.

# %% [markdown]
# ## Predict
#
# `gpt_step` trains a small GPT on two ranks. It is slow for six reasons. Which share of its step do matrix products
# take?

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
# Some steps were timed as they are, and others were recorded by `torch.profiler`, in turns. The bars come from the
# recorded steps, without what recording costs. Their sum should be the time of the steps that were not recorded:
# "unexplained" is the difference. On a machine with other work it can be more than 5%. Then run the cell again.
#
# `lab.waterfall` takes your own step as well: a function of a communicator that returns a function without arguments,
# which makes one step. Inside it, `torch.distributed` works as usual.

# %% [markdown]
# ## Predict
#
# NVIDIA published a run of GPT-3 on 1,024 A100 GPUs: 32 s a step, and 44% of the peak (Megatron-LM, README.md; see
# 11). Backward recomputed all activations (08). Those FLOPs keep the hardware busy, and the model does not need them.
# Which share of the peak does the model use?

# %% guess=[33]
my_mfu = lab.guess("% of the peak that GPT-3 uses, without recomputation", ...)

# %% [markdown]
# ## Exercise 14.1 ★ MFU and HFU <!-- 1 homework 7 -->
#
# **MFU**, model FLOPs utilization, is the share of the peak that the model needs: forward and backward, once.
# **HFU**, hardware FLOPs utilization, is the share of the peak that the hardware computes: recomputation counts, too.
# A paper that says "45% of the peak" may mean either of them.
#
# Both need the right peak. Data sheets often print the peak with **sparsity**, which holds for matrices with two
# zeros in every four numbers: 1,979 teraFLOP/s for an H100 in 16 bits. Ordinary training is dense, and has half of
# that.

# %% exercise="hpdl_lab.performance.utilization:model_flops_utilization"

# %% check="hpdl_lab.performance.utilization:model_flops_utilization"

# %% [markdown]
# Your function on GPT-3: 96 layers 12,288 wide, and steps of 1,536 sequences with 2,048 tokens.

# %%
a100, tokens_per_s = PROCESSORS["A100 SXM 80GB"].peak["bfloat16"], 1_536 * 2_048 / 32
mfu, hfu = model_flops_utilization(175e9, 96, 12_288, 2_048, tokens_per_s, 1_024, a100, recomputed=1)
assert abs(mfu - 0.332) < 0.001 and abs(hfu - 0.443) < 0.001
print(f"MFU {mfu:.1%}, HFU {hfu:.1%}")
lab.reveal("% of the peak that GPT-3 uses, without recomputation", 100 * mfu)

# %% [markdown]
# A run without recomputation that shows the same 44% finishes in three quarters of the time. So compare trainings by
# MFU.

# %% [markdown]
# ## Predict
#
# To generate a token, a language model multiplies one row per request by each weight matrix (13). An H100 reads 3.35
# TB/s from its memory and computes 989 teraFLOP/s in 16 bits. With few requests it waits for the weights. At which
# batch does decoding on an H100 stop being bound by memory? Take weights of 8,192 x 8,192 in 16 bits.

# %% guess=[300]
my_batch = lab.guess("least batch at which decoding on an H100 is bound by compute", ...)

# %% [markdown]
# ## Exercise 14.2 ★★ Which roof bounds a product <!-- 1 homework 12 -->
#
# A **roofline** shows the FLOP/s that a processor can reach at best, against the **arithmetic intensity**, the FLOPs
# per byte of memory traffic. It has two roofs. The memory roof rises with the intensity; its slope is the bandwidth.
# The compute roof is flat: the peak. They meet at the **ridge**, where arithmetic and memory take equally long. In 05
# you saw the memory roof alone.

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
# If only weights moved, m rows would do 2 m FLOPs for each weight of 2 bytes, which is m FLOPs per byte. Then the
# batch would be the ridge, 295. Rows and results move as well, so it is 319 here, and closer to 295 for larger
# weights. Up to this batch, more requests cost hardly any time. Attention gains nothing: each request reads its own
# cache (13).

# %% [markdown]
# ## Predict
#
# A node has 56 cores: two processors with 28 cores each, and each processor has its own memory. One process with 56
# threads can train on them, or 56 processes with one thread each, or something between. A step has 448 images. For
# each image, 5 ms of work cannot be divided among threads: the **serial part**. The arithmetic of an image takes 0.3
# s on one core, and the memory of one processor moves its bytes in 8 ms. There are 100 MB of gradients, and all ranks
# together send 2 GB/s. (The cores are those of a real node; the other numbers are made up.) How many ranks train
# fastest?

# %% guess=[4]
my_ranks = lab.guess("ranks that train fastest on 56 cores", ...)

# %% [markdown]
# ## Exercise 14.3 ★★ Ranks and threads <!-- 2 homework 14 -->
#
# Many threads in one rank wait together for its serial part. Many ranks send more. There is a third question, memory.
# On many nodes the cores are divided into **domains** (NUMA domains), each with its own memory. Linux stores data in
# the memory of the core that writes them first. So all threads of a rank may read from the memory of a single domain.
#
# The check knows 11 other nodes. It judges by **regret**: how much longer a step takes with your split than with the
# best one. Up to 5% passes.

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
# With a single rank the step takes 1.8 times as long, and with 56 ranks 2.4 times. Frontera has such nodes, and
# ResNet-50 was trained there with 4 processes on each of 2,048 nodes (Jain et al. 2019, "Scaling TensorFlow, PyTorch,
# and MXNet using MVAPICH2"). For ResNet-152, several processes per node were up to 1.47 times as fast as a single one
# (Jain et al. 2019, "Performance Characterization of DNN Training").
#
# Now measure on two cores of this machine. A small GPT trains with one rank of one thread, one rank of two threads,
# and two ranks of one thread. `two_cores` makes the arguments of your function from the first two times and from the
# time of the all-reduce. Time that a second thread does not save counts as the serial part.

# %%
alone = [lab.run(measure_step, threads, ranks=[0])[0][0] for threads in (1, 2)]
computing, exchange = max(lab.run(measure_step, 1, ranks=[0, 1]))  # of the slower rank
assert min(*alone, computing, exchange) > 0
print(f"1 rank x 2 threads {alone[1]:.3f} s, 2 ranks x 1 {computing + exchange:.3f} s")
print("ranks that your function chooses:", split_cores(*two_cores(*alone, exchange)))

# %% [markdown]
# On idle cores both splits are close. If other programs use the cores, one rank with two threads can be slower than
# one thread: after each divided operation, both threads wait for the later one. Two ranks wait for each other once
# per step.
#
# At work, `OMP_NUM_THREADS=14 torchrun --nproc-per-node 4 train.py` starts 4 ranks x 14 threads. Without the
# variable, `torchrun` gives each of several ranks one thread. `numactl --cpunodebind=0 --membind=0` keeps a process
# and its data in domain 0.

# %% [markdown]
# ## Diagnose: six slow scripts <!-- 2 homework 4 -->
#
# Six scripts train the same model, and all get the same losses. Each has one fault that makes it slow. A time depends
# on the machine, and shows no cause. A **counter** often shows the cause:
#
# - **syncs**, synchronizations: how often Python reads a number from a tensor. Python only queues the work of a GPU.
#   To know a number, it has to wait until the GPU has done all that was queued before.
# - **graphs, breaks**: `torch.compile` records a **graph** of operations at the first call, and runs it from then on.
#   Another shape needs another graph: a **recompilation**. If Python has to do something in between, the graph ends,
#   and a second one begins: a **graph break**. It counts once for each shape.
# - **threads, cores**: of the whole node, all ranks together. With more threads than cores, threads take turns.
# - **bytes waited for**: bytes that are copied to the GPU while Python waits. Ordinary memory is **pageable**: the
#   operating system may move it. So the driver first copies the bytes to **pinned** memory, which stays at its place.
# - **texts read, used**: by one rank.
#
# The GPU here is a stand-in: the CPU computes, and copies are counted. A seventh script has all six faults. It takes
# six steps; the number of rows is different in each, and there is a `print` in the middle of the compiled function.
# How many graphs does `torch.compile` record?

# %% guess=[12]
my_graphs = lab.guess("graphs for six shapes, with a print in the middle", ...)

# %%
from hpdl_lab.performance import slow

counts = slow.table_of_runs()
print(counts)
assert counts.split()[-7:-4] == ["12", "6", "64"]  # graphs, breaks, threads
lab.reveal("graphs for six shapes, with a print in the middle", int(counts.split()[-7]))  # two for each shape

# %% [markdown]
# Diagnose A to F before you read code: which counter is wrong? Type its number: 1 syncs, 2 graphs, 3 breaks, 4 threads,
# 5 bytes waited for, 6 texts read.

# %% guess=[2, 5, 3, 1, 4, 6]
my_counters = lab.guess("the counter that is wrong", {"A": ..., "B": ..., "C": ..., "D": ..., "E": ..., "F": ...})

# %%
print(slow.diagnosed(my_counters))

# %% [markdown]
# ## Exercise 14.4 ★★ Why is it slow? <!-- 2 homework 11 -->
#
# The cell holds the script with all six faults. Check it as it is, then repair one fault after the other.

# %% exercise="hpdl_lab.performance.slow:train_quickly"

# %% check="hpdl_lab.performance.slow:train_quickly"

# %% [markdown]
# In PyTorch, `DataLoader(..., pin_memory=True)` collects batches in pinned memory, and `x.to("cuda",
# non_blocking=True)` copies without waiting. `DistributedSampler` gives each rank its own share.
# `TORCH_LOGS="graph_breaks,recompiles"` prints both with their reasons, and `torch.cuda.set_sync_debug_mode("warn")`
# warns at each synchronization.

# %% [markdown]
# ## Measure: without three of its faults <!-- 2 homework 3 -->
#
# `gpt_step` computes with one sequence after the other, writes GELU as eight operations, and updates one parameter
# after the other. Each fault makes many small operations out of a few large ones. `gpt_step(comm, "dispatch",
# "memory", "optimizer")` has none of the three. The earlier bars are gray:

# %%
second = lab.waterfall(gpt_step, "dispatch", "memory", "optimizer", ranks=2, before=first)
print(second)

# %% [markdown]
# ## Input <!-- 3 homework 3 -->
#
# A training reads each example once per **epoch**, one pass over the data. On a cluster, the examples lie on one of
# three kinds of storage:
#
# - **node-local NVMe**: drives inside the node. Only its own processes can read them, so data are copied there first.
# - **burst buffer**: fast drives in front of the file system, reserved for a job while it runs. Some centers use the
#   word for the drives inside the nodes.
# - **shared file system**: all nodes read the same files. Lustre is one. To open a file, a node asks a **metadata
#   server** which disks have its bytes. All jobs share this server, so at times it answers slowly.
#
# If each example is a file, each needs such a question. A **shard** is a file with many examples: one question for
# all of them. With a **memory map** (`numpy.memmap`), a program uses a file as an array. The operating system reads a
# part of the file when the program first uses it, and all processes of the node share the parts that have been read.

# %%
from hpdl_lab.performance import reading

print(reading.table_of_storages())
shared = reading.STORAGES[-1]
assert shared.seconds(1_000, 1e8) > 10 * shared.seconds(1, 1e8)

# %% [markdown]
# The NVMe is that of one node, and the other two serve a whole machine. The GB/s are published. The milliseconds are
# made up, and so are the 1 to 2 GB/s of a single reader, from which the last two columns follow. Both have a usual
# order of magnitude for a quiet storage.
#
# ## Predict
#
# **Workers** are processes that read batches while the step computes. Reading a batch takes 0.11 s on average. About
# 3 of 100 reads are slow: they take up to 8 times as long as usual. A step takes 0.03 s. There is memory for 24
# batches. How many workers does the step need, so that waits add at most 1% to its time?

# %% guess=[8]
my_workers = lab.guess("workers for steps of 0.03 s and reads of 0.11 s, some of them slow", ...)

# %% [markdown]
# ## Exercise 14.5 ★★ Input that never starves <!-- 3 homework 14 -->
#
# A step **starves** if it waits for its input. Two numbers of torch's `DataLoader` prevent that. `num_workers` says
# how many batches are read at the same time. Each worker takes one core away from the ranks. `prefetch_factor` says
# how many batches each worker may read ahead: while one read is slow, the step lives on batches that are ready. They
# need memory.
#
# Reads vary: this is **jitter**. While a server is slow, there are many slow reads in a row. An average does not show
# that, so simulate an epoch batch by batch. Zero waiting needs enough batches in memory for the slowest read of all,
# so waits may add 1%.

# %% exercise="hpdl_lab.performance.reading:workers_and_prefetch"

# %% check="hpdl_lab.performance.reading:workers_and_prefetch"

# %% [markdown]
# Your function on the epoch of the prediction. Then torch's `DataLoader` reads 100 of its batches from a real file. A
# disk is faster than this epoch, so the reader is slowed down: after each piece it sleeps until the piece is due.

# %%
reads, step = reading.trace(14), 0.03
pair = workers_and_prefetch(reads, step, 16, 24)
virtual, real = reading.play(reads[:100], step, *pair).seconds, reading.measure_loader(reads[:100], step, *pair)
assert [*pair] == [8, 3] and 0.9 * virtual < real < 10 * virtual
lab.reveal("workers for steps of 0.03 s and reads of 0.11 s, some of them slow", pair[0])
print(f"{pair}: {real:.2f} s, {real / virtual:.2f} of virtual time")

# %% [markdown]
# In virtual time all workers start together; real ones start one after another.
#
# The average read needs 4 workers. With 4, and prefetch 6, waits add 5.1%: after a slow read the memory fills slowly,
# and the next slow read comes before it is full. With memory for 48 batches, 5 workers are enough, so memory can
# replace cores.
#
# Two things are missing here. A worker that decodes images keeps its core busy; this one only sleeps. And a storage
# has a limit: if the workers together read as much as it delivers, more workers change nothing. The next epoch has
# other slow reads, so in practice use a larger prefetch than this minimum.

# %% [markdown]
# ## Measure: two profilers, one step <!-- 3 homework 2 -->
#
# Can you trust a profiler? Here two of them record the same steps of DDP (06). `torch.profiler` names the operations of
# PyTorch. The laboratory's own log names the messages, as in every timeline since 03. They are different programs, with
# different clocks. Both say how long the step waits for communication that nothing hides:

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
# The first bucket travels during backward. The second one is full when backward has ended, so that the ranks wait for
# it: that is the exposed part.

# %% [markdown]
# ## Measure: the step twice as fast <!-- 3 homework 3 -->
#
# Three faults are left. Each sequence is a file of its own; each gradient is sent after backward, and nothing hides
# it; and rank 0 has three times as many sequences as rank 1. Without all six:

# %%
last = lab.waterfall(gpt_step, *REPAIRS, ranks=2, before=first)
print(last)
print(f"{first.step_s / last.step_s:.1f} times as fast, {last.explained:.0%} explained")
assert last.step_s < first.step_s

# %% [markdown]
# On idle cores it is typically more than twice as fast, and more than 95% are explained. Matrix products now take the
# largest part. To go on, use fewer bits, a larger batch, or a faster processor.

# %% [markdown]
# ## Take it home <!-- 3 homework 5 -->
#
# `profile_step.py` needs nothing but torch. Put it before the name of your own script: it draws the same bars, says
# which share of the peak the step reaches, and what to do about the longest bars. The script below stands for yours.
# A script has to take 32 steps at least:

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
# PyTorch's `FlopCounterMode` counts the FLOPs of the step. They are 6 N D, with N weights and D rows: every weight is
# used once for each row in forward, and twice in backward, and each use is a multiplication and an addition. With
# recomputation there are more: that is HFU. The peak is measured: one large product on this processor.

# %% [markdown]
# ## Question to discuss
#
# A team shows you a training at 22% MFU, and asks for twice as many GPUs. What do you measure first, and in which
# order? At which results do you say yes?
#
# ## Open issues, and what next
#
# - **Failures.** The training of Llama 3 was interrupted 466 times in 54 days on 16,384 GPUs: every three hours
#   (Llama Team 2024). How does a training go on without the lost ranks, and how often does it save its state?
# - **Stragglers.** All ranks wait for the slowest (03). To leave its gradient out saves time, but changes the result.
# - **Slow links.** Clusters in different cities can share one training if they send less (DiLoCo in 07).
#
# **What next?** Put `profile_step.py` before a script of your own. Then make it data parallel (06), or cut its model
# into shards (08), and compare its MFU before and after.
#
# ## Where to read the real code
#
# - `hpdl_lab/performance/profile_step.py` (the bars), `hpdl_lab/performance/gpt_step.py` (the slow step).
# - `utilization.py`, `bounds.py`, `threads.py`, `slow.py`, `reading.py` in the same folder: your five functions;
#   `machines.py`: processors with their sources; `two_profilers.py`.
# - Williams, Waterman and Patterson 2009 (roofline), doi:10.1145/1498765.1498785; Chowdhery et al. 2022 (PaLM, MFU
#   and HFU), arXiv:2204.02311.

# %% [markdown]
# ## Recap
#
# 1. A waterfall divides a step into bars. Their sum is compared with a time that was measured without a profiler.
# 2. MFU counts the FLOPs that the model needs, HFU all that the hardware computes. Recomputation is the difference.
# 3. A product takes the longer of two times: FLOPs over the peak, bytes over the bandwidth.
# 4. Counters say why a script is slow: synchronizations, graphs, threads, bytes, texts read.
# 5. Input has to be ready before the step asks for it. The slow reads, not the average, say how many workers that
#    needs.
#
# | term | what it means |
# |---|---|
# | MFU, HFU | share of the peak: of the FLOPs that the model needs; of all that are computed |
# | roofline | FLOP/s that can be reached, against FLOPs per byte: a slope, then a flat roof |
# | arithmetic intensity, ridge | FLOPs per byte of memory traffic; the intensity at which the two roofs meet |
# | graph break, recompilation | `torch.compile` ends a graph and goes on in Python; it traces again for new shapes |
# | waterfall | one bar for each use of a step's time, and one for what is not explained |
# | regret | how much longer a step takes with your choice than with the best one |
# | starve, shard, burst buffer | wait for input; a file with many examples; fast drives in front of the file system |
#
# **What you can do now:** say where the time of a step goes, for any script; find out why it is slow; and read "45% of
# the peak" in a paper and ask the right question.
#
# <!-- links -->
