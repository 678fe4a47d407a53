"""The exercises "convert this script": a training script of one rank, to be made parallel, launched and judged."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from ..hints import FOLDERS as HINTS
from ..hints import Hinted
from ..record import Broken
from ..result import CheckResult
from .judge import ScriptCase, described, judge_script, step_traffic
from .launch import ScriptLauncher, ScriptRun

ALONE = "train_gpt.py"


@dataclass(frozen=True)
class ScriptExercise(Hinted):
    """A script to be converted.

    name:    of the attendee's file and the solution, without .py.
    dp, tp:  ranks per axis.
    alone:   the file of the one-rank script.
    sharded: True if each rank has to hold, and to save, its shards only, and to add gradients once in a step.
    """

    id: str
    title: str
    name: str
    stars: int
    dp: int
    tp: int
    alone: str = ALONE
    sharded: bool = False

    @property
    def ranks(self) -> int:
        return self.dp * self.tp

    @property
    def file(self) -> str:
        return f"{self.name}.py"

    @property
    def solution(self) -> str:
        """The text of a right script."""
        return script_of(self.file).read_text()


SCRIPTS = (
    ScriptExercise("6.7", "convert this script: data parallel", "train_ddp", 2, dp=2, tp=1),
    ScriptExercise(
        "8.6", "convert this script: FSDP2", "train_fsdp", 2, dp=2, tp=1, alone="train_long.py", sharded=True
    ),
    ScriptExercise("9.5", "convert this script: tensor parallel", "train_tp", 3, dp=1, tp=2),
    ScriptExercise("11.4", "convert this script: data and tensor parallel", "train_hybrid", 3, dp=2, tp=2),
)


def script_of(name: str) -> Path:
    """Return the file of that name among the scripts of the clone, or of the installed package, next to the hints."""
    folders = [folder.with_name("scripts") / name for folder in HINTS]
    return next((path for path in folders if path.exists()), folders[0])


ONE: dict[str, ScriptRun] = {}  # the runs of one-rank scripts, which are the same for all checks of this process


def _alone(launcher: ScriptLauncher, name: str) -> ScriptRun:
    """Return the run of a one-rank script, once in this process."""
    if name not in ONE:
        ONE[name] = launcher.launch(script_of(name), 1)
    return ONE[name]


def check_script(exercise: ScriptExercise, path: Path, launcher: ScriptLauncher | None = None) -> CheckResult:
    """Launch the script at `path` by torchrun, and compare its ranks with the one-rank script.

    launcher: for many checks; by default one is started, in some seconds, and ended.
    Returns: CheckResult. Raises: FileNotFoundError; RuntimeError if the one-rank script itself does not run here.
    """
    label, text = f"{exercise.id} {exercise.file}", path.read_text()
    try:
        ast.parse(text)
    except SyntaxError as error:
        line = (error.text or "").strip()
        return CheckResult(label, "syntax", f"line {error.lineno}, `{line}`: {error.msg}.")
    with nullcontext(launcher) if launcher else ScriptLauncher() as ranks, ThreadPoolExecutor(1) as pool:
        one = pool.submit(_alone, ranks, exercise.alone)
        run = ranks.launch(path.resolve(), exercise.ranks)
    case = ScriptCase(run, one.result(), exercise.dp, exercise.tp, exercise.sharded)
    if not case.one.first("ended"):
        ONE.clear()
        raise RuntimeError(f"{exercise.alone} itself did not run to its end on this machine: {case.one.printed[-500:]}")
    try:
        judge_script(case)
    except Broken as broken:
        return CheckResult(label, broken.failed, broken.message[:1].upper() + broken.message[1:], broken.detail)
    return CheckResult(label, None, "correct", facts=_facts(case))


def _facts(case: ScriptCase) -> tuple[str, ...]:
    """Return facts about a right script."""
    p, steps = len(case.ranks), len(case.steps)
    off = max(abs(case.loss(step)[1] - case.loss(step)[2]) for step in case.one.losses)
    held, whole = sum(case.held(0).values()), sum(case.whole.values())
    return (
        f"torchrun --nproc-per-node {p}: losses of {steps} steps and of the test batch as on one rank, "
        f"to {max(off, 1e-12):.0e}",
        f"examples of a step: {len(case.ranks[0].batches[0])} on each rank, {len(case.one.batches[0])} on one",
        f"parameters that rank 0 holds: {held:,} of {whole:,}",
        f"rank 0 in a step: {described(step_traffic(case))}",
    )
