"""Symptoms of the build: the compiled module is absent, of another Python, or older than its sources."""

import glob
import os

from ..features import Missing, NotCompiled, compiled_module
from .record import Symptom

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FIX = f"run `make install` in {ROOT} and use its .venv/bin/python"


def _require_fresh() -> None:
    """Raise Missing if sources in csrc/ are newer than the compiled module."""
    try:
        module = compiled_module().__file__
    except NotCompiled:
        return  # the other look finds it
    sources = [path for kind in ("*.cpp", "*.h") for path in glob.glob(f"{ROOT}/csrc/{kind}")]
    newest = max(sources, key=os.path.getmtime, default=module)
    if os.path.getmtime(newest) > os.path.getmtime(module):
        raise Missing(f"{newest} is newer than the compiled module {module}", FIX)


SYMPTOMS = (
    Symptom("no compiled module", look=compiled_module, said=r"hpdl_lab is imported from .*, which has", fix=FIX),
    Symptom("old compiled module", look=_require_fresh),
)
