"""A step of GPT-3 on 1,024 simulated GPUs beside what has been published about it.

There is one published run of just this model on just this grid; the other figures are formulas, taken from where they
were published, for the same model.
"""

import resource
import time
from typing import NamedTuple

from ..parallel.grid.machine import A100_PEAK, EFFICIENCY, MACHINES, grid_of
from ..parallel.grid.model import predict
from ..parallel.grid.simulation import simulate
from ..parallel.grid.spec import SPECS

GRID = {"dp": 8, "pp": 16, "tp": 8}
BATCH, MICRO_BATCHES = 1536, 192
README = 'NVIDIA, Megatron-LM, README.md, "GPT-3 Example", with examples/pretrain_gpt3_175B.sh: this grid and batch'
SBH = "Korthikanti et al. 2022, arXiv:2205.05198, equation 1: sbh (34 + 5as/h), of which 32 sbh have no dropout masks"
BUBBLE = "Narayanan et al. 2021, arXiv:2104.04473: (p - 1) / m of the ideal time, for equal stages"
ZERO = "Rajbhandari et al. 2020, arXiv:1910.02054: 16 bytes per parameter, over tp x pp"
COLUMNS = ("name", "formulas", "simulated", "published", "source")


class Published(NamedTuple):
    """One line of the table: what our formulas and the simulator say, and what others have measured or derived."""

    name: str
    formulas: str
    simulated: str
    published: str
    source: str


def gpt3(report=print):
    """Predict and simulate the step; returns (list of Published, s of a core that it took, peak bytes in memory)."""
    spec, grid, machine = SPECS["gpt3"], grid_of(**GRID), MACHINES["dgx_a100"]
    options = {"schedule": "1f1b", "micro_batches": MICRO_BATCHES, "recompute": True}
    predicted = predict(spec, grid, machine=machine, batch=BATCH, **options)
    begin = time.process_time()
    found = simulate(spec, grid, machine=machine, batch=BATCH, **options)
    took = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    flops = BATCH * spec.flops * 4 / 3 / grid.size  # with the forwards that are done again, as the published figure has
    memory, each = predicted.memory, spec.parameters / grid["tp"] / grid["pp"]
    s, d = spec.positions, spec.layers[1].output // spec.positions
    block = spec.layers[2].saved_on(1, False) * spec.bytes_each.activations
    ideal = (grid["pp"] - 1) / MICRO_BATCHES
    waiting = predicted.bubble / (1 - predicted.bubble)
    rows = [
        Published("s per step", f"{predicted.seconds:.1f}", f"{found.seconds:.1f}", "32", README),
        Published(
            "teraFLOP/s per GPU",
            f"{flops / predicted.seconds / 1e12:.0f}",
            f"{flops / found.seconds / 1e12:.0f}",
            "138",
            README,
        ),
        Published("bubble over ideal time", f"{waiting:.1%}", "", f"{ideal:.1%}", BUBBLE),
        Published(
            "GB of parameters, gradients, optimizer, fullest GPU",
            f"{(memory.total - memory.activations) / 1e9:.1f}",
            "",
            f"{16 * each / 1e9:.1f} on average",
            ZERO,
        ),
        Published("MB kept of a block, one sequence", f"{block / 1e6:.0f}", "", f"{32 * s * d / 1e6:.0f}", SBH),
        Published("GB of activations, fullest GPU, recomputed", f"{memory.activations / 1e9:.1f}", "", "", ""),
        Published("GB sent over tp by a GPU", f"{predicted.links['tp'] / 1e9:.0f}", "", "", ""),
        Published("GB sent over pp by a GPU", f"{predicted.links['pp'] / 1e9:.1f}", "", "", ""),
        Published("GB sent over dp by a GPU", f"{predicted.links['dp'] / 1e9:.1f}", "", "", ""),
    ]
    for row in rows:
        report(f"{row.name:<52} {row.formulas:>9} {row.simulated:>9} {row.published:>16}  {row.source}")
    report(f"1,024 ranks simulated in {took:.0f} s of one core, {peak / 1e9:.2f} GB")
    return rows, took, peak


def text(rows, took, peak, command):
    """The same as a section of documentation."""
    size = SPECS["gpt3"].parameters / 1e9
    lines = [
        "## GPT-3 on 1,024 simulated GPUs",
        "",
        f"`{command}`: {size:.1f} billion parameters, dp=8, pp=16, tp=8, 1F1B with 192 micro-batches of one sequence, "
        f"recomputation. The simulation takes {took:.0f} s of one core and {peak / 1e9:.2f} GB.",
        "",
        f"What is assumed, and not published: a GPU computes with {EFFICIENCY:.0%} of its peak of "
        f"{A100_PEAK / 1e12:.0f} teraFLOP/s where it neither waits nor sends. All else follows. Our bubble is larger "
        "than that of equal stages: the last one computes the logits besides its blocks, and the others wait for it.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|:---|---:|---:|---:|:---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines)
