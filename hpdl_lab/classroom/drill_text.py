"""What `hpdl drill` prints: a row for each attendee, a row for each step, the plan's error, the failures."""

import statistics

from .plan import STEPS

USER_COLUMNS = ("attendee", *(f"{step} (s)" for step in STEPS), "memory (MB)", "failed at")
STEP_COLUMNS = ("step", "done", "median (s)", "last (s)", "processor (s)", "memory in all (GB)")
ERROR_COLUMNS = ("quantity", "predicted", "measured", "error")


def users(drill):
    """[[text]]: each attendee's seconds, memory at the end of the last step that they did, and where they failed."""
    failed = {failure.name: failure.step for failure in drill.failures}
    rows = []
    for number, attendee in enumerate(drill.attendees, 1):
        name, looks = attendee.name, [step.census.of(attendee.name) for step in drill.steps.values()]
        memory = max((look.total("pss_MB") for look in looks), default=0)
        seconds = [drill.steps[step].seconds.get(name) if step in drill.steps else None for step in STEPS]
        rows.append([str(number), *("" if s is None else f"{s:.1f}" for s in seconds)])
        rows[-1] += [f"{memory:,.0f}", failed.get(name, "")]
    return rows


def steps(drill):
    """[[text]]: each step of all attendees together."""
    rows = []
    for step in drill.steps.values():
        times = list(step.seconds.values())
        median, last = (f"{f(times):.1f}" if times else "" for f in (statistics.median, max))
        memory = step.census.total("pss_MB") / 1e3
        rows.append([step.name, str(len(times)), median, last, f"{step.cpu_s:.1f}", f"{memory:.2f}"])
    return rows


def errors(drill, plan):
    """[[text]]: what the plan predicts of this class beside what was measured; error: predicted/measured - 1."""
    rows = []
    for name, unit, digits, predicted, measured in pairs(drill, plan):
        error = f"{predicted / measured - 1:+.0%}" if measured else ""
        rows.append(
            [f"{name} ({unit})" if unit else name, f"{predicted:,.{digits}f}", f"{measured:,.{digits}f}", error]
        )
    return rows


def pairs(drill, plan):
    """(quantity, unit, digits, predicted, measured), of steps that everybody has done."""
    everybody = len(drill.attendees)
    done = [step for step in STEPS if step in drill.steps and len(drill.steps[step].seconds) == everybody]
    if drill.notebook != plan.costs.notebook:  # the plan knows what one notebook takes, not what others do
        done = [step for step in done if step != "notebook"]
    for step in done:
        yield f"{step}, until the last is ready", "s", 1, plan.seconds(step), max(drill.steps[step].seconds.values())
    for step in done:
        yield f"{step}, processor time of one", "s", 2, plan.cpu_s(step), drill.steps[step].cpu_s / everybody
    for step in done[1:]:
        yield (
            f"memory in all after {step}",
            "GB",
            2,
            plan.memory_MB(step) / 1e3,
            drill.steps[step].census.total("pss_MB") / 1e3,
        )
    if "torch" in done:
        look = drill.steps["torch"].census
        attendees = [process for process in look if process.owner]
        threads, ports = (sum(getattr(p, field) for p in attendees) for field in ("threads", "listening"))
        yield "/dev/shm", "MB", 1, everybody * plan.engines * plan.costs["shm_MB"], look.shm_MB()
        yield "processes of attendees", "", 0, everybody * plan.each("processes"), len(attendees)
        yield "threads of attendees", "", 0, everybody * plan.each("threads"), threads
        yield "ports of attendees", "", 0, everybody * plan.costs["ports"], ports
        for kind in ("hub", "proxy"):
            more = look.of("", kind).total("files") - drill.before.of("", kind).total("files")
            yield f"open files of the {kind}, more", "", 0, everybody * plan.costs[f"{kind}_files"], more


def text(drill, plan):
    """The whole report for a terminal."""
    parts = [
        table(USER_COLUMNS, users(drill)),
        table(STEP_COLUMNS, steps(drill)),
        f"the plan's error (constants of {plan.costs.machine})\n" + table(ERROR_COLUMNS, errors(drill, plan)),
        verdict(drill),
    ]
    return "\n\n".join(parts)


def verdict(drill):
    """What failed, a sentence each."""
    n = len(drill.attendees)
    if not drill.failures:
        return f"{n} attendee{'s' * (n > 1)}, no failure, nothing left behind."
    return "\n".join([*map(str, drill.failures), f"{len(drill.failures)} failures of {n} attendees."])


def table(columns, rows):
    """Texts in columns as wide as they need, the first one to the left."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = []
    for row in [columns, *rows]:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([row[0].ljust(len(first)), *others]).rstrip())
    return "\n".join(lines)


def markdown(drill, plan, about, command):
    """The report as a section of documentation. about: a sentence on machine, versions and date."""
    parts = [f"## {len(drill.attendees)} attendees at once", f"`{command}`", about]
    for title, columns, rows in (
        ("Each attendee", USER_COLUMNS, users(drill)),
        ("All together", STEP_COLUMNS, steps(drill)),
        ("The plan's error", ERROR_COLUMNS, errors(drill, plan)),
    ):
        parts += [f"### {title}", "\n".join(map(line, [columns, [":---", *["---:"] * (len(columns) - 1)], *rows]))]
    said = f"The plan's constants were measured on {plan.costs.machine}, by `{plan.costs.command}`, {plan.costs.date}."
    return "\n\n".join([*parts, said, verdict(drill)])


def line(cells):
    return f"| {' | '.join(cells)} |"
