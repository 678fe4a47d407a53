"""torch's compiler stays unloaded until something uses it: torch only asks it about things that nobody has compiled.

For that the first optimizer of a process imports torch._dynamo, 800 modules: as long as `import torch` itself (1.1 s of
a core), and 70 MB, in each engine and each kernel. The first backward that is given gradients imports half of them, to
compare two shapes.
"""

import gc
import sys
import types
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def put_off_torch_compiler() -> None:
    """Let torch's imports of its compiler give a StandIn in this process, where it has not been imported yet."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


class StandIn(types.ModuleType):
    """A module that is imported as soon as anything else is asked for than the methods named in `answers`."""

    answers: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for answer in self.answers:
            setattr(self, answer, getattr(self, f"_{answer}"))

    def __getattr__(self, name: str) -> Any:
        """Called for what is not here; of all modules Python itself asks for names with underscores."""
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._whole(), name)

    def _whole(self) -> Any:
        """The real module."""
        if sys.modules.get(self.__name__) is self:
            package, _, name = self.__name__.rpartition(".")
            del sys.modules[self.__name__]
            vars(sys.modules[package]).pop(name, None)
            for answer in self.answers:
                vars(self).pop(answer, None)
        collects = gc.isenabled()
        gc.disable()  # it would go over all that is imported, again and again: a fifth of the time
        try:
            return import_module(self.__name__)
        finally:
            if collects:
                gc.enable()


class Dynamo(StandIn):
    """torch._dynamo, which is to leave out some functions when it compiles others. left_out: those functions."""

    answers = ("disable", "graph_break")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.left_out = []

    def _disable(self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **more: Any) -> Any:
        """What torch._compile asks for with wrapping=False, and keeps as an attribute of `fn`."""
        if wrapping or fn is None:
            return self._whole().disable(fn, recursive, wrapping=wrapping, **more)
        self.left_out.append(fn)
        return fn

    def _graph_break(self, *_: Any, **__: Any) -> None:
        """Nothing is being compiled."""

    def _whole(self) -> Any:
        while self.left_out:  # which the real one is asked about again
            vars(self.left_out.pop()).pop("__dynamo_disable", None)
        return super()._whole()


class SymbolicShapes(StandIn):
    """torch.fx.experimental.symbolic_shapes, where it is asked about shapes that are numbers."""

    answers = ("expect_true", "sym_eq")

    def _expect_true(self, a: Any, skip: int = 0) -> Any:
        return a if type(a) is bool else self._whole().expect_true(a, skip + 1)

    def _sym_eq(self, x: Any, y: Any) -> Any:
        numbers = all(type(n) is int for shape in (x, y) for n in (shape if isinstance(shape, tuple) else [None]))
        return tuple(x) == tuple(y) if numbers else self._whole().sym_eq(x, y)


KINDS = {"torch._dynamo": Dynamo, "torch.fx.experimental.symbolic_shapes": SymbolicShapes}


class Finder(MetaPathFinder, Loader):
    """Stands before the others in sys.meta_path: finds each StandIn once, then lets them find the module itself."""

    def __init__(self) -> None:
        self.stand_ins = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in KINDS and name not in self.stand_ins and name not in sys.modules:
            spec = PathFinder.find_spec(name, path)
            if spec is not None:
                spec.loader = self
            return spec
        package = self.stand_ins.get(name.rpartition(".")[0])
        if package is not None and sys.modules.get(package.__name__) is package:
            package._whole()
            if name in sys.modules:
                return ModuleSpec(name, Imported(sys.modules.pop(name)))
        return None

    def create_module(self, spec: Any) -> Any:
        stand_in = self.stand_ins[spec.name] = KINDS[spec.name](spec.name)
        return stand_in

    def exec_module(self, module: Any) -> None:
        pass


class Imported(Loader):
    """The loader of a part of a package that the import of the whole has brought."""

    def __init__(self, module: Any) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: Any) -> Any:
        return self.module

    def exec_module(self, module: Any) -> None:
        vars(module)["__spec__"] = self.spec  # some of these modules let nobody set an attribute
