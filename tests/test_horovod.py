"""Horovod's ideas: fusion, negotiation, the response cache, the timeline; and what scripts do beside the steps."""

import json
import re

import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.parallel.data_parallel import broadcast_parameters
from hpdl_lab.parallel.horovod import DistributedOptimizer, fuse, save_timeline
from tests.properties import given
from tests.wording import raises

STEPS = 4
NEVER = 99
ROWS = torch.arange(48.0, dtype=torch.float64).sin().view(8, 6)


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


def run(p, threshold=2**20, *, sometimes_from=0, only_on=None, **fusion):
    """Train on p simulated ranks."""

    def body(comm):
        return train(comm, sometimes_from, only_on, threshold=threshold, all_reduce=ring.all_reduce, **fusion)

    return sim.run(p, body)


def difference(course, other):
    return max(float((a - b).abs().max()) for a, b in zip(course, other, strict=True))


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("threshold", [0, 600, 2**20])
def test_it_is_one_rank_with_the_same_batch_step_by_step(p, threshold):
    alone = run(1)[0]
    for course in run(p, threshold):
        assert difference(alone, course) < 1e-10


@pytest.mark.parametrize("sometimes_from", [2, NEVER])
@pytest.mark.filterwarnings("ignore:the loss does not depend")
def test_a_gradient_that_comes_late_or_never_is_as_on_one_rank(sometimes_from):
    """A parameter without gradient is not decayed and gets no momentum: zeros would be something else."""
    alone = run(1, sometimes_from=sometimes_from)[0]
    assert difference(alone, run(3, sometimes_from=sometimes_from)[2]) < 1e-10


def test_a_gradient_on_some_ranks_only_counts_as_zeros_elsewhere_and_is_named():
    with pytest.warns(UserWarning, match="sometimes on ranks 0, 2: zeros"):
        courses = run(3, only_on=(1,))
    assert all(difference(courses[0], course) == 0 for course in courses)
    assert difference(courses[0], run(3)[0]) > 1e-3


def test_nothing_is_negotiated_after_the_first_step():
    elements, n = 8 * 16 + 16 + 16 * 4 + 4 + 9, 5
    sent = [e.nbytes for e in run(2, threshold=2**20).events if e.rank == 0 and e.op == "send"]
    bucket = (elements + 1) * 8  # a flag behind the gradients
    later = sent[-(STEPS - 1) * 2 :]
    assert [sum(later[i : i + 2]) for i in range(0, len(later), 2)] == [bucket] * (STEPS - 1), "a ring of 2 ranks"
    digests = 2 * 16  # options, then values: 8 bytes of each rank, which rank 0 sends back
    assert sum(sent[: -len(later)]) == digests + 4 * n + bucket
    sent = [e for e in run(2, threshold=0).events if e.rank == 0 and e.op == "send"]
    assert len(sent) == 3 + STEPS * n * 2, "with threshold 0 every gradient travels alone"


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([torch.float32, torch.float64])), max_size=12),
    st.integers(0, 20),
)
def test_fused_batches_are_the_greedy_first_fit_of_one_dtype(gradients, threshold):
    nbytes, dtypes = [n for n, _ in gradients], [dtype for _, dtype in gradients]
    order = list(range(len(gradients)))
    batches = fuse(order, nbytes, dtypes, threshold)
    assert sorted(i for batch in batches for i in batch) == order and all(batches)
    for k, batch in enumerate(batches):
        assert len({dtypes[i] for i in batch}) == 1 and batch == sorted(batch)
        assert len(batch) == 1 or sum(nbytes[i] for i in batch) <= threshold
        for i in (i for later in batches[k + 1 :] for i in later):  # what came later did not fit
            before = sum(nbytes[j] for j in batch if j < i)
            assert i > batch[0] and (dtypes[i] != dtypes[batch[0]] or before + nbytes[i] > threshold)


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


def wrap(comm, params, names=None, **fusion):
    return DistributedOptimizer(torch.optim.SGD(params, lr=1.0), comm, names, **fusion)


def wrap_model(comm, model):
    return wrap(comm, model.parameters(), model.named_parameters())


W = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("error", "facts", "build"),
    [
        (ValueError, ("no parameter",), lambda comm: wrap(comm, [nn.Parameter(torch.zeros(1), requires_grad=False)])),
        (ValueError, ("1", "1"), lambda comm: wrap(comm, [W], [])),
        (TypeError, ("pairs of a name",), lambda comm: wrap(comm, [W], ["w"])),
        (TypeError, ("Linear",), lambda comm: DistributedOptimizer(nn.Linear(1, 1), comm)),
        (TypeError, ("all_reduce=3",), lambda comm: wrap(comm, [W], all_reduce=3)),
        (ValueError, (), lambda comm: DistributedOptimizer(wrap(comm, [W]), comm)),
        (ValueError, ("-1",), lambda comm: wrap(comm, [W], threshold=-1)),
        (ValueError, ("'1MB'",), lambda comm: wrap(comm, [W], threshold="1MB")),
        (ValueError, ("rank 1", "passes=2"), lambda comm: wrap(comm, [W], passes=1 + comm.rank)),
        (ValueError, ("element 0", "5"), lambda comm: wrap(comm, [W], all_reduce=lambda c, x: -ring.all_reduce(c, x))),
        (
            ValueError,
            ("0", "(6, 2)", "float32", "rank 0"),
            lambda comm: wrap_model(comm, nn.Linear(2 + 4 * comm.rank, 6 - 4 * comm.rank)),
        ),
        (ValueError, ("1", "rank 0", "rank 1"), lambda comm: wrap_model(comm, nn.Linear(3, 3, bias=comm.rank == 0))),
    ],
)
def test_bad_input_is_an_error_before_the_first_step(error, facts, build):
    with raises(error, *facts):
        sim.run(2, build)


def test_the_timeline_speaks_as_horovods_and_is_balanced(tmp_path):
    events = run(3, threshold=600, timeline=True).events
    save_timeline(events, tmp_path / "timeline.json")
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


# -- what scripts do beside the steps ----------------------------------------------------------------------------------


def steps(comm, one_step, n=3, **fusion):
    """Let `one_step(model, optimizer, x)` take n steps on this rank's rows; returns the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(optimizer, comm, model.named_parameters(), threshold=0, **fusion)
    for _ in range(n):
        optimizer.zero_grad()
        one_step(model, optimizer, ROWS[comm.rank :: comm.size])
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def plain(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()


def test_clipping_after_synchronize_is_as_on_one_rank_and_averages_once():
    def clipped(model, optimizer, x):
        (100 * model(x).pow(2).mean()).backward()
        optimizer.synchronize()
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        optimizer.step()

    (alone,) = sim.run(1, steps, clipped)
    several = sim.run(2, steps, clipped)
    assert all(float((mine - alone).abs().max()) < 1e-12 for mine in several)
    sends = [[e.op for e in results.events].count("send") for results in (several, sim.run(2, steps, plain))]
    assert sends[0] == sends[1]


def with_closure(model, optimizer, x):
    optimizer.step(closure=lambda: model(x).sum())


def with_scaler(model, optimizer, x):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(x).pow(2).mean()).backward()
    scaler.step(optimizer)


def backward_twice(model, optimizer, x):
    for half in x.tensor_split(2):
        model(half).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("one_step", "facts"),
    [
        (with_closure, r"Call closure\(\) yourself"),
        (with_scaler, "ranks would skip different steps"),
        (backward_twice, r"another backward than the 1 of this step came to 2\.(weight|bias), .*`passes`"),
    ],
)
def test_what_would_not_average_is_refused(one_step, facts):
    with pytest.raises(ValueError, match=facts):
        sim.run(2, steps, one_step)
    if one_step is backward_twice:
        sim.run(2, lambda comm: steps(comm, one_step, passes=2))


@pytest.mark.parametrize("bad, word", [("nan", "NaN"), ("inf", "infinity|NaN")])
@pytest.mark.parametrize("good_steps", [0, 2])
def test_nan_on_one_rank_is_named_on_every_rank_before_the_update(bad, word, good_steps):
    said = []

    def body(comm):
        left = [good_steps]

        def spoiled(model, optimizer, x):
            left[0] -= 1
            loss = model(x).sum()
            if left[0] < 0 and comm.rank == 1:
                loss = loss + float(bad) * model[0].bias.sum()
            loss.backward()
            before = [p.detach().clone() for p in model.parameters()]
            try:
                optimizer.step()
            except FloatingPointError as error:
                said.append(str(error))
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

        steps(comm, spoiled, good_steps + 1)

    sim.run(3, body)
    assert len(said) == 3 and len(set(said)) == 1
    assert re.match(rf"rank 1: ({word}) in the gradient of 0\.bias", said[0])


def test_float16_is_averaged_where_its_sum_overflows_and_an_overflow_is_named_where_it_is_not_divided():
    def body(comm, average):
        w, v = (nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2))
        optimizer = wrap(comm, [w, v], [("w", w), ("v", v)], average=average)
        w.grad, v.grad = torch.full_like(w, 30_000.0), torch.ones_like(v)
        try:
            optimizer.step()
        except FloatingPointError as error:
            return str(error), w.tolist()
        return w.grad.tolist()

    assert sim.run(4, body, True) == [[30_000.0] * 2] * 4
    found = sim.run(3, body, False)
    assert found == [found[0]] * 3 and found[0][1] == [0, 0], "no rank has taken the step"
    assert "overflows float16 in the gradient of w" in found[0][0]


@pytest.mark.parametrize("later", [False, True])
def test_a_forgotten_broadcast_is_named_in_the_first_step(later):
    """Also on a rank alone, and where parameters are broadcast after the optimizer was made, as many scripts do."""

    def body(comm, forgotten):
        torch.manual_seed(7 * (comm.rank == 2))
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        model[0].bias.data.fill_(1.0)
        if not forgotten and not later:
            broadcast_parameters(comm, model)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model.named_parameters())
        if not forgotten and later:
            broadcast_parameters(comm, model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            try:
                optimizer.step()
            except ValueError as error:
                return str(error)
        return "trained"

    assert sim.run(3, body, False) == ["trained"] * 3 and sim.run(1, body, True) == ["trained"]
    for text in sim.run(3, body, True):
        assert text.startswith("rank 2 ") and "0.weight" in text and "broadcast_parameters" in text


@pytest.mark.parametrize("failing", [3, 7])
def test_a_step_whose_all_reduce_fails_says_so_and_the_next_one_is_clean(failing):
    """After a known sum: the second one of the first step, which is negotiated, and of the second, which is not."""

    def body(comm):
        count, said = [0], []

        def all_reduce(comm, x):
            count[0] += 1
            if count[0] == failing:
                raise RuntimeError("a bug in the all_reduce")
            return comm.all_reduce(x)

        def caught(model, optimizer, x):
            try:
                plain(model, optimizer, x)
            except RuntimeError as error:
                said.append(str(error))

        return steps(comm, caught, 3, all_reduce=all_reduce), said

    (first, said), (second, _) = sim.run(2, body)
    assert said == ["a bug in the all_reduce"]
    assert torch.equal(first, second)
    assert torch.allclose(first, sim.run(2, steps, plain, 2)[0])


@pytest.mark.parametrize("threads", [False, True])
def test_what_one_rank_raises_before_its_step_is_what_ends_the_run(threads):
    """Not a ForgottenWait, nor the time limit: nothing goes on beside a rank that has failed."""

    def body(comm):
        def fails(model, optimizer, x):
            model(x).sum().backward()
            if comm.rank == 1:
                raise LookupError("mine")
            optimizer.step()

        steps(comm, fails)

    with pytest.raises(LookupError, match="mine"):
        sim.run(2, body, threads=threads)
