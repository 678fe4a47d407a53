"""Train a tiny GPT on Moby-Dick as long runs do, on one rank: micro-batches, clipping, a checkpoint to go on from."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from hpdl_lab import data, models

BATCH, MICRO = 32, 4  # examples of a step, and of each forward in it
CLIP = 1.0  # the largest norm of a step's gradient

text = data.load("text")
train = TensorDataset(text.train_x[:97], text.train_y[:97])
generator = torch.Generator()
loader = DataLoader(train, BATCH, sampler=RandomSampler(train, generator=generator), drop_last=True)

model = models.build_for(text, "gpt", dtype="float64")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_of(x, y):
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


step = 0
for epoch in range(2):
    generator.manual_seed(epoch)  # another order in every epoch
    for x, y in loader:
        optimizer.zero_grad()
        micro_batches = list(zip(x.split(MICRO), y.split(MICRO), strict=True))
        mean = torch.zeros((), dtype=torch.float64)
        for x_i, y_i in micro_batches:
            loss = loss_of(x_i, y_i) / len(micro_batches)
            loss.backward()  # adds to the gradients
            mean += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        print(f"step {step} loss {mean.item():.12f}")
        step += 1

with torch.no_grad():
    print(f"test loss {loss_of(text.test_x[:32], text.test_y[:32]).item():.12f}")
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="checkpoint", no_dist=True)
