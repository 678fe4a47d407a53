# %% [markdown]
# # 15 · Other ranks
#
# **The number to reach:** after a kill, fewer ranks go on, with the same losses to 10⁻¹⁰.
#
# <!-- tracks -->
#
# A training can go on with fewer ranks, and later with more. It also goes on, without an error, if ranks are slow,
# numbers are wrong, or weights are old.

# %%
import torch

from hpdl_lab import lab
from hpdl_lab.comm import sim

lab.start(4)

# %% [markdown]
# ## The idea <!-- 1 homework 3 -->
#
#     fewer    a rank is lost                others go on        15.3
#     slow     its messages come late        all others wait     15.4
#     wrong    its numbers are wrong         no rank waits       15.5
#     stale    its weights are old           no rank waits       see "Two kinds of ranks"

# %% [markdown]
# ## Fewer ranks, and then more <!-- 1 homework 5 -->
#
# A node is broken, and its replacement comes tomorrow. In **elastic training**, the job goes on with fewer ranks, and
# later with more. The number of ranks must not change the weights. So three things must depend only on the step number:
#
#     examples     the next ones in the order of the epoch: each counts once, also after a kill
#     gradient     the mean of the whole batch, also if the ranks' shares differ by an example
#     Adam         both moments of each weight, and the number of the update
#
# ## Predict
#
# With ZeRO-1 (08), each rank holds the moments of its own shard. 1,000 ranks train, and one of them is lost. The
# other 999 ranks go on, and rank r now holds the r-th of 999 equal shards. What percentage of the optimizer state has
# to move to another rank?

# %% guess=[10]
my_moved = lab.guess("% of the optimizer state on another rank with 999 ranks", ...)

# %%
from hpdl_lab.resilience.elastic import in_lives, make_task, stays

moved = 1 - stays(999_000, before=1000, after=999)
assert abs(moved - 0.5) < 1e-3 and abs(1 - stays(12, before=4, after=3) - 0.5) < 1e-3
lab.reveal("% of the optimizer state on another rank with 999 ranks", 100 * moved)

# %% [markdown]
# Half of the state moves, for any number of ranks. Rank 0 keeps its whole shard, and the last rank keeps almost
# nothing. In between, the kept share falls evenly. So a checkpoint stores Adam's moments by element, not by rank. Each
# rank reads the elements of its new shard.

# %% [markdown]
# ## Exercise 15.3 ★★★ Go on with fewer, then with more <!-- 1 homework 20 -->
#
# Write a training that goes on from the checkpoint on the disk to a given step, with any number of ranks. Save with
# `save_sharded` of 15.2. The check kills the training at every operation of the disk, and before and after each
# gradient. Then fewer ranks go on, and later more. The check also makes 200 random kills. Each step must equal the
# step of one rank that is never killed.

# %% exercise="hpdl_lab.resilience.elastic:train_elastic"

# %% check="hpdl_lab.resilience.elastic:train_elastic"

# %% [markdown]
# Here your function runs on four simulated ranks, and is killed at a random operation. Three ranks go on and are
# killed, too. Then four ranks finish:

# %%
task = make_task(n=12, examples=70, batch=32)
ranks = in_lives(train_elastic, task, [4, 3, 4], until=24, seed=1)
(alone,) = in_lives(train_elastic, task, [1], until=24, seed=1)
apart = max(float((weights - alone).abs().max()) for weights in ranks)
assert apart < 1e-10
print(f"weights differ from those of one rank without a break by {apart:.0e}")

# %% [markdown]
# The steps after the last checkpoint were computed twice. Their first results are lost, so each example still counts
# once. The weights differ in their last bits, because the order of additions depends on the number of ranks.
#
# A real job has more state: random numbers of dropout, the loss scale of float16, the learning-rate schedule, the
# place in the epoch. State that is not in the checkpoint starts from its first value, without an error. In PyTorch,
# `torch.distributed.checkpoint` loads shards on another number of ranks. Your script has to save the place in the
# epoch, once for all ranks.

# %% [markdown]
# ## Predict
#
# In a synchronous training, one of 64 ranks runs at half speed. What percentage of the throughput is left?

# %% guess=[50]
my_left = lab.guess("% of the throughput that is left with one of 64 ranks at half speed", ...)

# %% [markdown]
# All ranks wait for the slow rank, so half of the throughput is left. Without this rank, 63 ranks reach 98%. So a
# slow rank costs more than a dead rank. All ranks take equally long for a step, so step times do not show which rank
# is slow. Here is one step of six simulated ranks. Which rank is slow?

# %%
from hpdl_lab.resilience.stragglers import backup_workers, make_lanes, steps_per_s, unknown

lanes = unknown(seed=10)
lab.reveal("% of the throughput that is left with one of 64 ranks at half speed", 100 / 2)
lab.show([event for steps in lanes for event in steps[4]])

# %% [markdown]
# ## Exercise 15.4 ★★ Slow is worse than dead: name the straggler <!-- 2 homework 14 -->
#
# Name the **straggler** and its cause. A straggler is a rank for which the others wait, step after step. The cause is
# a slow core (such as a hot processor), slow input, or a slow link to the next rank. A rank that waits is no
# straggler: its "recv" is long if the message is sent late. Each rank is slow now and then, so one step tells little.
#
# `OPS` lists, for each cause, the operations that this cause makes longer.
#
# The check has other trainings: 4 to 16 ranks, each cause, small and large delays. In some trainings, another rank
# stops once, for about a second. In other trainings, no rank is slow.

# %% exercise="hpdl_lab.resilience.stragglers:find_straggler"

# %% check="hpdl_lab.resilience.stragglers:find_straggler"

# %% [markdown]
# Your function judges the training of the picture, and the same training without its straggler:

# %%
rank, cause = find_straggler(lanes)
repaired = make_lanes(6, seed=10)
assert (rank, cause) == (4, "core") and find_straggler(repaired) == (-1, "none")
print(f"rank {rank}, {cause}: {steps_per_s(lanes):.1f} steps/s, and repaired {steps_per_s(repaired):.1f}")

# %% [markdown]
# The straggler is the rank that waits least. In a ring, all other ranks wait for a neighbor. So the longest wait may be
# far from the straggler. A slow link delays all messages of the ring, so waits do not show the slow link. This is why
# your function has to measure work and transfers, not waits.
#
# On real nodes, clocks differ. So first compare the seconds of input, forward and backward, which need no common
# clock. Then measure the links, one pair at a time, while nothing else runs.

# %% [markdown]
# ## Measure: backup workers <!-- 2 homework 3 -->
#
# With **backup workers** (Chen et al. 2016, arXiv:1604.00981), you need not find the straggler. Each step takes the
# gradients that come first, and drops the rest. Here 8 ranks fit a linear model with two weights in **virtual time**:
# a simulated clock counts the seconds that an operation would take. With 1 backup, each step uses 7 gradients. Only
# rare examples train the second weight, and one rank owns all rare examples. In the first run, all ranks are equally
# fast on average. In the second run, the rank with the rare examples is three times slower. Compare the speed, and
# the loss on rare examples:

# %%
luck = [backup_workers(backups) for backups in (0, 1)]
slow = [backup_workers(backups, slowdown=3) for backups in (0, 1)]
for name, (all_used, dropped) in {"by luck": luck, "always the same": slow}.items():
    print(f"slowest rank {name}:", f"all used: {all_used}", f"slowest dropped: {dropped}", sep="\n    ")
assert luck[1].rare < 0.02 and slow[1].steps_per_s > 1.8 * slow[0].steps_per_s
assert slow[1].common < 0.02 < 0.5 < slow[1].rare

# %% [markdown]
# If the slowest rank changes, dropping its gradient gives about 20% more steps per second, and the model still learns
# all examples. If the same rank is always the slowest, dropping its gradient doubles the steps per second, but the
# model never learns the rare examples. The mean loss hides this, so look at the loss of each kind of examples. If a
# rank is always slow, repair it.

# %% [markdown]
# ## Predict
#
# A processor can compute a wrong result, and a link or a memory can flip a bit, without any error. This is **silent
# data corruption**. Meta tested hundreds of thousands of machines and found hundreds of such processors (Dixit et al.
# 2021, arXiv:2102.11245). In the training of Llama 3, such corruption was found in 6 of 419 unexpected interruptions
# (arXiv:2407.21783, table 5).
#
# Each message of a ring all-reduce can carry checksums. Checksums find one flipped bit, its sender, and the step of
# the ring. Three ranks reduce 10,000 float64 numbers. How many % more bytes do the checksums take?

# %% guess=[0.1]
my_percent = lab.guess("% more bytes, to find a flipped bit and its sender", ...)

# %% [markdown]
# First, the plain ring of 04 runs on four simulated ranks. A **hop** is one step of the ring: each rank sends one
# message to the next rank. At hop 0, one bit of an exponent flips in the message of rank 1. Look at element 2:

# %%
from functools import partial

from hpdl_lab.collectives import ring
from hpdl_lab.resilience.checksums import flip, ring_of_shares, tree_all_reduce, with_flips

# %%
x, fault = torch.full((12,), 0.01, dtype=torch.float64), {(1, 0): partial(flip, i=2, bit=61)}  # rank 1, hop 0
for rank, (_, total) in enumerate(sim.run(4, with_flips, x, ring.all_reduce, fault)):
    print(rank, total[:4].tolist())

# %% [markdown]
# Element 2 is 0.03 instead of 0.04: the flip made the gradient of one rank nearly 0. Bit 62 would have made it about
# 1e306. All ranks have the same wrong sum, so comparing ranks does not help. No rank raised an error, and the sum
# does not show where the fault happened.
#
# ## Exercise 15.5 ★★ One flipped bit <!-- 2 homework 16 -->
#
# Write a ring all-reduce that notes which message went wrong. The checksum of a sum is the sum of the checksums.
# Finding faults by this rule is **algorithm-based fault tolerance** (Huang & Abraham 1984). `checksums(c)` returns two
# numbers: the sum of a chunk, and its weighted sum with weights 1, 2, 3 ... `differ(a, b, tolerance)` returns whether
# two pairs of checksums differ by more than the tolerance. `chunk(x, p, i)` is the function of 04.
#
# Floats are rounded, so two checksums differ a little even without a fault. A small tolerance gives false alarms, and a
# large tolerance misses flipped bits. The check uses numbers from 1e-12 to 1e12, and some sums are near 0.

# %% exercise="hpdl_lab.resilience.checksums:checked_all_reduce"

# %% check="hpdl_lab.resilience.checksums:checked_all_reduce"

# %% [markdown]
# Your function runs with the same fault:

# %%
noted = [out for out, _ in sim.run(4, with_flips, x, checked_all_reduce, fault)]
assert noted == [[], [], [(1, 0)], []]
print("(rank, hop) noted by each rank:", noted)
lab.reveal("% more bytes, to find a flipped bit and its sender", 100 * 2 * 3 / 10_000)  # on 3 ranks

# %% [markdown]
# Two numbers are enough for a message of any length. Rank 2 names rank 1 and hop 0. After such an alarm, go back to
# the last checkpoint. If later runs name the same rank, take its node out. A flip smaller than rounding is not found,
# but changes the sum no more than rounding does.
#
# Checksums find faults on the links and in the additions, but not a gradient that was wrong before the all-reduce.

# %% [markdown]
# ## The same bits on 1, 2, 3 and 4 ranks <!-- 2 homework 4 -->
#
# Another way to find silent corruption is to repeat a step on other ranks, and to compare the bits. For this
# comparison, a sum must not depend on the number of ranks. Here each rank adds its share of 64 example gradients in
# float32. Then a ring adds the results of the ranks:

# %%
examples = torch.randn(64, 1000, generator=torch.Generator().manual_seed(15))
rings = [sim.run(p, ring_of_shares, examples)[0] for p in (1, 2, 3, 4)]
print("other bits than on 1 rank:", [int((total != rings[0]).sum()) for total in rings], "of 1,000")
assert not torch.equal(rings[0], rings[2])

# %% [markdown]
# Floating-point addition is not associative: (a + b) + c and a + (b + c) may be rounded differently. A ring adds in
# an order that depends on the number of ranks. A binary tree over the examples always adds in the same order. The
# tree adds examples 0 and 1, then examples 2 and 3, and then the two sums.
#
# With 3 ranks, a rank's share may end between two examples that the tree adds. So each rank adds the pairs within its
# share, and sends the sums that still lack a partner. Then all ranks finish the same tree.

# %%
trees = [sim.run(p, tree_all_reduce, examples)[0] for p in (1, 2, 3, 4)]
assert all(torch.equal(total, trees[0]) for total in trees)
print("the tree: the same bits on 1, 2, 3 and 4 ranks")

# %% [markdown]
# The price is traffic: with 3 ranks, a rank sends up to five sums to all others, instead of one sum. Another number
# of ranks also changes the batch of each rank. For another batch size, a library may choose another kernel, which
# rounds differently. So the kernel has to be fixed, too.

# %% [markdown]
# ## Two kinds of ranks <!-- 3 homework 10 -->
#
# In **reinforcement learning**, a model is trained on its own answers. A **rollout** is one answer, and a **reward** is
# a number that says how good the answer is. Generating and training are different work (13): decoding reads the weights
# once for each token, and training does large matrix products. So large jobs have two kinds of ranks:
#
#     rank 0, generates    [ 0 ][ 1 ][ 2 ]        [ 3 ][ 4 ][ 5 ]
#                            |    |    |      ^     |    |    |      ^
#     ranks 1 to 3, train       [ 0 ][ 1 ][ 2 ]|       [ 3 ][ 4 ][ 5 ]|
#
# The lines down are batches of rollouts, and the arrows up are new weights, here after every 3 updates. Batch 2 is
# used after updates 0 and 1, but it was generated before both updates. The **staleness** of a batch is the number of
# updates in between, here 2.
#
# The model of 13 has read Moby-Dick. The reward of a rollout is the share of vowels among its 24 characters. The
# training method, REINFORCE (Williams 1992), makes a rollout more probable if its reward is above the mean of its
# batch, and otherwise less probable. The training ranks add their gradients as in 06. First, rank 0 gets new weights
# after each update, so no batch is stale:

# %%
from hpdl_lab.inference import weights
from hpdl_lab.inference.rollouts import RolloutPlan, reinforce, share_of

job = weights.load("moby_dick"), weights.encode("The whale "), share_of(weights.encode("aeiou"))

# %%
fresh = lab.run(reinforce, *job, RolloutPlan(every=1), deadline=60)[0]
for update in (0, 4, 8, 23):
    print(f"update {update:2}: reward {fresh.rewards[update]:.2f}, {weights.decode(fresh.first[update])!r}")
print(f"reward of all updates: {sum(fresh.rewards) / 24:.2f}; {fresh.tokens_per_s:,.0f} tokens/s")
assert min(fresh.rewards[-4:]) > 0.9 > 0.5 > fresh.rewards[0]

# %% [markdown]
# The reward rises to 1, but the text is only a row of vowels: English was not part of the reward. This is **reward
# hacking**. A penalty on the distance from the first model (the KL divergence) keeps the text readable.
#
# ## Predict
#
# In the last run, the training ranks wait while rank 0 generates. Then rank 0 waits while the others train. If weights
# are sent every 8 updates, both kinds of ranks work at the same time. What is then the mean reward of the 24 updates?
# With fresh weights, the mean was about 0.8.

# %% guess=[0.7]
my_reward = lab.guess("mean reward of 24 updates with weights every 8 updates", ...)

# %%
found = {1: fresh, **{k: lab.run(reinforce, *job, RolloutPlan(every=k), deadline=60)[0] for k in (4, 8)}}
means = {k: sum(record.rewards) / 24 for k, record in found.items()}
for k, one in found.items():
    print(f"every {k}: {one.tokens_per_s:,.0f} tokens/s, staleness up to {max(one.staleness)}, reward {means[k]:.2f}")
lab.reveal("mean reward of 24 updates with weights every 8 updates", means[8])
assert means[1] > means[4] > means[8] and means[8] < means[1] - 0.1

# %% [markdown]
# With older weights, the same number of updates teaches less. In the first 8 updates, the rollouts do not get better,
# because rank 0 still has the first weights. Later rollouts come from old weights, too, and the new weights would
# rarely generate the same answers. So the gradient of these rollouts is not the gradient that the new weights need.
#
# Both effects grow with staleness. The tokens/s grow, too, up to the rate of the slower kind of ranks. With fewer
# cores than ranks, you may not see this growth.
#
# The next plot is for Llama 3 8B on 8 GPUs. It assumes equally long answers, and training at 40% of the peak. Decoding
# is as slow as reading weights and caches from memory. A diamond marks a design with one kind of ranks: all 8 GPUs
# generate, and then all train. How many updates must lie between two transfers of weights, so that two kinds of ranks
# are faster? And how many, with answers of 8,192 tokens?

# %%
lab.explore("rollouts")

# %% [markdown]
# Without staleness, two kinds of ranks are the slowest design, because one kind always waits. With 4 updates between
# two transfers, two kinds are just ahead of the diamond. With 16 updates, they are a fifth faster. The reason is the
# batch: if 4 GPUs generate instead of 8, each GPU decodes twice as many sequences. Each step of decoding (one token per
# sequence) takes only a fifth longer (13). With 8,192 tokens, most of the bytes are caches, so larger batches gain
# little. Then two kinds (5 GPUs generate, 16 updates between transfers) are only as fast as the diamond.
#
# So systems allow some staleness, and correct for it. IMPALA (2018) multiplies the gradient of each token by a ratio
# (V-trace). This ratio is the token's probability with the new weights, divided by its probability with the old
# weights, up to a bound. AReaL (2025) sends weights in the middle of a rollout, so no generating rank waits. AReaL
# bounds the staleness, and its loss takes into account which weights generated a token.

# %% [markdown]
# ## Take it home <!-- 3 homework 4 -->
#
# This script finds a straggler of any training with `torch.distributed`. Each rank measures its own work in each step,
# without waits, and takes the median. One all_gather brings all medians to each rank. Here rank 1 works twice as long:

# %% tags=["take-home"]
# %%writefile take_home_15_straggler.py
"""Name the straggler: torchrun --standalone --nproc-per-node 2 take_home_15_straggler.py"""

import statistics
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x, own = torch.randn(256, 256), []
for _step in range(20):
    begin = time.thread_time()  # a rank that waits for a core is not slow: count the processor's time
    for _ in range(20 * (2 if rank == 1 else 1)):  # your forward and backward, without the all-reduce
        x = torch.tanh(x @ x / 256)
    own.append(time.thread_time() - begin)
    dist.all_reduce(x)  # here all wait for the slowest
medians = [torch.zeros(1) for _ in range(size)]
dist.all_gather(medians, torch.tensor([statistics.median(own)]))
slowest = max(range(size), key=lambda r: float(medians[r]))
factor = float(medians[slowest]) / statistics.median(float(m) for m in medians[:slowest] + medians[slowest + 1 :])
if rank == 0:
    print(f"rank {slowest} needs {factor:.1f} times as long as the others")
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_15_straggler.py
print(*out.grep("times as long"), sep="\n")
assert out.grep("rank 1 needs")

# %% [markdown]
# On GPUs, kernels run after the call returns. So measure with `torch.cuda.Event` instead of a clock.

# %% [markdown]
# ## Question to discuss
#
# Your training runs at 80% of last week's speed. No rank has failed, the loss looks as always, and 512 GPUs cost
# money by the hour. What do you look at first, second and third? When do you stop the run?
#
# ## Open issues, and what next
#
# - **Matrix products.** The checksums of 15.5 find a flipped bit in a sum, but not in a matrix product. What checks
#   the products?
# - **Gray failures.** A link that loses one message in a million is neither dead nor slow. Network adapters count
#   such losses.
# - **Staleness.** How old may rollouts be? Today, the answer is a bound that somebody has tuned.
#
# **What next?** In your own job, measure the seconds of input, forward and backward of each rank, for a hundred
# steps.
#
# ## Where to read the real code
#
# - `hpdl_lab/resilience/elastic.py`, `stragglers.py` and `checksums.py`: your functions;
#   `hpdl_lab/inference/rollouts.py`.
# - Chen et al. 2016 (backup workers), arXiv:1604.00981; Huang and Abraham 1984, doi:10.1109/TC.1984.1676475; Dixit et
#   al. 2021, arXiv:2102.11245; Williams 1992, doi:10.1007/BF00992696; Espeholt et al. 2018 (IMPALA), arXiv:1802.01561;
#   Fu et al. 2025 (AReaL), arXiv:2505.24298; Hu et al. 2024 (OpenRLHF), arXiv:2405.11143.

# %% [markdown]
# ## Recap
#
# 1. If the examples of a step depend only on the number of the step, any number of ranks can go on with the training.
# 2. The straggler is the rank that waits least. Compare computing, input, and seconds per byte, over many steps.
# 3. The checksum of a sum is the sum of the checksums. Two numbers per message find a flipped bit and its sender.
# 4. A fixed tree over the examples gives the same bits on any number of ranks, but with more traffic.
# 5. Ranks that generate and ranks that train work at the same time only if rollouts may be stale.
#
# <!-- terms -->
#
# **What you can do now:** go on with another number of ranks, find a rank that is slow or wrong, and say what
# staleness costs.
#
# <!-- links -->
