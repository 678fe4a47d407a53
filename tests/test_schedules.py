"""Pipeline schedules as data: their times and memory, by the formulas; their text; what is refused."""

import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import strategies as st

from hpdl_lab import schedules
from hpdl_lab.schedules import Action, build, evaluate, from_strings, over_time, summary, validate
from hpdl_lab.schedules.catalog import FOLDED
from hpdl_lab.schedules.evaluation import covered
from hpdl_lab.schedules.gpipe import gems, gpipe
from hpdl_lab.schedules.one_f_one_b import interleaved, one_f_one_b, zero_bubble_h1
from hpdl_lab.schedules.v_shaped import dualpipe, dualpipe_v, zero_bubble_v
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
    # of these F, I and W take 1 each, B 2; V-shaped ones count halves of a rank's work, from 2 p micro-batches on
    "zero_bubble_v": (lambda p, m, v, tf, tb: 3 * m + Fraction(p - 1, 2), lambda p, m, v, s: 2 * p),
    "dualpipe": (lambda p, m, v, tf, tb: 3 * m + 2 * (p // 2 - 1), lambda p, m, v, s: p + 1),
    "dualpipe_v": (lambda p, m, v, tf, tb: 3 * m + p - 1, lambda p, m, v, s: 2 * p + 1),
    "gems_mast": (lambda p, m, v, tf, tb: p * tf + m * p * tb + (m - 1) * tf, lambda p, m, v, s: 1),
    "gems_master": (lambda p, m, v, tf, tb: p * tf + m * p * tb + (m - 1) * tf, lambda p, m, v, s: 1),
}


@st.composite
def built(draw):
    """A schedule of the catalog, with numbers that it can have."""
    name, p, m = draw(st.sampled_from([*FORMULAS])), draw(st.integers(1, 8)), draw(st.integers(1, 17))
    v = draw(st.integers(1, 4)) if name == "interleaved" else 1
    if name == "dualpipe":
        p, m = p + p % 2, 2 * (p + p % 2) + m - m % 2
    m = {"interleaved": p * -(-m // 4), "zero_bubble_h1": p + m - 1, "gems_mast": 2, "gems_master": m + 1}.get(name, m)
    m += 2 * p if name in ("zero_bubble_v", "dualpipe_v") else 0
    return build(name, p, m, v if name == "interleaved" else None)


@given(built(), st.integers(1, 3), st.integers(0, 2))
def test_each_schedule_does_all_in_order_in_the_time_and_memory_of_its_formula(schedule, tf, more):
    """Where a forward is not longer than a backward: GEMS hides forwards behind backwards."""
    makespan, live = FORMULAS[schedule.name]
    if schedule.name in ("zero_bubble_h1", *FOLDED):
        tf, more = 1, 1
    p, m, v, tb = schedule.ranks, schedule.micro_batches, schedule.chunks, tf + more
    times = evaluate(validate(schedule, most_live=max(live(p, m, v, s) for s in range(p))), Fraction(tf), Fraction(tb))
    assert times.makespan == makespan(p, m, v, tf, tb)
    assert times.bubble == pytest.approx(1 - m * (tf + tb) / float(times.makespan))
    bounds = tuple(live(p, m, v, s) for s in range(p))
    assert times.peak == bounds or schedule.name == "zero_bubble_h1" and max(times.peak) == p
    assert schedule.name != "zero_bubble_v" or all(row[-1].end - row[0].begin == 3 * m for row in times.rows)
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


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 20), (16, 32)])
def test_dualpipe_waits_as_long_as_its_authors_say(p, m):
    """(p/2 - 1)(F&B + B - 3 W), for F = I = W = 1, B = 2 and F&B = 3; the middle ranks also where F&B is less."""
    schedule = build("dualpipe", p, m)
    excess = {4: 2, 8: 6, 16: 14}[p]
    assert evaluate(schedule, pair=3).makespan - 3 * m == evaluate(schedule).makespan - 3 * m == excess
    assert set(evaluate(schedule).peak) == {p + 1} and schedule.replicas == 2
    for pair in (2, Fraction(5, 2), 3):
        times = evaluate(schedule, pair=pair)
        assert times.makespan - covered(times.rows[p // 2]) == (p // 2 - 1) * (pair + 2 - 3)
    for row, times in zip(schedule.rows, evaluate(schedule, pair=2).rows, strict=True):
        at = {timed.action: (timed.begin, timed.end) for timed in times}
        overlapping = [(at[a], at[b]) for a, b in pairwise(row) if a in schedule.paired]
        assert overlapping and all(f[0] == b[0] and f[1] <= b[1] for f, b in overlapping)
    with raises(ValueError, "2", "1"):
        evaluate(schedule, pair=1)


def test_below_2p_micro_batches_the_folded_schedules_leave_out_what_there_is_not():
    for name in FOLDED:
        for p, m in ((2, 2), (4, 2), (4, 3), (6, 5)):
            schedule = validate(build(name, p, m))
            assert schedule.micro_batches == m and evaluate(schedule).makespan >= 3 * m


def test_what_may_overlap_and_what_not():
    schedule = from_strings([["0F0", "0F1", "(0F2;0B0)OVERLAP_F_B", "0B1", "0B2"]], "mine")
    assert schedule.partner == {Action(0, "F", 2): Action(0, "B", 0)} and str(schedule) == "rank 0: FFF&BBB"
    times = evaluate(validate(schedule), pair=2)
    assert (times.makespan, times.bubble, times.peak) == (8, 0, (3,))
    with raises(ValueError, "rank 0", "0F0", "0B0"):
        validate(from_strings([["(0F0;0B0)OVERLAP_F_B"]], "mine"))
    with raises(ValueError, "0F1", "nothing"):
        validate(replace(from_strings([["0F0", "0B0", "0B1", "0F1"]]), paired=frozenset({Action(0, "F", 1)})))
    with raises(ValueError, "0", "1", "(0F1;0B0;0F2)OVERLAP_F_B", "3 actions"):
        from_strings([["0F0", "(0F1;0B0;0F2)OVERLAP_F_B"]])


def test_a_pair_that_waits_for_itself_over_two_ranks_deadlocks():
    """Each rank's forward needs the other's, which is sent only when the pair is done."""
    rows = [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"]]
    with raises(ValueError, "mine", "rank 0", "0F1", "1B0", "rank 1", "1F1", "0F1"):
        evaluate(from_strings(rows, "mine"))


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


ROWS = [gpipe, one_f_one_b, zero_bubble_h1, gems, interleaved, zero_bubble_v, dualpipe, dualpipe_v]
SHOWN = {"gems": (3, 2), "interleaved": (2, 2), "zero_bubble_v": (2, 3), "dualpipe": (4, 8), "dualpipe_v": (2, 4)}


@pytest.mark.parametrize("row", ROWS)
def test_the_picture_in_the_docstring_is_what_the_function_makes(row):
    name = {"one_f_one_b": "1f1b", "gems": "gems_mast"}.get(row.__name__, row.__name__)
    p, m = SHOWN.get(row.__name__, (3, 4))
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
    assert str(build("dualpipe", 4, 10)).splitlines()[0] == "rank 0: 3F0 F1I1W1F1 2F0&B1F1&B0 B1F1&B0B1 2I0W0"


def test_strings_and_files_bring_a_schedule_back(tmp_path):
    for name, p, m in (
        ("gpipe", 3, 5),
        ("interleaved", 4, 8),
        ("zero_bubble_h1", 3, 11),
        ("gems_master", 4, 6),
        ("dualpipe", 4, 8),
    ):
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
        (("1f1b", 4, 8, 2), ("1f1b", "1 chunk", "2")),
        (("dualpipe_v", 4, 8, 4), ("dualpipe_v", "2 chunks", "4")),
        (("dualpipe", 3, 8), ("dualpipe", "even", "3")),
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
    assert [row[0] for row in rows] == ["gpipe", "1f1b", "interleaved", "zero_bubble_h1", *FOLDED, "gems_mast"]
    for name, makespan, bubble, live in rows:
        times = evaluate(build("gems_master" if name == "gems_mast" else name, 4, 8))
        assert (times.makespan, f"{times.bubble:.1%}") == (float(makespan), f"{bubble}%")
        assert times.peak == tuple(int(count) for count in re.findall(r"\d+", live)[:4])
