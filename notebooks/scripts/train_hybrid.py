"""Train a tiny GPT on Moby-Dick on a mesh of dp x tp: torchrun --standalone --nproc-per-node 4 train_hybrid.py"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpdl_lab import data, models
from hpdl_lab.models.transformer import separate_qkv

BATCH = 32

dist.init_process_group("gloo")  # on GPUs: "nccl", and a mesh of "cuda"
rank, tp = dist.get_rank(), 2
mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
dp = mesh["dp"]

text = data.load("text")
train = TensorDataset(text.train_x[:97], text.train_y[:97])
sampler = DistributedSampler(train, dp.size(), dp.get_local_rank())  # the ranks of a tp group see the same
loader = DataLoader(train, BATCH // dp.size(), sampler=sampler, drop_last=True)

model = models.build_for(text, "gpt", dtype="float64")
model = separate_qkv(model)  # q, k and v are three layers, as in LLaMA
plan = {f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"}
plan |= {"blocks.*.attention.out": RowwiseParallel()}
plan |= {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()}
parallelize_module(model, mesh["tp"], plan)
fully_shard(model, mesh=dp)  # averages gradients over dp, and shards what is left
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
        mean = loss.detach() / dp.size()
        dist.all_reduce(mean, group=dp.get_group())  # on every rank
        if rank == 0:
            print(f"step {step} loss {mean.item():.12f}")
        step += 1

with torch.no_grad():
    loss = loss_of(text.test_x[:32], text.test_y[:32])  # on every rank: there are sums in it
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # gathers, so on every rank
if rank == 0:
    print(f"test loss {loss.item():.12f}")
    torch.save(state, "gpt.pt")
dist.destroy_process_group()
