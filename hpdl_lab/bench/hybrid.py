"""A step of GPT-3 on 1,024 simulated GPUs, and what has been published about it.

There is one published run of just this model on just this grid; the other figures are formulas, taken from where they
were published, for the same model.
"""

import resource
import time
from typing import Any

from ..parallel.grid.machine import EFFICIENCY, MACHINES, PEAKS, grid_of
from ..parallel.grid.model import predict_step
from ..parallel.grid.simulation import simulate_step
from ..parallel.grid.spec import SPECS
from . import launch
from .report import Report, Row, Table, field

GRID = {"dp": 8, "pp": 16, "tp": 8}
BATCH, MICRO_BATCHES = 1536, 192
README = 'NVIDIA, Megatron-LM, README.md, "GPT-3 Example", with examples/pretrain_gpt3_175B.sh: this grid and batch'
SBH = "Korthikanti et al. 2022, arXiv:2205.05198, equation 1: sbh (34 + 5as/h); 34 sbh less 2 of dropout masks"
BUBBLE = "Narayanan et al. 2021, arXiv:2104.04473: (p - 1) / m of the ideal time, for equal stages"
ZERO = "Rajbhandari et al. 2020, arXiv:1910.02054: 16 bytes per parameter, over tp x pp"


TABLE = Table(
    [
        field("name", width=51, left=True),
        *(field(name, width=16) for name in ("formulas", "simulated", "published")),
        field("source", left=True),
    ]
)
COLUMNS = ("name", "formulas", "simulated", "published", "source")


def gpt3(report: Report = Report()) -> list[Row]:  # noqa: B008
    """Predict and simulate the step, print the table; returns its rows, and writes them as `report` says."""
    title = "GPT-3 on 1,024 simulated GPUs"
    return TABLE.tell(
        title, [{"about": launch.about()}, *_lines()], lambda rows: [_assumed(), rows[-1]["took"]], report
    )


def _assumed() -> str:
    return (
        f"{SPECS['gpt3'].parameters / 1e9:.1f} billion parameters, dp=8, pp=16, tp=8, 1F1B with 192 micro-batches of "
        "one sequence, recomputation. What is assumed, and not published: a GPU computes with "
        f"{EFFICIENCY:.0%} of its peak of {PEAKS['A100'] / 1e12:.0f} teraFLOP/s if it neither waits nor sends. "
        "All else follows. Our bubble is larger than with equal stages: the last one computes the logits besides "
        "its blocks, and the others wait for it."
    )


def _lines() -> list[Row]:
    """Return what our formulas and the simulator say, and what others have measured or derived, with the source."""
    spec, grid, machine = SPECS["gpt3"], grid_of(**GRID), MACHINES["dgx_a100"]
    options: dict[str, Any] = {"schedule": "1f1b", "micro_batches": MICRO_BATCHES, "recompute": True}
    predicted = predict_step(spec, grid, machine=machine, batch=BATCH, **options)
    begin = time.process_time()
    simulated = simulate_step(spec, grid, machine=machine, batch=BATCH, **options)
    took = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    flops = BATCH * spec.flops * 4 / 3 / grid.size  # with the forwards that are done again, as the published figure has
    memory, each = predicted.memory, spec.parameters / grid["tp"] / grid["pp"]
    s, d = spec.positions, spec.layers[1].output // spec.positions
    block = spec.layers[2].saved_on(1, False) * spec.bytes_each.activations
    ideal = (grid["pp"] - 1) / MICRO_BATCHES
    waiting = predicted.bubble / (1 - predicted.bubble)
    speeds = [f"{flops / seconds / 1e12:.0f}" for seconds in (predicted.seconds, simulated)]
    state, average = (memory.total - memory.activations) / 1e9, 16 * each / 1e9
    rows = [
        ("s per step", f"{predicted.seconds:.1f}", f"{simulated:.1f}", "32", README),
        ("teraFLOP/s per GPU", *speeds, "138", README),
        ("bubble over ideal time", f"{waiting:.1%}", "", f"{ideal:.1%}", BUBBLE),
        ("GB of parameters, gradients, optimizer, fullest GPU", f"{state:.1f}", "", f"{average:.1f} on average", ZERO),
        ("MB kept of a block, one sequence", f"{block / 1e6:.0f}", "", f"{32 * s * d / 1e6:.0f}", SBH),
        ("GB of activations, fullest GPU, recomputed", f"{memory.activations / 1e9:.1f}", "", "", ""),
        *((f"GB sent over {axis} by a GPU", f"{predicted.links[axis] / 1e9:.3g}", "", "", "") for axis in GRID),
    ]
    text = f"1,024 ranks simulated in {took:.0f} s of one core, {peak / 1e9:.2f} GB."
    return [dict(zip(COLUMNS, row, strict=True), took=text) for row in rows]
