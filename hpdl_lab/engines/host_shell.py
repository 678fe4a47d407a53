"""A shell on an emulated host: `python -m hpdl_lab.engines.host_shell DIRECTORY HOST`, in a process of its own."""

import os
import sys

from .host_engine import enter


def main():
    enter(sys.argv[1], int(sys.argv[2]))
    shell = os.environ.get("SHELL", "/bin/sh")
    os.execvp(shell, [shell])


if __name__ == "__main__":
    main()
