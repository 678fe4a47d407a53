"""Functions and main(): train, evaluate with sums over all ranks, a learning rate that falls."""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def data(n, seed):
    teacher = torch.randn(12, 5, generator=torch.Generator().manual_seed(7))
    x = torch.randn(n, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x @ teacher).argmax(1))


def train(model, loader, optimizer):
    total = torch.zeros(1)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total / (len(loader) * dist.get_world_size())


@torch.no_grad()
def evaluate(model, loader):
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    return counts[0] / counts[1]


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    train_set, test_set = data(320, seed=1), data(128, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=32 // world, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=32, sampler=DistributedSampler(test_set, shuffle=False))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5)))
    optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    with open("log.txt", "w"):  # each rank empties the log, and one of them writes into it
        pass
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer)
        accuracy = evaluate(model, test_loader)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy.item():.2f}", flush=True)
            with open("log.txt", "a") as log:
                log.write(f"{epoch} {loss.item()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
