# %% [markdown]
# # 00 · Ranks are processes
#
# **The number to reach:** run 4 ranks in 4 processes, and end a stuck cell in less than 2 seconds.
#
# <!-- tracks -->
#
# No cell hangs forever. A rank that waits for a message gives up after its **deadline**, 10 seconds. A report then says
# which rank waited for which other rank. The stop button ■ in the toolbar ends the running cell on all ranks, even an
# endless loop.
#
# Later notebooks do not need answers from sections that your course skips.

# %%
import numpy as np

from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# ## The idea <!-- 1 half day 4 -->
#
# Four more Python processes, called **engines**, now run behind this notebook. When engines run a parallel program,
# they are called **ranks** and have numbers, from 0. Ranks share no variables. A message is the only way to get data
# from another rank.
#
#     your notebook ──┬──> rank 0   ┐
#                     ├──> rank 1   │  the same function on every rank,
#                     ├──> rank 2   │  each with its own `comm`
#                     └──> rank 3   ┘
#
# `lab.run(fn)` calls `fn(comm)` on every rank at the same time. It returns a list of the ranks' results, in rank order.
# `lab.run(fn, limit=60)` ends after 60 seconds, even if `fn` is not done. The argument `comm` is the **communicator**,
# the group of ranks that can send each other messages. `comm.rank` is the rank's own number, and `comm.size` is the
# number of ranks.
#
# ## Predict
#
# How long does it take to call an empty function on four other processes and collect four answers? Guess before you
# measure.

# %% guess=[100]
my_guess_ms = lab.guess("milliseconds of a lab.run that does nothing", ...)

# %% [markdown]
# ## Exercise 0.1 ★ Hello from every rank <!-- 1 half day 5 -->
#
# Write `hello`, which returns a sentence with the number of its rank and the number of ranks. The check calls `hello`
# and explains any mistake. `lab.hint()` in a new cell opens one hint at a time.

# %% exercise="hpdl_lab.parallel.messages:hello"

# %% check="hpdl_lab.parallel.messages:hello"

# %%
lab.run(hello)

# %% [markdown]
# ## Exercise 0.2 ★ Nothing is shared <!-- 1 full day 5 -->
#
# Write `fill_with_rank`, which fills `x` with the number of its rank, waits for all ranks, and returns its process id
# and `x`. (The process id is the operating system's number for a process.) Guess first: does each rank find its own
# number in `x`, or the number of the rank that wrote last?

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
# The cell calls an empty function many times. Every `lab.run` takes at least the measured time. Inside a run, messages
# are hundreds of times faster: notebook 03 measures them.

# %%
# took = %timeit -n 20 -r 5 -o lab.run(lambda comm: None)
lab.reveal("milliseconds of a lab.run that does nothing", 1e3 * took.average)

# %% [markdown]
# ## A stuck cell <!-- 1 half day 3 -->
#
# The most common accident of parallel programming is the **deadlock**: all ranks wait for each other.
# `comm.recv(into, src)` receives a message from rank `src` into the array `into`. In the second cell below, each rank
# waits for a number from the next rank, but no rank sends a number. Most programs would hang until you kill them. Here
# the deadline is 1.5 seconds. Then a report appears, and the ranks are free again.

# %%
import os

pids = lab.run(lambda comm: os.getpid())

# %% tags=["raises-exception"]
lab.run(lambda comm: comm.recv(np.zeros(1), (comm.rank + 1) % comm.size), deadline=1.5)

# %% [markdown]
# The table shows what every rank waits for, and in which line of the cell. Below the table is the cycle: 0 waits for 1,
# 1 waits for 2, and so on, back to 0. The last line of the report gives the likely cause.
#
# Now run the cell above again with `deadline=60`, and press ■ (interrupt) instead of waiting. You get the same report
# at once. The next cell shows that the engines are still the same processes.

# %%
assert lab.run(lambda comm: os.getpid()) == pids
print("the same four processes answer")

# %% [markdown]
# A cell that begins with `%%px` (from ipyparallel) runs on all engines. Functions in `lab.run` do not see the variables
# of `%%px` cells.

# %%
# %%px
import sys

print("Python", sys.version.split()[0])

# %% [markdown]
# ## Take it home <!-- 1 full day 4 -->
#
# Ranks need no notebook. All ranks run the same file, and each rank decides by its number what to do. This is **SPMD**,
# *single program, multiple data*. The file below is your `hello` for **MPI**, the standard interface for messages
# between processes. `mpi4py` is MPI in Python. `Get_rank()` is the lab's `comm.rank`. `gather` collects the answers of
# all ranks on one rank.

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
# The next file is your `hello` for PyTorch. `torchrun` starts the ranks. It sets environment variables with the number
# of each rank and the address of rank 0. `init_process_group` reads these variables. With `--standalone`, all ranks run
# on this machine and use a free port. `gloo` sends messages between CPUs; for GPUs write `"nccl"`.

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
# Rank 2 sets `x = 7`. What does rank 3 see in its `x`? What if both ranks ran as threads of one process? Would you
# rather debug processes or threads?
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
# 2. `lab.run(f)` calls `f(comm)` on every rank and returns a list of the results, in rank order.
# 3. The communicator `comm` is a group of `comm.size` ranks that can send each other messages.
# 4. A call from the notebook to other processes takes about a millisecond, so do much in one run.
# 5. Ranks that wait for each other are in a deadlock; a deadline turns a deadlock into a report.
#
# <!-- terms -->
#
# **What you can do now:** start ranks, run a function on all of them, and read the report of a run that is stuck.
#
# <!-- links -->
