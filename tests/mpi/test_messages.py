"""Messages between real ranks: what arrives, in which order, of which type; and what is refused."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hpdl_lab.comm.buffers import DTYPES

SIZES = (0, 1, 7, 1000, 1001, 300_001)  # the last ones are announced


def tensor(count, dtype, seed):
    """(count,) small whole numbers, which every dtype holds exactly."""
    return (torch.arange(count) % 7 + seed).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_go_round(comm, dtype):
    p, r = comm.size, comm.rank
    if p == 1:
        return
    for count in SIZES:
        y = torch.zeros(count, dtype=getattr(torch, dtype))
        assert comm.sendrecv(tensor(count, dtype, r), (r + 1) % p, y, (r - 1) % p) is y
        want = tensor(count, dtype, (r - 1) % p)
        assert torch.equal(y.view(torch.uint8), want.view(torch.uint8)), count


def test_arrays_go_round(comm):
    p, r = comm.size, comm.rank
    if p == 1:
        return
    for dtype in [d for d in DTYPES if d != "bfloat16" and not d.startswith("float8")]:
        y = np.zeros((7, 11), dtype)
        comm.sendrecv(np.full((7, 11), r + 1, dtype), (r + 1) % p, y, (r - 1) % p)
        assert (y == np.full((7, 11), (r - 1) % p + 1, dtype)).all(), dtype


def test_a_tensor_arrives_in_an_array(comm):
    if comm.rank == 0 and comm.size > 1:
        comm.send(torch.arange(5.0), 1)
    elif comm.rank == 1:
        assert comm.recv(np.zeros(5, np.float32), 0).tolist() == [0, 1, 2, 3, 4]


def test_a_parameter_and_its_gradient_can_be_sent(comm):
    p, r = comm.size, comm.rank
    if p == 1:
        return
    weight = torch.nn.Parameter(torch.full((3, 2), float(r)))
    y = torch.zeros(3, 2)
    comm.sendrecv(weight, (r + 1) % p, y, (r - 1) % p)
    assert (y == (r - 1) % p).all()


def test_messages_arrive_in_order(comm):
    """Small and large ones mixed, received in the order in which they were sent, whatever is waited for first."""
    counts = (3, 100_000, 1, 70_000, 100_000)
    if comm.rank == 0 and comm.size > 1:
        for work in [comm.isend(np.full(n, i, np.int32), 1) for i, n in enumerate(counts)]:
            work.wait()
    elif comm.rank == 1:
        arrays = [np.zeros(n, np.int32) for n in counts]
        works = [comm.irecv(x, 0) for x in arrays]
        for work in reversed(works):
            work.wait()
        assert [set(x.tolist()) for x in arrays] == [{i} for i in range(len(counts))]


def test_test_is_true_in_the_end_and_wait_may_be_repeated(comm):
    p, r = comm.size, comm.rank
    if p == 1:
        return
    y = np.zeros(5)
    received, sent = comm.irecv(y, (r - 1) % p), comm.isend(np.full(5, float(r)), (r + 1) % p)
    while not (received.test() and sent.test()):
        pass
    received.wait()
    assert (y == (r - 1) % p).all()
    assert not comm.pending


def test_every_message_is_an_event(comm):
    p, r = comm.size, comm.rank
    if p == 1:
        return
    comm.sendrecv(np.zeros(1000, np.float32), (r + 1) % p, np.zeros(1000, np.float32), (r - 1) % p)
    events = {e.op: e for e in comm.trace.events}
    assert (events["send"].peer, events["send"].nbytes) == ((r + 1) % p, 4000)
    assert (events["recv"].peer, events["recv"].nbytes) == ((r - 1) % p, 4000)
    assert events["recv"].step < events["send"].step  # steps are taken when posted
    assert all(e.t0_ns <= e.t1_ns and e.line.startswith("test_messages.py:") for e in events.values())


def test_a_message_whose_posting_is_interrupted_is_known_to_the_communicator(comm, monkeypatch):
    """MPI still writes to its memory, which must not be freed before the communicator is closed."""
    p, r = comm.size, comm.rank
    if p == 1:
        return
    core = comm.core

    def receive(*args):
        core.receive(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(comm.transport, "core", SimpleNamespace(receive=receive, send=core.send))
        with pytest.raises(KeyboardInterrupt):
            comm.irecv(np.zeros(100_000), (r - 1) % p)
    (work,) = comm.pending.values()
    sent = comm.isend(np.full(100_000, float(r)), (r + 1) % p)
    x = work.x
    work.wait()
    sent.wait()
    assert (x == (r - 1) % p).all() and not comm.pending


def test_a_message_that_was_refused_is_not_kept(comm):
    if comm.size == 1:
        return
    with pytest.raises(TypeError):
        comm.isend("text", (comm.rank + 1) % comm.size)
    assert not comm.pending


def test_without_a_trace_nothing_is_recorded(run):
    comm = run(trace=False)
    comm.all_reduce(np.ones(3))
    assert comm.trace.events == []


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "expected"), [(1000, 1001), (1001, 1000), (3, 300_000), (300_000, 3), (300_000, 300_001), (300_001, 1)]
)
def test_another_count_is_named_with_both_numbers(comm, sent, expected):
    if comm.rank == 0 and comm.size > 1:
        comm.isend(np.zeros(sent, np.float32), 1)  # a large one is never taken, so it is not waited for
    elif comm.rank == 1:
        text = f"counts differ: rank 0 sends {sent:,} elements, rank 1 expects {expected:,}"
        with pytest.raises(ValueError, match=text):
            comm.recv(np.zeros(expected, np.float32), 0)


def test_another_dtype_is_named(comm):
    if comm.rank == 0 and comm.size > 1:
        comm.send(torch.zeros(8, dtype=torch.int32), 1)
        comm.send(torch.ones(8), 1)
    elif comm.rank == 1:
        with pytest.raises(ValueError, match="dtypes differ: rank 0 sends int32, rank 1 expects float32"):
            comm.recv(torch.zeros(8), 0)
        assert comm.recv(torch.zeros(8), 0).sum() == 8  # the next message is the next message


@pytest.mark.parametrize(
    ("peer", "sentence"),
    [(-1, "rank -1: ranks here are 0 to"), (99, "rank 99: ranks here are 0 to")]
    + [(wrong, f"something of type {type(wrong).__name__}: first comes the tensor") for wrong in (1.0, "1")],
)
def test_no_such_peer(comm, peer, sentence):
    with pytest.raises(ValueError, match=rf"rank {comm.rank} sends to {sentence}"):
        comm.send(np.zeros(1), peer)
    with pytest.raises(ValueError, match=f"receives from {sentence}"):
        comm.recv(np.zeros(1), peer)


def test_nobody_sends_to_himself(comm):
    with pytest.raises(ValueError, match="itself"):
        comm.send(np.zeros(1), comm.rank)


def test_what_cannot_be_sent_says_what_to_do(comm):
    if comm.size == 1:
        return
    peer = (comm.rank + 1) % comm.size
    for x, text in (
        (torch.zeros(4, 4).t()[:2], "non-contiguous tensor .* use x.contiguous"),
        (np.zeros((4, 4)).T[:2], "non-contiguous array .* use np.ascontiguousarray"),
        (torch.zeros(2, dtype=torch.uint32), "cannot send dtype uint32"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugated view: use x.resolve_conj"),
        (torch.empty(3, device="meta"), "cannot send a tensor on meta"),
    ):
        with pytest.raises(ValueError, match=text):
            comm.send(x, peer)
    for empty in (np.zeros(3, "V0"), np.zeros(3, [])):  # items of 0 bytes, by which nothing can be divided
        with pytest.raises((ValueError, TypeError), match="cannot send"):
            comm.send(empty, peer)
    with pytest.raises(TypeError, match="cannot send a list: a message is a torch tensor or a NumPy array"):
        comm.send([1, 2], peer)
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        comm.recv(read_only, peer)


AMID = {  # what a rank may be in when somebody waits for it to ask for a large message
    "send": lambda comm, sent: sent.wait(),
    "barrier": lambda comm, sent: comm.barrier(),
    "all_reduce": lambda comm, sent: comm.all_reduce(np.ones(3)),
    "agree": lambda comm, sent: comm.agree("agree"),
    "recv": lambda comm, sent: comm.sendrecv(
        np.ones(3), (comm.rank - 1) % comm.size, np.empty(3), (comm.rank + 1) % comm.size
    ),
}


@pytest.mark.parametrize("amid", AMID)
def test_a_receive_goes_on_while_its_rank_waits_for_something_else(comm, amid):
    p, r = comm.size, comm.rank
    x, y = np.full(50_000, float(r)), np.empty(50_000)
    begin = time.monotonic()
    received, sent = comm.irecv(y, (r - 1) % p), comm.isend(x, (r + 1) % p)
    if r != 0:
        sent.wait()  # ends only when the next rank asks for it: rank 0 does that amid something else
    AMID[amid](comm, sent)
    sent.wait()
    received.wait()
    assert (y == (r - 1) % p).all() and time.monotonic() - begin < 15


def test_a_receive_that_failed_unseen_fails_when_it_is_waited_for(comm):
    p, r = comm.size, comm.rank
    received, sent = comm.irecv(np.empty(100), (r - 1) % p), comm.isend(np.empty(100, np.float32), (r + 1) % p)
    sent.wait()
    comm.barrier()
    with pytest.raises(ValueError, match="dtypes differ: .*float32.*float64"):
        received.wait()
