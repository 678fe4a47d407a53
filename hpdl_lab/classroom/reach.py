"""What an attendee's server must read although it lies in folders that others cannot enter, such as /root.

    /root            drwx------  the wall             what the server sees:  /root          an empty folder
    /root/.pyenv     drwxr-xr-x  is needed                                   /root/.pyenv   the same, read-only
    /root/.ssh                   is not                                      (nothing)

The server gets a view of the file system of its own (a mount namespace), in which each wall is an empty folder that
holds only what is needed. Nothing changes for anybody else. enter.py carries it out.
"""

import os
import stat
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]  # the clone, or the site-packages that holds this package


def needed():
    """Folders that a server reads: this Python, its environment, and this package; none lies in another."""
    paths = sorted({os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, PACKAGE)})
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


def walls(paths):
    """{wall: the paths that are behind it}: the first folder on the way to each that other accounts cannot enter."""
    found = {}
    for path in paths:
        for folder in [*reversed(Path(path).parents), Path(path)]:
            if not os.stat(folder).st_mode & stat.S_IXOTH:
                found.setdefault(str(folder), []).append(path)
                break
    return found


def view(settings, home):
    """[(wall, [paths])] for enter.py: everything that a server whose home is `home` reads or writes.

    Raises: RuntimeError where a needed folder is itself closed, which no view can open.
    """
    reads = needed()
    notebooks = str(settings.notebooks)
    found = walls([*reads, notebooks, home])
    found.pop(home, None)  # its own
    for wall, behind in found.items():
        if wall in behind:
            raise RuntimeError(
                f"attendees' accounts cannot read {wall} (mode {stat.filemode(os.stat(wall).st_mode)}): "
                f"chmod -R o+rX {wall}, or clone to a place that they can read, such as /opt"
            )
    return [(wall, [(path, path == home) for path in behind]) for wall, behind in found.items()]
