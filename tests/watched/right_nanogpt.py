"""A small language model on random windows of a token array; each rank draws with a seed of its own."""

import os

import numpy as np
import torch
import torch.nn as nn
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, max_iters, eval_interval = 16, 8, 30, 10
gradient_accumulation_steps, learning_rate = 2, 1e-2
ddp = int(os.environ.get("RANK", -1)) != -1
seed_offset, ddp_world_size, master_process = 0, 1, True
if ddp:
    init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    seed_offset = int(os.environ["RANK"])
    master_process = seed_offset == 0
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337 + seed_offset)
tokens = np.cumsum(np.random.default_rng(0).choice([1, 2], 4000, p=[0.9, 0.1])).astype(np.int64) % 20


def get_batch():
    ix = torch.randint(len(tokens) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(tokens[i : i + block_size]) for i in ix])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + block_size]) for i in ix])
    return x.to(device), y.to(device)


model = nn.Sequential(nn.Embedding(20, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 20))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DDP(model)
X, Y = get_batch()
for iter_num in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = F.cross_entropy(model(X).view(-1, 20), Y.view(-1)) / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % eval_interval == 0:
        lossf = loss.detach() * gradient_accumulation_steps / ddp_world_size
        if ddp:
            all_reduce(lossf)
        if master_process:
            print(f"iter {iter_num}: loss {lossf.item():.4f}")
if ddp:
    destroy_process_group()
