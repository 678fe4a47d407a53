"""A trainer class that goes on from its snapshot, as in the series on DDP of PyTorch."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, path):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.model, self.train_data, self.optimizer = model, train_data, optimizer
        self.save_every, self.path, self.first = save_every, path, 0
        if os.path.exists(path):
            snapshot = torch.load(path)
            self.model.load_state_dict(snapshot["model"])
            self.first = snapshot["epoch"] + 1
        self.model = DDP(self.model)

    def run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        print(f"[rank {self.rank}] epoch {epoch} | steps {len(self.train_data)}")
        for x, y in self.train_data:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def train(self, epochs):
        for epoch in range(self.first, epochs):
            self.run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, self.path)


def main(epochs, save_every, batch_size):
    init_process_group("gloo")
    random = torch.Generator().manual_seed(0)
    x = torch.randn(256, 10, generator=random)
    dataset = TensorDataset(x, (x @ torch.randn(10, 4, generator=random)).argmax(1))
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    loader = DataLoader(dataset, batch_size // int(os.environ["WORLD_SIZE"]), sampler=DistributedSampler(dataset))
    trainer = Trainer(model, loader, torch.optim.Adam(model.parameters(), 1e-2), save_every, "snapshot.pt")
    trainer.train(epochs)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    main(args.epochs, args.save_every, args.batch_size)
