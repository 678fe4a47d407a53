"""`hpdl doctor`: what this machine and build can do."""

from .. import __version__


def add(commands):
    command = commands.add_parser("doctor", help="what this machine and build can do, with the reason for each no")
    command.set_defaults(command=doctor)


def doctor(arguments):
    from .. import features

    report = features.doctor()
    print(f"hpdl_lab {__version__}\n\n{report}")
    return 0 if report.ok else 1
