"""The program of an attendee's server: `python -m hpdl_lab.classroom.server ARGUMENTS`, started by any spawner.

It brings the attendee's notebooks, and the site's profile of ipyparallel, up to date, as the attendee, and then is
JupyterHub's own single-user server. If that fails the server starts all the same: old notebooks are better than none.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Generator

from ..features.freed_memory import uncollected
from ..release import forms, update

FOLDER = "notebooks"  # in the home; the configuration has JupyterLab start there
PROFILE_FILES = "HPDL_PROFILE_FILES"  # environment: the folder with the files of the profile HPDL_PROFILE
SOURCE = "HPDL_NOTEBOOKS"  # environment: the folder of exercise forms; else the clone's


def main() -> None:
    folder = os.path.expanduser(f"~/{FOLDER}")
    try:
        for sentence in update.write_notebooks(folder, source=os.environ.get(SOURCE, forms.NOTEBOOKS)):
            print(sentence, file=sys.stderr)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"The notebooks were not brought up to date: {error}", file=sys.stderr)
    os.makedirs(folder, exist_ok=True)
    copy_profile()
    sys.stderr.flush()
    with quick_imports():
        import jupyterlab.labapp  # noqa: F401
        from jupyterhub.singleuser import main as serve
    serve()


def copy_profile() -> None:
    """Copy the files of the site's profile, if there is one, to where IPython looks for it."""
    if source := os.environ.get(PROFILE_FILES):
        ipython = os.environ.get("IPYTHONDIR") or os.path.expanduser("~/.ipython")
        try:
            shutil.copytree(source, f"{ipython}/profile_{os.environ['HPDL_PROFILE']}", dirs_exist_ok=True)
        except OSError as error:  # shutil.Error is one
            print(f"The site's profile was not brought up to date: {error}", file=sys.stderr)


@contextlib.contextmanager
def quick_imports() -> Generator[None]:
    """Import JupyterLab in less time: without the garbage collector, and without Node on the path.

    JupyterLab would ask Node for packages that are never installed here.
    """
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.devnull
    try:
        with uncollected():
            yield
    finally:
        os.environ["PATH"] = path


if __name__ == "__main__":
    main()
