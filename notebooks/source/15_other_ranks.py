# %% [markdown]
# # 15 · Other ranks
#
# **The number to reach:** after a kill, go on with fewer ranks, and have the same losses to 10⁻¹⁰.
#
# <!-- tracks -->
#
# A training goes on with fewer ranks, and later with more. And it goes on, unnoticed, with ranks that are slow, numbers
# that are wrong, and weights that are old.

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
#     wrong    its numbers are wrong         nobody waits        15.5
#     stale    its weights are old           nobody waits        two kinds of ranks

# %% [markdown]
# ## Fewer ranks, and then more <!-- 1 homework 5 -->
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
lab.reveal("% of the optimizer state on another rank with 999 ranks", 100 * moved)

# %% [markdown]
# Half of it moves, for any number of ranks. Rank 0 keeps its shard, and the last rank keeps almost nothing. Between
# them, the share that a rank keeps falls evenly. So a moment belongs to an element, and not to a rank: each rank reads
# the elements that it needs now, whoever wrote them.

# %% [markdown]
# ## Exercise 15.3 ★★★ Go on with fewer, then with more <!-- 1 homework 20 -->
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
# ## Predict
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
lab.reveal("% of the throughput that is left with one of 64 ranks at half speed", 100 / 2)
lab.show([event for steps in lanes for event in steps[4]])

# %% [markdown]
# ## Exercise 15.4 ★★ Slow is worse than dead: name the straggler <!-- 2 homework 14 -->
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
# ## Measure: backup workers <!-- 2 homework 3 -->
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
# ## Exercise 15.5 ★★ One flipped bit <!-- 2 homework 16 -->
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
lab.reveal("% more bytes, to find a flipped bit and its sender", 100 * 2 * 3 / 10_000)  # on 3 ranks

# %% [markdown]
# Two numbers per message are enough, however long the message is. Rank 2 names rank 1 and hop 0. If the same rank is
# named again in other runs, take its node out. If not, go back to the last checkpoint. A flip that changes less than
# rounding does is not found. It changes the sum by no more than rounding does.
#
# The checksums see faults on the links and in the additions. They do not see a gradient that was already wrong before
# the all-reduce.

# %% [markdown]
# ## The same bits on 1, 2, 3 and 4 ranks <!-- 2 homework 4 -->
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
# ## Two kinds of ranks <!-- 3 homework 10 -->
#
# In **reinforcement learning** a model is trained on its own answers. A **rollout** is one answer, and a **reward** is
# a number that says how good it is. Generating and training are different work: decoding reads the weights once for
# each token, and training does large matrix products (13). So large jobs have two kinds of ranks:
#
#     rank 0, generates    [ 0 ][ 1 ][ 2 ]        [ 3 ][ 4 ][ 5 ]
#                            |    |    |      ^     |    |    |      ^
#     ranks 1 to 3, train       [ 0 ][ 1 ][ 2 ]|       [ 3 ][ 4 ][ 5 ]|
#
# Down go the tokens of a batch of rollouts. Up go new weights, here every 3 updates. Batch 2 is used after updates 0
# and 1, but it was generated with the weights from before both. This is its **staleness**: 2 updates.
#
# The model of 13 has read Moby-Dick. The reward of a rollout is the share of vowels among its 24 characters. The
# gradient is that of REINFORCE (Williams 1992): a rollout with more reward than the mean of its batch becomes more
# probable, and one with less becomes less probable. The training ranks add their gradients as in 06. First, new
# weights are sent after each update, so nothing is stale:

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
# The reward rises to 1, and the text is gone: it is a row of vowels. Nobody asked for English. This is **reward
# hacking**. In practice, a penalty on the distance from the first model (the KL divergence) keeps the text.
#
# ## Predict
#
# While rank 0 generates, the others wait, and then rank 0 waits for them. If weights are sent every 8 updates, both
# kinds work at the same time. What is then the mean reward of the same 24 updates? With fresh weights it was about 0.8.

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
# The same number of updates, on the same number of tokens, teaches less. In the first 8 updates the rollouts do not get
# better, because rank 0 has the first weights. And rollouts of older weights give a gradient for answers that the new
# weights would hardly give. It is not the gradient of the reward of the new weights.
#
# Both effects grow with staleness. The tokens/s grow, too, up to the rate of the slower kind of ranks. With fewer cores
# than ranks you may not see that here. How much there is to gain depends on the hardware. Here is Llama 3 8B on 8 GPUs.
# It is assumed that all answers have one length, that decoding takes as long as reading its bytes, and that training
# reaches 40% of the peak. The diamond is the other design: all 8 GPUs generate, then all train.
#
# How many updates between two sends make two kinds of ranks faster than the diamond? And with answers of 8,192 tokens?

# %%
lab.explore("rollouts")

# %% [markdown]
# Two kinds of ranks without staleness are the slowest of all: one kind always waits. With 4 updates between two sends
# they are just ahead of the diamond, and with 16 they are a fifth faster. The reason is the batch. If 4 GPUs generate,
# each decodes twice as many sequences as with 8. That takes only a fifth more time per token (13). With 8,192 tokens
# most bytes are those of caches, and so batches gain little: 5 GPUs that generate, and 16 updates, just reach the
# diamond.
#
# So systems allow some staleness, and correct for it. IMPALA (2018) weighs each step by its probability now over that
# when it was generated, up to a bound (V-trace). AReaL (2025) sends weights in the midst of a rollout, so no generating
# rank waits. It bounds the staleness, and its loss takes into account which weights wrote a token.
#
# ## Two kinds of ranks without training <!-- 3 homework 3 -->
#
# Inference itself has two kinds of work as well (13): prefill and decode. If both run on one GPU, decoding waits while
# a long prompt is read. So a server may read prompts on some GPUs and decode on others (DistServe, Splitwise). What
# travels is the KV cache of the prompt, once. Here rank 0 reads three prompts, and ranks 1 to 3 decode:

# %%
from hpdl_lab.inference.engine import Engine
from hpdl_lab.inference.transfer import generate_disaggregated

# %%
prompts = [weights.encode(text) for text in ("Call me ", "The whale ", "Ahab stood upon the deck and ")]
ranks = lab.run(generate_disaggregated, job[0], prompts, 40)
sent = [event for event in ranks.events if event.op == "send"]
print(*(f"rank {event.rank} to rank {event.peer}: {event.nbytes:,} B" for event in sent), sep="\n")
assert ranks[1] | ranks[2] | ranks[3] == dict(enumerate(Engine(job[0]).generate(prompts, 40)))
assert sum(event.nbytes for event in sent) == sum(4096 * len(prompt) + 4 * 81 for prompt in prompts)

# %% [markdown]
# One rank alone gives the same tokens. Each character of a prompt takes 4,096 B: keys and values, 4 layers, 128 numbers
# of 4 B. With each prompt come 324 B: the logits of the 81 characters, from which the other rank takes the first token.
# Nothing comes back: ranks 1 to 3 send the answers to the users. For a prompt of 8,192 tokens of Llama 3 8B,
# the cache is 1.07 GB, or 21 ms at 50 GB/s.

# %% [markdown]
# ## Take it home <!-- 3 homework 4 -->
#
# This script finds a straggler of any training with `torch.distributed`. Each rank times its own part of a step, in
# which it waits for nobody. After some steps, one all_gather compares the medians. Here rank 1 works twice as long:

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
# On GPUs, kernels run after the call returns: take `torch.cuda.Event` in place of a clock.

# %% [markdown]
# ## Question to discuss
#
# Your training runs at 80% of the speed of last week. No rank has failed, the loss looks as always, and 512 GPUs cost
# money by the hour. What do you look at first, second and third, and when do you stop the run?
#
# ## Open issues, and what next
#
# - **The data loader.** The place in the epoch is state, too, and each loader keeps it in its own way.
# - **Products.** Checksums find a flipped bit in a sum, and not in a product. Who checks the products?
# - **Gray failures.** A link that loses one message in a million is neither dead nor slow. It is found by counters of
#   the network, if anybody reads them.
# - **Staleness.** How old may rollouts be? The answer of today is a bound that somebody has tuned.
#
# **What next?** Measure the seconds of input, forward and backward of each rank of your own job, for a hundred steps.
#
# ## Where to read the real code
#
# - `hpdl_lab/resilience/elastic.py`, `stragglers.py` and `checksums.py`: your functions;
#   `hpdl_lab/inference/rollouts.py` and `transfer.py`.
# - Chen et al. 2016 (backup workers), arXiv:1604.00981; Huang and Abraham 1984, doi:10.1109/TC.1984.1676475; Dixit et
#   al. 2021, arXiv:2102.11245; Williams 1992, doi:10.1007/BF00992696; Espeholt et al. 2018 (IMPALA), arXiv:1802.01561;
#   Fu et al. 2025 (AReaL), arXiv:2505.24298; Hu et al. 2024 (OpenRLHF), arXiv:2405.11143; Zhong et al. 2024
#   (DistServe), arXiv:2401.09670; Patel et al. 2024 (Splitwise), arXiv:2311.18677.

# %% [markdown]
# ## Recap
#
# 1. If a step depends on its number, and not on the ranks, another number of ranks goes on from it.
# 2. The straggler is the rank that waits least. Compare computing, time per byte, and input, over many steps.
# 3. The checksum of a sum is the sum of the checksums: two numbers per message find a flipped bit, and say where.
# 4. A fixed tree over the examples gives the same bits on any number of ranks, for more traffic.
# 5. Ranks that generate and ranks that train work at the same time only if rollouts may be stale.
#
# | term | what it means |
# |---|---|
# | elastic training | a training that goes on with another number of ranks |
# | straggler | a rank that is slower than the others, step after step |
# | backup workers | more ranks than are waited for |
# | silent data corruption | a wrong number without an error |
# | rollout, reward | an answer of the model; a number that says how good it is |
# | staleness | by how many updates the weights are older than those of now |
#
# **What you can do now:** go on with another number of ranks, find the rank that is slow or wrong, and say what
# staleness costs.
#
# <!-- links -->
