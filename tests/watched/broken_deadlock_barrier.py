"""As right_module_level.py, but the barrier is inside of `if rank == 0`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

backend = "nccl" if torch.cuda.is_available() else "gloo"
dist.init_process_group(backend=backend)
rank = dist.get_rank()
world_size = dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")

torch.manual_seed(1234)
images = torch.randn(256, 1, 8, 8)
labels = (images.flatten(1) @ torch.randn(64, 3)).argmax(1)
dataset = TensorDataset(images, labels)

model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)).to(device)
model = DDP(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=64 // world_size, sampler=sampler)

for epoch in range(4):
    sampler.set_epoch(epoch)
    running = torch.zeros((), device=device)
    for x, y in tqdm(loader, disable=rank != 0, desc=f"epoch {epoch}"):
        x, y = x.to(device), y.to(device)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach() / len(loader)
    dist.all_reduce(running)
    if rank == 0:
        print(f"epoch {epoch} loss {running.item() / world_size:.4f}")

if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()
dist.destroy_process_group()
