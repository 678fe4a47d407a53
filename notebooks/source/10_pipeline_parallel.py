# %% [markdown]
# # 10 · Pipeline parallelism
#
# **The number to reach:** four ranks that wait 11% of their time instead of 75%, with four micro-batches in memory
# instead of eight; and the same loss as a single rank, to 10⁻¹⁰.
#
# <!-- tracks -->
#
# Part one: stages, micro-batches, GPipe, 1F1B, and where to cut a model. Part two: zero bubble, what a stage does, a
# GPT in four pieces, and GEMS's two replicas in opposite directions.

# %%
from hpdl_lab import data, lab, models, schedules

lab.start(4)

# %% [markdown]
# # Part one: stages and bubbles
#
# ## The idea <!-- 1 homework 6 -->
#
# A model that is too large for one rank is cut into **stages** of a few layers each. Activations go from stage to
# stage, gradients come back:
#
#     rank 0  [ layers 0-2  ] ──x──> rank 1  [ layers 3-5  ] ──x──> ... ──> loss
#                             <─dx──                         <─dx── ... <──┘
#
# That fits into memory, and is no faster than one rank: while one works, the others wait. Time goes from left to
# right, hatched areas are waiting, and backward takes twice as long as forward.

# %%
lab.show("gpipe", ranks=4, micro_batches=1)

# %% [markdown]
# The waiting is called the **bubble**. Now cut the batch into **micro-batches**: when rank 1 has the first one, rank 0
# can begin the second.
#
# ## Predict
#
# Four ranks, eight micro-batches: what share of the time do they still wait? And how many micro-batches' activations
# does rank 0 have to hold at once?

# %% guess=[0.5, 1]
my_guess = lab.guess("share of the time that ranks wait, and micro-batches on rank 0", {"bubble": ..., "live": ...})

# %% [markdown]
# ## Exercise 10.1 ★★ GPipe <!-- 1 homework 12 -->
#
# A schedule says in which order a rank works, not when: the times follow from what it has to wait for. So a row of
# the picture is a list. `Action(2, "F", 5)` is stage 2's forward of micro-batch 5; `str` of it is `2F5`, which is
# also how PyTorch writes it.

# %% exercise="hpdl_lab.schedules.gpipe:gpipe"

# %% check="hpdl_lab.schedules.gpipe:gpipe"

# %% [markdown]
# ## Measure <!-- 1 homework 3 -->
#
# Your schedule, executed by four MPI ranks. The stages here only sleep, 20 ms for a forward, 40 ms for a backward.
# Sleeping takes no core, so four of them behave on your machine as they would on four machines.

# %%
run = lab.pipeline(gpipe, micro_batches=8, prediction=my_guess)
assert run.measured.live == [8] * 4, f"{run.measured.live} live: this notebook wants four engines"
found = {"bubble": run.measured.bubble, "live": run.measured.live[0]}
lab.reveal("share of the time that ranks wait, and micro-batches on rank 0", found)
run

# %% [markdown]
# p ranks and m micro-batches take (m + p - 1)(tf + tb): the bubble is (p - 1)/(m + p - 1) of the whole time, however
# fast the ranks are. (Megatron's papers divide by the ideal time instead and write (p - 1)/m: here 37.5% and not
# 27%.) More micro-batches make it small. What do they cost?
#
# ## Exercise 10.2 ★★ 1F1B <!-- 1 homework 12 -->
#
# In GPipe every rank holds the activations of all m micro-batches until the first backward. (The paper keeps only
# what arrives at a stage and computes the forward again, **rematerialization**: with a backward of two forwards that
# is 4 units of work in place of 3, for far less memory.) 1F1B, one forward, one backward, starts a backward as soon
# as one is possible.

# %% exercise="hpdl_lab.schedules.one_f_one_b:one_f_one_b"

# %% check="hpdl_lab.schedules.one_f_one_b:one_f_one_b"

# %%
run = lab.pipeline(one_f_one_b, micro_batches=8, prediction=my_guess)
assert run.measured.live == [4, 3, 2, 1], f"live: {run.measured.live}"
run

# %% [markdown]
# The same time, and no rank ever holds more than four, even with 1,000 micro-batches.
#
# ## Diagnose: a schedule that deadlocks <!-- 1 homework 4 -->
#
# Two ranks, each with an order of its own. Who waits for whom? Find the cycle with a pencil, then run the cell: a
# schedule is refused before anything runs.

# %% tags=["raises-exception"]
mine = schedules.from_strings([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], name="mine")
lab.pipeline(mine)

# %% [markdown]
# ## Where to cut <!-- 1 homework 5 -->
#
# All ranks go at the pace of the slowest stage. A GPT's token embedding, its blocks and its head do not cost the
# same, so stages with equal numbers of layers do not take equal time. Here is a model of twelve layers whose embedding
# costs as much as three blocks, and its head as much as six. How many layers would you give to each of four stages?

# %% guess=[3, 4, 4, 1]
my_cut = lab.guess("layers of stages 0 to 3, 12 in all", {0: ..., 1: ..., 2: ..., 3: ...})

# %% [markdown]
# Above: three layers for each stage. Below: yours. Which lane has no gaps, and can it give a layer to a neighbor?

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
# Megatron-LM gives each rank several short stages instead of a long one: rank 0 has stages 0 and 4, rank 1 has 1 and
# 5. The first micro-batch reaches the last rank in half the time, and the bubble is half as long. But every
# micro-batch goes round twice: that means twice the messages, and more to hold. Rank 0 has the activations of 11
# stages, each half as long, where 1F1B has 4 whole ones. Each rank has a lane for each of its stages.

# %%
lab.show("interleaved", chunks=2, play=True)

# %% [markdown]
# ## Exercise 10.3 ★★★ Zero bubble <!-- 2 homework 22 -->
#
# Backward is two computations: the gradient of the **input** (I), for which the stage before waits, and those of the
# **weights** (W), for which nobody waits. Together they take as long as before. So what can be done during the
# bubble?

# %% exercise="hpdl_lab.schedules.one_f_one_b:zero_bubble_h1"

# %% check="hpdl_lab.schedules.one_f_one_b:zero_bubble_h1"

# %%
run = lab.pipeline(zero_bubble_h1, micro_batches=8, prediction=my_guess)
assert run.measured.live == [4] * 4, f"live: {run.measured.live}"
print(f"ranks wait {run.measured.bubble:.0%} of the time; 11% was the number to reach, from 75%")
run

# %% [markdown]
# Schedules are text, and go to PyTorch and back: `schedules.to_csv` writes what `torch.distributed.pipelining` loads,
# and its own schedules can be drawn here. DeepSeek's **DualPipe** goes one step further: it feeds micro-batches in
# from both ends of the pipeline, so that each rank holds two stages, and pairs the forward of one direction with the
# backward of the other. While one of the pair computes, the other one's messages (tensor, pipeline and expert)
# travel. Its authors write a row in short, and so can you:

# %%
plan = schedules.build("zero_bubble_h1", ranks=4, micro_batches=8)
print(plan, schedules.to_strings(plan)[3], sep="\n\n")

# %% [markdown]
# All of these are arithmetic, so play with them. How many micro-batches does 1F1B need for a bubble below 10%, with 4
# stages and with 8? What does each schedule hold meanwhile? And which of them gets worse if backward is as short as
# forward?

# %%
lab.explore("pipeline", prediction=my_guess)

# %% [markdown]
# ## Exercise 10.4 ★★★ What a stage does <!-- 2 homework 20 -->
#
# One action of one stage on a real model: backward of a micro-batch. The library does the forwards; your function
# gets `saved`, in which they left the input and output of the stage. Who sends what to whom? Ask the schedule: stage
# s + 1 is not always on rank r + 1.

# %% exercise="hpdl_lab.parallel.pipeline.naive:do_backward"

# %% check="hpdl_lab.parallel.pipeline.naive:do_backward"

# %% [markdown]
# ## A GPT in four pieces <!-- 2 homework 6 -->
#
# The GPT of notebook 06 with eight blocks, unchanged: it is cut by the time that its layers take here, so that the
# slowest stage is as fast as it can be. Four ranks share your cores now, so each bar includes the time in which the
# rank **waits for a core**; the plan uses what the stages took in the step before.

# %%
deep = models.build_for(data.load("text"), "gpt", layers=8)
lab.pipeline("1f1b", micro_batches=8, model=deep)

# %% [markdown]
# And it still learns what a single rank with the whole batch learns: the gradients of micro-batches add up.

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
# Pathologists train on images so large that **one** example fills the memory of a GPU. There are no micro-batches to
# cut such a batch into, and 1F1B would hold four at once. GEMS (Jain et al., SC20) holds one. Two replicas of the model
# lie on the same ranks in opposite directions: where one replica's backward ends, the other's forward begins. MAST has
# one micro-batch for each replica; MASTER has more before the replicas add their gradients.

# %%
lab.show("gems_master", micro_batches=6)

# %% [markdown]
# Compared with stages that just wait for each other, N micro-batches take p·tf + N·p·tb + (N-1)·tf instead of N·p·(tf
# + tb): of every later forward only its last stage, tf, is still exposed. The weights are held twice. What do you
# expect from that, for N = 8, p = 4, and backward twice as long as forward?

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
# with a scaling efficiency of 97.32%, and took the training on tiles of 1,024 × 1,024 pixels from whole-slide images of
# 100,000 × 100,000 from seven hours to 28 minutes. *(A. Jain, A. A. Awan, A. M. Aljuhani, J. M. Hashmi, Q. G. Anthony,
# H. Subramoni, D. K. Panda, R. Machiraju, A. Parwani: "GEMS: GPU-Enabled Memory-Aware Model-Parallelism System for
# Distributed DNN Training", SC20, abstract; doi 10.1109/SC41405.2020.00049.)* Yours is the inner part of that, on four
# ranks; notebook 11 puts data parallelism around it.

# %% [markdown]
# ## Take it home <!-- 2 homework 5 -->
#
# `torch.distributed.pipelining` has your schedules by name: `ScheduleGPipe`, `Schedule1F1B`,
# `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`, `ScheduleDualPipeV`. A
# `PipelineStage` is the part of the model that this rank has. `schedule.step` does all micro-batches, forward and
# backward; the first stage passes it the input, the last one the targets. First the data, as a file:

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
# The same model in the lab's pipeline, with the same data:

# %% tags=["take-home"]
piped = lab.train("mlp", data="digits", dtype="float64", steps=3, mesh={"pp": 2}, micro_batches=8)
losses = [float(line.split()[-1]) for line in out.grep("loss")]
assert max(abs(a - b) for a, b in zip(losses, piped.losses, strict=True)) < 1e-10

# %% [markdown]
# ## Question to discuss
#
# You have 32 ranks, a model that needs at least 4, and a batch of 64 examples. With 8 pipelines of 4, or 1 of 32: which
# has the smaller bubble, which the smaller messages, and which fits into less memory?
#
# ## Where to read the real code
#
# - `hpdl_lab/schedules/`: your functions; `evaluation.py`: from order to time;
#   `validation.py`: what is refused.
# - `hpdl_lab/parallel/pipeline/run_schedule.py`: executes any schedule; `split.py`: cuts an unchanged model;
#   `stage.py`: backward in halves.
# - `hpdl_lab/parallel/pipeline/naive.py`: the same in 60 lines, for GPipe.
# - In PyTorch: `torch/distributed/pipelining/schedules.py`, whose 1F1B, interleaved and zero-bubble orders are yours.

# %% [markdown]
# ## Homework
#
# No other cell of this notebook needs it.
#
# ## Exercise 10.5 ★★ Where to cut <!-- 2 homework 15 -->
#
# You have moved layers by hand. `lab.pipeline` measures what each layer of a model takes, and lets a function decide.

# %% exercise="hpdl_lab.parallel.pipeline.split:partition"

# %% check="hpdl_lab.parallel.pipeline.split:partition"

# %%
print("cut by you:", list(my_cut.values()), "by your function:", partition(costs, 4))
lab.pipeline("1f1b", micro_batches=8, model=deep, partition=partition)

# %% [markdown]
# ## Recap
#
# 1. A pipeline puts whole layers on each rank and sends only activations at their borders.
# 2. p stages and m micro-batches wait (p-1)/(m+p-1) of the time: more micro-batches, less bubble.
# 3. 1F1B takes the time of GPipe and holds p micro-batches at most, not m.
# 4. Interleaving and zero bubble fill the bubble by finer pieces of work, for more messages or more memory.
# 5. A schedule is a list of actions per rank, and every stage should take the same time.
#
# | term | what it means |
# |---|---|
# | stage | the layers that one rank has |
# | micro-batch | a part of the mini-batch that passes through the stages by itself |
# | bubble | the share of the time in which ranks wait |
# | GPipe, 1F1B | all forwards first; one forward, one backward |
# | interleaved | several short stages on each rank |
# | zero bubble | the gradient of the weights is computed where ranks would otherwise wait |
# | activations in flight | micro-batches whose activations a rank holds for backward |
# | rematerialization, recomputation | forward is done again in backward, and activations are not kept |
#
# **What you can do now:** choose a schedule and a number of micro-batches, and predict bubble and memory.
#
# <!-- links -->
