# %% [markdown]
# # 05 · Kernels: from the memory bus to the stream
#
# **The number to reach:** 2. Each byte of a tensor is read once and written once, and no all-reduce moves fewer. Yours
# will not move more.
#
# <!-- tracks -->
#
# Part one: the memory bus. You count what each way to all-reduce reads and writes, measure it, and write the one that
# moves the least. Part two: the GPU. A sum on it, a tensor on its way out of it and back, and an all-reduce that the
# host does not wait for.

# %%
import torch

from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# # Part one: the memory bus
#
# ## The idea <!-- 1 full day 4 -->
#
# In 04 shared memory won the race against every algorithm that sends messages, and it sent none. It is not free: cores
# load from memory and store to it, and the memory bus that they share has a bandwidth, too. So count what each byte of
# a tensor has to do. In the best case rank r reads **one slice** of every rank's tensor, adds, and stores the sum of
# that slice to every rank's tensor:
#
#     tensor of rank 0   | slice 0 | slice 1 |
#     tensor of rank 1   | slice 0 | slice 1 |
#     owner                rank 0    rank 1       reads both, stores to both
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
# ## Exercise 5.1 ★ Count bytes <!-- 1 full day 8 -->
#
# Take a pencil: one rank, n bytes, and every arrow from memory to the core and back. The check knows no formula: it
# runs each algorithm on simulated ranks and counts what every operation reads and writes.

# %% exercise="hpdl_lab.collectives.memory:bytes_moved"

# %% check="hpdl_lab.collectives.memory:bytes_moved"

# %% [markdown]
# ## Measure: the memory's roof <!-- 1 full day 5 -->
#
# The memory's **bandwidth** bounds how fast an all-reduce can be: it adds once for each number that it loads. (14 adds
# the second roof, the peak in FLOP/s: a **roofline**.) The bandwidth is measured as McCalpin's STREAM does: long
# vectors, nothing but loads and stores, all ranks at once. There is a roof for each size, because short vectors stay in
# the caches. `copy` and `add` are STREAM's own, and store to lines that no cache has yet: most processors **read these
# first**. `in place` stores where it has just read, as one pass does, and is the best that this memory can do.

# %%
roof = lab.roofline(bytes_moved, prediction=my_times)
took = {row["name"]: row["time_us"] for row in roof.rows if row["size"] == 2**24}
lab.reveal("times as long as one pass", {way: took[way] / took["one pass"] for way in my_times})
roof

# %% [markdown]
# On the right each all-reduce stands above the bytes that you counted for it. Nothing can be below the line, and the
# bytes do **not** explain how far above it something stands. One pass comes closest; on short tensors it mostly waits
# in its barriers. The others move 1.75 to 2.75 times as many bytes: how many times as long do they take? Something else
# costs time there, and the last measurement of part one finds out what.
#
# Which ring is this MPI's, that with one copy of each message or that with two?
#
# The memory belongs to all ranks, so the time of one pass grows with their number. A ring over links that each rank has
# for itself takes hardly longer on more ranks. From how many ranks on is it faster?

# %%
lab.explore("bytes")

# %% [markdown]
# ## Exercise 5.2 ★★ One pass over shared memory <!-- 1 homework 13 -->
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
# Both load and store each element of the tensors once. What else does yours move? Its `total` is memory, too, and a new
# one for every addition: it is written, read again, and given back. In C++ the sum never leaves the registers. So the
# bytes of *all* operands count, and fusing operations, as a compiler or a hand-written kernel does, saves more than any
# faster addition would.

# %% [markdown]
# ## Measure: a buffer that is written again <!-- 1 homework 5 -->
#
# Staging is slow, and its bytes alone do not say why. A library stages through a small buffer, so that it stays in the
# cache, and writes it again as soon as the other rank has read it. A cache line that a core has read is in **its**
# cache now. Before another core may change that line, the first one has to give it up (cache coherence: MESI and its
# relatives), and a store waits for the answer.
#
# The experiment: rank 0 writes 256 KiB of a shared buffer, then rank 1 reads them, or does not. Then rank 0 writes the
# next 256 KiB, and at the end of the buffer it begins again. Two states of the same lines: nobody else has read them
# since, or the other core has. How many times as long does a store take to lines that were read?

# %% guess=[3]
my_factor = lab.guess("times as long to write what the other core has read", ...)

# %%
again = lab.write_again(prediction=my_factor)
lab.reveal("times as long to write what the other core has read", again.slowdown(2**18))  # the left end
again

# %% [markdown]
# At the left end the buffer is one chunk, and each line is written again at once. At the right end 64 chunks take
# turns. Look for two things. How far are the curves apart? That is the price of using a buffer again too early. And do
# they meet to the right? They do if the other core has dropped the lines meanwhile, because its cache is smaller than
# the buffer; then a longer ring of buffers is a cure. If they stay apart, its cache holds the whole buffer, and no ring
# helps. Then the cure is to read a tensor where it lies, or a store that asks for many lines at once: on processors
# that have a fast one, `csrc/shm.cpp` stages with the instruction `rep movsb`. And if what the
# other core has read costs no more at the left, the two cores probably have a cache in common, and a small buffer is
# the better one.
#
# On a virtual machine run the cell again after some minutes. The host decides whether your two cores have a cache in
# common, and may change its mind.
#
# Dashed over your curves: another machine. Do its curves meet where yours do, and whose cache is larger?

# %%
lab.replay("write_again_amd_epyc_2_cores", over=again)

# %% [markdown]
# # Part two: the GPU
#
# ## Exercise 5.3 ★★★ A CUDA reduction <!-- 2 homework 18 -->
#
# All adding so far was done by cores. A GPU adds with tens of thousands of **threads**, and a **kernel** is the
# function that each of them executes. Threads are numbered, and each finds its part of the work by its number:
#
# | who | how many | what they share | how they wait for each other |
# |---|---|---|---|
# | thread `cuda.threadIdx.x` | 1 | nothing: its variables are registers | |
# | warp | 32 | instructions, mostly taken in step; registers, by shuffles | in each shuffle, in `cuda.syncwarp()` |
# | block | `THREADS`, here 128 | what `cuda.shared.array` makes, on the chip | `cuda.syncthreads()` |
# | grid | all blocks | the GPU's memory: `x` and `out` | not in an ordinary launch: blocks come in any order |
#
# `cuda.grid(1)` is the number of a thread among all `cuda.gridsize(1)` of them. Numba compiles such a function for a
# GPU. Without one the same function runs here thread by thread, on numba's simulator. The lab adds the shuffles that
# the simulator lacks, and notes every access to memory, so what a GPU would lose time on is counted.

# %%
lab.show("ladder")

# %% [markdown]
# Four kernels, one sum. `naive` adds every element to out[0], by an **atomic**: an addition to a word that others want
# at the same time, so they come one after the other. The two below it first add up each block in shared memory, as a
# tree. `gpu_sum` is what you will write. **sectors**: pieces of 32 bytes that come from memory; 512 are 16 KiB, which
# is x, once. **barriers**: in each block. **shared**: accesses of a warp to shared memory, and **conflicts**: turns
# that these took beyond one each.
#
# Shared memory has 32 **banks**, and word i lies in bank i mod 32. Each bank serves one word at a time: a warp that
# wants two words of one bank takes two turns. Here is the second kernel of the ladder.

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
# threads; all of them have to call it. `cuda.atomic.add(out, 0, value)` adds to out[0]. Keep to numbers, loops and
# `if`: for a GPU numba compiles little else.
#
# A race may give the right sum a thousand times. The check finds it nevertheless: it looks at who touches what between
# two barriers, not at who came first.

# %% exercise="hpdl_lab.kernels.ladder:gpu_sum"

# %% check="hpdl_lab.kernels.ladder:gpu_sum"

# %%
lab.show("ladder", gpu_sum)

# %% [markdown]
# The same ladder in CUDA is `csrc/cuda/reduction_kernels.cuh`. Its sixth rung is closest to yours: `sum_of_block` adds
# up each warp by shuffles, and the sums of the warps by shuffles again, so that one barrier is enough.
#
# <!-- csrc/cuda/reduction_kernels.cuh: strided -->
#
# Two rungs are above it: loads of 16 bytes, and four of them at once. They keep the GPU's memory busy, which is what a
# sum waits for in the end. Where a GPU is, the table has two more columns, microseconds and GB/s, and the rungs in CUDA
# below yours.
#
# One kernel more is 5.2 again. GPUs that can reach each other's memory need no messages: each takes its slice, of
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
# ## Staging through the host <!-- 2 homework 4 -->
#
# A network adapter reads the host's memory. A vector in GPU memory therefore goes three ways: to **pinned** memory of
# its host, which the system does not move, so that a copy can reach it; over the wire; and from the other host's
# pinned memory to the other GPU. One after the other, that is three times as long as the wire. In 2011 MVAPICH2-GPU, an
# MPI library (Wang et al. 2011), cut the vector into blocks and let all three stages work at once:
#
#     copy out   block 0  block 1  block 2  block 3
#     wire                block 0  block 1  block 2  block 3
#     copy in                      block 0  block 1  block 2  block 3
#
# k blocks take k + 2 block times.
#
# ## Predict
#
# A vector of n bytes in blocks of b: n/b + 2 block times, and each block costs α + b/B in every stage. Derive the best
# b. How large is it for 4 MiB, α = 2 µs and B = 12.5 GB/s?

# %% guess=[65536]
my_block = lab.guess("bytes of the best block", ...)

# %% [markdown]
# ## Exercise 5.4 ★★★ Blocks <!-- 2 homework 16 -->
#
# `device.copy_out(part, pinned)` and `device.copy_in(pinned, part)` start a copy and return a Work, as `comm.isend`
# and `comm.irecv` do. Until its `wait()` returns, neither end of a copy or message is yours. No GPU is needed: on
# simulated ranks a copy takes virtual time, on engines a thread is slow on purpose.

# %% exercise="hpdl_lab.kernels.staging:pipelined_copy"

# %% check="hpdl_lab.kernels.staging:pipelined_copy"

# %% [markdown]
# Your function for many sizes of a block, first in virtual time. Dotted is the formula, the star its least.

# %%
from hpdl_lab.comm.network import Switch

staged = lab.staging(pipelined_copy, network=Switch(alpha=2e-6, beta=1 / 12.5e9), prediction=my_block)
lab.reveal("bytes of the best block", staged.modelled)
staged

# %% [markdown]
# n/b · α + 2b/B is what depends on b; the derivative is 0 at b = √(n·α·B/2). There the α of all blocks together is as
# long as filling and draining the pipeline. Blocks twice as large add a quarter to what is lost, which is little: one
# fixed block serves many n.
#
# That was for three stages that are equally fast. Let the copies be four times as fast: the wire never waits, only the
# first copy out and the last copy in are seen, and B in the formula is the bandwidth of **the copies**, so the best
# block is twice as large. And where they are slower than the wire?

# %%
lab.explore("blocks")

# %% [markdown]
# Now copies in real time, over a link of 1 Gbit/s between two emulated hosts, each copy as fast as the link. α is
# measured in the same run. Which of your two αs is larger, the wire's or the copy's? If a machine cannot emulate
# hosts, it says so, and the picture is that of shared memory.

# %% tags=["raises-exception"]
lab.start(2, where="emulated", link="1gbit")

# %%
real = lab.staging(pipelined_copy, prediction=my_block)
real

# %% [markdown]
# Where do points leave the line? α is that of a message of 4 bytes, and a block goes by the rendezvous protocol of 03.
# There is one more wait that the model does not know: MPI advances a message only while somebody calls MPI. If rank 0
# did nothing but wait for its copy, the send before it would stand still, and nothing would overlap. So a library polls
# copies and messages in one loop, and `wait()` does that here.
#
# Dashed: such a link as another machine played it, with the library's copies. Where is its best block, and where yours?

# %%
lab.replay("staging_emulated_amd_epyc_2_cores", over=real)

# %% [markdown]
# On engines with GPUs, `lab.start(2, device="cuda")`, the same call measures real copies: two CUDA streams and
# pinned memory. Four ways that are often taken for one:
#
# | | what happens | time |
# |---|---|---|
# | blocking | `x.cpu()`, send, receive, `x.cuda()`: what a user of a plain MPI writes | three stages in a row |
# | pipelined | the library stages blocks through its own pinned buffers | about one stage, and two blocks |
# | GPUDirect RDMA | the adapter reads and writes GPU memory over PCIe; nothing is staged | the wire alone |
# | CUDA-aware MPI | an interface: `MPI_Send` takes an address on the GPU, and the library chooses | of what it chose |
#
# It chooses by size and by what the machine can: an adapter that reads a GPU behind another socket may be slower than
# two copies, and then long vectors are still staged in blocks.
#
# In MVAPICH2-GDR (**GDR**: GPUDirect RDMA), environment variables control the choice:
#
# | variable | default | what it does |
# |---|---|---|
# | `MV2_USE_CUDA` | 0 | 1: MPI calls take addresses on the GPU |
# | `MV2_USE_GDR`, earlier `MV2_USE_GPUDIRECT` | 1 | 0: no GPUDirect RDMA, everything is staged |
# | `MV2_GPUDIRECT_LIMIT` | 8,192 bytes | longer messages are staged in blocks |
# | `MV2_CUDA_BLOCK_SIZE` | 262,144 bytes | the block of your exercise 5.4 |
#
# (User guide of version 2.3.7; 2022.) So a job begins with `MV2_USE_CUDA=1 mpiexec ...`. Its successor, MVAPICH-Plus,
# is made from MPICH, and takes such addresses unless `MVP_ENABLE_GPU=0` is set. Compare the default block with your
# guess: for 4 MiB the formula gives 228,973 bytes, and 262,144 are 0.2% slower. For which n is one fixed block bad?

# %%
lab.start(4, where="local")

# %% [markdown]
# ## Exercise 5.5 ★★ The stream waits, the host does not <!-- 2 homework 12 -->
#
# A GPU works through a **stream**: the host launches kernels and goes on, the stream does them in order. An all-reduce
# that makes the host wait leaves the stream empty after every call. Aluminum, the library below LBANN, made it a part
# of the stream instead: the call returns at once, and the stream waits. Two orders have to hold, and no other: the
# all-reduce begins behind what produces x, and what is launched later begins behind the all-reduce.
#
# Two streams keep them with **events**. `event = a.record_event()` is a place in stream a; `b.wait_event(event)` lets
# stream b wait for it. Both return at once, as in `torch.cuda`. Here a stream is a queue with a thread, or with a
# clock of its own on simulated ranks.

# %% exercise="hpdl_lab.kernels.streams:all_reduce_on_stream"

# %% check="hpdl_lab.kernels.streams:all_reduce_on_stream"

# %% [markdown]
# A step on four engines: two kernels of 20 ms with your all-reduce between them, and a third on another stream.

# %%
from hpdl_lab.kernels import streams

steps = lab.run(streams.step, torch.ones(2**18), all_reduce_on_stream)
print(f"launched after {1e3 * steps[0].launched:.1f} ms, done after {1e3 * steps[0].done:.1f} ms")

# %%
lab.show([event for event in steps.events if event.rank == 0 and event.op in streams.SHOWN])

# %% [markdown]
# This is what PyTorch does for you. `dist.all_reduce(x)` runs on your current stream. With `async_op=True` the process
# group of NCCL records an event there, lets a stream of its own wait for it, and launches NCCL's kernel on that one;
# `work.wait()` makes your **current stream** wait, not the host. DDP's reducer does it for every bucket while backward
# goes on, and waits for all of them at the end of backward. It also does what your function need not: if x were freed
# before its all-reduce is done, another tensor might get its memory, so the Work holds on to x until its
# `wait()`. On gloo there is no stream, and `wait()` blocks the host.

# %% [markdown]
# ## Take it home <!-- 2 homework 5 -->
#
# Three files. The first is your pipeline in mpi4py; `copy_` is the copy engine. Without a GPU a tensor of the host
# plays one. With `direct` behind the number mpi4py sends the tensor itself, whose address it learns by DLPack; for a
# tensor on a GPU that needs a CUDA-aware MPI.

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
# The second is one line: `comm.Allreduce(MPI.IN_PLACE, x)` for an x on the GPU. mpi4py asks x for its address, by
# DLPack (torch) or by `__cuda_array_interface__` (CuPy, numba), and hands it to MPI. A plain MPI would take it for an
# address of the host, and crash. Here a stand-in plays the GPU's tensor: it tells its address, and nothing else. With
# `direct` behind the name of the file, and a CUDA-aware MPI, the tensor is on the GPU.

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
# The third is your stream in PyTorch. Where each rank has a GPU it is one of CUDA, and the host goes on.

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
# One pass over shared memory moves 2 bytes for each byte of a tensor, and no algorithm moves fewer. Why do libraries
# stage through buffers of their own nevertheless? What would PyTorch have to do so that they need not?
#
# ## Where to read the real code
#
# - `hpdl_lab/collectives/memory.py`: your two functions, and an all-reduce that is staged.
# - `csrc/shm.cpp`: the slice owner's loop, and the staging for tensors that are elsewhere.
# - `csrc/reduce.cpp`: the sum of many vectors in one pass.
# - `hpdl_lab/kernels/ladder.py`: your kernel; `hpdl_lab/kernels/threads.py`: who counts what it does.
# - `hpdl_lab/kernels/staging.py`: your blocks, the formula, and the copy engines of a GPU that is not there.
# - `hpdl_lab/kernels/streams.py`: a stream, of twenty lines.
# - Wang et al. 2011 (MVAPICH2-GPU), doi:10.1007/s00450-011-0171-3; Potluri et al. 2013 (GPUDirect RDMA in MVAPICH2),
#   ICPP; the demos of mpi4py for CuPy and numba: `demo/cuda-aware-mpi`.

# %% [markdown]
# ## Recap
#
# 1. An all-reduce over shared memory is bound by the bytes that it loads and stores.
# 2. No algorithm moves fewer than one read of each input and one write of each output.
# 3. A store to a line that another core has read waits for that core: a small buffer, used again, is not free.
# 4. On a GPU too, the bytes decide: a reduction is as good as the share of the bandwidth that it reaches.
# 5. Where a copy cannot be avoided, it is cut into blocks and hidden behind another one; where a wait cannot be
#    avoided, a stream waits, and not the host.
#
# | term | what it means |
# |---|---|
# | slice owner | the rank that adds one slice of all tensors |
# | staging buffer | memory of the library's own, through which a tensor is copied |
# | registered memory | what all ranks have mapped before, so that nothing is copied |
# | memory's roof, bandwidth bound | the least time: bytes over the bandwidth of the memory |
# | cache coherence | that all cores see one value; a store takes the line away from the others first |
# | warp, block | 32 threads, mostly in step; up to 32 warps that share memory on the chip and barriers |
# | bank conflict | threads of a warp want different words of one bank of shared memory, and get them in turns |
# | race | two threads touch an element, one of them writes, and nothing says who comes first |
# | pinned memory | memory of the host that is never moved: asynchronous copies and adapters reach it |
# | GPUDirect RDMA, GDR | the network adapter reads and writes GPU memory itself |
# | CUDA-aware MPI | an MPI whose calls take addresses of GPU memory |
# | stream, event | a queue of work of a GPU; a place in it for which another stream can wait |
#
# **What you can do now:** count the bytes of an algorithm, and say how fast it can be at best; write a sum for a GPU
# without races; hide copies behind messages, and an all-reduce behind a stream.
#
# <!-- links -->
