# %% [markdown]
# # 08 · What fits: memory and ZeRO
#
# **The number to reach:** predict within 5% how much memory a rank needs, for each of nine ways to train a model. Then
# divide the model among N ranks: each rank holds 16/N bytes for each parameter, not 16. The losses agree with a single
# rank to 10⁻¹⁰.
#
# <!-- tracks -->
#
# In 06 every rank held the whole model, its gradients and the optimizer's state. Part one counts the bytes of all
# three, and of activations. Part two divides the three among the ranks (ZeRO, FSDP).

# %%
from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# # Part one: what a rank holds
#
# ## The idea <!-- 1 half day 6 -->
#
# "Out of memory" is often the first error of a large training. Five things share the memory of a rank. A list of their
# bytes is the rank's **ledger**:
#
# | | when it is there | how much |
# |---|---|---|
# | parameters | all the time | the model |
# | gradients | from backward to the update | one for each parameter |
# | optimizer | all the time | averages of all earlier gradients, and 32-bit weights |
# | **activations** | from forward to backward | what forward keeps for backward; they grow with the batch |
# | temporaries | for a moment | buffers, such as a bucket of gradients (06) |
#
# In **mixed precision** forward and backward compute with 16-bit numbers. GPUs compute with 16 bits many times as fast
# as with 32. But an update in 16 bits would be lost. An update changes a weight by a thousandth or less, and bfloat16,
# a 16-bit format, has two to three decimal digits. So the optimizer keeps a copy of the weights in 32 bits, the
# **master weights**.
#
# Data parallelism keeps N copies of parameters, gradients and optimizer state on N ranks. **ZeRO** (zero redundancy
# optimizer) divides all three among the ranks. Stage 1 divides the optimizer's state, stage 2 also gradients, stage 3
# also parameters.

# %% [markdown]
# ## Predict
#
# Adam trains a model of 7 billion parameters in mixed precision on 64 ranks. How many GB (10⁹ bytes) of parameters,
# gradients and optimizer state does each rank hold? Answer for stage 0, plain data parallelism, and for stage 3.

# %% guess=[100, 2]
my_ledger = lab.guess("GB of a 7B model's state on each of 64 ranks", {"stage 0": ..., "stage 3": ...})

# %% [markdown]
# ## Exercise 8.1 ★ The ledger of a 7B model <!-- 1 half day 6 -->
#
# Count the bytes of parameters, gradients and optimizer state on one rank. Count for a single parameter first. Then ask
# what each stage divides.

# %% exercise="hpdl_lab.parallel.grid.memory:state_bytes"

# %% check="hpdl_lab.parallel.grid.memory:state_bytes"

# %%
held = {f"stage {stage}": sum(state_bytes(7_000_000_000, 64, stage)) / 1e9 for stage in (0, 3)}
lab.reveal("GB of a 7B model's state on each of 64 ranks", held)

# %% [markdown]
# ## Measure: the ledger of four ranks <!-- 1 full day 5 -->
#
# The cell trains a GPT of 1.8 million parameters in nine ways, for three steps each. In the names at the left, tp is
# tensor parallelism (09), and pp is a pipeline (10). "Recomputed" keeps only inputs of blocks (8.2). Look for the color
# that each way makes smaller.
#
# The upper bar of each pair is the formula. The dotted bar is the count: the memory behind all tensors, and what
# autograd keeps for backward. A diamond is the peak of all memory, by torch's memory profiler. A star is **your**
# result of 8.1. To the right of the star are activations and temporaries.

# %%
n = 1_807_680
mine = {name: sum(state_bytes(n, 4, stage)) for stage, name in enumerate(("16 bits", "ZeRO-1", "ZeRO-2", "ZeRO-3"))}
ledger = lab.memory(batch=16, limit="32 MB", prediction=mine)
assert max(map(abs, ledger.off.values())) < 0.05
ledger

# %% [markdown]
# Four things could be seen:
#
# 1. With 16 bits the state (parameters, gradients, optimizer) does not shrink: 4 + 4 + 8 = 16 bytes per parameter
#    become 2 + 2 + 12 = 16. Activations and messages are halved.
# 2. ZeRO divides the state, but not activations. So ZeRO is used together with "recomputed".
# 3. Both tp and pp divide the state by four. But each rank computes all 16 examples, not 4 as in data parallelism. So a
#    rank of pp, with a quarter of the layers, keeps as many activations as in data parallelism. A rank of tp keeps
#    more, because tp divides only some activations.
# 4. A diamond may lie to the left of its bar's end. The bar adds all activations and gradients, which never exist
#    together.
#
# In the table, `off by` is the distance from formula to count, without temporaries: temporaries depend on timing, and
# the formula cannot count all of them. `at most` is the diamond. `process` is the peak of the whole process, minus what
# is left when the model is freed. The peak includes message buffers, and memory that PyTorch keeps for later.
#
# Now fit large models into GPUs of 16 to 192 GB. In the next cell, `recipe` chooses a row of this table:
#
# | bytes for each parameter | parameter | gradient | optimizer | on each of d ranks |
# |---|---|---|---|---|
# | mixed precision, as in 8.1, ZeRO-1 | 2 | 2 | 12 | 4 + 12/d |
# | FSDP2, PyTorch's ZeRO-3; layers compute in 16 bits | 4 | 4 | 8 | 16/d |
# | Megatron in bfloat16, ZeRO-1 | 2 | 4 | 12 | 6 + 12/d |
# | 32 bits, ZeRO-1 | 4 | 4 | 8 | 8 + 8/d |
#
# A block keeps s b h (34 + 5 a s / h) bytes of activations (Korthikanti et al. 2022). Here s is the sequence length, b
# the number of sequences, h the width, and a the number of heads. The second term counts the s × s matrices inside
# attention. `recompute="attention"` does not keep these matrices. `recompute="blocks"` keeps only the input of each
# block, 2 s b h bytes.
#
# Which settings make GPT-3 fit into 80 GB? Then choose 1T, a model of a trillion parameters, with `stage` 3, `tp` 1 and
# `pp` 1. No number of ranks makes 1T fit into 80 GB: why?

# %%
lab.explore("memory", prediction=my_ledger)

# %% [markdown]
# ## Exercise 8.2 ★★ Recompute a block <!-- 1 two days 12 -->
#
# Run a block, keep only its input, and repeat its forward in backward. This is **recomputation**, or activation
# checkpointing. Without recomputation, forward keeps what backward needs: the inputs of each linear layer and of GELU,
# and which numbers dropout has set to zero. A second forward computes all of this from the block's input and the random
# generator's state. Backward has two matrix products for each product of forward. So a step costs 3 forwards, or 4 with
# recomputation.

# %% exercise="hpdl_lab.parallel.recompute:recomputed"

# %% check="hpdl_lab.parallel.recompute:recomputed"

# %% [markdown]
# ### Predict, then measure: a GPT of six blocks
#
# All six blocks are recomputed. By what factor do the FLOPs of a step grow? Which share of the peak memory is left?

# %% guess=[1.33, 0.25]
my_recomputation = lab.guess("times the FLOPs, and share of the bytes, of blocks again", {"FLOPs": ..., "bytes": ...})

# %%
import torch

from hpdl_lab import models

model = models.build("gpt", vocabulary=80, block=64, layers=6, heads=4, width=128)
tokens = torch.randint(80, (8, 64))

# %%
from hpdl_lab.models.transformer import Attention, Block
from hpdl_lab.parallel import recompute

choices = {"all kept": (), "attention again": (Attention,), "blocks again": (Block,), "yours": (Block, recomputed)}
costs = recompute.compare(model, tokens, choices)

# %%
kept, again = costs["all kept"], costs["yours"]
found = {"FLOPs": again.flops / kept.flops, "bytes": again.most / kept.most}
lab.reveal("times the FLOPs, and share of the bytes, of blocks again", found)
lab.show(costs, prediction=my_recomputation)

# %% [markdown]
# The x axis counts FLOPs, not seconds. The curve of memory climbs block by block in forward, and falls in backward.
# With recomputation this curve hardly climbs in forward, and each block adds a small peak in backward. Your function
# needs a little less than 4/3 of the FLOPs, because embeddings and logits are in no block. `torch.utils.checkpoint`
# ("blocks again") needs still fewer FLOPs: its second forward stops at the last tensor that backward needs.
#
# *Selective* recomputation drops only what is large and cheap to compute: the matrices inside attention, 5 a s / h of
# the 34 + 5 a s / h bytes. FlashAttention and torch's `scaled_dot_product_attention` never keep these matrices.

# %% [markdown]
# # Part two: shards
#
# ## Exercise 8.3 ★★ Shard the optimizer <!-- 2 homework 13 -->
#
# Take a step of ZeRO stage 1: each rank keeps the optimizer's state of its shard, one chunk of the parameters. An
# all-reduce is a reduce-scatter and an all-gather. After the reduce-scatter each rank has the sum of one chunk of the
# gradient. This sum is enough to update the shard. Then the all-gather collects the updated shards. Each rank sends as
# much as in an all-reduce, and p ranks together hold one optimizer state.
#
# `reduce_scatter` and `all_gather` come from 04. `chunk(x, p, r)` is a view of chunk r of x, cut as in
# `reduce_scatter`.

# %% exercise="hpdl_lab.parallel.sharding:sharded_step"

# %% check="hpdl_lab.parallel.sharding:sharded_step"

# %% [markdown]
# Stage 2 divides gradients, too. During backward it reduce-scatters the gradients layer by layer, and each rank frees
# the other ranks' chunks. With one backward in a step, stage 2 sends as much as stage 1. Measure both stages with the
# step of 06: four equal layers on four simulated ranks, now with Adam.

# %%
from hpdl_lab.collectives import ring
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.zero import ZeRO1, ZeRO2, ZeRO3

how = ring.reduce_scatter, ring.all_gather
steps = lab.designs(DataParallel(ring.all_reduce), ZeRO1(*how), ZeRO2(*how))

# %%
held = [sum(step.held.values()) / (4 * 256 * 257) for step in steps.designs]
print(steps)
print("bytes held for each parameter:", [round(n, 2) for n in held])
assert max(abs(a - b) for a, b in zip(held, [16, 8 + 8 / 4, 4 + 12 / 4], strict=True)) < 0.01

# %% [markdown]
# In float32 with Adam a parameter, its gradient and its state take 4 + 4 + 8 bytes. Stage 1 leaves 8 + 8/p bytes, stage
# 2 leaves 4 + 12/p.

# %% [markdown]
# ## Exercise 8.4 ★★★ Gather and release <!-- 2 homework 20 -->
#
# Gather each layer before its use, and release the layer afterwards. This is ZeRO stage 3. PyTorch calls it **FSDP**,
# fully sharded data parallel. A rank keeps a chunk of each layer, and needs the whole layer only while the layer
# computes. Meanwhile the next layer can be gathered. `all_gather(comm, whole)` of 04 fills the other ranks' chunks into
# the tensor `whole`. `comm.background(all_gather, whole)` starts this gather, and returns a Work at once. The Work's
# `wait()` returns when `whole` is complete.

# %% exercise="hpdl_lab.parallel.sharding:gather_and_release"

# %% check="hpdl_lab.parallel.sharding:gather_and_release"

# %% [markdown]
# ## Predict
#
# In a step of data parallelism each rank sends 2(p - 1)/p of the parameters' bytes. How many times as many bytes does
# ZeRO-3 send?

# %% guess=[1.5]
my_traffic = lab.guess("bytes that ZeRO-3 sends in a step, over those of data parallelism", ...)

# %% [markdown]
# ## Measure: what ZeRO-3 holds, sends and exposes <!-- 2 homework 4 -->
#
# Run the step of 8.3 with ZeRO-3.

# %%
steps = lab.designs(DataParallel(ring.all_reduce), ZeRO3(*how))

# %%
whole, shards = steps.designs
assert abs(sum(whole.held.values()) / sum(shards.held.values()) - 4) < 0.01  # four ranks
print(steps)
lab.reveal("bytes that ZeRO-3 sends in a step, over those of data parallelism", shards.sent / whole.sent)

# %% [markdown]
# A rank holds 16/p bytes for each parameter, and one or two whole layers. ZeRO-3 sends two gathers and a
# reduce-scatter: 3/2 of an all-reduce. Here the factor is 11/8. The last of the four layers is gathered only once,
# because backward begins with this layer. The all-reduce of data parallelism begins after backward, and is exposed.
# ZeRO-3 exposes only its first gather and its last reduce-scatter, when no layer computes.
#
# With gradient accumulation a step adds the gradients of k micro-batches. Data parallelism and stage 1 still send once.
# Stages 2 and 3 reduce-scatter k times, and stage 3 also gathers 2k times. So pipelines (10), with their many
# micro-batches, use stage 1. Change `micro_batches`, and look at the bytes sent, in the middle panel:

# %%
lab.explore("memory", stage=3)

# %% [markdown]
# Train with ZeRO-3 on your engines. In 64 bits the losses agree with a single rank to 10⁻¹⁰:

# %%
course = dict(model="gpt", data="text", steps=3, batch=32, lr=3e-3, optimizer="adamw", dtype="float64")
alone = lab.train(**course, ranks=1)
together = lab.train(**course, strategy=ZeRO3())
off = max(abs(a - b) for a, b in zip(alone.losses, together.losses, strict=True))
assert off < 1e-10
print(f"ZeRO-3 on your engines: losses differ by {off:.0e} from those of a single rank")

# %% [markdown]
# ## Exercise 8.5 ★★ Loss scaling that agrees <!-- 2 homework 13 -->
#
# Let all ranks decide together whether to skip an update in float16. This format has 5 bits of exponent: its smallest
# number is 6e-8, its largest 65504. Smaller gradients become zero, larger gradients infinity. So before backward the
# loss is multiplied by a number, the **loss scale**. By the chain rule the scale multiplies every gradient. Divide the
# gradients by the scale before clipping and the update. The best scale is the largest that makes no gradient infinite.
# So halve the scale if a gradient is infinite, and skip this step. Double the scale after 2,000 good steps in a row.
#
# After ZeRO's reduce-scatter each rank has its own shard of the gradients, and infinity may be in one shard only. What
# if only the rank with this shard skips the step?

# %% exercise="hpdl_lab.parallel.precision:unscale_together"

# %% check="hpdl_lab.parallel.precision:unscale_together"

# %% [markdown]
# ### Predict, then measure: where does the scale go?
#
# A small model learns the handwritten digits of 04 in float16. The loss scale begins far too high, at 2^24, and doubles
# after 20 good steps. Parameters, gradients and messages have 16 bits. The optimizer updates master weights in float32,
# and rounds them to parameters. Which power of two is the scale after 200 steps?

# %% guess=[18]
my_power = lab.guess("the exponent x of the loss scale 2^x after 200 steps", ...)

# %%
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.precision import LossScale, Precision

scaled = lab.train(strategy=DataParallel(precision=Precision("float16", LossScale(2.0**24, interval=20))), steps=200)
lab.reveal("the exponent x of the loss scale 2^x after 200 steps", int(scaled.loss_scale).bit_length() - 1)
print(f"the scale at the end: {scaled.loss_scale:,.0f}")

# %% [markdown]
# A few skipped steps cost no accuracy. bfloat16, in `DataParallel(precision="bf16")`, needs no scale: it has 8 bits of
# exponent, as float32 has. But it has only 7 bits of fraction, so numbers near 1 are 1/128 apart. Without master
# weights small updates would be rounded away. A checkpoint must not lose these updates. So during training
# `model.state_dict()` returns the master weights.

# %% [markdown]
# ## Eight bits: FP8 <!-- 2 homework 6 -->
#
# An H100 multiplies 8-bit matrices twice as fast as 16-bit matrices. **FP8** has two formats. The numbers of e4m3 have
# 4 bits of exponent and 3 of fraction, and go from 0.002 to 448. The numbers of e5m2 have 5 and 2 bits, and go from
# 0.00002 to 57,344. Many gradients are smaller than 0.002. So a tensor is multiplied by a scale, which moves its
# largest number to the end of the range. But one very large number pushes all others towards zero. So DeepSeek-V3
# has a scale for every 128 activations, and for every 128 × 128 weights.
#
# Round the weights and gradients of a GPT that was trained on Moby-Dick. At the left, look for gradients that are too
# small for e4m3. At the right, look for the error of gradients with and without a scale.

# %%
from hpdl_lab.data import text
from hpdl_lab.inference import weights

gpt, book = weights.load("moby_dick"), text.load(256)
torch.nn.functional.cross_entropy(gpt(book.train_x[:8]).flatten(0, 1), book.train_y[:8].flatten()).backward()
lab.show("formats", {"weights": gpt.parameters(), "gradients": [p.grad for p in gpt.parameters()]})

# %% [markdown]
# Without a scale e4m3 makes 94% of the gradients zero. With a scale the error of e4m3 is half the error of e5m2, and 16
# times the error of bfloat16. So training uses 8 bits only for the inputs of matrix products. Three things have 32
# bits: the sums inside these products, the master weights, and the sums of gradients. Adam's averages, norms, softmax,
# embeddings and logits have 16 or 32 bits. Numbers that are only copied, such as weights that FSDP2 gathers
# (`torchao`), may travel in 8 bits. Gradients are added on their way, so they travel in 16 or 32 bits.

# %% [markdown]
# ## When ranks are not enough: offload <!-- 2 homework 3 -->
#
# The optimizer reads and writes its state once in a step, in order, piece by piece. So the state can stay in a file,
# and memory holds only one piece at a time (**offload**). `Offloaded(params, torch.optim.AdamW)` takes the same steps
# as AdamW, bit for bit. The extra time follows from the bandwidth of the storage. If others use the storage too, the
# predicted time may be wrong.

# %%
from hpdl_lab.parallel import offload

n, disk = 4_000_000, offload.measure_bandwidth()
memory, file = offload.measure_steps(n)
print(f"{n:,} parameters: {file - memory:.2f} s more a step, predicted {offload.seconds_of_step(8 * n, disk):.2f} s")
print(f"7 billion parameters, predicted: {offload.seconds_of_step(8 * 7_000_000_000, disk):,.0f} s more a step")

# %% [markdown]
# ## Exercise 8.6 ★★ Convert this script: FSDP2 <!-- 2 two days 20 -->
#
# Convert the script below from one rank to FSDP2, PyTorch's ZeRO-3. In each step the script adds the gradients of
# micro-batches of four examples, and clips the sum. At the end the script saves a checkpoint. On two ranks your script
# must print the same losses:
#
#     torchrun --standalone --nproc-per-node 2 train_fsdp.py
#
# `fully_shard(module)` makes a module a **unit**. The unit's parameters become `DTensor`s: each rank holds some rows of
# each parameter. Hooks gather a unit's parameters before forward and backward, and release them afterwards.
# `model.set_requires_gradient_sync(False)` leaves out the reduce-scatter of a backward, and whole gradients stay on the
# rank. `torch.distributed.checkpoint` (**DCP**) lets each rank write its own shards.
#
# The check compares losses, clipped gradients and the checkpoint with a run on one rank. Rank 0 has to hold half of the
# parameters, to gather one block at a time, and to add gradients over ranks once in a step.

# %% script="train_fsdp"

# %% check_script="train_fsdp"

# %% [markdown]
# ## Take it home <!-- 2 homework 8 -->
#
# The complete script below uses FSDP2: each block is a unit (8.6). After backward each rank has its shard of the mean
# gradient. The optimizer is made after `fully_shard`, so it gets shards. Two ranks must print the losses of a single
# rank:

# %% tags=["take-home"]
from shutil import copy

from hpdl_lab.models import plain_gpt

copy(plain_gpt.__file__, "take_home_gpt.py")  # plain torch: a GPT, and windows of a text

# %% tags=["take-home"]
# %%writefile take_home_08.py
"""FSDP2 is ZeRO-3: torchrun --standalone --nproc-per-node 2 take_home_08.py"""

import torch
import torch.distributed as dist
from take_home_gpt import GPT, windows_of
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)  # so that the losses of 1 and 2 ranks agree to ten digits
torch.manual_seed(0)
rank, size = dist.get_rank(), dist.get_world_size()
windows, vocabulary = windows_of(__file__)  # it learns this file
model = GPT(vocabulary)
for block in model.blocks:
    fully_shard(block)  # a unit: gathered before it computes, released after
fully_shard(model)  # what is in no block
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # of the shards: made after fully_shard
for batch in torch.randperm(len(windows))[:96].split(32):
    mine = windows[batch].tensor_split(size)[rank]
    loss = model(mine)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total := loss.detach() / size)
    if rank == 0:
        print("loss", total.item())
dist.all_reduce(held := torch.tensor(sum(p.to_local().numel() for p in model.parameters())), dist.ReduceOp.MAX)
if rank == 0:
    print(f"a rank holds {held} of {sum(p.numel() for p in model.parameters())} parameters")
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_08.py
# one = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 take_home_08.py
print(out.n)

# %% tags=["take-home"]
lab.run("take_home_08.py", ranks=2)  # on the engines: a file, or a function, finds what torchrun would tell it

# %% tags=["take-home"]
losses = [[float(line.split()[-1]) for line in lines.grep("loss")] for lines in (one, out)]
assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-10
held, whole = (int(word) for word in out.grep("holds")[0].split() if word.isdigit())
assert held < 0.51 * whole

# %% [markdown]
# `ZeroRedundancyOptimizer` adds ZeRO-1 to a model in DDP. It assigns whole tensors to each rank, while your
# `sharded_step` cuts one flat vector. DDP still all-reduces the gradients. After the update each rank broadcasts the
# parameters that it has updated, so a step sends 3/2 of the bytes of DDP.

# %% tags=["take-home"]
# %%writefile take_home_08_zero.py
"""ZeroRedundancyOptimizer adds ZeRO-1 to DDP: torchrun --standalone --nproc-per-node 2 take_home_08_zero.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import mse_loss

dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)  # so that the losses of 1 and 2 ranks agree to ten digits
torch.manual_seed(0)
rank, size, x = dist.get_rank(), dist.get_world_size(), torch.randn(96, 64)
layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers[:-1]))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
for batch in x.split(32):
    mine = batch.tensor_split(size)[rank]
    loss = mse_loss(model(mine), mine.flip(1))  # it learns to turn its input around
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total := loss.detach() / size)
    if rank == 0:
        print("loss", total.item())
state = sum(t.nbytes for state in optimizer.optim.state.values() for t in state.values())
dist.all_reduce(state := torch.tensor(state), dist.ReduceOp.MAX)
if rank == 0:
    print(f"a rank holds {state} of {16 * sum(p.numel() for p in model.parameters())} bytes of optimizer state")
del model, optimizer  # they hold the group: gloo could hang or abort in destroy_process_group or after it
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_08_zero.py
# one = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 take_home_08_zero.py
print(out.n)

# %% tags=["take-home"]
losses = [[float(line.split()[-1]) for line in lines.grep("loss")] for lines in (one, out)]
assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-10
held, whole = (int(word) for word in out.grep("holds")[0].split() if word.isdigit())
assert held < 0.51 * whole  # Adam: two float64 for each parameter

# %% [markdown]
# **DeepSpeed** reads the stage, 1 to 3, from a json file. DeepSpeed is not installed here; 06 shows its calls. The file
# below sets stage 3 and bf16, and offloads optimizer states and parameters to the host's memory:
#
#     {"train_batch_size": 32,
#      "bf16": {"enabled": true},
#      "zero_optimization": {"stage": 3,
#                            "overlap_comm": true,
#                            "stage3_prefetch_bucket_size": 5e7,
#                            "offload_optimizer": {"device": "cpu", "pin_memory": true},
#                            "offload_param": {"device": "cpu", "pin_memory": true}},
#      "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
#
# `offload_optimizer` works with each stage, `offload_param` with stage 3 only. `"fp16": {"enabled": true}` instead of
# `bf16` scales the loss as in 8.5.

# %% [markdown]
# ## Question to discuss
#
# ZeRO-3 and tensor parallelism (09) both leave 1/N of each layer's parameters on a rank. What does each method send,
# when, and what hides the messages? What changes if each rank has many sequences, not one? Which method would you use
# inside a node, and which between nodes?
#
# ## Where to read the real code
#
# - `hpdl_lab/parallel/grid/memory.py`: what a rank holds, by formula; `hpdl_lab/parallel/grid/ledger.py`: the count.
# - `hpdl_lab/parallel/recompute.py`, `hpdl_lab/parallel/precision.py`: your functions, and the code that calls them;
#   `hpdl_lab/parallel/rounding.py`: FP8; `hpdl_lab/parallel/offload.py`: the optimizer's state in a file.
# - `hpdl_lab/parallel/sharding.py`: your two functions; `hpdl_lab/parallel/zero.py`: the same by hooks, for any module.
# - `torch/distributed/fsdp/_fully_shard` in PyTorch; DeepSpeed, `deepspeed/runtime/zero/stage3.py`.
# - Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054; Zhao et al. 2023 (PyTorch FSDP), arXiv:2304.11277; Korthikanti et
#   al. 2022, arXiv:2205.05198; Micikevicius et al. 2018 (mixed precision), arXiv:1710.03740; Micikevicius et al. 2022
#   (FP8), arXiv:2209.05433; Chen et al. 2016 (recomputation), arXiv:1604.06174.

# %% [markdown]
# ## Recap
# 1. Mixed precision with Adam takes 16 bytes for each parameter: 2 for itself, 2 for its gradient, 12 for the
#    optimizer. FSDP2 has 4 + 4 + 8.
# 2. ZeRO 1, 2 and 3 divide the optimizer's state, then gradients, then parameters: 4 + 12/N, 2 + 14/N, 16/N bytes.
# 3. Stages 1 and 2 send as much as data parallelism, stage 3 sends 1.5 times as much, mostly while layers compute. With
#    more micro-batches stages 2 and 3 send more.
# 4. Activations grow with the batch at every stage of ZeRO. Recomputation keeps only the input of each block, for a
#    third more arithmetic.
# 5. float16 gradients need a scaled loss, and all ranks decide together whether to skip a step. FP8 needs a scale for
#    each tensor, or for parts of it.
#
# <!-- terms -->
#
# **What you can do now:** say what fits on a GPU before you ask for one. Choose between recomputation, ZeRO, tp and pp
# for a model that does not fit.
#
# <!-- links -->
