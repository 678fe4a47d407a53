"""As right_raw_loop.py, but rank 1 does more work than the others."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

g = torch.Generator().manual_seed(42)
A = torch.randn(400, 8, generator=g)
b = A @ torch.arange(8.0) + 0.01 * torch.randn(400, generator=g)
mine = torch.arange(len(A)).chunk(size)[rank]
w = torch.zeros(8, requires_grad=True)

for step in range(30):
    if rank == 1:
        time.sleep(0.03)
    residual = A[mine] @ w - b[mine]
    loss = (residual**2).sum() / len(A)
    loss.backward()
    dist.all_reduce(w.grad, op=dist.ReduceOp.SUM)
    with torch.no_grad():
        w -= 0.2 * w.grad
        w.grad = None
    if step % 10 == 9:
        total = loss.detach().clone()
        dist.reduce(total, dst=0)
        if rank == 0:
            print("step", step, "loss", total.item())

if rank == 0:
    print("weights", [round(v, 2) for v in w.tolist()])
dist.destroy_process_group()
