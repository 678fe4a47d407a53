"""`hpdl report`: rows become a record, the record one file that is whole, escaped and says what is missing."""

import io
import json
import os
import re

import numpy as np
import pytest
from PIL import Image

from hpdl_lab import cli
from hpdl_lab.plots import live, style
from hpdl_lab.plots.live import CURVES
from hpdl_lab.report import collect, read_curves
from hpdl_lab.report.page import page
from hpdl_lab.verbs.progress import FILE, progress, read_rows

EVIL = '<script src="http://x">&'
PLAN = {"dp": 4, EVIL: EVIL}


def check(exercise, passed):
    return {"kind": "check", "exercise": exercise, "passed": passed}


def hint(level, failed="sum"):
    return {"kind": "hint", "exercise": "4.1", "failed": failed, "level": level}


def said(kind, about, value):
    return {"kind": kind, "about": about, "value": value}


def attempt(league, score, valid=True):
    numbers = {"expected_s": 8, "seconds": 9000.0 if valid else None, "score": score, "reference_s": 5.0}
    return {"kind": "race", "league": league, "plan": PLAN, "valid": valid, "why": "" if valid else EVIL, **numbers}


# fmt: off
COURSE = [
    *(check("4.1", passed) for passed in (False, False, True, False)),
    *(hint(*args) for args in ((1,), (2,), (1,), (1, "bytes"))),
    check("10.2", False),
    {"kind": "solution", "exercise": "10.2"},
    {"kind": "measurement", "name": "of no interest here"},
    said("guess", f"ms {EVIL}", 3),
    said("guess", f"ms {EVIL}", 10),
    said("truth", f"ms {EVIL}", 40),
    said("guess", f"ms {EVIL}", 40),
    said("guess", "times", {"2": 8, "4": 0.0, "8": 5}),
    said("truth", "times", {"2": 4, "4": 3}),
    said("truth", f"ms {EVIL}", 10),
    attempt("simulated", 6.0),
    attempt("here", 20.0),
    attempt("simulated", 5.5),
    attempt(f"simulated {EVIL}", 1.0, valid=False),
]
DAMAGED = [
    [], None, {"kind": ["check"]}, {"kind": "check", "exercise": "4.1"}, check(4.1, True), attempt(None, 1.0),
    *(said("guess", "ms", value) for value in ("3", {}, [3], 10**400, float("nan"))),
]
# fmt: on


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder of this process, which is empty."""
    monkeypatch.setenv("HPDL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for kept in (progress, live.curves):
        kept.cache_clear()
    yield tmp_path / "home"
    for kept in (progress, live.curves):
        kept.cache_clear()


def plot(title, steps=3):
    rows = [{"step": i, "loss": 2.3, "samples_per_s": 30_000} for i in range(steps)]
    return rows, steps, title


def test_checks_count_until_one_passes_and_a_hint_counts_once():
    found = {e.id: e for e in collect(COURSE).exercises}
    ring, schedule = found["4.1"], found["10.2"]
    assert (ring.passed, ring.checks, ring.hints, ring.solution) == (True, 3, 3, False)
    assert (schedule.passed, schedule.checks, schedule.hints, schedule.solution) == (False, 1, 0, True)
    assert "6.7" in found and list(found)[:2] == ["0.1", "0.2"] and not found["6.7"].tried


def test_the_last_guess_before_the_first_truth_counts():
    record = collect(COURSE)
    found = [(g.what, g.guess, g.truth, g.factor) for g in record.guesses]
    assert found == [
        (f"ms {EVIL}", 10, 40, 4),
        ("times: 2", 8, 4, 2),
        ("times: 4", 0, 3, None),
        ("times: 8", 5, None, None),
    ]
    assert record.median_factor == 3


def test_the_best_of_each_league_is_valid_and_has_the_least_score():
    record = collect(COURSE)
    assert len(record.attempts) == 4 and {a.league: a.score for a in record.best} == {"simulated": 5.5, "here": 20.0}
    assert page(record, "").count('<span class="good">best</span>') == 2
    assert '<td class="n">2.5 h</td><td class="n">5.5 s</td><td class="n">1.1</td>' in page(record, "")


@pytest.mark.parametrize("row", DAMAGED, ids=str)
def test_a_damaged_row_is_left_out_and_counted(row):
    record = collect([*COURSE, row])
    assert record.damaged == 1 and record.guesses == collect(COURSE).guesses
    assert "1 line of the progress file was damaged" in page(record, "") and "damaged" not in page(collect(COURSE), "")


def test_lines_that_are_no_rows_are_damaged(tmp_path):
    lines = [
        json.dumps(COURSE[0]).encode(),
        b'{"kind": "che',
        b"\xff\xfe",
        b"[" * 40_000,
        json.dumps(COURSE[2]).encode(),
    ]
    (tmp_path / FILE).write_bytes(b"\n".join(lines))
    record = collect(read_rows(tmp_path / FILE))
    assert record.damaged == 3 and sum(e.checks for e in record.exercises) == 2


def test_the_page_is_whole_and_its_text_escaped():
    record = collect(COURSE)
    text = page(record, EVIL)
    assert "<script" not in text and "@import" not in text and "url(" not in text
    assert re.findall(r'(?:src|href)="(.{15})', text) == ["data:image/png;"], "the scatter, and nothing from elsewhere"
    assert text.count("&lt;script") == 1 + 4 * 2 + 2 + 1, "guess, plans, league with its reason, day"


def test_who_has_done_nothing_reads_what_to_do(home, capsys):
    assert cli.main(["report"]) == 0
    path = capsys.readouterr().out.strip()
    text = open(path).read()
    assert path == os.path.abspath("hpdl_report.html")
    assert "<table" not in text and "<img" not in text
    for what in ("make lab", "lab.check", "lab.guess", "lab.train", "lab.race"):
        assert what in text


def test_the_command_reads_somebody_elses_home_and_refuses_in_one_sentence(home, capsys):
    assert cli.main(["report", "--home", str(home)]) == 1 and str(home) in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["report", "no_folder/report.html"])
    assert "no_folder/report.html cannot be written" in capsys.readouterr().err
    home.mkdir()
    (home / FILE).write_text(json.dumps(check("4.1", True)))
    assert cli.main(["report", "their.html", "--home", str(home)]) == 0 and "1 of 5" in open("their.html").read()


def test_a_notebook_keeps_the_last_figure_of_each_kind_and_title(home, monkeypatch):
    live.Live(live.draw).finish(*plot("a script"))
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "cell", lambda: 1)
    training = live.Live(live.draw, alt=f"loss {EVIL}")
    training.update(*plot("first"))
    assert training.handle and not home.exists(), "neither a plain script's figure is kept, nor a frame on the way"
    training.finish(*plot("first"))
    for title, steps in ((f"second {EVIL}", 4), ("first", 5)):
        figure = live.Live(live.draw, alt=f"loss {EVIL}").finish(*plot(title, steps))
    live.show_figure(figure, alt="the same again")
    for seconds, path in enumerate(sorted((home / CURVES).iterdir(), key=lambda path: "first" not in path.name)):
        os.utime(path, (seconds, seconds))
    first, second = read_curves(home)
    assert first.alt == second.alt == f"loss {EVIL}" and first.width == 840
    with Image.open(io.BytesIO(first.png)) as kept:
        assert np.array_equal(np.asarray(kept.convert("RGB")), np.asarray(live.pixels(figure))), "the last one wins"
    (home / CURVES / "no_picture.png").write_text("no PNG")
    text = page(collect([], read_curves(home)), "")
    assert text.count("<img") == 2 and "<script" not in text and "loss &lt;script" in text


def test_figures_do_not_grow_without_end_and_an_unwritable_home_is_said_once(tmp_path, monkeypatch, capsys):
    picture = live.png(style.new_figure(1, 1))
    monkeypatch.setattr(live.Curves, "MOST", 3)
    curves = live.Curves(tmp_path / CURVES)
    for word in "abcde":
        curves.keep(picture, "kind", f"title {word}, 1.5 s")
        curves.keep(picture, "kind", f"title {word}, 2.5 s")  # the same measurement again
    assert len(list((tmp_path / CURVES).iterdir())) == 3 and not capsys.readouterr().out
    (tmp_path / "file").write_text("")
    blocked = live.Curves(tmp_path / "file" / CURVES)
    for _ in range(2):
        blocked.keep(picture, "kind", "title")
    assert re.fullmatch("Your figures are not kept .*cannot write .*\n", capsys.readouterr().out)


def test_figures_are_kept_next_to_the_progress(home):
    assert live.curves().folder == progress().path.parent / CURVES == home / CURVES
