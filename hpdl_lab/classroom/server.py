"""What an attendee's server is started as: `python -m hpdl_lab.classroom.server ARGUMENTS`, by any spawner.

It brings the attendee's notebooks up to date, as the attendee, and then becomes JupyterHub's own single-user server.
Where that fails the server starts all the same: old notebooks are better than none.
"""

import os
import sys

from . import forms, release

FOLDER = "notebooks"  # in the home; the configuration has JupyterLab start there
SOURCE = "HPDL_NOTEBOOKS"  # environment: the folder of exercise forms; else those of the clone


def main():
    try:
        source = os.environ.get(SOURCE, forms.NOTEBOOKS)
        for sentence in release.write(os.path.expanduser(f"~/{FOLDER}"), source=source):
            print(sentence, file=sys.stderr)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"The notebooks were not brought up to date: {error}", file=sys.stderr)
    os.makedirs(os.path.expanduser(f"~/{FOLDER}"), exist_ok=True)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "jupyterhub.singleuser", *sys.argv[1:]])


if __name__ == "__main__":
    main()
