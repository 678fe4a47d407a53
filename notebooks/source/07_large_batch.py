# %% [markdown]
# # 07 · Large batches and fewer bytes
#
# **The number to reach:** 97% of the digits read rightly in the fewest seconds, with the batch and the number of ranks
# that you predict.
#
# <!-- tracks -->
#
# Part one: a batch on many ranks is a large batch. Where that fails, and what rescues it. Part two: fewer bytes, in
# fewer messages; and what is fastest in the end.

# %%
from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# # Part one: large batches
#
# ## The idea <!-- 1 homework 6 -->
#
# In weak scaling every rank keeps its share, so that the batch grows with the ranks. An epoch then has fewer steps:
#
#     batch    32    | | | | | | | | | | | | | | | |   45 steps per epoch
#     batch 1,024    |               |                 1.4 steps per epoch
#
# Each of these steps follows a better gradient, but it is no longer for that. The same epochs cost the same
# computation; the question is what they teach. Three remedies, each made for what the one before it could not do:
#
# 1. **Linear scaling**: a step on k times as many examples stands for k small steps, so its rate is k times as large.
# 2. **Warm-up**: that rate is too large for a model that has not learned anything. It is reached gradually.
# 3. **A rate for each layer** (LARS, LAMB): the step of a layer is a share of its own weights.
#
# What the papers recorded, on ImageNet and with BERT:
#
# | training | batch | result | source |
# |---|---|---|---|
# | ResNet-50 | 256 | 76.4% | Goyal et al. 2017, arXiv:1706.02677 |
# | the same with linear scaling and warm-up, in one hour on 256 GPUs | 8,192 | 76.3% | the same |
# | ResNet-50, LARS | 32K | no loss against its own baseline | You et al. 2017, arXiv:1708.03888 |
# | BERT, LAMB | 32K and more | 76 minutes in place of 3 days | You et al. 2019, arXiv:1904.00962 |
#
# The run of one hour was made in Caffe2, whose all-reduce was Gloo's between servers. Halving-doubling (04) was three
# times as fast as a ring on 32 servers with eight GPUs each.
#
# ## Predict
#
# A small network reads the digits after 20 epochs, with a batch of 32 and a rate that suits it. Now 1,024 examples per
# step, and still 20 epochs: how many digits are read rightly at the same rate, and with the rate times 32?

# %% guess=[0.9, 0.95]
my_accuracy = lab.guess("test accuracy with a batch of 1,024, 0 to 1", {"plain": ..., "linear": ...})

# %% [markdown]
# ## Measure: large batches fail <!-- 1 homework 3 -->
#
# Every engine trains whole models of its own, three for each batch, which start from different parameters. The bars go
# from the worst to the best of them.

# %%
from statistics import fmean

failing = lab.batches(methods=("plain", "linear"), prediction=my_accuracy)
lab.reveal("test accuracy with a batch of 1,024, 0 to 1", {m: fmean(failing.scores(m, 1024)) for m in my_accuracy})
assert min(failing.scores("plain", 32)) > 0.94 and max(failing.scores("plain", 1024)) < 0.5
failing

# %% [markdown]
# At the old rate 28 steps lead nowhere. With the rate in proportion 512 examples still learn; at 1,024 some models do
# and others do not, which depends on nothing but where they started.
#
# ## Exercise 7.1 ★★ Linear scaling and warm-up <!-- 1 homework 12 -->
#
# So the rate of 32 × 0.02 is too large, but only in the first steps. Write the rate of any step.

# %% exercise="hpdl_lab.optim.large_batch:learning_rate"

# %% check="hpdl_lab.optim.large_batch:learning_rate"

# %% [markdown]
# Goyal et al. warm up for 5 epochs; here half of all steps does it, because 28 are so few. In the code of others
# warm-up often starts from 0, and is counted in steps, examples or tokens: read which.
#
# ## Exercise 7.2 ★★ LARS's trust ratio <!-- 1 homework 12 -->
#
# Layers differ: in one the gradient is a thousandth of the weights, in another it is ten times as long. One rate for
# all of them is too large for some and too small for others. LARS gives each layer its own.

# %% exercise="hpdl_lab.optim.large_batch:trust_ratio"

# %% check="hpdl_lab.optim.large_batch:trust_ratio"

# %% [markdown]
# Without weight decay, scale all gradients by 1,000, and the steps stay as they are: whoever forgets to divide by the
# number of ranks does not notice. LAMB divides Adam's step by its length in the same way. The rates of both grow with
# the root of the batch here.
#
# ## Measure: what rescues them <!-- 1 homework 5 -->
#
# The same as above, and warm-up, LARS and LAMB with your two functions.

# %%
rescued = lab.batches(learning_rate=learning_rate, trust_ratio=trust_ratio, prediction=my_accuracy)
assert min(rescued.scores("warm-up", 1024)) > 0.75 and min(rescued.scores("LARS", 1024)) > 0.7
assert min(rescued.scores("LAMB", 1024)) > 0.85 > 0.5 > max(rescued.scores("plain", 1024))
rescued

# %% [markdown]
# From a fifth to nine tenths, in the same 28 steps; and yet not to the 97% of a batch of 32. The rates were tuned by
# hand, one for each method; `lab.batches(rate=0.1)` shows how much hangs on that. At 0.1 a batch of 32 reads more
# digits, and linear scaling fails at 512 already.
#
# The same with a GPT on Moby-Dick, 2,000 windows of text: 251 steps of 8 windows, or 16 of 128. Lower is better, and
# guessing among 81 characters costs ln 81 = 4.4.

# %%
functions = {"learning_rate": learning_rate, "trust_ratio": trust_ratio}
gpt = lab.batches((8, 128), ("plain", "linear", "LAMB"), data="text", seeds=1, **functions)
large = {name: gpt.scores(name, 128)[0] for name in ("plain", "linear", "LAMB")}
assert large["LAMB"] < large["plain"] - 0.1 and large["linear"] > large["plain"]
gpt

# %% [markdown]
# A transformer bears 16 times the rate of SGD even less. LAMB was made for such models: its paper reports that LARS
# does poorly on them.
#
# # Part two: fewer bytes
#
# ## Exercise 7.3 ★★★ Top-k with error feedback <!-- 2 homework 20 -->
#
# Data parallelism sends a number for every parameter in every step. Most of them are small. What if only the k largest
# travel?
#
#     grad + error     0.1  -2.0   0.3   1.0      k = 2
#     sent                  -2.0         1.0      two values and their places
#     error            0.1    0    0.3    0       held back for the next step
#
# The small ones must not be lost. What a rank has not sent, it adds to its next gradient: **error feedback**. At every
# step, over all ranks, all that was sent and all that is held back add up to all gradients. Ranks choose different
# places, so the places have to travel, too.
#
# Error feedback is older than top-k. In 2014 Microsoft trained speech recognition with one bit for each gradient, its
# sign, and kept what the rounding lost (1-bit SGD, Seide et al. 2014). Its framework, the Cognitive Toolkit (CNTK),
# has it built in.

# %% exercise="hpdl_lab.parallel.compression:top_k_all_reduce"

# %% check="hpdl_lab.parallel.compression:top_k_all_reduce"

# %% [markdown]
# ## Exercise 7.4 ★★ Local SGD <!-- 2 homework 12 -->
#
# Or all numbers travel, but seldom: ranks take H steps on their own, and then average their parameters. A share of 1/H
# of the bytes is left, and of the messages, too. With H = 1 and plain SGD that is data parallelism. With a large H
# ranks drift apart, each towards what its own data want.

# %% exercise="hpdl_lab.parallel.local_sgd:local_sgd"

# %% check="hpdl_lab.parallel.local_sgd:local_sgd"

# %% [markdown]
# ## Measure: bytes, steps and accuracy <!-- 2 homework 6 -->
#
# Twelve ways to train the same model in the same 120 steps, with the same batches, on eight simulated ranks. Their
# bytes are counted, and the training is real. Besides yours:
#
# - **fp16, bf16:** every number travels with 16 bits.
# - **PowerSGD:** a gradient matrix of n × m numbers travels as two thin ones, r(n + m) numbers, with error feedback.
# - **DiLoCo:** local SGD, whose mean is a gradient for an outer optimizer with Nesterov's momentum.
# - **Gossip:** after each step a rank averages its parameters with its neighbors on a graph only (notebook 02); on the
#   exponential one with a single rank, 1, 2 and 4 places further on, in turn.
# - **Tournament**, LBANN's LTFB: every ten steps two ranks exchange their models, and each keeps the one that is better
#   on examples that it has held out. In the end the best model is taken.
#
# Plain data parallelism reaches about 92% here. What do you expect of these three?

# %% guess=[0.88, 0.91, 0.86]
my_scores = lab.guess(
    "test accuracy after 120 steps, 0 to 1", {"top-k, 1%": ..., "local SGD, H = 10": ..., "tournament, K = 10": ...}
)

# %%
compared = lab.compare(prediction=my_scores)
lab.reveal("test accuracy after 120 steps, 0 to 1", {name: compared[name].test_accuracy for name in my_scores})
dense, thin = compared["data parallel"], compared["PowerSGD, rank 2"]
assert thin.nbytes < 0.1 * dense.nbytes and thin.test_accuracy > dense.test_accuracy - 0.05
assert abs(compared["local SGD, H = 10"].nbytes / dense.nbytes - 0.1) < 0.001
compared

# %% [markdown]
# Read it with care. All have the same rate, and none is tuned. DiLoCo learns faster because its outer momentum takes
# longer steps; momentum would make the others faster, too. Top-k sends 1% of the numbers and 9% of the bytes: a place
# costs as much as a value, and every rank gets those of all others, so that its share grows with the ranks. Gossip
# saves no bytes: on a ring a rank sends about what it sends in a ring all-reduce, but waits for
# two neighbors only. And
# each model of the tournament has learned from an eighth of each batch only: its steps are noisier.
#
# Error feedback delays small numbers, and momentum repeats what comes late. With `momentum=0.9` and 60 steps top-k
# reached 67 to 79% here, where dense gradients reached 92 to 95%. Deep gradient compression (Lin et al. 2018) corrects
# the momentum for that.

# %% [markdown]
# ## Exercise 7.5 ★ The time to 97% <!-- 2 homework 7 -->
#
# How large should a batch be? Gradients of a few examples differ: that is noise, and a larger batch averages it out.
# Once there is more gradient than noise, still more examples tell nothing new. The batch at which both are equal is the
# **noise scale**. Data parallelism measures it for free: the gradient of one rank has the noise of its share, and the
# mean over ranks has less, so that the difference of their lengths says how much there is (McCandlish et al. 2018).

# %%
from hpdl_lab import data, models
from hpdl_lab.parallel.large_batch import measure_noise

digits = data.load("digits")
noise = lab.run(measure_noise, models.build_for(digits, "mlp"), digits, 128, 100, 0.2)[0]
print(f"noise scale {sum(n.variance for n in noise) / sum(n.square for n in noise):.0f} examples")

# %% [markdown]
# Far below the noise scale a batch twice as large needs half the steps: perfect **statistical efficiency**. Far above
# it, it needs as many as before. On the other side stands **hardware efficiency**: a step on more ranks is shorter, but
# not by what every step costs. The time to a target is the product of both. Which batch, on one or two ranks, reaches
# 97% first: 8, 32, 128 or 512?

# %% guess=[128, 2]
my_best = lab.guess("the fastest pair", {"batch": ..., "ranks": ...})

# %% exercise="hpdl_lab.optim.large_batch:seconds_to_target"

# %% check="hpdl_lab.optim.large_batch:seconds_to_target"

# %% [markdown]
# Now measured: SGD until 97% of the test digits are read rightly, with a rate tuned for each batch. Points are
# trainings, the dotted lines the model that fits them. In brackets: what your function says about that model.

# %%
raced = lab.time_to_target(seconds_to_target, prediction=my_best)
lab.reveal("the fastest pair", dict(zip(my_best, raced.best, strict=True)))
steps = {row["batch"]: row["steps"] for row in raced.rows}
assert steps[8] > 2 * steps[128] and steps[128] < 2.5 * steps[512]
assert raced.predicted[raced.best] < 3 * min(raced.predicted.values())
raced

# %% [markdown]
# From 8 to 128 examples the steps fall by a factor of three, from 128 to 512 hardly any more: the noise scale lies
# between. It agrees with the one measured above to within a factor of a few, which is all that the theory promises: the
# noise grows while the model learns. And a model this small computes a small batch faster than two ranks exchange its
# gradients, on most machines.
#
# On real clusters the sliders are those of a larger job, 10,000 steps at least. How many ranks are worth their money
# with this noise scale, and with ten times as much?

# %%
lab.explore("target")

# %% [markdown]
# ## Take it home <!-- 2 homework 6 -->
#
# Exercise 7.1 in PyTorch's own schedules: `LinearLR` for the warm-up and `CosineAnnealingLR` for the way down, whose
# factors `ChainedScheduler` multiplies. (`SequentialLR` would take one after the other.) The rate of every step is the
# lab's, and so is the accuracy with warm-up in the picture above. First the data, as a file:

# %% tags=["take-home"]
import torch

torch.save([digits.train_x, digits.train_y, digits.test_x, digits.test_y], "take_home_digits.pt")

# %% tags=["take-home"]
# %%writefile take_home_07.py
"""Train with a batch of 1,024, linear scaling and warm-up: python take_home_07.py"""

import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR

epochs, steps, warmup, batch, base_rate, base_batch = 20, 28, 14, 1024, 0.02, 32
train_x, train_y, test_x, test_y = torch.load("take_home_digits.pt")
torch.set_default_dtype(torch.float64)  # so that the accuracy is the lab's
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
full = base_rate * batch / base_batch
optimizer = torch.optim.SGD(model.parameters(), lr=full, momentum=0.9)
rising = LinearLR(optimizer, start_factor=base_rate / full, total_iters=warmup)
falling = CosineAnnealingLR(optimizer, T_max=steps)
schedule = ChainedScheduler([rising, falling])
shuffles = torch.Generator().manual_seed(0)
order = torch.cat([torch.randperm(len(train_y), generator=shuffles) for _ in range(epochs)])
for indices in order[: steps * batch].split(batch):  # epochs run into each other: every step has a whole batch
    loss = nn.functional.cross_entropy(model(train_x[indices].double()), train_y[indices])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("rate", schedule.get_last_lr()[0])
    schedule.step()
print("accuracy", (model(test_x.double()).argmax(1) == test_y).double().mean().item())

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 python take_home_07.py
print("\n".join(out[:3] + out[-1:]))

# %% tags=["take-home"]
from hpdl_lab.parallel.large_batch import cosine

rates = [float(line.split()[1]) for line in out.grep("rate")]
lab_rates = [learning_rate(s, 1024, 0.02, 32, 14) * cosine(s / 28) for s in range(28)]
assert max(abs(a - b) for a, b in zip(rates, lab_rates, strict=True)) < 1e-12
assert abs(float(out.grep("accuracy")[0].split()[1]) - rescued.scores("warm-up", 1024)[0]) < 0.01

# %% [markdown]
# **PowerSGD** is a communication hook that PyTorch brings along. `start_powerSGD_iter` steps travel uncompressed; in
# real trainings a tenth of all steps do. The state counts what was sent: `compression_stats`. Of a matrix of 128 × 64
# numbers 2 · (128 + 64) travel, of a bias all. (For local SGD PyTorch has `PostLocalSGDOptimizer`, for 16 bits
# `bf16_compress_hook`; of top-k it brings nothing, so your function would be a hook, as
# `hpdl_lab/parallel/ddp.py` makes it one.)

# %% tags=["take-home"]
# %%writefile take_home_07_powersgd.py
"""PowerSGD in DistributedDataParallel: torchrun --standalone --nproc-per-node 2 take_home_07_powersgd.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)  # so that the losses and those of the lab agree to ten digits
torch.manual_seed(0)
rank, size = dist.get_rank(), dist.get_world_size()
layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
model = nn.parallel.DistributedDataParallel(layers)
state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
train_x, train_y, *_ = torch.load("take_home_digits.pt")
for batch in torch.randperm(len(train_y), generator=torch.Generator().manual_seed(0))[: 10 * 128].split(128):
    mine = batch.chunk(size)[rank]
    loss = nn.functional.cross_entropy(model(train_x[mine].double()), train_y[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.reduce(loss := loss.detach() / size, dst=0)
    if rank == 0:
        print("loss", loss.item())
if rank == 0:
    print("numbers", *state.compression_stats()[1:])
del model  # while DDP still holds the group, gloo can hang in destroy_process_group or after it
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_07_powersgd.py
print(out.n)

# %% [markdown]
# The lab's PowerSGD draws the same random numbers, and has the same losses.

# %% tags=["take-home"]
from hpdl_lab.parallel.compression import DataParallelCompressed, PowerSGD

strategy = DataParallelCompressed(PowerSGD(2), dense_steps=2)
here = lab.train("mlp", strategy, ranks=2, dtype="float64", steps=10, lr=0.2, momentum=0.0)
theirs = [float(line.split()[-1]) for line in out.grep("loss")]
assert len(theirs) == 10 and max(abs(a - b) for a, b in zip(theirs, here.losses, strict=True)) < 1e-10

# %% tags=["take-home"]
whole, sent = map(int, out.grep("numbers")[0].split()[1:])
assert sent == (10 - 2) * (2 * (128 + 64) + 128 + 2 * (64 + 128) + 64 + 2 * (10 + 64) + 10)
print(f"{sent / whole:.1%} of the numbers travel, and the losses are the lab's")

# %% [markdown]
# ## Question to discuss
#
# You get four times as many ranks for the same job. Do you keep the share of a rank, so that the batch grows, or the
# batch, so that the shares shrink? Which measurements would you make before you decide, and on how many ranks?
#
# ## Where to read the real code
#
# - `hpdl_lab/optim/large_batch.py`: your functions, LARS and LAMB, and the noise.
# - `hpdl_lab/parallel/large_batch.py`: the trainings that were compared, and their rates.
# - `hpdl_lab/parallel/compression.py`, `hpdl_lab/parallel/local_sgd.py`: fewer bytes, fewer messages.

# %% [markdown]
# ## Recap
#
# 1. With the same epochs a batch k times as large has a k-th of the steps; at the old rate it learns little.
# 2. Linear scaling gives a step the length of the k that it replaces; warm-up spares the model that in the beginning.
# 3. LARS and LAMB make the step of a layer a share of its weights, whatever the length of its gradient.
# 4. Gradients bear to be cut, rounded and delayed, as long as what was left out is kept and sent later.
# 5. Time to a target is steps times seconds: above the noise scale a larger batch buys no fewer steps.
#
# | term | what it means |
# |---|---|
# | global batch | the examples of one step, over all ranks |
# | linear scaling, warm-up | the rate in proportion to the batch; reaching it gradually |
# | trust ratio | the factor of a layer's rate in LARS: its weights' length over its gradient's |
# | noise scale | the batch whose gradient has as much noise as gradient |
# | statistical, hardware efficiency | examples needed at least over examples used; time of perfect speedup over time |
# | error feedback | adding what was not sent to the next gradient |
# | local SGD | steps on one's own between two averages of the parameters |
#
# **What you can do now:** choose a batch, its rate and its warm-up, tell from two short measurements how many ranks are
# worth their price, and send fewer bytes when the network is what you wait for.
#
# <!-- links -->
