"""Horovod's ideas: tensor fusion, negotiation by rank 0, the response cache, and the timeline in Horovod's words."""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.parallel.horovod import timeline as horovod_timeline
from hpdl_lab.parallel.horovod.fusion import DistributedOptimizer, fuse, negotiate
from hpdl_lab.trace import Event

STEPS = 4
NEVER = 99


def train(comm, sometimes_from=0, only_on=None, **fusion):
    """Parameters after each of STEPS steps on 24 examples; `sometimes` has a gradient from a step on, on some ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    sometimes = nn.Linear(3, 3, bias=False).double()
    x, y = torch.randn(24, 8).double(), torch.randint(0, 4, (24,))  # before other simulated ranks draw
    params = [*model.parameters(), *sometimes.parameters()]
    names = [*model.named_parameters(), ("sometimes", sometimes.weight)]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)
    optimizer = DistributedOptimizer(optimizer, comm, names, **fusion)
    mine = slice(comm.rank * 24 // comm.size, (comm.rank + 1) * 24 // comm.size)
    course = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(x[mine]), y[mine])
        if step >= sometimes_from and (only_on is None or comm.rank in only_on):
            loss = loss + sometimes(torch.ones(1, 3).double()).sum()
        loss.backward()
        optimizer.step()
        course.append(torch.cat([p.detach().reshape(-1) for p in params]))
    return course


def difference(course, other):
    return max(float((a - b).abs().max()) for a, b in zip(course, other, strict=True))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("threshold", [0, 600, 2**20])
def test_it_is_one_rank_with_the_same_batch_step_by_step(p, threshold):
    alone = run(1)[0]
    for course in run(p, threshold):
        assert difference(alone, course) < 1e-10


def run(p, threshold=2**20, *, sometimes_from=0, only_on=None, **fusion):
    """Train on p simulated ranks."""

    def body(comm):
        return train(comm, sometimes_from, only_on, threshold=threshold, all_reduce=ring.all_reduce, **fusion)

    return sim.run(p, body)


@pytest.mark.parametrize("sometimes_from", [2, NEVER])
def test_a_gradient_that_comes_late_or_never_is_as_on_one_rank(sometimes_from):
    """A parameter without gradient is not decayed and gets no momentum: zeros would be something else."""
    alone = run(1, sometimes_from=sometimes_from)[0]
    assert difference(alone, run(3, sometimes_from=sometimes_from)[2]) < 1e-10


def test_a_gradient_on_some_ranks_only_counts_as_zeros_elsewhere_and_is_named():
    with pytest.warns(UserWarning, match=r"no gradient on some of 3 ranks: sometimes \(on 2\); they count as zeros"):
        courses = run(3, only_on=(1,))
    assert all(difference(courses[0], course) == 0 for course in courses)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        everywhere = run(3)
    assert difference(courses[0], everywhere[0]) > 1e-3


def messages(results, rank=0):
    """Bytes that `rank` sent, message by message."""
    return [e.nbytes for e in results.events if e.rank == rank and e.op == "send"]


def test_nothing_is_negotiated_after_the_first_step():
    elements, n = 8 * 16 + 16 + 16 * 4 + 4 + 9, 5
    sent = messages(run(2, threshold=2**20))
    batch = (elements + n + 1) * 8  # one batch: a flag for each gradient, and one more
    later = sent[-(STEPS - 1) * 2 :]
    assert [sum(later[i : i + 2]) for i in range(0, len(later), 2)] == [batch] * (STEPS - 1), "a ring of 2 ranks"
    first = sum(sent[: -len(later)])
    told = 2 * 8 + 4 * n + 8  # do all mean the same? (8 bytes each); rank 0's answer; do values differ?
    assert first == told + batch


def test_with_threshold_0_every_gradient_travels_alone():
    sent = messages(run(2, threshold=0))
    assert len(sent) == 2 + STEPS * 5 * 2, (
        "a digest, an answer; a ring of two ranks sends two messages for each of 5 gradients"
    )


def test_a_batch_is_the_greedy_first_fit_of_one_dtype():
    f32, f64 = torch.float32, torch.float64
    assert fuse("abcd", dict(a=3, b=4, c=2, d=1), dict.fromkeys("abcd", f32), 6) == [["a", "c", "d"], ["b"]]
    assert fuse("abc", dict(a=9, b=1, c=1), dict(a=f32, b=f64, c=f32), 6) == [["a"], ["b"], ["c"]]
    assert fuse("abc", dict(a=1, b=1, c=1), dict(a=f32, b=f64, c=f32), 6) == [["a", "c"], ["b"]]
    assert fuse("abc", dict(a=1, b=1, c=1), dict.fromkeys("abc", f32), 0) == [["a"], ["b"], ["c"]]
    assert fuse("", {}, {}, 6) == []


def test_rank_0_answers_with_what_is_ready_everywhere_in_its_own_order():
    def body(comm):
        ready = ([3, 1, 0], [0, 3], [0, 2, 3])[comm.rank]
        return negotiate(comm, ready, {0}, 5)

    assert sim.run(3, body) == [([3], [0])] * 3, "3 is ready on all; all give zeros for 0; the others are not ready"


def test_gradients_of_different_order_on_every_rank_are_not_mixed_up():
    """What Horovod negotiates for: without it rank 1 would add its b to rank 0's a."""

    def body(comm):
        a, b = (nn.Parameter(torch.zeros(2)) for _ in "ab")
        optimizer = DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), comm, threshold=0)
        for _ in range(2):
            first, second = (a, b) if comm.rank == 0 else (b, a)
            first.sum().backward()
            (2 * second).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return a.tolist() + b.tolist()

    assert sim.run(2, body) == [[-3.0] * 4] * 2


def test_gradients_add_up_over_passes_before_they_are_averaged():
    def body(comm, passes):
        w = nn.Parameter(torch.zeros(1))
        optimizer = DistributedOptimizer(torch.optim.SGD([w], lr=1.0), comm, passes=passes)
        for factor in (1.0, 10.0):
            (factor * (comm.rank + 1) * w).sum().backward()
        optimizer.step()
        return w.item()

    assert sim.run(2, body, 2) == [-16.5] * 2


def test_bad_input_is_said():
    w = nn.Parameter(torch.zeros(1))

    def build(comm, params, names=None, **fusion):
        DistributedOptimizer(torch.optim.SGD(params, lr=1.0), comm, names, **fusion)

    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        sim.run(1, build, [nn.Parameter(torch.zeros(1), requires_grad=False)])
    with pytest.raises(ValueError, match="named_parameters lacks 1 of the optimizer's 1 parameters"):
        sim.run(1, build, [w], [])
    with pytest.raises(TypeError, match="named_parameters are pairs of a name and a parameter"):
        sim.run(1, build, [w], ["w"])
    with pytest.raises(TypeError, match="needs an optimizer of torch.optim, got Linear"):
        sim.run(1, lambda comm: DistributedOptimizer(nn.Linear(1, 1), comm))
    with pytest.raises(TypeError, match=r"all_reduce=3: a function all_reduce\(comm, x\) is needed"):
        sim.run(1, lambda comm: build(comm, [w], all_reduce=3))
    with pytest.raises(ValueError, match="does not add up: on rank 0, element 0 of 5 should be 2, the sum over 2"):
        sim.run(2, lambda comm: build(comm, [w], all_reduce=lambda comm, x: -ring.all_reduce(comm, x)))
    for wrong, told in ((-1, "-1"), ("1MB", "'1MB'")):
        with pytest.raises(ValueError, match=f"got threshold {told}, cycle 0.001, passes 1"):
            sim.run(1, lambda comm, wrong=wrong: build(comm, [w], threshold=wrong))


def test_the_timeline_speaks_as_horovods_and_is_balanced(tmp_path):
    events = run(3, threshold=600, timeline=True).events
    horovod_timeline.save(events, tmp_path / "timeline.json")
    rows = json.loads((tmp_path / "timeline.json").read_text())
    tensors = {row["args"]["name"]: row["pid"] for row in rows if row.get("name") == "process_name"}
    assert set(tensors) == {"0.weight", "0.bias", "2.weight", "2.bias", "sometimes"}
    for pid in tensors.values():
        of_tensor = [row for row in rows if row["pid"] == pid]
        assert sum(row["ph"] == "B" for row in of_tensor) == sum(row["ph"] == "E" for row in of_tensor)
        begun = [row["name"] for row in of_tensor if row["ph"] == "B"]
        reduction = ["ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "MPI_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
        assert begun == ["NEGOTIATE_ALLREDUCE", *reduction * STEPS], "negotiated once, in the first step"
        assert sorted(row["name"] for row in of_tensor if row["ph"] == "X") == sorted(["0", "1", "2"] * STEPS)
        open_now = 0
        for row in of_tensor:
            open_now += (row["ph"] == "B") - (row["ph"] == "E")
            assert 0 <= open_now <= 2


def test_the_file_is_whole_json_after_every_event(tmp_path, monkeypatch):
    path, texts, dumps = tmp_path / "timeline.json", [], json.dumps
    monkeypatch.setattr(json, "dumps", lambda row: texts.append(path.read_text()) or dumps(row))
    ops = ("RANK_READY w", "MEMCPY_IN_FUSION_BUFFER w", "ALLREDUCE w")
    horovod_timeline.save([Event(0, step, op, step, step + 5) for step, op in enumerate(ops)], path)
    assert [len(json.loads(text)) for text in texts] == list(range(len(texts))) and len(texts) == 7
