"""A library function as notebook text: whole, with nbgrader's markers, or cut down to what an attendee starts from."""

import ast
import inspect
import re
import sys

from hpdl_lab.plain_source import plain_source

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
PAIR = re.compile(rf"^([ \t]*){BEGIN}\n.*?^[ \t]*{END}\n?", re.DOTALL | re.MULTILINE)


def solution_source(function):
    """The source of `function` with its solution between the markers: where they stand, or around the body."""
    head, body = split_source(function)
    if BEGIN not in body:
        body = f"    {BEGIN}\n{body}\n    {END}"
    return f"{head}\n{body}"


def stub_source(function, title, scaffold=None):
    """What is outside the markers, with `raise NotImplementedError(title)` in the place of each solution.

    With a scaffold: signature and docstring of `function`, and below them what the scaffold does, to be repaired.
    """
    if scaffold is not None:
        return f"{split_source(function)[0]}\n{split_source(scaffold)[1]}"
    text = solution_source(function) + "\n"
    return PAIR.sub(lambda pair: f'{pair[1]}raise NotImplementedError("{title}")\n', text).rstrip("\n")


def split_source(function):
    """(signature and docstring, the rest) of a function."""
    text = plain_source(function)
    body = ast.parse(text).body[0].body
    if not ast.get_docstring(ast.parse(text).body[0]):
        raise ValueError(f"{function.__qualname__} has no docstring: an exercise is explained by it")
    lines = text.split("\n")
    return "\n".join(lines[: body[0].end_lineno]), "\n".join(lines[body[0].end_lineno :])


def import_lines(function, defined):
    """The import statements that the source of `function` needs in a notebook, sorted.

    What its module imports is imported from the same place; what its module defines is imported from the module, except
    the names in `defined`, which the notebook already has. An import below `if TYPE_CHECKING:` is one as well.
    """
    module = sys.modules[function.__module__]
    needed = names_read(ast.parse(plain_source(function))) - set(defined) - {function.__name__}
    lines, imported = {}, set()
    top = ast.parse(inspect.getsource(module)).body
    for node in (inner for outer in top for inner in (outer.body if isinstance(outer, ast.If) else [outer])):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                if bound in needed:
                    imported.add(bound)
                    lines[f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")] = []
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bound = alias.asname or alias.name
                if bound in needed:
                    imported.add(bound)
                    spelled = alias.name + (f" as {alias.asname}" if alias.asname else "")
                    lines.setdefault(f"from {absolute(node, module)} import ", []).append(spelled)
    own = sorted(name for name in needed - imported if getattr(module, name, None) is not None and name in vars(module))
    if own:
        lines.setdefault(f"from {module.__name__} import ", []).extend(own)
    return sorted((start + ", ".join(sorted(names)) for start, names in lines.items()), key=lambda s: (s[0] == "f", s))


def names_read(tree):
    """The names that code reads and does not itself bind."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | arguments
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - bound


def absolute(node, module):
    """The absolute name of the module in an ImportFrom of `module`."""
    if node.level == 0:
        return node.module
    package = module.__name__.split(".")[: -node.level]
    return ".".join([*package, node.module] if node.module else package)
