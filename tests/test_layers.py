"""The architecture: which room stands on which. A file imports only from lines below its own."""

import ast
import re
from pathlib import Path

from tests.house import circles, imports_in_rooms

PACKAGE = Path(__file__).resolve().parent.parent / "hpdl_lab"

# Top to bottom. Rooms of one line do not import each other; the files of one room may.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["lab"],
    ["verbs", "report"],
    ["engines", "classroom", "checks", "plots", "bench"],
    ["inference"],
    ["performance", "resilience", "race", "watch"],
    ["parallel", "zoo", "spelling", "release"],
    ["collectives", "schedules", "models", "optim", "kernels", "torch_backend"],
    ["data"],
    ["predict"],
    ["mesh"],
    ["comm", "symptoms"],
    ["trace", "features", "measure", "units", "system", "plain_source"],
    ["_core", "_cuda"],  # the compiled modules, csrc/ and, where there is nvcc, csrc/cuda/
    ["__init__"],  # the map: its docstring and the version
]
PLACE = {room: line for line, rooms in enumerate(LAYERS) for room in rooms}

ONLY_IN = {  # what only one room may touch
    "hpdl_lab._core": {"comm", "features", "trace"},
    "hpdl_lab._cuda": {"comm", "features", "kernels"},
    "ipyparallel": {"engines"},
    "ipywidgets": {"verbs"},
    "jupyterhub": {"classroom"},
    "mpi4py": {"comm", "features", "watch"},
    "matplotlib": {"plots"},
    "nanobind": set(),
}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "misc"}


def room_of(path):
    """ "ring.py" in hpdl_lab/collectives/ -> "collectives"; hpdl_lab/trace.py -> "trace"."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path):
    """Every module that the file imports anywhere, also inside functions: (line, "hpdl_lab.comm.base")."""
    package = ["hpdl_lab", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for name in node.names:
                yield node.lineno, f"{module}.{name.name}"


def faults(path):
    """What this file does against the list above, one sentence each."""
    room = room_of(path)
    where = path.relative_to(PACKAGE.parent)
    if room not in PLACE:
        return [f"{where}: {room} has no place in LAYERS of tests/test_layers.py"]
    found = []
    for line, name in imports(path):
        for guarded, rooms in ONLY_IN.items():
            if (name + ".").startswith(guarded + ".") and room not in rooms:
                found.append(f"{where}:{line}: only {', '.join(sorted(rooms)) or 'csrc'} may import {guarded}")
        parts = name.split(".")
        if parts[0] != "hpdl_lab" or len(parts) == 1:
            continue
        other = parts[1] if parts[1] in PLACE else "__init__"
        if other != room and PLACE[other] <= PLACE[room]:
            side = "beside" if PLACE[other] == PLACE[room] else "above"
            found.append(f"{where}:{line}: {room} imports {name}, which stands {side} it")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_a_file_imports_only_from_lines_below():
    assert [fault for path in FILES for fault in faults(path)] == []


def test_rooms_below_data_know_no_attendee_and_no_exercise():
    below = [path for path in FILES if PLACE["data"] < PLACE[room_of(path)] < PLACE["__init__"]]
    assert [path for path in below if re.search(r"attendee|\bzoo\b|exercise|lesson", path.read_text())] == []


def test_a_name_says_what_is_inside():
    assert not [path for path in FILES if FORBIDDEN_NAMES & set(path.relative_to(PACKAGE).with_suffix("").parts)]


def test_modules_of_a_room_do_not_import_each_other_in_circles():
    found = {room: circles(graph) for room, graph in imports_in_rooms(FILES).items()}
    assert {room: groups for room, groups in found.items() if groups} == {}


def test_the_map_of_the_rooms_is_that_of_the_package():
    text = (PACKAGE.parent / "docs" / "house.md").read_text().partition("## The rooms")[2].partition("\n## ")[0]
    parts = re.findall(r"^### (\w+)$(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL)
    beside = {"measure", "system", "plain_source", "spelling", "__main__", "__init__", "_core", "_cuda"}
    assert {room for room, _ in parts} == set(PLACE) - beside
    for room, part in parts:
        files, allowed = re.search(r"Read first: (.*?)\.\n", part)[1], re.search(r"May import: (.*?)\.\n", part)[1]
        assert all((PACKAGE / file).is_file() for file in re.findall(r"`([^`]+)`", files)), room
        below = {other for other in PLACE if PLACE[other] > PLACE[room]} - {"__init__", "_core", "_cuda"}
        assert set(re.findall(r"\w+", allowed)) - {"nothing"} == below, room


def test_no_room_of_the_list_is_missing():
    """The list is the architecture document: it names what is there."""
    there = {room_of(path) for path in FILES} | {"_core", "_cuda"}
    assert set(PLACE) - there == set()
