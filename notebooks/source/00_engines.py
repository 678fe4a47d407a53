# %% [markdown]
# # 00 · Ranks are processes
#
# **The number to reach:** 4 ranks in 4 processes, and a stuck cell that gives you control back in less than 2
# seconds.
#
# <!-- tracks -->
#
# Run the cells from top to bottom with Shift+Enter. Nothing here hangs for good: a rank that waits for 10 seconds,
# its *deadline*, gives up, and you read who waited for whom. The stop button above, ■, ends everything, even a loop
# that computes forever; `lab.run(f, limit=60)` gives up after 60 s.
#
# A heading that ends in *full day* or *homework* begins a section that shorter courses leave out: go on at the next
# heading without such a label. No later notebook needs its answer.

# %%
import numpy as np

from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# ## The idea <!-- 1 half day 4 -->
#
# Four more Python processes are now running behind this notebook. They are called **engines**; as members of a
# parallel program they are **ranks**, numbered from 0. They share no variables. One rank learns what another knows
# only through a message.
#
#     your notebook ──┬──> rank 0   ┐
#                     ├──> rank 1   │  the same function on every rank,
#                     ├──> rank 2   │  each with its own `comm`
#                     └──> rank 3   ┘
#
# `lab.run(fn)` calls `fn(comm)` on every rank at the same time and hands back what each of them returned, in rank
# order. The first argument is always the **communicator**: it knows who you are (`comm.rank`), how many you are
# (`comm.size`), and how to reach the others.
#
# ## Predict
#
# How long does it take to call an empty function on four other processes and collect four answers? Type your guess in
# place of `...` before you measure. A wrong guess is worth more than none.

# %% guess=[100]
my_guess_ms = lab.guess("milliseconds of a lab.run that does nothing", ...)

# %% [markdown]
# ## Exercise 0.1 ★ Hello from every rank <!-- 1 half day 5 -->
#
# Write `hello`. Then let `lab.check` look at it. If it is not right yet, the answer says what is wrong, and
# `lab.hint()` in a new cell opens one hint at a time.

# %% exercise="hpdl_lab.parallel.messages:hello"

# %% check="hpdl_lab.parallel.messages:hello"

# %%
lab.run(hello)

# %% [markdown]
# ## Exercise 0.2 ★ Nothing is shared <!-- 1 full day 5 -->
#
# Four ranks write into `x`. What does each of them find there when all have written: its own number, or that of the
# rank that wrote last? The process id is the operating system's name for a process.

# %% exercise="hpdl_lab.parallel.messages:fill_with_rank"

# %% check="hpdl_lab.parallel.messages:fill_with_rank"

# %%
x = np.zeros(3)
seen = lab.run(fill_with_rank, x)
assert len({pid for pid, _ in seen}) == 4 and not x.any()
print("the notebook's x:", x)
seen

# %% [markdown]
# ## Measure <!-- 1 half day 1 -->
#
# The same call, many times. Compare with your guess: it is the price of leaving the notebook, paid once per
# `lab.run`. Inside a run, ranks talk to each other hundreds of times faster; notebook 03 measures that.

# %%
# took = %timeit -n 20 -r 5 -o lab.run(lambda comm: None)
lab.reveal("milliseconds of a lab.run that does nothing", 1e3 * took.average)

# %% [markdown]
# ## A stuck cell <!-- 1 half day 3 -->
#
# The most common accident of parallel programming: everybody waits for everybody. `comm.recv(into, src)` receives
# into an array. Here each rank waits for a number from the next one, and nobody sends any. Ordinarily such a program
# hangs until somebody kills it.
#
# Here every wait has a deadline. When it passes, a report says who waits for whom, and the ranks are free again.

# %%
import os

pids = lab.run(lambda comm: os.getpid())

# %% tags=["raises-exception"]
lab.run(lambda comm: comm.recv(np.zeros(1), (comm.rank + 1) % comm.size), deadline=1.5)

# %% [markdown]
# The table says what every rank waits for, and in which line of the cell. Below it is the cycle: 0 waits for 1, 1
# waits for 2, and so on, back to 0. The last line gives the likely cause.
#
# Now run the cell above again with `deadline=60`, and press ■ (interrupt) in the toolbar instead of waiting. You get
# the same report at once. Then go on: the engines are the same as before.

# %%
assert lab.run(lambda comm: os.getpid()) == pids
print("the same four processes answer")

# %% [markdown]
# `%%px` of ipyparallel works on the same engines: use it to inspect something on all of them. Its variables are its
# own: what a `%%px` cell defines, a function given to `lab.run` does not see.

# %%
# %%px
import sys

print("Python", sys.version.split()[0])

# %% [markdown]
# ## Take it home <!-- 1 full day 4 -->
#
# Ranks need no notebook. What you have seen is **SPMD**, *single program, multiple data*: all ranks run the same file,
# and each decides by its rank what to do. Here is your hello as a file for mpi4py, which is MPI in Python, and as one
# for PyTorch. `Get_rank()` and `get_rank()` are the lab's `comm.rank`; `gather` does what `lab.run` did for you: it
# brings the answers of all ranks to one place.

# %% tags=["take-home"]
# %%writefile take_home_00_mpi.py
"""Say hello from every rank of MPI: mpiexec -n 4 python take_home_00_mpi.py"""

from mpi4py import MPI  # which also starts MPI

comm = MPI.COMM_WORLD  # all ranks that mpiexec has started
rank, size = comm.Get_rank(), comm.Get_size()
hellos = comm.gather(f"hello from rank {rank} of {size}", root=0)  # a list on rank 0, None elsewhere

if rank == 0:
    print(*hellos, sep="\n")

# %% tags=["take-home"]
# out = !mpiexec -n 4 python take_home_00_mpi.py
print(out.n)

# %% tags=["take-home"]
assert out.grep("hello") == list(lab.run(hello))

# %% [markdown]
# `torchrun` tells each rank its number, and where to find rank 0, by environment variables, which
# `init_process_group` reads. `--standalone` means: all ranks on this machine, at a free port. `gloo` sends messages
# between CPUs; for GPUs write `"nccl"`.

# %% tags=["take-home"]
# %%writefile take_home_00_torch.py
"""Say hello from every rank of torchrun: torchrun --standalone --nproc-per-node 4 take_home_00_torch.py"""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
hellos = [None] * size
dist.all_gather_object(hellos, f"hello from rank {rank} of {size}")  # the same list on all ranks

if rank == 0:
    print(*hellos, sep="\n")
dist.destroy_process_group()

# %% tags=["take-home"]
# out = !OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 take_home_00_torch.py
print(out.n)

# %% tags=["take-home"]
assert out.grep("hello") == list(lab.run(hello))

# %% [markdown]
# ## Question to discuss
#
# Rank 2 sets `x = 7`. What does rank 3 see in its `x`? What if both ran as threads of one process? Which of the two
# would you rather debug?
#
# ## Where to read the real code
#
# - `hpdl_lab/parallel/messages.py`: the two functions of this notebook.
# - `hpdl_lab/engines/`: how the processes are started, called, interrupted and restarted.
# - `hpdl_lab/comm/base.py`: all that a communicator can do, on one page.

# %% [markdown]
# ## Recap
#
# 1. A rank is a process with a number; all ranks run the same program (SPMD) and share no variables.
# 2. `lab.run(f)` calls `f(comm)` on every rank and hands back what each returns, in rank order.
# 3. The communicator `comm` knows your rank and how many ranks there are, and reaches the others.
# 4. Calling other processes from the notebook takes about a millisecond; do much in one run.
# 5. A rank that waits for a message nobody sends is in a deadlock; a deadline turns it into a report.
#
# | term | what it means |
# |---|---|
# | engine | a process of the cluster behind the notebook; as a member of a program it is a rank |
# | rank, size | the number of a process in a communicator, from 0; how many processes it has |
# | communicator | a group of ranks that can send each other messages |
# | SPMD | single program, multiple data: every rank runs the same code on its own data |
# | deadlock | ranks that wait for each other in a circle, forever |
# | deadline | how long a rank may wait before the run is given up |
#
# **What you can do now:** start ranks, run a function on all of them, and read the report of a run that is stuck.
#
# <!-- links -->
