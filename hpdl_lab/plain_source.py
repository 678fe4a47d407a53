"""The source and the signature of a function without what only a library needs, such as annotations."""

import ast
import inspect
import textwrap
from collections.abc import Callable

MOST_COLUMNS = 120


def plain_source(function: Callable[..., object]) -> str:
    """Return the source of a function, dedented, without its decorators and annotations: they are the library's."""
    text = textwrap.dedent(inspect.getsource(function)).rstrip("\n")
    lines, node = text.split("\n"), ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    lines = lines[node.lineno - 1 :]
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    if node.returns is None and not any(argument and argument.annotation for argument in arguments):
        return "\n".join(lines)
    first = node.body[0].lineno - node.lineno  # below the signature
    for argument in arguments:
        if argument:
            argument.annotation = None
    signature = f"def {node.name}({ast.unparse(node.args)}):".replace("'", '"')
    if len(signature) > MOST_COLUMNS:
        signature = f"def {node.name}(\n    {ast.unparse(node.args)}\n):".replace("'", '"')
    return "\n".join([signature, *lines[first:]])


def plain_signature(function: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a function without annotations: `(comm, x, root=0)`."""
    found = inspect.signature(function)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    return found.replace(parameters=plain, return_annotation=inspect.Signature.empty)
