"""How a function leaves the notebook: by value, with the notebook globals that it uses, pickled once for all ranks."""

import inspect
import os
import pickle
import sys
from collections.abc import Callable

import cloudpickle

from ..comm.base import PerRank
from ..trace import INSTALLED, PACKAGE


def package(fn, args, size):
    """Pickle a call for `size` ranks.

    Returns: (task, own): bytes of (fn, args) that are the same for all, and for each rank the bytes of its own
             arguments ({position: value}, from `PerRank`) or None.
    Raises:  TypeError naming what cannot travel; ValueError where a PerRank has not one item per rank.
    """
    if not callable(fn):
        raise TypeError(f"lab.run needs a function fn(comm, ...), got a {type(fn).__name__}: {repr(fn)[:80]}")
    check_signature(fn, args)
    own = {}
    for position, value in enumerate(args):
        if isinstance(value, PerRank):
            if len(value) != size:
                raise ValueError(f"argument {position + 1} is a PerRank of {len(value)} items for {size} ranks")
            own[position] = value
    shared = [None if position in own else value for position, value in enumerate(args)]
    carry_script(fn)
    try:
        task = cloudpickle.dumps((fn, shared))
    except Exception as error:
        raise TypeError(culprit(fn, shared, error)) from None
    return task, [dump({i: v[rank] for i, v in own.items()}) if own else None for rank in range(size)]


def check_signature(fn, args):
    """Raise TypeError unless `fn(comm, *args)` is a call that `fn` can take."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a compiled function tells nothing; it will say so itself
    try:
        signature.bind(None, *args)
    except TypeError as error:
        raise TypeError(misfit(fn, signature, len(args), error)) from None


def misfit(fn: Callable, signature: inspect.Signature, count: int, error: TypeError) -> str:
    """Why `fn` cannot be called with comm and `count` arguments, in one sentence. error: what Python says of it."""
    called = f"{name_of(fn)}{signature}"
    parameters = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if missing := [p.name for p in parameters[count + 1 :] if p.default is p.empty]:
        handed_over = ", ".join(p.name for p in parameters[1:])
        return f"{called} needs {' and '.join(missing)} as well: lab.run(fn, {handed_over})"
    if count + 1 > len(parameters):
        takes = "1 argument" if len(parameters) == 1 else f"{len(parameters)} arguments"
        given = f"{count + 1}: comm and {count} more" if count else "comm"
        return f"{called} takes {takes}, and lab.run gives it {given}"
    return f"{called} cannot be called so: {error}"


def name_of(fn: Callable) -> str:
    """What to call `fn` in a sentence."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return "your lambda" if name == "<lambda>" else name


def dump(value):
    """cloudpickle, with a clear word where it fails."""
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(f"a PerRank argument cannot travel to the engines: {reason(error)}") from None


def carry_script(fn):
    """Let the attendee's own modules travel by value, as the notebook does: engines would keep an older version."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    path = os.path.realpath(getattr(module, "__file__", None) or "")
    if module is None or module.__name__ == "__main__" or not path.endswith(".py"):
        return
    if not path.startswith((os.path.realpath(PACKAGE) + os.sep, *INSTALLED)):
        cloudpickle.register_pickle_by_value(module)


def culprit(fn, args, error):
    """The sentence that names what cannot be pickled: an argument, or a variable that the function uses."""
    for position, value in enumerate(args):
        if (why := trouble(value)) is not None:
            return f"argument {position + 1}, a {type(value).__name__}, cannot travel to the engines: {why}"
    name = name_of(fn)
    for variable, value in variables(fn).items():
        if value is not fn and (why := trouble(value)) is not None:
            if type(value).__module__.startswith(("IPython.", "ipykernel.")):
                return f"{name} cannot travel to the engines: it uses {variable}, which only the notebook has"
            return (
                f"{name} cannot travel to the engines: it uses the variable {variable}, "
                f"a {type(value).__name__} ({why}). Make {variable} inside the function instead"
            )
    return f"{name} cannot travel to the engines: {reason(error)}"


def trouble(value):
    """Why `value` cannot be pickled; None when it can."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return reason(error)
    return None


def reason(error):
    """The message of a pickling error, without its nesting."""
    return (
        str(error).splitlines()[0]
        if isinstance(error, pickle.PicklingError | TypeError | RecursionError)
        else repr(error)
    )


def variables(fn):
    """The globals and closure variables that `fn` names: {name: value}."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return {}
    found = {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return found


def own_paths():
    """The entries of sys.path that the engines may lack: where the attendee's modules are."""
    here = os.getcwd()
    return [
        os.path.abspath(p) if p else here for p in sys.path if not os.path.realpath(p or here).startswith(INSTALLED)
    ]
