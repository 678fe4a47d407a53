"""Stand-ins for torch's compiler until something uses it: torch only asks it about things that were not compiled.

For that the first optimizer of a process imports torch._dynamo, 800 modules: as long as `import torch` itself (1.1 s of
a core), and 70 MB, in each engine and each kernel. The first backward that is given gradients imports half of them, to
compare two shapes.
"""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def put_off_torch_compiler() -> None:
    """Let torch's imports of its compiler give a StandIn in this process, unless it has been imported already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class StandIn(ModuleType):
    """A module that is imported as soon as anything else is asked for than the methods named in `answers`."""

    answers: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for answer in self.answers:
            setattr(self, answer, getattr(self, f"_{answer}"))

    def __getattr__(self, name: str) -> object:
        """Return what is not here from the real module; Python itself asks all modules for names with underscores."""
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._whole(), name)

    def _whole(self) -> ModuleType:
        """Import the real module, in this one's place."""
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


class _Dynamo(StandIn):
    """torch._dynamo, which is to leave out some functions when it compiles others. left_out: those functions."""

    answers = ("disable", "graph_break")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.left_out: list[object] = []

    def _disable(self, fn: object = None, recursive: bool = True, *, wrapping: bool = True, **more: object) -> object:
        """Return what torch._compile asks for with wrapping=False, and keeps as an attribute of `fn`."""
        if wrapping or fn is None:
            return self._whole().disable(fn, recursive, wrapping=wrapping, **more)
        self.left_out.append(fn)
        return fn

    def _graph_break(self, *_: object, **__: object) -> None:
        """Do nothing: nothing is being compiled."""

    def _whole(self) -> ModuleType:
        while self.left_out:  # which the real one is asked about again
            vars(self.left_out.pop()).pop("__dynamo_disable", None)
        return super()._whole()


class _SymbolicShapes(StandIn):
    """torch.fx.experimental.symbolic_shapes, as long as it is asked only about shapes that are numbers."""

    answers = ("expect_true", "sym_eq")

    def _expect_true(self, a: object, skip: int = 0) -> object:
        return a if type(a) is bool else self._whole().expect_true(a, skip + 1)

    def _sym_eq(self, x: object, y: object) -> object:
        if isinstance(x, tuple) and isinstance(y, tuple) and all(type(n) is int for n in (*x, *y)):
            return tuple(x) == tuple(y)
        return self._whole().sym_eq(x, y)


KINDS: dict[str, type[StandIn]] = {"torch._dynamo": _Dynamo, "torch.fx.experimental.symbolic_shapes": _SymbolicShapes}


class _Finder(MetaPathFinder, Loader):
    """A finder before the others in sys.meta_path: it finds each StandIn once, and leaves them the module itself."""

    def __init__(self) -> None:
        self.stand_ins: dict[str, StandIn] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in KINDS and name not in self.stand_ins and name not in sys.modules:
            spec = PathFinder.find_spec(name, path)
            if spec is not None:
                spec.loader = self
            return spec
        package = self.stand_ins.get(name.rpartition(".")[0])
        if package is not None and sys.modules.get(package.__name__) is package:
            package._whole()
            if name in sys.modules:
                return ModuleSpec(name, _Imported(sys.modules.pop(name)))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        stand_in = self.stand_ins[spec.name] = KINDS[spec.name](spec.name)
        return stand_in

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Imported(Loader):
    """The loader of a part of a package that the import of the whole has brought."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self.spec  # some of these modules forbid setting an attribute
