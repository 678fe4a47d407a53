"""The race: three plans in virtual time, the same everywhere; what is disqualified, and why; a race on engines."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from hpdl_lab import cli, lab
from hpdl_lab.data import text
from hpdl_lab.race import here, simulated
from hpdl_lab.race.here import HerePlan
from hpdl_lab.race.plan import Disqualified, plan_of, read_plan, require_memory, score
from hpdl_lab.race.simulated import REFERENCE, SimulatedPlan, breaks, drive
from hpdl_lab.verbs.progress import Progress

INSIDE_NODES = replace(
    REFERENCE, dp=8, pp=1, tp=8, micro_batches=8, schedule="1f1b", learning_rate=7.7e-5, gradient_bits=16
)
SHARDED = replace(
    REFERENCE, dp=16, pp=1, tp=4, micro_batches=8, batch=1024, learning_rate=1.2e-4, schedule="1f1b", zero=2
)


@pytest.fixture(autouse=True)
def own_progress(monkeypatch, tmp_path):
    kept = Progress(tmp_path / "progress.jsonl")
    monkeypatch.setattr("hpdl_lab.verbs.race.progress", lambda: kept)
    return kept


# -- the simulated league ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "hours", "step_s"),
    [(REFERENCE, 65.607, 7.2978), (INSIDE_NODES, 108.927, 12.4764), (SHARDED, 84.6803, 15.0232)],
)
def test_three_plans_take_the_same_time_everywhere(plan, hours, step_s):
    lap = drive(plan, 1)
    assert (lap.seconds / 3600, lap.step_s) == pytest.approx((hours, step_s), rel=1e-4)
    assert sum(lap.parts.values()) == pytest.approx(lap.seconds) and lap.parts["restart"] == 300


def test_the_seed_moves_the_failure_and_nothing_else():
    one, other = drive(REFERENCE, 1), drive(REFERENCE, 2)
    assert one.parts["repeated"] != other.parts["repeated"]
    assert {k: v for k, v in one.parts.items() if k != "repeated"} == pytest.approx(
        {k: v for k, v in other.parts.items() if k != "repeated"}
    )


def test_a_failure_repeats_what_came_after_the_last_checkpoint():
    plan = replace(REFERENCE, checkpoint_every_s=1000.0)
    written, again, restart = breaks(plan, training_s=10_500, share=0.5)  # fails at 5,250 s
    assert (again, restart) == (250, 300)
    assert written == pytest.approx(10 * 14 * simulated.MODEL.parameters / 3.125e9)  # 25 Gbit/s; none at the end
    assert breaks(replace(plan, checkpoint_every_s=1e9), 10_500, 0.5)[:2] == (0, 5250)


def test_the_law_is_that_of_the_papers():
    """By hand: L(N) = 2.034; S_min = 2100 / 0.366^(1/0.76); B_crit = 2e8 / 2.4^(1/0.21)."""
    assert simulated.least_steps() == pytest.approx(7873, rel=1e-3)
    critical = simulated.compressed_noise(replace(REFERENCE, gradient_bits=16)) * REFERENCE.batch * 2048  # tokens
    assert critical == pytest.approx(3.09e6, rel=1e-2)
    plain = replace(REFERENCE, gradient_bits=16, batch=1024)  # 2.1 million tokens
    assert simulated.best_rate(plain) == pytest.approx(1.2e-4, rel=0.05)
    best = replace(plain, learning_rate=simulated.best_rate(plain))
    least = simulated.steps_to_target(best)
    assert least == pytest.approx(simulated.least_steps() * (1 + simulated.compressed_noise(best)))
    for rate in (0.5, 1.5):
        other = replace(best, learning_rate=rate * best.learning_rate)
        assert simulated.steps_to_target(other) == pytest.approx(least / 0.75)


def test_fewer_bits_add_noise_and_take_bytes():
    plans = [replace(INSIDE_NODES, gradient_bits=bits) for bits in (16, 8, 4)]
    sent = [simulated.ledger(plan).links["dp"] for plan in plans]
    assert sent == pytest.approx([sent[0], sent[0] / 2, sent[0] / 4])
    zero2 = [simulated.ledger(replace(plan, zero=2)).links["dp"] for plan in plans]
    assert zero2 == pytest.approx([sent[0], sent[0] * 3 / 4, sent[0] * 5 / 8])  # updated parameters keep 16 bits
    noises = [simulated.compressed_noise(plan) for plan in plans]
    assert noises[1] == pytest.approx(noises[0] * 1.0317 + 0.0317 / 8, rel=1e-3)  # w = 512 / 127^2
    assert noises[2] == pytest.approx(noises[0] * (1 + math.sqrt(512) / 7) + math.sqrt(512) / 7 / 8)
    assert simulated.compressed_noise(replace(plans[2], dp=1, pp=8)) == pytest.approx(noises[0])  # nobody to send to


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dp": 5}, "dp x pp x tp = 80, and the race has 64 ranks"),
        (
            {"dp": 64, "pp": 1, "tp": 1, "micro_batches": 8, "schedule": "1f1b"},
            "holds 115 GB of 40 GB, and 79.9 GB are optimizer",
        ),
        ({"learning_rate": 1e-3}, "it diverges: the rate is 13.3 times the best one for this batch"),
        ({"micro_batches": 100}, "cannot be cut"),
        ({"zero": 3}, "zero=3 with pp=8"),
        ({"schedule": "2f2b"}, "schedule = '2f2b'"),
        ({"precision": "float8"}, "one of bfloat16, tf32 is needed"),
        ({"gradient_bits": 2}, "one of 16, 8, 4 is needed"),
        ({"expected_s": 0}, "expected_s: a number above 0 is needed"),
        ({"expected_s": 10**400}, "expected_s: a number above 0 is needed"),
        ({"learning_rate": float("nan")}, "learning_rate: a number above 0 is needed"),
        ({"batch": "512"}, "batch = '512': a whole number is needed"),
        ({"recompute": 1}, "recompute = 1: true or false is needed"),
        ({"dp": True}, "dp = True: a whole number is needed"),
        ({"batches": 512}, "a plan has no batches"),
    ],
)
def test_a_plan_that_cannot_race_is_disqualified_with_its_reason(changed, why, own_progress):
    result = lab.race({**asdict(REFERENCE), **changed}, seed=1)
    assert not result.valid and not result.passed and why in result.why
    assert f"disqualified. {why[:1].upper()}" in repr(result) or why in repr(result)
    (row,) = own_progress.rows
    assert row["kind"] == "race" and not row["valid"] and row["why"] == result.why and row["score"] == 0


def test_what_is_missing_is_named():
    with pytest.raises(Disqualified, match="2 entries are missing: batch, expected_s"):
        plan_of(SimulatedPlan, {k: v for k, v in asdict(REFERENCE).items() if k not in ("batch", "expected_s")})


def test_the_score_grows_with_the_time_and_with_the_error(own_progress):
    assert (score(100, 100), score(100, 80), score(100, 120), score(100, 400)) == (100, 120, 120, 400)
    result = lab.race(asdict(REFERENCE), seed=1)
    off = abs(REFERENCE.expected_s / result.seconds - 1)
    assert result.passed and result.score == result.reference_s == pytest.approx(result.seconds * (1 + off))
    assert "passed" in repr(result) and "computed twice" in {t.get_text() for t in result.figure.legends[0].texts}
    slow = lab.race(asdict(replace(INSIDE_NODES, expected_s=108.9 * 3600)), seed=1)
    assert slow.valid and not slow.passed and slow.score > 1.5 * slow.reference_s and "not passed" in repr(slow)
    assert [row["score"] for row in own_progress.rows] == [result.score, slow.score]


# -- the league of this machine ---------------------------------------------------------------------------------------


def test_the_hidden_text_is_of_the_last_tenth_and_another_one_for_each_seed():
    known, one, other = text.load(64), here.hidden(1), here.hidden(2)
    assert len(one.train_x) == here.WINDOWS and torch.equal(one.train_x, known.train_x)
    assert not torch.equal(one.test_x, other.test_x) and one.test_x.shape == one.test_y.shape == (256, 64)
    assert torch.equal(one.test_x.flatten()[1:], one.test_y.flatten()[:-1])
    whole, part = text.decode(text.in_bytes()[-len(text.in_bytes()) // 10 :]), text.decode(one.test_x.flatten())
    assert part in whole


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"compression": "top-k", "precision": "bfloat16"}, "only one of both"),
        ({"pp": 2, "compression": "powersgd"}, "data parallelism alone"),
        ({"optimizer": "adam"}, "one of sgd, adamw, lars, lamb is needed"),
        ({"tp": 3}, "heads"),
        ({"steps": 0}, "steps: a number above 0"),
        ({"steps": 10**9}, "at most 5,000 steps"),
        ({"dp": 64}, "16 ranks"),
        ({"batch": 20_000, "steps": 1}, "16,750 windows"),
        ({"tp": 2, "optimizer": "lamb"}, "tp=2 cuts them"),
    ],
)
def test_a_plan_for_this_machine_that_cannot_be(changed, why):
    result = lab.race({**asdict(here.reference(2)), **changed}, "here", seed=1)
    assert not result.valid and why in result.why


def test_what_does_not_fit_into_the_free_memory_is_disqualified(monkeypatch):
    class Small:
        available = 3_000_000

    monkeypatch.setattr(here.psutil, "virtual_memory", Small)
    with pytest.raises(Disqualified, match="out of memory: the fullest rank holds"):
        require_memory(here.ledger(here.reference(2), here.hidden(0)))


def test_a_race_needs_engines(monkeypatch):
    monkeypatch.setattr("hpdl_lab.verbs.race.running", lambda: None)
    with pytest.raises(ValueError, match=r"this plan needs 2 engines and none run: lab.start\(2\)"):
        lab.race(asdict(here.reference(2)), "here")


@pytest.mark.parametrize("more", [{}, {"compression": "powersgd"}, {"precision": "bfloat16"}, {"dp": 1, "pp": 2}])
def test_a_race_on_engines_takes_the_median_and_the_hidden_loss(more, cluster, monkeypatch, own_progress):
    monkeypatch.setattr("hpdl_lab.verbs.cluster._notebook._cluster", cluster)
    plan = {**asdict(HerePlan(dp=2, batch=8, learning_rate=3e-3, steps=3, expected_s=1.0)), **more}
    monkeypatch.setattr(here, "reference", lambda ranks: HerePlan(ranks, 8, 3e-3, 2, 1.0))
    missed = lab.race(plan, "here", seed=1, rounds=1)
    assert not missed.valid and "3 steps, and 2.0 is the target" in missed.why and missed.seconds > 0
    monkeypatch.setattr(here, "TARGET", 5.0)
    result = lab.race(plan, "here", seed=1, rounds=1)
    assert result.valid and 3 < result.loss < 5 and result.loss == pytest.approx(missed.loss)
    assert result.seconds > 0 and result.score == pytest.approx(score(result.seconds, 1.0))
    assert [row["valid"] for row in own_progress.rows] == [False, True]


@pytest.mark.parametrize("steps", [1, 2])  # the loss at the end, and a gradient before
def test_a_loss_that_is_no_number_reaches_no_target(steps, cluster, monkeypatch, own_progress):
    monkeypatch.setattr("hpdl_lab.verbs.cluster._notebook._cluster", cluster)
    monkeypatch.setattr(here, "reference", lambda ranks: HerePlan(ranks, 8, 3e-3, 2, 1.0))
    plan = {"dp": 2, "batch": 8, "learning_rate": 1e12, "steps": steps, "optimizer": "sgd", "expected_s": 1.0}
    result = lab.race(plan, "here", seed=1, rounds=1)
    assert not result.valid and "no number" in result.why and "diverges" in repr(result)
    json.loads(own_progress.path.read_text(), parse_constant=pytest.fail)


# -- files and the command --------------------------------------------------------------------------------------------


def toml(path, **tables):
    lines = []
    for name, plan in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in plan.items()]
    path.write_text("\n".join(lines))
    return path


def test_the_command_prints_the_score_and_fails_without_a_pass(tmp_path, capsys):
    good = toml(tmp_path / "plan.toml", simulated=asdict(REFERENCE))
    assert cli.main(["race", str(good), "--seed", "1"]) == 0
    assert "simulated league, seed 1: 65.6 h" in capsys.readouterr().out
    bad = toml(tmp_path / "bad.toml", simulated=asdict(REFERENCE) | {"learning_rate": 1.0})
    assert cli.main(["race", str(bad), "--league", "simulated"]) == 1
    assert "disqualified. It diverges" in capsys.readouterr().out


def test_a_file_that_is_no_plan_is_refused_in_one_sentence(tmp_path, capsys):
    (tmp_path / "a.toml").write_text("dp = ")
    assert cli.main(["race", str(tmp_path / "a.toml")]) == 1
    assert "is no TOML file" in capsys.readouterr().err
    (tmp_path / "b.toml").write_text("dp = 4\n")
    with pytest.raises(ValueError, match=r"needs a table for each league, such as \[simulated\]"):
        read_plan(tmp_path / "b.toml")
    path = toml(tmp_path / "c.toml", simulated=asdict(REFERENCE))
    with pytest.raises(ValueError, match=r"has no table \[here\]: it has simulated"):
        lab.race(path, "here")
    with pytest.raises(ValueError, match="no league is called 'moon': simulated, here"):
        lab.race(path, "moon")
