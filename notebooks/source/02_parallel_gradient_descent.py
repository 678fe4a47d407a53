# %% [markdown]
# # 02 · Parallel gradient descent
#
# **The number to reach:** a difference of less than 10⁻¹² between four ranks and one.
#
# <!-- tracks -->
#
# Three ways to agree on a step: all with all, all through one server, or each with its neighbors. Part one is the
# first. Part two, the other two, uses `send` and `recv`: come back to it after [03](03_messages.ipynb).

# %%
import numpy as np

from hpdl_lab import lab
from hpdl_lab.data import diabetes
from hpdl_lab.optim.gradient_descent import descend, gradient_step
from hpdl_lab.parallel.gradient_descent import own_gradient, step_together

# %%
lab.start(4)

# %% [markdown]
# # Part one: all with all
#
# ## The idea <!-- 1 half day 5 -->
#
# The gradient is a mean over examples. A mean can be shared out: each of four ranks takes a quarter of the examples
# and computes the gradient on those. The mean of the four gradients is the gradient on all the examples.
#
#     rank 0: patients   0-109 ──> g0 ──┐                            ┌──> the same step
#     rank 1: patients 110-219 ──> g1 ──┤                            ├──> the same step
#                                       ├──> (g0 + g1 + g2 + g3)/4 ──┤
#     rank 2: patients 220-329 ──> g2 ──┤                            ├──> the same step
#     rank 3: patients 330-439 ──> g3 ──┘                            └──> the same step
#
# Every rank keeps the whole model, and all of them take the same step. So the models stay equal, although no rank
# ever sees the other ranks' patients. This is **data parallelism**.

# %%
x, y = (part[:440] for part in diabetes.load())  # 440 patients: four equal shares
w = np.zeros(2)
lab.run(own_gradient, w, x, y)

# %% [markdown]
# Four ranks, four opinions about which way is down.
#
# ## Predict
#
# After 20 steps with averaged gradients, how far will the four ranks' weights be from those of one rank that sees all
# 440 patients?

# %% guess=[0.01]
my_guess = lab.guess("the largest difference in any weight after 20 steps", ...)

# %% [markdown]
# ## Exercise 2.1 ★ Average the gradients of four ranks <!-- 1 half day 5 -->
#
# `comm.all_reduce(g)` replaces `g`, on every rank, by the sum over all ranks. (In notebook 04 you write it yourself.)

# %% exercise="hpdl_lab.parallel.gradient_descent:average_gradients"

# %% check="hpdl_lab.parallel.gradient_descent:average_gradients"

# %% [markdown]
# ## Watch it <!-- 1 half day 2 -->
#
# The bowl of notebook 01. Each step is now taken by four processes together, with your `average_gradients`.

# %%
together = lab.landscape(
    lambda w, x, y, rate: lab.run(step_together, w, x, y, rate, average_gradients)[0], x, y, rates=(0.5,)
)

# %% [markdown]
# ## Measure <!-- 1 half day 3 -->

# %%
alone = np.array(list(descend(x, y, 0.5, 20, gradient_step)))
difference = np.abs(together.paths[0.5] - alone).max()
assert difference < 1e-12
lab.reveal("the largest difference in any weight after 20 steps", difference)

# %% [markdown]
# The same path, to the last rounding. Parallel training done this way changes where the work is done, not what is
# learned. And what does a step cost, alone and together?

# %%
# %timeit -n 1000 -r 3 gradient_step(w, x, y, 0.5)
# %timeit -n 20 -r 3 lab.run(step_together, w, x, y, 0.5, average_gradients)

# %% [markdown]
# Together it is far slower: 440 patients are no work at all, and calling four processes from the notebook is. Sharing
# pays when a rank has more to compute than to say. That is why notebook 04 counts bytes, and trains inside one run.

# %% [markdown]
# # Part two, after 03: a server, and neighbors
#
# *Part one ends here: go on to [03 · Messages](03_messages.ipynb), and come back.*
#
# ## A parameter server <!-- 2 full day 3 -->
#
# The first large systems were built differently: one process, the **server**, holds the weights. The others, the
# **workers**, hold examples. A worker receives nothing but the newest weights and sends nothing but its gradient.
#
#     rank 1 ── g1 ──┐                              ┌──> w
#     rank 2 ── g2 ──┼──> rank 0: w -= rate · mean ─┼──> w
#     rank 3 ── g3 ──┘                              └──> w
#
# ## Exercise 2.2 ★★ A parameter server <!-- 2 full day 13 -->
#
# Two programs in one function: what rank 0 does, and what all others do. `comm.send(x, dst)` and
# `comm.recv(into, src)` are all you need; `new_like(w, w.shape)` is an empty array like `w`.

# %% exercise="hpdl_lab.parallel.gradient_descent:server_step"

# %% check="hpdl_lab.parallel.gradient_descent:server_step"

# %% [markdown]
# One step on four engines: three workers with 147 patients each, and 16 bytes of weights. Look at rank 0.

# %%
from hpdl_lab.parallel.gradient_descent import step_with_server

x, y = (part[:441] for part in diabetes.load())
step = lab.run(step_with_server, w, x, y, 0.5, server_step)
assert np.allclose(step[3], gradient_step(w, x, y, 0.5))
lab.show(step, "traffic")

# %% [markdown]
# What enters and leaves the server grows with the number of workers, while each of them moves two vectors. With 100
# workers and a model of 100 MB, how much passes through the server in one step?
#
# Here the server waits for all workers: a **synchronous** step. Early systems (DistBelief, TensorFlow with its
# parameter servers over gRPC) were **asynchronous**: the server takes a step with each gradient as it arrives, and
# nobody waits for the slowest worker. The price is **staleness**: by then the weights for which that gradient was
# computed have changed. Bounded staleness lets a worker run ahead by a few steps only; `StaleSynchronous` in
# `hpdl_lab/parallel/parameter_server.py` does that.
#
# ## Gossip <!-- 2 homework 4 -->
#
# A third way needs neither a server nor global communication: every rank averages with its **neighbors** on a graph,
# and with nobody else. After one step all disagree a little less. The mean over all ranks stays what it was, so all
# ranks converge to it.

# %%
from hpdl_lab.parallel import gossip

lab.show(gossip.graph("wheel", 8))

# %% [markdown]
# Before you write it: on which graph are 16 ranks closer together after 20 steps, on a ring (two neighbors each) or on
# a star (one hub, 15 others)? At the start they are 1 apart.

# %% guess=[0.3, 0.1]
my_spread = lab.guess("how far apart 16 ranks are after 20 steps", {"ring": ..., "star": ...})

# %% [markdown]
# ## Exercise 2.3 ★★ Gossip on a topology <!-- 2 homework 16 -->
#
# `graph.neighbors[r]` lists the neighbors of rank r, in ascending order. Their number is its degree.

# %% exercise="hpdl_lab.parallel.gossip:gossip_step"

# %% check="hpdl_lab.parallel.gossip:gossip_step"

# %% [markdown]
# How fast do they agree? The points are your steps on 16 simulated ranks. The lines are the promise of the second
# eigenvalue λ₂ of the weights: the differences shrink by at least the factor λ₂ per step. The random graph is a
# random tree with some more edges.

# %%
graphs = ("ring", "wheel", "random", "star", "exponential")
found = lab.gossip(graphs, n=16, step=gossip_step, prediction=my_spread)
apart = {name: found.errors[name][-1] / found.errors[name][0] for name in my_spread}
lab.reveal("how far apart 16 ranks are after 20 steps", apart)
found

# %% [markdown]
# The exponential graph gives every rank a few far neighbors, log₂ n to each side, and beats them all. Ring and star
# seem to contradict their λ₂: the ring's is larger, and yet it is ahead. λ₂ is a promise for the long run. What only
# neighbors disagree about, a ring settles soon. Run both for longer:

# %%
lab.gossip(("ring", "star"), n=16, steps=120, step=gossip_step, prediction=my_spread)

# %% [markdown]
# The star overtakes the ring after some 85 steps.
#
# Play with graph, ranks and seed; the gray curves are the other graphs. On a ring with twice as many ranks, how many
# times as many steps does it take to bring the differences to a tenth? And how much is luck in a random graph?

# %%
lab.explore("graph", prediction=my_spread)

# %% [markdown]
# ## Exercise 2.4 ★ One neighbor at a time <!-- 2 homework 7 -->
#
# A step on the exponential graph costs some 2 log₂ n messages. Use one of its edges in each step instead, in turn:
# `one_peer_hop(p, step)` is how many places away the peer is, 1, 2, 4, ... again and again. `copy_of(x)` is a copy,
# `new_like(x, x.shape)` an empty array like it.

# %% exercise="hpdl_lab.parallel.gossip:one_peer_step"

# %% check="hpdl_lab.parallel.gossip:one_peer_step"

# %% [markdown]
# How many such steps does it take until 16 ranks agree, and not just nearly?

# %%
found = lab.gossip(("exponential", "one_peer"), n=16)
assert found.errors["one_peer"][4] < 1e-12 < found.errors["exponential"][4]
found

# %% [markdown]
# Gossip in this form averages at every step. **Local SGD** goes further and lets each rank take many steps by itself
# before all ranks average their weights. DiLoCo (Douillard et al. 2023) trains language models that way on islands of
# machines with slow links between them, with some 500 steps from one average to the next.

# %% [markdown]
# ## Take it home <!-- 2 homework 4 -->
#
# The training of part one in mpi4py. Its line with `Allreduce` is the lab's `comm.all_reduce(g)`: methods with a
# capital letter send the memory of an array as it is, those in lower case, like `gather` in 00, any Python object.
# `MPI.IN_PLACE` says that the sum replaces what was there. First the data, as a file:

# %% tags=["take-home"]
x, y = diabetes.load()
np.savez("take_home_02.npz", x=x, y=y)

# %% tags=["take-home"]
# %%writefile take_home_02.py
"""Data-parallel gradient descent in mpi4py: mpiexec -n 4 python take_home_02.py"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
x, y = (np.split(part[:440], size)[rank] for part in np.load("take_home_02.npz").values())  # this rank's patients
w = np.zeros(2)
for _ in range(20):
    g = x.T @ (x @ w - y) / len(y)  # own_gradient
    comm.Allreduce(MPI.IN_PLACE, g, op=MPI.SUM)
    g /= size  # average_gradients
    w -= 0.5 * g
if rank == 0:
    print("last gradient and weights:", *g, *w)

# %% tags=["take-home"]
# out = !mpiexec -n 4 python take_home_02.py
print(out.n)

# %% tags=["take-home"]
x, y = (part[:440] for part in diabetes.load())
g = lab.run(lambda comm: average_gradients(comm, own_gradient(comm, alone[-2], x, y)))[0]
assert np.allclose([float(number) for number in out[-1].split()[-4:]], [*g, *together.paths[0.5][-1]], atol=1e-12)

# %% [markdown]
# ## Question to discuss
#
# 442 patients do not divide by four. If two ranks had 111 patients and two had 110, would the mean of the four
# gradients still be the gradient on all of them? What would you send along to make it right?
#
# ## Where to read the real code
#
# - `hpdl_lab/parallel/gradient_descent.py`, `hpdl_lab/parallel/gossip.py`: the functions of this notebook.
# - `hpdl_lab/parallel/gossip.py`: the graphs, their weights and spectral gaps.
# - `hpdl_lab/parallel/data_parallel.py`: the same for real models, with all gradients in one message.
# - Random graph, ring and wheel are the three topologies that SURF's course draws for decentralized training; the star
#   and the exponential graph are added here.

# %% [markdown]
# ## Recap
#
# 1. The gradient over all examples is the mean of the gradients over equal shares of them.
# 2. So ranks that average their gradients take the step that one rank with all examples would take.
# 3. A parameter server does the same through one rank, whose traffic grows with the number of workers.
# 4. Gossip averages with neighbors only; the differences between ranks shrink by about λ₂ in each step.
# 5. Sharing pays only if a rank has more to compute than to communicate.
#
# | term | what it means |
# |---|---|
# | data parallelism | every rank has the whole model and its own share of the examples |
# | all-reduce | leaves the sum over all ranks on every rank |
# | parameter server | a rank that holds the weights, collects gradients and hands out new weights |
# | worker | a rank that computes gradients for a parameter server |
# | gossip, decentralized SGD | averaging with neighbors on a graph, with no global communication |
# | topology | the graph of who communicates with whom: ring, wheel, star, random ... |
# | mixing rate, λ₂ | the second largest eigenvalue of the averaging weights: how slowly ranks agree |
#
# **What you can do now:** make a gradient step data parallel, and compare all-reduce, a parameter server and gossip
# by what each rank has to send.
#
# <!-- links -->
