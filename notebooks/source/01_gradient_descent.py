# %% [markdown]
# # 01 · Gradient descent
#
# **The number to reach:** the largest learning rate with which this training converges, exact to 2%.
#
# <!-- tracks -->
#
# Training repeats one small step. This notebook shows the step on a model with two weights, whose loss fits into one
# picture.

# %%
from hpdl_lab import lab
from hpdl_lab.data import diabetes

x, y = diabetes.load()
print(x.shape, y.shape)

# %% [markdown]
# Each of the 442 rows of `x` holds two blood values of a patient. `y` says how far the disease had progressed a year
# later. The model predicts `x @ w`, with two weights `w`.
#
# ## The idea <!-- 1 half day 4 -->
#
# The **loss** says how bad the predictions are. On a map of the two weights, the loss is the height of the ground: the
# ground is a bowl. Training sees only the slope at its weights `w`: the **gradient**.
#
#     loss                          loss(w)  = mean((x @ w - y)²) / 2
#      │ \              /           gradient = how fast the loss rises, for each weight
#      │  ●             │
#      │   \ step      /            w ← w - rate · gradient
#      │    ●._     _./
#      │       ‾‾‾‾‾
#      └─────────────────── w
#
# The **learning rate** is the factor that turns the slope into a step.
#
# ## Predict
#
# A rate that is too small takes tiny steps. If the rate is too large, a step jumps across the bottom and ends higher
# than it started: training **diverges**. What is the largest rate that still **converges** to the bottom: near 0.01,
# 0.1, 1 or 10?

# %% guess=[0.3]
my_rate = lab.guess("the largest learning rate that still converges", ...)

# %% [markdown]
# ## Exercise 1.1 ★ The gradient <!-- 1 full day 5 -->
#
# Write `gradient`. The docstring, the text in triple quotes, says what is given and what to return. The check tries
# several shapes of `x`.

# %% exercise="hpdl_lab.optim.gradient_descent:gradient"

# %% check="hpdl_lab.optim.gradient_descent:gradient"

# %% [markdown]
# ## Exercise 1.2 ★ A gradient step <!-- 1 half day 5 -->
#
# Write `gradient_step`, which calls `gradient` and returns the weights after one step. If you skipped 1.1,
# `lab.catch_up("1.1")` in a new cell defines `gradient`.

# %% exercise="hpdl_lab.optim.gradient_descent:gradient_step"

# %% check="hpdl_lab.optim.gradient_descent:gradient_step"

# %% [markdown]
# ## Watch it <!-- 1 half day 2 -->
#
# The pictures show twenty of your steps from w = (0, 0), for several rates; the last rate is your guess. Which paths
# come near the star, the bottom of the bowl? The bowl is a narrow valley because the two blood values rise and fall
# together.
#
# The curves show the height above the bottom. A rate is "good" if twenty steps reduce this height by 95%. The rate 0.02
# takes short steps, and the rate 1.04 jumps from side to side of the valley. Both leave about 30% of the height.

# %%
walks = lab.landscape(gradient_step, x, y, rates=(0.02, 0.5, 1.04, 1.1), prediction=my_rate)
assert list(walks.verdicts.values())[:4] == ["too low", "good", "too high", "diverges"]
walks

# %% [markdown]
# ## Exercise 1.3 ★ The largest stable learning rate <!-- 1 homework 5 -->
#
# Write `largest_stable_rate`. The bowl has two axes, across the valley and along the valley. The **curvature** `c` of
# an axis says how fast the slope changes along this axis. On an axis, a step multiplies the distance to the bottom by
# `1 - rate · c`. Compute this factor on paper for c = 2 and rates of 0.1, 0.9 and 1.1. When does the distance shrink?

# %% exercise="hpdl_lab.optim.gradient_descent:largest_stable_rate"

# %% check="hpdl_lab.optim.gradient_descent:largest_stable_rate"

# %% [markdown]
# ## Measure <!-- 1 homework 2 -->
#
# Compare rates 2% below and 2% above your limit. Only the higher rate should diverge.

# %%
limit = largest_stable_rate(x)
edge = lab.landscape(gradient_step, x, y, rates=(0.98 * limit, 1.02 * limit), prediction=my_rate)
assert edge.verdicts[1.02 * limit] == "diverges" and edge.verdicts[0.98 * limit] != "diverges"
lab.reveal("the largest learning rate that still converges", limit)

# %% [markdown]
# ## Play: rate and batch <!-- 1 half day 3 -->
#
# So far each step used the **full batch** of 442 patients. SGD uses mini-batches, whose gradients are noisy. Move both
# sliders. With the full batch, a rate near 0.9 ends closest to the minimum. Which rate ends closest with batches of 8?
# What keeps the weights from coming closer?

# %%
lab.explore("rate")

# %% [markdown]
# ## Take it home <!-- 1 homework 3 -->
#
# Here are the twenty steps in PyTorch. `loss.backward()` is your `gradient`, and `optimizer.step()` is your
# `gradient_step`. The final loss is the same as in the lab.

# %% tags=["take-home"]
import numpy as np

np.savez("take_home_01.npz", x=x, y=y)

# %% tags=["take-home"]
# %%writefile take_home_01.py
"""Gradient descent in PyTorch: python take_home_01.py"""

import numpy as np
import torch

x, y = (torch.from_numpy(part) for part in np.load("take_home_01.npz").values())  # (442, 2) and (442,)
w = torch.zeros(2, dtype=x.dtype, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.5)  # on all examples, so there is nothing stochastic yet
for _ in range(20):
    loss = (x @ w - y).square().mean() / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    print("loss", ((x @ w - y).square().mean() / 2).item())

# %% tags=["take-home"]
# out = !python take_home_01.py
print(out.n)

# %% tags=["take-home"]
from hpdl_lab.optim.gradient_descent import loss

assert abs(float(out[-1].split()[1]) - loss(walks.paths[0.5][-1], x, y)) < 1e-12

# %% [markdown]
# ## Question to discuss
#
# The curvature is 1.9 across the valley and 0.1 along the valley. Which curvature limits the learning rate? Which
# curvature decides the number of steps? How would you change the data, or the step, so that one rate suits both
# directions?
#
# ## Where to read the real code
#
# - `hpdl_lab/optim/gradient_descent.py`: the functions of this notebook.
# - `hpdl_lab/plots/landscape.py`: how the bowl is drawn.

# %% [markdown]
# ## Recap
#
# 1. Training repeats one step: weights minus rate times gradient.
# 2. The gradient says how fast the loss rises with each weight.
# 3. Too small a rate is slow; too large a rate diverges.
# 4. The largest stable rate is 2 / c, where c is the largest curvature of the loss.
# 5. The smallest curvature decides how many steps training takes: a narrow valley is slow at any rate.
#
# <!-- terms -->
#
# **What you can do now:** write a training step, and tell from a loss curve whether its rate is too low or too high.
#
# <!-- links -->
