# %% [markdown]
# # 04 · Ring all-reduce
#
# **The number to reach:** 97% test accuracy on handwritten digits, of a model that four ranks trained with *your*
# all-reduce.
#
# <!-- tracks -->
#
# Part one: you write a ring all-reduce, race it, and train with it. Part two: its relatives, and slow networks.

# %%
import torch

from hpdl_lab import lab, trace

lab.start(4)

# %% [markdown]
# # Part one: a ring
#
# ## The idea <!-- 1 half day 8 -->
#
# Every rank holds a vector of N numbers, its gradient. Every rank needs the sum of all of them. The obvious way sends
# all vectors to rank 0, which adds them and sends the sum back. Then rank 0 receives p-1 vectors and sends p-1,
# 2(p-1) in all, while the others wait: twice the ranks, about twice the time.
#
# On a **ring** nobody is special. Rank r talks only to its neighbors: it sends to r+1 and receives from r-1. Cut the
# vector into p chunks, and let all of them travel at the same time:
#
# 1. **reduce-scatter**: each chunk goes around the ring once and collects every rank's contribution. After p-1 steps
#    rank r holds the whole sum of chunk r.
# 2. **all-gather**: each finished chunk goes around once more, and everybody keeps a copy. Another p-1 steps.
#
# HPC had known this ring (Patarasuk & Yuan 2009) when Baidu brought it to deep learning in 2017 (A. Gibiansky,
# "Bringing HPC Techniques to Deep Learning"); Horovod began with Baidu's implementation.

# %%
lab.show("ring", ranks=4)

# %% [markdown]
# The number in a cell says how many ranks are already in its sum. Steps count from 0, as `i` does in your code.
# Press play, or drag the slider to a step, and follow one chunk.
#
# ## Predict
#
# Four ranks reduce a vector of 4 MiB. How many bytes does each rank **send**, in all? And how long does it take, for
# 4 bytes and for 4 MiB?

# %% guess=[16777216, 20, 5000]
my_bytes = lab.guess("bytes that one rank sends", ...)
my_times = lab.guess("microseconds of an all-reduce", {"4": ..., "4MiB": ...})

# %% [markdown]
# ## Exercise 4.1 ★★ Reduce-scatter <!-- 1 half day 26 -->
#
# You need four things: `chunk(x, p, i)` is a view of chunk i mod p, so what you write into it is written into `x`;
# `bounds(n, p, i)` says where that chunk starts and ends; `new_like(x, n)` is an empty tensor with the dtype of `x`;
# and `comm.sendrecv(out, dst, into, src)` sends and receives at the same time.

# %% exercise="hpdl_lab.collectives.ring:reduce_scatter"

# %% check="hpdl_lab.collectives.ring:reduce_scatter"

# %% [markdown]
# ## Exercise 4.2 ★★ All-gather <!-- 1 half day 8 -->
#
# The same walk with nothing to add.

# %% exercise="hpdl_lab.collectives.ring:all_gather"

# %% check="hpdl_lab.collectives.ring:all_gather"

# %% [markdown]
# ## Exercise 4.3 ★★ All-reduce <!-- 1 half day 4 -->
#
# One after the other: your two functions.

# %% exercise="hpdl_lab.collectives.ring:all_reduce"

# %% check="hpdl_lab.collectives.ring:all_reduce"

# %% [markdown]
# ## Run it on four processes <!-- 1 half day 2 -->
#
# A vector of 4 MiB on every rank, and what each of them sent.

# %%
results = lab.run(all_reduce, torch.ones(2**20))
sent = trace.bytes_sent(results.events)[0]
assert sent == 6 * 2**20 and all(bool((x == 4).all()) for x in results)
lab.reveal("bytes that one rank sends", sent)

# %% [markdown]
# 2(p-1)/p vectors: 1.5 for four ranks, and never more than 2. Fewer are not possible. For each of the N numbers p-1
# contributions have to leave their rank to be added, which is (p-1)/p of a vector per rank if the work is shared
# equally. Then every rank still lacks the (p-1)/p of the sum that others have finished.
#
# ## Measure: a race <!-- 1 half day 6 -->
#
# Yours against the same ring in C++, against memory that the ranks share, against the MPI library, and against gloo,
# which PyTorch uses on CPUs. Wrong sums are not timed. With more ranks than cores a single point may be off by a
# factor of five: run the cell again before you believe it.
#
# Two numbers are used everywhere. **algbw** = bytes of the vector / time. **busbw** = algbw · 2(p-1)/p: the bytes
# that a ring has to send / time. busbw can be compared with the speed of a link for any number of ranks; it is what
# `nccl-tests` prints.
#
# The model is 2(p-1)·α + 2(p-1)/p·n·β + (p-1)/p·n·γ: α is the time of an empty message, β that of a byte on its way,
# γ that of adding one.

# %%
race = lab.measure(all_reduce, prediction=my_times)
took = {row["size"]: row["time_us"] for row in race.rows if row["name"] == "your all_reduce"}
lab.reveal("microseconds of an all-reduce", {"4": took[min(took)], "4MiB": took[max(took)]})
race

# %% [markdown]
# On the left of the picture latency decides: the ring takes 2(p-1) messages one after another. On the right bandwidth
# decides, and there it is hard to beat by anything that sends messages at all. Shared memory sends none.
#
# The two dotted lines are the same formula with different α, β and γ. "No contention" takes them from a ping-pong, in
# which one message is on its way at a time, and is several times too fast. In a ring all ranks send, copy and add at
# the same time, and here they share cores and memory: "ring model" measures messages and additions while all ranks do
# so. Where each rank has a core and a link of its own, the two are nearly one line.
#
# Dashed over your curves: the same race between two ranks that have a core each, recorded on another machine; "ring" is
# the library's, in Python as yours. Whose times change most if ranks need not wait for a core, and why those?

# %%
lab.replay("race_amd_epyc_2_cores", over=race)

# %% [markdown]
# ## Train with it <!-- 1 half day 5 -->
#
# 1,437 real scans of handwritten digits, a model with 17,226 weights, four ranks. Every step adds the gradients of
# all ranks with your function.

# %%
trained = lab.train(all_reduce=all_reduce)
assert trained.test_accuracy >= 0.97
trained

# %% [markdown]
# What the four ranks did meanwhile, one lane each. Your function is what happens within "add gradients"; the bar
# "all_reduce" is the communicator's own and adds up the loss that is drawn above.

# %%
lab.show(trained)

# %% [markdown]
# # Part two: relatives, and real links <!-- 2 full day 8 -->
#
# Nobody uses one algorithm for everything. Each of these leaves the same sum on every rank:
#
# | name | steps in a row | bytes in a row | good for |
# |---|---|---|---|
# | ring | 2(p-1) | 2(p-1)/p · n | long vectors; any network, each rank needs one neighbor |
# | tree | 2 log₂ p | 2 log₂ p · n | short vectors, many ranks |
# | recursive doubling | log₂ p | log₂ p · n | very short vectors |
# | halving-doubling | 2 log₂ p | 2(p-1)/p · n | short and long vectors, if every pair of ranks has a fast path |
# | double binary tree | about 2 log₂ p + segments | about 2n | long vectors on thousands of ranks (NCCL) |
# | hierarchical | few between hosts | n/g between hosts, with g ranks per host | several ranks per host (S-Caffe) |
# | grid of d1 × d2 ranks | 2(d1-1) + 2(d2-1) | 2(p-1)/p · n | links of two speeds (IBM's PowerAI DDL) |

# %%
lab.show("halving_doubling", ranks=8)

# %% [markdown]
# How long would they take on four machines with four GPUs each: fast links inside a machine, one slower port between
# the machines? You need not own such machines: a network is described as data, and your ring runs unchanged on 16
# simulated ranks.

# %%
from hpdl_lab.comm.network import Islands

machines = Islands(4, inside="nvlink_4", between="infiniband_ndr")
lab.show(machines, ranks=16)

# %% [markdown]
# Before you run it: which of them is best for 64 bytes, and which for 2 MiB?

# %%
family = ("tree", "halving_doubling", "hierarchical", "grid")
lab.measure(all_reduce, sizes=("64", "16KiB", "256KiB", "2MiB"), against=family, ranks=16, network=machines)

# %% [markdown]
# The grid is that of IBM's PowerAI DDL (Cho et al. 2017): a ring inside each machine leaves a quarter of its sum on
# each GPU, rings between machines add the quarters, and a ring inside each machine brings them together. That is 12
# steps in place of 30, and 1.5 vectors leave each machine in place of 1.9: 2 MiB take half as long as on one ring.
#
# ## Exercise 4.4 ★★★ Segment pipelining <!-- 2 homework 20 -->
#
# Trees and chains pass whole vectors on, one rank after the other, and most of them wait. Cut the vector into
# **segments**: a rank passes the first one on while it receives the second. A chain shows it best. Root 0 sends to 1,
# 1 to 2, and so on; with another root everybody moves up by as many places.
#
# `comm.isend(x, dst)` starts a send and returns at once; the Work that it returns has a `wait()`.

# %% exercise="hpdl_lab.collectives.chain:broadcast"

# %% check="hpdl_lab.collectives.chain:broadcast"

# %% [markdown]
# How many segments? Each costs a latency, and each shortens the wait of the ranks further down the chain. Where does
# the best number go if α grows a hundredfold, and where if the vector does?

# %%
lab.explore("segments")

# %% [markdown]
# ## Exercise 4.5 ★★ Choose by size <!-- 2 full day 8 -->
#
# Given α and β, the time of every algorithm is known before it runs. So the choice can be left to a function.
# Libraries have one: NCCL chooses among trees, rings and others by the size, the number of ranks and what it knows of
# the links; Intel's MLSL, today oneCCL, reads a table of sizes, such as
# `CCL_ALLREDUCE="recursive_doubling:0-8192;ring:8193-max"`.

# %% exercise="hpdl_lab.collectives.cost:choose"

# %% check="hpdl_lab.collectives.cost:choose"

# %% [markdown]
# The same choice for six algorithms; on the right the fastest one for every size and number of ranks, the circle is
# your setting, a diamond the crossover. Where does the ring win? Look at the numbers of ranks that are no powers of
# two. This model gives every pair of ranks a path of its own: what would a network that does not have them change?

# %%
lab.explore("algorithms")

# %% [markdown]
# ## Real links <!-- 2 homework 10 -->
#
# So far all ranks shared one memory. Now this machine plays four hosts, each with its own name and a link of 1
# Gbit/s; between them runs TCP, as in a real cluster. That needs network namespaces, which some machines refuse to
# ordinary users, and engines that no other open notebook uses. If it cannot be done, the next cell says so in one
# sentence. You keep the engines that you have, and the remaining cells still run, over shared memory.

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
# Your `choose` knows, now that α and β are measured. Then measure.

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
# On slow links your Python ring is as good as compiled code, because the link is what takes the time. The simulated
# curves know nothing but α and β. How does the parameter server fare, with all traffic on one link?
#
# Did ring and tree cross where your `choose` said they would? For large vectors the model is good to a few percent.
# For small ones it has two problems here: after a pause the traffic shaper lets a burst of about 64 KB through, and
# hosts that share two cores wait for a core as well as for each other.
#
# Dashed over your curves: four such hosts as another machine played them, with the library's ring in place of yours. If
# your machine could not, this is what you have missed: at 4 MiB the tree takes over twice as long as the ring, and the
# parameter server almost four times. `lab.replay()` lists what else has been recorded, and whether a GPU is among it.

# %%
lab.replay("race_emulated_amd_epyc_2_cores", over=real)

# %%
lab.start(4, where="local")

# %% [markdown]
# ## Take it home <!-- 2 homework 5 -->
#
# Your ring in PyTorch. `batch_isend_irecv` is your `comm.sendrecv`: it starts the send and the receive together. The
# first p-1 steps are your `reduce_scatter`, the others your `all_gather`. Rank 0 prints how many bytes it has sent:
# as many as yours.

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
# On GPUs, NCCL chooses an algorithm and a protocol for every size, as your `choose` does. `NCCL_DEBUG=INFO` with
# `NCCL_DEBUG_SUBSYS=TUNING` says which. To compare them, set one: `NCCL_ALGO=Ring` or `Tree`, and `NCCL_PROTO=Simple`,
# `LL` or `LL128`. `LL` sends a flag of four bytes with every four bytes of data, so that nobody waits for a separate
# signal: less latency for half of the bandwidth. `LL128` has 120 bytes of data in every 128. This measures rings on two
# nodes with eight GPUs each, for 8 bytes to 4 GiB, and prints the columns of your race:
#
#     NCCL_ALGO=Ring NCCL_PROTO=Simple mpirun -np 16 -N 8 ./build/all_reduce_perf -b 8 -e 4G -f 2 -g 1
#
# Your ring sends the fewest bytes as long as **ranks** do the adding. A switch can add, too: those of InfiniBand
# (SHARP, which NCCL calls CollNet), and since the H100 the NVSwitch between the GPUs of a node (NVLink SHARP, or
# **NVLS**). Each GPU then sends its vector about once and gets the sum once, n bytes instead of 2(p-1)/p · n, however
# many GPUs there are. That is what NCCL takes for long vectors on such a node, and why the busbw of `nccl-tests` can
# be higher there than any link is fast.

# %% [markdown]
# ## Question to discuss
#
# Your ring sends the fewest bytes possible. Why does shared memory still win? On which network does a chain with
# segments beat a tree, and on which does it lose?
#
# ## Where to read the real code
#
# - `hpdl_lab/collectives/ring.py`: your three functions as the library has them.
# - `hpdl_lab/collectives/table.py`: the whole family, as one table; `hpdl_lab/collectives/cost.py`: what each costs.
# - `hpdl_lab/engines/hosts.py`: how one machine plays several hosts.
# - `csrc/`: the compiled ring and the shared-memory kernel.
# - `hpdl_lab/parallel/data_parallel.py`: how the gradients are packed, reduced and handed back.

# %% [markdown]
# ## Recap
#
# 1. An all-reduce is a reduce-scatter and an all-gather.
# 2. On a ring each rank sends 2(p-1)/p of its vector, less than twice its size for any number of ranks.
# 3. No algorithm of messages sends less; a tree takes fewer steps, and wins for short vectors.
# 4. algbw is vector size over time; busbw multiplies it by 2(p-1)/p and can be compared with the speed of a link.
# 5. Libraries choose by size, ranks and network: NCCL among rings, trees and others, MPI among many more.
#
# | term | what it means |
# |---|---|
# | reduce-scatter | leaves a different chunk of the sum on each rank |
# | all-gather | puts the chunks of all ranks together on every rank |
# | chunk, segment | one of p parts of a vector, one per rank; a smaller part, for pipelining |
# | tree, recursive doubling, halving-doubling | all-reduces with about log₂ p steps |
# | hierarchical | first inside each host, then between hosts |
# | algbw, busbw | bytes of the vector per second; bytes that a ring has to send per second |
# | bandwidth-optimal | sends the least number of bytes that is possible |
#
# **What you can do now:** write a ring all-reduce, predict its time from α and β, and say when another algorithm is
# faster.
#
# <!-- links -->
