"""`hpdl plan`: its arithmetic, its constants, and one sentence for each clumsy input."""

import argparse
import dataclasses
import errno
import json
import os
import subprocess
import time

import pytest

from hpdl_lab import cli, system
from hpdl_lab.classroom import costs, drill
from hpdl_lab.classroom import plan as planning
from hpdl_lab.classroom.costs import COSTS, ClassroomCosts
from hpdl_lab.classroom.drill import Census, Process, census, kind_of
from hpdl_lab.classroom.plan import LAB_START_SECONDS, ClassPlan
from hpdl_lab.cli import plan as plan_text
from hpdl_lab.cli.arguments import memory_size
from hpdl_lab.engines import cluster
from tests.wording import raises

GB = 10**9
VALUES = {  # round numbers, so that a plan can be worked out by hand
    **dict.fromkeys(COSTS, 0.0),
    **{"hub_MB": 200, "files_MB": 300, "shm_MB": 1, "kernel_MB": 150},
    **{"torch_MB": 350, "torch_engine_MB": 150, "notebook_MB": 400, "notebook_engine_MB": 200},
    **{"login_hub_cpu_s": 0.1, "login_cpu_s": 0.1, "server_hub_cpu_s": 0.25, "server_cpu_s": 1, "server_s": 1},
    **{"engines_s": 3, "engines_cpu_s": 2, "engines_engine_cpu_s": 0.5, "torch_s": 2, "torch_engine_cpu_s": 1},
    **{"notebook_s": 5, "notebook_engine_cpu_s": 1.5, "notebook_threads": 40, "notebook_engine_threads": 10},
}
KNOWN = ClassroomCosts(
    VALUES, 4, "00", "hpdl plan --measure", "a machine, 2 cores", "torch 2.13.0", "2026-11-21", "costs.json"
)


def plan(attendees=10, cores=8, memory=32 * GB, gpus=0, engines=4):
    return ClassPlan(KNOWN, attendees, cores, memory, gpus, engines)


def resource(made, name):
    return next(row for row in made.resources() if row.name == name)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """No constants of this machine."""
    monkeypatch.setenv("HPDL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# -- arithmetic ---


def test_memory_is_what_each_process_takes_and_program_files_once():
    assert plan().each("MB") == 400 + 4 * 200
    assert plan().each("MB", "torch") == 350 + 4 * 150 and plan().each("MB", "kernel") == 150
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
    assert many.each("MB") - few.each("MB") == 6 * 200
    assert many.each("cpu_s", "torch") == 4 * few.each("cpu_s", "torch") == 8
    assert resource(many, "threads").each - resource(few, "threads").each == 60


def test_what_hurts_first_stands_first_and_turns_do_not_keep_anybody_out():
    made = plan(attendees=25, gpus=4)
    fits = [row.fits for row in made.resources()]
    assert fits == sorted(fits) and made.resources()[0].name in ("GPUs", "cores, to compute")
    assert resource(made, "GPUs").fits == 2 and resource(made, "cores, to compute").fits == 2
    assert made.fits == 25 and made.nodes == 1
    said = plan_text.capacity_text(made)
    assert "GPUs, beyond 2 attendees, who then take turns" in said and "memory, beyond 25 attendees" in said
    assert "cores, to compute: even one attendee has fewer than wanted" in plan_text.capacity_text(plan(cores=2))


def test_who_does_not_fit_is_told_how_many_nodes_or_engines_would_do():
    made = plan(attendees=60)
    assert made.fits == 25 and made.nodes == 3 and made.most_engines() == 0
    assert "Engines per person: 4 fit 25 of 60: take 3 such nodes." in plan_text.capacity_text(made)
    made = plan(attendees=40)
    assert made.most_engines() == 1  # 400 + 200 * n <= 30,000 / 40
    assert "4 fit 25 of 40: take 2 such nodes, or 1 engine each." in plan_text.capacity_text(made)


def test_more_engines_than_memory_fit_nobody_and_say_so():
    made = plan(attendees=1, memory=4 * GB, engines=64)
    assert made.fits == 0 and made.nodes == 0
    assert "hpdl hub" not in plan_text.text(made) and "scontrol" not in plan_text.text(made)
    assert (
        "64 fit 0 of 1: take a larger node: no attendee fits on this one, or 8 engines each."
        in plan_text.capacity_text(made)
    )


@pytest.mark.parametrize(
    ("gpus", "attendees", "sentence"),
    [
        (1, 4, "GPUs: one for 2 engines, which NCCL allows from 2.30 on"),
        (4, 40, "so 2 attendees at a time, 20 turns for all"),
        (8, 1, "which is all of them; 6 GPUs stay idle"),
    ],
)
def test_gpus_fewer_or_more_than_wanted_are_said(gpus, attendees, sentence):
    assert sentence in plan_text.capacity_text(plan(attendees, 64, 256 * GB, gpus))


# -- what is pasted ---


def test_the_hub_line_is_one_that_hpdl_hub_takes():
    made = plan(attendees=20)
    line = next(line for line in plan_text.settings(made).splitlines() if "hpdl hub" in line)
    asked = cli.parser().parse_args(line.split()[1:])
    assert asked.users == 20 and asked.engines == 4 and asked.start_timeout == 60
    assert "--memory 3.1GB" in line  # half more than 1,200 MB, and four ranks of a script


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
    shipped = costs.load_costs()
    assert shipped.path == str(costs.SHIPPED) and set(shipped.values) == set(COSTS)
    printed = plan_text.constants_text(shipped)
    for text in (*(f"{value:,.4g}" for value in shipped.values.values()), *costs.COLUMNS.values()):
        assert text in printed
    for text in (shipped.command, shipped.machine, shipped.versions, shipped.date):
        assert text and text in printed


def test_on_a_full_disk_what_was_there_stays_and_the_file_is_named(tmp_path, monkeypatch):
    def full(new, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), new, None, path)

    (tmp_path / "kept").write_text("as it was")
    monkeypatch.setattr(os, "replace", full)
    with raises(OSError, f"'{tmp_path}/kept'"):
        system.write_file(tmp_path / "kept", "new")
    assert os.listdir(tmp_path) == ["kept"] and (tmp_path / "kept").read_text() == "as it was"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "holds no constants"),
        ('{"values": {}}', "holds no constants"),
        (json.dumps({**dataclasses.asdict(KNOWN), "values": {}}), "lacks hub_MB, files_MB, shm_MB and 48 more"),
        (json.dumps({**dataclasses.asdict(KNOWN), "values": {**VALUES, "torch_MB": "two"}}), "lacks torch_MB:"),
    ],
)
def test_a_broken_file_of_constants_is_named_with_the_remedy(home, content, fault):
    home.mkdir()
    (home / "costs.json").write_text(content)
    with raises(ValueError, "hpdl", "--measure") as said:
        costs.load_costs()
    assert str(home / "costs.json") in str(said.value) and fault in str(said.value)


# -- clumsy input ---


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("256GB", 256 * GB), ("12GiB", 12 << 30), ("12 GiB", 12 << 30), ("3G", 3 * GB), ("512mb", 512_000_000)],
)
def test_amounts_of_memory(text, nbytes):
    assert memory_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "GB", "3X", "-3G", "3", "0.1G", "nan", "infG", "1e300G", "1,5GB", "256"])
def test_what_is_no_amount_of_memory_is_code_2(text):
    with pytest.raises(argparse.ArgumentTypeError, match="memory"):
        memory_size(text)


FITS = ["--attendees", "40", "--node-cores", "64", "--memory", "256GB"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "a plan needs all three: hpdl plan --attendees 40 --node-cores 64 --memory 256GB"),
        (FITS[:4], "a plan needs all three"),
        (["--attendees", "40", "--measure"], "a plan needs all three"),
        ([*FITS, "--save", "x.json"], "--save is where --measure writes: give both, or neither"),
        (["--attendees", "0", *FITS[2:]], "attendees is a number from 1 to 10,000, got 0"),
        (["--attendees", "1000000", *FITS[2:]], "attendees is a number from 1 to 10,000, got 1,000,000"),
        ([*FITS[:2], "--node-cores", "0", *FITS[4:]], "cores is a number from 1 to 10,000, got 0"),
        ([*FITS, "--gpus", "-1"], "gpus is a number from 0 to 1,000, got -1"),
        ([*FITS, "--engines", "0"], "engines is a number from 1 to 1,000, got 0"),
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
    for part in planning.BEYOND:
        assert f"\n| {part} " in said
    for part in ("What runs out first", "Engines per person: 4", "hpdl hub --users 40", "scontrol create reservation"):
        assert part in said
    assert "\n| torch " in said and "constants, measured by `hpdl plan --measure" in said


def test_measure_writes_what_was_measured_and_prints_it(home, monkeypatch, capsys):
    monkeypatch.setattr(drill, "measure_costs", lambda command: KNOWN)
    assert cli.main(["plan", "--measure"]) == 0
    assert costs.load_costs() == dataclasses.replace(KNOWN, path=costs.own_path()) and os.listdir(home) == [
        "costs.json"
    ]
    assert "a machine, 2 cores" in capsys.readouterr().out


# -- who is counted ---


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["python", "-m", "hpdl_lab.engines.engine"], "engine"),
        (["/x/bin/mpiexec.gforker", "-n", "4", "sh", "-c", "python -m hpdl_lab.engines.engine"], "mpiexec"),
        (["sh", "-c", 'echo $? > "$HPDL_SESSION/exit-0"', "python", "-m", "hpdl_lab.engines.engine"], "shell"),
        (["python", "-m", "ipykernel_launcher", "-f", "/run/kernel.json"], "other"),
    ],
)
def test_a_process_is_known_by_its_command(command, kind):
    assert kind_of(command) == kind


def test_an_attendee_owns_all_below_their_server_and_nothing_of_the_hubs_own():
    server = "JUPYTERHUB_USER=ada sh -c 'env -u JUPYTERHUB_USER sleep 60; :'"
    proxy_env = {**os.environ, "JUPYTERHUB_USER": "eve"}  # of another hub, from whose terminal this one was started
    with (
        subprocess.Popen(["sh", "-c", f"{server} & exec sleep 60"]) as hub,
        subprocess.Popen(["sleep", "60"], env=proxy_env) as proxy,
    ):
        give_up = time.monotonic() + 20
        while len(look := census((hub.pid, proxy.pid))) < 4 and time.monotonic() < give_up:
            time.sleep(0.05)
        for process in look:
            os.kill(process.pid, 9)
    assert [(p.pid, p.owner, p.kind) for p in look.of("")] == [(hub.pid, "", "hub"), (proxy.pid, "", "other")]
    assert [p.owner for p in look.of("ada")] == ["ada", "ada"] and len(look) == 4
    assert all(process.own_MB > 0 and process.threads == 1 for process in look)
    assert census((hub.pid, proxy.pid)) == [] and Census().shm_MB == 0


def test_shared_memory_counts_once():
    a, b = ("/dev/shm/a", 3_000_000), ("/dev/shm/b", 10**6)
    two = [Process(pid, "engine", "ada", 3.0, 3.0, 4.0, 5, frozenset(shm), 0.0) for pid, shm in ((1, [a]), (2, [a, b]))]
    assert Census(two).shm_MB == 4 and Census(two).memory_MB == 12
    assert set(Census(two).traces()) == {(1, 0.0), (2, 0.0), a[0], b[0]}
