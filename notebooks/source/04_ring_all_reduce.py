# %% [markdown]
# # 04 · Ring all-reduce
#
# **The number to reach:** 97% test accuracy on handwritten digits, with a model that four ranks train by *your*
# all-reduce.
#
# <!-- tracks -->

# %%
import torch

from hpdl_lab import lab, trace

lab.start(4)

# %% [markdown]
# # Part one: a ring
#
# ## The idea <!-- 1 half day 8 -->
#
# Each of p ranks holds a vector of N numbers, its gradient. Every rank needs the sum of all vectors. The obvious way
# sends all vectors to rank 0, which adds them and sends the sum back. Rank 0 receives p-1 vectors and sends p-1, while
# the other ranks wait. With twice the ranks, this way takes about twice the time.
#
# On a **ring** all ranks do the same: rank r sends to rank r+1 and receives from rank r-1. Cut the vector into p
# **chunks** that travel at the same time:
#
# 1. **Reduce-scatter**: each chunk goes around the ring once, and every rank adds its own numbers. After p-1 steps
#    rank r holds the whole sum of chunk r.
# 2. **All-gather**: each finished chunk goes around once more, in p-1 more steps, and every rank keeps a copy.
#
# High-performance computing (HPC) used this ring (Patarasuk & Yuan 2009) before Baidu brought it to deep learning in
# 2017 (A. Gibiansky, "Bringing HPC Techniques to Deep Learning"). Horovod began with Baidu's implementation.

# %%
lab.show("ring", ranks=4)

# %% [markdown]
# In the animation, columns are ranks and rows are chunks. The number in a cell says how many ranks have added their
# numbers to this chunk. Press play, and follow one chunk.
#
# ## Predict
#
# Four ranks add up vectors of 4 MiB. How many bytes does each rank **send**, in all? And how many microseconds does an
# all-reduce take, for 4 bytes and for 4 MiB?

# %% guess=[16777216, 20, 5000]
my_bytes = lab.guess("bytes that one rank sends", ...)
my_times = lab.guess("microseconds of an all-reduce", {"4": ..., "4MiB": ...})

# %% [markdown]
# ## Exercise 4.1 ★★ Reduce-scatter <!-- 1 half day 26 -->
#
# Write the first half of the ring. You need:
#
# - `chunk(x, p, i)`: a view of chunk i mod p. What you write into the view is written into `x`.
# - `bounds(n, p, i)`: the start and the end of chunk i mod p.
# - `new_like(x, n)`: an empty tensor of n elements with the dtype of `x`.
# - `comm.sendrecv(out, dst, into, src)`: a send and a receive at the same time.
#
# The check compares the sums, and counts steps and bytes.

# %% exercise="hpdl_lab.collectives.ring:reduce_scatter"

# %% check="hpdl_lab.collectives.ring:reduce_scatter"

# %% [markdown]
# ## Exercise 4.2 ★★ All-gather <!-- 1 full day 8 -->
#
# Write the second half: chunks travel in the same way, and nothing is added.

# %% exercise="hpdl_lab.collectives.ring:all_gather"

# %% check="hpdl_lab.collectives.ring:all_gather"

# %% [markdown]
# ## Exercise 4.3 ★★ All-reduce <!-- 1 full day 4 -->
#
# Call your two functions one after the other.

# %% exercise="hpdl_lab.collectives.ring:all_reduce"

# %% check="hpdl_lab.collectives.ring:all_reduce"

# %% [markdown]
# ## Run it on four processes <!-- 1 half day 2 -->
#
# Did you leave out 4.2 or 4.3? `lab.catch_up("4.3")` in a new cell defines their functions.
#
# Run your all-reduce on vectors of 4 MiB, and count the bytes of each rank.

# %%
results = lab.run(all_reduce, torch.ones(2**20))
sent = trace.bytes_sent(results.events)[0]
assert sent == 6 * 2**20 and all(bool((x == 4).all()) for x in results)
lab.reveal("bytes that one rank sends", sent)

# %% [markdown]
# Each rank sends 2(p-1)/p vectors: 1.5 for four ranks, and never more than 2. The ring is **bandwidth-optimal**: no
# algorithm of messages between ranks sends fewer bytes. For each of the N sums, p-1 ranks must send their number, and
# then p-1 ranks must receive the sum. In all, ranks send 2(p-1) · N numbers: 2(p-1)/p vectors for each rank.
#
# ## Measure: a race <!-- 1 half day 6 -->
#
# Your ring races against the same ring in C++, against MPI, and against gloo, which PyTorch uses on CPUs. One more
# all-reduce uses **shared memory**, which all processes of a machine can use. With more ranks than cores a
# point may be off by a factor of five: run the cell again.
#
# Benchmarks, such as NVIDIA's `nccl-tests`, print two numbers:
#
# - **algbw** = bytes of the vector / time.
# - **busbw** = algbw · 2(p-1)/p = bytes that a ring sends / time. Compare busbw with the speed of a link, for
#   any number of ranks.
#
# The time of a ring of p ranks, with vectors of n bytes, is about
#
#     2(p-1)·α + 2(p-1)/p·n·β + (p-1)/p·n·γ      α: s per message    β: s per byte sent    γ: s per byte added

# %%
race = lab.measure(all_reduce, prediction=my_times)
took = {row["size"]: row["time_us"] for row in race.rows if row["name"] == "your all_reduce"}
lab.reveal("microseconds of an all-reduce", {"4": took[min(took)], "4MiB": took[max(took)]})
race

# %% [markdown]
# On the left of the plot latency decides: the ring sends 2(p-1) messages one after another. On the right bandwidth
# decides. The all-reduce in shared memory sends no messages.
#
# The two dotted lines show the formula for the time of a ring. In a ring all ranks work at the same time. If they share
# cores and memory, they slow each other down: this is **contention**. For the line "ring model", the lab measures α, β
# and γ under contention. For "no contention", the lab measures one message at a time, and the line is several times too
# fast. If each rank has its own core and link, the two lines nearly agree.
#
# The next plot adds dashed curves: the same race on another machine, between two ranks with a core each. The dashed
# "ring" is the library's Python ring. Which curves change most if ranks never wait for a core, and why?

# %%
lab.replay("race_amd_epyc_2_cores", over=race)

# %% [markdown]
# ## Train with it <!-- 1 half day 5 -->
#
# Train a model with 17,226 weights on 1,437 scans of handwritten digits. Your function adds the gradients in every
# step.

# %%
trained = lab.train(all_reduce=all_reduce)
assert trained.test_accuracy >= 0.97
trained

# %% [markdown]
# In the next timeline, your function runs within "add gradients". The bar "all_reduce" is the communicator's own
# all-reduce: it adds the ranks' losses, for the loss plot.

# %%
lab.show(trained)

# %% [markdown]
# # Part two: relatives, and real links <!-- 2 full day 8 -->
#
# No algorithm is best for every size and network. The first table lists six other all-reduces. The second table
# counts the messages that must follow one another (steps), and the bytes in these messages. A **host**, or node, is one
# machine of a cluster.
#
# | name | how ranks add |
# |---|---|
# | **tree** | one rank of each pair sends, the other adds; ranks that added form new pairs; then the sum is sent back |
# | **recursive doubling** | partners at distance 1, then 2, 4 ... swap whole vectors, and both partners add |
# | **halving-doubling** | partners swap halves and add, then quarters ...; then they swap the sums in reverse order |
# | **double binary tree** | two trees work at the same time, each on half of the vector, cut into m parts |
# | **hierarchical** | ranks add first inside each host, then between hosts |
# | **grid** of d1 × d2 ranks | ranks add on rings along the rows of the grid, then on rings along the columns |
#
# | name | steps | bytes | good for |
# |---|---|---|---|
# | ring | 2(p-1) | 2(p-1)/p · n | long vectors; any network, because each rank sends to one neighbor |
# | tree | 2 log₂ p | 2 log₂ p · n | short vectors, many ranks |
# | recursive doubling | log₂ p | log₂ p · n | very short vectors |
# | halving-doubling | 2 log₂ p | 2(p-1)/p · n | short and long vectors, if every pair of ranks has a fast path |
# | double binary tree | about 2 log₂ p + m | about 2n | long vectors, thousands of ranks (NCCL) |
# | hierarchical | few between hosts | n/g between hosts, with g ranks per host | several ranks per host (S-Caffe) |
# | grid | 2(d1-1) + 2(d2-1) | 2(p-1)/p · n | links of two speeds (IBM's PowerAI DDL) |
#
# See how the partners change in halving-doubling:

# %%
lab.show("halving_doubling", ranks=8)

# %% [markdown]
# How long would these algorithms take on four machines with four GPUs each? Links inside a machine are fast. One slower
# port of **InfiniBand**, a network for clusters, connects each machine with the others. The lab takes the α and β of
# each link, and runs your ring unchanged on 16 **simulated** ranks. Messages carry real data, and times are computed.

# %%
from hpdl_lab.comm.network import Islands

machines = Islands(4, inside="nvlink_4", between="infiniband_ndr")
lab.show(machines, ranks=16)

# %% [markdown]
# Predict: which algorithm is best for 64 bytes, and which for 2 MiB?

# %%
family = ("tree", "halving_doubling", "hierarchical", "grid")
lab.measure(all_reduce, sizes=("64", "16KiB", "256KiB", "2MiB"), against=family, ranks=16, network=machines)

# %% [markdown]
# The grid comes from IBM's PowerAI DDL (Cho et al. 2017). A ring inside each machine leaves a quarter of the machine's
# sum on each GPU. Rings between machines add these quarters, and a ring inside each machine collects the results.
#
# The grid takes 12 steps, six of them between machines. Your ring takes 2 · 15 = 30 steps, all with the latency of the
# slow ports. At 2 MiB, these 30 latencies add up to half of the ring's time. The grid's 12 latencies add up to a
# quarter of this: half of its steps stay inside a machine, with a shorter latency. With the grid 1.5 vectors leave each
# machine, and with your ring 1.9. The two savings together halve the time.
#
# ## Exercise 4.4 ★★★ Segment pipelining <!-- 2 homework 20 -->
#
# Broadcast a vector along a chain of ranks, in parts called **segments**. If ranks pass whole vectors on, most ranks
# wait. With segments, a rank sends the first segment on while it receives the second. The chain begins at the root: on
# four ranks, root 2 sends to 3, 3 to 0, and 0 to 1.
#
# `comm.isend(x, dst)` starts a send and returns a Work at once. Call `wait()` of every Work before you return.

# %% exercise="hpdl_lab.collectives.chain:broadcast"

# %% check="hpdl_lab.collectives.chain:broadcast"

# %% [markdown]
# How many segments are best? Each further segment costs a latency, but ranks later in the chain wait less. What happens
# to the best number if α or the vector grows a hundredfold?

# %%
lab.explore("segments")

# %% [markdown]
# ## Exercise 4.5 ★★ Choose by size <!-- 2 full day 8 -->
#
# Choose the fastest of several algorithms: compute their times from α and β. NCCL chooses among trees,
# rings and others by size, number of ranks and links. Intel's oneCCL (once MLSL) reads a table of
# sizes, such as `CCL_ALLREDUCE="recursive_doubling:0-8192;ring:8193-max"`.

# %% exercise="hpdl_lab.collectives.cost:choose"

# %% check="hpdl_lab.collectives.cost:choose"

# %% [markdown]
# The next plot chooses among six algorithms. The left side shows their times; a diamond marks each **crossover**, where
# the fastest algorithm changes. On the right, colors show the fastest algorithm for every size and number of ranks, and
# the circle is your setting. Where does the ring win? What is different if the number of ranks is no power of two? In
# this plot every pair of ranks has its own link. Which algorithms would lose most on shared links?

# %%
lab.explore("algorithms")

# %% [markdown]
# ## Real links <!-- 2 homework 10 -->
#
# So far no message crossed a network. Now this machine **emulates**
# four hosts: they send over TCP, as in a real cluster, and the system slows each link down to 1 Gbit/s. Times are
# measured, not computed.
#
# All notebooks share your engines: run no other notebook in this section. Linux gives each host its own network,
# a network namespace. If this machine forbids namespaces, the next cell says so, and the later cells run without a
# network.

# %% tags=["raises-exception"]
lab.start(4, where="emulated", link="1gbit")

# %%
from hpdl_lab.parallel.messages import ping_pong

link = lab.ping_pong(ping_pong, sizes=("8", "1MiB", "4MiB"))
link

# %% [markdown]
# Predict: above which size is the ring faster than the tree, on these four hosts?

# %% guess=[16384]
my_size = lab.guess("bytes from which on the ring is faster than the tree", ...)

# %% [markdown]
# Ask your `choose`, with the measured α and β. Then measure.

# %%
from hpdl_lab.collectives import cost

costs = {"ring": cost.all_reduce, "tree": cost.tree, "parameter_server": cost.parameter_server}
sizes = [2**k for k in range(10, 23, 3)]
{size: choose(costs, 4, size, link.alpha, link.beta) for size in sizes}

# %%
real = lab.measure(all_reduce, sizes, against=("tree", "parameter_server", "mpi"), simulated=True, prediction=my_size)
cross, paper = real.crossover("your all_reduce", "tree"), real.modelled_crossover("ring", "tree")
print("ring and tree cross at", cross, "bytes; None: they do not cross")
print("on paper, with α and β of this run, at", paper)
lab.reveal("bytes from which on the ring is faster than the tree", cross or paper or 0)
real

# %% [markdown]
# On slow links your Python ring is as good as compiled code, because the link takes most of the time. The simulated
# curves use only α and β.
#
# Did ring and tree cross where your `choose` predicted? For large vectors `choose` is right within a few percent.
# For small vectors `choose` is wrong: an idle link first lets about 64 KB pass at full speed. And hosts that share two
# cores also wait for a core.
#
# The next plot adds dashed curves from another machine, which emulated four such hosts and ran the library's ring. At 4
# MiB the tree takes more than twice the ring's time, and the parameter server almost four times. `lab.replay()` lists
# all recordings and their machines.

# %%
lab.replay("race_emulated_amd_epyc_2_cores", over=real)

# %%
lab.start(4, where="local")

# %% [markdown]
# ## Take it home <!-- 2 homework 5 -->
#
# This file is your ring in PyTorch. `batch_isend_irecv` starts a send and a receive together, as your `comm.sendrecv`
# does. The first p-1 steps are your `reduce_scatter`, and the others are your `all_gather`.

# %% tags=["take-home"]
# %%writefile take_home_04.py
"""Add vectors on a ring: torchrun --standalone --nproc-per-node 4 take_home_04.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.arange(2**20) % 1000 * (rank + 1.0)  # whole numbers, so that sums are exact in any order
expected = x.clone()
dist.all_reduce(expected)

chunks, sent = x.tensor_split(size), 0  # views: what is written into a chunk is written into x
for step in range(2 * (size - 1)):
    out, into = chunks[(rank - step - 1) % size], chunks[(rank - step - 2) % size]
    arriving = torch.empty_like(into)
    send = dist.P2POp(dist.isend, out, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    sent += out.nbytes
    if step < size - 1:
        into += arriving  # reduce-scatter
    else:
        into.copy_(arriving)  # all-gather
assert torch.equal(x, expected)
if rank == 0:
    print("bytes sent:", sent)

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 take_home_04.py
print(out.n)

# %% tags=["take-home"]
assert int(out.grep("bytes sent")[0].split()[-1]) == sent

# %% [markdown]
# On GPUs, NCCL chooses an algorithm and a protocol for every size. `NCCL_DEBUG=INFO` with `NCCL_DEBUG_SUBSYS=TUNING`
# prints the choice. To compare, set `NCCL_ALGO=Ring` or `Tree`, and `NCCL_PROTO=Simple`, `LL` or `LL128`. In `Simple`,
# the receiver waits for a separate signal after each block of data. In `LL`, a flag of four bytes travels with every
# four bytes of data. So no signal is needed: the latency is lower, but flags take half of the bandwidth. In
# `LL128`, 120 of every 128 bytes are data. The next command measures rings on two nodes with eight GPUs each, from 8
# bytes to 4 GiB, and prints the columns of your race:
#
#     NCCL_ALGO=Ring NCCL_PROTO=Simple mpirun -np 16 -N 8 ./build/all_reduce_perf -b 8 -e 4G -f 2 -g 1
#
# Your ring sends the fewest bytes if **ranks** add. A switch, which joins the links of a network, can add, too. The
# switches of InfiniBand add by SHARP (CollNet in NCCL). The NVSwitch, which joins the GPUs of a node, adds since the
# H100: this is **NVLS** (NVLink SHARP). Each GPU then sends about n bytes instead of 2(p-1)/p · n. NCCL uses NVLS for
# long vectors. `nccl-tests` computes busbw as if a ring ran, so busbw can be above the speed of every link.

# %% [markdown]
# ## Question to discuss
#
# Your ring sends the fewest bytes possible. Why does shared memory still win? On which network does a chain with
# segments beat a tree, and on which network does the chain lose?
#
# ## Where to read the real code
#
# - `hpdl_lab/collectives/ring.py`: your three functions in the library.
# - `hpdl_lab/collectives/table.py`: all algorithms in one table; `hpdl_lab/collectives/cost.py`: what each costs.
# - `hpdl_lab/engines/hosts.py`: how one machine emulates several hosts.
# - `csrc/`: the compiled ring, and the all-reduce in shared memory.
# - `hpdl_lab/parallel/data_parallel.py`: how gradients are packed into a vector, added and unpacked.

# %% [markdown]
# ## Recap
#
# 1. An all-reduce is a reduce-scatter and an all-gather.
# 2. On a ring each rank sends 2(p-1)/p vectors: less than two.
# 3. No algorithm of messages sends fewer bytes; a tree takes fewer steps, and wins for short vectors.
# 4. algbw is vector size over time; busbw is algbw · 2(p-1)/p, and can be compared with the speed of a link.
# 5. NCCL and MPI choose the algorithm by size, ranks and network.
#
# <!-- terms -->
#
# **What you can do now:** write a ring all-reduce, predict its time from α and β, and say when another algorithm is
# faster.
#
# <!-- links -->
