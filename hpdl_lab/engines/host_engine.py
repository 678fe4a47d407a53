"""An engine on an emulated host: it enters the namespaces of its host, and is an engine then (engine.py).

Nothing else may be imported before: a process that has more than one thread can enter no user namespace.
"""

import json
import os

from . import namespaces, session_dir


def enter(path, number):
    """Move this process to emulated host `number` of the session at `path`; OSError or IndexError: there is none."""
    folder = os.getcwd()
    with open(session_dir.hosts_file(path)) as file:
        paths = json.load(file)[number]
    for handle in [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]:  # open all first: paths may change
        namespaces.join(handle)
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
