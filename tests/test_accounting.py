"""What events say about steps: exposed and hidden communication, imbalance; each case is counted by hand."""

import pytest

from hpdl_lab.parallel.scaling.accounting import account, steps_of
from hpdl_lab.trace import Event


def events(rank, *rows):
    """rows: (op, from, to) or (op, from, to, lane), in ns."""
    return [Event(rank, i, op, t0, t1, lane=lane[0] if lane else "") for i, (op, t0, t1, *lane) in enumerate(rows)]


def spans(begin=0, update=110):
    """A step of 100 + whatever lies between backward and update: forward 20, backward 60, update 20."""
    return [("forward", begin, begin + 20), ("backward", begin + 20, begin + 80), ("update", update - 20, update)]


def test_blocking_communication_is_exposed():
    step = [*spans(), ("add gradients", 80, 90), ("all_reduce", 82, 90)]
    counted = account(events(0, *step))
    assert counted == (1, pytest.approx(110e-9), pytest.approx(8 / 110), 0.0, 1.0)


def test_what_a_background_does_is_hidden_but_for_the_wait():
    step = [*spans(), ("all_reduce", 40, 88, "background"), ("wait", 81, 89)]
    counted = account(events(0, *step))
    assert counted.exposed == pytest.approx(8 / 110)
    assert counted.overlap == pytest.approx(41 / 49), "communication from 40 to 89, of which 81 to 89 shows"


def test_messages_inside_a_collective_count_once():
    inside = [("all_reduce", 80, 90), ("send", 81, 84), ("recv", 82, 89)]
    assert account(events(0, *spans(), *inside)).exposed == pytest.approx(10 / 110)


def test_imbalance_is_the_busiest_over_the_mean():
    fast = [*spans(), ("all_reduce", 50, 90)]  # 70 ns of computing
    slow = [*spans(), ("all_reduce", 90, 90)]  # 110
    assert account(events(0, *fast) + events(1, *slow)).imbalance == pytest.approx(110 / 90)


def test_an_injected_delay_is_not_communication():
    assert account(events(0, *spans(), ("injected delay", 80, 90))).exposed == 0


def test_only_whole_steps_count_and_what_lies_between_them_does_not():
    step = [*spans(), ("barrier", 111, 199), *spans(200, 300), ("forward", 400, 450), ("all_reduce", 420, 440)]
    counted = account(events(0, *step))
    assert counted.steps == 2 and counted.seconds == pytest.approx(105e-9) and counted.exposed == 0
    assert steps_of(events(0, *step)) == [(0, 110), (200, 300)]


def test_an_input_span_belongs_to_the_step_that_it_feeds():
    assert steps_of(events(0, ("input", 5, 9), *spans(10, 120))) == [(5, 120)]


@pytest.mark.parametrize("nothing", [[], events(0, ("send", 0, 9)), events(0, ("forward", 0, 9))])
def test_no_step_no_account(nothing):
    assert account(nothing) is None
