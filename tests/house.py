"""The size and shape of the house, in figures: `make house`. docs/house.md holds them with the aims.

`--path` counts the files that a gradient passes as well: it starts two engines and trains for a few steps.
"""

import argparse
import ast
import functools
import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, UnionType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hpdl_lab"
PRIVATE_WORDS = """
told beside baton corner clique carrier bulletin mourn mourns farewell follower overtaking stillness unfree
forgive ward ailment specimen specimens keeper crew outpost steward gateway holder crowded rival rivals
contender contenders lookalike need behind follow assemble heard hear chance settle turn Verdict Deal Left
hand_back
""".split()
SHARED = """all_gather all_reduce all_to_all broadcast gather reduce reduce_scatter scatter
add build draw load main measure save train""".split()  # names that mean the same in each module that has one

# "None where there is none", "ValueError where ranks differ": of a place there is a noun before it
AS_IF = r"(?:None|\"\"|False|True|0|nothing|Error|Raises?:? +\w+|else|elsewhere|and|or),? where\b"


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository that match, as git lists them."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, modules: set[str]) -> set[str]:
    """The modules of the package that this file imports, anywhere in it: in functions and for types alone, too."""
    name, found = module_of(path), set()
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            found |= {full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return (found & modules) - {name}


def imports_in_rooms(paths: list[Path]) -> dict[str, dict[str, set[str]]]:
    """{room: {module: the modules of the same room that it imports}}."""
    modules = {module_of(path) for path in paths}
    rooms: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for path in paths:
        room = path.relative_to(PACKAGE).parts[0]
        if path.parent != PACKAGE and path.stem != "__init__":
            inside = {m for m in imported(path, modules) if m.startswith(f"hpdl_lab.{room}.")}
            rooms[room][module_of(path)] = inside
    return rooms


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or by way of others."""
    reach = {module: set(targets) & set(graph) for module, targets in graph.items()}
    while True:
        grown = {m: targets.union(*(reach[t] for t in targets)) for m, targets in reach.items()}
        if grown == reach:
            break
        reach = grown
    groups = {tuple(sorted(o for o in reach[m] if m in reach[o])) for m in reach if m in reach[m]}
    return [list(group) for group in sorted(groups)]


def floors(graph: dict[str, set[str]]) -> int:
    """The number of modules on the longest way down inside a room; a circle counts as one."""
    group = {module: circle[0] for circle in circles(graph) for module in circle}
    depth: dict[str, int] = {}

    def below(module: str) -> int:
        if module not in depth:
            members = [m for m in graph if group.get(m, m) == module]
            targets = {group.get(t, t) for m in members for t in graph[m] if t in graph} - {module}
            depth[module] = 1 + max(map(below, targets), default=0)
        return depth[module]

    return max((below(group.get(module, module)) for module in graph), default=0)


def public_functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of the module, and methods of its classes, whose names do not begin with an underscore."""
    tree = tree_of(path)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for body in bodies for node in body if isinstance(node, kinds) and node.name[0] != "_"]


def annotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return function.returns is not None and all(a.annotation or a.arg in ("self", "cls") for a in given)


def private_names(path: Path) -> list[str]:
    """The names of functions, classes, arguments, attributes and variables that are PRIVATE_WORDS."""
    found: list[str] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.arg):
            found.append(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append(node.id if isinstance(node, ast.Name) else node.attr)
    return [name for name in found if name.strip("_") in PRIVATE_WORDS]


def annotations(path: Path) -> list[str]:
    """The annotations of all functions, their arguments and of variables."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            found += [node.returns, *(argument.annotation for argument in given)]
        elif isinstance(node, ast.AnnAssign):
            found.append(node.annotation)
    return [ast.unparse(annotation) for annotation in found if annotation is not None]


def docstrings(path: Path) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [text for node in ast.walk(tree_of(path)) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def count(pattern: str, texts: Iterable[str]) -> int:
    return sum(len(re.findall(pattern, text)) for text in texts)


def in_several_rooms(paths: list[Path], kinds: type | UnionType) -> list[str]:
    """The public names of `kinds` (classes, functions) that modules of several rooms define, apart from SHARED."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        for node in tree_of(path).body:
            if isinstance(node, kinds) and not node.name.startswith("_") and node.name not in SHARED:
                rooms[node.name].add(path.relative_to(PACKAGE).parts[0])
    return sorted(name for name, where in rooms.items() if len(where) > 1)


def only_tests_import(paths: list[Path]) -> list[str]:
    """The modules that no other one and no notebook imports, and that no command line and no table of names has."""
    modules = {module_of(path) for path in paths}
    used = set().union(*(imported(path, modules) for path in [*paths, *tracked("notebooks/source/*.py")]))
    found = ("hpdl_lab.checks.lessons.", "hpdl_lab.performance.frameworks_run.")  # as files of these folders
    used |= {name for name in modules if name.startswith(found)}
    others = [*tracked("cluster/*", "Makefile", "pyproject.toml", "csrc/*"), *paths]
    text = "\n".join(path.read_text(errors="replace") for path in others)
    ends = {name: name.rpartition(".")[2] for name in modules - used}
    packages = {module_of(path) for path in paths if path.stem == "__init__"}
    named = {name for name, end in ends.items() if re.search(rf"{re.escape(name)}\b|\"{end}(\.py)?\"", text)}
    return sorted(ends.keys() - named - packages)


def counts() -> dict[str, int]:
    """What tests/test_house.py bounds."""
    library = tracked("hpdl_lab/*.py")
    said = [text for path in library for text in docstrings(path)]
    types = [text for path in library for text in annotations(path)]
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {
        "Any in annotations": count(r"\bAny\b", types),
        "Callable without its types": count(r"\bCallable\b(?!\[)", types),
        "circles inside rooms": sum(len(circles(graph)) for graph in imports_in_rooms(library).values()),
        "classes of one name in several rooms": len(in_several_rooms(library, ast.ClassDef)),
        "functions of one name in several rooms": len(in_several_rooms(library, functions)),
        "docstrings that begin What, Whether, Of, Those, One": count(r"^(What|Whether|Of|Those|One)\b", said),
        "docstrings: of which, that of": count(r"\b(of which|that of|those of)\b", said),
        "docstrings: where as if": count(AS_IF, said),
        "private words as names": sum(len(private_names(path)) for path in library),
        "modules that only tests import": len(only_tests_import(library)),
    }


def figures() -> list[tuple[str, str]]:
    """(what, the figure of this tree)."""
    library, tests = tracked("hpdl_lab/*.py"), tracked("tests/*.py")
    csrc = tracked("csrc/*")
    rooms = imports_in_rooms(library)
    functions = [function for path in library for function in public_functions(path)]
    return [
        ("lines of hpdl_lab", f"{lines(library):,}"),
        ("lines of csrc", f"{lines(csrc):,}"),
        ("lines of tests, with answers", f"{lines(tests):,}"),
        ("modules of hpdl_lab", f"{len(library):,}"),
        ("files of csrc", f"{len(csrc):,}"),
        ("floors in comm", f"{floors(rooms['comm'])}"),
        ("public functions, annotated", f"{len(functions):,}, {sum(map(annotated, functions)):,}"),
        *((what, f"{n:,}") for what, n in counts().items()),
        ("words of docs", f"{sum(len(path.read_text().split()) for path in tracked('docs/*.md')):,}"),
    ]


def note_calls(into: set[str], between: set[str]) -> None:
    """Note the files whose functions run in this thread: all of them, and those from `backward` to the optimizer."""
    inside: list[bool] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        name, path = frame.f_code.co_name, frame.f_code.co_filename
        if event != "call":
            return
        if "hpdl_lab" in path:
            into.add(path)
            between.update([path] * len(inside))
        elif name == "backward" and path.endswith("torch/_tensor.py"):
            inside[:] = [True]
        elif name == "step" and "torch/optim" in path:
            inside.clear()

    threading.setprofile(note)
    sys.setprofile(note)


def gradient_path() -> list[tuple[str, str]]:
    """Train on two engines, and count the files of the package that run here and on rank 0."""
    from hpdl_lab import lab

    here: set[str] = set()
    note_calls(here, set())  # before the threads start that speak with the engines
    lab.start(2)
    lab.train(steps=1)  # imports what it needs, which runs each module once

    def begin(comm):
        import builtins

        builtins.noted = set(), set()
        note_calls(*builtins.noted)

    def end(comm):
        import builtins

        sys.setprofile(None)
        return builtins.noted

    lab.run(begin)
    here.clear()
    lab.train(steps=5)
    there, backward = lab.run(end)[0]
    sys.setprofile(None)
    threading.setprofile(None)
    lab.stop()
    inside = [path for path in here | there if path.startswith(str(PACKAGE))]
    return [
        ("Python files from cell to curve", f"{len(inside)}"),
        ("of them from hook to param.grad", f"{len(backward)}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", action="store_true", help="count the files that a gradient passes")
    path = parser.parse_args().path
    for what, figure in figures() + (gradient_path() if path else []):
        print(f"{what:52} {figure}")


if __name__ == "__main__":
    main()
