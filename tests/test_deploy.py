"""Deployment files, as far as they can be checked without Docker, Kubernetes and Apptainer; test_pbs.py runs PBS's."""

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator
from packaging.requirements import Requirement

from hpdl_lab.classroom import state
from hpdl_lab.features import dev_shm

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "cluster"
DOCKER, BINDER = CLUSTER / "docker" / "Dockerfile", ROOT / ".binder" / "Dockerfile"
APPTAINER = CLUSTER / "apptainer" / "hpdl_lab.def"
VALUES, SCHEMA = CLUSTER / "kubernetes" / "values.yaml", CLUSTER / "kubernetes" / "values.schema.yaml"
PBS = sorted((CLUSTER / "pbs").glob("*.pbs"))
INSTALL = "sh /opt/hpdl_lab/cluster/docker/install.sh"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(path):
    """[("COPY", "csrc /opt/csrc"), ...] of a Dockerfile: continued lines as one, comments left out."""
    text = re.sub(r"\\\n\s*", "", "\n".join(line for line in path.read_text().splitlines() if line[:1] != "#"))
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line.strip()]


def said(path, word):
    return [rest for name, rest in instructions(path) if name == word]


# -- images: Docker, Binder, Apptainer ---------------------------------------------------------------------------------


def test_what_is_copied_is_there_and_is_what_an_installation_needs():
    copied = {}
    for line in said(DOCKER, "COPY"):
        *sources, target = line.split()
        copied |= dict.fromkeys(sources, target)
    assert all((ROOT / source).exists() for source in copied), copied
    assert all(target.startswith("/opt/hpdl_lab/") for target in copied.values())
    makefile = (ROOT / "Makefile").read_text()
    needed = re.search(r"^SOURCES\s*:= (.*)$", makefile, re.M)[1].replace("$(wildcard csrc/*.* csrc/cuda/*.*)", "csrc")
    license_files = PROJECT["license-files"]
    for path in (*needed.split(), *license_files, PROJECT["readme"], "Makefile", "hpdl_lab", "notebooks"):
        assert any(Path(path).is_relative_to(source) for source in copied), path


def test_binder_builds_what_docker_builds_and_runs_it_as_binder_wants():
    assert instructions(BINDER) == instructions(DOCKER)
    assert not (ROOT / "binder").exists(), "repo2docker refuses a clone with both binder/ and .binder/"
    assert {"NB_USER=jovyan", "NB_UID=1000"} < set(said(BINDER, "ARG"))
    assert said(BINDER, "USER") == ["${NB_USER}"] and not said(BINDER, "ENTRYPOINT")
    assert re.fullmatch(r"[\w/.-]+:[\w.-]+", said(BINDER, "FROM")[0])


def sections(text):
    """{"post": [its lines], ...} of an Apptainer definition, and its header as "". ValueError: unknown name."""
    known = "setup files environment post runscript startscript test labels help arguments".split()
    found, name = {"": []}, ""
    for line in text.splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            if name not in known or name in found:
                raise ValueError(f"%{name} is no section of an Apptainer definition, or comes twice")
            found[name] = []
        elif line.strip() and not line.startswith("#"):
            found[name].append(line.strip())
    return found


def test_apptainer_has_dockers_base_files_and_commands():
    found = sections(APPTAINER.read_text())
    assert found[""] == ["Bootstrap: docker", f"From: {said(DOCKER, 'FROM')[0]}"]
    assert found["post"] == [line.split(" &&")[0] for line in said(DOCKER, "RUN") if line.startswith(INSTALL)]
    assert len(found["post"]) == 2
    copied = {source for line in said(DOCKER, "COPY") for source in line.split()[:-1]}
    files = [line.split() for line in found["files"]]
    assert {source for source, _ in files} == {source for source in copied if not source.startswith("cluster/")}
    assert all(target == f"/opt/hpdl_lab/{source}" for source, target in files)
    assert found["environment"] == ["export PATH=/opt/venv/bin:$PATH"]
    assert said(DOCKER, "ENV")[0].startswith("PATH=/opt/venv/bin:$PATH ")


# -- versions ----------------------------------------------------------------------------------------------------------

PYTHON_OF = {"bookworm": "3.11.2", "trixie": "3.13.5"}  # of Debian's releases


def test_versions_are_those_of_the_project():
    version = PROJECT["version"]
    hub = {line.name: line for line in map(Requirement, PROJECT["optional-dependencies"]["hub"])}["jupyterhub"]
    values = VALUES.read_text()
    assert yaml.safe_load(values)["singleuser"]["image"]["tag"] == version
    assert f"Version {version}" in sections(APPTAINER.read_text())["labels"]
    told = {found for path in (DOCKER, VALUES) for found in re.findall(r"hpdl_lab:([\d.]+)", path.read_text())}
    assert told == {version}
    (hub_of_chart,) = set(re.findall(r"JUPYTERHUB=(\d+\.\d+\.\d+)", values + DOCKER.read_text()))
    assert hub_of_chart in hub.specifier, f"the chart's hub {hub_of_chart} is not one that pyproject.toml allows: {hub}"
    (chart,) = set(re.findall(r"--version ([\d.]+)", values))
    assert f"Zero to JupyterHub {chart} " in SCHEMA.read_text()
    release = re.fullmatch(r"debian:(\w+)-slim", said(DOCKER, "FROM")[0])[1]
    assert PYTHON_OF[release] in Requirement(f"python{PROJECT['requires-python']}").specifier


# -- Kubernetes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults():
    """`faults(values)`: what is wrong with values, one sentence each."""
    schema = yaml.safe_load(SCHEMA.read_text())
    Draft7Validator.check_schema(schema)
    validator = Draft7Validator(schema)

    def find(values):
        found = [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(values)]
        storage = values["singleuser"].get("storage", {})
        volumes = {volume["name"] for volume in storage.get("extraVolumes", ())}
        mounted = {mount["name"] for mount in storage.get("extraVolumeMounts", ())}
        return found + [f"{name} is not both a volume and mounted" for name in volumes ^ mounted]

    return find


def test_values_are_what_the_chart_and_a_class_want(faults):
    values = yaml.safe_load(VALUES.read_text())
    assert faults(values) == []
    single = values["singleuser"]
    assert single["storage"]["extraVolumeMounts"][0]["mountPath"] == dev_shm.PATH
    assert single["cmd"][:2] == ["python", "-m"] and importlib.util.find_spec(single["cmd"][2])
    assert single["defaultUrl"].endswith("/" + server_folder())
    names = values["hub"]["config"]["Authenticator"]["allowed_users"]
    assert all(state.NAME.fullmatch(name) for name in names)
    wanted = values["hub"]["config"]["JupyterHub"]["authenticator_class"]
    assert wanted == "firstuse"  # of the chart's hub, which has nothing of ours


def server_folder():
    """The folder in the home where classroom/server.py puts the notebooks."""
    tree = ast.parse((ROOT / "hpdl_lab" / "classroom" / "server.py").read_text())
    (value,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "FOLDER"]
    return value.value
