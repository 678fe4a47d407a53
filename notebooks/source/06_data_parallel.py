# %% [markdown]
# # 06 · Data parallelism
#
# **The number to reach:** at least 70% of the communication time that a blocking strategy exposes, hidden; and the
# same loss as a single rank, to 10⁻¹⁰.
#
# <!-- tracks -->
#
# Part one: replicas, buckets, overlap, and a GPT that learns from Moby-Dick with them. Part two: S-Caffe, Horovod,
# PyTorch's DDP on your ring, and scaling plots that tell the truth.

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
# Every rank holds the whole model, a **replica**, and sees its own share of each batch. Backward leaves a gradient for
# every parameter. Their sum over ranks is the gradient of the whole batch, so all replicas take the step that one rank
# with the whole batch would take.
#
#     rank 0: model, share 0 ──> g0 ──┐                 ┌──> the same step
#     rank 1: model, share 1 ──> g1 ──┼── all-reduce ───┼──> the same step
#     rank 2: model, share 2 ──> g2 ──┤                 ├──> the same step
#     rank 3: model, share 3 ──> g3 ──┘                 └──> the same step
#
# Notebook 02 did that with two weights. A real model has hundreds of tensors, and three questions come up: how often
# latency is paid, how long the ranks stand still, and whether their models are equal at all.
#
# Below, four layers on four simulated ranks, once with a message for every tensor, once with all of them packed into
# one. The network is fast here, so latency costs little; standing still costs more.

# %%
lab.designs(DataParallelNaive(ring.all_reduce), DataParallel(ring.all_reduce))

# %% [markdown]
# While rank 0 computes, its network is idle; while it communicates, its core is idle. Backward makes the gradients
# one after the other, the last layer's first. There is no reason why that one should not be sent immediately.
#
# ## Predict
#
# If every layer's gradients leave while backward computes the next layer's: how much of the communication time that
# you see above remains exposed? And how much faster than one rank will 2, 4 and 1,024 ranks train a small GPT?

# %% guess=[0.5, 1.9, 3.5, 500]
my_exposed = lab.guess("share of that communication time that remains exposed, 0 to 1", ...)
my_speedup = lab.guess("times as fast as one rank", {2: ..., 4: ..., 1024: ...})

# %% [markdown]
# ## Exercise 6.1 ★ All ranks start from rank 0's model <!-- 1 half day 5 -->
#
# Equal steps keep equal replicas equal; they do not make them so. `comm.broadcast(x)` copies rank 0's `x` into `x` of
# every rank. A model has `model.parameters()`, and `model.buffers()`.

# %% exercise="hpdl_lab.parallel.data_parallel:broadcast_parameters"

# %% check="hpdl_lab.parallel.data_parallel:broadcast_parameters"

# %% [markdown]
# ## Exercise 6.2 ★★ Average all gradients, in one message <!-- 1 full day 12 -->
#
# Every all-reduce costs 2(p-1) latencies, however small it is. Pack the gradients into one flat tensor, and pay once.

# %% exercise="hpdl_lab.parallel.data_parallel:average_all_gradients"

# %% check="hpdl_lab.parallel.data_parallel:average_all_gradients"

# %% [markdown]
# ## Exercise 6.3 ★★ Cut the gradients into buckets <!-- 1 full day 12 -->
#
# A single message must wait until the last gradient is ready. One message per tensor pays latency each time.
# **Buckets** lie between: a few neighbors in each, in the order in which backward makes their gradients.

# %% exercise="hpdl_lab.parallel.reducer:assign_buckets"

# %% check="hpdl_lab.parallel.reducer:assign_buckets"

# %% [markdown]
# ## Exercise 6.4 ★★★ Send buckets while backward goes on <!-- 1 full day 22 -->
#
# Autograd calls a hook whenever a gradient is complete. `comm.background(f, x)` starts `f(comm, x)` asynchronously and
# returns a Work at once. Two traps: a hook that waits, and ranks that send their buckets in different orders.

# %% exercise="hpdl_lab.parallel.reducer:gradient_ready"

# %% check="hpdl_lab.parallel.reducer:gradient_ready"

# %% [markdown]
# ## Measure: how much remains exposed <!-- 1 half day 4 -->
#
# The same step as above with your buckets: sent after backward, and sent during backward.
#
# Did you leave out 6.2, 6.3 or 6.4? `lab.catch_up("6.4")` in a new cell defines what they ask for.

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
# With four layers the last bucket is a quarter of the model, and nothing is left to hide it. What would it be with 96
# layers?
#
# Move the sliders: 100 MB of gradients, 16 ranks on Ethernet of 25 Gbit/s. `ratio` is the time of backward over that of
# one all-reduce of everything. What does each end of the curve on the right pay for? And how far does the best bucket
# size move if there are 96 layers instead of 12?

# %%
lab.explore("buckets", prediction=my_exposed)

# %% [markdown]
# ## One big batch <!-- 1 full day 3 -->
#
# A GPT that predicts the next character of Moby-Dick, on four ranks with your two functions, and on one rank with the
# whole batch. Numbers have 64 bits here, so that rounding does not hide a mistake.
#
# The global batch is what counts for learning: 4 ranks with 8 windows each take the step of one rank with 32. If you
# keep 8 per rank and add ranks, the batch grows, and the usual rule raises the learning rate in proportion and warms
# it up (Goyal et al. 2017). Three things need care because they look at more than one gradient. Clipping by the norm
# comes after the sum, or each rank clips another vector. Batch normalization sees its own rank's examples only,
# unless it adds its means over ranks (SyncBatchNorm). With 16-bit gradients the loss is scaled up, and all ranks must
# agree to skip a step in which one of them overflows.

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
# Now in 32 bits and for 200 steps, and with the communicator's fastest all-reduce: in C++, in a thread of its own,
# while backward goes on. A perplexity of 81 means guessing among all 81 characters; 10 means as uncertain as a choice
# among ten.

# %%
cut = {"bucket_nbytes": 100_000, "first_nbytes": 20_000, "assign_buckets": assign_buckets}
overlapped = DataParallelOverlapped(**cut, gradient_ready=gradient_ready)
trained = lab.train(model="gpt", data="text", strategy=overlapped, steps=200)
assert trained.perplexity < 12
trained

# %% [markdown]
# What has it learned? It continues "Call me ", one character after the other, each drawn from what it thinks likely:
# first as it was before training, then as it is now. It has seen 6,400 windows of 64 characters.

# %%
from hpdl_lab import data, models
from hpdl_lab.data.text import decode, encode
from hpdl_lab.models.gpt import generate

for gpt in (models.build_for(data.load("text"), "gpt"), trained.model):
    print(decode(generate(gpt, encode("Call me "), 90)), end="\n---\n")

# %% [markdown]
# What the four ranks did in the last four steps of it, and what ran in their background:

# %%
begin = sorted(e.t0_ns for e in trained.events if e.op == "forward")[-16]  # of four steps on four ranks
lab.show([e for e in trained.events if e.t0_ns >= begin])

# %% [markdown]
# Here four ranks share your cores, and rank 0 waits for ranks that are not scheduled. With one core per rank the gray
# part is the communication that overlap could not hide. Two steps on two ranks with a core each, recorded on another
# machine: messages travel during backward, and what is left to wait for is less than a fiftieth of the time.

# %%
lab.replay("overlap_amd_epyc_2_cores")

# %% [markdown]
# ## Does it scale? First a success <!-- 1 half day 4 -->
#
# Give every rank 128 windows of text, however many ranks there are: **weak scaling**. More ranks then mean a larger
# batch in the same time. Two ranks have a core each on most machines: the blue points (lower if something else uses
# the cores). The green ones are simulated ranks that compute as fast as one of your cores, joined by InfiniBand of
# 200 Gbit/s. On the dashed diagonal p ranks would do p times the work.

# %%
from hpdl_lab.comm.network import Switch

job = {"strategy": overlapped, "model": "gpt", "data": "text", "kind": "weak", "n": 128}
weak = lab.scaling(**job, ranks=(1, 2), network=Switch.of("infiniband_hdr"), prediction=my_speedup)
assert {row["ranks"]: row["speedup"] for row in weak.simulated}[64] > 0.7 * 64
weak

# %% [markdown]
# In the table, "exposed" is the share of a step in which a rank does nothing but wait for messages, "overlap" the
# share of the messages that computing hides, and "imbalance" the computing time of the slowest rank over the mean.
#
# (Where others use your cores at the same time, as on a shared hub, the blue points lie lower.) It works because each
# rank has as much to compute as before, and backward hides the messages. Only a ring's latency
# grows with p, and bends the curve at 1,024 ranks. The opposite question is harder: the **same** windows on more
# and more ranks, **strong scaling**. Every rank then computes less and less, and its gradients stay as large as they
# were. Part two ends with that picture.
#
# # Part two: what other systems do, and how far it scales
#
# ## S-Caffe: three designs <!-- 2 homework 6 -->
#
# In 2017 S-Caffe trained with one root solver: it sends the parameters to all ranks before each forward (b), layer by
# layer, and collects their gradients after backward (r). Three designs of the same step, each with its formula. Which
# term disappears from one to the next, and why can the first b and the last r never be hidden?

# %%
from hpdl_lab.parallel.scaffe import SCaffe, SCaffeOverlappedPropagation, SCaffeOverlappedReduction

lab.designs(SCaffe(), SCaffeOverlappedPropagation(), SCaffeOverlappedReduction())

# %% [markdown]
# ## Horovod: just a few lines <!-- 2 homework 5 -->
#
# Horovod's promise was that a few lines turn a script for one rank into one for many:
#
#     comm = hpdl_lab.comm.world()                         # 1
#     broadcast_parameters(comm, model)                    # 2
#     optimizer = DistributedOptimizer(optimizer, comm)    # 3
#
# Horovod itself asks for seven. The third is forgotten most often: without a sampler all ranks train on the same
# data. The rate grows with the ranks because in Horovod's examples each rank keeps its batch size, so that the global
# batch grows too.
#
#     hvd.init()
#     torch.cuda.set_device(hvd.local_rank())
#     sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
#     optimizer = SGD(model.parameters(), lr=rate * hvd.size())
#     hvd.broadcast_parameters(model.state_dict(), root_rank=0)
#     hvd.broadcast_optimizer_state(optimizer, root_rank=0)
#     optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
#
# Here `hvd` is `horovod.torch`. The same calls are in `horovod.tensorflow`, `horovod.keras` and `horovod.mxnet`: one
# thread in the background of each rank serves all four: it needs only names, sizes and addresses of gradients.
#
# Its gradients become ready in any order. In every cycle of a millisecond (`HOROVOD_CYCLE_TIME`; 5 ms before version
# 0.21) rank 0 asks all others what they have, and answers with what is sent next (**negotiation**). What fits into a
# buffer travels together (**tensor fusion**), and the second step finds the answer in a cache. You see two steps: the
# orange marks are ranks that become ready. This is the script that runs, yours to change:

# %% shown="hpdl_lab.parallel.scripts:horovod_script"

# %%
from hpdl_lab import data

text = data.load("text")
lab.show(lab.run(horovod_script, text, 2, True), "horovod")

# %% [markdown]
# ## Diagnose: one step more <!-- 2 homework 4 -->
#
# Rank 2 has a few examples more than the others, and its loop runs one step longer. Predict what the report will say:
# who waits, for whom, in which call? Then run it. The engines recover afterwards.

# %% tags=["raises-exception"]
from hpdl_lab.comm import PerRank

lab.run(horovod_script, text, PerRank([3, 3, 4, 3]), deadline=5)

# %% [markdown]
# ## Exercise 6.5 ★★★ PyTorch's DDP on your own ring <!-- 2 homework 12 -->
#
# PyTorch's `DistributedDataParallel` does all of the above: replicas, buckets, order, hooks. It lets you replace one
# thing: what is done with a bucket.

# %% exercise="hpdl_lab.parallel.ddp:ddp_hook"

# %% check="hpdl_lab.parallel.ddp:ddp_hook"

# %% [markdown]
# The same GPT, trained by PyTorch's DDP, whose gradients travel on a ring of Python:

# %% shown="hpdl_lab.parallel.scripts:ddp_script"

# %%
losses = lab.run(ddp_script, text, 30, ring.all_reduce, ddp_hook)[0]
assert losses[-1] < 3.3
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps of DDP")

# %% [markdown]
# ## Exercise 6.6 ★★ Micro-batches, and ranks with less to do <!-- 2 homework 15 -->
#
# The loop around all of this has two traps. A batch that does not fit into memory goes through the model in parts,
# and their gradients add up **before** anything travels. And the rank with fewer batches, which you diagnosed above,
# must not leave early: a sum needs every rank. PyTorch's DDP has a context manager for each: in `model.no_sync()`
# gradients add up and stay here, and in `with model.join():` a rank that is done goes on answering the sums of the
# others.

# %% exercise="hpdl_lab.parallel.training:train_steps"

# %% check="hpdl_lab.parallel.training:train_steps"

# %% [markdown]
# ## Exercise 6.7 ★★ Convert this script: data parallel <!-- 2 full day 20 -->
#
# This is what people have at work: a script for one rank, with nothing from this lab in it but the text and the
# model. Run with `python`, it prints the loss of each step, then that of a test batch, and saves the model. Make it
# data parallel with PyTorch's own means, so that on two ranks it prints the same numbers and leaves the same file:
#
#     torchrun --standalone --nproc-per-node 2 train_ddp.py
#
# The batch of 32 is that of both ranks together. `"gloo"` is the backend for CPUs, `"nccl"` that for GPUs. Change the
# cell and run it, which writes the file. The cell below launches it, compares all losses with those of one rank, looks
# at what each rank did, and says what is wrong; a rank that waits in vain is found within seconds.

# %% script="train_ddp"

# %% check_script="train_ddp"

# %% [markdown]
# Two ranks add in a different order than one. In 64 bits, as here, that changes the losses by less than 10⁻¹⁴; in 32
# bits the same training differs by 5 · 10⁻⁷, and a small mistake can hide there.
#
# **Horovod** asks for the same changes under other names, the lines above. **DeepSpeed** makes the optimizer from a
# file, `ds_config.json`, and takes over backward and step; the sampler remains yours:
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
# On two ranks 32 is 2 × 16; `"stage"` says what is cut into shards: 1 the state of the optimizer, 2 also gradients, 3
# also parameters.

# %% [markdown]
# ## Bring your own script <!-- 2 homework 6 -->
#
# At work it is your own script that hangs, or that computes something else on eight ranks than on one. `lab.watch` runs
# any script, unchanged, and says what is wrong with it; in a terminal it is `hpdl watch --nproc-per-node 2 train.py`.
# The one below runs to its end, and its loss falls. Read it first: how many mistakes does it have?

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
# Mend them in the cell with the script, and run it and the cell below it again, until nothing is found that is wrong.
# What "To be looked at" says may be meant so: here the loss of one rank's examples is printed, and the learning rate is
# that of one rank. With `--strict` the command ends with 1 if something is wrong: put it before a job that costs money.

# %% tags=["take-home"]
# out = !hpdl watch --strict --nproc-per-node 2 take_home_06_watch.py; echo exit code $?
print(out[-1])

# %% [markdown]
# ## Does it scale? Now the hard way <!-- 2 homework 6 -->
#
# Your prediction, on the left for 32 windows **in all** (strong), on the right for 32 **per rank** (weak), against
# three other things: what your engines do, what a model of latency, bandwidth and overlap says, and clusters of up to
# 1,024 simulated ranks that compute as fast as one core of this machine and send as fast as your engines, which is
# slower than InfiniBand. Gray points share cores, which is not scaling.

# %%
scaled = lab.scaling(strategy=mine, model="gpt", data="text", prediction=my_speedup)
speedups = {row["ranks"]: row["speedup"] for row in scaled.simulated if row["kind"] == "weak"}  # with a core each
lab.reveal("times as fast as one rank", {ranks: speedups[ranks] for ranks in my_speedup})
scaled

# %% [markdown]
# Strong scaling fails, and not because of a mistake: with 32 ranks each has one window to compute, yet sends all of
# its gradients, and beyond 32 some ranks have nothing to do. Real jobs therefore let the batch grow with the ranks, as
# far as the model still learns from it, and raise the learning rate and warm it up along with it.

# %% [markdown]
# ## Take it home <!-- 2 homework 6 -->
#
# PyTorch's data parallelism, complete. It learns the characters of its own file: put your model and your data there.
# `DistributedSampler` gives each rank its share of the windows; if it shuffles, call
# `set_epoch(epoch)` before each epoch, or all epochs are alike. `DistributedDataParallel` copies rank 0's parameters to
# all ranks (6.1) and sends buckets during backward (6.3 and 6.4); the hook averages them (6.5), and
# `bf16_compress_hook` in its place would send 16 bits of each number. `no_sync` is 6.6. Gradients are clipped after
# their sum, and `reduce` is only for the loss that is printed.

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
# That was one rank. Now four, under torch's profiler, without a change to the file. Each rank leaves a trace, which
# `ui.perfetto.dev` opens, and `lab.show` too. (Traces of the lab open there as well:
# `lab.show(trained, save="trained.json")`.)

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
# In every step two forwards and two backwards: nothing is sent during the first, and the buckets travel during the
# second. The `all_gather` at the beginning is DDP's own check that all ranks have the same model.

# %% tags=["take-home"]
lab.run("take_home_06.py")  # on the engines: the file, or your function, finds what torchrun would tell it

# %% tags=["take-home"]
four = [float(line.split()[-1]) for line in out.grep("loss")]
assert len(four) == 5 and max(abs(a - b) for a, b in zip(one, four, strict=True)) < 1e-10

# %% [markdown]
# ## Question to discuss
#
# In strong scaling every rank has less and less to compute, and the gradients stay as large as they are. From how
# many ranks on can the communication no longer be hidden? What would you change first: the batch, the buckets, the
# network, or the all-reduce?
#
# ## Where to read the real code
#
# - `hpdl_lab/parallel/data_parallel.py`, `hpdl_lab/parallel/reducer.py`: your functions, and the
#   strategies around them.
# - `hpdl_lab/parallel/horovod.py`: what Horovod does in the
#   background.
# - `hpdl_lab/parallel/scaffe.py`: the three designs; `hpdl_lab/parallel/ddp.py`: the hook, blocking and not.
# - `hpdl_lab/models/gpt.py`: the GPT; `hpdl_lab/parallel/training.py`: the loop around it.
# - `csrc/progress.h`: the thread that sends while Python computes.

# %% [markdown]
# ## Recap
#
# 1. Replicas stay equal if they start equal and take equal steps: broadcast once, average gradients always.
# 2. One message for all gradients saves latency; buckets let the first of them leave while backward goes on.
# 3. Communication that hides behind backward costs nothing; what remains is exposed.
# 4. With a fixed batch the work per rank shrinks and the gradients do not: strong scaling ends there.
# 5. Horovod, S-Caffe and PyTorch's DDP differ in who decides when a bucket leaves, not in what is computed.
#
# | term | what it means |
# |---|---|
# | replica | a whole copy of the model on one rank |
# | bucket, tensor fusion | gradients of several parameters that travel in one message |
# | overlap, exposed communication | communication during computation; the part that computation does not hide |
# | hook | a function that autograd calls when a gradient is complete |
# | strong, weak scaling | the same problem on more ranks; a problem that grows with the ranks |
# | speedup, efficiency | how many times as fast as one rank; the speedup divided by the number of ranks |
# | gradient accumulation | adding the gradients of several micro-batches before they are averaged |
#
# **What you can do now:** make a training script data parallel, choose a bucket size, and tell from a timeline what
# communication costs.
#
# <!-- links -->
