"""Train a tiny GPT on Moby-Dick, data parallel: torchrun --standalone --nproc-per-node 2 train_ddp.py"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpdl_lab import data, models
from hpdl_lab.models.transformer import separate_qkv

BATCH = 32

dist.init_process_group("gloo")  # on GPUs: "nccl", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
rank, ranks = dist.get_rank(), dist.get_world_size()

text = data.load("text")
train = TensorDataset(text.train_x[:97], text.train_y[:97])
sampler = DistributedSampler(train)  # every rank its own examples
loader = DataLoader(train, BATCH // ranks, sampler=sampler, drop_last=True)

model = models.build_for(text, "gpt", dtype="float64")
model = separate_qkv(model)  # q, k and v are three layers, as in LLaMA
model = DistributedDataParallel(model)  # rank 0's weights for all; averages gradients in backward
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_of(x, y):
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)  # another order in every epoch
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)  # on every rank, or rank 0 waits forever
        if rank == 0:
            print(f"step {step} loss {mean.item():.12f}")
        step += 1

with torch.no_grad():
    loss = loss_of(text.test_x[:32], text.test_y[:32])
if rank == 0:
    print(f"test loss {loss.item():.12f}")
    torch.save(model.module.state_dict(), "gpt.pt")
dist.destroy_process_group()
