# %% [markdown]
# # 10 · Pipeline parallelism
#
# **The number to reach:** four ranks wait 11% of their time (the **bubble**), not 75%. Each rank holds four parts of a
# batch (micro-batches) in memory, not eight. And the losses are a single rank's losses, to 10⁻¹⁰.
#
# <!-- tracks -->
#
# Part one explains stages, two schedules, and where to cut a model. Part two adds better schedules and a real GPT.

# %%
from hpdl_lab import data, lab, models, schedules

lab.start(4)

# %% [markdown]
# # Part one: stages and bubbles
#
# ## The idea <!-- 1 full day 6 -->
#
# A model that is too large for one rank is cut into **stages** of a few layers. Activations go from stage to stage, and
# gradients come back:
#
#     rank 0  [ layers 0-2  ] ──x──> rank 1  [ layers 3-5  ] ──x──> ... ──> loss
#                             <─dx──                         <─dx── ... <──┘
#
# Now the model fits, but training is no faster: while one rank computes, the others wait. In the picture, hatched areas
# are waiting, and backward takes twice as long as forward.

# %%
lab.show("gpipe", ranks=4, micro_batches=1)

# %% [markdown]
# Each rank waits three quarters of the time. For a smaller bubble, cut the batch into **micro-batches**: while rank 1
# computes the first micro-batch, rank 0 computes the second.
#
# ## Predict
#
# With eight micro-batches, what share of the time do the four ranks still wait? A micro-batch is **live** on a rank
# while the rank holds its activations. How many are live on rank 0 at once?

# %% guess=[0.5, 1]
my_guess = lab.guess("share of the time that ranks wait, and micro-batches on rank 0", {"bubble": ..., "live": ...})

# %% [markdown]
# ## Exercise 10.1 ★★ GPipe <!-- 1 two days 12 -->
#
# List the actions of one rank in GPipe's schedule, in order. The list has no times: each action starts when its inputs
# are there. `Action(2, "F", 5)` is stage 2's forward of micro-batch 5; PyTorch writes it `2F5`.

# %% exercise="hpdl_lab.schedules.gpipe:gpipe"

# %% check="hpdl_lab.schedules.gpipe:gpipe"

# %% [markdown]
# ## Measure <!-- 1 full day 3 -->
#
# Four MPI ranks execute your schedule. The stages only sleep, 20 ms for a forward and 40 ms for a backward. Sleeping
# needs no core, so four ranks can run at once. Compare the bubble with your guess. If you left out 10.1, run
# `lab.catch_up("10.1")` first.

# %%
run = lab.pipeline(gpipe, micro_batches=8, prediction=my_guess)
assert run.measured.live == [8] * 4, f"{run.measured.live} live: this notebook wants four engines"
found = {"bubble": run.measured.bubble, "live": run.measured.live[0]}
lab.reveal("share of the time that ranks wait, and micro-batches on rank 0", found)
run

# %% [markdown]
# A forward takes tf seconds, and a backward tb. Then p ranks and m micro-batches take (m + p - 1)(tf + tb). The bubble
# is (p-1)/(m+p-1) of this time, here 27%. (Megatron divides by the ideal time: (p-1)/m, here 37.5%.) More micro-batches
# make the bubble small. What do they cost?
#
# ## Exercise 10.2 ★★ 1F1B <!-- 1 two days 12 -->
#
# Write the schedule 1F1B ("one forward, one backward"), in which each backward starts as soon as possible. In GPipe
# every rank holds the activations of all m micro-batches until the first backward. 1F1B frees activations earlier.
#
# (GPipe's paper saves memory by **rematerialization**: a stage keeps only its input, and backward computes the forward
# a second time. A step then takes 4/3 of the time.)

# %% exercise="hpdl_lab.schedules.one_f_one_b:one_f_one_b"

# %% check="hpdl_lab.schedules.one_f_one_b:one_f_one_b"

# %%
run = lab.pipeline(one_f_one_b, micro_batches=8, prediction=my_guess)
assert run.measured.live == [4, 3, 2, 1], f"live: {run.measured.live}"
run

# %% [markdown]
# 1F1B takes as long as GPipe, but no rank ever holds more than four micro-batches, even if there are 1,000.
#
# ## Diagnose: a schedule that deadlocks <!-- 1 homework 4 -->
#
# Here two ranks wait for each other. Find the cycle with a pencil, then run the cell: the lab refuses the schedule.

# %% tags=["raises-exception"]
mine = schedules.from_strings([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], name="mine")
lab.pipeline(mine)

# %% [markdown]
# ## Where to cut <!-- 1 two days 5 -->
#
# All ranks go at the pace of the slowest stage, so all stages should take the same time. Equal numbers of layers are
# not enough. Take a GPT of twelve layers: the token embedding, ten blocks, and the output layer (the head). The
# embedding costs as much as three blocks, the head as much as six. How many layers would you give to each of four
# stages?

# %% guess=[3, 4, 4, 1]
my_cut = lab.guess("layers of stages 0 to 3, 12 in all", {0: ..., 1: ..., 2: ..., 3: ...})

# %% [markdown]
# The first picture has three layers in each stage, the second has your stages. The rank that waits least is the
# slowest. Can this rank give a layer to a neighbor?

# %%
costs = [3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 6]
cuts = {"three layers each": [3, 3, 3, 3], "yours": list(my_cut.values())}
parts = {name: [sum(costs[sum(n[:i]) : sum(n[: i + 1])]) for i in range(4)] for name, n in cuts.items()}
drawn = [lab.show("1f1b", forward=part, backward=[2 * c for c in part]) for part in parts.values()]
equal, yours = (picture.data.makespan for picture in drawn)
print(f"{parts}: {1 - yours / equal:.0%} of the time is saved")

# %% [markdown]
# # Part two: no bubble, real stages, two replicas
#
# ## Interleaved <!-- 2 homework 3 -->
#
# Megatron-LM gives each rank several short stages instead of a long one: rank 0 has stages 0 and 4, rank 1 has 1 and 5.
# The first micro-batch reaches the last rank in half the time, and the bubble is half as long. But every micro-batch
# passes all ranks twice, with twice as many messages. In the picture, each rank has a lane for each of its stages.
# Before its first backward, rank 0 does seven forwards of stage 0 and four of stage 4. These 11 forwards of short
# stages take as much memory as 5.5 of long stages; 1F1B holds 4.

# %%
lab.show("interleaved", chunks=2, play=True)

# %% [markdown]
# ## Exercise 10.3 ★★★ Zero bubble <!-- 2 homework 22 -->
#
# Write the schedule ZB-H1, which computes something useful in the bubble. ZB-H1 cuts backward into two computations,
# each as long as a forward. **I** computes the gradient of the stage's input, and the previous stage waits for it.
# **W** computes the gradients of the weights. No stage waits for W, so a rank can do W later. When?

# %% exercise="hpdl_lab.schedules.one_f_one_b:zero_bubble_h1"

# %% check="hpdl_lab.schedules.one_f_one_b:zero_bubble_h1"

# %%
run = lab.pipeline(zero_bubble_h1, micro_batches=8, prediction=my_guess)
assert run.measured.live == [4] * 4, f"live: {run.measured.live}"
print(f"ranks wait {run.measured.bubble:.0%} of the time; 11% was the number to reach, from 75%")
run

# %% [markdown]
# `schedules.to_csv` writes a schedule as text, which `torch.distributed.pipelining` can load. The next cell prints
# ZB-H1 in a short form (5FIW is F, I and W five times), then rank 3's row in full:

# %%
plan = schedules.build("zero_bubble_h1", ranks=4, micro_batches=8)
print(plan, schedules.to_strings(plan)[3], sep="\n\n")

# %% [markdown]
# Now move the sliders. How many micro-batches does 1F1B need for a bubble below 10%, with 4 stages and with 8? How many
# micro-batches does a rank hold in each schedule? And for which schedule does the bubble grow if backward is as short
# as forward?

# %%
lab.explore("pipeline", prediction=my_guess)

# %% [markdown]
# ## Exercise 10.4 ★★★ What a stage does <!-- 2 homework 20 -->
#
# Write the backward of one micro-batch through one stage of a real model. The library does the forwards, and keeps
# their inputs and outputs in `saved`. From which rank do you receive, and to which rank do you send? Ask the schedule:
# stage s + 1 is not always on rank r + 1.

# %% exercise="hpdl_lab.parallel.pipeline.naive:do_backward"

# %% check="hpdl_lab.parallel.pipeline.naive:do_backward"

# %% [markdown]
# ## A GPT in four pieces <!-- 2 two days 6 -->
#
# This is the GPT of notebook 06 with eight blocks. The lab measures the time of each layer, and cuts the model so that
# the slowest stage is as fast as possible. Four ranks share your cores now, so the bars of the next plot include
# **waiting for a core**. Compare "planned" with "measured": the plan uses stage times from an earlier training step.

# %%
deep = models.build_for(data.load("text"), "gpt", layers=8)
lab.pipeline("1f1b", micro_batches=8, model=deep)

# %% [markdown]
# Gradients of micro-batches are added, so the losses are a single rank's losses with the whole batch:

# %%
course = {"model": "gpt", "data": "text", "dtype": "float64", "steps": 3}
alone = lab.train(**course, ranks=1)
piped = lab.train(**course, mesh={"pp": 4}, schedule="zero_bubble_h1", micro_batches=4)
off = max(abs(a - b) for a, b in zip(alone.losses, piped.losses, strict=True))
assert off < 1e-10
print(f"after 3 steps the losses of four stages and of one rank differ by {off:.0e} at most")

# %% [markdown]
# ## GEMS: memory first <!-- 2 homework 10 -->
#
# Pathologists train on images so large that the activations of **one** example fill a GPU. A micro-batch is then one
# example. A rank holds up to four of them in 1F1B, but only one in **GEMS** (Jain et al., SC20). Two replicas of the
# model lie on the same ranks in opposite directions. On each rank, the backward of one replica is followed by the
# forward of the other replica. In a step, each replica has one micro-batch (GEMS-MAST) or several (GEMS-MASTER). After
# the step, the replicas add their gradients.

# %%
lab.show("gems_master", micro_batches=6)

# %% [markdown]
# Without GEMS, N micro-batches one after the other take N·p·(tf + tb). With GEMS they take p·tf + N·p·tb + (N-1)·tf.
# The first forward takes p·tf, and each backward p·tb. The other N - 1 forwards run during backwards. But on the last
# stage, which has no backward to do meanwhile, each of these forwards still adds tf. The price is a second copy of the
# weights. How many times as fast is GEMS for N = 8, p = 4 and tb = 2 tf?

# %% guess=[1.5]
my_speedup = lab.guess("times as fast as stages that wait for each other", ...)

# %%
rows = [[f"{rank}{kind}{i}" for i in range(8) for kind in "FB"] for rank in range(4)]
waiting = lab.pipeline(schedules.from_strings(rows, name="one after another"))
gems = lab.pipeline("gems_master", micro_batches=8, prediction=1 - my_speedup / 4)  # 4 ranks that never wait: 4 times

# %%
planned = waiting.predicted.makespan / gems.predicted.makespan
speedup = waiting.measured.makespan / gems.measured.makespan
assert round(planned, 2) == round(96 / 75, 2) and waiting.measured.live == gems.measured.live == [1] * 4
assert 0.3 < speedup < 4, f"{speedup:.2f}: a rank has waited long for a core, run the cell above again"
lab.reveal("times as fast as stages that wait for each other", speedup)
print(f"with one live micro-batch; by the formula {planned:.2f} times as fast")

# %% [markdown]
# **What they reported:** GEMS, with data parallelism around it, trained a ResNet with 1,000 layers on 1,024 V100 GPUs
# with a scaling efficiency of 97.32%. On tiles of 1,024 × 1,024 pixels from images of 100,000 × 100,000, GEMS reduced
# the training time from seven hours to 28 minutes. *(A. Jain, A. A.
# Awan, A. M. Aljuhani, J. M. Hashmi, Q. G. Anthony, H. Subramoni, D. K. Panda, R. Machiraju, A. Parwani: "GEMS:
# GPU-Enabled Memory-Aware Model-Parallelism System for Distributed DNN Training", SC20, abstract; doi
# 10.1109/SC41405.2020.00049.)*

# %% [markdown]
# ## DualPipe: hide the all-to-all <!-- 2 homework 3 -->
#
# In most layers of DeepSeek-V3, tokens travel to experts, small MLPs on other ranks ([12](12_large_models.ipynb)). In
# an **all-to-all**, each rank sends different data to every other rank. One all-to-all (dispatch) takes tokens to
# experts, a second one (combine) brings the results back. Together, the two all-to-alls take about as long as the
# layer's computing.
#
# **DualPipe** pairs the forward of one micro-batch with the backward of another. While the tokens of one micro-batch
# travel, the rank computes the other micro-batch. Micro-batches enter the pipeline from **both ends**: as in GEMS, two
# replicas lie on the same ranks in opposite directions.
#
# If forward, I and W take one unit each, DualPipe takes 3m + 2 units on four ranks. A rank holds the activations of
# five micro-batches, and the weights of two stages. Two other schedules, zero-bubble V and DualPipe-V, need only one
# copy of the model, with 2p stages: rank r has stages r and 2p - 1 - r.

# %%
for name in ("1f1b", "zero_bubble_h1", "zero_bubble_v", "dualpipe", "dualpipe_v"):
    plan = schedules.build(name, ranks=4, micro_batches=8)
    times = schedules.evaluate(plan)
    live = max(times.peak) / plan.chunks  # stages of V-shaped ones are half as long
    print(f"{name:15} {times.makespan:4g} units of time, bubble {times.bubble:.1%}, live at most {live:g}")
lab.show("dualpipe", micro_batches=8)

# %% [markdown]
# ## Predict
#
# The printed times leave out all-to-alls. Without them DualPipe takes 26 units, and ZB-H1 takes 27. DualPipe's real
# gain is to hide the all-to-alls. Next, a small DeepSeek runs on 4 × 2 simulated ranks: four stages, and two ranks
# share the experts of each stage. An all-to-all takes about as long as attention. It is exposed while the rank has
# nothing to compute. If the forward and the backward of a pair do not overlap, every all-to-all is exposed. What share
# of the all-to-alls stays exposed with overlap?

# %% guess=[0.5]
my_share = lab.guess("share of the all-to-alls that stays exposed", ...)

# %%
run = lab.dualpipe(micro_batches=8, prediction=my_share)
lab.reveal("share of the all-to-alls that stays exposed", run.shares[1])
assert run.shares[0] > 0.99 and run.together.seconds < run.alone.seconds
run

# %% [markdown]
# ## Exercise 10.5 ★ Read it in the timeline <!-- 2 homework 5 -->
#
# List the actions that hide an all-to-all, and the time in which nothing hides it. You are given a bar from the lane
# "all-to-all" of the last picture, and all bars from the lane "computes".

# %% exercise="hpdl_lab.parallel.pipeline.overlap:hidden_by"

# %% check="hpdl_lab.parallel.pipeline.overlap:hidden_by"

# %% [markdown]
# Now your function reads the last picture. In a pair, the partner's computing hides each all-to-all. The first forwards
# and the last backwards have no partner, so their all-to-alls are exposed. With 16 micro-batches, a larger share of the
# actions is in pairs:

# %%
found = {f"{bar.name} of {bar.action}": hidden_by(bar, run.together.computing) for bar in run.together.sending}
hidden = [f"{name} lies under {', '.join(under)}" for name, (under, _) in found.items() if under]
print(f"{len(hidden)} of {len(found)} all-to-alls are hidden:", *hidden, sep="\n  ")
longer = lab.dualpipe(micro_batches=16)
assert longer.shares[1] < run.shares[1]

# %% [markdown]
# ## Take it home <!-- 2 homework 5 -->
#
# `torch.distributed.pipelining` has these schedules, too: `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B`,
# `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`, `ScheduleDualPipeV`. A `PipelineStage` is the part of the
# model on this rank. `schedule.step` runs forward and backward of all micro-batches. Its argument is the input on the
# first stage, and the targets on the last stage. First, write the data to a file:

# %% tags=["take-home"]
import torch

digits = data.load("digits")
torch.save([digits.train_x, digits.train_y], "take_home_digits.pt")

# %% tags=["take-home"]
# %%writefile take_home_10.py
"""Train in a pipeline by 1F1B: torchrun --standalone --nproc-per-node 2 take_home_10.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)  # so that the losses and those of the lab agree to ten digits
torch.manual_seed(0)
rank, size = dist.get_rank(), dist.get_world_size()
layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
mine = layers[:2] if rank == 0 else layers[2:]
stage = PipelineStage(mine, rank, size, device=torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.cross_entropy)  # or ScheduleGPipe
optimizer = torch.optim.SGD(mine.parameters(), lr=0.2, momentum=0.9)
train_x, train_y = torch.load("take_home_digits.pt")[:2]
order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(0))
for batch in order[: 3 * 128].split(128):
    losses = []  # of the micro-batches, on the last stage
    if rank == 0:
        schedule.step(train_x[batch].double())
    else:
        schedule.step(target=train_y[batch], losses=losses)
        print("loss", torch.stack(losses).mean().item())
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_10.py
print(out.n)

# %% [markdown]
# With this model and data, the lab's pipeline has the same losses:

# %% tags=["take-home"]
piped = lab.train("mlp", data="digits", dtype="float64", steps=3, mesh={"pp": 2}, micro_batches=8)
losses = [float(line.split()[-1]) for line in out.grep("loss")]
assert max(abs(a - b) for a, b in zip(losses, piped.losses, strict=True)) < 1e-10

# %% [markdown]
# ## Question to discuss
#
# You have 32 ranks, a model that needs at least 4, and a batch of 64 examples. Compare 8 pipelines of 4 ranks with 1
# pipeline of 32 ranks. Which has the smaller bubble, smaller messages, and less memory per rank? DualPipe needs a
# second copy of the weights. What does this cost each rank of DeepSeek-V3, in which 64 ranks share the experts of a
# stage?
#
# ## Where to read the real code
#
# - `hpdl_lab/schedules/`: your functions; `evaluation.py` computes times, `validation.py` refuses wrong schedules.
# - `hpdl_lab/parallel/pipeline/run_schedule.py`: executes any schedule; `split.py`: cuts an unchanged model;
#   `stage.py`: backward in halves; `overlap.py`: pairs of DualPipe.
# - `hpdl_lab/parallel/pipeline/naive.py`: GPipe in 60 lines.
# - In PyTorch: `torch/distributed/pipelining/schedules.py`.

# %% [markdown]
# ## Homework
#
# No other cell of this notebook needs this exercise.
#
# ## Exercise 10.6 ★★ Where to cut <!-- 2 homework 15 -->
#
# Cut a model into stages so that the most expensive stage is as cheap as possible. `lab.pipeline` calls your function
# with the measured time of each layer.

# %% exercise="hpdl_lab.parallel.pipeline.split:partition"

# %% check="hpdl_lab.parallel.pipeline.split:partition"

# %%
print("cut by you:", list(my_cut.values()), "by your function:", partition(costs, 4))
lab.pipeline("1f1b", micro_batches=8, model=deep, partition=partition)

# %% [markdown]
# ## Recap
#
# 1. A pipeline puts whole layers on each rank and sends only activations and gradients between ranks.
# 2. With p stages and m micro-batches, ranks wait (p-1)/(m+p-1) of the time. More micro-batches make this share
#    smaller.
# 3. 1F1B takes as long as GPipe, but holds p micro-batches at most, not m.
# 4. Interleaving, zero bubble and DualPipe fill the time in which ranks wait. The price is more messages or memory.
# 5. A schedule is a list of actions for each rank. All stages should take the same time.
#
# <!-- terms -->
#
# **What you can do now:** choose a schedule and a number of micro-batches, and predict bubble and memory.
#
# <!-- links -->
