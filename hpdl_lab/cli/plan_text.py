"""What `hpdl plan` and `hpdl drill` print: tables and sentences of a plan, and lines to paste."""

import datetime
import math

from ..classroom.costs import COLUMNS, ONCE, Costs
from ..classroom.plan import BEYOND, ENGINES, IN_TURNS, STEPS, Plan

HEADROOM = 1.5  # of memory, above what was measured: attendees make mistakes


def text(plan: Plan) -> str:
    """The whole report, without the constants."""
    gpus = f" and {count(plan.gpus, 'GPU')}" if plan.gpus else ""
    head = (
        f"{count(plan.attendees, 'attendee')}, {count(plan.engines, 'engine')} each, on a node of "
        f"{count(plan.cores, 'core')}, {plan.memory / 1e9:,.0f} GB{gpus}"
    )
    parts = [head, resources(plan), times(plan), verdict(plan)]
    if plan.fits:  # else there is no class to paste anything for
        parts += [settings(plan), reservation(plan)]
    return "\n\n".join(parts)


def count(n: int, word: str) -> str:
    return f"{n:,} {word}{'s' * (n != 1)}"


def table(columns, rows, left=(0,)):
    """A Markdown table of texts that reads well in a terminal. left: columns of words, the others are numbers."""
    widths = [max(3, *map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = [f":{'-' * (w - 1)}" if i in left else f"{'-' * (w - 1)}:" for i, w in enumerate(widths)]
    pads = [str.ljust if i in left else str.rjust for i in range(len(widths))]
    cells = ([pad(c, w) for pad, c, w in zip(pads, row, widths, strict=True)] for row in (columns, rule, *rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def resources(plan: Plan) -> str:
    """The table of what runs out, the first to hurt first."""
    rows = []
    for r in plan.resources():
        each, limit = (f"{v:,.{int(v < 100 and v != int(v))}f} {r.unit}".rstrip() for v in (r.each, r.limit))
        rows.append([r.name, each, limit, f"{r.fits:,}", f"{r.used(plan.attendees):.0%}", BEYOND[r.name]])
    return table(("resource", "one attendee", "the node", "fit", f"at {plan.attendees:,}", "beyond that"), rows, (0, 5))


def times(plan: Plan) -> str:
    """Seconds of each step, one alone and all at once."""
    rows = [[step, f"{plan.costs[f'{step}_s']:.1f} s", f"{plan.seconds(step):.1f} s"] for step in STEPS]
    rows.insert(-1, ["all until torch", "", f"{sum(plan.seconds(step) for step in STEPS[:-1]):.1f} s"])
    return table(("when all at once", "one alone", f"the last of {plan.attendees:,}"), rows)


def verdict(plan: Plan) -> str:
    """Who fits, what hurts first, engines per person: sentences."""
    hurts = []
    for row in plan.resources():
        limited = f"{row.name}, beyond {count(row.fits, 'attendee')}"
        if row.name not in IN_TURNS:
            hurts.append(f"{limited}: {BEYOND[row.name]}")
            break
        none = f"{row.name}: even one attendee has fewer than wanted"
        hurts.append(f"{limited}, who then take turns" if row.fits else none)
    said = [
        f"What hurts first: {'; then '.join(hurts)}.",
        f"Memory: {plan.each('MB') / 1e3:.2f} GB an attendee, {plan.memory_MB() / 1e3:.1f} GB in all.",
    ]
    most = plan.most_engines()
    if plan.fits >= plan.attendees:
        said.append(f"Engines per person: {plan.engines}; up to {most} would fit.")
    else:
        less = f", or {count(most, 'engine')} each" if most else ""
        more = f"{plan.nodes} such nodes" if plan.nodes else "a larger node: no attendee fits on this one"
        said.append(f"Engines per person: {plan.engines} fit {plan.fits:,} of {plan.attendees:,}: take {more}{less}.")
    if plan.engines < ENGINES:
        said.append(f"The notebooks call lab.start({ENGINES}): attendees have to write lab.start({plan.engines}).")
    if plan.gpus:
        said.append(f"GPUs: {shared_gpus(plan, plan.gpu_engines)}.")
    return "\n".join(said)


def shared_gpus(plan, each):
    """How a class shares its GPUs. each: engines that one attendee has on them."""
    idle, at_once = plan.gpus - plan.attendees * each, plan.gpus // each
    if at_once == 0:
        return f"one for {each} engines, which NCCL refuses to share: use it for lab.start(1) alone"
    said = f"one for each of {each} engines, so {count(at_once, 'attendee')} at a time"
    if idle > 0:
        return f"{said}, which is all of them; {count(idle, 'GPU')} stay idle"
    turns = count(math.ceil(plan.attendees / at_once), "turn")
    return f"{said}, {turns} for all: memory of engines on GPUs was not measured"


def settings(plan: Plan) -> str:
    """The hub's settings to paste, as arguments and as lines of a configuration."""
    limit = math.ceil(plan.each("MB") * HEADROOM / 100) * 10**8  # bytes, a round number
    seconds = max(60, 10 * math.ceil(3 * plan.seconds("server") / 10))  # for a server to start while all start
    here = min(plan.attendees, plan.fits)
    lines = [
        "the hub, to paste",
        f"  hpdl hub --users {here} --engines {plan.engines} --memory {limit / 1e9:g}GB --start-timeout {seconds}",
        "or, in a jupyterhub_config.py of yours",
        f"  c.JupyterHub.active_server_limit = {here}",
        f"  c.JupyterHub.concurrent_spawn_limit = {here}  # beyond it, browsers are told to try again",
        f"  c.Spawner.start_timeout = {seconds}",
        f"  c.Spawner.http_timeout = {seconds}",
        f"  c.Spawner.mem_limit = {limit}  # bytes",
        f"  c.Spawner.cpu_limit = {min(plan.engines, plan.cores)}",
    ]
    if here * limit > plan.memory:
        lines.append(
            f"  {here} limits of {limit / 1e9:g} GB are more than the node has: good for all who work as measured, "
            "not for all who use up their limit"
        )
    return "\n".join(lines)


def reservation(plan, start=None):
    """Slurm's reservation to paste. start: datetime; default tomorrow at 9."""
    start = start or datetime.datetime.combine(datetime.date.today() + datetime.timedelta(days=1), datetime.time(9))
    whole = "; whole nodes, with their GPUs: PartitionName=... names where those are" if plan.gpus else ""
    return (
        f"Slurm, to paste; day, hours and the file with the attendees' accounts are yours to change{whole}\n"
        f"  scontrol create reservation ReservationName=hpdl StartTime={start:%Y-%m-%dT%H:%M:%S} Duration=08:00:00 "
        f"Users=$(paste -sd, attendees.txt) NodeCnt={plan.nodes}\n"
        f'  lab.start({plan.engines}, where="slurm", reservation="hpdl")'
    )


def constants(costs: Costs) -> str:
    """The constants of a plan, with where they come from."""
    once = ", ".join(f"{what} {costs[name]:,.4g}" for name, what in ONCE.items())
    rows = [[step, *(f"{costs[f'{step}_{column}']:,.4g}" for column in COLUMNS)] for step in STEPS]
    return (
        f"constants, measured by `{costs.command}` with {costs.engines} engines and notebook {costs.notebook}\n"
        f"  on {costs.machine}; {costs.versions}; {costs.date}\n"
        f"  kept in {costs.path}; memory (MB): {once}\n" + table(("one alone", *COLUMNS.values()), rows)
    )
