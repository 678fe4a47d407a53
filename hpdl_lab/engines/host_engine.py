"""An engine on an emulated host: enters the namespaces of its host and is an engine then (engine.py).

Nothing may be imported before: a process that has more than one thread can enter no user namespace.
"""

import json
import os

from . import namespaces, session_dir


def enter(number):
    """Move this process to host `number`."""
    folder = os.getcwd()
    with open(session_dir.hosts_file(os.environ["HPDL_SESSION"])) as file:
        told = json.load(file)
    paths = [*([told["user"]] if told["user"] else []), *told["hosts"][number]]
    for handle in [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]:  # all before the first: then it can
        namespaces.join(handle)
        os.close(handle)
    os.chdir(folder)  # new mounts: the process has been put into the root directory


def main():
    rank, size, hosts = (int(os.environ[name]) for name in ("PMI_RANK", "PMI_SIZE", "HPDL_HOSTS"))
    enter(rank * hosts // size)
    from . import engine

    engine.main()


if __name__ == "__main__":
    main()
