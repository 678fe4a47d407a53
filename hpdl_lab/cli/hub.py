"""`hpdl hub`: JupyterHub for a class, on this machine."""

from __future__ import annotations

import argparse
import os
import re
import signal
import ssl
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .arguments import Commands, folder, memory_size, number_between, ranks
from .plan import interrupt

if TYPE_CHECKING:
    from ..classroom.settings import Settings

CORES = number_between("a number of cores", 0.1, 1e6, besides=0)  # with less no server starts in time
MINUTES = number_between("a number of minutes", 0, 1e6)


def add(commands: Commands) -> None:
    from ..classroom.settings import STATE, Settings

    usual = Settings()
    command = commands.add_parser("hub", help="JupyterHub for a class on this machine, until Ctrl-C")
    who = command.add_mutually_exclusive_group()
    who.add_argument("--users", type=ranks, metavar="N", help="attendee01, attendee02, ..., who choose a password (12)")
    who.add_argument("--users-file", metavar="FILE", help="a name on each line, with a first password if you choose it")
    command.add_argument("--engines", type=ranks, default=usual.engines, help="engines of one attendee at most (4)")
    command.add_argument(
        "--memory",
        type=memory_size,
        default=0,
        help="memory of one attendee, such as 3G (1G, and 0.5G for each engine)",
    )
    command.add_argument(
        "--cores",
        type=CORES,
        default=0,
        help="cores of one attendee (one for each engine)",
    )
    command.add_argument(
        "--idle",
        type=MINUTES,
        default=usual.idle,
        help="minutes until unused servers stop; 0: never (60)",
    )
    command.add_argument(
        "--start-timeout", type=ranks, default=usual.start_timeout, help="seconds for a server to start (120)"
    )
    command.add_argument(
        "--address", default=usual.address, help="address to listen on: 0.0.0.0 is all (127.0.0.1, this machine)"
    )
    command.add_argument("--port", type=int, default=usual.port, help="port for browsers (8000)")
    command.add_argument("--certificate", default="", metavar="FILE", help="TLS: the certificate chain")
    command.add_argument("--key", default="", metavar="FILE", help="TLS: its key")
    command.add_argument(
        "--subdomain-host",
        default="",
        metavar="URL",
        help="such as https://hub.example.org: servers get names below it; needs a wildcard name and certificate",
    )
    command.add_argument(
        "--state", type=folder, default=STATE, help=f"folder of accounts' files and all else ({STATE})"
    )
    command.add_argument("--no-tls", action="store_true", help="serve the network without TLS: another server does TLS")
    command.add_argument(
        "--trust-attendees", action="store_true", help="start even if attendees cannot be isolated or limited"
    )
    command.add_argument(
        "--emulated", action="store_true", help="let attendees make user namespaces, for emulated hosts"
    )
    command.add_argument(
        "--profile", metavar="NAME", help="engines by your IPython profile of this name, and so in the site's cluster"
    )
    command.add_argument("--dummy", action="store_true", help="any password opens any account; on 127.0.0.1 only")
    task = command.add_mutually_exclusive_group()
    task.add_argument("--forget-password", metavar="NAME", help="print a new password for NAME; the old one ends")
    task.add_argument("--progress", action="store_true", help="print which exercises each attendee has passed")
    task.add_argument("--remove", action="store_true", help="remove attendees' files, passwords and all else")
    command.set_defaults(command=hub)


def hub(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or do one of the two tasks that end at once."""
    from ..classroom import authenticator, settings
    from ..classroom.hub import Hub, forget_password, read_progress
    from ..classroom.state import HubState
    from ..engines.ipyparallel_client import profile_folder

    state = arguments.state
    if arguments.remove:
        HubState.lock_existing(state).remove()
        print(f"Removed {state}, with the files of its attendees.")
        return 0
    if arguments.forget_password:
        password = forget_password(state, arguments.forget_password)
        print(f"The new password of {arguments.forget_password}: {password}")
        return 0
    if arguments.progress:
        for name, rows in read_progress(state).items():
            print(f"{name}  {_how_far(rows)}")
        return 0
    if arguments.users_file:
        passwords = authenticator.read_users(arguments.users_file)
    else:
        passwords = dict.fromkeys(authenticator.numbered(arguments.users or 12))
    given = settings.Settings(
        users=tuple(passwords),
        state=state,
        engines=arguments.engines,
        memory=arguments.memory,
        cores=arguments.cores,
        idle=arguments.idle,
        start_timeout=arguments.start_timeout,
        address=arguments.address,
        port=arguments.port,
        certificate=os.path.abspath(arguments.certificate) if arguments.certificate else "",
        key=os.path.abspath(arguments.key) if arguments.key else "",
        trust_attendees=arguments.trust_attendees,
        subdomain_host=arguments.subdomain_host.rstrip("/"),
        emulated=arguments.emulated,
        dummy=arguments.dummy,
        profile=profile_folder(arguments.profile) if arguments.profile else "",
    )
    check_options(given, arguments.no_tls)
    for signum in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal ends the class in order, as Ctrl-C does
        if signal.getsignal(signum) is not signal.SIG_IGN:  # but nohup keeps it
            signal.signal(signum, interrupt)
    print("Starting JupyterHub ...", flush=True)
    with Hub.start(given, passwords) as running:
        for line in instructor_lines(running.settings):
            print(line)
        sys.stdout.flush()
        try:
            running.serve(lambda text: print(text, flush=True))
        except KeyboardInterrupt:
            print("\nStopping JupyterHub, servers and engines ...", flush=True)
    print("Stopped. Files and passwords stay: the same command goes on from here.")
    return 0


def check_options(given: Settings, no_tls: bool = False) -> None:
    """Raise ValueError or OSError for options that do not go together, or leave the hub open."""
    from ..classroom import authenticator

    if not given.loopback and not given.certificate and not no_tls:
        raise ValueError(
            f"on {given.address} without TLS passwords are readable on the network: give --certificate and --key, or "
            "say --no-tls if a web server in front of this one does TLS"
        )
    if given.dummy and not given.loopback:
        raise ValueError(f"--dummy lets anybody in as anybody: on 127.0.0.1 only, not on {given.address}")
    if given.subdomain_host and not re.fullmatch(r"https?://[^/:]*[a-z][^/:]*(:\d+)?", given.subdomain_host):
        raise ValueError(f"--subdomain-host {given.subdomain_host}: a name is wanted, as in https://hub.example.org")
    if given.subdomain_host and given.subdomain_host.startswith("https:") != bool(given.certificate or no_tls):
        raise ValueError(
            f"--subdomain-host {given.subdomain_host}: https wants --certificate and --key, or --no-tls if a web "
            "server in front of this one does TLS; http wants neither"
        )
    if bool(given.certificate) != bool(given.key):
        raise ValueError("TLS needs both, --certificate and --key")
    for path in filter(None, (given.certificate, given.key)):
        open(path).close()  # OSError with its name
    if given.certificate:
        authenticator.require_secret(given.key, "with the key, any server can pose as the hub")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(given.certificate, given.key, password="")
        except ssl.SSLError:
            raise ValueError(
                f"{given.certificate} and {given.key} are no certificate chain and its key, in PEM and without password"
            ) from None


def _how_far(rows: list[dict[str, object]] | str) -> str:
    """Return what an attendee has passed and did last, with escape sequences made visible."""
    if isinstance(rows, str):
        return f"cannot be read: {rows}"
    passed = sorted({str(row.get("exercise")) for row in rows if row.get("kind") == "check" and row.get("passed")})
    last = [str(rows[-1][key]) for key in ("time", "kind", "exercise", "failed") if rows[-1].get(key)] if rows else []
    return ascii(f"passed {' '.join(passed) or 'none'}; last: {' '.join(last) or 'none'}")[1:-1][:300]


def instructor_lines(given: Settings) -> Iterator[str]:
    """Yield the lines for the instructor."""
    from ..classroom.limits import PROCESSES

    if given.dummy:
        yield "DUMMY: any password opens any account."
    if given.groups:
        n = given.core_limit
        yield (
            f"Each attendee has {given.memory_limit / 1e9:.1f} GB of memory, {n:g} {'core' if n == 1 else 'cores'} and "
            f"{PROCESSES:,} processes at most, by control groups."
        )
    else:
        yield "NO LIMITS: every attendee can take all memory and all cores of this machine."
    if not given.sandbox:
        theirs = "" if os.geteuid() == 0 else ", and read and change the files of all, and yours"
        yield f"NO SANDBOX: every attendee can disturb the programs of all{theirs}."
    if given.loopback:
        yield "Only this machine reaches it: --address 0.0.0.0 with --certificate and --key opens it to the class."
    if given.profile:
        yield f"Attendees' engines start by the profile in {given.profile}; its *.py files are copied to each of them."
    names = f"{given.users[0]} ... {given.users[-1]}" if len(given.users) > 1 else given.users[0]
    engines = "engine" if given.engines == 1 else "engines"
    yield f"\n  The hub is ready:  {given.url}"
    yield f"  {len(given.users)} attendees ({names}), {given.engines} {engines} each.  Ctrl-C here stops it.\n"
