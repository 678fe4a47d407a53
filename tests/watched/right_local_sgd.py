"""Local SGD: every rank steps alone, and every 4 steps the weights are averaged."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


def average_weights(model, world):
    with torch.no_grad():
        for p in model.parameters():
            dist.all_reduce(p)
            p /= world


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(384, 10, generator=g)
    y = (x @ torch.randn(10, 3, generator=g)).argmax(1)
    x, y = x[rank::world], y[rank::world]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    step = 0
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for batch in torch.randperm(len(x), generator=g).split(16):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            step += 1
            if step % args.local_steps == 0:
                average_weights(model, world)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / (12 * world):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local-steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.3)
    main(parser.parse_args())
