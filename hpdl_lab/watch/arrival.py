"""The beginning of an observation: when the process imports torch or mpi4py. Nothing is imported before."""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

WANTED = {  # a module: our module with the hooks into it
    "torch": "training",
    "mpi4py.MPI": "mpi",
    "hpdl_lab.torch_backend.group": "collectives",
}


def expect() -> None:
    """Observe this process once it has imported one of WANTED. HPDL_WATCH names the folder of what it notes."""
    sys.meta_path.insert(0, _Expected())


def _arrived(name: str) -> None:
    """Hook into a module that this process has just imported."""
    hooks = import_module(f".{WANTED[name]}", __package__)
    try:
        hooks.install(Path(os.environ["HPDL_WATCH"]))
    except Exception as error:  # the script runs all the same
        print(f"hpdl watch cannot observe {name} here: {error!r}", file=sys.stderr)


class _Expected(importlib.abc.MetaPathFinder):
    """A finder that finds no module itself: it calls `_arrived` after the modules of WANTED."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in WANTED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Announcing(spec.loader)
                return spec
        return None


class _Announcing(importlib.abc.Loader):
    """A loader that loads a module as `loader` does, and announces it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _arrived(module.__name__)

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)
