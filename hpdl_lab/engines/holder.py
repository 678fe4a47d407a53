"""The process that keeps engines up for `hpdl cluster start`, when the command itself has returned.

It is one more user of the cluster, as a notebook is, and ends with it.
"""

import subprocess
import sys

from . import keeper_client


def start(path):
    """Start a holder of the cluster at `path`; returns when the cluster lives without this process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hpdl_lab.engines.holder", path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # it outlives the terminal
    )
    with process.stdout as said:
        if not said.readline():
            raise RuntimeError(f"the engines have ended already: the process that is to hold them found none in {path}")


def is_one(pid):
    """Whether process `pid` is a holder."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return "hpdl_lab.engines.holder" in file.read().split("\0")
    except OSError:
        return False


def main():
    keeper = keeper_client.attach(sys.argv[1])
    if keeper is None:
        return
    print("held", flush=True)
    keeper.outlast()


if __name__ == "__main__":
    main()
