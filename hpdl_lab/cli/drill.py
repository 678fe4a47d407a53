"""`hpdl drill`: a class rehearsed on a hub of its own, with times, memory, failures and the plan's error."""

import signal

from .arguments import file, ranks


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
    from ..classroom.plan import ENGINES, Plan

    memory = psutil.virtual_memory().total
    plan = Plan(costs.load(), arguments.users, features.cores(), memory, 0, ENGINES)
    require_memory(plan, psutil.virtual_memory().available)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        done = drill.rehearse(arguments.users, arguments.notebook, say=lambda sentence: print(sentence, flush=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    command = f"hpdl drill --users {arguments.users} --notebook {arguments.notebook}"
    report = drill.report(done, plan, command + (f" --markdown {arguments.markdown}" if arguments.markdown else ""))
    print(f"\n{report}")
    if arguments.markdown:
        put(arguments.markdown, "drill", report)
    return int(bool(done.failures))


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
