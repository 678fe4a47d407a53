"""What decides the course of a training, apart from the number of ranks, which must not."""

import math
import os
from dataclasses import dataclass, fields
from numbers import Integral, Real

import torch

OPTIMIZERS = ("sgd", "adamw")
SEEDS = 1 << 40  # times the million that data/loading.py multiplies a seed by: what torch can take
TYPES = {  # of an option: what it may be, and the same in words
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str | os.PathLike, "a text or the name of a file"),
    bool: (bool, "True or False"),
}


@dataclass(frozen=True)
class Recipe:
    """Steps, batch, optimizer, and what is kept of the run.

    checkpoint: file that rank 0 writes after every `checkpoint_every` steps; resume: go on from that file. The run that
    goes on may have another number of ranks; see parallel/checkpoint.py.
    Raises:  TypeError and ValueError that name the option which cannot be, and what is needed.
    """

    steps: int = 300
    batch: int = 128  # examples per step over all ranks
    lr: float = 0.2
    momentum: float = 0.9  # of SGD; AdamW has its usual ones
    seed: int = 0  # of the shuffling
    optimizer: str = "sgd"  # or "adamw", which transformers are trained with
    micro_batches: int = 1  # parts of a shard whose gradients are added up before they travel
    checkpoint: str = ""
    checkpoint_every: int = 0  # steps; 0: never
    resume: bool = False

    def __post_init__(self):
        for option in fields(self):
            value, (types, words) = getattr(self, option.name), TYPES[option.type]
            if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
                raise TypeError(f"{option.name}={value!r}: {words} is needed")
            if types in (Integral, Real):  # NumPy's numbers are no plain ones in a checkpoint
                object.__setattr__(self, option.name, option.type(value))
        if not 0 <= self.lr < math.inf or not 0 <= self.momentum < math.inf:
            raise ValueError(f"lr={self.lr}, momentum={self.momentum}: finite numbers of at least 0 are needed")
        if abs(self.seed) >= SEEDS:
            raise ValueError(f"seed={self.seed}: a number between -{SEEDS:,} and {SEEDS:,} is needed")
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"training needs at least 1 step of 1 example, got {self.steps} steps of {self.batch}")
        if self.micro_batches < 1:
            raise ValueError(f"a shard cannot be cut into {self.micro_batches} micro-batches: at least 1 is needed")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}: one of {', '.join(OPTIMIZERS)} is needed")
        if self.checkpoint_every < 0 or ((self.checkpoint_every or self.resume) and not self.checkpoint):
            raise ValueError(
                f"checkpoint_every={self.checkpoint_every}, resume={self.resume}: "
                "both need checkpoint, the name of a file, and a number of steps of at least 0"
            )

    def optimizer_for(self, model):
        """The torch optimizer of all parameters of `model`. Raises ValueError where none of them can be trained."""
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(f"{type(model).__name__} has no parameter that needs a gradient: nothing to train")
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=self.lr)
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)

    def facts(self):
        """What of it a step depends on, so that a checkpoint and a run that goes on from it must have it in common.

        The rest, which is of the data set, the model and the reader, comes from checkpoint.facts_of and training.train.
        """
        names = ("batch", "lr", "momentum", "seed", "optimizer", "micro_batches")
        return {name: getattr(self, name) for name in names}
