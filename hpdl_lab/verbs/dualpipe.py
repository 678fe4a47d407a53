"""`lab.dualpipe`: a step of a pipeline with experts, its all-to-alls exposed, and under other micro-batches."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import cast

import torch
from torch import Tensor

from .. import models, schedules
from ..comm import sim
from ..comm.base import Comm
from ..comm.network import Switch
from ..comm.sim.torch_state import one_thread
from ..models.llama import Decoder
from ..parallel.pipeline.overlap import bars_of, expert_step, exposed
from ..plots import overlap as drawing
from ..plots.style import Figure
from ..schedules import Schedule
from ..trace import seconds_text
from ..units import require_int, require_number
from .result import Result, picture, text_table

SHARING = 2  # ranks that share the experts of a stage
BATCH, TOKENS = 2, 8  # sequences of a micro-batch on each of them, and tokens of a sequence
MODEL = {
    "vocabulary": 80,
    "block": TOKENS,
    "width": 32,
    "heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 2,
    "topk_group": 2,
}
SECONDS = {"attention": 1e-3, "experts": 1e-3}  # of a forward, and of each half of a backward
NETWORK = Switch(alpha=2e-6, beta=2e-7)  # on which an all-to-all takes about as long as one of those
NAMES = {False: "one after the other", True: "pairs overlap"}


@dataclass(frozen=True, repr=False)
class DualPipeRun(Result):
    """Result of `lab.dualpipe`.

    alone, together: the step in which the two of a pair are done one after the other, and the one with overlap.

    Each is a plots.overlap.Panel: seconds; exposed: s of the all-to-alls of the drawn rank under which it computes
    nothing; computing, sending: lists of its overlap.Bar (begin, end, action, name). shares: the exposed part of all
    ranks' all-to-alls, in the one and in the other.
    """

    schedule: Schedule
    alone: drawing.Panel
    together: drawing.Panel
    shares: tuple[float, float]
    guess: float | None
    figure: Figure = field(repr=False)

    def __repr__(self) -> str:
        rows = [
            (panel.name, seconds_text(panel.seconds), f"{share:.0%}")
            for panel, share in zip((self.alone, self.together), self.shares, strict=True)
        ]
        if self.guess is not None:
            rows.append(("you", "", f"{self.guess:.0%}"))
        return "\n".join(text_table((self.schedule.name, "a step", "of all-to-all exposed"), rows))


def dualpipe(
    micro_batches: int = 8,
    ranks: int = 4,
    schedule: str = "dualpipe",
    rank: int = 1,
    prediction: float | None = None,
) -> DualPipeRun:
    """Take a step of a small DeepSeek twice, and draw what a rank computes and which all-to-all is under way meanwhile.

        lab.dualpipe(prediction=0.5)                  you expect that half of the all-to-alls is still exposed
        lab.dualpipe(micro_batches=16)                more pairs

    Each stage is a layer of attention and experts, which two simulated ranks share. Segments take virtual time, 1 ms
    for attention and for experts, twice that in backward; an all-to-all takes about 1 ms. Gradients are real ones.

    Args:    ranks: of the pipeline, even for "dualpipe"; schedule: a name of schedules.CATALOG, of one with pairs.
             rank: of the pipeline, which is drawn. prediction: share of the all-to-alls that stays exposed, 0 to 1.
    Returns: DualPipeRun.
    Raises:  ValueError, one sentence, for a schedule without pairs, or numbers that it cannot have.
    """
    plan = schedules.build(schedule, ranks, micro_batches)
    if not plan.paired:
        raise ValueError(
            f"{schedule} of {ranks} ranks and {micro_batches} micro-batches has no pair that could overlap"
        )
    require_int("ranks", ranks, 1, 8)
    require_int("rank", rank, 0, ranks - 1)
    if prediction is not None:
        require_number("the share that you expect", prediction, 0, 1)
    sharing, generator = SHARING, torch.Generator().manual_seed(0)
    tokens = torch.randint(80, (micro_batches, sharing, BATCH, TOKENS + 1), generator=generator)
    model = cast(Decoder, models.build("deepseek", layers=plan.stages + 1, **MODEL))
    panels: list[drawing.Panel] = []
    shares: list[float] = []
    for together in NAMES:
        args = plan, model, tokens[..., :-1], tokens[..., 1:], SECONDS, together
        with one_thread(torch):  # tensors as small as these need no more
            events = sim.run(ranks * sharing, _losses_of_step, *args, network=NETWORK).events
        spent = [exposed(events, r) for r in range(ranks * sharing)]
        shares.append(fmean(alone for _, alone in spent) / fmean(whole for whole, _ in spent))
        mine = rank * sharing
        computing, sending = bars_of(events, mine)
        panels.append(drawing.Panel(NAMES[together], computing[-1].end, spent[mine][1], computing, sending))
    title = f"{plan.name} on {ranks} x {sharing} ranks, {micro_batches} micro-batches: rank {rank} of the pipeline"
    whole = sum(bar.end - bar.begin for bar in panels[1].sending)
    guess = None if prediction is None else prediction * whole
    found = picture(drawing.draw, panels, title, guess, text=title, height=drawing.height(panels))
    return DualPipeRun(plan, panels[0], panels[1], (shares[0], shares[1]), prediction, found.figure)


def _losses_of_step(
    comm: Comm, plan: Schedule, model: Decoder, x: Tensor, y: Tensor, seconds: dict[str, float], together: bool
) -> dict[int, float]:
    """Take a step by expert_step; returns {micro-batch: loss}, and the model stays on the rank."""
    losses, _ = expert_step(comm, plan, model, x, y, seconds, together)
    return {i: loss.item() for i, loss in losses.items()}
