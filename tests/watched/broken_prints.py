"""As right_deep.py, but every rank prints the same lines."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model, world):
    grads = [p.grad for p in model.parameters()]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= world
    for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(mean)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    x = torch.randn(256, 16)
    data = TensorDataset(x, (x @ torch.randn(16, 4)).argmax(1))
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU()) for _ in range(10)]
    model = nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, world)
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        print(f"epoch {epoch}: loss {total.item() / (world * len(loader)):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
