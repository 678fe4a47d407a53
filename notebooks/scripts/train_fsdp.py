"""Train a tiny GPT on Moby-Dick by FSDP2: torchrun --standalone --nproc-per-node 2 train_fsdp.py"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpdl_lab import data, models

BATCH, MICRO = 32, 4  # examples of a step on all ranks, and of each forward on one
CLIP = 1.0  # the largest norm of a step's gradient

dist.init_process_group("gloo")  # on GPUs: "nccl", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
rank, ranks = dist.get_rank(), dist.get_world_size()

text = data.load("text")
train = TensorDataset(text.train_x[:97], text.train_y[:97])
sampler = DistributedSampler(train)  # every rank its own examples
loader = DataLoader(train, BATCH // ranks, sampler=sampler, drop_last=True)

model = models.build_for(text, "gpt", dtype="float64")
for block in model.blocks:
    fully_shard(block)  # one block is gathered at a time
fully_shard(model)  # and what is left: embeddings, norm, head
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # of the shards


def loss_of(x, y):
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)  # another order in every epoch
    for x, y in loader:
        optimizer.zero_grad()
        micro_batches = list(zip(x.split(MICRO), y.split(MICRO), strict=True))
        mean = torch.zeros((), dtype=torch.float64)
        for i, (x_i, y_i) in enumerate(micro_batches):
            model.set_requires_gradient_sync(i == len(micro_batches) - 1)  # one reduce-scatter in a step
            loss = loss_of(x_i, y_i) / len(micro_batches)
            loss.backward()
            mean += loss.detach() / ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # the norm over all shards
        optimizer.step()
        dist.all_reduce(mean)  # on every rank, or rank 0 waits forever
        if rank == 0:
            print(f"step {step} loss {mean.item():.12f}")
        step += 1

with torch.no_grad():
    loss = loss_of(text.test_x[:32], text.test_y[:32])  # on every rank: it gathers
if rank == 0:
    print(f"test loss {loss.item():.12f}")
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="checkpoint")  # each rank its own shards
dist.destroy_process_group()
