# %% [markdown]
# # 14 · Frameworks, processors, links and their price
#
# **The number to reach:** the bytes that each framework sends for one step, guessed before you see them.
#
# <!-- tracks -->
#
# [14 · Where the time goes](14_performance.ipynb) looks into one step. This notebook looks at what surrounds the step.
# When is the graph of a step known, and who sends what? How do other processors differ? Which link is fast enough
# (14.6, 14.7)? What does a training cost?

# %%
import torch

from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# ## When is the graph known? <!-- 1 homework 8 -->
#
# A **graph** lists the operations of a training step and their inputs. In **define-and-run**, a program records the
# graph first and runs it later, as in Theano, Caffe and TensorFlow 1. In **define-by-run**, every operation runs
# immediately. Chainer introduced the name define-by-run; PyTorch and TensorFlow 2 say eager.
#
# `hpdl_lab/performance/static_graph.py` is define-and-run in 70 lines. A **placeholder** stands for a tensor that the
# program gets later. `two_layers` computes the loss of a small model. With placeholders as inputs, `two_layers` only
# records the operations:

# %%
from hpdl_lab.performance.frameworks import branching, framework_history, two_layers
from hpdl_lab.performance.static_graph import gradients, placeholder, run_graph

nodes = [placeholder(name) for name in ("x", "y", "w1", "b1", "w2", "b2")]
loss, sizes = two_layers(*nodes), ((8, 4), (8, 2), (4, 16), (16,), (16, 2), (2,))

# %% [markdown]
# Then `run_graph` computes the loss and its gradients. With tensors as inputs, `two_layers` runs in eager mode:

# %%
feed = {node: torch.randn(size) for node, size in zip(nodes, sizes, strict=True)}
values, most = run_graph([loss, *gradients(loss, nodes[2:])], feed)
eager = torch.func.grad(two_layers, (2, 3, 4, 5))(*feed.values())  # gradients of w1, b1, w2 and b2
assert all(map(torch.allclose, values[1:], eager))
print(f"loss {values[0]:.5f}, eager {two_layers(*feed.values()):.5f}; at most {most} values in memory at a time")

# %% [markdown]
# A recorded graph can be optimized as a whole. A value's memory is free after its last use. Operations can be fused and
# reordered. Each gradient can be sent as soon as it is ready. But no `if` can depend on a value:

# %%
try:
    branching(*nodes)  # loss.square() if loss > 1 else loss
except TypeError as error:
    print(error)

# %% [markdown]
# `torch.compile` is today's compromise. At the first call it records a graph of the Python code. Later calls reuse this
# graph as long as its conditions (**guards**) hold, for example the shapes. At an `if` on a value, the graph ends,
# Python decides, and a second graph begins: a **graph break**. Another shape needs another graph: a **recompilation**.
# Four calls follow, with 8, 8, 9 and 10 examples:

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
# After a second shape, torch treats the number of examples as a variable. So 10 examples need no new graph. In
# `branching`, the part after the break works on one number. Its shape never changes, so this part needs only one graph.
#
# Frameworks differ in when they know the graph, how they distribute work, and which libraries compute:

# %%
print(framework_history())

# %% [markdown]
# CNTK is the Microsoft Cognitive Toolkit, and MKL-DNN is now called oneDNN.
#
# In TensorFlow, operations under `with tf.device("/GPU:1"):` run on the second GPU of the node. TensorFlow copies
# tensors between GPUs: this is model parallelism. `tf.distribute.MirroredStrategy()` is data parallelism: a replica on
# each GPU of the node (06).
#
# ### Processes that share a tensor
#
# Processes of one node can also share memory. `torch.multiprocessing` starts two processes, and each writes one element
# of the same tensor:

# %%
from functools import partial
from operator import setitem

shared = torch.zeros(2).share_memory_()
torch.multiprocessing.spawn(partial(setitem, shared), args=(1.0,), nprocs=2)  # shared[rank] = 1.0, on two ranks
print(shared)

# %% [markdown]
# ## Predict
#
# Two workers and a parameter server train a model of 4.2 MB. In each step, every worker reads all weights from the
# server and sends all gradients back. How many MB does the server's link carry in each direction? Without a server, two
# workers add their gradients by a ring all-reduce (04). How many MB does each worker send?

# %% guess=[4.2, 4.2]
my_server = lab.guess("MB a step in each direction of the server's link", ...)
my_worker = lab.guess("MB a step that a worker of the ring sends", ...)

# %% [markdown]
# ## Measure: the same training in four frameworks <!-- 1 homework 6 -->
#
# Each framework trains one model on two workers, with the same weights and examples. Every worker runs on its own
# emulated host, and the links carry 1 Gbit/s in each direction. The next cell prints a recorded table. (An
# administrator can record it anew: `make frameworks`.) Compare the MB and the losses:

# %%
from hpdl_lab.data import recorded
from hpdl_lab.performance.recorded import table_of_frameworks

assert recorded.load("frameworks")["nbytes"] == 4_200_448
print(table_of_frameworks())

# %%
vector_mb = recorded.load("frameworks")["nbytes"] / 1e6  # all weights, or all gradients
lab.reveal("MB a step in each direction of the server's link", 2 * vector_mb)  # one for each worker
lab.reveal("MB a step that a worker of the ring sends", vector_mb)

# %% [markdown]
# A server sends 8.4 MB, and a worker 4.2 MB. The programs have 40 to 70 lines each
# (`hpdl_lab/performance/frameworks_run/`):
#
# - **PyTorch DDP**: every worker has all weights, and Gloo adds the gradients by an all-reduce. `torch.compile` changes
#   how the gradients are computed, not the bytes sent.
# - **JAX**: every host runs the same program. `jit` compiles the whole step, `shard_map` says which rows each device
#   has, and `pmean` in the step is the all-reduce, which Gloo computes on CPUs.
# - **TensorFlow, MultiWorkerMirroredStrategy**: every worker has all weights, and computes new weights from its own
#   examples. An all-reduce over gRPC averages these new weights. gRPC calls a function in another process over the
#   network. `tf.function` records the graph of the step at its first call, and runs the graph from then on.
# - **TensorFlow, ParameterServerStrategy**: a server has the weights. Another process, the coordinator, gives steps to
#   the workers. In each step, a worker reads all weights from the server, and sends all gradients back. No worker waits
#   for another, so the training is asynchronous, and the loss differs from run to run.
# - **A parameter server over gRPC**, in 60 lines: the server waits for all gradients, takes the step, and answers with
#   the new weights. So the training is synchronous, with the same loss as a single process.
#
# In TensorFlow 1, a program placed each variable by hand, here on server 0: `with tf.device("/job:ps/task:0"):`.
#
# All weights together are one **vector**, and so are all gradients. How many vectors pass each link in a step?

# %%
found = recorded.load("frameworks")
for row in found["rows"]:
    (worker, _), _, (server, _) = row["links"]  # [sent, received] by two workers and a server
    vectors = [round(sent / found["nbytes"], 2) for sent in (worker, server)]
    print(f"{row['name']:33} worker, server: {vectors}")
assert vectors == [1.0, 0.0]  # the last row, a ring

# %% [markdown]
# A ring sends 2(p-1)/p vectors on each link (04), which is one vector for p = 2. A server's link carries p vectors in
# each direction: p gradients arrive, and p copies of the weights leave. With a synchronous server, the copies leave
# after the gradients have arrived. How long does the busiest link take at least, with p workers?

# %%
vector = found["nbytes"] / 125e6  # s, of all weights on a link of 1 Gbit/s
for p in (2, 8, 64):
    ring, server = 2 * (p - 1) / p * vector, 2 * p * vector
    print(f"{p:2} workers: ring {ring * 1e3:3.0f} ms, server {server * 1e3:5,.0f} ms")
assert round(server / ring) == 65

# %% [markdown]
# With 64 workers, a server's link takes 65 times as long as the ring. So large trainings divide the weights among many
# servers, each with its own link (04). The recorded steps take longer than these times, because workers also compute.
#
# For two workers, the last cell printed 34 ms. A ring that sends by MPI takes this time. The laboratory's ring, the
# last row of the recorded table, takes longer, because it sends by `send` and `recv` of Gloo. If a rank calls `send`
# before `recv`, Gloo moves the two directions one after the other.

# %% [markdown]
# ## Other processors <!-- 1 homework 4 -->
#
# The ridge of a processor (14.2) says how often each byte has to be used to reach the peak:

# %%
from hpdl_lab.performance.machines import table_of_processors

print(table_of_processors())

# %% [markdown]
# ### TPU
#
# 1. A TPU multiplies matrices in a **systolic array**, a grid of multipliers that pass numbers to their neighbors. A
#    TPU v6e chip has two grids of 256 x 256.
# 2. Each number that enters the grid is used in many multiplications before it leaves, so little is read and written.
# 3. A TPU v6e chip has one large core, but an H100 has 132 small cores that switch between many threads.
# 4. Before the run, the compiler (XLA) plans when each number moves. So a new shape needs a new compilation.
# 5. The chips have their own network links and form a **torus**, a grid whose rows and columns are rings. A torus has
#    up to 256 chips in two dimensions (v6e), or 8,960 in three (v5p).
#
# ### IPU
#
# 1. A Bow IPU has 1,472 cores, and each has its own memory next to it; together these memories hold 0.9 GB.
# 2. This memory is on the chip and moves about 65 TB/s. So the ridge is 5 FLOPs per byte in 16 bits; the H100 has 295.
# 3. Each core of an IPU runs its own program, but a GPU runs the same instruction for 32 threads at a time.
# 4. All cores compute, then wait for each other, then exchange data: this is **bulk synchronous parallel**, and the
#    compiler plans every exchange.
# 5. A model that needs more than 0.9 GB is divided among several IPUs, or streamed from a much slower memory outside.
#
# ### FPGA
#
# 1. An FPGA has no fixed processor: it is a field of small logic blocks, multipliers and memories, and a program wires
#    them into a circuit.
# 2. The circuit can be made for one model: the output of one layer goes straight into the next layer, not through
#    memory.
# 3. Numbers can have any width, for example 4 or 6 bits, and narrower numbers leave room for more multipliers.
# 4. The price is a low clock, a few hundred MHz, and a low peak: 24.5 tera-operations per second in 8 bits for an Alveo
#    U280.
# 5. Compiling a circuit takes hours, so FPGAs serve models that change rarely and have to answer fast; they seldom
#    train.
#
# ### Lu's accelerator (FlexFlow, HPCA 2017)
#
# 1. A convolution can be divided in three ways: by feature maps, by neurons (places in the output), or by synapses
#    (weights).
# 2. Earlier accelerators were built for one way; if a layer cannot be divided much in this way, most multipliers have
#    no work.
# 3. FlexFlow combines all three ways: for each layer, it changes the paths of data through its multipliers.
# 4. Lu et al. report for six models: FlexFlow has 2 to 10 times the speed of three other architectures, and 2.5 to 10
#    times their power efficiency.
# 5. On a GPU, software makes this choice: for layers of another shape, a library runs another GPU program. (Another
#    FlexFlow, of Jia et al. 2018 in 11, searches for the best division of a model.)

# %% [markdown]
# ## Measure: which link is fast enough? <!-- 2 homework 2 -->
#
# NVLink and PCIe join GPUs inside a node. NVLink 5 joins all GPUs of a **rack**, a cabinet of nodes. InfiniBand (`ndr`,
# `hdr`), Omni-Path, Slingshot and Ethernet join nodes. **TCP** is the protocol by which operating systems send data.
# `roce` is Ethernet without TCP: an adapter writes straight into another node's memory. For networks, data sheets count
# bits: 400 Gbit/s are 50 GB/s.
#
# Two engines play ping-pong, as in 03. Find the row of this machine:

# %%
from hpdl_lab.performance.links import LINKS, ladder, offers
from hpdl_lab.performance.machines import PROCESSORS

link = lab.ping_pong()
print(ladder(link.alpha, link.beta))
assert link.seconds[0] > LINKS["hbm3"].alpha

# %% [markdown]
# `hbm3` is the memory of an H100. Bandwidths are for one direction; data sheets of NVLink state the sum of both
# directions. Latencies are for a small message. The latencies of NVLink, PCIe and InfiniBand come from NCCL's source:
# NCCL chooses its algorithm by these numbers. Engines on one machine exchange messages through its memory, and much of
# their latency is Python.

# %% [markdown]
# ## Predict
#
# 64 H100 GPUs train a model of 1.5 billion parameters, with gradients in 16 bits. Each GPU has its own network link and
# 8,192 tokens per step. Backward takes 4 FLOPs per parameter and token, at 40% of the peak: 124 ms. Assume that the
# first gradient is ready at once. A ring all-reduce (04) adds the gradients. How fast must each link be, so that
# backward hides 90% of the communication?

# %% guess=[400]
my_gbit = lab.guess("Gbit/s per GPU that hide 90% of the communication", ...)

# %% [markdown]
# ## Exercise 14.6 ★ The cheapest link <!-- 2 homework 10 -->
#
# Choose the cheapest link that hides enough of the communication. Communication during backward is **hidden**. The
# ranks wait for the rest, which is **exposed** (06). The list `links` begins with the cheapest link. The check tries
# lists of one link and longer lists.
#
# `offers()` below assumes that faster links cost more. If your prices differ, name the links yourself, cheapest first:
# `offers(["infiniband_hdr", "roce_400"])`.

# %% exercise="hpdl_lab.performance.links:cheapest_link"

# %% check="hpdl_lab.performance.links:cheapest_link"

# %% [markdown]
# Your function on this model:

# %%
backward_s = 4 * 1.5e9 * 8_192 / (0.4 * PROCESSORS["H100 SXM"].peak["bfloat16"])
best = cheapest_link(offers(), 3e9, 64, backward_s)
assert best == "roce_400"
lab.reveal("Gbit/s per GPU that hide 90% of the communication", LINKS[best].GBps * 8)
print(best)

# %% [markdown]
# About 343 Gbit/s would be enough, and the next link that exists has 400. With 200 Gbit/s, 52% of the communication is
# hidden. With twice the tokens per step, backward takes twice as long, and 200 Gbit/s hide everything. If eight GPUs
# share an adapter, each GPU has an eighth of its bandwidth. The hierarchical all-reduce (04) avoids this: it first adds
# over NVLink.

# %% [markdown]
# ## Predict
#
# Two nodes have four H100 GPUs each, and an InfiniBand adapter of 400 Gbit/s for each GPU. Each node also has one
# Ethernet port of 25 Gbit/s. If NCCL may not use InfiniBand, it takes the Ethernet port. How
# many times lower is the bus bandwidth (busbw, 04) of a large all-reduce?

# %% guess=[64]
my_ratio = lab.guess("times lower busbw over Ethernet than over InfiniBand", ...)

# %% [markdown]
# With `NCCL_DEBUG=INFO`, NCCL prints how it connects the GPUs. Here is a good log: the lines of rank 0, and the table
# of nccl-tests with busbw in the last column. The logs of three slow jobs follow, with only the lines that differ.
# The words after `via` name the path of the data: compare them with the good log. HCA is InfiniBand's word for adapter,
# and `mlx5_4` is an adapter for storage. These logs are **not recorded**: the laboratory writes them in the format of
# NCCL 2.26.

# %%
from hpdl_lab.performance.nccl_log import LOGS, busbw, excerpt

good, *slow = LOGS.values()
print(excerpt(good), *(excerpt(log, than=good) for log in slow), sep="\n\n", end="\n\n")
assert round(busbw(good) / busbw(LOGS["socket"])) == 65
lab.reveal("times lower busbw over Ethernet than over InfiniBand", busbw(good) / busbw(LOGS["socket"]))

# %% [markdown]
# The logs show 183 against 2.8 GB/s: a factor of 65. The adapters of a node have 4 · 400 Gbit/s, and its Ethernet port
# has 25: a factor of 64. The 183 GB/s are about 4 · 46: each adapter adds 46 GB/s, as measured elsewhere (46 to 48;
# nccl-tests, issue 290, 2025). The other bandwidths are made up.
#
# ## Exercise 14.7 ★★ Read NCCL's log <!-- 2 homework 12 -->
#
# Find in a log the setting that makes a job slow. A **channel** is a ring. Each line with `via` shows how data travel
# on one link of a channel:
#
# - `P2P` (peer to peer): a GPU reaches the memory of the next GPU directly, by NVLink.
# - `SHM` (shared memory): the data go through the node's main memory.
# - `NET/Socket`: the data go to another node over Ethernet.
# - `NET/IB/2/GDRDMA`: the data go over InfiniBand adapter 2. The adapter reads the GPU's memory itself: this is
#   **GPUDirect RDMA**. Without GPUDirect RDMA, `/GDRDMA` is missing, and the line "Connected all rings" ends in 0.
#
# A link between nodes has two lines, one for each end. The check takes logs of other jobs.

# %% exercise="hpdl_lab.performance.nccl_log:diagnose_log"

# %% check="hpdl_lab.performance.nccl_log:diagnose_log"

# %% [markdown]
# Your function on the four logs:

# %%
for name, log in LOGS.items():
    line, cause, variable = diagnose_log(log)
    assert cause == name
    print(f"{busbw(log):6.1f} GB/s: {cause} {variable}, line {line}")

# %% [markdown]
# The results of all four jobs are right: you find the faults in the log only. To read your own log, write it to a
# file first:
#
#     NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET torchrun ... > nccl.log
#
#     print(diagnose_log(open("nccl.log").read()))
#
# The words change between versions: before 2.24, NCCL prints `NCCL_P2P_DISABLE=1` as `NCCL_P2P_LEVEL set by environment
# to LOC`. Jobs can also be slow without such a variable. `Failed to open libibverbs.so[.1]` says that the container
# lacks the library for InfiniBand, and `NET/IB : No device found.` says that the container lacks an adapter.

# %% [markdown]
# ## Measure: the switch adds <!-- 2 homework 3 -->
#
# A switch can add, too: **SHARP** adds in InfiniBand switches, and **NVLS** in the NVSwitch between GPUs (04). Each
# rank sends its vector to the switch once, and the switch sends the sum back to all ranks. Simulate 16 ranks and a
# switch, with links of InfiniBand NDR. Compare times and bytes for 1 KiB, then for 4 MiB:

# %%
from hpdl_lab.performance.switch import by_dpus, by_hosts, by_ring, by_switch

ring, switch = ([way(16, n) for n in (2**10, 2**22)] for way in (by_ring, by_switch))
for a, b in zip(ring, switch, strict=True):
    print(f"ring: {a} by a rank   switch: {b}")
    assert (a.total == b.total).all() and a.seconds > 2 * b.seconds

# %% [markdown]
# The switch is more than twice as fast. For 1 KiB, latencies decide: 30 steps on the ring, two with the switch. For 4
# MiB, a rank sends 1.9 times as many bytes on the ring. The switch gets the vector in segments: the sum of one segment
# returns while the next one arrives. If there are more nodes than ports, SHARP's switches form a tree.

# %% [markdown]
# ## Measure: a processor on the adapter <!-- 2 homework 2 -->
#
# Many MPI libraries start each step of a ring only inside an MPI call. So while the host computes, the ring stops. A
# **DPU**, data processing unit, is a network adapter with processor cores that can run the ring. Eight hosts compute
# for 500 µs during an all-reduce of 4 MiB:

# %%
given = 8, 2**22, 500e-6
ways = by_hosts(*given, calls=1), by_hosts(*given, calls=14), by_dpus(*given)
for name, way in zip(("hosts, 1 call", "hosts, 14 calls", "DPUs"), ways, strict=True):
    print(f"{name:17}{way.seconds * 1e6:4.0f} µs, {way.hidden:4.0%} hidden")
assert [round(14 * way.hidden) for way in ways] == [1, 14, 14]

# %% [markdown]
# With one call, only one of 14 steps overlaps with computing. With a call in each step, everything is hidden. DPUs need
# no such calls.
#
# If the hosts do not compute, the all-reduce takes 185 µs with hosts, but 320 µs with DPUs. With DPUs, each vector also
# crosses PCIe to the DPU and back. MVAPICH2-DPU, an MPI library, states an overlap of up to 99% (X-ScaleSolutions
# 2024). In 06, a thread on the host did the same work and used a core. NCCL's ring is a kernel on the GPU, and uses
# some of its cores.

# %% [markdown]
# ## What a training costs <!-- 2 homework 4 -->
#
# A **petaflop/s-day** is 10¹⁵ operations per second for a day. Training GPT-3 took 3,640 petaflop/s-days (Brown et al.
# 2020), on V100 GPUs at 24.6 teraFLOP/s and 330 W each. The data center used 1.1 times the power of its computers: its
# **PUE**, power usage effectiveness (Patterson et al. 2021). How many kWh did the training take? What does a kWh cost
# you?

# %% guess=[1_000_000, 0.3]
my_kwh = lab.guess("kWh of the training of GPT-3", ...)
my_price = lab.guess("price of a kWh, in your currency", ...)

# %%
from hpdl_lab.performance import cost

print(cost.table_of_trainings(my_price))
gpt3 = cost.TRAININGS[3]
lab.reveal("kWh of the training of GPT-3", gpt3.hours * gpt3.watts / 1e3 * gpt3.pue)

# %% [markdown]
# The MFU in this table includes pauses. So PaLM has 30%, but 46% in its paper, which leaves pauses out. Only GPT-3 and
# PaLM state a PUE, and their watts include the hosts. For the other models, the table assumes a PUE of 1.1 and only the
# processors' watts.
#
# Training N parameters on D tokens takes C = 6 N D operations. For a fixed C, about 20 tokens per parameter give the
# lowest loss (Hoffmann et al. 2022). The last two columns show this best N and D. GPT-3 was too large for its tokens.
# Llama 3.1 is smaller than this rule says, so each answer costs less (13). DeepSeek-V3's N counts the parameters that a
# token uses.

# %% [markdown]
# ## Take it home <!-- 2 homework 5 -->
#
# This script measures a link without this laboratory. Two ranks, one at each end, play ping-pong. The times of the
# smallest and the largest message give α and β (03). From α and β, the script computes
# how long a ring all-reduce takes on such links. If each rank has a GPU, messages go from GPU to GPU by NCCL.

# %% tags=["take-home"]
# %%writefile take_home_14_links.py
"""Measure a link: torchrun --standalone --nproc-per-node 2 take_home_14_links.py BYTES_OF_GRADIENTS RANKS"""

import os
import sys
import time

import torch
import torch.distributed as dist

if cuda := torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if cuda else "gloo")
rank, nbytes, ranks, one_way = dist.get_rank(), float(sys.argv[1]), int(sys.argv[2]), {}
for n in (8, 2**12, 2**18, 2**24):
    x, times = torch.full((n,), rank, dtype=torch.uint8, device="cuda" if cuda else "cpu"), []
    for _ in range(101):
        begin = time.perf_counter()
        for sender in (0, 1):  # there and back
            dist.send(x, 1 - rank) if rank == sender else dist.recv(x, 1 - rank)
        torch.cuda.synchronize() if cuda else None  # until then, NCCL has only queued them
        times.append(time.perf_counter() - begin)
    assert not x.any()  # both ranks have the bytes of rank 0
    one_way[n] = sorted(times)[50] / 2  # the median, which the first rounds do not change
    print(f"{n:>9} B {one_way[n] * 1e6:10.1f} us {n / one_way[n] / 1e6:9.1f} MB/s") if rank == 0 else None
(small, least), *_, (large, most) = one_way.items()
alpha = least - small * (beta := (most - least) / (large - small))
ring = 2 * (ranks - 1) * (alpha + beta * nbytes / ranks)
if rank == 0:
    print(f"alpha {alpha:.5g} s, beta {beta:.5g} s/B: all-reduce of {nbytes:g} B on {ranks} ranks: {ring:.5g} s")
dist.destroy_process_group()

# %% [markdown]
# The 3 GB of gradients and the 64 ranks of 14.6, on this machine's link:

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_14_links.py 3e9 64
print(out.n)

# %% tags=["take-home"]
words = out.grep("all-reduce")[0].split()
alpha, beta, ring = float(words[1]), float(words[4]), float(words[-2])
hides = [cheapest_link([("it", 1 / beta, alpha)], 3e9, 64, share * ring) for share in (0.91, 0.89)]
assert hides == ["it", None]  # your function of 14.6: backward has to take 90% of this time

# %% [markdown]
# To measure the link between two nodes, start one rank on each: `torchrun --nnodes 2 --nproc-per-node 1`, with
# `--rdzv-backend c10d --rdzv-endpoint NODE:29500` in place of `--standalone`. Your `cheapest_link` takes 1/β and α.

# %% [markdown]
# ## Question to discuss
#
# Your center offers TPUs: for the same peak FLOP/s they cost half as much as GPUs. Your PyTorch code has an `if` on a
# loss in each step, and inputs of many lengths. What do you find out before you say yes?
#
# ## Open issues, and what next
#
# - **Memory.** Will memory keep up with arithmetic? The ridge grew from 153 FLOPs per byte (A100) to 295 (H100). The
#   ridge is lower for H200 and B200: 206 and 281.
# - **Energy.** Training Llama 3.1 405B took 24 GWh. Was this training necessary?
#
# **What next?** Add your own model to `hpdl_lab/performance/cost.py`.
#
# ## Where to read the real code
#
# - `hpdl_lab/performance/static_graph.py`, `hpdl_lab/performance/frameworks.py`: the graph, and the table.
# - `hpdl_lab/performance/frameworks_run/`: one training in each framework; `hpdl_lab/cli/frameworks.py` starts them.
# - `hpdl_lab/performance/links.py`, `nccl_log.py` in the same folder: your two functions, links with their sources.
# - `machines.py` there: processors with their sources; `switch.py`: the switch and the DPU; `cost.py`.
# - Hoffmann et al. 2022 (Chinchilla), arXiv:2203.15556; Patterson et al. 2021 (energy), arXiv:2104.10350; Abadi et al.
#   2016 (TensorFlow), arXiv:1605.08695; Tokui et al. 2019 (Chainer), arXiv:1908.00213; Lu et al. 2017 (the
#   accelerator), HPCA.

# %% [markdown]
# ## Recap
#
# 1. A graph that is known before the run can be changed as a whole. A graph that is found during the run may depend on
#    values.
# 2. A ring sends 2(p-1)/p vectors on each link. A server's link carries p vectors in each direction. If a switch adds,
#    each rank sends one vector.
# 3. Processors differ in where data lie and who plans their moves. The ridge says how often a byte has to be used.
# 4. A link is fast enough if backward hides its communication. NCCL's log shows which way the data go.
# 5. A training costs 6 N D operations. Its energy follows from MFU, watts and PUE.
#
# <!-- terms -->
#
# **What you can do now:** say what a framework sends for a step, and which link hides the communication. Compute days
# and kWh of a training, and find the fault in an NCCL log.
#
# <!-- links -->
