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
# In 04 shared memory won the race, and sent nothing. What it costs instead are loads and stores.

# %% [markdown]
# ## Exercise 5.1 ★ Count bytes
#
# Every algorithm reads and writes memory a number of times that you can count.

# %% [markdown]
# ## Measure: a roofline
#
# What the memory of this machine can do, and what each algorithm makes of it.

# %% [markdown]
# ## Exercise 5.2 ★★ One pass over shared memory
#
# Each rank owns a slice, reads it from every tensor, and writes the sum to every tensor.

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
