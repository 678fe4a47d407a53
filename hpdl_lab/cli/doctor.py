"""`hpdl doctor`: what this machine and build can do, and what is known to be wrong here, with the fix."""

from __future__ import annotations

import argparse
import sys

from .arguments import Commands


def add(commands: Commands) -> None:
    command = commands.add_parser("doctor", help="what this machine and build can do, and what is wrong, with the fix")
    only = command.add_mutually_exclusive_group()
    only.add_argument("--log", metavar="FILE", help="name the symptoms in a program's output; -: stdin")
    only.add_argument(
        "--port", type=_place, metavar="[HOST:]PORT", help="is this port free here, or does HOST answer at it?"
    )
    command.set_defaults(command=doctor)


def _place(text: str) -> tuple[str, int]:
    """Split "node2:8000" into ("node2", 8000); "8000" -> ("", 8000)."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: a number from 1 to 65535 is needed, or HOST:PORT")
    return host, int(port)


def doctor(arguments: argparse.Namespace) -> int:
    """Print the table and the symptoms; or only what a log, or a port, tells."""
    if arguments.port:
        return _look_at_port(*arguments.port)
    try:
        import numpy  # noqa: F401  # without which nothing here works; doctor.py itself can do without

        from .. import __version__
        from ..engines import doctor
    except ModuleNotFoundError as error:
        from ..symptoms.build import FIX

        raise RuntimeError(f"{sys.executable} lacks packages that hpdl_lab needs ({error}): {FIX}") from None
    if arguments.log:
        return _look_into(arguments.log)
    examination = doctor.doctor()
    print(f"hpdl_lab {__version__}\n\n{examination}")
    return 0 if examination.ok else 1


def _look_into(path: str) -> int:
    """Name the symptoms in the log at `path`."""
    from ..engines.doctor import KNOWN, describe_findings
    from ..symptoms import found_in

    with open(0 if path == "-" else path, errors="replace") as file:
        findings = found_in(KNOWN, file.read())
    names = ", ".join(symptom.name for symptom in KNOWN if symptom.said)
    print(describe_findings(findings) or f"No symptom that logs are known to tell of: {names}.")
    return 1 if findings else 0


def _look_at_port(host: str, port: int) -> int:
    """Say that the port is free here, or answers on `host`. Raises features.Missing, which the command prints."""
    from ..features import ports

    if host:
        ports.require_answer(host, port)
        print(f"{host} answers at port {port}.")
    else:
        ports.require_free(port)
        print(f"Port {port} is free.")
    return 0
