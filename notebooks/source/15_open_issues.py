# %% [markdown]
# # 15 · What breaks
#
# **The number to reach:** goodput above 90% with a failure every two minutes.
#
# <!-- tracks -->
#
# Most first long runs fail. Here ranks are killed for real. You find out what that costs, and how little it
# can cost.

# %%
import torch

from hpdl_lab import lab
from hpdl_lab.resilience.kills import KillAt

lab.start(4)

# %% [markdown]
# ## The idea <!-- 1 homework 3 -->
#
# Ranks fail in three ways:
#
#     dead     its messages never come    all others wait    this notebook
#     slow     its messages come late     all others wait    15.4
#     wrong    its numbers are wrong      nobody waits       15.5
#
# A training that meets one of them has to go back to the last **checkpoint**, its state in a file. What was computed
# since then is lost.

# %% [markdown]
# ## Predict
#
# Four ranks train. One of them is killed by signal 9 (`kill -9`), so it can send nothing any more. How many seconds
# later do you read here that it is dead?

# %%
from pathlib import Path

run = {"steps": 100, "dtype": "float64", "checkpoint": Path("checkpoint_15.pt").resolve(), "checkpoint_every": 10}

# %% guess=[1]
my_notice = lab.guess("seconds until a killed rank is noticed", ...)

# %%
killer = KillAt(rank=2, call=45)  # rank 2, in its 45th all-reduce
try:
    lab.train(all_reduce=killer, **run)
except Exception as error:
    lab.reveal("seconds until a killed rank is noticed", killer.seconds_ago())
    print(error)

# %% [markdown]
# The laboratory watches its engines, so it says at once who is dead, and who waits in which call. Without such a
# watcher:
#
# - **MPI**: `mpiexec` sees that the process has ended, and ends all others. Ranks cannot go on without the dead one:
#   the MPI standard leaves that to an extension (ULFM).
# - **Gloo**: the connection breaks, and the other ranks raise an error. If the whole machine loses power, nothing
#   breaks: they wait for the time limit of the process group, 30 minutes if you set none.
# - **NCCL**: a kernel on each GPU waits for data that do not come. PyTorch's watchdog thread ends the processes after
#   10 minutes, if you set no other limit.
#
# `torchrun --max-restarts=3` then starts all ranks again, and your script has to find its checkpoint.

# %% [markdown]
# ## Measure: go on with three <!-- 1 homework 3 -->
#
# The checkpoint is that of step 40. New engines take some seconds. Then three ranks go on, and each takes a larger
# share of the same batches:

# %%
lab.restart()
three = lab.train(ranks=3, resume=True, **run)
four = lab.train(**run)  # without a break
apart = max(abs(a - b) for a, b in zip(three.losses, four.losses[40:], strict=True))
print(f"{len(three.losses)} steps on 3 ranks; losses differ from a run without a break by {apart:.0e}")
assert len(three.losses) == 60 and apart < 1e-10

# %% [markdown]
# Four steps were computed twice. The batch of a step depends on the seed and on the number of the step, and not on the
# number of ranks. So no example is left out, and none is seen twice.

# %% [markdown]
# ## Goodput <!-- 1 homework 3 -->
#
# **Goodput** is the share of the wall time in which a job does useful training. Writing a checkpoint is not useful,
# and neither is restarting. Training that is lost in a failure, and repeated, does not count either.
#
# Llama 3 405B was trained on 16,384 H100 GPUs. In 54 days the job was interrupted 466 times, and 419 of these
# interruptions were unexpected. More than 90% of the time was effective training (Llama Team 2024,
# arXiv:2407.21783).
#
# The **MTBF** of a GPU is the mean time between two of its failures. A single failure stops the job on all GPUs.
#
# ## Predict
#
# 16,384 GPUs had 419 failures in 54 days. How many years is the MTBF of one GPU? Count every unexpected interruption
# as the failure of a GPU.

# %% guess=[6]
my_years = lab.guess("years between two failures of one GPU", ...)

# %%
gpus, failed, seconds = 16_384, 419, 54 * 86_400
gpu_mtbf_s = seconds * gpus / failed
assert 5.7 < gpu_mtbf_s / (365.25 * 86_400) < 5.8
lab.reveal("years between two failures of one GPU", gpu_mtbf_s / (365.25 * 86_400))
print(f"the job fails every {seconds / failed / 3_600:.1f} hours")

# %% [markdown]
# A GPU fails every six years, and the job every three hours. These failures include those of memory, cables, network
# and software: all that can stop one rank.
#
# ## Exercise 15.1 ★★ The best checkpoint interval <!-- 1 homework 13 -->
#
# With short intervals, a job writes checkpoints most of the time. With long intervals, it repeats much training after
# each failure. Between the two lies the interval with the highest goodput.
#
# A **synchronous** checkpoint stops training while it is written. A checkpoint **in the background** is first copied
# to the memory of the CPU. Then training goes on during the write, a little slower.
#
# The check simulates months of eight jobs. It judges by **regret**: which share of the best goodput is lost with your
# interval. Up to 1% passes.

# %% exercise="hpdl_lab.resilience.interval:checkpoint_interval"

# %% check="hpdl_lab.resilience.interval:checkpoint_interval"

# %% [markdown]
# Your function on Llama 3. The paper does not state the write time: 30 s, and 300 s for a restart, are assumptions.
# `goodput` simulates 40 months, failure by failure. All intervals meet the same failures.

# %%
from hpdl_lab.resilience.interval import goodput

best_s = checkpoint_interval(30, gpu_mtbf_s, gpus)
shares = {times: goodput(times * best_s, 30, gpu_mtbf_s, gpus) for times in (0.5, 1, 4)}
assert shares[1] == max(shares.values())
print(*(f"every {times * best_s:5,.0f} s: goodput {share:.1%}" for times, share in shares.items()), sep="\n")

# %% [markdown]
# Half the best interval costs 1.7 points, and four times the interval costs 5.9. An interval that is off by a fifth
# costs hardly anything, so a rough MTBF is good enough.
#
# Real failures come in clusters: soon after a failure, another one is more likely. The simulation draws the times
# between failures from a Weibull distribution with shape 0.7, a shape found at Los Alamos (Schroeder &
# Gibson 2006). Young's formula assumes that failures have no memory, and is close to the best here as well.
#
# A restart takes equally long with every interval. So it lowers the goodput, and leaves the best interval where it is.
#
# In the background, with a slowdown of 0.1, the best interval is 258 s, and goodput rises from 90.9% to 95.1%.
# PyTorch's `torch.distributed.checkpoint.async_save` writes in the background.

# %% [markdown]
# ## Measure: goodput with a failure every two minutes <!-- 1 homework 5 -->
#
# So far the failures were simulated. Now a rank is killed in a real training, at X, and each second is accounted for:
#
#     |--steps--|save|--steps--|save|--steps X........|.........|--steps--|save|
#      useful    write useful    write repeated notice  restart   useful    write
#
# First, 200 steps without a failure. They say how long a step takes, and a checkpoint:

# %%
from hpdl_lab.data.dataset import digits
from hpdl_lab.models.mlp import mlp
from hpdl_lab.resilience.goodput import measure_goodput

job = lab.run, lab.restart, mlp(), digits()  # who trains, how to replace the engines, model, data
alone = measure_goodput(*job, steps=200, checkpoint_every=20, failures=0)

# %%
step_s, write_s = alone.useful_s / len(alone.losses), alone.write_s / alone.writes
every = max(1, round(checkpoint_interval(write_s, 120, 1) / step_s))  # your function; the job fails every 120 s
assert alone.goodput < 1 and alone.failures == 0
print(f"a step takes {1e3 * step_s:.1f} ms, a checkpoint {1e3 * write_s:.1f} ms: one every {every} steps")

# %% [markdown]
# ## Predict
#
# After one minute, rank 2 is killed. New engines start at once. The training goes on from the last checkpoint, and
# takes as many steps again: another minute. How many % of the whole time are useful?

# %% guess=[80]
my_goodput = lab.guess("% goodput with one failure in two minutes", ...)

# %%
broken = measure_goodput(*job, checkpoint_every=every, failures=1, every_s=60)
lost = broken.write_s + broken.repeated_s + broken.notice_s + broken.restart_s
assert broken.failures == 1 and abs(broken.useful_s + lost - broken.wall_s) < 1e-3
print(broken)
lab.reveal("% goodput with one failure in two minutes", 100 * broken.goodput)

# %% [markdown]
# Most of the lost time is the restart, which depends on the machine. Writes and repeated steps depend on your interval.
# A restart is new processes, `import torch`, and a checkpoint to read. Writing and repeating cost little, because the
# model is small and the interval is the best one. On a large job it may be the other way round. So measure the parts
# before you improve one of them.
#
# With a failure every two hours, this restart costs 60 times less of the goodput. The best interval then grows with the
# root of 60, about 8 times.

# %% [markdown]
# ## A job that dies while it saves <!-- 1 homework 2 -->
#
# A job can die at any moment, also while it writes a checkpoint. If that costs the last checkpoint as well, all
# training is lost. So a save never touches a file of the last checkpoint before the new one is whole.
#
# With ZeRO (08), each rank holds a **shard** of parameters and optimizer state. No rank has room for all of it, so each
# rank writes its own shard. A small file, the **manifest**, lists the shards: name, first element, length, and a
# checksum of the bytes (CRC). Here it is called `latest`. The **commit** is the moment at which `latest` names the new
# checkpoint. After a restart there may be fewer ranks. Each one reads from the files that overlap with its new shard.
#
# ## Predict
#
# Four ranks save step 10 and then step 20. The second save does 15 operations on the disk: each write counts twice,
# because a job can die before it and in the midst of it. The others are a rename, and removing four old files. The
# job is killed before each of the 15 operations, in turn. How often is step 10 loaded?

# %% guess=[8]
my_kills = lab.guess("kills of 15 after which step 10 is loaded", ...)

# %% [markdown]
# ## Exercise 15.2 ★★ A sharded checkpoint that survives <!-- 1 homework 16 -->
#
# `Disk` is a stand-in for a shared file system, and is the same for all ranks. Its `write` is not atomic: a kill
# during a write leaves half a file. Its `rename` is **atomic**: a kill leaves the old file or the new one, and
# nothing between.
#
# The check kills the job at every operation, on 1, 3 and 4 ranks. Then it loads what is left on another number of
# ranks, and saves again.

# %% exercise="hpdl_lab.resilience.shards:save_sharded"

# %% check="hpdl_lab.resilience.shards:save_sharded"

# %% [markdown]
# Your function on the job of the prediction. It is loaded on three ranks.

# %%
from hpdl_lab.resilience.shards import after_kills

loaded = after_kills(save_sharded, ranks=4, then=3)
assert set(loaded) <= {10, 20}
print(f"step loaded after each of {len(loaded)} kills: {loaded}")
lab.reveal("kills of 15 after which step 10 is loaded", loaded.count(10))

# %% [markdown]
# Before the commit, step 10 is loaded. After it, step 20 is loaded. With the library's function, the four shards take
# eight operations, and writing the manifest takes two. The rename is the commit: a kill before it loads step 10 for the
# eleventh time. Only four removals come after it. Another right answer may have other operations.
#
# A real file system needs more care: data may still be in the memory of a node after `write` returns. So programs call
# `fsync` on a file before they rename it. A CRC finds bytes that have changed on the disk since then.

# %% [markdown]
# ## Copies in a neighbor's memory <!-- 1 homework 6 -->
#
# A checkpoint in a file is slow to write, and slow to read after a failure. The memory of another host is faster. In
# **Gemini** (Wang et al. 2023), each host keeps copies of the training state of other hosts in its memory. A failure
# wipes the memory of one host. Its replacement gets the state from a neighbor:
#
#     rank        0        1        2        3
#     its own     s0       s1       s2       s3
#     copy of     s3       s0       s1       s2
#
# Four simulated ranks copy their shards to the next rank. Then rank 2 loses its memory:

# %%
from hpdl_lab.comm import sim
from hpdl_lab.resilience import neighbors

# %%
for rank, (before, after) in enumerate(sim.run(4, neighbors.lose_and_restore, [2])):
    print(rank, after.tolist(), "same bits:", torch.equal(before, after))
    assert torch.equal(before, after)

# %% [markdown]
# Rank 3 had the copy, and rank 2 has each bit of its shard again. Now rank 2 and rank 3 fail together:

# %%
try:
    sim.run(4, neighbors.lose_and_restore, [2, 3])
    raise AssertionError("both are lost, and nobody has the shard of rank 2")
except neighbors.AllCopiesLost as error:
    print(error)

# %% [markdown]
# So files are still needed, but rarely: when a host and all its copies are lost together. More copies make that rarer,
# and take more memory.
#
# ## Predict
#
# A model with 405 billion parameters is trained on 2,048 hosts with 8 GPUs each. A checkpoint has 12 bytes per
# parameter: weights and two moments in float32. How many GB of memory does each host need for one copy of the state of
# its neighbor?

# %% guess=[100]
my_copy = lab.guess("GB of memory per host for one copy", ...)

# %% [markdown]
# The goodput is simulated as in 15.1: a failure every 3 hours, 300 s for a restart, 30 s to write a file, and 50 GB/s
# between two hosts. In 5% of the failures, the next host is lost as well, for example if a rack loses power. In 5% of
# these, the one after it is lost, too.

# %%
llama = neighbors.ReplicatedJob(mtbf_s=10_800, write_s=30, shard_nbytes=405e9 * 12 / 2048, together=0.05)
shares = [llama.goodput(copies) for copies in range(4)]
assert shares[1] - shares[0] > shares[2] - shares[1] > 0
for copies, share in enumerate(shares):
    print(f"copies: {copies}, memory per host: {llama.memory(copies) / 1e9:.1f} GB, goodput {share:.1%}")
lab.reveal("GB of memory per host for one copy", llama.memory(1) / 1e9)

# %% [markdown]
# A host has a thousand GB or more, so the copies are cheap: the state is dealt out over 2,048 hosts. Without a copy,
# goodput is 90.7%. One copy brings it to 95.6%, the second to 96.6%, and a third adds less than half a point. What is
# left is mostly the 300 s of each restart, which no copy shortens.
#
# Why does the first copy gain most? It is sent in about 50 ms, and a file is written in 30 s. So a copy can be sent
# often, and a failure loses little. Only 5% of the failures still need the file, so it can be written more rarely.
#
# **Play**: what if hosts often fail together (`together`)? What if the file takes 300 s?

# %%
lab.explore("copies")

# %% [markdown]
# Failures that come together decide how many copies are needed. So copies go to hosts that do not fail together, such
# as in another rack, with another power supply.
#
# The model lets training stand still while a copy is sent. Gemini sends it while the network is idle. Its authors
# report a copy in each step without overhead, and a recovery that is more than 13 times as fast as that of earlier
# systems.

# %% [markdown]
# ## Take it home <!-- 1 homework 5 -->
#
# `torch.distributed.checkpoint.async_save` copies the state to the memory of the CPU, and writes in the background.
# Each rank writes its own files, such as `__0_0.distcp` of rank 0. Rank 0 writes `.metadata` last, under another name,
# and renames it. That is the commit. torch does not remove older checkpoints, and it has no `latest`: take the last
# folder with a `.metadata`. In this script, rank 1 dies in the second save, after the file of rank 0 has appeared.
# `hpdl watch` starts ranks as `torchrun` does, and names the first one that failed, of any script:

# %% tags=["take-home"]
# %%writefile take_home_15.py
"""A job dies in its second save: torchrun --standalone --nproc-per-node 2 take_home_15.py, then on 3 ranks: load"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


class DiesInTheMidst(dcp.FileSystemWriter):
    def write_data(self, *args):
        while rank == 1 and not os.path.exists("step-20/__0_0.distcp"):  # rank 0 writes it, and rank 1 dies then
            time.sleep(0.01)
        return super().write_data(*args) if rank == 0 else os._exit(1)


dist.init_process_group("gloo")
rank, size, mesh = dist.get_rank(), dist.get_world_size(), init_device_mesh("cpu", (dist.get_world_size(),))
tens = distribute_tensor(torch.full((1000,), 10.0), mesh, [Shard(0)])  # each rank holds its rows
if "load" not in sys.argv:
    dcp.async_save({"weights": tens}, checkpoint_id="step-10").result()  # result() waits for the commit
    dcp.async_save({"weights": 2 * tens}, storage_writer=DiesInTheMidst("step-20")).result()
state, whole = {"weights": 0 * tens}, [name for name in ("step-10", "step-20") if os.path.exists(f"{name}/.metadata")]
dcp.load(state, checkpoint_id=whole[-1])
assert torch.equal(state["weights"].full_tensor(), tens.full_tensor())
print(f"rank {rank} of {size} loaded {whole[-1]}: {state['weights'].to_local().numel()} elements\n", end="")
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 hpdl watch --nproc-per-node 2 take_home_15.py
print(out[out.index("It hangs or crashes") + 1])
assert "Rank 1 was ended with exit code 1" in out.n and not out.grep("loaded")

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 3 take_home_15.py load
print(*out.grep("loaded"), sep="\n")

# %% tags=["take-home"]
from shutil import rmtree

assert Path("step-20/__0_0.distcp").exists() and not Path("step-20/.metadata").exists()
assert sum(int(line.split()[-2]) for line in out.grep("loaded step-10")) == 1000
rmtree("step-10"), rmtree("step-20"), Path("checkpoint_15.pt").unlink()

# %% [markdown]
# Two ranks saved 500 rows each, and three ranks loaded 334, 334 and 332. The half-written `step-20` stayed on the disk:
# your script has to remove such folders.

# %% [markdown]
# ## Question to discuss
#
# A run on 1,000 GPUs fails twice a day. One failure costs 20 minutes until somebody starts it again, and 15 minutes of
# lost work. There is money for one change: checkpoints twice as fast, automatic restarts, or spare nodes. Which one,
# and what would you measure first?
#
# ## Open issues, and what next
#
# - **Failures together.** A rack without power takes the copies with it. Nobody publishes how often that happens.
# - **Without a restart.** ULFM for MPI, and torchft for PyTorch, let the living ranks go on at once.
#
# **What next?** Give your own script a checkpoint, kill it at a random moment, and compare the losses.
#
# ## Where to read the real code
#
# - `hpdl_lab/resilience/`: your functions, and `kills.py`; `hpdl_lab/parallel/checkpoint.py`: the checkpoints of
#   `lab.train`; `hpdl_lab/engines/`: who notices that a rank is dead.
# - Young 1974, doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016; Llama Team 2024,
#   arXiv:2407.21783; Wang et al. 2023 (Gemini), doi:10.1145/3600006.3613145.

# %% [markdown]
# ## Recap
#
# 1. A dead rank is noticed by who watches it; others only wait, for minutes if nobody has set a limit.
# 2. Goodput is useful time over wall time. The best interval grows with the root of the time between failures.
# 3. A checkpoint counts when its last write is done: new names, all ranks, then one atomic rename.
# 4. A copy in a neighbor's memory makes most failures cheap. The file is for failures that come together.
# 5. Measure where the lost time goes before you improve one of its parts.
#
# | term | what it means |
# |---|---|
# | goodput | useful time over wall time |
# | MTBF | mean time between failures, of a part or of the whole job |
# | checkpoint, commit | the state in files; the one operation that makes them the valid ones |
#
# **What you can do now:** choose an interval for checkpoints, write them so that a kill at any moment does no harm, and
# go on with another number of ranks.
#
# <!-- links -->
