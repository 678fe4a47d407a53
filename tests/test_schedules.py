"""Pipeline schedules as data: their times and memory, by the formulas; their text; what is refused."""

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import strategies as st

from hpdl_lab import schedules
from hpdl_lab.schedules import Action, build, evaluate, from_strings, over_time, summary, validate
from hpdl_lab.schedules.gpipe import gems, gpipe
from hpdl_lab.schedules.one_f_one_b import interleaved, one_f_one_b, zero_bubble_h1
from tests.properties import given
from tests.wording import raises

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "pipeline.md"
FORMULAS = {  # (makespan of p ranks and m micro-batches in v chunks, most live ones of rank s)
    "gpipe": (lambda p, m, v, tf, tb: (m + p - 1) * (tf + tb), lambda p, m, v, s: m),
    "1f1b": (lambda p, m, v, tf, tb: (m + p - 1) * (tf + tb), lambda p, m, v, s: min(m, p - s)),
    "interleaved": (
        lambda p, m, v, tf, tb: (m + Fraction(p - 1, v)) * (tf + tb),
        lambda p, m, v, s: min(m * v, 2 * (p - s - 1) + (v - 1) * p + 1),
    ),
    "zero_bubble_h1": (lambda p, m, v, tf, tb: 3 * m + p - 1, lambda p, m, v, s: p),  # F, I and W take 1 each
    "gems_mast": (lambda p, m, v, tf, tb: p * tf + m * p * tb + (m - 1) * tf, lambda p, m, v, s: 1),
    "gems_master": (lambda p, m, v, tf, tb: p * tf + m * p * tb + (m - 1) * tf, lambda p, m, v, s: 1),
}


@st.composite
def built(draw):
    """A schedule of the catalog, with numbers that it can have."""
    name, p, m = draw(st.sampled_from([*FORMULAS])), draw(st.integers(1, 8)), draw(st.integers(1, 17))
    v = draw(st.integers(1, 4)) if name == "interleaved" else 1
    m = {"interleaved": p * -(-m // 4), "zero_bubble_h1": p + m - 1, "gems_mast": 2, "gems_master": m + 1}.get(name, m)
    return build(name, p, m, v)


@given(built(), st.integers(1, 3), st.integers(0, 2))
def test_each_schedule_does_all_in_order_in_the_time_and_memory_of_its_formula(schedule, tf, more):
    """Where a forward is not longer than a backward: GEMS hides forwards behind backwards."""
    makespan, live = FORMULAS[schedule.name]
    if schedule.name == "zero_bubble_h1":
        tf, more = 1, 1
    p, m, v, tb = schedule.ranks, schedule.micro_batches, schedule.chunks, tf + more
    times = evaluate(validate(schedule, most_live=max(live(p, m, v, s) for s in range(p))), Fraction(tf), Fraction(tb))
    assert times.makespan == makespan(p, m, v, tf, tb)
    assert times.bubble == pytest.approx(1 - m * (tf + tb) / float(times.makespan))
    bounds = tuple(live(p, m, v, s) for s in range(p))
    assert times.peak == bounds or schedule.name == "zero_bubble_h1" and max(times.peak) == p
    end = {timed.action: timed.end for row in times.rows for timed in row}
    for stage in range(schedule.stages * schedule.replicas):
        for i in range(schedule.replica(stage), m, schedule.replicas):
            done = {kind for kind in "FBIW" if (stage, kind, i) in end}
            assert done in ({"F", "B"}, {"F", "I", "W"})
    for timed in (timed for row in times.rows for timed in row):
        for stage, kinds, i in schedule.needs(timed.action):
            assert min(end[stage, kind, i] for kind in kinds if (stage, kind, i) in end) <= timed.begin


def test_interleaved_with_one_chunk_holds_more_than_1f1b_and_takes_as_long():
    one, other = build("interleaved", 4, 8, 1), build("1f1b", 4, 8)
    assert evaluate(one).makespan == evaluate(other).makespan
    assert evaluate(one).peak == (7, 5, 3, 1)  # two forwards further ahead per rank: nothing waits for a message


def test_gems_two_replicas_run_in_opposite_directions():
    schedule = build("gems_mast", 4, 2)
    assert [schedule.rank_of(s) for s in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [schedule.replica(s) for s in (3, 4)] == [0, 1] and schedule.stages_of(1) == [1, 6]
    assert (schedule.next(3), schedule.previous(4), schedule.next(4), schedule.previous(7)) == (None, None, 5, 6)
    assert (schedule.stages, schedule.chunks, schedule.replica_of(1)) == (4, 1, 1)


def test_a_message_delays_the_next_rank_and_not_the_next_stage_of_the_same_rank():
    assert evaluate(build("gpipe", 3, 1), transfer=10).makespan == 9 + 4 * 10
    assert evaluate(build("interleaved", 1, 1, 3), transfer=10).makespan == pytest.approx(3)


def test_unequal_stages_are_as_slow_as_the_slowest():
    assert evaluate(build("1f1b", 2, 4), forward=(1, 3), backward=(1, 3)).makespan == 1 + 4 * 6 + 1
    with raises(ValueError, "3 numbers", "1f1b", "2 stages"):
        evaluate(build("1f1b", 2, 4), forward=(1, 2, 3))


def test_live_activations_over_time():
    times = evaluate(build("1f1b", 2, 3))
    assert times.live[1] == ((1, 1), (4, 1), (7, 1), (10, 0))  # freed and taken in the same moment
    assert times.live[0] == ((0, 1), (1, 2), (6, 2), (9, 1), (12, 0))


def test_measured_actions_are_summed_up_like_calculated_ones():
    times = evaluate(build("1f1b", 3, 4))
    assert summary(times.rows) == times


@pytest.mark.parametrize("row", [gpipe, one_f_one_b, zero_bubble_h1, gems, interleaved])
def test_the_picture_in_the_docstring_is_what_the_function_makes(row):
    name = {"one_f_one_b": "1f1b", "gems": "gems_mast"}.get(row.__name__, row.__name__)
    p, m = {"gems": (3, 2), "interleaved": (2, 2)}.get(row.__name__, (3, 4))
    schedule = build(name, p, m)
    drawn = over_time(schedule, evaluate(schedule)).splitlines()
    documented = [line.strip() for line in row.__doc__.splitlines() if line.strip().startswith("rank 0  ")]
    assert len(drawn) == p and len(documented) == 1
    for line in drawn:
        assert line in row.__doc__


def test_a_line_per_rank():
    assert str(build("1f1b", 4, 8)).splitlines() == [
        "rank 0: 3F 5FB 3B",
        "rank 1: 2F 6FB 2B",
        "rank 2: F 7FB B",
        "rank 3: 8FB",
    ]
    assert str(build("zero_bubble_h1", 4, 8)).splitlines()[1] == "rank 1: 3F I 5FIW 2IW W"
    assert str(build("interleaved", 2, 4)).splitlines()[1] == "rank 1: 2F0 2F1B1 2F0B0 2F1B1 2B0"
    assert str(build("gems_master", 4, 6)).splitlines()[0] == "rank 0: 3F0B0F1B1"


def test_strings_and_files_bring_a_schedule_back(tmp_path):
    for name, p, m in (("gpipe", 3, 5), ("interleaved", 4, 8), ("zero_bubble_h1", 3, 11), ("gems_master", 4, 6)):
        schedule = build(name, p, m)
        assert from_strings(schedules.to_strings(schedule), name, schedule.replicas) == schedule
        schedules.to_csv(schedule, tmp_path / "schedule.csv")
        assert schedules.from_csv(tmp_path / "schedule.csv", name, schedule.replicas) == schedule


def test_a_replica_without_a_micro_batch_is_refused():
    with raises(ValueError, "2 replicas", "1 micro-batch"):
        schedules.validate(from_strings([["0F0", "0B0", "3F0"], ["1F0", "1B0"]], "mine", replicas=2))


def test_what_torch_adds_for_its_runtime_is_left_out():
    rows = [["0F0", "", "0SEND_F0", None, "0RECV_B0", " 0I0", "0W0 ", "0REDUCE_GRAD"], ["1RECV_F0", "1F0", "1B0"]]
    assert from_strings(rows).rows == ((Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)),) + (
        (Action(1, "F", 0), Action(1, "B", 0)),
    )
    assert from_strings([["0F0", "(0F1;0B0)OVERLAP_F_B"]]).rows[0][1:] == ((0, "F", 1), (0, "B", 0))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([["0F0"], ["1F0", "1X0"]], ("1", "1", "'1X0'")),
        ([["0F"]], ("0", "0", "'0F'", "2F5")),
        ([[], [""]], ("2 rows",)),
        (None, ("None",)),
        ([[1, "0F0"]], ("0", "0", "'1'")),
        (["0F0", "0B0"], ("[['0F0', '0B0']]", "['0F0', '0B0']")),
    ],
)
def test_strings_that_are_no_schedule(rows, says):
    with raises(ValueError, *says):
        from_strings(rows)


def test_replicas_that_do_not_divide_the_stages():
    with raises(ValueError, "2 replicas", "3 stages"):
        from_strings([["0F0"], ["1F0"], ["2F0"]], replicas=2)
    with raises(ValueError, "replicas=0", "1"):
        from_strings([["0F0", "0B0"]], replicas=0)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("2f2b", 4, 8), ("'2f2b'", "1f1b")),
        (("gpipe", 0, 8), ("1", "0")),
        (("gpipe", 4, 2.0), ("micro_batches", "1", "2.0")),
        (("1f1b", 4, 8, 2), ("1f1b", "2")),
        (("interleaved", 4, 10), ("4 micro-batches", "4 ranks", "10")),
        (("zero_bubble_h1", 4, 3), ("zero_bubble_h1", "4 ranks", "4 micro-batches", "3")),
        (("gems_mast", 4, 4), ("gems_mast", "4", "gems_master")),
        (("gems_master", 2, 1), ("gems_master", "2", "1")),
    ],
)
def test_numbers_that_a_schedule_cannot_have(args, says):
    with raises(ValueError, *says):
        build(*args)


def rows_of(text):
    """ "0F0 0B0 / 1F0 1B0" as a schedule."""
    return from_strings([line.split() for line in text.split("/")], "mine")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0 0B0 0F1 0B1 / 1F0 1F1 1B0 1B1", ("rank 0", "0B0", "1B0", "rank 1", "1F1", "0F1", "rank 0")),
        (
            "0F0 0B0 0F1 0B1 / 1F0 1B0 1F1 1B1 / 2F0 2F1 2B0 2B1",
            ("rank 1", "1B0", "2B0", "rank 2", "2F1", "1F1", "rank 1"),
        ),
        ("0F0 0F1 0B0 / 1F0 1B0 1F1 1B1", ("0B1", "0I1", "0W1")),
        ("0F0 0B0 0B1 / 1F0 1B0 1F1 1B1", ("0F1",)),
        ("0F0 0B0 0F1 0I1 / 1F0 1B0 1F1 1B1", ("0W1",)),
        ("0F0 0B0 0W0 / 1F0 1B0", ("0B0", "0W0")),
        ("0F0 0B0 0F0 / 1F0 1B0", ("rank 0", "0F0")),
        ("0B0 0F0 / 1F0 1B0", ("rank 0", "0B0", "0F0")),
        ("0F0 0W0 0I0 / 1F0 1B0", ("rank 0", "0W0", "0I0")),
        ("0F0 0B0 1B0 / 1F0", ("stage 1", "rank 0", "rank 1")),
        ("0F0 0B0 1F0 1B0 / 2F0 2B0", ("3 stages", "2 ranks")),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(text, says):
    with raises(ValueError, *says):
        validate(rows_of(text))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows": ((Action(0, "F", 0),),)}, ("1f1b", "1 rows", "2 ranks")),
        ({"micro_batches": 1}, ("rank 0", "0F1", "0", "0")),
        ({"stages": 4}, ("1f1b", "2F0")),
        ({"replicas": 2}, ("rank 0", "0F1", "0", "1", "1")),
        ({"rows": ((Action(0, "G", 0),), ())}, ("rank 0", "0G0", "'G'")),
        ({"rows": ((Action(5, "F", 0),), ())}, ("rank 0", "5F0", "0", "1")),
    ],
)
def test_numbers_that_do_not_fit_the_rows_are_refused(changes, says):
    with raises(ValueError, *says):
        validate(replace(build("1f1b", 2, 2), **changes))


def test_more_than_fits_into_memory_is_refused():
    with raises(ValueError, "rank 0", "9 micro-batches"):
        validate(build("gpipe", 4, 9), most_live=4)
    assert validate(build("1f1b", 4, 9), most_live=4)


@pytest.mark.parametrize("fn", [validate, evaluate])
def test_what_is_no_schedule_is_refused(fn):
    with raises(TypeError, "Schedule", "'1f1b'", "schedules.build"):
        fn("1f1b")


@pytest.mark.parametrize("time", [-1, None, "long", [1, float("nan")]])
def test_what_is_no_time_is_refused(time):
    with raises(ValueError, "0"):
        evaluate(build("1f1b", 2, 2), backward=time)


def test_evaluating_names_what_no_rank_does():
    with raises(ValueError, "rank 0", "0B0", "1B0"):
        evaluate(rows_of("0F0 0B0 / 1F0"))


@pytest.mark.parametrize("p", [3, 5])
def test_ranks_that_take_each_others_warm_up_deadlock_and_no_proper_order_does(p):
    def mirrored(rank):
        return tuple(Action(rank, kind, i) for _, kind, i in one_f_one_b(p - 1 - rank, p, 6))

    schedule = replace(build("1f1b", p, 6), rows=tuple(mirrored(rank) for rank in range(p)))
    with raises(ValueError, "1f1b", "rank 0", "0B0", "1B0", "rank 1"):
        validate(schedule)


def test_the_document_says_what_is_calculated():
    rows = re.findall(r"^\| `(\w+)`.*\| ([\d.]+) \| ([\d.]+)% \| ([\d, ]+)[,;|]? ", DOCUMENT.read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == ["gpipe", "1f1b", "interleaved", "zero_bubble_h1", "gems_mast"]
    for name, makespan, bubble, live in rows:
        times = evaluate(build("gems_master" if name == "gems_mast" else name, 4, 8))
        assert (times.makespan, f"{times.bubble:.1%}") == (float(makespan), f"{bubble}%")
        assert times.peak == tuple(int(count) for count in re.findall(r"\d+", live)[:4])
