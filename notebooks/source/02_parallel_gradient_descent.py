# %% [markdown]
# # 02 · Parallel gradient descent
#
# **The number to reach:** a difference of less than 10⁻¹² between the weights of four ranks and of one rank.
#
# <!-- tracks -->
#
# Ranks can agree on a step in three ways: each rank averages with all ranks, with a server, or with its neighbors. Part
# one shows the first way.

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
# The gradient is a mean over examples, so ranks can share the work. Each of four ranks takes a quarter of the examples
# and computes their gradient. The mean of the four gradients is the gradient on all examples.
#
#     rank 0: patients   0-109 ──> g0 ──┐                            ┌──> the same step
#     rank 1: patients 110-219 ──> g1 ──┤                            ├──> the same step
#                                       ├──> (g0 + g1 + g2 + g3)/4 ──┤
#     rank 2: patients 220-329 ──> g2 ──┤                            ├──> the same step
#     rank 3: patients 330-439 ──> g3 ──┘                            └──> the same step
#
# Every rank keeps the whole model, and all ranks take the same step. So the models stay equal, although no rank sees
# the other ranks' patients. This is **data parallelism**.

# %%
x, y = (part[:440] for part in diabetes.load())  # 440 patients: four equal shares
w = np.zeros(2)
lab.run(own_gradient, w, x, y)

# %% [markdown]
# Four ranks have four opinions about the way down.
#
# ## Predict
#
# After 20 steps with averaged gradients, how much do the weights differ from the weights of one rank with all 440
# patients?

# %% guess=[0.01]
my_guess = lab.guess("the largest difference in any weight after 20 steps", ...)

# %% [markdown]
# ## Exercise 2.1 ★ Average the gradients of four ranks <!-- 1 half day 5 -->
#
# Write `average_gradients`, which replaces each rank's gradient by the mean gradient. An **all-reduce**,
# `comm.all_reduce(g)`, replaces `g` on every rank by the sum over all ranks. The check uses 1 to 8 ranks.

# %% exercise="hpdl_lab.parallel.gradient_descent:average_gradients"

# %% check="hpdl_lab.parallel.gradient_descent:average_gradients"

# %% [markdown]
# ## Watch it <!-- 1 half day 2 -->
#
# In the bowl of 01, four processes now take each step together.

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
# Four ranks and one rank take the same path, up to rounding. Data parallelism changes where the work is done, not what
# is learned. How long does a step take, alone and together?

# %%
# %timeit -n 1000 -r 3 gradient_step(w, x, y, 0.5)
# %timeit -n 20 -r 3 lab.run(step_together, w, x, y, 0.5, average_gradients)

# %% [markdown]
# Together, a step is far slower: computing takes almost no time, but calling four processes from the
# notebook takes long. So notebook 04 takes all training steps in one call. Sharing pays if computing takes longer than
# communicating.

# %% [markdown]
# # Part two, after 03: a server, and neighbors
#
# *Do [03 · Messages](03_messages.ipynb) first.*
#
# ## A parameter server <!-- 2 full day 3 -->
#
# The first large systems used no all-reduce. One process, the **parameter server**, holds the weights. The other
# processes, the **workers**, hold the examples. A worker only sends its gradient and receives the new weights.
#
#     rank 1 ── g1 ──┐                              ┌──> w
#     rank 2 ── g2 ──┼──> rank 0: w -= rate · mean ─┼──> w
#     rank 3 ── g3 ──┘                              └──> w
#
# ## Exercise 2.2 ★★ A parameter server <!-- 2 full day 13 -->
#
# Write `server_step`, which holds two programs: one for rank 0, the server, and one for the workers.
# `comm.send(x, dst)` and `comm.recv(into, src)` are all you need; `new_like(w, w.shape)` is an empty array like `w`.
# The check looks at all weights, and at the bytes through the server.

# %% exercise="hpdl_lab.parallel.gradient_descent:server_step"

# %% check="hpdl_lab.parallel.gradient_descent:server_step"

# %% [markdown]
# The picture shows one step of three workers with 147 patients each, and 16 bytes of weights. Look at the
# bytes of rank 0.

# %%
from hpdl_lab.parallel.gradient_descent import step_with_server

x, y = (part[:441] for part in diabetes.load())
step = lab.run(step_with_server, w, x, y, 0.5, server_step)
assert np.allclose(step[3], gradient_step(w, x, y, 0.5))
lab.show(step, "traffic")

# %% [markdown]
# Each worker sends and receives one vector. The server receives and sends one vector for every worker. With 100 workers
# and a model of 100 MB, how many bytes pass through the server in one step?
#
# This step is **synchronous**: the server waits for all workers. Early systems (DistBelief, TensorFlow over gRPC) were
# **asynchronous**. The server took a step with each gradient as it arrived. The price is **staleness**: while a worker
# computes a gradient, other workers' gradients change the weights. Bounded staleness keeps workers within a few steps
# of each other (`hpdl_lab/parallel/parameter_server.py`).
#
# ## Gossip <!-- 2 homework 4 -->
#
# **Gossip** needs neither a server nor an all-reduce. Every rank averages only with its neighbors on a graph, the
# **topology**. The mean over all ranks stays the same, and every step brings the ranks closer to this mean.

# %%
from hpdl_lab.parallel import gossip

lab.show(gossip.graph("wheel", 8))

# %% [markdown]
# On a ring, every rank has two neighbors. On a star, one rank is the only neighbor of all others. Each of 16 ranks has
# its own `x`. Every step makes the differences between these `x` smaller. What share of the differences is left after
# 20 steps (0.5: half)?

# %% guess=[0.3, 0.1]
my_spread = lab.guess("how far apart 16 ranks are after 20 steps", {"ring": ..., "star": ...})

# %% [markdown]
# ## Exercise 2.3 ★★ Gossip on a topology <!-- 2 homework 16 -->
#
# Write `gossip_step`, which moves `x` towards the `x` of the neighbors. `graph.neighbors[r]` lists the neighbors of
# rank r. The **degree** of a rank is the number of its neighbors. The check looks at all `x` and all messages.

# %% exercise="hpdl_lab.parallel.gossip:gossip_step"

# %% check="hpdl_lab.parallel.gossip:gossip_step"

# %% [markdown]
# The cell simulates 16 ranks. Points show the differences between ranks after your steps. A step multiplies the vector
# of all `x` by a matrix of averaging weights, whose second largest eigenvalue is **λ₂**. After each step, the
# differences are at most λ₂ times as large as before. Dashed lines show this bound. The random graph is a random tree
# with extra edges.

# %%
graphs = ("ring", "wheel", "random", "star", "exponential")
found = lab.gossip(graphs, n=16, step=gossip_step, prediction=my_spread)
apart = {name: found.errors[name][-1] / found.errors[name][0] for name in my_spread}
lab.reveal("how far apart 16 ranks are after 20 steps", apart)
found

# %% [markdown]
# The exponential graph is by far the fastest. On a circle of ranks, it joins ranks 1, 2, 4, ... places apart, so each
# `x` reaches all ranks within four steps. The ring is ahead of the star, although the ring has the larger λ₂. But λ₂
# counts only in the long run: at first, a ring quickly removes the differences between neighbors. Run ring and star
# longer:

# %%
lab.gossip(("ring", "star"), n=16, steps=120, step=gossip_step, prediction=my_spread)

# %% [markdown]
# The star overtakes the ring after some 85 steps.
#
# Play with graph, ranks and seed; the gray curves are the other graphs. The line of text says how many steps shrink the
# differences to a tenth. How does this number change with twice the ranks on a ring, or with another seed of a random
# graph?

# %%
lab.explore("graph", prediction=my_spread)

# %% [markdown]
# ## Exercise 2.4 ★ One neighbor at a time <!-- 2 homework 7 -->
#
# Write `one_peer_step`, which averages `x` with one neighbor only, the **peer**. In a step on the exponential graph, a
# rank sends some 2 log₂ n messages; here it sends one. `one_peer_hop(p, step)` says how many places away the peer is:
# 1, 2, 4, ... then 1 again. `copy_of(x)` is a copy of `x`; `new_like` is as in 2.2.

# %% exercise="hpdl_lab.parallel.gossip:one_peer_step"

# %% check="hpdl_lab.parallel.gossip:one_peer_step"

# %% [markdown]
# After how many one-peer steps do 16 ranks agree exactly?

# %%
found = lab.gossip(("exponential", "one_peer"), n=16)
assert found.errors["one_peer"][4] < 1e-12 < found.errors["exponential"][4]
found

# %% [markdown]
# Four steps are enough: log₂ 16.
#
# With **local SGD**, each rank takes many steps alone before all ranks average their weights. DiLoCo (Douillard et
# al. 2023) trains language models with local SGD over slow links, and averages after some 500 steps.

# %% [markdown]
# ## Take it home <!-- 2 homework 4 -->
#
# Here is the training of part one in mpi4py. `comm.Allreduce` is the lab's `comm.all_reduce`. Methods with a capital
# letter send arrays. Methods in lower case, like `gather` in 00, send any Python object. `MPI.IN_PLACE` means that the
# sum replaces `g`.

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
# gradients still be the gradient on all patients? What else must ranks send for a correct mean?
#
# ## Where to read the real code
#
# - `hpdl_lab/parallel/gradient_descent.py`: part one, and the server.
# - `hpdl_lab/parallel/gossip.py`: gossip and its graphs.
# - `hpdl_lab/parallel/data_parallel.py`: the same for real models, with all gradients in one message.
# - Random graph, ring and wheel are from SURF's course; star and exponential graph are added here.

# %% [markdown]
# ## Recap
#
# 1. The gradient over all examples is the mean of the gradients over equal shares of the examples.
# 2. So ranks that average their gradients take the same step as one rank with all examples.
# 3. A parameter server does the same through one rank, whose traffic grows with the number of workers.
# 4. Gossip averages with neighbors only; a step multiplies the differences by λ₂ or less.
# 5. Sharing pays only if a rank has more to compute than to communicate.
#
# <!-- terms -->
#
# **What you can do now:** make a gradient step data parallel, and compare what each rank sends with all-reduce, a
# parameter server and gossip.
#
# <!-- links -->
