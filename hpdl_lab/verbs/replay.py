"""`lab.replay`: measurements of other machines, drawn dashed in the plots of live ones; `hpdl record` makes them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias, cast

from ..bench.launch import about
from ..checks.result import Note
from ..data import recorded
from ..data.recorded import Recording, machine_name
from ..kernels.staging import StagingCosts
from ..plots import measure as curves
from ..plots import scaling as efficiency
from ..plots import timeline as lanes
from ..plots.memory import draw_write_again
from ..plots.staging import draw as draw_staging
from ..plots.style import HEIGHT, Draw, Figure, stamp
from ..trace import Event
from ..units import counted
from .measure import MeasureResult
from .result import Picture, picture
from .roofline import WriteAgainResult
from .scaling import ScalingResult
from .staging import StagingResult

Drawn: TypeAlias = MeasureResult | ScalingResult | StagingResult | WriteAgainResult  # as curves
NO_GPU = "No GPU has been recorded yet: make test-gpu on a machine with one adds it."
TIMES = {"name", "size", "ranks", "cores", "time_us", "p25_us", "p75_us", "busbw_GBps"}
BLOCKS = {"block", "seconds", "p25", "p75"}
WRITES = {"memory", "read", "write_us", "p25_us", "p75_us"}
RATES = {"kind", "ranks", "cores", "rate", "p25", "p75", "speedup", "efficiency"}


@dataclass(frozen=True)
class _Curves:
    """A kind of recording that is drawn as curves.

    result: its class; verb: what returns one; keys: of every row; made: {field that JSON does not keep: f(value)}.
    """

    result: type[Drawn]
    verb: str
    draw: Draw
    keys: set[str]
    height: float = HEIGHT
    made: dict[str, Callable[[Any], object]] = field(default_factory=dict)


def _of_sizes(curves: dict[str, dict[str, float]]) -> dict[str, dict[int, float]]:
    """Return {name: {size: seconds}} with sizes as numbers, which JSON has made texts."""
    return {name: {int(n): t for n, t in times.items()} for name, times in curves.items()}


CURVES = {
    "measure": _Curves(MeasureResult, "lab.measure", curves.draw, TIMES, made={"simulated": _of_sizes}),
    "scaling": _Curves(ScalingResult, "lab.scaling", efficiency.draw, RATES, efficiency.HEIGHT),
    "staging": _Curves(StagingResult, "lab.staging", draw_staging, BLOCKS, made={"costs": lambda x: StagingCosts(*x)}),
    "write_again": _Curves(WriteAgainResult, "lab.write_again", draw_write_again, WRITES),
}


def replay(name: str | None = None, over: Drawn | None = None) -> Picture | Note:
    """Draw what was measured on another machine, dashed, in the plot of a live measurement; without a name: list it.

        lab.replay()                                               names, machines, dates
        lab.replay("race_emulated_amd_epyc_2_cores")               as lab.measure draws it
        lab.replay("race_emulated_amd_epyc_2_cores", over=race)    over your own curves, which stay as they are

    Args:    name: of a recording; over: what lab.measure, lab.scaling, lab.staging or
             lab.write_again has returned.
    Returns: Picture, whose `data` is the result, with its rows, or the events; a Note of a table.
    Raises:  LookupError for a name that there is not; ValueError for a broken file, or another result than it shows.
    """
    if name is None:
        if over is not None:
            raise ValueError("over= needs the name of a recording to draw: lab.replay() lists them")
        return _listed([(name, recorded.load(name)) for name in recorded.recording_names()])
    try:
        found = recorded.load(name)
    except LookupError as error:
        raise LookupError(f"{error}. {_no_gpu()}".strip()) from None
    kind = CURVES.get(found["kind"])
    if over is not None and not (kind and isinstance(over, kind.result)):
        takes = f"is drawn over what {kind.verb} returned" if kind else "is no curve and is drawn alone"
        raise ValueError(f"{name} {takes}, got over={type(over).__name__}")
    text = f"{found['what']}, recorded on {machine_name(found)}, {found['date'][:10]}"
    try:
        result = _restored(found)
    except (KeyError, TypeError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"the recording {name} is broken: {what}") from None
    mark = f"{'dashed: ' * (over is not None)}recorded on {machine_name(found)}, {found['date'][:10]}"
    if isinstance(result, Note):
        return result
    if isinstance(result, list):
        title = f"Timeline: {counted(len(result), 'event')} of {counted(len({e.rank for e in result}), 'rank')}"
        return picture(_stamped, mark, lanes.draw, result, title, "", None, True, text=text, data=result)
    rows = [row | {"recorded": True} for row in result.rows]
    arguments = (rows, *result.drawing()[1:]) if over is None else over.drawing(rows)
    shown = CURVES[found["kind"]]
    return picture(_stamped, mark, shown.draw, *arguments, text=text, data=result, height=shown.height)


def _stamped(figure: Figure, mark: str, draw: Draw, *arguments: object) -> None:
    """Draw, and write `mark` on it."""
    draw(figure, *arguments)
    stamp(figure, mark)


def _restored(found: Recording) -> Drawn | list[Event] | Note:
    """Return what a recording holds: a result, a list of events, or a Note. Raises KeyError, TypeError, ValueError."""
    if found["kind"] == "timeline":
        return [Event(*values) for values in found["events"]]
    if found["kind"] == "table":
        return Note(
            found["what"], f"Recorded on {machine_name(found)}, {found['date'][:10]}.", "\n".join(found["lines"])
        )
    if found["kind"] not in CURVES:
        raise ValueError(f"its kind is {found['kind']!r}")
    kind = CURVES[found["kind"]]
    for row in found["rows"]:
        if absent := kind.keys - set(row):
            raise ValueError(f"a row has no {', '.join(sorted(absent))}")
    values = {key: found[key] for key in _names_of(kind.result)}
    for key, made in kind.made.items():
        values[key] = made(values[key])
    return cast(Callable[..., Drawn], kind.result)(**values, figure=None)  # the caller draws a figure


def _names_of(result: type[Drawn]) -> list[str]:
    """Return the fields of a result that a recording has."""
    return [one.name for one in fields(result) if one.name != "figure"]


def write_recording(
    result: Drawn | list[Event] | Recording, job: str, what: str, device: str = "cpu", folder: Path | None = None
) -> Path:
    """Write a result of this machine as a recording, whose name is `job` and the machine; returns the path.

    Args:    result: of lab.measure or lab.scaling; a list of trace.Event; or the lines of a table, with "rows".
             what: it is, in a few words. device: "cpu", or "cuda" if it was measured on a GPU.
             folder: default the one that lab.replay reads.
    """
    here = about(device=device)
    if isinstance(result, Drawn):
        kind = next(key for key, known in CURVES.items() if isinstance(result, known.result))
        data = {key: getattr(result, key) for key in _names_of(type(result))}
    elif isinstance(result, dict):
        kind, data = "table", result
    else:
        start = min(e.t0_ns for e in result)
        kind = "timeline"
        data = {"events": [e._replace(t0_ns=e.t0_ns - start, t1_ns=e.t1_ns - start, line="") for e in result]}
    name = re.sub(r"\W+", "_", f"{job} {machine_name(here)}".lower())
    return recorded.save(name, {"kind": kind, "what": what, **here, **data}, folder or recorded.FOLDER)


def _no_gpu() -> str:
    """Return NO_GPU, or "" if there is a recording of one."""
    return "" if any("gpu" in recorded.load(name) for name in recorded.recording_names()) else NO_GPU


def _listed(found: Sequence[tuple[str, Recording]]) -> Note:
    """Return a Note with a line for each recording."""
    width = max((len(name) for name, _ in found), default=0)
    lines = [f"{name:{width}}  {machine_name(one)}, {one['date'][:10]}: {one['what']}" for name, one in found]
    return Note(counted(len(found), "recording"), _no_gpu(), "\n".join(lines))
