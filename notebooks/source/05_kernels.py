# %% [markdown]
# # 05 · Kernels: from the memory bus to the stream
#
# **The number to reach:** 2 bytes moved for each byte of a tensor, one read and one written.
#
# <!-- tracks -->
#
# Part one counts bytes on the memory bus. Part two is about GPUs: a sum, a copy from GPU to GPU, and an all-reduce for
# which the CPU does not wait.

# %%
import torch

from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# # Part one: the memory bus
#
# ## The idea <!-- 1 homework 4 -->
#
# In 04 the all-reduce over shared memory was the fastest, because it sends no messages. But it moves bytes. Cores load
# and store over the **memory bus**, and all cores share its bandwidth.
#
# Cut every tensor into p slices. Rank r is the **slice owner** of slice r: it reads this slice of all tensors, adds,
# and stores the sum to all tensors.
#
#     tensor of rank 0   | slice 0 | slice 1 |
#     tensor of rank 1   | slice 0 | slice 1 |
#     owner                rank 0    rank 1       reads both, stores to both
#
# So every input is read once, and every output is written once. With p ranks, n bytes each, and a memory of bandwidth
# B, an all-reduce takes at least T = 2 p n / B.
#
# Other ways move more bytes. A tensor outside of shared memory is **staged**: copied into a **staging buffer** of the
# library, added there, and copied back. A ring copies each message, and then reads the copy to add it. Exercise 5.1, in
# the appendix, counts these bytes.
#
# ## Exercise 5.2 ★★ One pass over shared memory <!-- 1 homework 13 -->
#
# Write an all-reduce in which each rank adds its own slice. `comm.allocate` returns a tensor in **registered memory**,
# which every rank can read and write. If x is in registered memory, `comm.views(x)` lists all ranks' tensors in the
# order of ranks, as views. `chunk(view, p, r)` is slice r, as in 04. `comm.barrier()` returns when every rank has
# called it. What must be complete before you read, and what before you return?

# %% exercise="hpdl_lab.collectives.memory:one_pass"

# %% check="hpdl_lab.collectives.memory:one_pass"

# %% [markdown]
# This C++ code does the same. Its function `sum` (not shown) keeps each sum in a **register**, a memory cell inside the
# core.
#
# <!-- csrc/shm.cpp: ShmGroup::add_shared -->
#
# Compare your function with this code (`shm`) and with MPI. The time of `shm` is 1: what is your function's time?

# %%
lab.measure(one_pass, ("64KiB", "1MiB", "8MiB"), ranks=2, against=("shm", "mpi"))

# %% [markdown]
# Your function and `shm` read each input once and write each output once. But in PyTorch every addition also writes its
# partial sum to a new tensor, and the next addition reads this tensor. **Fusing** operations into one loop keeps
# intermediate results in registers.

# %% [markdown]
# ## Measure: a buffer that is written again <!-- 1 homework 5 -->
#
# Staging is slow for two reasons: it moves more bytes, and its writes wait. The library overwrites its staging buffer
# as soon as the other rank has read the buffer.
#
# Writes wait because of **cache coherence**: all cores must see the same value. A cache holds copies of **cache
# lines**, mostly 64 bytes each. Before a core may change a line, all other cores must give up their copies of this
# line. Until then, the write waits.
#
# In the experiment, rank 0 keeps overwriting a buffer, in chunks of 256 KiB. Either rank 1 reads each chunk before
# rank 0 overwrites it, or rank 1 reads nothing. If the buffer has one chunk, how many times as long does a write take
# when rank 1 reads?

# %% guess=[3]
my_factor = lab.guess("times as long to write what the other core has read", ...)

# %% [markdown]
# The picture shows the time to write a chunk in both cases, for short and long buffers. How far apart are the two
# curves at each end?

# %%
again = lab.write_again(prediction=my_factor)
lab.reveal("times as long to write what the other core has read", again.slowdown(2**18))  # the left end
again

# %% [markdown]
# The buffer has one chunk at the left end, and 64 at the right.
#
# | you see | which means |
# |---|---|
# | curves apart on the left | the gap is the price of overwriting a buffer too early |
# | curves meet on the right | rank 1's cache is smaller than the long buffer; use a long buffer |
# | curves apart at both ends | rank 1's cache holds the whole long buffer; read the tensors directly, do not stage |
# | curves together on the left | the two cores probably share a cache; use a short buffer |
#
# The next picture adds dashed curves from another machine. Which machine has the larger cache?

# %%
lab.replay("write_again_amd_epyc_2_cores", over=again)

# %% [markdown]
# # Part two: the GPU
#
# ## Exercise 5.3 ★★★ A CUDA reduction <!-- 2 homework 18 -->
#
# A **kernel** is a function that a GPU runs in tens of thousands of **threads** at once. To **launch** a kernel means
# to start it. Each thread finds its part of the work by its number. By a **shuffle**, a thread reads a register of
# another thread. Threads form groups:
#
# | group | size | its threads share | its threads wait for each other |
# |---|---|---|---|
# | thread | 1 | nothing: its variables are in registers | |
# | **warp** | 32 threads | the instructions, mostly; registers, by shuffles | in a shuffle, in `cuda.syncwarp()` |
# | **block** | `THREADS`, here 128 | memory on the chip: `cuda.shared.array` | in `cuda.syncthreads()`, a barrier |
# | grid | all blocks | the GPU's memory: `x` and `out` | never: blocks run in any order |
#
# A thread's number in its block is `cuda.threadIdx.x`. Its number in the grid, of `cuda.gridsize(1)` threads,
# is `cuda.grid(1)`. Its number in the warp is its **lane**. CUDA calls the memory of a block **shared memory**.
#
# Numba compiles Python functions to kernels. Without a GPU, the lab runs a kernel thread by thread on numba's
# simulator, and counts what would cost time. The next cell shows the counts of four kernels that add 4,096 numbers:
#
# | column | what is counted |
# |---|---|
# | `atomics` | **atomic**: an addition to a number that many threads change; only one thread can add at a time |
# | `sectors` | **sector**: 32 bytes of the GPU's memory, read in one piece; 4,096 numbers of 4 bytes fill 512 sectors |
# | `barriers`, `shared` | barriers in each block; how often warps use shared memory |
# | `conflicts` | additional turns in shared memory; the text after the next cell explains them |
# | `races` | **race**: two threads touch one element, one of them writes, and nothing says which is first |

# %%
lab.show("ladder")

# %% [markdown]
# `naive` adds each number to out[0] by an atomic. `interleaved` and `sequential` first add up each block in shared
# memory, as a tree. Then one atomic for each block is enough. The lab's `gpu_sum` is the fourth.
#
# Shared memory has 32 **banks**, and word i (4 bytes) lies in bank i mod 32. A bank serves one word at a time. If
# threads of a warp want different words of one bank, these threads take turns: a **bank conflict**. `interleaved` has
# such conflicts:

# %% shown="hpdl_lab.kernels.ladder:interleaved"

# %% [markdown]
# Predict: how many turns does the slowest access of `interleaved` to shared memory take?

# %% guess=[2]
my_turns = lab.guess("turns of the slowest access to shared memory", ...)

# %%
lab.show(interleaved, prediction=my_turns)

# %% [markdown]
# Write `gpu_sum`, a kernel without bank conflicts and with fewer barriers. You need three calls:
#
# - `sums = cuda.shared.array(THREADS, np.float32)` is one array for all threads of a block, not yet filled.
# - `cuda.shfl_down_sync(ALL_LANES, value, k)` returns the `value` of the thread k lanes higher. All 32 threads of the
#   warp must call it.
# - `cuda.atomic.add(out, 0, value)` adds to out[0].
#
# Use only numbers, loops and `if`: numba compiles little else for a GPU. With a race the sum may be right a thousand
# times. The check compares what threads touch between two barriers, so it finds the race.

# %% exercise="hpdl_lab.kernels.ladder:gpu_sum"

# %% check="hpdl_lab.kernels.ladder:gpu_sum"

# %%
lab.show("ladder", gpu_sum)

# %% [markdown]
# `csrc/cuda/reduction_kernels.cuh` has eight sums in CUDA. The sixth is closest to yours. Its `sum_of_block` needs one
# barrier. Before the barrier, each warp adds by shuffles; after the barrier, one warp adds the warps' sums.
#
# <!-- csrc/cuda/reduction_kernels.cuh: strided -->
#
# The last two of the eight load more bytes at once, which keeps the GPU's memory busy. With a GPU, `lab.show("ladder")`
# also shows the eight kernels and their times.
#
# One pass (5.2) also works on GPUs that reach each other's memory. Each GPU runs this kernel on its slice:

# %% shown="hpdl_lab.kernels.ladder:add_slices"

# %%
from hpdl_lab.kernels.threads import Launch, counts

tensors = [np.full(1024, rank + 1, np.float32) for rank in range(4)]
costs = [counts(Launch(add_slices, 2, THREADS, tensors, 256 * rank, 256)) for rank in range(4)]
assert all((x == 10).all() for x in tensors)
costs[0]

# %% [markdown]
# Each GPU moves 256 sectors: it reads its slice of 1 KiB from four tensors, and writes the sums to all four. The
# threads need no atomic and no barrier, but the GPUs must wait for each other before and after the kernel.
# `csrc/cuda/one_pass_kernels.cuh` has this kernel in CUDA.

# %% [markdown]
# ## Staging through the host <!-- 2 homework 4 -->
#
# The **host** of a GPU is the computer around it, with a CPU and memory. Network adapters often reach the host's
# memory only. So a vector goes to the GPU of another host in three stages:
#
# 1. copy out: from the GPU to **pinned memory** of its host. The system never moves pinned memory, so copies and
#    adapters can use its address.
# 2. wire: as a message to pinned memory of the other host.
# 3. copy in: from this pinned memory to the other GPU.
#
# Three equal stages, one after the other, take three times as long as the wire alone. The MPI library MVAPICH2-GPU
# (Wang et al. 2011) cut the vector into blocks, so that all stages work at once:
#
#     copy out   block 0  block 1  block 2  block 3
#     wire                block 0  block 1  block 2  block 3
#     copy in                      block 0  block 1  block 2  block 3
#
# Each column takes one block time: k blocks take k + 2 block times.
#
# ## Predict
#
# A vector of n bytes travels in blocks of b bytes. The copy takes n/b + 2 block times, and a block time is α + b/B.
# Derive the best b. How large is it for n = 4 MiB, α = 2 µs and B = 12.5 GB/s?

# %% guess=[65536]
my_block = lab.guess("bytes of the best block", ...)

# %% [markdown]
# ## Exercise 5.4 ★★★ Blocks <!-- 2 homework 16 -->
#
# Copy a vector from GPU to GPU in blocks. `device.copy_out(part, pinned)` and `device.copy_in(pinned, part)` start a
# copy and return a Work, as `comm.isend` and `comm.irecv` do. Until the Work's `wait()` returns, do not change the
# source, and do not use the destination. Without a GPU, the lab emulates copies that take time.

# %% exercise="hpdl_lab.kernels.staging:pipelined_copy"

# %% check="hpdl_lab.kernels.staging:pipelined_copy"

# %% [markdown]
# Run your function with many block sizes, on simulated ranks. Which size is fastest? The dotted line is the formula,
# with a star at its minimum.

# %%
from hpdl_lab.comm.network import Switch

staged = lab.staging(pipelined_copy, network=Switch(alpha=2e-6, beta=1 / 12.5e9), prediction=my_block)
lab.reveal("bytes of the best block", staged.modelled)
staged

# %% [markdown]
# Two terms depend on b: n/b · α is the latency of all blocks, and 2b/B is the time to fill and drain the pipeline. At
# the best size, b = √(n·α·B/2), the two terms are equal. The best size grows only with √n. And if blocks are twice as
# large as the best size, the sum of the two terms is only a quarter larger. So one fixed size is good for many n.
#
# With the sliders, make the copies four times as fast as the wire. Then filling and draining take a quarter of 2b/B, so
# the best block is twice as large. What if the copies are slower than the wire?

# %%
lab.explore("blocks")

# %% [markdown]
# Measure on two emulated hosts (04), with a link of 1 Gbit/s and copies as fast as the link. The run measures α of
# a message and α of a copy. Which α is larger? Where do the points leave the dotted line? (Without emulated hosts,
# the lab measures over shared memory.)

# %% tags=["raises-exception"]
lab.start(2, where="emulated", link="1gbit")

# %%
real = lab.staging(pipelined_copy, prediction=my_block)
real

# %% [markdown]
# Blocks take longer than the formula says. α was measured with messages of 4 bytes, which are sent eagerly (03). The
# send of a block waits for the receive (rendezvous). MPI works on a message only while your program is inside a call of
# MPI. So the lab's `wait()` keeps calling MPI while it waits for a copy: without this, the previous send would stand
# still.
#
# The next picture adds another machine's curves, dashed. Is the best block the same there?

# %%
lab.replay("staging_emulated_amd_epyc_2_cores", over=real)

# %% [markdown]
# After `lab.start(2, device="cuda")`, on engines with GPUs, `lab.staging` measures real copies. Four ways to send from
# a GPU are often confused:
#
# | | what happens | time |
# |---|---|---|
# | blocking | you write `x.cpu()`, send, receive, `x.cuda()`, with any MPI | three stages, one after the other |
# | pipelined | the library stages blocks through its own pinned buffers | about one stage and two block times |
# | **GPUDirect RDMA** | remote direct memory access: the adapter itself reads and writes GPU memory | the wire alone |
# | **CUDA-aware MPI** | `MPI_Send` accepts an address on the GPU; the library chooses a way | depends on the way |
#
# A CUDA-aware library chooses by message size and by machine. If adapter and GPU are attached to different CPUs,
# GPUDirect RDMA may be slower than two copies. Then long vectors are still staged. MVAPICH2-GDR (**GDR**: GPUDirect
# RDMA) has environment variables for this choice:
#
# | variable | default (version 2.3.7, 2022) | what it does |
# |---|---|---|
# | `MV2_USE_CUDA` | 0 | 1: MPI calls accept addresses on the GPU; so a job begins with `MV2_USE_CUDA=1 mpiexec ...` |
# | `MV2_USE_GDR`, earlier `MV2_USE_GPUDIRECT` | 1 | 0: no GPUDirect RDMA, everything is staged |
# | `MV2_GPUDIRECT_LIMIT` | 8,192 bytes | longer messages are staged in blocks |
# | `MV2_CUDA_BLOCK_SIZE` | 262,144 bytes | the block of your exercise 5.4 |
# | `MVP_ENABLE_GPU`, in the successor MVAPICH-Plus (based on MPICH) | 1 | 0: MPI calls accept no addresses on the GPU |
#
# For 4 MiB the formula gives blocks of 228,973 bytes, and the default of 262,144 bytes is 0.2% slower. For which n
# is a fixed block size bad?

# %%
lab.start(4, where="local")

# %% [markdown]
# ## Exercise 5.5 ★★ The stream waits, the host does not <!-- 2 homework 12 -->
#
# A **stream** is a queue of kernels that a GPU runs in order. To launch a kernel, the host adds it to the queue and
# goes on. A host that waits for an all-reduce launches nothing, and the stream runs empty. So Aluminum, the
# communication library of LBANN, made the all-reduce a part of the stream: the call returns at once.
#
# Write such an all-reduce. It must begin after the kernels that produce x, and kernels that are launched later must
# wait for the sum. **Events** do that. `event = first.record_event()` marks the present end of the queue of stream
# `first`. `second.wait_event(event)` makes stream `second` wait until `first` has reached this mark. Both calls return
# at once, as in `torch.cuda`. Without a GPU, the CPU runs the kernels.

# %% exercise="hpdl_lab.kernels.streams:all_reduce_on_stream"

# %% check="hpdl_lab.kernels.streams:all_reduce_on_stream"

# %% [markdown]
# Run a step on four engines. One stream runs two kernels of 20 ms with your all-reduce between them, and another stream
# runs a third kernel. When is the host done, and when are the streams done?

# %%
from hpdl_lab.kernels import streams

steps = lab.run(streams.step, torch.ones(2**18), all_reduce_on_stream)
print(f"launched after {1e3 * steps[0].launched:.1f} ms, done after {1e3 * steps[0].done:.1f} ms")

# %%
lab.show([event for event in steps.events if event.rank == 0 and event.op in streams.SHOWN])

# %% [markdown]
# The host launches everything at the beginning, and only the streams wait. PyTorch with NCCL does the same.
# `dist.all_reduce(x, async_op=True)` records an event in your current stream, makes a stream of NCCL wait for this
# event, and launches the all-reduce on NCCL's stream. Then `work.wait()` makes your *current* stream wait, not the
# host. Until you call `wait()`, the Work keeps x alive, so that no other tensor gets x's memory. Gloo has no stream,
# and `wait()` blocks the host.

# %% [markdown]
# ## Take it home <!-- 2 homework 5 -->
#
# The first file is exercise 5.4 in mpi4py. Without a GPU, the vector is a tensor on the host. With `direct` at the end
# of the command, mpi4py sends the whole vector. On a GPU, `direct` needs a CUDA-aware MPI.

# %% tags=["take-home"]
# %%writefile take_home_05_blocks.py
"""A vector from GPU to GPU in blocks: mpiexec -n 2 python take_home_05_blocks.py BYTES_OF_A_BLOCK [direct]"""

import sys

import torch
from mpi4py import MPI

comm, block, cuda = MPI.COMM_WORLD, int(sys.argv[1]) // 4, torch.cuda.is_available()
rank, expected = comm.Get_rank(), torch.arange(2**20, dtype=torch.float32, device="cuda" if cuda else "cpu")
x = expected * (rank == 0)
pieces = x.split(block)
pinned = [torch.empty(block, pin_memory=cuda).numpy() for _ in range(2)]
buffers = [pinned[k % 2][: len(piece)] for k, piece in enumerate(pieces)]
if sys.argv[2:] == ["direct"]:
    comm.Send(x, dest=1) if rank == 0 else comm.Recv(x, source=0)
elif rank == 0:
    sends = []
    for k, piece in enumerate(pieces):
        MPI.Request.Waitall(sends[k - 2 : k - 1])  # from the buffer that is filled now
        torch.from_numpy(buffers[k]).copy_(piece)
        sends.append(comm.Isend(buffers[k], dest=1))
    MPI.Request.Waitall(sends)
else:
    receives = [comm.Irecv(buffer, source=0) for buffer in buffers[:2]]
    for k, piece in enumerate(pieces):
        receives[k].Wait()
        piece.copy_(torch.from_numpy(buffers[k]))
        receives += [comm.Irecv(buffer, source=0) for buffer in buffers[k + 2 : k + 3]]
    print("blocks:", len(receives))
assert torch.equal(x, expected)

# %% tags=["take-home"]
# out = !mpiexec -n 2 python take_home_05_blocks.py {real.best}
print(out.n)

# %% tags=["take-home"]
assert int(out.grep("blocks:")[0].split()[-1]) == -(-real.nbytes // real.best)

# %% [markdown]
# The second file adds tensors on GPUs by one line, `comm.Allreduce(MPI.IN_PLACE, x)`. The library mpi4py asks x for its
# address, by the interfaces DLPack (torch) or `__cuda_array_interface__` (CuPy, numba). A plain MPI would take a GPU's
# address for an address on the host, and crash. So without `direct`, x is a tensor on the host. With a CUDA-aware MPI,
# add `direct` to the command: x is then on the GPU.

# %% tags=["take-home"]
# %%writefile take_home_05_gpu.py
"""Add tensors of GPUs by a CUDA-aware MPI: MV2_USE_CUDA=1 mpiexec -n 2 python take_home_05_gpu.py [direct]"""

import sys

import torch
from mpi4py import MPI


class StandIn:
    """A tensor of the host that plays one of a GPU: it says where it lies by DLPack, and nothing else."""

    def __init__(self, tensor):
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__


comm, direct = MPI.COMM_WORLD, sys.argv[1:] == ["direct"]
device = f"cuda:{comm.rank % torch.cuda.device_count()}" if direct else "cpu"
tensor = torch.full((2**20,), comm.rank + 1.0, device=device)
x = tensor if direct else StandIn(tensor)
if direct:
    torch.cuda.synchronize()  # MPI knows no streams: x has to be ready before
comm.Allreduce(MPI.IN_PLACE, x)
assert (tensor == comm.size * (comm.size + 1) / 2).all()
print(f"rank {comm.rank}: sum {tensor[0].item():.0f} on {device}\n", end="")

# %% tags=["take-home"]
# out = !mpiexec -n 2 python take_home_05_gpu.py
print(out.n)

# %% tags=["take-home"]
assert [line.split()[3] for line in out.grep("sum")] == ["3", "3"]

# %% [markdown]
# The third file is exercise 5.5 in PyTorch. With a GPU for each rank, it uses a CUDA stream.

# %% tags=["take-home"]
# %%writefile take_home_05_stream.py
"""An all-reduce for which a stream waits: torchrun --standalone --nproc-per-node 4 take_home_05_stream.py"""

import contextlib
import os
import time

import torch
import torch.distributed as dist

cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if cuda else "gloo")
stream = torch.cuda.Stream() if cuda else None
with torch.cuda.stream(stream) if cuda else contextlib.nullcontext():
    x = torch.ones(2**18, device="cuda" if cuda else "cpu") * (dist.get_rank() + 1)
    began = time.perf_counter()
    work = dist.all_reduce(x, async_op=True)  # NCCL's stream waits for an event of this one
    returned = time.perf_counter() - began
    work.wait()  # this stream waits for an event of NCCL's, and the host goes on; of gloo the host waits
    waited = time.perf_counter() - began
    x /= dist.get_world_size()
    mean = float(x[-1])  # in this stream; for a number that it prints, the host has to wait
if dist.get_rank() == 0:
    print(f"returned after {1e6 * returned:.0f} us, waited until {1e6 * waited:.0f} us; mean: {mean}")
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 take_home_05_stream.py
print(out.n)

# %% tags=["take-home"]
assert float(out.grep("mean:")[0].split()[-1]) == float(steps[0].x[-1])

# %% [markdown]
# ## Question to discuss
#
# No all-reduce moves fewer bytes than one pass over shared memory. Why do libraries stage nevertheless? What must
# change in PyTorch, so that libraries need no staging?
#
# ## Where to read the real code
#
# - `hpdl_lab/collectives/memory.py`: 5.1 and 5.2, and an all-reduce that is staged.
# - `csrc/shm.cpp`: the slice owner's loop, and staging by `rep movsb`, an instruction that copies many cache lines.
# - `csrc/reduce.cpp`: the sum of many vectors.
# - `hpdl_lab/kernels/ladder.py`: your kernel; `hpdl_lab/kernels/threads.py` counts its accesses.
# - `hpdl_lab/kernels/staging.py`: your blocks, and emulated copies; `hpdl_lab/kernels/streams.py`: a stream.
# - Wang et al. 2011 (MVAPICH2-GPU), doi:10.1007/s00450-011-0171-3; Potluri et al. 2013 (GPUDirect RDMA in MVAPICH2),
#   ICPP; the demos of mpi4py for CuPy and numba: `demo/cuda-aware-mpi`.

# %% [markdown]
# # Appendix: bytes on the memory bus
#
# ## Predict
#
# Two ranks all-reduce tensors of 16 MiB, and one pass is the fastest. A staged all-reduce copies both tensors into
# shared memory, adds there, and copies the results back. The time of one pass is 1: what are the times of this
# all-reduce and of the ring of 04?

# %% guess=[2.5, 3]
my_times = lab.guess("times as long as one pass", {"staged": ..., "ring": ...})

# %% [markdown]
# ## Exercise 5.1 ★ Count bytes <!-- 3 homework 8 -->
#
# Count the bytes that one rank reads and writes in each of four all-reduces. The check counts on simulated ranks.

# %% exercise="hpdl_lab.collectives.memory:bytes_moved"

# %% check="hpdl_lab.collectives.memory:bytes_moved"

# %% [markdown]
# ## Measure: the memory's roof <!-- 3 homework 5 -->
#
# An all-reduce makes one addition for each number that it loads, so it is **bandwidth bound**: only as fast as the
# memory. The highest bandwidth of any program is the memory's **roof**. The lab measures the roof as McCalpin's STREAM
# does: all ranks load and store long vectors at once.
#
# Short vectors stay in the caches, so each size has a roof of its own. The left panel has three gray curves: `copy` is
# b = a, `add` is c = a + b, and `in place` stores a sum to the vectors that it has added. Most processors *read* a line
# before they store to it. `in place` stores to lines that it has already read, as one pass does. So `in place` is the
# fastest.
#
# In the right panel, x is the bytes that you counted, and y is the measured time. The line is the least time for these
# bytes. How far above the line is each all-reduce?

# %%
roof = lab.roofline(bytes_moved, prediction=my_times)
took = {row["name"]: row["time_us"] for row in roof.rows if row["size"] == 2**24}
lab.reveal("times as long as one pass", {way: took[way] / took["one pass"] for way in my_times})
roof

# %% [markdown]
# No point can lie below the line. One pass comes closest. The other all-reduces move 1.75 to 2.75 times as many bytes,
# but take even longer. They overwrite buffers that other cores have just read (part one). The ring has two points,
# because some MPIs copy a message once, and others twice.
#
# All ranks share the memory, so one pass takes longer with more ranks. In a ring over links, each rank has its own
# link, and the time hardly grows. From how many ranks on is this ring faster than one pass?

# %%
lab.explore("bytes")

# %% [markdown]
# ## Recap
#
# 1. The bytes that are loaded and stored limit an all-reduce over shared memory.
# 2. No all-reduce moves fewer bytes than one read of each input and one write of each output.
# 3. If another core has just read a short buffer, overwriting this buffer takes longer.
# 4. On a GPU, too, bytes decide: a good sum reads its input at almost the full bandwidth of the memory.
# 5. If you cannot avoid a copy, cut it into blocks, so that all stages work at once. Let a stream wait, not the host.
#
# <!-- terms -->
#
# **What you can do now:** write a sum for a GPU without races. Copy blocks while others travel. Put an all-reduce into
# a stream. Count bytes, and say how fast an algorithm can be.
#
# <!-- links -->
