# %% [markdown]
# # 14 · What a step could reach
#
# **The number to reach:** the 33% behind a published 44% of the peak, and the batch at which decoding on an H100
# stops being bound by memory.
#
# <!-- tracks -->
#
# Is a step slow, or is it as fast as its hardware allows? Two numbers answer that question: the share of the peak
# that the model uses, and the bound of each product.

# %%
from hpdl_lab import lab
from hpdl_lab.performance.machines import PROCESSORS, table_of_processors

# %% [markdown]
# ## The idea
#
# A processor has two limits: the **peak**, the FLOPs that it does per second, and the **bandwidth**, the bytes that
# its memory moves per second. Each part of a step is bound by one of the two.
#
#     one product of matrices                            one training
#
#     FLOPs / peak ---------+                            FLOPs that the model needs, per second
#                           +--> the longer of both      --------------------------------------- = MFU
#     bytes / bandwidth ----+                            peak of all devices together
#
# The first says what a product can reach at best. The second says how much of the hardware a whole training uses.
# What is missing to 100% went into memory traffic, messages (06), bubbles (10), input, and Python.

# %% [markdown]
# ## Predict
#
# NVIDIA published a run of GPT-3 on 1,024 A100 GPUs: 32 s a step, and 44% of the peak (Megatron-LM, README.md; see
# 11). Backward recomputed all activations (08). Those FLOPs keep the hardware busy, and the model does not need them.
# Which share of the peak does the model use?

# %% guess=[33]
my_mfu = lab.guess("% of the peak that GPT-3 uses, without recomputation", ...)

# %% [markdown]
# ## Exercise 14.1 ★ MFU and HFU
#
# **MFU**, model FLOPs utilization, is the share of the peak that the model needs: forward and backward, once.
# **HFU**, hardware FLOPs utilization, is the share of the peak that the hardware computes: recomputation counts, too.
# A paper that says "45% of the peak" may mean either of them.
#
# Both need the right peak. Data sheets often print the peak with **sparsity**, which holds for matrices with two
# zeros in every four numbers: 1,979 teraFLOP/s for an H100 in 16 bits. Ordinary training is dense, and has half of
# that.

# %% exercise="hpdl_lab.performance.utilization:model_flops_utilization"

# %% check="hpdl_lab.performance.utilization:model_flops_utilization"

# %% [markdown]
# Your function on GPT-3: 96 layers 12,288 wide, and steps of 1,536 sequences with 2,048 tokens.

# %%
a100, tokens_per_s = PROCESSORS["A100 SXM 80GB"].peak["bfloat16"], 1_536 * 2_048 / 32
mfu, hfu = model_flops_utilization(175e9, 96, 12_288, 2_048, tokens_per_s, 1_024, a100, recomputed=1)
assert abs(mfu - 0.332) < 0.001 and abs(hfu - 0.443) < 0.001
print(f"MFU {mfu:.1%}, HFU {hfu:.1%}; you guessed an MFU of {my_mfu}%")

# %% [markdown]
# A run without recomputation that shows the same 44% finishes in three quarters of the time. So compare trainings by
# MFU.

# %% [markdown]
# ## Predict
#
# To generate a token, a language model multiplies one row per request by each weight matrix (13). An H100 reads
# 3.35 TB/s from its memory and computes 989 teraFLOP/s in 16 bits. With few requests it waits for the weights. At
# which batch does decoding on an H100 stop being bound by memory? Take weights of 8,192 x 8,192 in 16 bits.

# %% guess=[300]
my_batch = lab.guess("least batch at which decoding on an H100 is bound by compute", ...)

# %% [markdown]
# ## Exercise 14.2 ★★ Which roof bounds a product
#
# A **roofline** shows the FLOP/s that a processor can reach at best, against the **arithmetic intensity**, the FLOPs
# per byte of memory traffic. It has two roofs. The memory roof rises with the intensity; its slope is the bandwidth.
# The compute roof is flat: the peak. They meet at the **ridge**, where arithmetic and memory take equally long. In 05
# you saw the memory roof alone.

# %% exercise="hpdl_lab.performance.bounds:attainable"

# %% check="hpdl_lab.performance.bounds:attainable"

# %% [markdown]
# Your function finds the batch:

# %%
h100 = PROCESSORS["H100 SXM"]
given = 2, h100.peak["bfloat16"], h100.bandwidth
batch = next(m for m in range(1, 8_192) if attainable(m, 8_192, 8_192, *given)[1] == "compute")
assert batch == 319
print(f"from batch {batch} on; ridge {h100.ridge('bfloat16'):.0f}; you guessed {my_batch}")

# %% [markdown]
# If only weights moved, m rows would do 2 m FLOPs for each weight of 2 bytes, which is m FLOPs per byte. Then the
# batch would be the ridge, 295. Rows and results move as well, so it is 319 here, and closer to 295 for larger
# weights. Up to this batch, more requests cost hardly any time. Attention gains nothing: each request reads its own
# cache (13).

# %% [markdown]
# ## Other processors
#
# Every processor has both roofs. The **ridge** says how often each byte has to be used to reach the peak:

# %%
print(table_of_processors())

# %% [markdown]
# ### TPU
#
# 1. A TPU multiplies matrices in a **systolic array**, a grid of multipliers that pass numbers to their neighbors: a
#    TPU v6e chip has two grids of 256 x 256.
# 2. A number that enters the grid is used in many multiplications before it leaves, so that little is read and
#    written.
# 3. A TPU v6e chip has one large core, and an H100 has 132 small ones that switch between many threads.
# 4. The compiler (XLA) decides before the run when each number moves, so that shapes have to be known, and a new
#    shape means a new compilation.
# 5. The chips have network links of their own and form a torus: up to 256 chips in two dimensions (v6e), or 8,960 in
#    three (v5p).
#
# ### IPU
#
# 1. A Bow IPU has 1,472 cores, and each has a memory of its own next to it; together these memories hold 0.9 GB.
# 2. This memory is on the chip and moves about 65 TB/s, so that the ridge lies at 5 FLOPs per byte in 16 bits, where
#    an H100 has 295.
# 3. Each core runs its own program, and a GPU runs the same instruction for 32 threads at a time.
# 4. All cores compute, then wait for each other, then exchange data: this is **bulk synchronous parallel**, and the
#    compiler plans every exchange.
# 5. A model that needs more than 0.9 GB is divided among several IPUs, or streamed from a much slower memory outside.
#
# ### FPGA
#
# 1. An FPGA has no fixed processor: it is a field of small logic blocks, multipliers and memories, and a program
#    wires them to a circuit.
# 2. The circuit can be made for one model, with one layer's output going straight into the next layer, not by way of
#    memory.
# 3. Numbers can have any width, for example 4 or 6 bits, and narrower numbers leave room for more multipliers.
# 4. The price is a low clock, a few hundred MHz, and a low peak: 24.5 tera-operations per second in 8 bits for an
#    Alveo U280.
# 5. To compile a circuit takes hours, so FPGAs serve models that change rarely and have to answer fast, and they
#    seldom train.
#
# ### Lu's accelerator (FlexFlow, HPCA 2017)
#
# 1. A convolution can be divided by feature maps, by neurons (places in the output), or by synapses (weights of a
#    kernel).
# 2. Earlier accelerators were built for one of these, and layers that have little of it leave most multipliers
#    without work.
# 3. FlexFlow changes the way in which data flow through its multipliers from layer to layer, and combines all three.
# 4. Lu et al. report 2 to 10 times the speed, and 2.5 to 10 times the power efficiency, of three other architectures
#    on six networks.
# 5. A GPU leaves this choice to software, which picks another kernel for another shape. (The FlexFlow of Jia et al.
#    2018 in 11 is another work: a search for the best division of a model.)
#

# %% [markdown]
# ## When is the graph known?
#
# A **graph** lists the operations of a training step and what each of them reads. In **define-and-run**, a program
# records the graph first and runs it later, as in Theano, Caffe and TensorFlow 1. In **define-by-run**, every
# operation runs at once. Chainer gave it this name; PyTorch and TensorFlow 2 call it eager.
#
# `hpdl_lab/performance/static_graph.py` is define-and-run in 70 lines. A **placeholder** stands for a tensor that
# comes later:

# %%
import torch

from hpdl_lab.performance.frameworks import branching, table, two_layers
from hpdl_lab.performance.static_graph import gradients, placeholder, run

nodes = [placeholder(name) for name in ("x", "y", "w1", "b1", "w2", "b2")]

# %% [markdown]
# `two_layers` is the loss of a small net. Given placeholders, it only records. Then `run` computes the loss and its
# gradients. Given tensors, the same lines run in eager mode:

# %%
torch.manual_seed(0)
loss, sizes = two_layers(*nodes), ((8, 4), (8, 2), (4, 16), (16,), (16, 2), (2,))
feed = {node: torch.randn(size) for node, size in zip(nodes, sizes, strict=True)}
(values, most), (_, unfreed) = (run([loss, *gradients(loss, nodes[2:])], feed, free) for free in (True, False))
assert all(map(torch.allclose, values[1:], torch.func.grad(two_layers, (2, 3, 4, 5))(*feed.values())))
print(f"loss {values[0]:.5f}, eager {two_layers(*feed.values()):.5f}; in memory {most} of {unfreed} values")

# %% [markdown]
# A whole graph shows the last reader of each value, so memory is freed early. It also allows fusing operations,
# reordering them, and sending each gradient as soon as it is ready. But it forbids this:

# %%
try:
    branching(*nodes)  # loss.square() if loss > 1 else loss
except TypeError as error:
    print(error)

# %% [markdown]
# `torch.compile` is today's compromise. At the first call it records a graph from the Python code. Later calls reuse
# it as long as its conditions (**guards**) hold, such as the shapes. At an `if` that needs a value, the graph ends,
# Python decides, and a second graph begins: a **graph break**. Another shape needs another graph: a
# **recompilation**. Four calls, with 8, 8, 9 and 10 examples:

# %%
from torch._dynamo.utils import counters

weights = list(feed.values())[2:]
batches = [[torch.randn(rows, 4), torch.randn(rows, 2), *weights] for rows in (8, 8, 9, 10)]

# %%
for net in (two_layers, branching):
    breaks = torch._dynamo.explain(net)(*batches[0]).graph_break_count
    counters.clear()
    compiled = torch.compile(net, backend="eager")  # runs the graphs as they are, without a compiler
    graphs = [torch.allclose(compiled(*x), net(*x)) and counters["stats"]["unique_graphs"] for x in batches]
    print(f"{net.__name__}: {breaks} graph breaks, graphs traced after each call: {graphs}")

# %% [markdown]
# After a second shape torch treats the number of examples as a variable, so 10 examples need no new graph.
#
# The frameworks differ in this, in what distributes the work, and in the libraries that compute:

# %%
print(table())

# %% [markdown]
# CNTK is the Microsoft Cognitive Toolkit, and MKL-DNN is now called oneDNN. `hpdl_lab/performance/frameworks.py` has
# the source of each line.
#
# ### Processes that share a tensor
#
# Processes of one node can also share memory. `torch.multiprocessing` starts two, and each writes one element of the
# same tensor:

# %%
from functools import partial
from operator import setitem

shared = torch.zeros(2).share_memory_()
torch.multiprocessing.spawn(partial(setitem, shared), args=(1.0,), nprocs=2)  # shared[rank] = 1.0, on two ranks
print(shared)

# %% [markdown]
# ## What a training costs
#
# A **petaflop/s-day** is 10¹⁵ operations per second for a day. GPT-3 took 3,640 (Brown et al. 2020), on V100
# GPUs at 24.6 teraFLOP/s and 330 W each. The data center used 1.1 times the power of its computers: its **PUE**,
# power usage effectiveness (Patterson et al. 2021). How many kWh is that? What does a kWh cost you?

# %% guess=[1_000_000, 0.3]
my_kwh = lab.guess("kWh of the training of GPT-3", ...)
my_price = lab.guess("price of a kWh, in your currency", ...)

# %%
from hpdl_lab.performance import cost

print(cost.table(my_price))
print(f"GPT-3: you guessed {my_kwh:,.0f} kWh")

# %% [markdown]
# MFU counts all hours: PaLM states 46% without pauses. Only GPT-3 and PaLM state a PUE, and watts that include the
# host; for the others, 1.1 and the processors alone are assumed.
#
# D/N is tokens per parameter. For a fixed C = 6 N D operations, about 20 give the lowest loss (Hoffmann et al. 2022):
# the last two columns. GPT-3 was too large for its tokens. Llama 3.1 is smaller than this rule says, so each answer
# costs less (13). DeepSeek-V3's N counts what a token uses.

# %% [markdown]
# ## Take it home
#
# `FlopCounterMode` is PyTorch's own counter: it adds the FLOPs of each matrix product that a step runs. Put it around
# one step of your own script. The peak here is measured: that of one large product on this processor.

# %% tags=["take-home"]
# %%writefile take_home_14.py
"""MFU of a data-parallel step: torchrun --standalone --nproc-per-node 2 take_home_14.py"""

import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode


def least_seconds(run):
    times = [(time.perf_counter(), run())[0] for _ in range(11)]
    return min(end - start for start, end in pairwise(times))


dist.init_process_group("gloo")
layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
x, a = torch.randn(128, 512, requires_grad=True), torch.randn(1024, 1024)
with FlopCounterMode(display=False) as counter:
    model(x).sum().backward()
needed = 6 * sum(w.numel() for w in model.parameters()) * len(x)
peak = 2 * 1024**3 / least_seconds(lambda: a @ a)
mfu = needed / least_seconds(lambda: model(x).sum().backward()) / peak
print(f"rank {dist.get_rank()}: FLOPs {counter.get_total_flops()} needed {needed} MFU {mfu:.2f}\n", end="")
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_14.py
print(out.n)

# %% tags=["take-home"]
assert len(out.grep("FLOPs")) == 2
for line in out.grep("FLOPs"):
    words = line.split()
    assert words[3] == words[5] and float(words[7]) > 0

# %% [markdown]
# The counter and 6 N D agree, since every weight is used once for each row, in forward and twice in backward. With
# recomputation the counter shows more: that is HFU.

# %% [markdown]
# ## Question to discuss
#
# A team shows you a training at 22% MFU, and asks for twice as many GPUs. What do you measure first, and in which
# order? At which results do you say yes?
#
# ## Where to read the real code
#
# - `hpdl_lab/performance/utilization.py`, `hpdl_lab/performance/bounds.py`: your two functions;
#   `hpdl_lab/performance/machines.py`: processors with their sources.
# - `hpdl_lab/performance/static_graph.py`, `hpdl_lab/performance/frameworks.py`, `hpdl_lab/performance/cost.py`.
# - Williams, Waterman and Patterson 2009 (roofline), doi:10.1145/1498765.1498785; Chowdhery et al. 2022 (PaLM, MFU
#   and HFU), arXiv:2204.02311; Hoffmann et al. 2022 (Chinchilla), arXiv:2203.15556; Patterson et al. 2021 (energy),
#   arXiv:2104.10350; Abadi et al. 2016 (TensorFlow), arXiv:1605.08695; Tokui et al. 2019 (Chainer), arXiv:1908.00213;
#   Lu et al. 2017 (the accelerator), HPCA.

# %% [markdown]
# ## Recap
#
# 1. MFU counts the FLOPs that the model needs, HFU all that the hardware computes. Recomputation is the difference.
# 2. A product takes the longer of two times: FLOPs over the peak, bytes over the bandwidth.
# 3. Decoding is bound by memory up to a batch of about the ridge: 295 FLOPs per byte on an H100 in 16 bits.
# 4. A graph that is known before it runs can be freed early, fused and reordered. It cannot contain Python's `if`.
# 5. A training takes 6 N D FLOPs. Divide by devices, peak and MFU, and the days follow; the watts give its energy.
#
# | term | what it means |
# |---|---|
# | MFU, HFU | share of the peak: of the FLOPs that the model needs; of all that are computed |
# | roofline | FLOP/s that can be reached, against FLOPs per byte: a slope, then a flat roof |
# | arithmetic intensity, ridge | FLOPs per byte of memory traffic; the intensity at which the two roofs meet |
# | define-and-run, define-by-run | a program records the graph and runs it later; each operation runs at once |
# | graph break, recompilation | `torch.compile` ends a graph and goes on in Python; it traces again for new shapes |
# | petaflop/s-day, PUE | 8.64 · 10¹⁹ FLOPs; power of a data center over that of its computers |
#
# **What you can do now:** read "45% of the peak" in a paper and ask the right question; say for each product which
# limit it meets; and estimate days and kWh of a training before it starts.
#
# <!-- links -->
