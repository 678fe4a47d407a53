"""`lab.run("train.py", "--epochs", 2)`: a file that runs on the engines as `python train.py --epochs 2` would."""

import builtins
import linecache
import os
import sys
import types
from collections.abc import Generator
from contextlib import contextmanager

from ..trace import is_user_code


class ScriptEnded(Exception):
    """A file that has ended with another exit status than 0. Says so in one sentence."""


class Script:
    """The file at `path`, with its text, as a function of a run. Engines on other hosts need not have the file.

    Raises: FileNotFoundError, SyntaxError, before anything runs.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self.__name__ = os.path.basename(self.path)
        if not os.path.isfile(self.path):
            raise FileNotFoundError(f"there is no file {self.path}: lab.run runs functions and files")
        with open(self.path, encoding="utf-8") as file:
            self.text = file.read()
        compile(self.text, self.path, "exec", dont_inherit=True)

    def __call__(self, comm: object, *args: object) -> None:
        main = types.ModuleType("__main__")
        vars(main).update(__file__=self.path, __builtins__=builtins)
        linecache.cache[self.path] = len(self.text), None, self.text.splitlines(keepends=True), self.path
        try:
            with _as_main(main, os.path.dirname(self.path), [self.path, *map(str, args)]):
                exec(compile(self.text, self.path, "exec", dont_inherit=True), vars(main))
        except SystemExit as ended:
            if ended.code not in (None, 0):
                status = f"with exit status {ended.code}" if isinstance(ended.code, int) else f"and said: {ended.code}"
                raise ScriptEnded(f"{self.__name__} ended {status}") from None


@contextmanager
def _as_main(main: types.ModuleType, folder: str, argv: list[str]) -> Generator[None]:
    """Make `main` the module that Python runs meanwhile, and modules of `folder` importable, anew each time.

    Afterwards torch's default dtype and device are as in a new process: the engines live on.
    """
    before, argv_before, known = sys.modules["__main__"], sys.argv, set(sys.modules)
    sys.modules["__main__"], sys.argv = main, argv
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.modules["__main__"], sys.argv = before, argv_before
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(folder + os.sep) and is_user_code(file):  # an environment may be in the same folder
                del sys.modules[name]
