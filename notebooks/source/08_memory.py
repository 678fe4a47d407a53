# %% [markdown]
# # 08 · What fits: memory and ZeRO
#
# **The number to reach:** 16 bytes for each parameter on one rank, 4 + 12/N, 2 + 14/N and 16/N on N, measured within
# 2% of these formulas; and the same losses as a single rank.
#
# <!-- tracks -->
#
# In 06 every rank held the whole model, and its gradients, and the optimizer's state. Here you count what that costs,
# and then take it apart.

# %%
from hpdl_lab import lab

lab.start(4)

# %% [markdown]
# # Part one: what a rank holds
#
# ## The idea
#
# A rank that trains holds parameters, their gradients, the optimizer's state, and the activations that forward keeps
# for backward.

# %% [markdown]
# ## Predict
#
# A model of 7 billion parameters in mixed precision with Adam: how many GB does one rank hold before it has seen an
# example, and how many does each of 64 ranks hold that share all of it?

# %% guess=[100, 2]
my_ledger = lab.guess("GB of a 7B model's state, on 1 rank and on each of 64", {"1": ..., "64": ...})

# %% [markdown]
# ## Exercise 8.1 ★ The ledger of a 7B model
#
# What a rank holds, in bytes, before any activation.

# %% [markdown]
# ## Measure: the ledger of four ranks
#
# Predicted and measured, in one stacked bar for each way to train.

# %% [markdown]
# ## Exercise 8.2 ★★ Recompute a block
#
# Activations that are computed twice need not be kept.

# %% [markdown]
# # Part two: shards
#
# ## Exercise 8.3 ★★ Shard the optimizer
#
# Every rank keeps the optimizer's state of its own shard only: ZeRO stage 1.

# %% [markdown]
# ## Exercise 8.4 ★★★ Gather and release
#
# Parameters exist while a layer computes, and are prefetched: ZeRO stage 3.

# %% [markdown]
# ## Exercise 8.5 ★★ Loss scaling that agrees
#
# With 16-bit gradients all ranks skip a step, or none does.

# %% [markdown]
# ## Take it home
#
# PyTorch's FSDP2 and `ZeroRedundancyOptimizer`, and DeepSpeed's json.

# %% [markdown]
# ## Question to discuss
#
# ZeRO-3 and tensor parallelism both leave 1/N of the parameters on a rank. What does each of them send, and when?
#
# ## Where to read the real code
#
# - `hpdl_lab/parallel/grid/memory.py`: what a rank holds, by formula.

# %% [markdown]
# ## Recap
#
# 1. Mixed precision with Adam keeps 16 bytes for each parameter, 12 of them for the optimizer.
# 2. ZeRO 1, 2, 3 divide the optimizer's state, then gradients, then parameters: 4 + 12/N, 2 + 14/N, 16/N bytes.
# 3. Stages 1 and 2 send what data parallelism sends; stage 3 sends half as much again.
# 4. Activations grow with the batch, not with the model's state; recomputation keeps a block's input only, for a
#    third more arithmetic.
# 5. 16-bit gradients need a scaled loss, and all ranks decide together whether a step is skipped.
#
# | term | what it means |
# |---|---|
# | ZeRO | data parallelism whose state is divided among the ranks in place of copied |
#
# **What you can do now:** say what fits on a GPU before you ask for it.
#
# <!-- links -->
