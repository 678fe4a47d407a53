"""The league of this machine: the small GPT learns Moby-Dick until its loss on a hidden part of the text is 2.0."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch

from .. import models, schedules
from ..data import text
from ..data.dataset import Dataset
from ..parallel.compression import Cast, Compressor, DataParallelCompressed, PowerSGD, TopK
from ..parallel.data_parallel import DataParallelOverlapped, Strategy
from ..parallel.grid.machine import MACHINES, grid_of
from ..parallel.grid.measure import spec_of
from ..parallel.grid.model import Prediction, predict_step
from ..parallel.training import LAYERWISE, OPTIMIZERS, Recipe
from .plan import Disqualified, require_one_of, require_positive

TARGET = 2.0  # nats per character
BLOCK = 64  # characters of a window
HIDDEN = 256  # windows
WINDOWS = 16_750  # of the training text, an epoch
MOST_STEPS, MOST_EPOCHS, MOST_RANKS = 5_000, 10, 16  # so that a race of a class has an end
PRECISIONS = {"float32": None, "bfloat16": "bfloat16"}
COMPRESSIONS: dict[str, Compressor | None] = {
    "none": None,
    "bfloat16": Cast("bfloat16"),
    "top-k": TopK(),
    "powersgd": PowerSGD(2),
}


@dataclass(frozen=True)
class HerePlan:
    """A plan for this machine.

    dp, pp, tp: the grid; micro_batches, schedule: of its pipeline; bucket_bytes: of the buckets that data parallelism
    sends during backward; precision: "float32" or "bfloat16"; compression: "none", "bfloat16", "top-k", "powersgd".
    optimizer: "sgd", "adamw", "lars", "lamb"; batch: windows of 64 characters in a step; learning_rate, steps: of the
    training; expected_s: the seconds that you expect for all steps.
    Raises:  Disqualified for a value that is not allowed.
    """

    dp: int
    batch: int
    learning_rate: float
    steps: int
    expected_s: float
    pp: int = 1
    tp: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    bucket_bytes: int = 25 << 20
    precision: str = "float32"
    compression: str = "none"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        require_positive(dp=self.dp, pp=self.pp, tp=self.tp, micro_batches=self.micro_batches, batch=self.batch)
        require_positive(learning_rate=self.learning_rate, steps=self.steps, expected_s=self.expected_s)
        require_positive(bucket_bytes=self.bucket_bytes)
        require_one_of("schedule", self.schedule, schedules.CATALOG)
        require_one_of("precision", self.precision, PRECISIONS)
        require_one_of("compression", self.compression, COMPRESSIONS)
        require_one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.steps > MOST_STEPS or self.steps * self.batch > MOST_EPOCHS * WINDOWS or self.ranks > MOST_RANKS:
            most = f"{MOST_STEPS:,} steps, {MOST_EPOCHS} epochs of {WINDOWS:,} windows, and {MOST_RANKS} ranks"
            raise Disqualified(f"a plan for this machine has at most {most}")
        if self.batch > WINDOWS:
            raise Disqualified(f"batch = {self.batch:,}: the text has {WINDOWS:,} windows")
        if self.optimizer in LAYERWISE and self.tp > 1:
            raise Disqualified(f"{self.optimizer} takes the length of whole tensors, and tp={self.tp} cuts them")
        special = (self.precision != "float32") + (self.compression != "none")
        if special == 2 or (special and self.on_mesh):
            raise Disqualified("precision and compression need data parallelism alone, and only one of both")

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def on_mesh(self) -> bool:
        """True if the model itself is distributed, and not only the examples."""
        return self.pp * self.tp > 1

    @property
    def strategy(self) -> Strategy:
        """Strategy that adds the gradients of data parallelism."""
        compressor = COMPRESSIONS[self.compression]
        if compressor is not None:
            return DataParallelCompressed(compressor, bucket_nbytes=self.bucket_bytes)
        how = PRECISIONS[self.precision]
        return DataParallelOverlapped(None, self.bucket_bytes, min(self.bucket_bytes, 1 << 20), precision=how)

    def recipe(self, seed: int) -> Recipe:
        """Make the recipe of a training. seed: of the order of its examples."""
        micro_batches = self.micro_batches
        return Recipe(self.steps, self.batch, self.learning_rate, 0.9, seed, self.optimizer, micro_batches)


def hidden(seed: int) -> Dataset:
    """Make the data of a race: the training text, and HIDDEN windows that begin somewhere in the last tenth."""
    known = text.load(BLOCK)
    unseen = torch.cat([known.test_x.flatten(), known.test_y[-1, -1:]])
    last = len(unseen) - HIDDEN * BLOCK - 1
    begin = int(torch.randint(last, (1,), generator=torch.Generator().manual_seed(seed)))
    x, y = text.windows(unseen[begin : begin + HIDDEN * BLOCK + 1], BLOCK)
    return Dataset(known.train_x, known.train_y, x, y)


def model_for(data: Dataset, seed: int) -> torch.nn.Module:
    """Build the GPT of the race, with weights drawn by the seed."""
    return models.build_for(data, "gpt", seed=seed)


def ledger(plan: HerePlan, data: Dataset) -> Prediction:
    """Price a step by formula, with the memory of the fullest rank against the free memory of this machine.

    Raises:  Disqualified for a grid that cannot be.
    """
    spec = spec_of(model_for(data, 0), data.train_x[:2], "gpt", "adam")
    limit = psutil.virtual_memory().available // plan.ranks
    try:
        grid, machine = grid_of(plan.dp, plan.pp, plan.tp), replace(MACHINES["laptop"], memory=limit)
        return predict_step(spec, grid, plan.schedule, plan.micro_batches, machine=machine, batch=plan.batch)
    except ValueError as error:
        raise Disqualified(str(error)) from None


def reference(ranks: int) -> HerePlan:
    """Make the reference plan for so many ranks; its expected time counts for nothing."""
    return HerePlan(dp=ranks, batch=32, learning_rate=3e-3, steps=400, expected_s=60.0)
