"""accelerate: prepare() makes DDP and shards the loader, gather_for_metrics() collects what all ranks predict."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    x = torch.randn(320, 10)
    y = (x @ torch.randn(10, 3)).argmax(1)
    train, test = TensorDataset(x[:256], y[:256]), TensorDataset(x[256:], y[256:])
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = 32 // accelerator.num_processes
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch, shuffle=True), DataLoader(test, batch)
    )
    for epoch in range(3):
        model.train()
        losses = []
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        model.eval()
        right = []
        for inputs, targets in test_loader:
            with torch.no_grad():
                found = model(inputs).argmax(1)
            found, targets = accelerator.gather_for_metrics((found, targets))
            right.append(found == targets)
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
        accuracy = torch.cat(right).float().mean()
        accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}, accuracy {accuracy.item():.2f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "accelerate.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
