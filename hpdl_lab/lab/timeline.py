"""`lab.timeline`: who did what, when, in the last run; `lab.traffic`: who sent how much to whom; Horovod's timeline."""

from .. import trace
from ..parallel import horovod
from ..plots import horovod as gradients
from ..plots import timeline as bars
from ..plots import traffic as heat
from .cluster import last_run
from .picture import picture


def timeline(results=None, save=None):
    """Draw the events of a run, one lane per rank: computing above, sends and receives below (its end, if long).

    What runs in the background of a rank has a lane of its own, below the rank's.

    Args:    results: what lab.run, lab.train or sim.run returned, or a list of events; default the last lab.run.
             save: path of a Chrome trace JSON to write as well; ui.perfetto.dev opens it.
    Returns: Picture.
    Raises:  ValueError where there is nothing to draw.
    """
    events = events_of(results)
    ranks = len({e.rank for e in events})
    text = f"{len(events):,} events of {ranks} rank{'s' if ranks > 1 else ''}"
    title = f"Timeline: {text}"
    if save is not None:
        trace.save_chrome(events, save)
        text += f", also in {save}: open it in ui.perfetto.dev"
    return picture(bars.draw, events, title, text=text)


def horovod_timeline(results=None, save=None):
    """Draw when each gradient was negotiated, packed, reduced and unpacked on rank 0, as Horovod's timeline does.

    Args:    results: as of `timeline`, of a run with DistributedOptimizer(..., timeline=True).
             save: path of a file to write as well, which ui.perfetto.dev opens.
    Returns: Picture.
    Raises:  ValueError where the run recorded no activity of that kind.
    """
    events = events_of(results)
    rows = horovod.to_horovod(events)
    if not rows:
        raise ValueError("no activity of Horovod's was recorded: DistributedOptimizer(..., timeline=True) does")
    n = len(gradients.names_of(rows))
    text = f"Horovod's timeline of {n} gradients on rank 0"
    foot = ""
    if save is not None:
        horovod.save_timeline(events, save)
        foot = f"Also in {save}: open it in ui.perfetto.dev"
    return picture(gradients.draw, rows, text, foot, text=text, height=gradients.height(rows))


def traffic(results=None, title=""):
    """Draw how many bytes every rank sent to every other in a run; see `timeline` for `results`. Returns Picture."""
    events = events_of(results)
    size = 1 + max(max(e.rank, e.peer) for e in events)
    matrix = heat.matrix(events, size)
    text = f"{int(matrix.sum()):,} bytes in {sum(e.op == 'send' for e in events):,} messages"
    return picture(heat.draw, matrix, None, title or f"Traffic: {text}", text=text, width=5.2)


def events_of(results):
    """The events of Results, of a list, or of the last run on the engines."""
    if results is None:
        results = last_run()
    if results is None:
        raise ValueError("no run to draw yet: lab.run(...) first, or give lab.timeline what sim.run returned")
    try:
        events = list(getattr(results, "events", results))
    except TypeError:
        told = f"something of {type(results).__name__} cannot"
        raise TypeError(f"what lab.run or sim.run returned, or a list of events, can be drawn; {told}") from None
    if not events or not isinstance(events[0], trace.Event):
        raise ValueError("the run recorded no events: it had no message, or it was timed, which records none")
    return events
