"""Engines of a command's own, so that those of a notebook are left alone."""

import contextlib
import os
import tempfile


@contextlib.contextmanager
def place():
    """Within it, this process starts and finds engines in a place of their own, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="hpdl-", dir="/tmp") as path:
        os.environ["XDG_RUNTIME_DIR"] = path
        yield path
