"""`python -m hpdl_lab` is `hpdl`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
