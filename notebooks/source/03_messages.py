# %% [markdown]
# # 03 · Messages
#
# **The number to reach:** a size in bytes. Every message takes a fixed time, and a time for its bytes. At which size
# are both times equal?
#
# <!-- tracks -->

# %%
from hpdl_lab import lab, zoo

lab.start(4)

# %% [markdown]
# # Part one: messages and collectives
#
# ## The idea <!-- 1 half day 5 -->
#
# Ranks share no memory. Data moves in a **message**: one rank calls `comm.send(x, dst)`, and rank `dst` calls
# `comm.recv(into, src)`. Both calls must agree on the number of elements and on their type.
#
#     rank 0                     rank 1
#     comm.send(x, 1)   ──x──>   comm.recv(y, 0)        y now holds what x held
#
# `send` may wait until the other rank calls `recv`, so never rely on a `send` that returns earlier. A message takes
#
#     time = α + β · bytes       α: s per message       β: s per byte
#
# The **latency** α is the time of an empty message. The **bandwidth** 1/β is the rate of a long message, in bytes per
# second.
#
# ## Predict
#
# How many microseconds does a message of 8 bytes take between two ranks on this machine? And a message of 1 MiB?

# %% guess=[10, 1000]
my_times = lab.guess("microseconds of a message", {"8": ..., "1MiB": ...})

# %% [markdown]
# ## Exercise 3.1 ★ Ping-pong <!-- 1 full day 8 -->
#
# Write one round of ping-pong: from rank 0 to rank 1, and back. The clocks of two ranks never agree. So the lab
# measures the round on rank 0, and halves its time.

# %% exercise="hpdl_lab.parallel.messages:ping_pong"

# %% check="hpdl_lab.parallel.messages:ping_pong"

# %% [markdown]
# ## Measure <!-- 1 half day 3 -->
#
# Did you leave out 3.1? `lab.catch_up("3.1")` in a new cell defines `ping_pong`.
#
# In the plot, look for a flat part on the left, where α decides, and a rising part on the
# right, where β decides.

# %%
link = lab.ping_pong(ping_pong, prediction=my_times)
times = {"8": link.seconds[0], "1MiB": link.alpha + link.beta * 2**20}  # the second one by the fitted line
lab.reveal("microseconds of a message", {size: 1e6 * seconds for size, seconds in times.items()})
link

# %% [markdown]
# ## Exercise 3.2 ★ Fit α and β <!-- 1 full day 10 -->
#
# Fit the line α + β · bytes to the measured times. Long times have large errors, so make the *relative* errors small:
# otherwise long messages outweigh short ones.

# %% exercise="hpdl_lab.collectives.cost:fit_alpha_beta"

# %% check="hpdl_lab.collectives.cost:fit_alpha_beta"

# %%
from hpdl_lab.plots.measure import alpha_beta_text

alpha, beta = fit_alpha_beta(link.nbytes, link.seconds)
print(alpha_beta_text(alpha, beta))

# %% [markdown]
# In the next plot, fit by hand: move the sliders until the curve lies on the blue points, your measurements. Which
# slider moves the left part of the curve, and which slider the right part? Then make the bandwidth ten times as large.
# Above which size does the larger bandwidth help?

# %%
lab.explore("message", prediction=my_times)

# %% [markdown]
# A larger bandwidth helps above **n½** = α/β bytes, the size at which half of the time is latency. Below n½ the number
# of messages counts: ten messages of 100 bytes cost ten times as much as one message of 1,000.
#
# ## Eight patterns <!-- 1 half day 5 -->
#
# A message is **point-to-point**: it has one sender and one receiver. In eight common patterns, the **collectives**,
# all ranks take part. Some collectives begin or end on one rank, the **root**: here rank 0.
#
# In the picture, each column is a rank. Each arrow leads from the data before the call to the data after it.

# %%
lab.show("collectives", ranks=4)

# %% [markdown]
# ## Exercise 3.3 ★ Which collective is it? <!-- 1 half day 6 -->
#
# Name the collective for each of eight jobs in a training program. Ask three questions: who has the data, who needs it,
# and is anything added?

# %% exercise="hpdl_lab.collectives.jobs:which_collective"

# %% check="hpdl_lab.collectives.jobs:which_collective"

# %% [markdown]
# ## The same in MPI, PyTorch and NCCL <!-- 1 half day 2 -->
#
# `comm` of mpi4py is an `MPI.Comm`, and `dist` is `torch.distributed`:
#
# | here | mpi4py | torch.distributed | NCCL |
# |---|---|---|---|
# | `comm.rank` | `comm.Get_rank()` | `dist.get_rank()` | `ncclCommUserRank` |
# | `comm.size` | `comm.Get_size()` | `dist.get_world_size()` | `ncclCommCount` |
# | `comm.send(x, dst)` | `comm.Send(x, dest)` | `dist.send(x, dst)` | `ncclSend` |
# | `comm.recv(y, src)` | `comm.Recv(y, source)` | `dist.recv(y, src)` | `ncclRecv` |
# | `comm.isend(x, dst)` | `comm.Isend(x, dest)` | `dist.isend(x, dst)` | `ncclSend` |
# | `comm.irecv(y, src)` | `comm.Irecv(y, source)` | `dist.irecv(y, src)` | `ncclRecv` |
# | `comm.sendrecv(x, dst, y, src)` | `comm.Sendrecv(x, dest, 0, y)` | `dist.batch_isend_irecv(ops)` | in a group |
# | `comm.barrier()`: all ranks wait for each other | `comm.Barrier()` | `dist.barrier()` | - |
# | `comm.broadcast(x)` | `comm.Bcast(x)` | `dist.broadcast(x, 0)` | `ncclBroadcast` |
# | `comm.scatter(xs, y)` | `comm.Scatter(xs, y)` | `dist.scatter(y, xs)` | `ncclScatter`, from 2.28 |
# | `comm.gather(x)` | `comm.Gather(x, ys)` | `dist.gather(x, ys)` | `ncclGather`, from 2.28 |
# | `comm.reduce(x)` | `comm.Reduce(x, y)` | `dist.reduce(x, 0)` | `ncclReduce` |
# | `comm.all_reduce(x)` | `comm.Allreduce(MPI.IN_PLACE, x)` | `dist.all_reduce(x)` | `ncclAllReduce` |
# | `comm.reduce_scatter(x)` | `comm.Reduce_scatter(x, y)` | `dist.reduce_scatter_tensor(y, x)` | `ncclReduceScatter` |
# | `comm.all_gather(x)` | `comm.Allgather(x, y)` | `dist.all_gather_into_tensor(y, x)` | `ncclAllGather` |
# | `comm.all_to_all(x)` | `comm.Alltoall(x, y)` | `dist.all_to_all_single(y, x)` | `ncclAlltoAll`, from 2.28 |
# | `comm.split(color)` | `comm.Split(color)` | `dist.new_group(ranks)` | `ncclCommSplit` |
#
# After `comm.split(color)`, ranks that passed the same value form a new communicator. "In a group" means between
# `ncclGroupStart` and `ncclGroupEnd`. `sendrecv` sends and receives at the same time. The calls return at different
# times:
#
# | calls | when they return |
# |---|---|
# | **blocking**: `send`, `recv` | when you may use the memory of the message again |
# | **non-blocking**: `isend`, `irecv` | at once, with a **Work** object (MPI: request); use the memory after `wait()` |
# | NCCL | at once: the message waits in a CUDA stream, a queue of the GPU |
#
# A short message follows the **eager protocol**: the message leaves at once, and the receiver's library stores it. So
# `send` can return before `recv` is called. A long message follows the **rendezvous protocol**: `send` waits until the
# receiver has called `recv`, and then the message leaves.

# %% [markdown]
# # Part two: the deadlock zoo <!-- 2 full day 6 -->
#
# The next cell shows seven programs, each with one fault. What does each rank call first? What must
# happen before that call returns?

# %%
lab.show("zoo")

# %% [markdown]
# ## Exercise 3.4 ★★ Diagnose <!-- 2 full day 12 -->
#
# Name the fault of each program from reading alone. If a diagnosis is wrong, the check runs the program and shows a
# table: which rank waits, in which call, and for which rank. Every deadlock prints such a table.

# %% exercise="hpdl_lab.zoo:diagnose"

# %% check="hpdl_lab.zoo:diagnose"

# %% [markdown]
# Now run two programs on engines. In the first program (D), two ranks use two communicators in opposite order. In the
# second program, the ranks name different roots of a broadcast. After the deadline, a report names the fault. Try other
# programs: `zoo.PROGRAMS` lists all, and `lab.show(zoo.find("wrong_root"))` shows the second program.

# %% tags=["raises-exception"]
lab.run(zoo.find("opposite_communicators").broken, ranks=[0, 1], deadline=2)

# %% tags=["raises-exception"]
lab.run(zoo.find("wrong_root").broken, deadline=2)

# %% [markdown]
# ## Exercise 3.5 ★★ Repair: a ring that deadlocks <!-- 2 homework 8 -->
#
# Repair the program in the next cell: every rank exchanges numbers with its two neighbors. First check the unchanged
# program, and read the report. Then change as little as possible.

# %% exercise="hpdl_lab.zoo:add_neighbors"

# %% check="hpdl_lab.zoo:add_neighbors"

# %% [markdown]
# ## Exercise 3.6 ★★ Repair: loops of different length <!-- 2 homework 7 -->
#
# Repair program E of the zoo. All ranks must call every collective, even a rank that has no number left.

# %% exercise="hpdl_lab.zoo:sum_of_steps"

# %% check="hpdl_lab.zoo:sum_of_steps"

# %% [markdown]
# ## Not stuck, only slow <!-- 2 homework 4 -->
#
# A **straggler**, a slow rank, looks like a deadlock to the ranks that wait for it. The next run calls your
# `add_neighbors`, and delays every operation of rank 2 by 5 ms. How many milliseconds do the *other* ranks take to
# return?

# %% guess=[5]
my_ms = lab.guess("milliseconds that the other ranks take", ...)

# %%
lab.inject(rank=2, delay=0.005)
slow = lab.run(add_neighbors)
lab.inject()
rest = [e for e in slow.events if e.rank != 2]
lab.reveal("milliseconds that the other ranks take", (max(e.t1_ns for e in rest) - min(e.t0_ns for e in rest)) / 1e6)
lab.show(slow, prediction=my_ms / 1e3)

# %% [markdown]
# Every rank is as slow as rank 2, although three of four ranks only wait. The delay travels around the ring.

# %% [markdown]
# ## Take it home <!-- 2 homework 8 -->
#
# The first file is your ping-pong in mpi4py, as in the OSU micro-benchmarks. Other programs can make a round a thousand
# times as long, so the file takes the fastest round, and prints half of its time. The last column is the bandwidth,
# near 1/β for long messages.

# %% tags=["take-home"]
# %%writefile take_home_03.py
"""Measure latency and bandwidth of MPI: mpiexec -n 2 python take_home_03.py"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, rounds = comm.Get_rank(), 201
for nbytes in (8, 2**10, 2**15, 2**20):
    x = np.full(nbytes, rank, dtype=np.uint8)
    times = []
    comm.Barrier()
    for _ in range(20 + rounds):
        start = MPI.Wtime()
        if rank == 0:
            comm.Send(x, dest=1)
            comm.Recv(x, source=1)
        elif rank == 1:
            comm.Recv(x, source=0)
            comm.Send(x, dest=0)
        times.append(MPI.Wtime() - start)
    seconds = min(times[20:]) / 2  # without 20 rounds of warm-up; other programs only add to a time
    assert rank > 1 or not x.any()  # rank 1 has rank 0's zeros now
    if rank == 0:
        print(f"{nbytes:>8} B {seconds * 1e6:8.2f} us {nbytes / seconds / 1e6:8.0f} MB/s")

# %% tags=["take-home"]
# out = !mpiexec -n 2 python take_home_03.py
print(out.n)

# %% [markdown]
# Compare these times with α + β · bytes from your fit. The lab's messages take longer, because the lab watches for
# deadlocks.

# %% tags=["take-home"]
rows = [line.split() for line in out.grep(" B ")]
print(*(f"{row[0]:>8} B {(alpha + beta * int(row[0])) * 1e6:8.2f} us" for row in rows), sep="\n")
assert [int(row[0]) for row in rows] == [8, 2**10, 2**15, 2**20] and float(rows[0][2]) < float(rows[-1][2])

# %% [markdown]
# The second file is program C in PyTorch: only rank 0 calls the collective. PyTorch has a deadline, too: 30 minutes by
# default, and 10 minutes with NCCL.

# %% tags=["take-home"]
# %%writefile take_home_03_stuck.py
"""Deadlock, and say why: torchrun --standalone --nproc-per-node 2 take_home_03_stuck.py"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
group = dist.new_group(timeout=timedelta(seconds=2))  # init_process_group takes a timeout as well
rank = dist.get_rank()
loss, weights = torch.tensor([rank + 1.0]), torch.zeros(1000)
try:
    if rank == 0:  # "only rank 0 prints the mean loss"
        dist.all_reduce(loss, group=group)
        print("mean loss", loss.item() / dist.get_world_size())
    dist.broadcast(weights, src=0, group=group)
except RuntimeError as error:
    print(f"rank {rank}: {error}")

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_03_stuck.py
print(out.n)
assert out.grep("Timed out waiting 2000ms")

# %% [markdown]
# The error does not name the missing rank. With `TORCH_DISTRIBUTED_DEBUG=DETAIL` the ranks compare their calls before
# each collective. The comparison is slow, but use it when a program hangs:

# %% tags=["take-home"]
# out = !TORCH_DISTRIBUTED_DEBUG=DETAIL OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_03_stuck.py
print(out.n)

# %% tags=["take-home"]
told = " ".join(out.grep("Detected mismatch"))
assert "ALLREDUCE" in told and "BROADCAST" in told

# %% [markdown]
# With NCCL, PyTorch's **flight recorder** explains a deadlock afterwards:
#
# - `TORCH_FR_BUFFER_SIZE=2000` makes every rank record its last 2,000 collectives (in older versions of PyTorch:
#   `TORCH_NCCL_TRACE_BUFFER_SIZE`).
# - `TORCH_NCCL_DUMP_ON_TIMEOUT=1` writes the records to files after a timeout.
# - The command `torchfrtrace` finds the first collective in which the ranks differ.

# %% [markdown]
# ## Question to discuss
#
# A send of 8 bytes often returns before the other rank has called `recv`. A program that relies on this early return is
# wrong, even if it has always worked. Why? What happens when the program sends longer vectors?
#
# ## Where to read the real code
#
# - `hpdl_lab/comm/base.py`: everything that a communicator can do, with the simplest correct collectives.
# - `hpdl_lab/collectives/jobs.py`, `hpdl_lab/parallel/messages.py`: the functions of this notebook.
# - `hpdl_lab/zoo.py`: all broken programs, each with its repair.
# - `hpdl_lab/comm/status/report.py`: how the report finds the fault.

# %% [markdown]
# ## Recap
#
# 1. A message takes about α + β · bytes: latency plus size over bandwidth.
# 2. Below n½ = α/β most of the time is latency: send few large messages, not many small ones.
# 3. Eight collectives cover nearly all communication of training; all ranks must call collectives in the same order.
# 4. A deadlock is a circle of waiting ranks; `sendrecv`, or another order on one rank, breaks the circle.
# 5. A program that relies on the eager protocol works for small messages and hangs for large messages.
#
# <!-- terms -->
#
# **What you can do now:** measure a link, choose the collective that a job needs, and diagnose and repair a deadlock.
#
# Next, do part two of [02](02_parallel_gradient_descent.ipynb) with `send` and `recv`: a parameter server, and gossip.
#
# <!-- links -->
