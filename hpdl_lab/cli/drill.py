"""`hpdl drill`: a class rehearsed on a hub of its own, with times, memory, failures and the plan's error."""

from .arguments import file, ranks


def add(commands):
    command = commands.add_parser(
        "drill", help="rehearse a class: logins, servers, engines and a notebook, all at once"
    )
    command.add_argument("--users", type=ranks, required=True, help="attendees at once")
    command.add_argument("--notebook", default="00", metavar="NN", help="whose solution they run (00)")
    command.add_argument("--markdown", type=file, metavar="FILE", help="write the tables there, in place of the last")
    command.set_defaults(command=drill)


def drill(arguments):
    """Rehearse, print the report; exit code 1 where somebody failed or something is left."""
    import psutil

    from .. import features
    from ..bench.markdown import put
    from ..classroom import costs, drill, drill_text, measure
    from ..classroom.plan import Plan

    constants = costs.load()
    memory, cores = psutil.virtual_memory().total, features.cores()
    done = drill.rehearse(arguments.users, arguments.notebook, say=lambda sentence: print(sentence, flush=True))
    plan = Plan(constants, arguments.users, cores, memory, 0, done.engines)
    print(f"\n{drill_text.text(done, plan)}")
    if arguments.markdown:
        command = (
            f"hpdl drill --users {arguments.users} --notebook {arguments.notebook} --markdown {arguments.markdown}"
        )
        about = f"{measure.machine()}, {memory / 1e9:.0f} GB; {measure.versions()}; {measure.today()}."
        put(arguments.markdown, "drill", drill_text.markdown(done, plan, about, command))
    return int(bool(done.failures))
