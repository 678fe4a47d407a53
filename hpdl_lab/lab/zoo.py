"""`lab.zoo`: broken programs to look at, before and after they have been run."""

import ast
import inspect
import textwrap

from .. import zoo as programs
from ..checks.result import Note


def zoo(*names):
    """Show broken programs, without their diagnosis: `lab.run(program, deadline=2)` would find it.

    Args:    names: letters of the exercise ("A", "B", ...) or names of programs ("wrong_root"); default all letters.
    Returns: Note with the programs. Raises ValueError that lists what there is.
    """
    shown = [program(name) for name in names or programs.LETTERS]
    return Note(f"{len(shown)} program{'s' if len(shown) > 1 else ''} with a fault", lines="\n\n".join(shown))


def program(name):
    """Letter or name, what the program is meant to do, and its text."""
    found = programs.find(programs.LETTERS.get(name, name))
    text = textwrap.indent(undocumented(found.broken), "    ")
    return f"{name}: {found.title}, on {found.ranks} ranks\n\n{text}"


def undocumented(function):
    """The source of a function without its name and its docstring, which might give the fault away."""
    text = textwrap.dedent(inspect.getsource(function)).rstrip("\n")
    node, lines = ast.parse(text).body[0], text.split("\n")
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        lines[docstring.lineno - 1 : docstring.end_lineno] = []
    return "\n".join(lines).replace(f"def {function.__name__}(", "def program(", 1)
