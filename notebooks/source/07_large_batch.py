# %% [markdown]
# # 07 · Large batches and fewer bytes
#
# **The number to reach:** 97% test accuracy on the digits in the fewest seconds. You predict the best batch and number
# of ranks.
#
# <!-- tracks -->
#
# Part one rescues trainings with large batches. Part two sends fewer bytes, and finds the fastest batch.

# %%
from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# # Part one: large batches
#
# ## The idea <!-- 1 two days 6 -->
#
# In weak scaling (06) every rank keeps its share of the examples, so the **global batch** grows with the ranks. An
# epoch then has fewer steps:
#
#     batch    32    | | | | | | | | | | | | | | | |   45 steps per epoch
#     batch 1,024    |               |                 1.4 steps per epoch
#
# The gradient of a large batch is less noisy, but the step is not longer. So in the same epochs, the model may learn
# less. There are three remedies:
#
# 1. **Linear scaling**: a step on k times as many examples replaces k small steps, so its rate is k times as large.
# 2. **Warm-up**: this rate is too large for the first steps, so the rate grows gradually.
# 3. **A rate for each layer** (LARS, LAMB): the length of a layer's step is proportional to the length of its weights.
#    A length is an L2 norm: the root of the sum of squares.
#
# Results on ImageNet and with BERT:
#
# | training | batch | result | source |
# |---|---|---|---|
# | ResNet-50 | 256 | 76.4% | Goyal et al. 2017, arXiv:1706.02677 |
# | the same with linear scaling and warm-up, in one hour on 256 GPUs | 8,192 | 76.3% | the same |
# | their all-reduce (Gloo and Caffe2, 32 servers) | | halving-doubling (04) three times as fast as a ring | the same |
# | ResNet-50, LARS | 32K | accuracy as high as with a small batch | You et al. 2017, arXiv:1708.03888 |
# | BERT, LAMB | 32K and more | 76 minutes instead of 3 days | You et al. 2019, arXiv:1904.00962 |
#
# ## Predict
#
# A small model learns the digits in 20 epochs, with a batch of 32 and a rate of 0.02. Now each step has 1,024 examples,
# so 20 epochs are 28 steps. What is the test accuracy with the same rate, and with a rate 32 times as large?

# %% guess=[0.9, 0.95]
my_accuracy = lab.guess("test accuracy with a batch of 1,024, 0 to 1", {"plain": ..., "linear": ...})

# %% [markdown]
# ## Measure: large batches fail <!-- 1 two days 3 -->
#
# For each batch, the lab trains three models with different random weights. A bar goes from the worst to the best of
# the three. Look at the largest batch.

# %%
from statistics import fmean

failing = lab.batches(methods=("plain", "linear"), prediction=my_accuracy)
lab.reveal("test accuracy with a batch of 1,024, 0 to 1", {m: fmean(failing.scores(m, 1024)) for m in my_accuracy})
assert min(failing.scores("plain", 32)) > 0.94 and max(failing.scores("plain", 1024)) < 0.5
failing

# %% [markdown]
# With the old rate, 28 steps are not enough to learn. With the scaled rate, a batch of 512 still works. With 1,024,
# some models learn and other models do not: only the random start decides.
#
# ## Exercise 7.1 ★★ Linear scaling and warm-up <!-- 1 two days 12 -->
#
# Compute the rate of any step. A rate of 32 × 0.02 is too large only for the first steps, so let the rate grow from
# 0.02.

# %% exercise="hpdl_lab.optim.large_batch:learning_rate"

# %% check="hpdl_lab.optim.large_batch:learning_rate"

# %% [markdown]
# Goyal et al. warm up for 5 epochs. Here the warm-up takes half of the 28 steps.
#
# ## Exercise 7.2 ★★ LARS's trust ratio <!-- 1 two days 12 -->
#
# Compute the **trust ratio**, by which LARS multiplies the rate of each layer. In one layer the gradient may be a
# thousandth as long as the weights, and in another layer ten times as long. So one rate is too large for some layers
# and too small for others.

# %% exercise="hpdl_lab.optim.large_batch:trust_ratio"

# %% check="hpdl_lab.optim.large_batch:trust_ratio"

# %% [markdown]
# If all gradients are 1,000 times as long, LARS takes the same steps (without weight decay). So LARS hides a mistake: a
# sum that is not divided by the number of ranks. LAMB scales Adam's step to the rate times the length of the layer's
# weights. In the lab, the rates of LARS and LAMB grow with the square root of the batch.
#
# ## Measure: what rescues them <!-- 1 two days 5 -->
#
# Look at the largest batch again, now with warm-up (7.1), LARS (7.2) and LAMB.

# %%
rescued = lab.batches(learning_rate=learning_rate, trust_ratio=trust_ratio, prediction=my_accuracy)
assert min(rescued.scores("warm-up", 1024)) > 0.75 and min(rescued.scores("LARS", 1024)) > 0.7
assert min(rescued.scores("LAMB", 1024)) > 0.85 > 0.5 > max(rescued.scores("plain", 1024))
rescued

# %% [markdown]
# With a batch of 1,024 the accuracy rises from a fifth to nine tenths, in the same 28 steps. A batch of 32 has 97%.
# Much depends on the rates, which were tuned by hand. With `lab.batches(rate=0.1)` a batch of 32 gets better, and
# linear scaling already fails at 512.
#
# Next, a GPT reads about 2,000 windows (pieces of text) of Moby-Dick: 251 steps of 8 windows, or 16 of 128. The
# score is the loss: a random guess among 81 characters has ln 81 = 4.4.

# %%
functions = {"learning_rate": learning_rate, "trust_ratio": trust_ratio}
gpt = lab.batches((8, 128), ("plain", "linear", "LAMB"), data="text", seeds=1, **functions)
large = {name: gpt.scores(name, 128)[0] for name in ("plain", "linear", "LAMB")}
assert large["LAMB"] < large["plain"] - 0.1 and large["linear"] > large["plain"]
gpt

# %% [markdown]
# Linear scaling makes the rate 16 times as large, which is too much for SGD on a transformer. LAMB was made for
# transformers, and its paper reports that LARS does poorly on them.
#
# # Part two: fewer bytes
#
# ## Exercise 7.3 ★★★ Top-k with error feedback <!-- 2 homework 20 -->
#
# Data parallelism sends **dense** gradients: one number for every parameter, in every step. Most of these numbers are
# small. **Top-k** sends only the k largest, by magnitude:
#
#     grad + error     0.1  -2.0   0.3   1.0      k = 2
#     sent                  -2.0         1.0      two values and their places
#     error            0.1    0    0.3    0       held back for the next step
#
# In **error feedback**, a rank holds back what it does not send, and adds it to its next gradient. So nothing is lost:
# the numbers sent and the numbers held back add up to the sum of all gradients. Ranks choose different places, so they
# send the places, too. Write an all-reduce by top-k with error feedback.
#
# Error feedback is older than top-k. Microsoft's 1-bit SGD (Seide et al. 2014, built into CNTK) sends the sign of each
# number, and keeps the rounding error.

# %% exercise="hpdl_lab.parallel.compression:top_k_all_reduce"

# %% check="hpdl_lab.parallel.compression:top_k_all_reduce"

# %% [markdown]
# ## Exercise 7.4 ★★ Local SGD <!-- 2 homework 12 -->
#
# Send all numbers, but rarely. In **local SGD** the ranks take H steps on their own, and then average their parameters.
# So they send 1/H of the bytes in 1/H of the messages. With H = 1 and plain SGD, this is data parallelism. With a large
# H, the models drift apart, because each rank has its own data.

# %% exercise="hpdl_lab.parallel.local_sgd:local_sgd"

# %% check="hpdl_lab.parallel.local_sgd:local_sgd"

# %% [markdown]
# ## Measure: bytes, steps and accuracy <!-- 2 homework 6 -->
#
# Compare twelve trainings of the same model, in the same 120 steps, with the same batches, on eight simulated ranks.
# Besides your two functions:
#
# - **fp16, bf16:** every number is sent in 16 bits.
# - **PowerSGD:** a matrix of n × m numbers is approximated by a **low-rank** one, the product of two thin matrices with
#   r(n + m) numbers. Here r is the rank of the matrix. Error feedback keeps the rest.
# - **DiLoCo:** local SGD with an **outer optimizer** (Nesterov's momentum). The outer optimizer's gradient is its own
#   last result, minus the new average of the ranks. All ranks go on from the result of its step.
# - **Gossip** (02): after each step, a rank averages its parameters with its neighbors on a graph. On the exponential
#   graph, a rank has one neighbor in each step: 1, 2 and 4 places further on, in turn.
# - **Tournament**, LBANN's LTFB: every ten steps, the ranks form pairs and exchange models. Each rank keeps the model
#   that is better on held-out examples. The best model wins.
#
# Dense gradients reach about 92%. Predict the accuracy of three other ways:

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
# All twelve have the same, untuned rate. Read the picture with care:
#
# - DiLoCo learns faster because its outer momentum takes longer steps. Momentum would help the other ways, too,
#   except top-k.
# - Top-k sends 1% of the numbers, but 9% of the bytes. A place takes as many bytes as a value, and each rank
#   gets the numbers of all ranks. So the bytes grow with the ranks.
# - Gossip on a ring sends about as many bytes as a ring all-reduce, but a rank waits only for its neighbors.
# - A model of the tournament learns from an eighth of each batch, so its steps are noisier.
#
# In top-k, numbers that were held back come late, and momentum repeats these numbers. With `momentum=0.9`
# and 60 steps, top-k reached 67 to 79%, and dense gradients reached 92 to 95%. Deep gradient compression (Lin et al.
# 2018) corrects the momentum.

# %% [markdown]
# ## Exercise 7.5 ★ The time to 97% <!-- 2 homework 7 -->
#
# How large should a batch be? The gradients of single examples differ: this is noise, and a larger batch averages it
# out. The **noise scale** is the batch size at which the noise in the gradient is as large as the gradient itself.
#
# Data parallelism measures the noise for free (McCandlish et al. 2018). The gradient of one rank has more noise than
# the mean over ranks, and noise makes a gradient longer. So the difference of the two lengths shows the noise.

# %%
from hpdl_lab import data, models
from hpdl_lab.parallel.large_batch import measure_noise

digits = data.load("digits")
noise = lab.run(measure_noise, models.build_for(digits, "mlp"), digits, 128, 100, 0.2)[0]
print(f"noise scale {sum(n.variance for n in noise) / sum(n.square for n in noise):.0f} examples")

# %% [markdown]
# Far below the noise scale, a batch twice as large needs half the steps. Far above it, the number of steps stays the
# same: additional examples are wasted. **Statistical efficiency** is the fewest examples that reach the target, divided
# by the examples used. **Hardware efficiency** is the time of a step with perfect speedup, divided by its real time.
# Both enter the time to a target, which is steps × time of a step.
#
# Which batch, on one or two ranks, reaches 97% first: 8, 32, 128 or 512? Guess, then compute the times.

# %% guess=[128, 2]
my_best = lab.guess("the fastest pair", {"batch": ..., "ranks": ...})

# %% exercise="hpdl_lab.optim.large_batch:seconds_to_target"

# %% check="hpdl_lab.optim.large_batch:seconds_to_target"

# %% [markdown]
# SGD trains until the test accuracy is 97%, with a rate tuned for each batch. Each point is a training. The dotted
# lines are the formula of 7.5, fitted to the points. In the table, your function's times are in brackets.

# %%
raced = lab.time_to_target(seconds_to_target, prediction=my_best)
lab.reveal("the fastest pair", dict(zip(my_best, raced.best, strict=True)))
steps = {row["batch"]: row["steps"] for row in raced.rows}
assert steps[8] > 2 * steps[128] and steps[128] < 2.5 * steps[512]
assert raced.predicted[raced.best] < 3 * min(raced.predicted.values())
raced

# %% [markdown]
# From a batch of 8 to 128, the steps fall by a factor of three; from 128 to 512 they hardly fall. The fitted noise
# scale, in the table's last line, lies between 8 and 128. Your measured noise scale agrees with it within a factor of a
# few. The theory promises no more, because the noise grows while the model learns. With small batches, two ranks are
# slower than one on most machines, because an all-reduce takes longer than computing this small model.
#
# The sliders describe a job on a cluster, with S_min (7.5) = 10,000 steps. At first, twice as many ranks almost halve
# the time. Up to how many ranks is this so, with a noise scale of 1,000? And with 10,000?

# %%
lab.explore("target")

# %% [markdown]
# ## Take it home <!-- 2 homework 6 -->
#
# The first script repeats the lab's training with warm-up. `LinearLR` is your warm-up. The lab also multiplies your
# rate by a cosine that falls to 0, `CosineAnnealingLR`. `ChainedScheduler` multiplies the two factors. First save the
# data:

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
# The second script uses PowerSGD as a communication hook (06) of PyTorch. The first `start_powerSGD_iter` steps are not
# compressed: in real trainings, a tenth of all steps. `compression_stats` counts the numbers sent: 2 ·
# (128 + 64) for a matrix of 128 × 64, and all numbers of a bias.
#
# PyTorch also has `PostLocalSGDOptimizer` for local SGD and `bf16_compress_hook` for 16 bits. PyTorch has no top-k, but
# `hpdl_lab/parallel/ddp.py` shows how your function becomes a hook.

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
# PowerSGD starts from random matrices. With the same matrices, the lab has the same losses.

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
# You get four times as many ranks for the same job. Do you let the batch grow, or the ranks' shares shrink?
# What would you measure first, and on how many ranks?
#
# ## Where to read the real code
#
# - `hpdl_lab/optim/large_batch.py`: your functions, LARS and LAMB, and the noise.
# - `hpdl_lab/parallel/large_batch.py`: the trainings that were compared, and their rates.
# - `hpdl_lab/parallel/compression.py`, `hpdl_lab/parallel/local_sgd.py`: fewer bytes, fewer messages.

# %% [markdown]
# ## Recap
#
# 1. In the same epochs, a batch k times as large takes 1/k of the steps; with the old rate the model learns little.
# 2. With linear scaling, one step is as long as the k steps that it replaces; warm-up starts with shorter steps.
# 3. In LARS and LAMB, the length of a layer's step depends on the length of the weights, not on the gradient.
# 4. Gradients may be cut, rounded and delayed, if a rank keeps what it has not sent and sends it later.
# 5. The time to a target is steps × time of a step. Above the noise scale, a larger batch hardly saves steps.
#
# <!-- terms -->
#
# **What you can do now:** choose a batch, its rate and its warm-up. Tell from the noise scale how many ranks are worth
# their price. Send fewer bytes over a slow network.
#
# <!-- links -->
