"""`lab.watch`: run a script under observation, and show what is wrong with it and where its step goes."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from IPython.display import DisplayHandle, Pretty

from .. import watch as watching
from ..plots import live
from ..plots.style import Figure
from ..plots.watch import draw
from ..units import counted, require_int
from ..watch.finding import Finding
from ..watch.speed import LABEL, all_times
from .result import Result, draw_picture

LAST_LINES = 8  # of the script's output
WIDTH = 94  # columns of the report: more are broken again in a notebook


@dataclass(frozen=True, repr=False)
class ScriptReport(Result):
    """The judgement of `hpdl watch` about a script. text: the report; findings: its sentences; exit_code: the script's.

    figure: the parts of a step on each rank, None if no step was seen. printed: the output of the script.
    """

    text: str
    findings: list[Finding]
    exit_code: int
    printed: str
    figure: Figure | None = field(repr=False)  # pyrefly: ignore[bad-override]

    def __bool__(self) -> bool:
        """Return True if it neither hung nor crashed nor computed something else than one rank would."""
        return not any(finding.kind in ("hang", "wrong") for finding in self.findings)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str | None:
        return super()._repr_html_() if self.figure is not None else None


def watch(script: str | Path, *arguments: object, ranks: int = 2, patience: float = watching.PATIENCE) -> ScriptReport:
    """Run a script on so many ranks as torchrun does, unchanged, and say what is wrong with it.

        lab.watch("train.py", "--epochs", 2, ranks=4)          hpdl watch --nproc-per-node 4 train.py --epochs 2

    Args:    patience: s without any progress after which ranks that wait for each other are ended.
    Returns: ScriptReport: true if nothing is wrong. Raises: FileNotFoundError; ValueError for ranks < 1.
    """
    require_int("ranks", ranks, least=1)
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no file {Path(script).absolute()}: run the cell that writes it")
    line = DisplayHandle()
    line.display(Pretty(f"{Path(script).name} starts on {counted(ranks, 'rank')} ..."))
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        words = ["--nproc-per-node", str(ranks), str(script), *map(str, arguments)]
        run = watching.run_watched(
            words, patience=patience, say=lambda text: line.update(Pretty(text)) if text else None, output=output
        )
        output.seek(0)
        printed = output.read()
    line.update(Pretty("\n".join(printed.rstrip().split("\n")[-LAST_LINES:])))
    report, figure = watching.judge_run(run), None
    times = all_times(run)
    if times:
        rows = [{LABEL.get(name, name): s for name, s in one.parts.items()} for one in times]
        title = f"{Path(script).name}: a step on {counted(run.size, 'rank')}"
        figure = draw_picture(draw, rows, title, text=title, height=1.7 + 0.45 * len(rows)).figure
        live.show_figure(figure, alt=title)
    return ScriptReport(report.text(WIDTH), report.findings, run.exit_code, printed, figure)
