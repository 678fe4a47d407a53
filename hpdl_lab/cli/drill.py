"""`hpdl drill`: a class rehearsed on a hub of its own, with times, memory, failures and the plan's error."""

import signal
import statistics

from ..classroom.plan import STEPS, Plan
from .arguments import file, ranks
from .plan_text import count, table

USER_COLUMNS = ("attendee", *(f"{step} (s)" for step in STEPS), "memory (MB)", "failed at")
STEP_COLUMNS = ("step", "done", "median (s)", "last (s)", "planned", "error", "processor of one (s)", "planned")
STEP_COLUMNS += ("error", "memory of all (GB)", "planned", "error")


def add(commands):
    command = commands.add_parser("drill", help="rehearse a class: logins, servers, engines, a notebook, all at once")
    command.add_argument("--users", type=ranks, required=True, help="attendees at once")
    command.add_argument("--notebook", default="00", metavar="NN", help="whose solution they run (00)")
    command.add_argument("--markdown", type=file, metavar="FILE", help="write the tables there, in place of the last")
    command.set_defaults(command=drill)


def drill(arguments):
    """Rehearse, print the report; exit code 1 where somebody failed or something is left."""
    import psutil

    from .. import features
    from ..bench.markdown import put
    from ..classroom import costs, drill

    memory = psutil.virtual_memory().total
    plan = Plan(costs.load(), arguments.users, features.cores(), memory)
    require_memory(plan, psutil.virtual_memory().available)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        done = drill.rehearse(arguments.users, arguments.notebook, say=lambda sentence: print(sentence, flush=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    command = f"hpdl drill --users {arguments.users} --notebook {arguments.notebook}"
    command += f" --markdown {arguments.markdown}" if arguments.markdown else ""
    text = report(done, plan, command, *drill.about())
    print(f"\n{text}")
    if arguments.markdown:
        put(arguments.markdown, "drill", text)
    return int(bool(done.failures))


def report(done, plan, command, machine, versions, date):
    """The whole report, as a section of documentation that reads well in a terminal."""
    known, n = plan.costs, count(len(done.attendees), "attendee")
    verdict = f"{n}, no failure, nothing left behind."
    if done.failures:
        verdict = "\n".join([*map(str, done.failures), f"{count(len(done.failures), 'failure')} of {n}."])
    parts = [
        f"## {n} at once",
        f"`{command}`",
        f"{machine}, {plan.memory / 1e9:.0f} GB; {versions}; {date}.",
        "### Each attendee",
        table(USER_COLUMNS, users(done)),
        "### All together, and the plan's error",
        table(STEP_COLUMNS, steps(done, plan)),
        f"The plan's constants were measured on {known.machine}, by `{known.command}`, {known.date}.",
        verdict,
    ]
    return "\n\n".join(parts)


def users(done):
    """[[text]]: each attendee's seconds, memory at the end of the last step that they did, and where they failed."""
    failed, rows = {failure.name: failure.step for failure in done.failures}, []
    for number, attendee in enumerate(done.attendees, 1):
        seconds = {step: row.seconds.get(attendee.name) for step, row in done.steps.items()}
        times = (f"{s:.1f}" if (s := seconds.get(step)) else "" for step in STEPS)
        memory = max((row.after.of(attendee.name).memory_MB for row in done.steps.values()), default=0)
        rows.append([str(number), *times, f"{memory:,.0f}", failed.get(attendee.name, "")])
    return rows


def steps(done, plan):
    """[[text]]: each step of all together, beside what the plan predicts of it; error: predicted/measured - 1."""
    n, rows = len(done.attendees), []
    for step, row in done.steps.items():
        times = list(row.seconds.values()) or [0.0]
        # The plan knows steps that everybody has done, and what one notebook takes, not what others do.
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


def require_memory(plan, available):
    """Raise ValueError where so many attendees would fill this machine's memory. available: bytes."""
    most = int((available / 1e6 - plan.once_MB) / plan.each("MB"))
    if plan.attendees > most:
        raise ValueError(
            f"{plan.attendees:,} attendees take {plan.memory_MB() / 1e3:,.1f} GB of memory, and this machine has "
            f"{available / 1e9:,.1f} GB free: rehearse with {max(0, most):,} at most, or on the class's own machine"
        )


def interrupt(signum, frame):
    """SIGTERM ends the drill as Ctrl-C does, so that accounts and folders are removed."""
    raise KeyboardInterrupt
