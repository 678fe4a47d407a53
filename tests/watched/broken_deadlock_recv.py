"""As right_send_recv.py, but rank 1 never sends the gradient back."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

WIDTH, BATCH, EPOCHS = 24, 32, 3


def first(x, optimizer, model):
    h = model(x)
    dist.send(h.detach(), dst=1)
    gradient = torch.empty_like(h)
    dist.recv(gradient, src=1)
    optimizer.zero_grad()
    h.backward(gradient)
    optimizer.step()


def second(y, optimizer, model):
    h = torch.empty(len(y), WIDTH)
    dist.recv(h, src=0)
    h.requires_grad_()
    loss = F.cross_entropy(model(h), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(2)
    x = torch.randn(224, 8, generator=g)
    y = (x @ torch.randn(8, 4, generator=g)).argmax(1)
    if rank == 0:
        model = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.Tanh())
    else:
        model = torch.nn.Linear(WIDTH, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for epoch in range(EPOCHS):
        losses = []
        for step in range(0, len(x), BATCH):
            if rank == 0:
                first(x[step : step + BATCH], optimizer, model)
            else:
                losses.append(second(y[step : step + BATCH], optimizer, model))
        if rank == 1:
            print("epoch", epoch, "loss", round(torch.stack(losses).mean().item(), 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
