"""The home folder, which has to be writable: Jupyter, IPython and matplotlib keep their files there."""

import os
import tempfile

from . import Missing

FIX = "export HOME=FOLDER, a folder that you can write (make lab does this by itself, with .venv/home)"


def require_home() -> str:
    """Return the path of the home folder. Raises Missing, with the reason, if it cannot be written."""
    path = os.path.expanduser("~")
    if not os.path.isabs(path):
        raise Missing(f"user {os.getuid()} has no home: HOME is not set, and there is no account for this id", FIX)
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            file.write(b"x")  # a full disk lets a file be made, but not written
    except OSError as error:
        raise Missing(f"{path} cannot be written ({error.strerror})", FIX) from None
    return path
