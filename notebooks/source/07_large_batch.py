# %% [markdown]
# # 07 · Large batches and fewer bytes
#
# **The number to reach:** 97% test accuracy in the fewest seconds, with the batch and the ranks that you predict.
#
# <!-- tracks -->
#
# Part one: what a batch is worth, how large batches fail, and what rescues them. Part two: gradients of which fewer
# bytes travel, or which travel less often.

# %%
from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# # Part one: large batches
#
# ## The idea
#
# More ranks with the same share each make the batch larger, and the steps of an epoch fewer.
#
# ## Exercise 7.1 ★★ Linear scaling and warm-up
#
# A batch k times as large takes k times as large a rate, which is reached in small steps.
#
# ## Exercise 7.2 ★★ LARS's trust ratio
#
# Each layer gets a rate of its own.
#
# # Part two: fewer bytes
#
# ## Exercise 7.3 ★★★ Top-k with error feedback
#
# Data parallelism sends a number for every parameter in every step. Most of them are small. What if only the k largest
# travel?
#
#     grad + error     0.1  -2.0   0.3   1.0            k = 2
#     sent                  -2.0         1.0            two values and their two places
#     error            0.1    0    0.3    0             what is held back, for the next step
#
# The small ones must not be lost. What a rank has not sent, it adds to its next gradient: **error feedback**. At every
# step, over all ranks, all that was sent and all that is held back add up to all gradients. Ranks choose different
# places, so the places have to travel, too.

# %% exercise="hpdl_lab.parallel.compression:top_k_all_reduce"

# %% check="hpdl_lab.parallel.compression:top_k_all_reduce"

# %% [markdown]
# ## Exercise 7.4 ★★ Local SGD
#
# Or all numbers travel, but seldom: ranks take H steps on their own, and then average their parameters. A share of 1/H
# of the bytes is left, and of the messages, too. With H = 1 and plain SGD that is data parallelism. With a large H
# ranks drift apart, each towards what its own data want.

# %% exercise="hpdl_lab.parallel.local_sgd:local_sgd"

# %% check="hpdl_lab.parallel.local_sgd:local_sgd"

# %% [markdown]
# ## Exercise 7.5 ★ The time to 97%
#
# The steps that a batch needs, times the seconds that a step takes.
#
# ## Take it home
#
# The same in the API of PyTorch.

# %% [markdown]
# ## Question to discuss
#
# Which batch would you choose, and why?
#
# ## Where to read the real code
#
# - `hpdl_lab/optim/`: the optimizers and the schedule.

# %% [markdown]
# ## Recap
#
# 1. A larger batch takes fewer steps for the same examples.
#
# | term | what it means |
# |---|---|
# | global batch | the examples of one step, over all ranks |
#
# **What you can do now:** choose a batch and its learning rate.
#
# <!-- links -->
