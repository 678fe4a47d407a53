"""How a process becomes an attendee's: its command line and its environment; the spawner and the rehearsal use it."""

import json
import os
import sys

from . import accounts, enter, limits, reach, server

TOLD = "HPDL_MOST_ENGINES"  # engines/launch.py reads it


def command(given, account, argv, groups=(), log=None):
    """argv that runs `argv` as the attendee `account`; the process that starts it must be the hub's user.

    groups: cgroup.procs files that it joins; log: name of a file in the home that what it prints is added to.
    """
    who = {
        "uid": account.uid,
        "gid": account.gid,
        "home": account.home,
        "groups": list(groups),
        "limits": limits.of_process(given, bool(groups)),
        "cores": limits.cores_of(given, account.name),
        "nice": 0 if groups else limits.NICE,
        "log": log and os.path.join(account.home, log),
        "view": reach.view(given, account.home) if given.isolated else [],
    }
    return [sys.executable, "-I", "-S", enter.__file__, json.dumps(who), *argv]


def environment(given, account):
    """What an attendee's processes find in their environment beside what JupyterHub gives them."""
    own = {
        "HOME": account.home,
        "USER": accounts.PREFIX + account.name if given.isolated else account.name,
        "SHELL": "/bin/bash",
        "XDG_RUNTIME_DIR": account.run,
        "JUPYTER_RUNTIME_DIR": account.run,
        "JUPYTER_PREFER_ENV_PATH": "1",  # the kernel "python3" is this environment's, not one in the home
        "PATH": os.pathsep.join([os.path.join(sys.prefix, "bin"), "/usr/local/bin", "/usr/bin", "/bin"]),
        TOLD: str(given.engines),
        server.SOURCE: str(given.notebooks),
    }
    return own | {"LOGNAME": own["USER"]}
