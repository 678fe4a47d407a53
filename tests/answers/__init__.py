"""Wrong answers that every check must reject, with the reason meant for it, and right ones that it must accept.

Each module holds tables by exercise: RIGHT, of functions; COMPLETED, of what the last hint leaves open (its `...`), in
its order; and WRONG, a text of answers such as these:

    steps: one step too few               the invariant that fails, and a part of the message meant for it
        range(p - 1) => range(p - 2)      the reference solution, with one part of a line in the place of another
    wait: did not wait for 1 of its sends
        -     comm.send(x, 1)             the same with lines in the place of others
        +     comm.isend(x, 1)
    deadlock @other_direction: finished   the same of another function that the module knows
        range(p - 1) => range(p)
    bytes @ring.all_reduce_naive: Cut x   that function as it is
    returns: returned nothing             the arguments of the reference solution, with another body
        comm.all_reduce(x)

Edits are made in the normalized text of a function, without comments and docstring; what they replace is in it once.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpdl_lab.checks.exercises import find
from hpdl_lab.plain_source import plain_source

HEAD = re.compile(r"^(?P<failed>[a-z_ -]+?)(?: @(?P<base>\S+))?: (?P<says>.+)$")


@dataclass(frozen=True)
class WrongAnswer:
    """An answer that the check must reject: `failed` is the invariant, `says` is a part of the message meant for it."""

    fn: Callable
    failed: str
    says: str


def tree_of(fn: Callable) -> ast.FunctionDef:
    tree = ast.parse(plain_source(fn)).body[0]
    if ast.get_docstring(tree):
        del tree.body[0]
    return tree


def edited(fn: Callable, lines: list[str]) -> str:
    """The text of `fn` after the edits, or with these lines as its body if they are none."""
    text = "\n".join(lines)
    edits = re.findall(r"((?:^- .*\n?)+)((?:^\+ .*\n?)*)|^(.+) => (.+)$", text, re.M)
    tree = tree_of(fn)
    tree.name = "answer"  # it may call `fn` itself
    if not edits:
        tree.body = ast.parse(text).body
    result = ast.unparse(tree)
    for removed, added, old, new in edits:
        if removed:
            old, new = (re.sub("^[-+] ", "", block, flags=re.M).strip("\n") for block in (removed, added))
        if result.count(old) != 1:
            raise LookupError(f"{old!r} is {result.count(old)} times in the text of {fn.__qualname__}:\n{result}")
        result = result.replace(old, new)
    return result


def wrong_answers(exercise: str, text: str, names: dict) -> Iterator[WrongAnswer]:
    """The answers in a text. names: of the module, what they may use."""
    for entry in re.split(r"\n(?=\S)", text.strip("\n")):
        line, *lines = entry.split("\n")
        if not (head := HEAD.match(line)):
            raise LookupError(f"exercise {exercise}: {line!r} does not say what fails, and why")
        fn = eval(head["base"], names) if head["base"] else find(exercise).reference
        if lines:
            scope = vars(inspect.getmodule(fn)) | names
            exec(compile(edited(fn, textwrap.dedent("\n".join(lines)).split("\n")), "wrong answer", "exec"), scope)
            scope["answer"].__name__ = fn.__name__
            fn = scope["answer"]
        yield WrongAnswer(fn, head["failed"], head["says"])


MODULES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
WRONG = {
    exercise: tuple(wrong_answers(exercise, text, vars(module)))
    for module in MODULES
    for exercise, text in module.WRONG.items()
}
RIGHT = {exercise: answers for module in MODULES for exercise, answers in module.RIGHT.items()}
COMPLETED = {exercise: parts for module in MODULES for exercise, parts in getattr(module, "COMPLETED", {}).items()}
