# %% [markdown]
# # 02 · Parallel gradient descent
#
# **The number to reach:** a difference of less than 10⁻¹² between four ranks and one.
#
# | minutes | tracks | you need |
# |---|---|---|
# | 20 | half day, full day | notebooks [00](00_engines.ipynb) and [01](01_gradient_descent.ipynb); four engines |

# %%
import numpy as np

from hpdl_lab import lab
from hpdl_lab.data import diabetes
from hpdl_lab.optim.gradient_descent import gradient_step
from hpdl_lab.parallel.averaging import own_gradient, step_together

# %%
lab.start(4)

# %% [markdown]
# ## The idea
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

# %%
my_guess = 0.01  # largest difference in any weight

# %% [markdown]
# ## Exercise 2.1 ★ Average the gradients of four ranks
#
# `comm.all_reduce(g)` replaces `g`, on every rank, by the sum over all ranks. (In notebook 04 you write it yourself.)

# %% exercise="hpdl_lab.parallel.averaging:average_gradients"

# %% check="hpdl_lab.parallel.averaging:average_gradients"

# %% [markdown]
# ## Watch it
#
# The bowl of notebook 01. Each step is now taken by four processes together, with your `average_gradients`.

# %%
together = lab.landscape(
    lambda w, x, y, rate: lab.run(step_together, w, x, y, rate, average_gradients)[0], x, y, rates=(0.5,)
)

# %% [markdown]
# ## Measure

# %%
alone = lab.landscape(gradient_step, x, y, rates=(0.5,))
difference = np.abs(together.paths[0.5] - alone.paths[0.5]).max()
assert difference < 1e-12
print(f"four ranks and one differ by {difference:.1e} at most; you guessed {my_guess}")

# %% [markdown]
# The same path, to the last rounding. Parallel training done this way changes where the work is done, not what is
# learned. And what does a step cost, alone and together?

# %%
# %timeit -n 1000 -r 3 gradient_step(w, x, y, 0.5)
# %timeit -n 20 -r 3 lab.run(step_together, w, x, y, 0.5, average_gradients)

# %% [markdown]
# Together it is far slower: 440 patients are no work at all, and calling four processes from the notebook is. Sharing
# pays where a rank has more to compute than to say. That is why notebook 04 counts bytes, and trains inside one run.

# %% [markdown]
# ## Question to discuss
#
# 442 patients do not divide by four. If two ranks had 111 patients and two had 110, would the mean of the four
# gradients still be the gradient on all of them? What would you send along to make it right?
#
# ## Where to read the real code
#
# - `hpdl_lab/parallel/averaging.py`: the functions of this notebook.
# - `hpdl_lab/parallel/data.py`: the same for real networks, with all gradients in one message.
#
# Next: [04 · Ring all-reduce](04_ring_all_reduce.ipynb)
