"""`hpdl plan`: its arithmetic, its constants, and one sentence for each clumsy input."""

import dataclasses
import errno
import json
import os

import pytest

from hpdl_lab import cli
from hpdl_lab.bench import markdown
from hpdl_lab.classroom import costs, measure, plan_text
from hpdl_lab.classroom.census import Census, Process, census, kind_of
from hpdl_lab.classroom.costs import COSTS, Costs
from hpdl_lab.classroom.plan import LAB_START_SECONDS, STEPS, Plan
from hpdl_lab.engines import cluster

GB = 10**9
VALUES = {  # round numbers, so that a plan can be worked out by hand
    **dict.fromkeys(COSTS, 1.0),
    "hub_MB": 200,
    "files_MB": 300,
    "server_MB": 100,
    "bare_kernel_MB": 50,
    "kernel_MB": 200,
    "kernel_worked_MB": 250,
    "cluster_MB": 50,
    "engine_MB": 50,
    "engine_torch_MB": 150,
    "engine_worked_MB": 200,
    "start_cpu_s": 2.0,
    "engine_cpu_s": 0.5,
    "torch_cpu_s": 1.0,
    "notebook_cpu_s": 6.0,
    "hub_cpu_s": 0.25,
    "login_cpu_s": 0.1,
    "engines_s": 3.0,
    "torch_s": 2.0,
    "notebook_s": 5.0,
    "threads": 40,
    "engine_threads": 10,
}
KNOWN = Costs(VALUES, 4, "00", "hpdl plan --measure", "a machine, 2 cores", "torch 2.13.0", "2026-11-21", "costs.json")


def plan(attendees=10, cores=8, memory=32 * GB, gpus=0, engines=4):
    return Plan(KNOWN, attendees, cores, memory, gpus, engines)


def resource(made, name):
    return next(row for row in made.resources() if row.name == name)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """No constants of this machine."""
    monkeypatch.setenv("HPDL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# -- arithmetic ---


def test_memory_is_what_each_process_takes_and_program_files_once():
    assert plan().attendee_MB() == 100 + 250 + 50 + 4 * 200
    assert plan().attendee_MB("torch") == 100 + 200 + 50 + 4 * 150
    assert plan().attendee_MB("kernel") == 150
    assert plan(attendees=10).memory_MB() == 200 + 300 + 10 * 1200
    # 32,000 MB less system 1,500, hub 200, files 300
    assert resource(plan(), "memory").fits == 30_000 // 1200 == plan().fits


@pytest.mark.parametrize(
    ("step", "attendees", "cores", "seconds"),
    [
        ("engines", 1, 8, 3.0),  # alone: 4 s of processor time on 8 cores, but 3 s as measured
        ("engines", 100, 8, 50.0),  # 100 * (2.0 + 4 * 0.5) / 8
        ("torch", 100, 8, 50.0),
        ("notebook", 100, 8, 75.0),
        ("server", 100, 1000, 25.0),  # the hub is one process: 100 * 0.25, however many cores there are
        ("login", 100, 1000, 10.0),
    ],
)
def test_the_last_waits_for_the_cores_and_for_the_hub(step, attendees, cores, seconds):
    assert plan(attendees, cores).seconds(step) == pytest.approx(seconds)


def test_more_engines_need_more_of_everything():
    few, many = plan(engines=2), plan(engines=8)
    assert many.attendee_MB() - few.attendee_MB() == 6 * 200
    assert many.cpu_s("torch") == 4 * few.cpu_s("torch") and many.cpu_s("notebook") == 4 * few.cpu_s("notebook")
    assert resource(many, "threads").each - resource(few, "threads").each == 60


def test_what_hurts_first_stands_first_and_turns_do_not_keep_anybody_out():
    made = plan(attendees=25, gpus=4)
    fits = [row.fits for row in made.resources()]
    assert fits == sorted(fits) and made.resources()[0].name in ("GPUs", "cores, to compute")
    assert resource(made, "GPUs").fits == 2 and resource(made, "cores, to compute").fits == 2
    assert made.fits == 25 and made.nodes == 1
    said = plan_text.verdict(made)
    assert "GPUs, beyond 2 attendees, who then take turns" in said and "memory, beyond 25 attendees" in said
    assert "cores, to compute: even one attendee has fewer than wanted" in plan_text.verdict(plan(cores=2))


def test_who_does_not_fit_is_told_how_many_nodes_or_engines_would_do():
    made = plan(attendees=60)
    assert made.fits == 25 and made.nodes == 3 and made.most_engines() == 0
    assert "Engines per person: 4 fit 25 of 60: take 3 such nodes." in plan_text.verdict(made)
    made = plan(attendees=40)
    assert made.most_engines() == 1  # 400 + 200 * n <= 30,000 / 40
    assert "4 fit 25 of 40: take 2 such nodes, or 1 engine each." in plan_text.verdict(made)


def test_more_engines_than_memory_fit_nobody_and_say_so():
    made = plan(attendees=1, memory=4 * GB, engines=64)
    assert made.fits == 0 and made.nodes == 0
    assert "hpdl hub" not in plan_text.text(made) and "scontrol" not in plan_text.text(made)
    assert "64 fit 0 of 1: take a larger node: no attendee fits on this one, or 8 engines each." in plan_text.verdict(
        made
    )


@pytest.mark.parametrize(
    ("gpus", "attendees", "sentence"),
    [
        (1, 4, "GPUs: one for 2 engines, which NCCL refuses to share"),
        (4, 40, "so 2 attendees at a time, 20 turns for all"),
        (8, 1, "which is all of them; 6 GPUs stay idle"),
    ],
)
def test_gpus_fewer_or_more_than_wanted_are_said(gpus, attendees, sentence):
    assert sentence in plan_text.verdict(plan(attendees, 64, 256 * GB, gpus))


# -- what is pasted ---


def test_the_hub_line_is_one_that_hpdl_hub_takes():
    made = plan(attendees=20)
    line = next(line for line in plan_text.settings(made).splitlines() if "hpdl hub" in line)
    asked = cli.parser().parse_args(line.split()[1:])
    assert asked.users == 20 and asked.engines == 4 and asked.start_timeout == 60
    assert "--memory 1.8GB" in line  # half more than 1,200 MB


def test_the_lines_of_a_configuration_are_options_of_jupyterhub():
    from jupyterhub.app import JupyterHub
    from jupyterhub.spawner import Spawner

    lines = [line.strip() for line in plan_text.settings(plan()).splitlines() if line.strip().startswith("c.")]
    assert len(lines) == 6
    for line in lines:
        kind, name = line.split(" = ")[0].split(".")[1:]
        assert name in {"JupyterHub": JupyterHub, "Spawner": Spawner}[kind].class_traits(), line


def test_lab_start_gives_up_when_the_plan_says():
    assert LAB_START_SECONDS == cluster.START_SECONDS


# -- constants ---


def test_the_shipped_constants_are_whole_and_all_printed_with_their_origin(home):
    shipped = costs.load()
    assert shipped.path == str(costs.SHIPPED) and set(shipped.values) == set(COSTS)
    printed = str(shipped)
    for name, (unit, what) in COSTS.items():
        assert any(line.split()[:1] == [name] and what in line and unit in line for line in printed.splitlines()), name
    for text in (shipped.command, shipped.machine, shipped.versions, shipped.date):
        assert text and text in printed
    assert all(value > 0 for name, value in shipped.values.items() if name != "idle_cores")


def test_constants_of_this_machine_come_first_and_survive_a_round_trip(home):
    KNOWN.save(costs.own_path())
    assert costs.load() == dataclasses.replace(KNOWN, path=costs.own_path())
    assert [path.name for path in home.iterdir()] == ["costs.json"]


@pytest.mark.parametrize("write", [KNOWN.save, lambda path: markdown.put(path, "drill", "new")])
def test_on_a_full_disk_what_was_there_stays_and_the_file_is_named(write, tmp_path, monkeypatch):
    def full(*paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "kept").write_text("as it was")
    monkeypatch.setattr(os, "rename", full)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/kept'"):
        write(str(tmp_path / "kept"))
    assert os.listdir(tmp_path) == ["kept"] and (tmp_path / "kept").read_text() == "as it was"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "holds no constants"),
        ("[]", "holds no constants"),
        ('{"values": {}}', "holds no constants"),
        (json.dumps({**dataclasses.asdict(KNOWN), "values": {}}), "lacks hub_MB, server_MB, bare_kernel_MB and"),
        (json.dumps({**dataclasses.asdict(KNOWN), "values": {**VALUES, "ports": "two"}}), "lacks ports:"),
    ],
)
def test_a_broken_file_of_constants_is_named_with_the_remedy(home, content, fault):
    home.mkdir()
    (home / "costs.json").write_text(content)
    with pytest.raises(ValueError, match="write it again with `hpdl plan --measure`") as said:
        costs.load()
    assert str(home / "costs.json") in str(said.value) and fault in str(said.value)


# -- clumsy input ---


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("256GB", 256 * GB), ("12GiB", 12 * 2**30), ("12 GiB", 12 * 2**30), ("0.5TB", GB * 500), ("16000MB", 16 * GB)],
)
def test_memory_has_a_unit(text, nbytes):
    assert plan_text.memory(text) == nbytes


@pytest.mark.parametrize("text", ["256", "256G", "GB", "-1GB", "1,5GB", "many", "256 bytes", ""])
def test_memory_without_a_unit_is_asked_for_one(text):
    with pytest.raises(ValueError, match="memory is a number with its unit, such as 256GB"):
        plan_text.memory(text)


FITS = ["--attendees", "40", "--node-cores", "64", "--memory", "256GB"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "a plan needs all three: hpdl plan --attendees 40 --node-cores 64 --memory 256GB"),
        (FITS[:4], "a plan needs all three"),
        (["--attendees", "40", "--measure"], "a plan needs all three"),
        ([*FITS, "--save", "x.json"], "--save is where --measure writes: give both, or neither"),
        (["--attendees", "0", *FITS[2:]], "attendees is a number from 1 to 10,000, got 0"),
        (["--attendees", "-3", *FITS[2:]], "attendees is a number from 1 to 10,000, got -3"),
        (["--attendees", "1000000", *FITS[2:]], "attendees is a number from 1 to 10,000, got 1,000,000"),
        ([*FITS[:2], "--node-cores", "0", *FITS[4:]], "cores is a number from 1 to 10,000, got 0"),
        ([*FITS, "--gpus", "-1"], "gpus is a number from 0 to 1,000, got -1"),
        ([*FITS, "--gpus", "5000"], "gpus is a number from 0 to 1,000, got 5,000"),
        ([*FITS, "--engines", "0"], "engines is a number from 1 to 1,000, got 0"),
        ([*FITS[:4], "--memory", "256"], "memory is a number with its unit"),
        ([*FITS[:4], "--memory", "1GB"], "1 GB of memory are less than system, hub and programs take"),
        ([*FITS, "--engines", "900"], "1 of 40 attendees fit on such a node"),
        (["--attendees", "400", *FITS[2:4], "--memory", "12GiB"], "of 400 attendees fit on such a node"),
    ],
)
def test_a_clumsy_command_is_one_sentence_and_code_1(home, arguments, sentence, capsys):
    assert cli.main(["plan", *arguments]) == 1
    said = capsys.readouterr().err
    assert sentence in said and said.startswith("hpdl: ") and said.count("\n") == 1


def test_a_plan_that_fits_prints_everything_and_is_code_0(home, capsys):
    assert cli.main(["plan", *FITS, "--gpus", "4"]) == 0
    said = capsys.readouterr().out
    for part in ("memory", "/dev/shm", "threads", "files of the proxy", "ports", "cores, at the start", "GPUs"):
        assert f"\n{part}" in said
    for part in ("What hurts first", "Engines per person: 4", "hpdl hub --users 40", "scontrol create reservation"):
        assert part in said
    assert "engine_torch_MB" in said and "constants, measured by `hpdl plan --measure" in said


def test_measure_writes_what_was_measured_and_prints_it(home, monkeypatch, capsys):
    monkeypatch.setattr(measure, "run", lambda command: KNOWN)
    assert cli.main(["plan", "--measure"]) == 0
    assert costs.load() == dataclasses.replace(KNOWN, path=costs.own_path())
    assert "a machine, 2 cores" in capsys.readouterr().out


# -- who is counted ---


@pytest.mark.parametrize(
    ("command", "owner", "kind"),
    [
        (["python", "-m", "jupyterhub.singleuser", "--port=1"], "ada", "server"),
        (["python", "-m", "ipykernel_launcher", "-f", "/run/kernel.json"], "ada", "kernel"),
        (["python", "-I", "-S", "/x/hpdl_lab/engines/keeper.py", "/run/x", "7"], "ada", "keeper"),
        (["python", "-m", "hpdl_lab.engines.engine"], "ada", "engine"),
        (["/x/bin/mpiexec.gforker", "-n", "4", "sh", "-c", "python -m hpdl_lab.engines.engine"], "ada", "mpiexec"),
        (["sh", "-c", 'echo $? > "$HPDL_SESSION/exit-0"', "python", "-m", "hpdl_lab.engines.engine"], "ada", "mpiexec"),
        (["node", "/x/configurable-http-proxy", "--port", "1"], "", "proxy"),
        (["vim"], "ada", "other"),
    ],
)
def test_a_process_is_known_by_its_command(command, owner, kind):
    assert kind_of(command, owner) == kind


def test_shared_memory_counts_once_and_a_hub_that_is_gone_has_no_processes():
    def process(pid, *shm):
        return Process(pid, "engine", "ada", 1.0, 2.0, 3.0, 4.0, 5, 6, 7, frozenset(shm), 0.0)

    both = Census([process(1, ("/dev/shm/a", 3_000_000)), process(2, ("/dev/shm/a", 3_000_000), ("/dev/shm/b", 10**6))])
    assert both.shm_MB() == 4 and both.total("pss_MB") == 12 and both.owners == ["ada"]
    assert set(both.traces()) == {(1, 0.0), (2, 0.0), "/dev/shm/a", "/dev/shm/b"}
    assert census(2**22 + 1) == [] and Census().shm_MB() == 0


def test_every_step_of_a_class_has_its_constants():
    assert all(f"{step}_s" in COSTS for step in STEPS)
    assert all(plan().cpu_s(step) > 0 for step in STEPS)
