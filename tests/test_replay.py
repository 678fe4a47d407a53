"""`lab.replay`: recordings are drawn dashed and stamped, alone or over one's own; what is wrong is one sentence."""

import json
import re
import socket
from dataclasses import replace

import pytest
import torch

from hpdl_lab import cli, features, lab, trace
from hpdl_lab.cli import record as command
from hpdl_lab.data import recorded
from hpdl_lab.features import gpu
from hpdl_lab.verbs.replay import NO_GPU, write_recording
from tests.wording import raises

NAMES = recorded.recording_names()
CURVES = [name for name in NAMES if recorded.load(name)["kind"] not in ("timeline", "table")]
HEAD = {"format": 1, "kind": "table", "what": "W", "machine": "M", "date": "2026-01-02T03:04:05", "rows": []}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Recordings are read from here."""
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    return tmp_path


def dashes(picture):
    """How many points are on dashed curves with hollow points."""
    lines = [line for ax in picture.figure.axes for line in ax.lines if line.get_markerfacecolor() == "white"]
    return sum(len(line.get_xdata()) for line in lines if line.get_linestyle() == "--" or len(line.get_xdata()) == 1)


def filled(picture):
    """How many points are on other curves."""
    lines = [line for ax in picture.figure.axes for line in ax.lines if line.get_marker() == "o"]
    return sum(len(line.get_xdata()) for line in lines if line.get_markerfacecolor() != "white")


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_with_the_package_is_drawn_and_says_where_it_is_from(name):
    found = recorded.load(name)
    shown = lab.replay(name)
    where = f"recorded on {found['machine']}, {found['date'][:10]}"
    if found["kind"] == "table":
        assert where[1:] in str(shown) and found["lines"][0] in str(shown)
        return
    assert where in [text.get_text() for text in shown.figure.texts]
    if found["kind"] == "timeline":
        assert len(shown.data) == len(found["events"])
        assert all(bar.get_linestyle()[0][1] for bar in shown.figure.axes[0].collections)  # dashed
    else:
        assert shown.data.rows == found["rows"] and dashes(shown) >= len(found["rows"])


def test_recordings_are_small_and_name_no_file_and_no_host():
    for path in recorded.FOLDER.iterdir():
        text = path.read_text()
        assert path.stat().st_size < 100_000
        assert not re.search(r"(?<!\w)/\w", text) and socket.gethostname() not in text


@pytest.mark.parametrize("name", CURVES)
def test_over_ones_own_which_stays_solid(name):
    theirs = lab.replay(name).data
    mine = replace(theirs, rows=[row | {"name": "mine"} for row in theirs.rows])
    alone, over = lab.replay(name), lab.replay(name, over=mine)
    assert dashes(over) == dashes(alone)
    assert filled(over) > filled(alone)


def test_the_list_says_that_no_gpu_has_been_recorded_until_one_is(folder):
    recorded.save("a", HEAD | {"what": "a race"}, folder)
    assert "a race" in str(lab.replay()) and NO_GPU in str(lab.replay())
    with raises(LookupError, "'race'", "there are a", NO_GPU):
        lab.replay("race")
    recorded.save("b", HEAD | {"gpu": "G100"}, folder)
    assert "G100" in str(lab.replay()) and NO_GPU not in str(lab.replay())


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("{", ("a.json", "broken")),
        ("[]", ("a.json", "broken", "date")),
        (json.dumps({"format": 1}), ("a.json", "broken", "machine")),
        (json.dumps(HEAD | {"format": 2}), ("a.json", "2", "1")),
        (json.dumps(HEAD), ("a", "broken", "lines")),
        (json.dumps(HEAD | {"kind": "future"}), ("a", "broken", "future")),
        (json.dumps(HEAD | {"kind": "timeline", "events": [[0, 1]]}), ("a", "broken")),
        (json.dumps(HEAD | {"kind": "measure", "rows": [{"name": "ring"}]}), ("a", "broken", "busbw_GBps")),
    ],
)
def test_a_file_that_cannot_be_read(folder, text, facts):
    (folder / "a.json").write_text(text)
    with raises(ValueError, *facts):
        lab.replay("a")


@pytest.mark.parametrize("name", ["../a", "a.json", "", 7])
def test_a_name_is_no_path(name):
    with raises(ValueError, repr(name), "path"):
        lab.replay(name)


def test_what_does_not_go_over_it(folder, monkeypatch):
    monkeypatch.setattr(features, "processor", lambda: "AMD EPYC")  # is a part of the name, and so of the sentence
    write_recording([trace.Event(0, 0, "send", 5, 7)], "a", "W", folder=folder)
    (name,) = recorded.recording_names()
    with raises(ValueError, name, "no curve", "dict"):
        lab.replay(name, over={})
    write_recording(lab.measure("ring", "4", ranks=2), "b", "W", folder=folder)
    with raises(ValueError, "lab.measure", "Picture"):
        lab.replay(recorded.recording_names()[1], over=lab.replay(name))


def test_the_command_records_what_it_can_and_says_what_it_could_not(folder, monkeypatch, capsys):
    """On a GPU, whose name is all that is asked of it here."""

    def fails(device):
        raise RuntimeError("NCCL is too old")

    jobs = {
        "race": command.Job(lambda device: lab.measure("ring", "4", ranks=2), "a race"),
        "emulated": command.Job(fails, "not on GPUs", ("cpu",)),
        "ddp": command.Job(fails, "fails"),
    }
    monkeypatch.setattr(command, "JOBS", jobs)
    monkeypatch.setattr(gpu, "require_gpu_transfer", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA G100 80GB")
    assert cli.main(["record", "--device", "cuda", "--only", "race,ddp"]) == 1
    assert "ddp was not recorded: NCCL is too old" in capsys.readouterr().err
    assert recorded.recording_names() == ["race_nvidia_g100_80gb"]
    assert "recorded on NVIDIA G100 80GB" in str(lab.replay("race_nvidia_g100_80gb"))
    assert cli.main(["record", "--device", "cuda", "--only", "emulated"]) == 1
    assert "unknown on cuda: emulated; known: race, ddp" in capsys.readouterr().err
