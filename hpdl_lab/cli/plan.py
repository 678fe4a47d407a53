"""`hpdl plan`: will a class fit on a node, and what to paste. `hpdl drill`: the class rehearsed. `hpdl release`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, cast

from .. import system
from ..bench.report import markdown, put
from ..classroom import costs
from ..classroom.costs import COLUMNS, ONCE, ClassroomCosts
from ..classroom.plan import BEYOND, ENGINES, IN_TURNS, STEPS, ClassPlan
from ..units import counted
from .arguments import Commands, file, folder, memory_size, ranks

if TYPE_CHECKING:
    from ..classroom.drill import Drill

HEADROOM = 1.5  # of memory, above what was measured: attendees make mistakes
SCRIPT_MB = 310  # each rank of a script that torchrun runs: a quarter of what notebook 06's file took at most
USER_COLUMNS = ("attendee", *(f"{step} (s)" for step in STEPS), "memory (MB)", "failed at")
STEP_COLUMNS = ("step", "done", "median (s)", "last (s)", "planned", "error", "processor of one (s)", "planned")
STEP_COLUMNS += ("error", "memory of all (GB)", "planned", "error")


def add(commands: Commands) -> None:
    command = commands.add_parser("plan", help="will a class fit on a node, what runs out first, settings to paste")
    command.add_argument("--attendees", type=int, help="number of attendees")
    command.add_argument("--node-cores", type=int, help="cores of one node")
    command.add_argument("--memory", type=memory_size, help="memory of one node, with its unit: 256GB, or 12GiB")
    command.add_argument("--gpus", type=int, default=0, help="GPUs of one node (0)")
    command.add_argument("--engines", type=int, help="engines of each attendee (4, as in the notebooks)")
    command.add_argument("--measure", action="store_true", help="measure the constants on this machine first, 1 minute")
    command.add_argument(
        "--save", type=file, metavar="FILE", help="write the constants of --measure there (~/.hpdl/costs.json)"
    )
    command.set_defaults(command=plan)

    command = commands.add_parser("drill", help="rehearse a class: logins, servers, engines, a notebook, all at once")
    command.add_argument("--users", type=ranks, required=True, help="attendees at once")
    command.add_argument(
        "--notebook", default="00", metavar="NN", help="the notebook that they run, with its solutions (00)"
    )
    command.add_argument(
        "--markdown", type=file, metavar="FILE", help="write the tables there, in place of the last ones"
    )
    command.set_defaults(command=drill)

    command = commands.add_parser("release", help="write the exercises into a folder, or update what is there")
    command.add_argument(
        "folder", type=folder, metavar="FOLDER", help="an attendee's folder, or a course: changes are kept"
    )
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--from", dest="source", type=folder, metavar="DIR", help="exercise forms (notebooks/)")
    kind.add_argument("--nbgrader", action="store_true", help="FOLDER is a course: write the sources for nbgrader")
    command.set_defaults(command=release)


def release(arguments: argparse.Namespace) -> int:
    """Write the exercises, and print what was done."""
    from ..release import course, update

    said = (
        course.write_course(arguments.folder)
        if arguments.nbgrader
        else update.write_notebooks(arguments.folder, arguments.source)
    )
    for sentence in said:
        print(sentence)
    if not said:
        print("Nothing to do: the notebooks are up to date.", file=sys.stderr)
    return 0


# -- hpdl plan ---------------------------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace) -> int:
    """Print plan and constants; exit code 1 if the class does not fit on one node."""
    asked = (arguments.attendees, arguments.node_cores, arguments.memory)
    if None in asked and not (arguments.measure and asked == (None,) * 3):
        raise ValueError("a plan needs all three: hpdl plan --attendees 40 --node-cores 64 --memory 256GB")
    if arguments.save and not arguments.measure:
        raise ValueError("--save is where --measure writes: give both, or neither")
    known = _measured(arguments.save or costs.own_path()) if arguments.measure else costs.load_costs()
    if arguments.attendees is None:
        print(constants_text(known))
        return 0
    engines = ENGINES if arguments.engines is None else arguments.engines
    made = ClassPlan(known, arguments.attendees, arguments.node_cores, arguments.memory, arguments.gpus, engines)
    print(text(made), constants_text(known), sep="\n\n")
    if made.fits < made.attendees:
        print(
            f"hpdl: {made.fits:,} of {made.attendees:,} attendees fit on such a node: see what runs out first",
            file=sys.stderr,
        )
        return 1
    return 0


def _measured(path: str) -> ClassroomCosts:
    """Measure the constants with one attendee on this machine, and write them to `path`."""
    from ..classroom import drill

    found = dataclasses.replace(drill.measure_costs("hpdl plan --measure"), path=str(path))
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    system.write_file(path, found.json())
    return found


def _table(columns: Sequence[str], rows: list[list[str]], left: tuple[int, ...] = (0,)) -> str:
    """Return a table. left: columns of words, the others are numbers."""
    return markdown(columns, rows, [i in left for i in range(len(columns))])


def text(plan: ClassPlan) -> str:
    """Return the whole report, without the constants."""
    gpus = f" and {counted(plan.gpus, 'GPU')}" if plan.gpus else ""
    head = (
        f"{counted(plan.attendees, 'attendee')}, {counted(plan.engines, 'engine')} each, on a node of "
        f"{counted(plan.cores, 'core')}, {plan.memory / 1e9:,.0f} GB{gpus}"
    )
    parts = [head, resources(plan), _times(plan), capacity_text(plan)]
    if plan.fits:  # else there is no class to paste anything for
        parts += [settings(plan), reservation(plan)]
    return "\n\n".join(parts)


def resources(plan: ClassPlan) -> str:
    """Return the table of what runs out, the first to hurt first."""
    rows = []
    for r in plan.resources():
        each, limit = (f"{v:,.{int(v < 100 and v != int(v))}f} {r.unit}".rstrip() for v in (r.each, r.limit))
        rows.append([r.name, each, limit, f"{r.fits:,}", f"{r.used(plan.attendees):.0%}", BEYOND[r.name]])
    return _table(
        ("resource", "one attendee", "the node", "fit", f"at {plan.attendees:,}", "beyond that"), rows, (0, 5)
    )


def _times(plan: ClassPlan) -> str:
    """Return a table of the seconds of each step, one alone and all at once."""
    rows = [[step, f"{plan.costs[f'{step}_s']:.1f} s", f"{plan.seconds(step):.1f} s"] for step in STEPS]
    rows.insert(-1, ["all until torch", "", f"{sum(plan.seconds(step) for step in STEPS[:-1]):.1f} s"])
    return _table(("when all at once", "one alone", f"the last of {plan.attendees:,}"), rows)


def capacity_text(plan: ClassPlan) -> str:
    """Return sentences: how many fit, what runs out first, engines per person."""
    hurts = []
    for row in plan.resources():
        limited = f"{row.name}, beyond {counted(row.fits, 'attendee')}"
        if row.name not in IN_TURNS:
            hurts.append(f"{limited}: {BEYOND[row.name]}")
            break
        none = f"{row.name}: even one attendee has fewer than wanted"
        hurts.append(f"{limited}, who then take turns" if row.fits else none)
    said = [
        f"What runs out first: {'; then '.join(hurts)}.",
        f"Memory: {plan.each('MB') / 1e3:.2f} GB an attendee, {plan.memory_MB() / 1e3:.1f} GB in all.",
    ]
    most = plan.most_engines()
    if plan.fits >= plan.attendees:
        said.append(f"Engines per person: {plan.engines}; up to {most} would fit.")
    else:
        less = f", or {counted(most, 'engine')} each" if most else ""
        more = f"{plan.nodes} such nodes" if plan.nodes else "a larger node: no attendee fits on this one"
        said.append(f"Engines per person: {plan.engines} fit {plan.fits:,} of {plan.attendees:,}: take {more}{less}.")
    if plan.engines < ENGINES:
        said.append(f"The notebooks call lab.start({ENGINES}): attendees have to write lab.start({plan.engines}).")
    if plan.gpus:
        said.append(f"GPUs: {_shared_gpus(plan, plan.gpu_engines)}.")
    return "\n".join(said)


def _shared_gpus(plan: ClassPlan, each: int) -> str:
    """Say how a class shares its GPUs. each: engines that one attendee has on them."""
    idle, at_once = plan.gpus - plan.attendees * each, plan.gpus // each
    if at_once == 0:
        return f"one for {each} engines, which NCCL allows from 2.30 on; before, tensors go through the host"
    said = f"one for each of {each} engines, so {counted(at_once, 'attendee')} at a time"
    if idle > 0:
        return f"{said}, which is all of them; {counted(idle, 'GPU')} stay idle"
    turns = counted(math.ceil(plan.attendees / at_once), "turn")
    return f"{said}, {turns} for all: memory of engines on GPUs was not measured"


def settings(plan: ClassPlan) -> str:
    """Return the hub's settings to paste, as arguments and as lines of a configuration."""
    limit = math.ceil((plan.each("MB") * HEADROOM + plan.engines * SCRIPT_MB) / 100) * 10**8  # bytes, a round number
    seconds = max(60, 10 * math.ceil(3 * plan.seconds("server") / 10))  # for a server to start while all start
    here = min(plan.attendees, plan.fits)
    lines = [
        "the hub, to paste",
        f"  hpdl hub --users {here} --engines {plan.engines} --memory {limit / 1e9:g}GB --start-timeout {seconds}",
        "or, in a jupyterhub_config.py of yours",
        f"  c.JupyterHub.active_server_limit = {here}",
        f"  c.JupyterHub.concurrent_spawn_limit = {here}  # beyond it, browsers are asked to try again",
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


def reservation(plan: ClassPlan, start: datetime.datetime | None = None) -> str:
    """Return Slurm's reservation to paste. start: datetime; default tomorrow at 9."""
    start = start or datetime.datetime.combine(datetime.date.today() + datetime.timedelta(days=1), datetime.time(9))
    whole = "; whole nodes, with their GPUs: PartitionName=... names where those are" if plan.gpus else ""
    return (
        f"Slurm, to paste; day, hours and the file with the attendees' accounts are yours to change{whole}\n"
        f"  scontrol create reservation ReservationName=hpdl StartTime={start:%Y-%m-%dT%H:%M:%S} Duration=08:00:00 "
        f"Users=$(paste -sd, attendees.txt) NodeCnt={plan.nodes}\n"
        f'  lab.start({plan.engines}, where="slurm", reservation="hpdl")'
    )


def constants_text(costs: ClassroomCosts) -> str:
    """Return the constants of a plan, with their origin."""
    once = ", ".join(f"{what} {costs[name]:,.4g}" for name, what in ONCE.items())
    rows = [[step, *(f"{costs[f'{step}_{column}']:,.4g}" for column in COLUMNS)] for step in STEPS]
    return (
        f"constants, measured by `{costs.command}` with {costs.engines} engines and notebook {costs.notebook}\n"
        f"  on {costs.machine}; {costs.versions}; {costs.date}\n"
        f"  kept in {costs.path}; memory (MB): {once}\n" + _table(("one alone", *COLUMNS.values()), rows)
    )


# -- hpdl drill --------------------------------------------------------------------------------------------------------


def drill(arguments: argparse.Namespace) -> int:
    """Rehearse, print the report; exit code 1 if somebody failed or something is left."""
    import psutil

    from .. import features
    from ..classroom import drill

    memory = psutil.virtual_memory().total
    plan = ClassPlan(costs.load_costs(), arguments.users, features.cores(), memory)
    _require_memory(plan, psutil.virtual_memory().available)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        done = drill.run_drill(arguments.users, arguments.notebook, say=lambda sentence: print(sentence, flush=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    found = _report(done, plan, arguments.invocation, *drill.provenance())
    print(f"\n{found}")
    if arguments.markdown:
        put(arguments.markdown, "drill", found)
    return int(bool(done.failures))


def _report(done: Drill, plan: ClassPlan, command: str, machine: str, versions: str, date: str) -> str:
    """Return the whole report, as a section of documentation that reads well in a terminal."""
    known, n = cast(ClassroomCosts, plan.costs), counted(len(done.attendees), "attendee")
    outcome = f"{n}, no failure, nothing left behind."
    if done.failures:
        outcome = "\n".join([*map(str, done.failures), f"{counted(len(done.failures), 'failure')} of {n}."])
    parts = [
        f"## {n} at once",
        f"`{command}`",
        f"{machine}, {plan.memory / 1e9:.0f} GB; {versions}; {date}.",
        "### Each attendee",
        _table(USER_COLUMNS, _users(done)),
        "### All together, and the plan's error",
        _table(STEP_COLUMNS, steps(done, plan)),
        f"The plan's constants were measured on {known.machine}, by `{known.command}`, {known.date}.",
        outcome,
    ]
    return "\n\n".join(parts)


def _users(done: Drill) -> list[list[str]]:
    """Return each attendee's seconds, memory at the end of their last step, and the step at which they failed."""
    failed, rows = {failure.name: failure.step for failure in done.failures}, []
    for number, attendee in enumerate(done.attendees, 1):
        seconds = {step: row.seconds.get(attendee.name) for step, row in done.steps.items()}
        times = (f"{s:.1f}" if (s := seconds.get(step)) else "" for step in STEPS)
        memory = max((row.after.of(attendee.name).memory_MB for row in done.steps.values()), default=0)
        rows.append([str(number), *times, f"{memory:,.0f}", failed.get(attendee.name, "")])
    return rows


def steps(done: Drill, plan: ClassPlan) -> list[list[str]]:
    """Return each step of all together, with what the plan predicts of it; error: predicted/measured - 1."""
    n, rows = len(done.attendees), []
    for step, row in done.steps.items():
        times = list(row.seconds.values()) or [0.0]
        # The plan is about steps that everybody has done, and what one notebook takes, not what others do.
        planned = len(row.seconds) == n and (step != "notebook" or done.notebook == plan.costs.notebook)
        rows.append([step, str(len(row.seconds)), f"{statistics.median(times):.1f}"])
        for digits, measured, predicted in (
            (1, max(times), plan.seconds(step)),
            (2, row.cpu_s() / n, plan.each("cpu_s", step)),
            (2, row.after.memory_MB / 1e3, plan.memory_MB(step) / 1e3),
        ):
            rows[-1] += [f"{measured:,.{digits}f}", "", ""]
            if planned and measured:
                rows[-1][-2:] = f"{predicted:,.{digits}f}", f"{predicted / measured - 1:+.0%}"
    return rows


def _require_memory(plan: ClassPlan, available: int) -> None:
    """Raise ValueError if so many attendees would fill this machine's memory. available: bytes."""
    most = int((available / 1e6 - plan.once_MB) / plan.each("MB"))
    if plan.attendees > most:
        raise ValueError(
            f"{plan.attendees:,} attendees take {plan.memory_MB() / 1e3:,.1f} GB of memory, and this machine has "
            f"{available / 1e9:,.1f} GB free: rehearse with {max(0, most):,} at most, or on the class's own machine"
        )


def interrupt(signum: int, frame: FrameType | None) -> None:
    """End the drill, or the hub, on SIGTERM as on Ctrl-C, so that all is removed in order."""
    raise KeyboardInterrupt
