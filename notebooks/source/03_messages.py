# %% [markdown]
# # 03 · Messages
#
# **The number to reach:** the size at which half of a message's time is latency, between two of your ranks; and no
# rank that waits forever.
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
# Ranks share nothing. All that one knows of another came in a **message**: one rank calls `comm.send(x, dst)`, the
# other `comm.recv(into, src)`. Both ends must agree on how many numbers are sent, of which type, and in which order.
#
#     rank 0                     rank 1
#     comm.send(x, 1)   ──x──>   comm.recv(y, 0)        y now holds what x held
#
# A send may have to wait for its receive: never rely on the library buffering a message. A message takes
#
#     time = α + β · bytes       α: latency, s per message       β: s per byte, one over the bandwidth
#
# ## Predict
#
# Two ranks on this machine. How long does a message of 8 bytes take, and one of 1 MiB? In microseconds.

# %% guess=[10, 1000]
my_times = lab.guess("microseconds of a message", {"8": ..., "1MiB": ...})

# %% [markdown]
# ## Exercise 3.1 ★ Ping-pong <!-- 1 half day 8 -->
#
# Two clocks on two ranks never agree. So a message is timed on one clock, there and back.

# %% exercise="hpdl_lab.parallel.messages:ping_pong"

# %% check="hpdl_lab.parallel.messages:ping_pong"

# %% [markdown]
# ## Measure <!-- 1 half day 3 -->
#
# Your ping-pong, many rounds for each size. Both axes are logarithmic: a flat part on the left, where α decides, a
# rising one on the right, where β does.

# %%
link = lab.ping_pong(ping_pong, prediction=my_times)
times = {"8": link.seconds[0], "1MiB": link.alpha + link.beta * 2**20}  # the second one by the fitted line
lab.reveal("microseconds of a message", {size: 1e6 * seconds for size, seconds in times.items()})
link

# %% [markdown]
# ## Exercise 3.2 ★ Fit α and β <!-- 1 full day 10 -->
#
# Two numbers out of a dozen measured times. Times have errors: those of large messages are large numbers, and so are
# their errors.

# %% exercise="hpdl_lab.collectives.cost:fit_alpha_beta"

# %% check="hpdl_lab.collectives.cost:fit_alpha_beta"

# %%
from hpdl_lab.plots.measure import alpha_beta_text

alpha, beta = fit_alpha_beta(link.nbytes, link.seconds)
print(alpha_beta_text(alpha, beta))

# %% [markdown]
# Now by hand: the blue points are yours. Which slider moves the left part of the curve, and which the right one? When
# the curve lies on your points, make the link ten times as fast, and see above which size that matters.

# %%
lab.explore("message", prediction=my_times)

# %% [markdown]
# Below that size a message is all latency, above it all bandwidth. Ten messages of 100 bytes cost ten times as much as
# one of 1,000.
#
# ## Eight patterns <!-- 1 half day 5 -->
#
# Programs rarely send single messages. Eight patterns, in which all ranks take part, are so common that they have
# names: the **collectives**. Each column is a rank, each row a chunk; on the left is what the ranks have
# before, on the right what they have after.

# %%
lab.show("collectives", ranks=4)

# %% [markdown]
# ## Exercise 3.3 ★ Which collective is it? <!-- 1 half day 6 -->
#
# Eight jobs of a training program, one for each of them. Ask three questions: who has the data, who needs them, is
# anything added?

# %% exercise="hpdl_lab.collectives.jobs:which_collective"

# %% check="hpdl_lab.collectives.jobs:which_collective"

# %% [markdown]
# ## The same in MPI, PyTorch and NCCL <!-- 1 half day 2 -->
#
# You will meet these calls under other names. `comm` of mpi4py is an `MPI.Comm`, and `dist` is `torch.distributed`:
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
# | `comm.barrier()` | `comm.Barrier()` | `dist.barrier()` | - |
# | `comm.broadcast(x)` | `comm.Bcast(x)` | `dist.broadcast(x, 0)` | `ncclBroadcast` |
# | `comm.scatter(xs, y)` | `comm.Scatter(xs, y)` | `dist.scatter(y, xs)` | `ncclScatter`, from 2.28 |
# | `comm.gather(x)` | `comm.Gather(x, ys)` | `dist.gather(x, ys)` | `ncclGather`, from 2.28 |
# | `comm.reduce(x)` | `comm.Reduce(x, y)` | `dist.reduce(x, 0)` | `ncclReduce` |
# | `comm.all_reduce(x)` | `comm.Allreduce(MPI.IN_PLACE, x)` | `dist.all_reduce(x)` | `ncclAllReduce` |
# | `comm.reduce_scatter(x)` | `comm.Reduce_scatter(x, y)` | `dist.reduce_scatter_tensor(y, x)` | `ncclReduceScatter` |
# | `comm.all_gather(x)` | `comm.Allgather(x, y)` | `dist.all_gather_into_tensor(y, x)` | `ncclAllGather` |
# | `comm.all_to_all(x)` | `comm.Alltoall(x, y)` | `dist.all_to_all_single(y, x)` | `ncclAlltoAll`, from 2.28 |
# | `comm.split(color)` | `comm.Split(color, key)` | `dist.new_group(ranks)` | `ncclCommSplit` |
#
# `send` and `recv` are **blocking**: when they return, the memory of `x` is yours again. `isend` and `irecv` are
# **non-blocking**: they return at once with a request, here a Work, and until its `wait()` returns, the memory belongs
# to the library. A blocking `send` need not wait for its receive. Short messages go by the **eager** protocol: they
# leave at once, and the receiver's library buffers them. Long ones go by the **rendezvous** protocol: the sender asks
# first, and sends when the receiver has called `recv`. Calls of NCCL are queued on a CUDA stream: they return at once,
# and the stream waits. "In a group" means sends and receives between `ncclGroupStart` and `ncclGroupEnd`.

# %% [markdown]
# # Part two: the deadlock zoo <!-- 2 full day 6 -->
#
# Seven programs, each with one fault. Nearly all of them once kept somebody busy for days. Read them before you run
# them: what does each rank call first, and what must happen before that call returns?

# %%
lab.show("zoo")

# %% [markdown]
# ## Exercise 3.4 ★★ Diagnose <!-- 2 full day 12 -->
#
# Commit to an answer before you run anything. A wrong diagnosis is answered with the table of a real run: read it,
# that is the skill.

# %% exercise="hpdl_lab.zoo:diagnose"

# %% check="hpdl_lab.zoo:diagnose"

# %% [markdown]
# Now on the engines. Two communicators, used by two ranks in opposite order; the deadline ends it, and the engines are
# free again. Try others: `lab.show(zoo.find("wrong_root"))` shows a program, and `zoo.PROGRAMS` lists all.

# %% tags=["raises-exception"]
lab.run(zoo.find("opposite_communicators").broken, ranks=[0, 1], deadline=2)

# %% tags=["raises-exception"]
lab.run(zoo.find("wrong_root").broken, deadline=2)

# %% [markdown]
# ## Exercise 3.5 ★★ Repair: a ring in which all are alike <!-- 2 homework 8 -->
#
# The cells of the next three exercises hold a broken program. Check it as it is, and read the report. Then change as
# little as possible.

# %% exercise="hpdl_lab.zoo:add_neighbors"

# %% check="hpdl_lab.zoo:add_neighbors"

# %% [markdown]
# ## Exercise 3.6 ★★ Repair: a collective that only one rank calls <!-- 2 homework 7 -->

# %% exercise="hpdl_lab.zoo:mean_loss"

# %% check="hpdl_lab.zoo:mean_loss"

# %% [markdown]
# ## Exercise 3.7 ★★ Repair: loops of different length <!-- 2 homework 7 -->

# %% exercise="hpdl_lab.zoo:sum_of_steps"

# %% check="hpdl_lab.zoo:sum_of_steps"

# %% [markdown]
# ## Not stuck, only slow <!-- 2 homework 4 -->
#
# A straggler looks like a deadlock to those who wait for it. Here every operation of rank 2 is delayed by 5 ms, as if
# its CPU were throttled or shared. How many milliseconds do the *other* ranks take?

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
# Every rank is as slow as the slowest, although three of four have nothing to do but wait. Look at who waits for
# whom: the delay travels around the ring.

# %% [markdown]
# ## Take it home <!-- 2 homework 8 -->
#
# Two files. The first one is your ping-pong in mpi4py, as the OSU micro-benchmarks do it: warm up, play many rounds,
# and divide by two, because half a round is one message. It takes the median round, not their mean, because a round
# in which another program has the core can take a thousand times as long. Its last column is one over your β.

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
# The same sizes by your α and β. The lab's messages cost more: each of them is watched, so that a deadlock can be
# reported. Times also differ from run to run, so that only the order of the least ones is asserted.

# %% tags=["take-home"]
rows = [line.split() for line in out.grep(" B ")]
print(*(f"{row[0]:>8} B {(alpha + beta * int(row[0])) * 1e6:8.2f} us" for row in rows), sep="\n")
assert [int(row[0]) for row in rows] == [8, 2**10, 2**15, 2**20] and float(rows[0][2]) < float(rows[-1][2])

# %% [markdown]
# The second file is a deadlock in PyTorch, the one of exercise 3.6: only rank 0 calls the collective. There is a
# deadline here, too, but by default it is 30 minutes (10 with NCCL).

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
# A timeout, and not a word about who waits for whom. With `TORCH_DISTRIBUTED_DEBUG=DETAIL` all ranks compare what they
# call before they call it. That is slow, and worth it when something hangs:

# %% tags=["take-home"]
# out = !TORCH_DISTRIBUTED_DEBUG=DETAIL OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 take_home_03_stuck.py
print(out.n)

# %% tags=["take-home"]
told = " ".join(out.grep("Detected mismatch"))
assert "ALLREDUCE" in told and "BROADCAST" in told

# %% [markdown]
# With NCCL the **flight recorder** answers afterwards. `TORCH_FR_BUFFER_SIZE=2000` has every rank keep its last 2,000
# collectives, `TORCH_NCCL_DUMP_ON_TIMEOUT=1` has the watchdog write them to files when one times out, and the
# command `torchfrtrace` finds the first one in which the ranks differ. (Older versions of PyTorch call the first one
# `TORCH_NCCL_TRACE_BUFFER_SIZE`.)

# %% [markdown]
# ## Question to discuss
#
# A send of 8 bytes often returns before anybody has received it: the library has buffered it, which MPI calls the
# **eager** protocol. Why is a program wrong that relies on this, even if it has always worked? What happens on the
# day when the vectors grow, and the library waits for the receiver (the **rendezvous** protocol)?
#
# ## Where to read the real code
#
# - `hpdl_lab/comm/base.py`: all that a communicator can do, with the plainest collectives that are right.
# - `hpdl_lab/collectives/jobs.py`, `hpdl_lab/parallel/messages.py`: the functions of this notebook.
# - `hpdl_lab/zoo.py`: all broken programs, each with its repair.
# - `hpdl_lab/comm/status/report.py`: the rules of the report about a stuck run.

# %% [markdown]
# ## Recap
#
# 1. A message takes about α + β · bytes: latency plus size over bandwidth.
# 2. Below n½ = α/β a message is mostly latency: send few large messages rather than many small ones.
# 3. Eight collectives cover nearly all that a training sends; all ranks have to call them, in the same order.
# 4. A deadlock is a circle of waiting ranks; `sendrecv`, or another order on one rank, breaks the circle.
# 5. A program must not rely on the library to buffer a send: it works for small messages and hangs for large ones.
#
# | term | what it means |
# |---|---|
# | latency, α | the time of an empty message |
# | bandwidth, 1/β | bytes per second of a long message |
# | n½ | the message size at which half of the time is latency |
# | point-to-point | a send on one rank and its receive on another |
# | collective | an operation in which all ranks of a communicator take part |
# | blocking, non-blocking | returns when the buffer may be used again; returns at once, to be waited for later |
# | eager, rendezvous protocol | the message is stored at the receiver; the sender waits for the receive |
# | straggler | a slow rank that all others wait for |
#
# **What you can do now:** measure a link, choose the collective that a job needs, and diagnose and repair a deadlock.
#
# Now that you know `send` and `recv`, do part two of [02](02_parallel_gradient_descent.ipynb): a parameter server, and
# gossip.
#
# <!-- links -->
