"""An engine on an emulated host: it enters the namespaces of its host, and is an engine then (engine.py).

Nothing that starts threads, as NumPy does, may be imported before: with threads, no user namespace can be entered.
"""

import json
import os

from . import hosts
from .hosts import told_in


def count(path):
    """How many emulated hosts the session at `path` has."""
    try:
        with open(told_in(path)) as file:
            return len(json.load(file))
    except OSError:
        return 0


def enter(path, number):
    """Move this process to emulated host `number` of the session at `path`."""
    folder = os.getcwd()
    with open(told_in(path)) as file:
        paths = json.load(file)[number]
    for handle in [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]:  # open all first: paths may change
        hosts.join_namespace(handle)
        os.close(handle)
    os.chdir(folder)  # with new mounts, a process starts in the root directory


def main():
    rank, size, hosts = (int(os.environ[name]) for name in ("PMI_RANK", "PMI_SIZE", "HPDL_HOSTS"))
    enter(
        os.environ["HPDL_SESSION"], rank * hosts // size
    )  # neighbors share a host where there are more ranks than hosts
    from . import engine

    engine.main()


if __name__ == "__main__":
    main()
