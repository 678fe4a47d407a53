# %% [markdown]
# # 00 · Why many computers
#
# **The number to reach:** how many A100 GPUs train GPT-3 in a month.
#
# <!-- tracks -->
#
# Run the cells from top to bottom with Shift+Enter. Afterwards you know why and how training is shared among computers,
# and what mini-batch, epoch and SGD mean.
#
# In the table above, the first column is the minutes of the whole notebook. The next three columns are shorter courses.
# A heading that ends in *full day* or *homework* begins a section that shorter courses skip.

# %%
import numpy as np
import torch

from hpdl_lab import data, lab, models

# %% [markdown]
# ## Days of training <!-- 1 half day 5 -->
#
# A model is a function with **parameters** (weights): numbers that training adjusts. GPT-3 has N = 175 billion
# parameters. It was trained on D = 300 billion **tokens**, pieces of words.
#
# For every token, training computes the model's answer (**forward**): one multiplication and one addition per weight.
# Then training computes how to change each weight (**backward**), with twice as many operations. The sum is **6 N D**
# operations.
#
# An **accelerator** is a processor for many operations at once, mostly a GPU. The peak of an A100, a large GPU of that
# time, is 312 tera**FLOP/s**: 312 · 10¹² floating-point operations per second. Real training reaches 30 to 60% of the
# peak.
#
# How many days would one A100 need, at half of its peak? Type your guess in place of `...`. A wrong guess is worth more
# than none.

# %% guess=[1000]
my_days = lab.guess("days that one A100 needs for GPT-3", ...)

# %%
operations = 6 * 175e9 * 300e9
days = operations / (0.5 * 312e12) / 86_400  # a day has 86,400 s
lab.reveal("days that one A100 needs for GPT-3", days)
print(f"{operations:.2e} operations: {days:,.0f} days, or {days / 365:.0f} years, on one")
print(f"in a month: {np.ceil(days / 30):.0f} accelerators, if nothing is lost when they share the work")

# %% [markdown]
# Move the sliders until GPT-3 takes less than a week. Which of your settings are realistic?

# %%
days = lab.explore("days", share_of_peak=0.5, prediction=my_days)

# %% [markdown]
# The method for the backward pass was published in 1986 (Rumelhart, Hinton and Williams), but computers were too slow
# for large models. By 2012, GPUs had many cores, and the data set ImageNet had 1.2 million labeled images. The model
# AlexNet was trained on ImageNet in five to six days, on two GPUs. AlexNet made 15.3% errors; the next best team made
# 26.2% (Krizhevsky et al. 2012). AlexNet made models with many layers popular.
#
# GPT-3 came eight years later. The next cell compares GPT-3 with AlexNet.

# %%
from hpdl_lab.performance.cost import TRAININGS

alexnet, gpt3 = TRAININGS[0], TRAININGS[3]
more, faster = gpt3.flops / alexnet.flops, gpt3.peak / alexnet.peak
assert (gpt3.name, round(more, -3), round(faster)) == ("GPT-3 175B", 646_000, 79)
print(f"{more:,.0f} times the operations, on GPUs {faster:.0f} times as fast")

# %% [markdown]
# Faster GPUs explain a factor of 79. The remaining factor of 8,000 came from more GPUs and more days.

# %% [markdown]
# The authors of GPT-3 state 3.14 · 10²³ operations (Brown et al. 2020, table D.1); 6 N D differs by less than 1%.
#
# Narayanan et al. (2021) estimate 34 days on 1,024 A100s. Each A100 does 140 teraFLOP/s, 45% of its peak. But their
# training computes forward twice to save memory ([08](08_memory.ipynb)), so it takes 8 N D operations. Only 6 N D are
# necessary. These necessary operations reach 6/8 of 45%, or 34% of the peak.
#
# The second limit is memory. GPT-3 has 96 equal groups of layers, each with 12 · 12,288² weights (see "A transformer
# block"). In training, each weight takes 16 bytes: for the weight itself and for numbers that training needs (08).

# %%
state = 96 * 12 * 12_288**2 * 16
print(f"{state / 1e12:.2f} TB, and an A100 holds 80 GB: at least {np.ceil(state / 80e9):.0f} of them, only to hold it")

# %% [markdown]
# Therefore many computers share one training: for the largest models, thousands for months. This course
# shows how to keep computers from waiting for each other.

# %% [markdown]
# ## Applications <!-- 1 homework 3 -->
#
# Here are five applications with similar layers and different inputs. A number such as (09) names a notebook.
#
# | application | data | model, and the notebooks of its parts | training |
# |---|---|---|---|
# | vision | ImageNet: 1.28 million images (2015) | ResNet-50: convolutions (09) | 8 P100, 29 hours (2017) |
# | driving | nuScenes: 169 thousand images (2020) | BEVFormer: convolutions, attention | 8 A100, 56 hours (2022) |
# | speech | LibriSpeech: 960 hours (2015) | wav2vec 2.0: a vector per 20 ms, attention | 128 V100, 55 hours (2020) |
# | images, text | 400 million pairs (2021) | CLIP: transformers for images (12), text (06) | 256 V100, 12 days (2021) |
# | text | 15.6 trillion tokens (2024) | Llama 3.1 405B (12) | 16,384 H100, 78 days (2024) |
#
# In the last two rows, the data come from the whole web. LAION-5B lists 5.85 billion images with text (2022). Whisper
# was trained on 680,000 hours of speech (2022). YouTube receives 500 hours of video per minute (2020). DALL-E (2021)
# learned from 250 million pairs to draw "an armchair in the shape of an avocado".
#
# CLIP makes one vector from an image and one vector from its text. Training moves the two vectors closer to each other.

# %%
car = 6 * 1_600 * 900 * 3 * 12 * 3_600  # cameras, pixels, bytes each, per s, seconds
assert round(car / 1e12, 1) == 1.1
print(f"the cameras of one nuScenes car: {car / 1e12:.1f} TB an hour, uncompressed")
lab.show("applications")

# %% [markdown]
# ## Three ways to share it <!-- 1 half day 4 -->
#
# The members of a parallel program are called **ranks**. Here four ranks train a model with four layers in sequence.
# What does each rank hold, and what do the ranks send?

# %%
lab.show("parallelism")

# %% [markdown]
# | | what each rank has | makes training faster | makes room in memory | notebooks |
# |---|---|---|---|---|
# | **data parallelism** | the whole model, its share of the examples | yes | no | 02, 04, 06 |
# | **tensor parallelism** | a part of every layer | yes, if messages between ranks are fast | yes | 09 |
# | **pipeline parallelism** | some whole layers | yes, if the examples are passed on in small groups | yes | 10 |
# | **hybrid** | all three at once, as for most large models | yes | yes | 11 |
#
# Tensor and pipeline parallelism are **model parallelism**: they split the model.
#
# ## From one neuron to many layers <!-- 1 full day 2 -->
#
# A **neuron** multiplies each input by a weight. It adds up the products and one more number, its bias. Eight
# examples of two numbers each go into one neuron:

# %%
lab.show(torch.nn.Linear(2, 1), torch.rand(8, 2))

# %% [markdown]
# A **layer** is many neurons side by side. The weights are a matrix, so all examples pass through the layer in one
# matrix product. Accelerators are built for matrix products. A **multi-layer perceptron** (MLP) is layers in sequence,
# with a simple nonlinear function between layers, such as ReLU, max(0, x). The MLP below reads handwritten digits of
# 8 × 8 pixels. You train it in 04.

# %%
digits = data.load("digits")
lab.show(models.build_for(digits, "mlp"), digits.train_x[:32])

# %% [markdown]
# ## A transformer block <!-- 1 half day 4 -->
#
# A **transformer** reads a sequence, for example a text. A table, the **embedding**, gives a vector of d numbers for
# each position. Equal **blocks** follow, each with two parts:
#
# - **Attention**: every position takes in what it needs from earlier positions. Several **heads** do this side by
#   side, each with a share of the d numbers: here 2 heads, 32 numbers each.
# - An MLP (multi-layer perceptron): two layers of neurons, for each position separately. Between these layers, the
#   vector has 4 d numbers.
#
# What percentage of a block's weights is in its MLP?

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
# Attention has 4 d² weights and the MLP has 8 d²: together 12 d². GPT-3 looks like this picture, but d is 12,288
# instead of 64. It has 96 heads instead of 2, and 96 blocks instead of one.
#
# ## Mini-batch, epoch, SGD <!-- 1 half day 5 -->
#
# The loss says how bad the model's answers are. The gradient of the loss says, for each weight, how the loss changes if
# the weight grows. A training step moves all weights a little against the gradient. With the gradient over all
# examples, the method is gradient descent (01). With billions of examples, such a step takes too long:
#
# - A **mini-batch** (or *batch*) is a few examples, drawn at random; a step uses their mean gradient.
# - **SGD**, stochastic gradient descent, takes one step for each mini-batch: many cheap, noisy steps instead of few
#   exact ones.
# - An **epoch** is one pass over all examples: with 1,437 digits in batches of 32, an epoch has 45 steps.
#
# A mini-batch's gradient is right on average, but noisy: it depends on which examples were drawn. How many times
# smaller is the noise if the mini-batch is 16 times as large?

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
# The noise is only 4 times smaller, the square root of 16, for 16 times the work. But ranks can share the work of a
# large batch. They cannot share many small steps: each step needs the step before it.
#
# Play with the batch size, on the data of 01. Every setting gets five epochs. The rate says how far a step goes. At a
# rate of 0.3, training with batches of one example diverges: the loss grows. With batches of eight, the weights jump
# around the minimum. Batches of all 442 make only five steps. Which batch size comes closest at a rate of 0.3, and
# which at 0.03?

# %%
walk = lab.explore("batch")

# %% [markdown]
# ## Question to discuss
#
# You get 1,000 accelerators instead of one. With data parallelism, each needs at least one example of every mini-batch.
# What happens to the mini-batch, to the number of steps per epoch, and to the messages between ranks?
#
# ## Where to read the real code
#
# - `hpdl_lab/models/transformer.py`: the block; `hpdl_lab/models/shapes.py`: the shapes in the pictures.
# - Brown et al. 2020 (GPT-3), arXiv:2005.14165; Kaplan et al. 2020 (6 N D), arXiv:2001.08361; Rajbhandari et al. 2020
#   (ZeRO: the 16 bytes), arXiv:1910.02054; Narayanan et al. 2021 (34 days), arXiv:2104.04473.
# - nuScenes: Caesar et al. 2020, arXiv:1903.11027; wav2vec 2.0: Baevski et al. 2020, arXiv:2006.11477; CLIP: Radford et
#   al. 2021, arXiv:2103.00020; LAION-5B: Schuhmann et al. 2022, arXiv:2210.08402; Whisper: Radford et al. 2022,
#   arXiv:2212.04356; DALL-E: Ramesh et al. 2021, arXiv:2102.12092.

# %% [markdown]
# ## Recap
#
# 1. Training takes about 6 N D operations: six for each parameter and token.
# 2. Training needs many computers because of time (decades on one) and memory (terabytes).
# 3. Data parallelism shares the examples, tensor parallelism each layer, pipeline parallelism the list of layers.
# 4. A transformer is an embedding, then equal blocks of attention (4 d² weights) and an MLP (8 d²).
# 5. SGD takes a step for each mini-batch; the noise falls with the square root of the batch size.
#
# <!-- terms -->
#
# **What you can do now:** estimate the time and the memory that a training needs. Say what data, tensor and pipeline
# parallelism would change.
#
# <!-- links -->
