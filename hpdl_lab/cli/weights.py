"""`hpdl weights`: train the models of notebook 13."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .arguments import Commands, folder, ranks


def add(commands: Commands) -> None:
    command = commands.add_parser("weights", help="train the Moby-Dick GPT and its draft, in about nine minutes")
    command.add_argument("--steps", type=ranks, help="training steps of each (as for the stored weights)")
    command.add_argument("--folder", type=folder, help="where the .safetensors files go (the installed package)")
    command.set_defaults(command=weights)


def weights(arguments: argparse.Namespace) -> int:
    """Train each model, store it, and print its loss."""
    from ..inference import weights  # here, because it takes torch along

    trained = []
    for name, training in weights.TRAINED.items():
        begin = time.monotonic()
        model = weights.train(name, arguments.steps, lambda step, loss: print(f"  step {step:5,}   loss {loss:.3f}"))
        loss, seconds = weights.held_out_loss(model), time.monotonic() - begin
        path = Path(arguments.folder or weights.FOLDER) / f"{name}.safetensors"
        weights.save(model, path, training.fields, held_out_loss=loss)
        print(f"{path}: {path.stat().st_size:,} bytes, held-out loss {loss:.3f} nats per character, {seconds:.0f} s")
        trained.append(model)
    print(f"the draft's tokens are accepted with probability {weights.mean_acceptance(*trained):.3f}")
    return 0
