"""Run by Python itself at the start of every process under `hpdl watch`: this folder is on PYTHONPATH there."""

import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _next_sitecustomize() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    for folder in sys.path:
        path = os.path.join(folder, "sitecustomize.py")
        if os.path.abspath(folder) != HERE and os.path.exists(path):
            spec = importlib.util.spec_from_file_location("sitecustomize", path)
            assert spec is not None and spec.loader is not None
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


_next_sitecustomize()
if "HPDL_WATCH" in os.environ and importlib.util.find_spec("hpdl_lab"):
    from hpdl_lab.watch.arrival import expect

    expect()
