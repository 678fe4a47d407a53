# %% [markdown]
# # 06 · Data parallelism
#
# **The number to reach:** hide at least 70% of the communication behind backward, with the same losses as a single
# rank, to 10⁻¹⁰. Communication is **exposed** if ranks wait for it.
#
# <!-- tracks -->
#
# Part one: replicas, buckets, overlap, and a GPT trained on Moby-Dick. Part two: S-Caffe, Horovod, PyTorch's DDP on
# your ring, and scaling plots that tell the truth.

# %%
from hpdl_lab import lab
from hpdl_lab.collectives import ring
from hpdl_lab.parallel.data_parallel import DataParallel, DataParallelNaive

lab.start(4)

# %% [markdown]
# # Part one: buckets and overlap
#
# ## The idea <!-- 1 half day 7 -->
#
# Every rank holds the whole model, a **replica**, and reads its own share of each batch. Backward makes a gradient for
# every parameter. The sum of the gradients over ranks is the gradient of the whole batch. So all replicas take the same
# step as one rank with the whole batch.
#
#     rank 0: model, share 0 ──> g0 ──┐                 ┌──> the same step
#     rank 1: model, share 1 ──> g1 ──┼── all-reduce ───┼──> the same step
#     rank 2: model, share 2 ──> g2 ──┤                 ├──> the same step
#     rank 3: model, share 3 ──> g3 ──┘                 └──> the same step
#
# Notebook 02 did this with two weights; a real model has hundreds of tensors. How often do ranks pay latency? How
# long do they wait? And are their models equal?
#
# How much of a step is communication? The picture shows four layers on four simulated ranks, first with a message for
# each tensor, then with one message for all. Look at the time after backward: only the network works.

# %%
lab.designs(DataParallelNaive(ring.all_reduce), DataParallel(ring.all_reduce))

# %% [markdown]
# While rank 0 computes, its network is idle; while it communicates, its core is idle. Backward makes the gradients one
# after the other, and begins with the last layer. The last layer's gradients could leave at once.
#
# ## Predict
#
# Let the gradients of each layer leave while backward computes the next layer. The time of one message for all
# gradients is 100%. How much of this time remains exposed? Then let 2, 4 and 1,024 ranks train a small GPT, with a
# batch that grows with the ranks. These ranks process more examples per second than one rank: how many times as many?

# %% guess=[0.5, 1.9, 3.5, 500]
my_exposed = lab.guess("share of that communication time that remains exposed, 0 to 1", ...)
my_speedup = lab.guess("times as fast as one rank", {2: ..., 4: ..., 1024: ...})

# %% [markdown]
# ## Exercise 6.1 ★ All ranks start from rank 0's model <!-- 1 half day 5 -->
#
# Copy rank 0's model to all ranks. Replicas that take equal steps stay equal only if they start equal.
# `comm.broadcast(x)` copies rank 0's `x` into `x` of every rank. A model has `model.parameters()` and
# `model.buffers()`.

# %% exercise="hpdl_lab.parallel.data_parallel:broadcast_parameters"

# %% check="hpdl_lab.parallel.data_parallel:broadcast_parameters"

# %% [markdown]
# ## Exercise 6.2 ★★ Average all gradients, in one message <!-- 1 full day 12 -->
#
# Average all gradients with one all-reduce. Every all-reduce costs 2(p-1) latencies, however small it is: pack the
# gradients into one flat tensor, and pay once.

# %% exercise="hpdl_lab.parallel.data_parallel:average_all_gradients"

# %% check="hpdl_lab.parallel.data_parallel:average_all_gradients"

# %% [markdown]
# ## Exercise 6.3 ★★ Cut the gradients into buckets <!-- 1 homework 12 -->
#
# Divide the gradients into buckets. A single message must wait for the last gradient. One message per tensor pays
# latency each time. **Buckets** are in between: each bucket holds a few gradients, in the order in which backward makes
# them.

# %% exercise="hpdl_lab.parallel.reducer:assign_buckets"

# %% check="hpdl_lab.parallel.reducer:assign_buckets"

# %% [markdown]
# ## Exercise 6.4 ★★★ Send buckets while backward goes on <!-- 1 full day 22 -->
#
# Send each bucket while backward goes on. Autograd calls a **hook** whenever a gradient is complete.
# `comm.background(f, x)` starts `f(comm, x)` asynchronously and returns a Work at once. Two traps: a hook that waits,
# and ranks that send their buckets in different orders.

# %% exercise="hpdl_lab.parallel.reducer:gradient_ready"

# %% check="hpdl_lab.parallel.reducer:gradient_ready"

# %% [markdown]
# ## Measure: how much remains exposed <!-- 1 half day 4 -->
#
# How long does rank 0 wait at the end? Compare one message after backward, your buckets after backward, and your
# buckets during backward.
#
# Did you leave out 6.2, 6.3 or 6.4? `lab.catch_up("6.4")` in a new cell defines their functions.

# %%
from hpdl_lab.parallel.data_parallel import DataParallelBucketed, DataParallelOverlapped

cut = {"bucket_nbytes": 263_168, "first_nbytes": 263_168, "assign_buckets": assign_buckets}  # bytes of a layer
mine = DataParallelOverlapped(ring.all_reduce, **cut, gradient_ready=gradient_ready)
after = DataParallelBucketed(ring.all_reduce, **cut)
steps = lab.designs(DataParallel(ring.all_reduce), after, mine, prediction=my_exposed)

# %%
left = steps[2].exposed * steps[2].seconds / (steps[0].exposed * steps[0].seconds)
assert left < 0.3, f"{left:.0%} remains exposed: do your buckets leave while backward goes on?"
lab.reveal("share of that communication time that remains exposed, 0 to 1", left)

# %% [markdown]
# Only the last bucket, a quarter of the model, remains exposed: when this bucket leaves, backward is over. How large is
# the last bucket with 96 layers?
#
# The next picture assumes 100 MB of gradients, and 16 ranks on Ethernet of 25 Gbit/s. Move the sliders. `ratio` is the
# time of backward divided by the time of one all-reduce of everything. On the right, why does exposed time rise for
# small buckets, and why for large ones? How far does the best size move from 12 to 96 layers?

# %%
lab.explore("buckets", prediction=my_exposed)

# %% [markdown]
# ## One big batch <!-- 1 full day 3 -->
#
# Four ranks with your `assign_buckets` and `gradient_ready` take the same steps as one rank with the whole batch. The
# next cell compares their losses on a GPT that predicts the next character of Moby-Dick. Numbers have 64 bits, so that
# rounding does not hide a mistake.
#
# Learning depends on the global batch: 4 ranks with 8 examples each take the step of one rank with 32. If you keep 8
# per rank and add ranks, the batch grows. The usual rule then raises the learning rate in proportion, and warms it up
# (Goyal et al. 2017).
#
# Three methods need care, because each depends on the examples of all ranks:
#
# - Clipping by the norm comes after the sum. Before the sum, each rank would clip by a different norm.
# - Batch normalization sees only its own rank's examples, unless it adds its means over ranks (SyncBatchNorm).
# - In float16 small gradients become zero, so the loss is multiplied by a large number. If one rank's gradients then
#   overflow, all ranks must skip the step.

# %%
course = {"model": "gpt", "data": "text", "dtype": "float64", "steps": 5}
alone = lab.train(**course, ranks=1)
together = lab.train(**course, strategy=mine)
off = max(abs(a - b) for a, b in zip(alone.losses, together.losses, strict=True))
assert off < 1e-10
print(f"after 5 steps the losses of four ranks and of one differ by {off:.0e} at most")

# %% [markdown]
# ## Train with it <!-- 1 half day 6 -->
#
# Now train for 200 steps in 32 bits. The communicator's fastest all-reduce runs in C++, in its own thread, while
# backward goes on. A perplexity of 81 means a guess among all 81 characters; a perplexity of 10 means a guess among
# ten.

# %%
cut = {"bucket_nbytes": 100_000, "first_nbytes": 20_000, "assign_buckets": assign_buckets}
overlapped = DataParallelOverlapped(**cut, gradient_ready=gradient_ready)
trained = lab.train(model="gpt", data="text", strategy=overlapped, steps=200)
assert trained.perplexity < 12
trained

# %% [markdown]
# What has the model learned from 6,400 windows (pieces of 64 characters)? Below, the model continues "Call me ", and
# draws each character from its own probabilities. The first text is from before training.

# %%
from hpdl_lab import data, models
from hpdl_lab.data.text import decode, encode
from hpdl_lab.models.gpt import generate

for gpt in (models.build_for(data.load("text"), "gpt"), trained.model):
    print(decode(generate(gpt, encode("Call me "), 90)), end="\n---\n")

# %% [markdown]
# These are the last four steps of the four ranks and their background threads:

# %%
begin = sorted(e.t0_ns for e in trained.events if e.op == "forward")[-16]  # of four steps on four ranks
lab.show([e for e in trained.events if e.t0_ns >= begin])

# %% [markdown]
# Here four ranks share your cores, and rank 0 waits for ranks that are not scheduled. Gray is waiting. With one core
# per rank, ranks wait only for communication that backward did not hide. The next cell replays a recording: two steps
# on two ranks with a core each. Messages travel during backward, and ranks wait less than a fiftieth of the time.

# %%
lab.replay("overlap_amd_epyc_2_cores")

# %% [markdown]
# ## Does it scale? First a success <!-- 1 half day 4 -->
#
# In **weak scaling** every rank gets the same work, here 128 windows of text. More ranks then mean a larger batch in
# the same time. How close do the points come to the dashed diagonal, where p ranks do p times the work?
#
# Blue points are real ranks: one and two, because most machines have a core for each of two ranks. Green points are
# simulated ranks, each as fast as one of your cores, joined by InfiniBand of 200 Gbit/s.

# %%
from hpdl_lab.comm.network import Switch

job = {"strategy": overlapped, "model": "gpt", "data": "text", "kind": "weak", "n": 128}
weak = lab.scaling(**job, ranks=(1, 2), network=Switch.of("infiniband_hdr"), prediction=my_speedup)
assert {row["ranks"]: row["speedup"] for row in weak.simulated}[64] > 0.7 * 64
weak

# %% [markdown]
# The points stay near the diagonal, because each rank has as much to compute as before, and backward hides the
# messages. A ring's latency grows with p, and bends the curve at 1,024 ranks. In the table, "exposed" is the share of a
# step in which a rank only waits for messages. "overlap" is the share
# of the messages that computing hides. "imbalance" is the computing time of the slowest rank over the mean.
#
# **Strong scaling** is harder: more and more ranks share the **same** windows. Every rank computes less and less, and
# its gradients stay as large as before.
#
# # Part two: what other systems do, and how far it scales
#
# ## S-Caffe: three designs <!-- 2 homework 6 -->
#
# In 2017 S-Caffe trained with a root, rank 0. The root broadcasts the parameters before each forward, layer by layer,
# and adds up all gradients after backward. The picture has three designs of this step, with formulas: b is broadcast, f
# forward, B backward, r reduction (sums). Which term disappears from one design to the next? And why can the first b
# and the last r never be hidden?

# %%
from hpdl_lab.parallel.scaffe import SCaffe, SCaffeOverlappedPropagation, SCaffeOverlappedReduction

lab.designs(SCaffe(), SCaffeOverlappedPropagation(), SCaffeOverlappedReduction())

# %% [markdown]
# ## Horovod: just a few lines <!-- 2 homework 5 -->
#
# Horovod's promise was that a few lines turn a script for one rank into a script for many:
#
#     comm = hpdl_lab.comm.world()                         # 1
#     broadcast_parameters(comm, model)                    # 2
#     optimizer = DistributedOptimizer(optimizer, comm)    # 3
#
# Horovod itself asks for seven lines:
#
#     hvd.init()
#     torch.cuda.set_device(hvd.local_rank())
#     sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
#     optimizer = SGD(model.parameters(), lr=rate * hvd.size())
#     hvd.broadcast_parameters(model.state_dict(), root_rank=0)
#     hvd.broadcast_optimizer_state(optimizer, root_rank=0)
#     optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
#
# The sampler is forgotten most often: without a sampler all ranks train on the same data. The rate grows with the ranks
# because the global batch does.
#
# Here `hvd` is `horovod.torch`. `horovod.tensorflow`, `horovod.keras` and `horovod.mxnet` have the same calls.
#
# Gradients become ready in any order, so ranks first agree on what to send (**negotiation**). In every cycle, each rank
# sends rank 0 a list of its ready gradients. Rank 0 answers with the gradients that travel next. A cycle takes a
# millisecond (`HOROVOD_CYCLE_TIME`). From the second training step on, the answer comes from a cache. Gradients that
# fit into a buffer travel together (**tensor fusion**).
#
# The script below has the lab's three lines. In the picture after the script, an orange mark means that a
# gradient is ready on one more rank.

# %% shown="hpdl_lab.parallel.scripts:horovod_script"

# %%
from hpdl_lab import data

text = data.load("text")
lab.show(lab.run(horovod_script, text, 2, True), "horovod")

# %% [markdown]
# ## Diagnose: one step more <!-- 2 homework 4 -->
#
# Rank 2 has a few examples more than the others, and its loop runs one step longer. Predict the report: which rank
# waits, for which ranks, in which call? Then run the cell. The engines recover afterwards.

# %% tags=["raises-exception"]
from hpdl_lab.comm import PerRank

lab.run(horovod_script, text, PerRank([3, 3, 4, 3]), deadline=5)

# %% [markdown]
# ## Exercise 6.5 ★★★ PyTorch's DDP on your own ring <!-- 2 homework 12 -->
#
# Average one bucket of PyTorch's `DistributedDataParallel` (DDP) on your own ring. DDP does the work of 6.1 to 6.4, and
# lets you replace one thing: what happens to a bucket.

# %% exercise="hpdl_lab.parallel.ddp:ddp_hook"

# %% check="hpdl_lab.parallel.ddp:ddp_hook"

# %% [markdown]
# PyTorch's DDP trains the same GPT, with your hook and a ring of Python:

# %% shown="hpdl_lab.parallel.scripts:ddp_script"

# %%
losses = lab.run(ddp_script, text, 30, ring.all_reduce, ddp_hook)[0]
assert losses[-1] < 3.3
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps of DDP")

# %% [markdown]
# ## Exercise 6.7 ★★ Convert this script: data parallel <!-- 2 full day 20 -->
#
# Make the script below data parallel with the tools of PyTorch. Only its text and model are from this lab. On one rank
# it prints the loss of each step, then the loss of a test batch, and saves the model. On two ranks the script has to
# print the same numbers, and save the same file:
#
#     torchrun --standalone --nproc-per-node 2 train_ddp.py
#
# The batch of 32 is shared by both ranks. The backend is `"gloo"` on CPUs, and `"nccl"` on GPUs. Change the cell and
# run it, which writes the file. The cell below launches the file, compares its losses with the losses of one rank, and
# says what is wrong.

# %% script="train_ddp"

# %% check_script="train_ddp"

# %% [markdown]
# Two ranks add in a different order than one. In 64 bits, as here, that changes the losses by less than 10⁻¹⁴. In 32
# bits the same training differs by 5 · 10⁻⁷, which can hide a small mistake.
#
# **Horovod** asks for the same changes, in the seven lines of "Horovod: just a few lines". **DeepSpeed** makes the
# optimizer from a file, `ds_config.json`, and takes over backward and step; the sampler remains yours:
#
#     - optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
#     + engine, _, _, _ = deepspeed.initialize(
#     +     model=model, model_parameters=model.parameters(), config="ds_config.json")
#
#     -     optimizer.zero_grad()
#     -     loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
#     -     loss.backward()
#     -     optimizer.step()
#     +     loss = cross_entropy(engine(x).flatten(0, 1), y.flatten())
#     +     engine.backward(loss)
#     +     engine.step()
#
#     {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 16,
#      "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
#      "zero_optimization": {"stage": 1}}
#
# On two ranks 32 is 2 × 16. Stage 1 divides the state of the optimizer among ranks ([08](08_memory.ipynb)). Stage 2
# also divides gradients, and stage 3 parameters.

# %% [markdown]
# ## Bring your own script <!-- 2 homework 6 -->
#
# A script that is right on one rank may hang on many, or compute a wrong result. `lab.watch` runs any script,
# unchanged, and says what is wrong with it. In a terminal, call `hpdl watch --nproc-per-node 2 train.py`. The script
# below runs to its end, and its loss falls. Read it first: how many mistakes does it have?

# %% guess=[1]
my_mistakes = lab.guess("mistakes in the script", ...)

# %% tags=["take-home"]
# %%writefile take_home_06_watch.py
"""Fit a small network, with mistakes: torchrun --standalone --nproc-per-node 2 take_home_06_watch.py"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
points = torch.randn(512, 10, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(points, points.sin().sum(1, keepdim=True))
loader = DataLoader(dataset, 32, sampler=DistributedSampler(dataset))
model = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _epoch in range(5):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    if dist.get_rank() == 0:
        print("loss", loss.item())
torch.save(model.state_dict(), "take_home_06_watch.pt")
dist.destroy_process_group()

# %%
watched = lab.watch("take_home_06_watch.py", ranks=2)
wrong = [finding.name for finding in watched.findings if finding.kind == "wrong"]
lab.reveal("mistakes in the script", len(wrong))
watched

# %% [markdown]
# Repair the script in its cell, and run that cell and the next one again, until nothing is wrong. Under "To be looked
# at", the report lists what may be intended: here only one rank's loss is printed, and the learning rate is as for one
# rank. With `--strict` the command ends with 1 if something is wrong: run it before a job that costs money.

# %% tags=["take-home"]
# out = !hpdl watch --strict --nproc-per-node 2 take_home_06_watch.py; echo exit code $?
print(out[-1])

# %% [markdown]
# ## Does it scale? Now the hard way <!-- 2 homework 6 -->
#
# Does strong scaling work as well? On the left there are 32 windows **in all** (strong), on the right 32 **per rank**
# (weak). The picture compares your prediction with three results. They are measured on your engines, computed by a
# model of latency, bandwidth and overlap, or simulated for up to 1,024 ranks. Simulated ranks compute as fast as one
# core of this machine, and send as fast as your engines, slower than InfiniBand. Gray points show no scaling, because
# their ranks share cores.

# %%
scaled = lab.scaling(strategy=mine, model="gpt", data="text", prediction=my_speedup)
speedups = {row["ranks"]: row["speedup"] for row in scaled.simulated if row["kind"] == "weak"}  # with a core each
lab.reveal("times as fast as one rank", {ranks: speedups[ranks] for ranks in my_speedup})
scaled

# %% [markdown]
# Strong scaling fails, and not because of a mistake. With 32 ranks, each rank has only one window to compute. But it
# still sends all gradients. Beyond 32, some ranks have nothing to do. So real jobs let the batch grow with the ranks,
# as far as the model still learns from it.

# %% [markdown]
# ## Take it home <!-- 2 homework 6 -->
#
# The script below is PyTorch's data parallelism, complete. It trains a GPT on the characters of the script itself. Put
# your model and data in place of `GPT` and `windows`.
#
# - `DistributedSampler` gives each rank its share of the windows. If it shuffles, call `set_epoch(epoch)` before each
#   epoch, or all epochs are alike.
# - `DistributedDataParallel` copies rank 0's parameters to all ranks (6.1), and sends buckets during backward (6.3,
#   6.4).
# - The hook averages buckets (6.5); `bf16_compress_hook` in its place would send 16 bits of each number.
# - `no_sync` is in 6.6. Gradients are clipped after their sum, and `reduce` is only for the printed loss.

# %% tags=["take-home"]
from shutil import copy

from hpdl_lab.models import plain_gpt

copy(plain_gpt.__file__, "take_home_gpt.py")  # plain torch: a GPT, and windows of a text

# %% tags=["take-home"]
# %%writefile take_home_06.py
"""Train a GPT by DistributedDataParallel: torchrun --standalone --nproc-per-node 4 take_home_06.py"""

import torch
import torch.distributed as dist
from take_home_gpt import GPT, windows_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)  # so that the losses of 1 and 4 ranks agree to ten digits
torch.manual_seed(0)
rank, size = dist.get_rank(), dist.get_world_size()
windows, vocabulary = windows_of(__file__)  # it learns this file
loader = DataLoader(windows, 32 // size, sampler=DistributedSampler(windows))
model = nn.parallel.DistributedDataParallel(GPT(vocabulary), bucket_cap_mb=0.1)
model.register_comm_hook(None, allreduce_hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _, batch in zip(range(5), loader, strict=False):
    with model.no_sync():  # gradients stay here; those of the second half travel with them
        (first := model(batch[::2]) / 2).backward()
    (second := model(batch[1::2]) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.reduce(loss := (first + second).detach() / size, dst=0)
    if rank == 0:
        print("loss", loss.item())
del model  # while DDP still holds the group, gloo can hang in destroy_process_group or after it
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 take_home_06.py
print(out.n)
one = [float(line.split()[-1]) for line in out.grep("loss")]

# %% [markdown]
# Now four ranks run the same file under torch's profiler. Each rank writes a trace, which
# `ui.perfetto.dev` and `lab.show` open. `lab.show(trained, save="trained.json")` saves the lab's traces.

# %% tags=["take-home"]
# %%writefile take_home_06_profile.py
"""Profile a script: torchrun --standalone --nproc-per-node 4 take_home_06_profile.py take_home_06.py"""

import os
import runpy
import sys

import torch

with torch.profiler.profile() as profiler:
    runpy.run_path(sys.argv[1], run_name="__main__")
name = sys.argv[1].removesuffix(".py")
profiler.export_chrome_trace(f"{name}_rank{os.environ['RANK']}.json.gz")

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 take_home_06_profile.py take_home_06.py
print(out.n)

# %% tags=["take-home"]
lab.show("take_home_06_rank*.json.gz")

# %% [markdown]
# Every step has two forwards and two backwards. Nothing is sent during the first backward, and the buckets travel
# during the second. The `all_gather` at the beginning is DDP's own check that all ranks have the same model.

# %% tags=["take-home"]
lab.run("take_home_06.py")  # on the engines: the file, or your function, finds what torchrun would tell it

# %% tags=["take-home"]
four = [float(line.split()[-1]) for line in out.grep("loss")]
assert len(four) == 5 and max(abs(a - b) for a, b in zip(one, four, strict=True)) < 1e-10

# %% [markdown]
# ## Question to discuss
#
# In strong scaling the work per rank shrinks, and the gradients do not. From how many ranks on can the communication no
# longer be hidden? What would you change first: the batch, the buckets, the network, or the all-reduce?
#
# ## Where to read the real code
#
# - `hpdl_lab/parallel/data_parallel.py`, `hpdl_lab/parallel/reducer.py`: your functions, and the classes that call
#   them. `hpdl_lab/parallel/horovod.py`: what Horovod does in the background.
# - `hpdl_lab/parallel/scaffe.py`: the three designs; `hpdl_lab/parallel/ddp.py`: the hook, blocking and not.
# - `hpdl_lab/models/gpt.py`: the GPT; `hpdl_lab/parallel/training.py`: the loop around it.
# - `csrc/progress.h`: the thread that sends while Python computes.

# %% [markdown]
# # Appendix: micro-batches
#
# ## Exercise 6.6 ★★ Micro-batches, and ranks with less to do <!-- 3 homework 15 -->
#
# Write the training loop. A batch that does not fit into memory goes through the model in parts, called
# **micro-batches**. In **gradient accumulation** the gradients of all micro-batches add up on the rank before anything
# travels. A rank with fewer batches ("Diagnose: one step more") must not leave early, because a sum needs every rank.
#
# PyTorch's DDP has two context managers. In `model.no_sync()` gradients add up on the rank. In `model.join()` a rank
# that is done still takes part in the sums of the other ranks.

# %% exercise="hpdl_lab.parallel.training:train_steps"

# %% check="hpdl_lab.parallel.training:train_steps"

# %% [markdown]
# ## Recap
#
# 1. Replicas stay equal if they start equal and take equal steps: broadcast once, average gradients always.
# 2. One message for all gradients saves latency; buckets let the first gradients leave while backward goes on.
# 3. Communication that hides behind backward costs nothing; what remains is exposed.
# 4. With a fixed batch the work per rank shrinks and the gradients do not: strong scaling ends there.
# 5. Horovod, S-Caffe and PyTorch's DDP differ in when a bucket leaves, not in what is computed.
#
# <!-- terms -->
#
# **What you can do now:** make a training script data parallel, choose a bucket size, and tell from a timeline what
# communication costs.
#
# <!-- links -->
