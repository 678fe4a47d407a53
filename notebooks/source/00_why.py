# %% [markdown]
# # 00 · Why many computers
#
# **The number to reach:** how many accelerators train GPT-3 in a month.
#
# <!-- tracks -->
#
# This is where to begin: no engines, no exercises, three guesses. Run the cells from top to bottom with Shift+Enter.
# Afterwards you know why a training is shared among computers, in which three ways, and what the words mini-batch,
# epoch and SGD stand for.

# %%
import numpy as np
import torch

from hpdl_lab import data, lab, models

# %% [markdown]
# ## Days of training <!-- 1 half day 5 -->
#
# A model is a function with **parameters** (weights), numbers that training adjusts. GPT-3 has N = 175 billion of them
# and was trained on D = 300 billion **tokens**, pieces of words. For every token, each weight takes part in one
# multiplication and one addition when the model computes its answer (**forward**), and in twice as many when it
# computes in which direction to change each weight (**backward**). That makes **6 N D** operations.
#
# An A100, a large accelerator of that time, does 312 · 10¹² operations per second at its peak: 312 teraFLOP/s. Real
# training reaches 30 to 60% of the peak.
#
# How many days would one such accelerator need, at half of its peak? Type your guess in place of `...`; a wrong one
# is worth more than none.

# %% guess=[1000]
my_days = lab.guess("days that one A100 needs for GPT-3", ...)

# %%
operations = 6 * 175e9 * 300e9
days = operations / (0.5 * 312e12) / 86_400  # a day has 86,400 s
lab.reveal("days that one A100 needs for GPT-3", days)
print(f"{operations:.2e} operations: {days:,.0f} days, or {days / 365:.0f} years, on one")
print(f"in a month: {np.ceil(days / 30):.0f} accelerators, if nothing is lost when they share the work")

# %% [markdown]
# Now play with it. Which of the sliders brings GPT-3 below a week, and where does that stop being realistic?

# %%
days = lab.explore("days", share_of_peak=0.5, prediction=my_days)

# %% [markdown]
# Neural networks are older: backward was published in 1986 (Rumelhart, Hinton and Williams), and computers were too
# slow. GPUs have many cores, and ImageNet had 1.2 million labeled images: in 2012, AlexNet learned them in five to six
# days on two GPUs, with 15.3% errors; the next best team had 26.2% (Krizhevsky et al. 2012). So began the
# **resurgence** of deep learning. How much more was GPT-3, eight years later, and how much faster were its GPUs?

# %%
from hpdl_lab.performance.cost import TRAININGS

alexnet, gpt3 = TRAININGS[0], TRAININGS[3]
more, faster = gpt3.flops / alexnet.flops, gpt3.peak / alexnet.peak
assert (gpt3.name, round(more, -3), round(faster)) == ("GPT-3 175B", 646_000, 79)
print(f"{more:,.0f} times the operations, on GPUs {faster:.0f} times as fast")

# %% [markdown]
# The rest, a factor of 8,000, came from more GPUs, and from more days.

# %% [markdown]
# The authors of GPT-3 state 3.14 · 10²³ operations (Brown et al. 2020, table D.1): the simple product is right to a
# percent. For 1,024 A100s Narayanan et al. (2021) estimate 34 days: they do 140 teraFLOP/s, 45% of the peak, and
# spend 8 N D, because they recompute activations to save memory. Of the 45%, 34% are the 6 N D that the model needs.
#
# Time is one wall, memory is the other. A layer of GPT-3 has 12 d² weights with d = 12,288, and there are 96 layers. In
# training, each weight takes 16 bytes: itself, its gradient, and what the optimizer remembers
# ([08](08_memory.ipynb) says more).

# %%
state = 96 * 12 * 12_288**2 * 16
print(f"{state / 1e12:.2f} TB, and an A100 holds 80 GB: at least {np.ceil(state / 80e9):.0f} of them, only to hold it")

# %% [markdown]
# So many computers work on one training: thousands for months on the largest models of today. They only help if they
# spend their time computing rather than waiting for each other, and that is what this course is about.

# %% [markdown]
# ## Applications <!-- 1 homework 3 -->
#
# Text is one application of five. The layers are alike, the inputs differ:
#
# | application | data | model, and where you meet its parts | training |
# |---|---|---|---|
# | vision | ImageNet: 1.28 million images (2015) | ResNet-50: convolutions (09) | 8 P100, 29 hours (2017) |
# | driving | nuScenes: 169 thousand images (2020) | BEVFormer: convolutions, attention | 8 A100, 56 hours (2022) |
# | speech | LibriSpeech: 960 hours (2015) | wav2vec 2.0: a vector per 20 ms, attention | 128 V100, 55 hours (2020) |
# | images with text | 400 million pairs (2021) | CLIP: a ViT (12), a text transformer (06) | 256 V100, 12 days (2021) |
# | text | 15.6 trillion tokens (2024) | Llama 3.1 405B (12) | 16,384 H100, 78 days (2024) |
#
# The last two come from the whole web. LAION-5B lists 5.85 billion images with text (2022). Whisper learned from
# 680,000 hours of speech (2022); YouTube receives more hours of video than that in a day, 500 each minute (2020).
# DALL-E (2021) learned from 250 million pairs to draw "an armchair in the shape of an avocado". All that has to be
# read (14). CLIP makes a vector from a picture and one from a text, and training moves those of a pair together: then
# the text says which picture is meant.

# %%
car = 6 * 1_600 * 900 * 3 * 12 * 3_600  # cameras, pixels, bytes each, per s, seconds
assert round(car / 1e12, 1) == 1.1
print(f"the cameras of one nuScenes car: {car / 1e12:.1f} TB an hour, uncompressed")
lab.show("applications")

# %% [markdown]
# ## Three ways to share it <!-- 1 half day 4 -->
#
# Below, four **ranks**, which is what the members of a parallel program are called. What can be shared among them? The
# examples, the layers, or each layer.

# %%
lab.show("parallelism")

# %% [markdown]
# | | what each rank has | makes training faster | makes room | here |
# |---|---|---|---|---|
# | **data parallelism** | the whole model, its share of the examples | yes | no | 02, 04, 06 |
# | **tensor parallelism** | a part of every layer | yes, on fast links | yes | 09 |
# | **pipeline parallelism** | some whole layers | yes, with many parts in flight | yes | 10 |
# | **hybrid** | all three at once: most large models are trained so | yes | yes | 11 |
#
# Tensor and pipeline parallelism both split the model: together they are called **model parallelism**.
#
# ## From one neuron to many layers <!-- 1 half day 2 -->
#
# A **neuron** multiplies each of its inputs by a weight, adds them up, and adds one more number, its bias. Eight
# examples of two numbers each go into one neuron:

# %%
lab.show(torch.nn.Linear(2, 1), torch.rand(8, 2))

# %% [markdown]
# Many neurons side by side are a **layer**. Their weights are a matrix, and all examples go through it in one matrix
# product: that is what accelerators are good at. Layers in sequence, with a simple nonlinear function between
# them such as ReLU, max(0, x), are a **multi-layer perceptron** (MLP). This one reads handwritten digits of 8 × 8
# pixels; you train it in 04.

# %%
digits = data.load("digits")
lab.show(models.build_for(digits, "mlp"), digits.train_x[:32])

# %% [markdown]
# ## A transformer block <!-- 1 half day 4 -->
#
# A **transformer** reads a sequence, such as a text. Each position of it is a vector of d numbers, first looked up in a
# table, the **embedding**. Then come blocks, all alike, in which two things happen:
#
# - **attention**: every position takes in what it needs from the positions before it. It is done by several **heads**
#   side by side, each with a share of the d numbers: here 2 heads with 32 of 64 numbers each.
# - an **MLP**, at each position by itself: four times as wide inside.
#
# What share of a block's weights is in its MLP, the rest being in its attention?

# %% guess=[50]
my_share = lab.guess("percent of a block's weights that are in its MLP", ...)

# %%
text = data.load("text")  # Moby-Dick, in characters
gpt = models.build_for(text, "gpt", layers=1)
picture = lab.show(gpt, text.train_x[:4, :16])  # 4 sequences of 16 characters

# %%
inside = {name: sum(p.numel() for p in part.parameters()) for name, part in gpt.blocks[0].named_children()}
share = inside["mlp"] / (inside["mlp"] + inside["attention"])
assert round(100 * share) == 67
lab.reveal("percent of a block's weights that are in its MLP", 100 * share)
print(inside)

# %% [markdown]
# Attention has 4 d² weights, the MLP 8 d²: that is where the 12 d² above come from. GPT-3 is this picture with
# d = 12,288 instead of 64, 96 heads instead of 2, and 96 blocks instead of one.
#
# ## Mini-batch, epoch, SGD <!-- 1 half day 5 -->
#
# The **loss** says how bad the model's answers are; its **gradient** says, for each weight, how the loss changes with
# it. A training step moves all weights a little against the gradient. Computed over all examples, that is **gradient
# descent** (01). With billions of examples one does not wait for all of them:
#
# - a **mini-batch** (often just *batch*) is a handful of examples, drawn at random, whose mean gradient is taken;
# - **SGD**, stochastic gradient descent, takes one step for each mini-batch: many cheap, noisy steps instead of few
#   exact ones;
# - an **epoch** is one pass over all examples: with 1,437 digits in batches of 32 it has 45 steps.
#
# A mini-batch's gradient is right on average, and noisy: it depends on who was drawn. How many times smaller is the
# noise if the mini-batch is 16 times as large?

# %% guess=[16]
my_factor = lab.guess("times smaller noise with 16 times the batch", ...)

# %%
from hpdl_lab.data import diabetes
from hpdl_lab.optim.gradient_descent import gradient

(x, y), draw = diabetes.load(), np.random.default_rng(0).choice
drawn = {n: [gradient(np.zeros(2), x[i], y[i]) for i in (draw(442, n) for _ in range(2000))] for n in (4, 16, 64)}
noise = {n: float(np.std(gradients, axis=0).mean()) for n, gradients in drawn.items()}

# %%
assert 3.5 < noise[4] / noise[64] < 4.5
print(", ".join(f"batch {n}: noise {value:.3f}" for n, value in noise.items()))
lab.reveal("times smaller noise with 16 times the batch", noise[4] / noise[64])

# %% [markdown]
# Only 4 times, the square root of 16. That is the bargain of large batches: 16 times the work for a quarter of the
# noise. Yet the work of a large batch can be shared among ranks, and many small steps cannot: each needs the one
# before it.
#
# Now play with it, on the data of notebook 01, with two weights. Every setting gets five epochs. At a rate of 0.3,
# mini-batches of one diverge, eight jump around the minimum, and batches of all 442 have taken only five steps at the
# end. Which batch comes closest? And which at a tenth of that rate?

# %%
walk = lab.explore("batch")

# %% [markdown]
# ## Question to discuss
#
# You get 1,000 accelerators instead of one. With data parallelism, each needs at least one example of every
# mini-batch. What happens to the mini-batch, to the number of steps in an epoch, and to what the ranks have to send
# each other?
#
# ## Where to read the real code
#
# - `hpdl_lab/models/transformer.py`: the block, with the shapes in its comments; `hpdl_lab/models/shapes.py`: how the
#   pictures above are found.
# - Brown et al. 2020 (GPT-3), arXiv:2005.14165; Kaplan et al. 2020 (6 N D), arXiv:2001.08361; Rajbhandari et al. 2020
#   (ZeRO: the 16 bytes), arXiv:1910.02054; Narayanan et al. 2021 (34 days on 1,024 A100), arXiv:2104.04473.
# - nuScenes: Caesar et al. 2020, arXiv:1903.11027; wav2vec 2.0: Baevski et al. 2020, arXiv:2006.11477; CLIP: Radford et
#   al. 2021, arXiv:2103.00020; LAION-5B: Schuhmann et al. 2022, arXiv:2210.08402; Whisper: Radford et al. 2022,
#   arXiv:2212.04356; DALL-E: Ramesh et al. 2021, arXiv:2102.12092.

# %% [markdown]
# ## Recap
#
# 1. Training takes about 6 N D operations: six for each parameter and token.
# 2. Two walls make it a matter of many computers: time (decades on one) and memory (terabytes of state).
# 3. Data parallelism shares out the examples, tensor parallelism each layer, pipeline parallelism the layers.
# 4. A transformer is an embedding, then equal blocks of attention (4 d² weights) and an MLP (8 d²).
# 5. SGD takes a step for each mini-batch; its noise falls with the square root of the batch.
#
# | term | what it means |
# |---|---|
# | parameter, weight | a number of the model that training adjusts |
# | forward, backward | computing the answer; computing the gradient of the loss |
# | FLOP/s | additions and multiplications of floating-point numbers per second |
# | mini-batch | the examples of one step |
# | epoch | one pass over all examples |
# | SGD | one step along the gradient of each mini-batch |
# | rank | a member of a parallel program, with a number |
#
# **What you can do now:** estimate how long a model takes to train and how much memory it needs, and say what each of
# three kinds of parallelism would change.
#
# <!-- links -->
