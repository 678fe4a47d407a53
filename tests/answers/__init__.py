"""Wrong answers that every check must reject, with the reason meant for it, and right ones that it must accept.

Each module holds functions, and two tables of them by exercise: WRONG and RIGHT.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WrongAnswer:
    """An answer that the check must reject: `failed` is the invariant, `says` is a part of the message meant for it."""

    fn: Callable
    failed: str
    says: str


def collected(name: str) -> dict[str, tuple]:
    """Join the tables called `name` of all modules: {exercise id: answers}."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {number: answers for module in modules for number, answers in getattr(module, name).items()}


WRONG = collected("WRONG")
RIGHT = collected("RIGHT")
