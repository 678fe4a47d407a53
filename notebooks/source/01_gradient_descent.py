# %% [markdown]
# # 01 · Gradient descent
#
# **The number to reach:** the largest learning rate that still converges on this data, to within 2%.
#
# <!-- tracks -->
#
# Training a model of any size repeats one small step. This notebook is about that step, on a model with two weights,
# so that all of it fits into one picture.

# %%
from hpdl_lab import lab
from hpdl_lab.data import diabetes

x, y = diabetes.load()
print(x.shape, y.shape)

# %% [markdown]
# Each of the 442 rows of `x` holds two blood values of a patient; `y` says how far the disease had progressed a year
# later. The model predicts `x @ w`, with two weights `w`.
#
# ## The idea <!-- 1 half day 4 -->
#
# The **loss** says how bad the predictions are: half the mean squared error. Over the plane of all pairs of weights
# it is a bowl. Nobody sees the bowl from above; standing at `w`, we only feel the slope under our feet, the
# **gradient**.
#
#     loss                          loss(w)  = mean((x @ w - y)²) / 2
#      │ \              /           gradient = how fast the loss rises, for each weight
#      │  ●             │
#      │   \ step      /            w ← w - rate · gradient
#      │    ●._     _./
#      │       ‾‾‾‾‾
#      └─────────────────── w
#
# The **learning rate** turns the slope into a distance. It has no natural size, and that is the trouble with it.
#
# ## Predict
#
# Too small a rate crawls. Too large a rate jumps across the valley and lands higher than it started. Where is the
# limit for this data: near 0.01, 0.1, 1 or 10?

# %% guess=[0.3]
my_rate = lab.guess("the largest learning rate that still converges", ...)

# %% [markdown]
# ## Exercise 1.1 ★ The gradient <!-- 1 half day 5 -->
#
# The text under the first line of the function, its docstring, says what comes in and what has to come out.

# %% exercise="hpdl_lab.optim.gradient_descent:gradient"

# %% check="hpdl_lab.optim.gradient_descent:gradient"

# %% [markdown]
# ## Exercise 1.2 ★ A gradient step <!-- 1 half day 5 -->

# %% exercise="hpdl_lab.optim.gradient_descent:gradient_step"

# %% check="hpdl_lab.optim.gradient_descent:gradient_step"

# %% [markdown]
# ## Watch it <!-- 1 half day 2 -->
#
# Your step, twenty times from w = (0, 0), for several learning rates; the last one is your guess. The star is the
# bottom of the bowl. The bowl is a narrow valley, because the two blood values rise and fall together: steep across,
# flat along. A rate is called good if twenty steps remove 95% of the loss that can be removed. The curves below show
# what is left of it: a rate that is nearly too large loses as little as one that is far too small.

# %%
walks = lab.landscape(gradient_step, x, y, rates=(0.02, 0.5, 1.04, 1.1), prediction=my_rate)
assert list(walks.verdicts.values())[:4] == ["too low", "good", "too high", "diverges"]
walks

# %% [markdown]
# ## Exercise 1.3 ★ The largest stable learning rate <!-- 1 homework 5 -->
#
# Along an axis of the bowl with curvature `c`, a step multiplies the distance to the bottom by `1 - rate · c`. Try it
# with numbers: c = 2 and a rate of 0.1, then 0.9, then 1.1. When does the distance shrink?

# %% exercise="hpdl_lab.optim.gradient_descent:largest_stable_rate"

# %% check="hpdl_lab.optim.gradient_descent:largest_stable_rate"

# %% [markdown]
# ## Measure <!-- 1 homework 2 -->
#
# Two percent below your limit, and two percent above it.

# %%
limit = largest_stable_rate(x)
edge = lab.landscape(gradient_step, x, y, rates=(0.98 * limit, 1.02 * limit), prediction=my_rate)
assert edge.verdicts[1.02 * limit] == "diverges" and edge.verdicts[0.98 * limit] != "diverges"
lab.reveal("the largest learning rate that still converges", limit)

# %% [markdown]
# ## Play: rate and batch <!-- 1 half day 3 -->
#
# So far each step looked at all 442 patients. **Stochastic** gradient descent (SGD) looks at a **mini-batch** of a few
# of them: the gradient is right on average, and noisy. Move the rate, then the batch. With all 442, a higher rate is
# better up to the limit. Is it with 8? Which rate comes closest to the minimum after 60 steps, and what stops it?

# %%
lab.explore("rate")

# %% [markdown]
# ## Take it home <!-- 1 homework 3 -->
#
# The same twenty steps in PyTorch. `loss.backward()` is your `gradient`, which autograd derives from the loss;
# `optimizer.step()` is your `gradient_step`. The loss after them is the lab's. First the data, as a file:

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
# Across the valley the curvature is 1.9, along it 0.1. Which of the two sets the largest learning rate, and which the
# number of steps that you need? What would you do to the data, or to the step, so that they no longer disagree?
# (Momentum, Adam and batch normalization are three answers.)
#
# ## Where to read the real code
#
# - `hpdl_lab/optim/gradient_descent.py`: the functions of this notebook; they are the solution.
# - `hpdl_lab/plots/landscape.py`: how the bowl is drawn.

# %% [markdown]
# ## Recap
#
# 1. Training repeats one step: weights minus rate times gradient.
# 2. The gradient says how fast the loss rises with each weight; here it is a mean over examples.
# 3. Too small a rate crawls; too large a rate diverges.
# 4. The largest stable rate is 2 / c, where c is the largest curvature of the loss.
# 5. The smallest curvature decides how many steps it takes: a narrow valley is slow at any rate.
#
# | term | what it means |
# |---|---|
# | loss | a number that says how bad the predictions are |
# | gradient | the derivative of the loss with respect to each weight |
# | learning rate | the factor between the gradient and the step |
# | curvature | how fast the gradient changes along a direction: the second derivative |
# | converge, diverge | to come closer to the minimum; to move farther and farther away from it |
# | full batch | all examples in every step; with a part of them it is SGD |
#
# **What you can do now:** write a training step, tell from a loss curve whether its rate is too low or too high, and
# say why.
#
# <!-- links -->
