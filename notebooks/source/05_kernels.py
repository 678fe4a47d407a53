# %% [markdown]
# # 05 · Kernels: from the memory bus to the stream
#
# **The number to reach:** 2 bytes. An all-reduce moves no fewer for each byte of a rank's tensor: one in, one out. By
# how many of them is each of the others slower, on this machine?
#
# <!-- tracks -->
#
# Part one: the memory bus. You count what each way to all-reduce reads and writes, measure it, and write the one that
# moves the least. Part two: the GPU. A sum on it, a tensor on its way out of it and back, and an all-reduce that the
# host does not wait for.

# %%

from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# # Part one: the memory bus
#
# ## The idea
#
# In 04 shared memory won the race against every algorithm that sends messages, and it sent none. It is not free: cores
# load from memory and store to it, and the memory bus that they share has a bandwidth, too. So count what each byte of
# a tensor has to do. In the best case rank r reads **one slice** of every rank's tensor, adds, and stores the sum of
# that slice to every rank's tensor:
#
#     tensor of rank 0   | slice 0 | slice 1 |        rank 0 reads both slices 0 and stores to both
#     tensor of rank 1   | slice 0 | slice 1 |        rank 1 does the same with the slices 1, at the same time
#
# Every input is read once, every output is written once, and nothing moves fewer bytes: p ranks with n bytes each take
# at least T = 2 p n / B, where B is the bandwidth of the memory. Everything else is a detour: a tensor that is copied
# into memory of the library first, a message that is copied once or twice on its way, a sum that is read again.
#
# ## Predict
#
# Two ranks, tensors of 16 MiB. One pass is the fastest. How many times as long does it take to copy both tensors into
# shared memory, add there, and copy the results back? And the ring of 04?

# %% guess=[2.5, 3]
my_times = lab.guess("times as long as one pass", {"staged": ..., "ring": ...})

# %% [markdown]
# ## Exercise 5.1 ★ Count bytes
#
# Take a pencil: one rank, n bytes, every arrow from memory to the core and back. Nobody wants the shortest code. The
# check knows no formula: it runs each algorithm on simulated ranks and counts what every operation reads and writes.

# %% exercise="hpdl_lab.collectives.memory:bytes_moved"

# %% check="hpdl_lab.collectives.memory:bytes_moved"

# %% [markdown]
# ## Measure: a roofline
#
# What the memory of this machine can do, and what each algorithm makes of it.

# %% [markdown]
# ## Exercise 5.2 ★★ One pass over shared memory
#
# A tensor of `comm.allocate` lies in memory that all ranks map, and `comm.views(x)` is a list of the tensors of all
# ranks, in their order: views, no copies. `chunk(view, p, r)` is what it was in 04, and `comm.barrier()` returns when
# every rank has called it. There are no messages. What has to be ready before you read, and what before you return?

# %% exercise="hpdl_lab.collectives.memory:one_pass"

# %% check="hpdl_lab.collectives.memory:one_pass"

# %% [markdown]
# The same in C++, from `csrc/shm.cpp`. A rank finds its slice in the tensors of all ranks and hands the addresses to a
# loop, which adds in registers: what your `total` needed a tensor for does not leave the core.
#
# <!-- csrc/shm.cpp: ShmGroup::add_shared -->

# %%
lab.measure(one_pass, ("64KiB", "1MiB", "8MiB"), ranks=2, against=("shm", "mpi"))

# %% [markdown]
# Where the bytes decide, Python is as fast as C++. What do you pay for in a short vector, and how often?

# %% [markdown]
# ## Measure: a buffer that is written again
#
# A staging buffer that is written again at once, against one that is not.

# %% [markdown]
# # Part two: the GPU
#
# ## Exercise 5.3 ★★★ A CUDA reduction
#
# All adding so far was done by cores. A GPU adds with ten thousands of **threads**, and a **kernel** is the function
# that each of them executes. They stand in an order, from which each finds out what is its part of the work:
#
# | who | how many | what they share | how they wait for each other |
# |---|---|---|---|
# | thread `cuda.threadIdx.x` | 1 | nothing: its variables are registers | |
# | warp | 32 | instructions, which they take in step; registers, by shuffles | in each shuffle |
# | block | `THREADS`, here 128 | what `cuda.shared.array` makes, on the chip | `cuda.syncthreads()` |
# | grid | all blocks | the GPU's memory: `x` and `out` | never: blocks come in any order |
#
# `cuda.grid(1)` is the number of a thread among all `cuda.gridsize(1)` of them. Numba compiles such a function for a
# GPU. Without one the same function runs here thread by thread, on numba's simulator. The lab adds the shuffles that
# the simulator lacks, and notes every access to memory, so what a GPU would lose time on is counted.

# %%
lab.show("ladder")

# %% [markdown]
# Four kernels, one sum. **atomics**: additions to a word of memory that all blocks want, one after the other.
# **sectors**: pieces of 32 bytes that come from memory; 512 are 16 KiB, which is all of x, once. **barriers**: in each
# block. **shared**: accesses of a warp to shared memory. **conflicts**: how many of them had to be repeated.
#
# A conflict is this. Shared memory has 32 **banks**, and word i lies in bank i mod 32. Each bank serves one word at a
# time: a warp that wants two words of one bank takes two turns. Here is the second kernel of the ladder.

# %% shown="hpdl_lab.kernels.ladder:interleaved"

# %% [markdown]
# Predict: how many turns does the slowest of its accesses take?

# %% guess=[2]
my_turns = lab.guess("turns of the slowest access to shared memory", ...)

# %%
lab.show(interleaved, prediction=my_turns)

# %% [markdown]
# Write one without conflicts, and with fewer barriers. You need three things. In `sums = cuda.shared.array(THREADS,
# np.float32)` all threads of a block get the same array, in which nothing is written yet.
# `cuda.shfl_down_sync(ALL_LANES, value, k)` is the `value` of the thread k lanes further on in the warp of `WARP`
# threads; all of them have to call it. `cuda.atomic.add(out, 0, value)` adds to out[0].
#
# A race may give the right sum a thousand times. The check finds it nevertheless: it looks at who touches what between
# two barriers, not at who came first.

# %% exercise="hpdl_lab.kernels.ladder:gpu_sum"

# %% check="hpdl_lab.kernels.ladder:gpu_sum"

# %%
lab.show("ladder", gpu_sum)

# %% [markdown]
# Where a GPU is, the table has two more columns, microseconds and GB/s, and below yours the same ladder in CUDA, from
# `csrc/cuda/reduction_kernels.cuh`. Its upper rungs go on: loads of 16 bytes, and four of them at once. They are for
# the GPU's memory, which is what a sum waits for in the end.
#
# The last rung is 5.2 once more. GPUs that can reach each other's memory need no messages: each takes its slice, of
# all tensors, and stores the sum to all of them. `csrc/cuda/one_pass_kernels.cuh` has it in CUDA.

# %% shown="hpdl_lab.kernels.ladder:add_slices"

# %%
from hpdl_lab.kernels.threads import Launch, counts

tensors = [np.full(1024, rank + 1, np.float32) for rank in range(4)]
costs = [counts(Launch(add_slices, 2, THREADS, tensors, 256 * rank, 256)) for rank in range(4)]
assert all((x == 10).all() for x in tensors)
costs[0]

# %% [markdown]
# 256 sectors for each GPU: its slice of 1 KiB, read from four tensors and written to four. No atomic, no barrier; what
# is left are two meetings of the GPUs, before and after.

# %% [markdown]
# ## Exercise 5.4 ★★★ Staging through the host
#
# Device to host, wire, host to device: in blocks, all three at the same time.

# %% [markdown]
# ## Exercise 5.5 ★★ The stream waits, the host does not
#
# An all-reduce that returns at once.

# %% [markdown]
# ## Take it home
#
# The same in the real API.

# %% [markdown]
# ## Question to discuss
#
# One pass over shared memory moves 2 bytes for each byte of the tensor, and no algorithm moves fewer. Why do libraries
# stage through buffers of their own nevertheless?
#
# ## Where to read the real code
#
# - `hpdl_lab/collectives/memory.py`: your two functions, and an all-reduce that is staged.
# - `csrc/shm.cpp`: the slice owner's loop, and the staging for tensors that are elsewhere.
# - `csrc/reduce.cpp`: the sum of many vectors in one pass.

# %% [markdown]
# ## Recap
#
# 1. An all-reduce over shared memory is bound by the bytes that it loads and stores.
# 2. No algorithm moves fewer than one read of each input and one write of each output.
# 3. A buffer that is written again at once is not free, however small it is.
# 4. On a GPU too, the bytes decide: a reduction is as good as the share of the bandwidth that it reaches.
# 5. Where a copy cannot be avoided, it is cut into blocks and hidden behind another one.
#
# | term | what it means |
# |---|---|
# | slice owner | the rank that adds one slice of all tensors |
# | staging buffer | memory of the library's own, through which a tensor is copied |
#
# **What you can do now:** count the bytes of an algorithm, and say how fast it can be at best.
#
# <!-- links -->
