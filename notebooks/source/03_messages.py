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
# ## The idea
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
# ## Exercise 3.1 ★ Ping-pong
#
# Two clocks on two ranks never agree. So a message is timed on one clock, there and back.

# %% exercise="hpdl_lab.parallel.messages:ping_pong"

# %% check="hpdl_lab.parallel.messages:ping_pong"

# %% [markdown]
# ## Measure
#
# Your ping-pong, many rounds for each size. Both axes are logarithmic: a flat part on the left, where α decides, a
# rising one on the right, where β does.

# %%
link = lab.ping_pong(ping_pong, prediction=my_times)
link

# %% [markdown]
# ## Exercise 3.2 ★ Fit α and β
#
# Two numbers out of a dozen measured times. Times have errors: those of large messages are large numbers, and so are
# their errors.

# %% exercise="hpdl_lab.collectives.cost:fit_alpha_beta"

# %% check="hpdl_lab.collectives.cost:fit_alpha_beta"

# %%
from hpdl_lab.plots.measure import sentence

alpha, beta = fit_alpha_beta(link.nbytes, link.seconds)
print(sentence(alpha, beta))

# %% [markdown]
# Below that size a message is all latency, above it all bandwidth. Ten messages of 100 bytes cost ten times as much as
# one of 1,000.
#
# ## Eight patterns
#
# Programs rarely send single messages. Eight patterns, in which all ranks take part, are so common that they have
# names: the **collectives**. Each column is a rank, each row a chunk; on the left is what the ranks have
# before, on the right what they have after.

# %%
lab.show("collectives", ranks=4)

# %% [markdown]
# ## Exercise 3.3 ★ Which collective is it?
#
# Eight jobs of a training program, one for each of them. Ask three questions: who has the data, who needs them, is
# anything added?

# %% exercise="hpdl_lab.collectives.jobs:which_collective"

# %% check="hpdl_lab.collectives.jobs:which_collective"

# %% [markdown]
# # Part two: the deadlock zoo
#
# Seven programs, each with one fault. Nearly all of them once kept somebody busy for days. Read them before you run
# them: what does each rank call first, and what must happen before that call returns?

# %%
lab.show("zoo")

# %% [markdown]
# ## Exercise 3.4 ★★ Diagnose
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
# ## Exercise 3.5 ★★ Repair: a ring in which all are alike
#
# The cells of the next three exercises hold a broken program. Check it as it is, and read the report. Then change as
# little as possible.

# %% exercise="hpdl_lab.zoo:add_neighbors"

# %% check="hpdl_lab.zoo:add_neighbors"

# %% [markdown]
# ## Exercise 3.6 ★★ Repair: a collective that only one rank calls

# %% exercise="hpdl_lab.zoo:mean_loss"

# %% check="hpdl_lab.zoo:mean_loss"

# %% [markdown]
# ## Exercise 3.7 ★★ Repair: loops of different length

# %% exercise="hpdl_lab.zoo:sum_of_steps"

# %% check="hpdl_lab.zoo:sum_of_steps"

# %% [markdown]
# ## Not stuck, only slow
#
# A straggler looks like a deadlock to those who wait for it. Here every operation of rank 2 is delayed by 5 ms, as if
# its CPU were throttled or shared. Before you run it: how much longer do the *other* ranks take?

# %%
lab.inject(rank=2, delay=0.005)
slow = lab.run(add_neighbors)
lab.inject()
lab.show(slow)

# %% [markdown]
# Every rank is as slow as the slowest, although three of four have nothing to do but wait. Look at who waits for
# whom: the delay travels around the ring.
#
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
#
# Now you know `send` and `recv`: part two of [02](02_parallel_gradient_descent.ipynb), a parameter server and gossip,
# is yours.
#
# <!-- links -->
