# %% [markdown]
# # 15 · What breaks
#
# **The number to reach:** after a rank is killed, go on with fewer ranks, and have the same losses to 10⁻¹⁰.
#
# <!-- tracks -->
#
# Most first long runs fail. Here ranks are killed for real. You find out what that costs, how a training
# goes on, and which failures nobody notices.

# %%
import torch

from hpdl_lab import lab
from hpdl_lab.resilience.kills import KillAt

lab.start(4)

# %% [markdown]
# ## The idea
#
# Ranks fail in three ways:
#
#     dead     its messages never come    all others wait    noticed by a time limit
#     slow     its messages come late     all others wait    15.3
#     wrong    its numbers are wrong      nobody waits       15.4
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
    print(error, f"\n{killer.seconds_ago():.2f} s after its death; you guessed {my_notice}")

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
# ## Measure: go on with three
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
# ## Goodput
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
print(f"one GPU fails every {gpu_mtbf_s / (365.25 * 86_400):.1f} years; you guessed {my_years}")
print(f"the job fails every {seconds / failed / 3_600:.1f} hours")

# %% [markdown]
# A GPU fails every six years, and the job every three hours. These failures include those of memory, cables, network
# and software: all that can stop one rank.
#
# ## Exercise 15.1 ★★ The best checkpoint interval
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
# ## A job that dies while it saves
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
# ## Exercise 15.2 ★★ A sharded checkpoint that survives
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
print(f"step loaded after each kill: {loaded}")
print(f"step 10 after {loaded.count(10)} of {len(loaded)} kills; you guessed {my_kills}")

# %% [markdown]
# Before the commit, step 10 is loaded. After it, step 20 is loaded. With the library's function, the four shards take
# eight operations, and writing the manifest takes two. The rename is the commit: a kill before it loads step 10 for the
# eleventh time. Only four removals come after it. Another right answer may have other operations.
#
# A real file system needs more care: data may still be in the memory of a node after `write` returns. So programs call
# `fsync` on a file before they rename it. A CRC finds bytes that have changed on the disk since then.

# %% [markdown]
# ## Predict
#
# A dead rank is noticed: the others wait for a message until a time limit ends (PyTorch gives NCCL 10 minutes). A slow
# rank is noticed by nobody. Its messages come late, and they come.
#
# In a synchronous training, all ranks wait for the slowest one in each step. Take 64 ranks, and one of them runs at
# half speed: it needs twice as long for everything in a step. Which throughput is left?

# %% guess=[50]
my_left = lab.guess("% of the throughput that is left with one of 64 ranks at half speed", ...)

# %% [markdown]
# All wait for the slow rank, so half of the throughput is left. Without it, 63 ranks reach 98%. So a slow rank costs
# more than a dead one that was replaced or left out. But which rank is slow? All ranks take equally long for a step.
# Here is one step of a training with six simulated ranks, and one of them is slow:

# %%
from hpdl_lab.resilience.stragglers import backup_workers, make_lanes, steps_per_s, unknown

lanes = unknown(seed=10)
print(f"half is left; you guessed {my_left}%")
lab.show([event for steps in lanes for event in steps[4]])

# %% [markdown]
# ## Exercise 15.3 ★★ Slow is worse than dead: name the straggler
#
# A **straggler** is a rank for which the others wait, step after step. It may have a slow core, such as a processor
# that is too hot, or slow input, or a slow link to the next rank. Waiting ranks are no stragglers: a "recv" can be long
# because the message is sent late. And each rank is slow now and then, so one step tells little.
#
# `OPS` has the operations of each cause.
#
# The check has other trainings: 4 to 16 ranks, each cause, small and large factors. In some of them, another rank
# stands still once, for about a second. In some, no rank is slow.

# %% exercise="hpdl_lab.resilience.stragglers:find_straggler"

# %% check="hpdl_lab.resilience.stragglers:find_straggler"

# %% [markdown]
# Your function on the training above, and the same training without its straggler:

# %%
rank, cause = find_straggler(lanes)
repaired = make_lanes(6, seed=10)
assert (rank, cause) == (4, "core") and find_straggler(repaired) == (-1, "none")
print(f"rank {rank}, {cause}: {steps_per_s(lanes):.1f} steps/s, and repaired {steps_per_s(repaired):.1f}")

# %% [markdown]
# The straggler is the rank that waits least. In a ring, the others wait for their neighbors, which wait for it: the
# longest wait leads away from the cause. A slow link shows in no wait, because all messages of the ring become late.
# That is why the function measures what a rank needs, and not how long it waits.
#
# On real nodes, clocks differ. Compare the ranks' own work first: seconds of input, forward and backward on each rank
# need no common clock. Links are then measured one pair at a time, while nothing else runs.

# %% [markdown]
# ## Measure: backup workers
#
# What if nobody looks for the straggler? With **backup workers** (Chen et al. 2016, arXiv:1604.00981), more ranks
# compute than needed. Each step takes the gradients that come first and drops the rest. Here 8 ranks train a regression
# in virtual time. With 1 backup, 7 gradients are used. One rank owns all rare examples, and only these need the second
# weight. First the ranks are equally fast on average, then this rank is three times slower:

# %%
luck = [backup_workers(backups) for backups in (0, 1)]
slow = [backup_workers(backups, slowdown=3) for backups in (0, 1)]
for name, (all_used, dropped) in {"by luck": luck, "always the same": slow}.items():
    print(f"slowest rank {name}:", f"all used: {all_used}", f"slowest dropped: {dropped}", sep="\n    ")
assert luck[1].rare < 0.02 and slow[1].steps_per_s > 1.8 * slow[0].steps_per_s
assert slow[1].common < 0.02 < 0.5 < slow[1].rare

# %% [markdown]
# If the slowest rank is another one each time, dropping it gives about 20% more steps per second, and all examples are
# still learned. If it is always the same rank, dropping doubles the steps per second, and its examples are never
# learned. The mean loss of 8 ranks hides that: look at the loss of each kind. So backup workers help against bad luck.
# A rank that is always slow has to be found, and repaired.

# %% [markdown]
# ## Predict
#
# A processor may compute a wrong result, and a link or a memory may flip a bit, without any error. This is **silent
# data corruption**. Meta tested hundreds of thousands of machines and found hundreds of such processors (Dixit et al.
# 2021, arXiv:2102.11245). The training of Llama 3 had 419 unexpected interruptions in 54 days, and 6 of them were
# silent data corruption (arXiv:2407.21783, table 5). Those are the ones that were noticed.
#
# Each message of a ring all-reduce can carry checksums. Three ranks reduce 10,000 float64 numbers. How many more bytes
# does it take to find one flipped bit, and to say which rank sent it, and when?

# %% guess=[0.1]
my_percent = lab.guess("% more bytes, to find a flipped bit and its sender", ...)

# %% [markdown]
# First, the plain ring of 04 on four simulated ranks. Rank 1 sends its first message, and one bit of the exponent of
# one gradient flips on the way.

# %%
from functools import partial

from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.resilience.checksums import flip, ring_of_shares, tree_all_reduce, with_flips

# %%
x, fault = torch.full((12,), 0.01, dtype=torch.float64), {(1, 0): partial(flip, i=2, bit=61)}  # rank 1, hop 0
for rank, (_, total) in enumerate(sim.run(4, with_flips, x, ring.all_reduce, fault)):
    print(rank, total[:4].tolist())

# %% [markdown]
# Element 2 is 0.03 in place of 0.04: the flip made the gradient of one rank nearly 0. With bit 62 it would be about
# 1e306. All ranks have the same wrong sum. They agree, so comparing the ranks does not help. No rank raised an error,
# and the sum does not say where the fault came in. After the next optimizer step, all replicas of the model have it.
#
# ## Exercise 15.4 ★★ One flipped bit
#
# The checksum of a sum is the sum of the checksums. This is **algorithm-based fault tolerance** (Huang & Abraham 1984).
# Two helpers are there: `checksums(c)` returns the sum and the weighted sum of a chunk. `differ(a, b, tolerance)` says
# whether two pairs of checksums differ by more than their tolerance. `chunk(x, p, i)` is that of 04.
#
# Floats round, so the two sides differ a little even without a fault. The tolerance decides: if it is too small, there
# are false alarms; if it is too large, flipped bits go through. Your function is judged on numbers from 1e-12 to 1e12,
# also on numbers that cancel.

# %% exercise="hpdl_lab.resilience.checksums:checked_all_reduce"

# %% check="hpdl_lab.resilience.checksums:checked_all_reduce"

# %% [markdown]
# Your function on the same fault:

# %%
noted = [out for out, _ in sim.run(4, with_flips, x, checked_all_reduce, fault)]
assert noted == [[], [], [(1, 0)], []]
print("(rank, hop) noted by each rank:", noted)
print(f"{100 * 2 * 3 / 10_000:.2f}% more bytes on 3 ranks; you guessed {my_percent}")

# %% [markdown]
# Two numbers per message are enough, however long the message is. Rank 2 names rank 1 and hop 0. If the same rank is
# named again in other runs, take its node out. If not, go back to the last checkpoint. A flip that changes less than
# rounding does is not found. It changes the sum by no more than rounding does.
#
# The checksums see faults on the links and in the additions. They do not see a gradient that was already wrong before
# the all-reduce.

# %% [markdown]
# ## The same bits on 1, 2, 3 and 4 ranks
#
# Another way to find silent corruption is to compute a step again, on other ranks, and to compare the bits. For that,
# a sum must not depend on the number of ranks. Here are 64 example gradients in float32. Each rank adds those of its
# share, and a ring adds the ranks:

# %%
examples = torch.randn(64, 1000, generator=torch.Generator().manual_seed(15))
rings = [sim.run(p, ring_of_shares, examples)[0] for p in (1, 2, 3, 4)]
print("other bits than on 1 rank:", [int((total != rings[0]).sum()) for total in rings], "of 1,000")
assert not torch.equal(rings[0], rings[2])

# %% [markdown]
# Floating-point addition is not associative: (a + b) + c and a + (b + c) may round differently. A ring adds in an
# order that depends on the number of ranks. A fixed binary tree over the numbers of the examples does not: examples
# 0 and 1 are always added first, then 2 and 3, then the two sums.
#
# With 3 ranks, a share does not end at a node of the tree. So each rank adds as far as its share goes (`tree_sum`), and
# sends the nodes that are left. All ranks then go on in the same tree.

# %%
trees = [sim.run(p, tree_all_reduce, examples)[0] for p in (1, 2, 3, 4)]
assert all(torch.equal(total, trees[0]) for total in trees)
print("the tree: the same bits on 1, 2, 3 and 4 ranks")

# %% [markdown]
# The price is traffic: with 3 ranks, up to five sums of a rank go to all others, in place of one. The same bits also
# need the same kernels: a gradient of one example must not depend on the batch that it was computed in.

# %% [markdown]
# ## Fewer ranks, and then more
#
# A node is broken, and its replacement comes tomorrow. So a job goes on with fewer ranks, and later with more. This is
# **elastic training**. Nobody should be able to tell from the weights. Then a step may depend on its number, and not on
# the ranks:
#
#     examples     the next places of the epoch: each example once, also in the epoch of a kill
#     gradient     the mean of the whole batch, also if the ranks have uneven shares
#     Adam         both moments of each weight, and the number of the update
#
# ## Predict
#
# With ZeRO-1 (08), each rank holds the moments of its own shard. 1,000 ranks train, and one of them is lost. The other
# 999 go on: rank r holds the r-th of 999 equal shards. How much of the optimizer state is then on another rank?

# %% guess=[10]
my_moved = lab.guess("% of the optimizer state on another rank with 999 ranks", ...)

# %%
from hpdl_lab.resilience.elastic import in_lives, make_task, stays

moved = 1 - stays(999_000, before=1000, after=999)
assert abs(moved - 0.5) < 1e-3 and abs(1 - stays(12, before=4, after=3) - 0.5) < 1e-3
print(f"{moved:.0%} of the state is on another rank; you guessed {my_moved}%")

# %% [markdown]
# Half of it moves, for any number of ranks. Rank 0 keeps its shard, and the last rank keeps almost nothing. Between
# them, the share that a rank keeps falls evenly. So a moment belongs to an element, and not to a rank: each rank reads
# the elements that it needs now, whoever wrote them.

# %% [markdown]
# ## Exercise 15.5 ★★★ Go on with fewer, then with more
#
# Your function trains from the checkpoint on the disk to a given step. It uses `save_sharded` of 15.2. The check kills
# it at every operation of the disk, and before and after each gradient. Then it goes on with fewer ranks, and then with
# more. After that come 200 random kills. It compares each step with one rank that trains without a break.

# %% exercise="hpdl_lab.resilience.elastic:train_elastic"

# %% check="hpdl_lab.resilience.elastic:train_elastic"

# %% [markdown]
# Your function on four simulated ranks, killed at a random operation, then on three, killed again, then on four:

# %%
task = make_task(n=12, examples=70, batch=32)
ranks = in_lives(train_elastic, task, [4, 3, 4], until=24, seed=1)
(alone,) = in_lives(train_elastic, task, [1], until=24, seed=1)
apart = max(float((weights - alone).abs().max()) for weights in ranks)
assert apart < 1e-10
print(f"weights differ from those of one rank without a break by {apart:.0e}")

# %% [markdown]
# The steps after the last checkpoint were computed twice. Their first results are lost, so each example still counts
# once. The weights are not equal in every bit: with another number of ranks, a sum is added in another order.
#
# A real job has more state: the random numbers of dropout, the scale of the loss in float16, the schedule of the
# learning rate, and a data loader with its own place. Whatever is missing starts again, and no error tells you. In
# PyTorch, `torch.distributed.checkpoint` loads shards on another number of ranks. The place in the epoch is your task:
# a data loader that saves the place of each rank does not fit another number of ranks.

# %% [markdown]
# ## Take it home
#
# `torch.distributed.checkpoint.async_save` copies the state to the memory of the CPU, and writes in the background.
# Each rank writes its own files, such as `__0_0.distcp` of rank 0. Rank 0 writes `.metadata` last, under another name,
# and renames it. That is the commit. torch does not remove older checkpoints, and it has no `latest`: take the last
# folder with a `.metadata`. In this script, rank 1 dies in the second save, after the file of rank 0 has appeared:

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
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_15.py
assert not out.grep("loaded")

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
# - **Memory of a neighbor.** A copy of the state in another node's memory takes seconds where a file takes minutes.
# - **Without a restart.** ULFM for MPI, and torchft for PyTorch, let the living ranks go on at once.
# - **Trust.** Checksums find a flipped bit in a sum, and not in a product. Who checks the products?
#
# **What next?** Give your own script a checkpoint, kill it at a random moment, and compare the losses.
#
# ## Where to read the real code
#
# - `hpdl_lab/resilience/`: your functions, and `kills.py`; `hpdl_lab/parallel/checkpoint.py`: the checkpoints of
#   `lab.train`; `hpdl_lab/engines/`: who notices that a rank is dead.
# - Young 1974, doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016; Llama Team 2024,
#   arXiv:2407.21783; Huang and Abraham 1984, doi:10.1109/TC.1984.1676475; Dixit et al. 2021, arXiv:2102.11245; Chen et
#   al. 2016, arXiv:1604.00981.

# %% [markdown]
# ## Recap
#
# 1. A dead rank is noticed by who watches it; others only wait, for minutes if nobody has set a limit.
# 2. Goodput is useful time over wall time. The best interval grows with the root of the time between failures.
# 3. A checkpoint counts when its last write is done: new names, all ranks, then one atomic rename. If a step depends
#    on its number, and not on the ranks, another number of ranks goes on from it.
# 4. The straggler is the rank that waits least. Compare computing, time per byte, and input, over many steps.
# 5. The checksum of a sum is the sum of the checksums: two numbers per message find a flipped bit, and say where.
#
# | term | what it means |
# |---|---|
# | goodput | useful time over wall time |
# | MTBF | mean time between failures, of a part or of the whole job |
# | checkpoint, commit | the state in files; the one operation that makes them the valid ones |
# | straggler | a rank that is slower than the others |
# | silent data corruption | a wrong number without an error |
# | elastic training | a training that goes on with another number of ranks |
#
# **What you can do now:** choose an interval for checkpoints, write them so that a kill at any moment does no harm, go
# on with another number of ranks, and find the rank that is slow or wrong.
#
# <!-- links -->
