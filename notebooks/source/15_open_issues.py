# %% [markdown]
# # 15 · What breaks
#
# **The number to reach:** goodput (the share of useful time) above 90%, with a failure every two minutes.
#
# <!-- tracks -->
#
# Long training runs fail: one rank dies, and the job stops. Here you kill ranks for real, measure the cost of a
# failure, and lower this cost.

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
#     wrong    its numbers are wrong      no rank waits      15.5
#
# After a failure, a training starts again from its last **checkpoint**: a file with the state of the training. The
# work since this checkpoint is lost.

# %% [markdown]
# ## Predict
#
# Four ranks train. Signal 9 (`kill -9`) ends one rank at once, so this rank sends no last message. After how many
# seconds does the notebook show that the rank is dead?

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
# The laboratory watches its engines, and shows at once which rank is dead, and in which call each other rank waits.
# Other systems react like this:
#
# - **MPI**: `mpiexec` sees that one process has ended, and ends the other processes. Only an extension of
#   MPI (ULFM) can go on without the dead rank.
# - **Gloo**: the connection to a dead process closes, and the other ranks raise an error. But if a whole machine
#   loses its power, its connections stay open. Then the other ranks wait for the time limit of the process group,
#   30 minutes by default.
# - **NCCL**: a kernel on each GPU waits for data that never come. PyTorch's **watchdog**, a thread that looks for
#   late collectives, ends the processes after 10 minutes by default.
#
# `torchrun --max-restarts=3` then starts all ranks again, and your script has to find its checkpoint.

# %% [markdown]
# ## Measure: go on with three <!-- 1 homework 3 -->
#
# Each step has one all-reduce, so rank 2 died in step 45. The last checkpoint is from step 40. `lab.restart()` starts
# new engines. Then three ranks go on, each with a larger share of the same batches:

# %%
lab.restart()
three = lab.train(ranks=3, resume=True, **run)
four = lab.train(**run)  # without a break
apart = max(abs(a - b) for a, b in zip(three.losses, four.losses[40:], strict=True))
print(f"{len(three.losses)} steps on 3 ranks; losses differ from a run without a break by {apart:.0e}")
assert len(three.losses) == 60 and apart < 1e-10

# %% [markdown]
# Steps 41 to 44 were computed twice. The losses agree, because a batch depends only on the seed and the step number,
# not on the number of ranks. So no example is lost or counted twice.

# %% [markdown]
# ## Goodput <!-- 1 homework 3 -->
#
# **Goodput** is the share of the wall time in which a job does useful training. Three things are not useful: writing
# a checkpoint, restarting, and training that a failure forces the job to repeat.
#
# Llama 3 405B was trained on 16,384 H100 GPUs. In 54 days, the training was interrupted 466 times, 419 times
# unexpectedly. Still, more than 90% of the time was effective training (Llama Team 2024, arXiv:2407.21783).
#
# The **MTBF** of a GPU is the mean time between two of its failures. If one GPU fails, the job stops on all GPUs.
#
# ## Predict
#
# How many years is the MTBF of one GPU? Count each of the 419 unexpected interruptions as the failure of one GPU.

# %% guess=[6]
my_years = lab.guess("years between two failures of one GPU", ...)

# %%
gpus, failed, seconds = 16_384, 419, 54 * 86_400
gpu_mtbf_s = seconds * gpus / failed
assert 5.7 < gpu_mtbf_s / (365.25 * 86_400) < 5.8
lab.reveal("years between two failures of one GPU", gpu_mtbf_s / (365.25 * 86_400))
print(f"the job fails every {seconds / failed / 3_600:.1f} hours")

# %% [markdown]
# One GPU fails every six years, but the job fails every three hours. The 419 failures include failures of memory,
# cables, network and software.
#
# ## Exercise 15.1 ★★ The best checkpoint interval <!-- 1 homework 13 -->
#
# Compute the checkpoint interval with the highest goodput. With short intervals, a job spends much time on writing
# checkpoints. With long intervals, the job repeats much training after each failure.
#
# A **synchronous** checkpoint stops training while it is written. A **background** checkpoint is first copied to the
# memory of the CPU. Then training goes on during the write, a little slower.
#
# The check simulates months of eight jobs. It computes your regret: the share of the best goodput that your interval
# loses. A regret up to 1% passes.

# %% exercise="hpdl_lab.resilience.interval:checkpoint_interval"

# %% check="hpdl_lab.resilience.interval:checkpoint_interval"

# %% [markdown]
# Here your function computes the interval for Llama 3. We assume 30 s for a write (the paper states no time), and 300
# s for a restart. `goodput` simulates 40 months, with the same failures for every interval:

# %%
from hpdl_lab.resilience.interval import goodput

best_s = checkpoint_interval(30, gpu_mtbf_s, gpus)
shares = {times: goodput(times * best_s, 30, gpu_mtbf_s, gpus) for times in (0.5, 1, 4)}
assert shares[1] == max(shares.values())
print(*(f"every {times * best_s:5,.0f} s: goodput {share:.1%}" for times, share in shares.items()), sep="\n")

# %% [markdown]
# Half the best interval costs 1.7 points of goodput, and four times the best interval costs 5.9. An interval that is
# off by a fifth costs hardly anything, so a rough MTBF is good enough.
#
# Real failures come in clusters: soon after a failure, another one is more likely. So the simulation draws the times
# between failures from a **Weibull distribution** with shape 0.7, as found at Los Alamos (Schroeder & Gibson 2006). A
# shape below 1 means clusters. The classic answer to 15.1, Young's formula (1974), assumes shape 1: a failure is
# equally likely at any moment. The formula still gives nearly the best interval.
#
# Restarts take equally long with every interval, so they do not change the best interval.
#
# With background checkpoints and a slowdown of 0.1, the best interval is 258 s, and goodput rises from 90.9% to
# 95.1%. PyTorch's `torch.distributed.checkpoint.async_save` writes such checkpoints.

# %% [markdown]
# ## Measure: goodput with a failure every two minutes <!-- 1 homework 5 -->
#
# Now a rank is killed in a real training. Each second belongs to one part, and the X marks the kill:
#
#     |--steps--|save|--steps--|save|--steps X........|.........|--steps--|save|
#      useful    write useful    write repeated notice  restart   useful    write
#
# First, 200 steps without a failure show how long a step and a checkpoint take:

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
# After one minute of training, rank 2 is killed. New engines start at once, load the last checkpoint, and repeat the
# lost steps. Then the training goes on for about another minute. What percentage of the whole time is useful?

# %% guess=[80]
my_goodput = lab.guess("% goodput with one failure in two minutes", ...)

# %%
broken = measure_goodput(*job, checkpoint_every=every, failures=1, every_s=60)
lost = broken.write_s + broken.repeated_s + broken.notice_s + broken.restart_s
assert broken.failures == 1 and abs(broken.useful_s + lost - broken.wall_s) < 1e-3
print(broken)
lab.reveal("% goodput with one failure in two minutes", 100 * broken.goodput)

# %% [markdown]
# Most of the lost time is the restart: new processes start, import torch, and read a checkpoint. The time of a restart
# depends on the machine. Writes and repeated steps depend on your interval, and cost little with this small model. On a
# large job, they may cost more than restarts.
#
# With a failure every two hours, restarts cost 60 times less goodput. The best interval then grows by a factor of
# about 8, the square root of 60.

# %% [markdown]
# ## A job that dies while it saves <!-- 1 homework 2 -->
#
# A job can also die while it writes a checkpoint. If the write has overwritten the last checkpoint, all training is
# lost. So a save must not touch the last checkpoint until the new one is complete.
#
# With ZeRO (08), each rank holds a shard of the parameters and the optimizer state. No rank has room for all shards,
# so each rank writes its own shard. A small file, the **manifest**, lists the name, first element, length and
# checksum (CRC) of each shard. Here the manifest is called `latest`. The **commit** is the moment at which `latest`
# names the new checkpoint. After a restart, there may be fewer ranks. Then each rank reads the files that overlap
# with its new shard.
#
# ## Predict
#
# Four ranks save step 10 and then step 20. The second save writes five files, renames one, and removes four old ones.
# A kill can come before a write or in the middle of a write, so each write counts as two operations. That makes 15
# operations. The job runs 15 times, and is killed before a different operation each time. After how many of these
# kills is step 10 loaded?

# %% guess=[8]
my_kills = lab.guess("kills of 15 after which step 10 is loaded", ...)

# %% [markdown]
# ## Exercise 15.2 ★★ A sharded checkpoint that survives <!-- 1 homework 16 -->
#
# Save a sharded checkpoint, so that a kill at any moment leaves a whole checkpoint. `Disk` is a stand-in for a file
# system that all ranks share. Its `rename` is **atomic**: after a kill, you find either the old file or the new file.
# Its `write` is not atomic: a kill during a write leaves half a file.
#
# The check kills the job at every operation, on 1, 3 and 4 ranks. Then another number of ranks loads the checkpoint,
# and saves again.

# %% exercise="hpdl_lab.resilience.shards:save_sharded"

# %% check="hpdl_lab.resilience.shards:save_sharded"

# %% [markdown]
# Now your function runs in this job. After each kill, three ranks load the checkpoint:

# %%
from hpdl_lab.resilience.shards import after_kills

loaded = after_kills(save_sharded, ranks=4, then=3)
assert set(loaded) <= {10, 20}
print(f"step loaded after each of {len(loaded)} kills: {loaded}")
lab.reveal("kills of 15 after which step 10 is loaded", loaded.count(10))

# %% [markdown]
# A kill before the commit leaves step 10, and a kill after the commit leaves step 20. With the library's function,
# the four shards take eight operations, and the manifest takes two. The commit, a rename, is operation 11.
# So 11 kills leave step 10, and 4 kills leave step 20.
#
# On a real file system, the data may still be in the memory of a node after `write` returns. So programs call `fsync`
# before the rename. `fsync` waits until the data are on the disk. A CRC finds bytes that changed on the disk later.

# %% [markdown]
# ## Copies in a neighbor's memory <!-- 1 homework 6 -->
#
# A checkpoint in a file is slow to write, and slow to read after a failure. The memory of another host is faster. In
# **Gemini** (Wang et al. 2023), each host keeps copies of the training state of other hosts in its memory. If a host
# fails, the new host gets the state from a neighbor:
#
#     rank        0        1        2        3
#     its own     s0       s1       s2       s3
#     copy of     s3       s0       s1       s2
#
# Each of four simulated ranks copies its shard to the next rank. Then rank 2 loses its memory:

# %%
from hpdl_lab.comm import sim
from hpdl_lab.resilience import neighbors

# %%
for rank, (before, after) in enumerate(sim.run(4, neighbors.lose_and_restore, [2])):
    print(rank, after.tolist(), "same bits:", torch.equal(before, after))
    assert torch.equal(before, after)

# %% [markdown]
# Rank 3 had a copy of the shard, so rank 2 gets every bit back. Now ranks 2 and 3 fail together:

# %%
try:
    sim.run(4, neighbors.lose_and_restore, [2, 3])
    raise AssertionError("both are lost, and nobody has the shard of rank 2")
except neighbors.AllCopiesLost as error:
    print(error)

# %% [markdown]
# Files are still needed, but only if a host and all hosts with its copies fail together. More copies make such
# failures rarer, but need more memory.
#
# ## Predict
#
# A model with 405 billion parameters is trained on 2,048 hosts with 8 GPUs each. A checkpoint has 12 bytes per
# parameter: the weight and two moments in float32. Each host keeps one copy of its neighbor's state. How many GB of
# memory does this copy take?

# %% guess=[100]
my_copy = lab.guess("GB of memory per host for one copy", ...)

# %% [markdown]
# We simulate the goodput as in 15.1. The job fails every 3 hours, a restart takes 300 s, and writing a file takes 30 s.
# The link between two hosts has 50 GB/s. In 5% of the failures of host h, host h + 1 fails, too, for example if their
# rack loses its power. In 5% of these double failures, host h + 2 fails, too.

# %%
llama = neighbors.ReplicatedJob(mtbf_s=10_800, write_s=30, shard_nbytes=405e9 * 12 / 2048, together=0.05)
shares = [llama.goodput(copies) for copies in range(4)]
assert shares[1] - shares[0] > shares[2] - shares[1] > 0
for copies, share in enumerate(shares):
    print(f"copies: {copies}, memory per host: {llama.memory(copies) / 1e9:.1f} GB, goodput {share:.1%}")
lab.reveal("GB of memory per host for one copy", llama.memory(1) / 1e9)

# %% [markdown]
# Copies are cheap: the state is sharded over 2,048 hosts, and each host has a thousand GB of memory or more. Goodput
# is 90.7% without a copy, 95.6% with one copy and 96.6% with two. A third copy adds less than half a point. The rest
# of the lost time is mostly the 300 s of each restart, which copies do not shorten.
#
# A copy is sent in about 50 ms, but a file is written in 30 s. So copies can be sent often, and a failure loses
# little. Only 5% of the failures still need a file, so files can be written more rarely.
#
# **Play**: what changes if hosts often fail together (`together`)? And if writing the file takes 300 s?

# %%
lab.explore("copies")

# %% [markdown]
# Failures that come together decide how many copies are needed. So put copies on hosts that rarely fail together, for
# example in racks with different power supplies.
#
# Gemini sends copies while the network is idle. Its authors report one copy per step without overhead, and a recovery
# more than 13 times as fast as in earlier systems.

# %% [markdown]
# ## Take it home <!-- 1 homework 5 -->
#
# `torch.distributed.checkpoint.async_save` copies the state to the memory of the CPU, and writes the copy in the
# background. Each rank writes its own file: rank 0 writes `__0_0.distcp`. Then rank 0 writes the manifest, and
# renames it to `.metadata`. This rename is the commit. torch writes no `latest`, and removes no older checkpoints. So
# load the newest folder that has a `.metadata`.
#
# In this script, rank 1 dies in the second save, after the file of rank 0 has appeared. `hpdl watch` starts any
# script as `torchrun` does, and names the first rank that failed:

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
# Two ranks saved 500 rows each, and three ranks loaded 334, 334 and 332. Your script has to remove incomplete folders
# like `step-20`.

# %% [markdown]
# ## Question to discuss
#
# A run on 1,000 GPUs fails twice a day. Each failure costs 20 minutes until somebody restarts the run, and 15 minutes
# of lost work. You can pay for one change: checkpoints twice as fast, automatic restarts, or spare nodes. Which one
# do you choose, and what do you measure first?
#
# ## Open issues, and what next
#
# - **Failures together.** If a rack loses its power, all copies on its hosts are lost. No published numbers
#   say how often hosts fail together.
# - **Without a restart.** With ULFM (MPI) or torchft (PyTorch), the other ranks go on at once.
#
# **What next?** Add checkpoints to your own script, kill it at a random moment, and compare the losses.
#
# ## Where to read the real code
#
# - `hpdl_lab/resilience/`: your functions, and `kills.py`; `hpdl_lab/parallel/checkpoint.py`: the checkpoints of
#   `lab.train`; `hpdl_lab/engines/`: how a dead rank is noticed.
# - Young 1974, doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016; Llama Team 2024,
#   arXiv:2407.21783; Wang et al. 2023 (Gemini), doi:10.1145/3600006.3613145.

# %% [markdown]
# ## Recap
#
# 1. A watcher notices a dead rank at once. Other ranks only wait, for minutes if no time limit is set.
# 2. Goodput is useful time over wall time. The best interval grows with the square root of the time between failures.
# 3. Write a checkpoint to new files, wait for all ranks, and commit it with one atomic rename.
# 4. With a copy in a neighbor's memory, most failures are cheap. A file is needed only if neighbors fail together.
# 5. Measure where time is lost before you improve one part.
#
# <!-- terms -->
#
# **What you can do now:** choose a checkpoint interval, write checkpoints that survive a kill, and go on with another
# number of ranks.
#
# <!-- links -->
