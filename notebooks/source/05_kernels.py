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
# A sum on a GPU, from the naive kernel to one pass over the tensors of all GPUs.

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
