"""Messages between notebook and engine: what arrives is what was sent, in whatever parts, uncopied."""

import pickle
import socket

import numpy as np
import pytest
import torch

from hpdl_lab.engines import messages
from hpdl_lab.engines.messages import HEADER, LARGE, MessageReader, Packed, pack, pieces

BIG = LARGE // 4 + 1  # float32


class Connection:
    """Gives what is sent, at most `most` bytes at once."""

    def __init__(self, sent, most):
        self.rest, self.most = memoryview(sent), most

    def recv(self, count):
        part = self.rest[: min(count, self.most)]
        self.rest = self.rest[len(part) :]
        return bytes(part)

    def recv_into(self, buffer):
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def sent(*contents):
    return b"".join(bytes(piece) for kind, content in enumerate(contents) for piece in pieces(kind, content))


def received(connection):
    reader, found = MessageReader(), []
    while (whole := reader.read(connection)) is not None:
        found += whole
    return found


@pytest.mark.parametrize("most", [1, 7, HEADER.size, 4096, 1 << 16, 1 << 30])
def test_messages_arrive_whole_and_in_order_however_the_socket_cuts_them(most):
    large, two = np.arange(BIG, dtype="float32"), [np.full(BIG, k, "float32") for k in range(2)]
    contents = ["a", pack(large), None, {"value": pack(two), "rank": 3}, pack({}), ("stdout", "b" * 100)]
    found = received(Connection(sent(*contents), most))
    assert [kind for kind, _ in found] == list(range(6))
    text, one, none, outcome, empty, last = (content for _, content in found)
    assert (text, none, last, outcome["rank"]) == ("a", None, ("stdout", "b" * 100), 3)
    assert np.array_equal(one.value(), large) and empty.value() == {}
    assert all(np.array_equal(a, b) for a, b in zip(outcome["value"].value(), two, strict=True))


def test_a_message_that_is_cut_off_is_no_message():
    message = sent(pack(np.ones(BIG, "float32")))
    assert received(Connection(message[:-1], 4096)) == []


def arrived(value):
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(20)
        reader, whole = MessageReader(), []
        parts = [memoryview(part).cast("B") for part in pieces(0, pack(value))]
        while not whole:
            if parts:
                parts[0] = parts[0][here.send(parts[0][: 1 << 14]) :]
                parts = [part for part in parts if len(part)]
            whole = reader.read(there)
        return whole[0][1].value()


def view(x):
    return x[1:, ::2]


@pytest.mark.parametrize("n", [0, 3, BIG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_arrive_as_they_were(dtype, n):
    x = (torch.arange(float(2 * n)).reshape(2, n) % 3).to(dtype)
    for tensor in (x, view(x), x.t()):
        got = arrived([tensor, tensor])
        assert torch.equal(got[0], tensor) and got[0].stride() == tensor.stride() and got[0].dtype == dtype
        assert got[0] is got[1]
        got[0].zero_()  # it is writable, and no longer the memory of the other


def test_a_model_arrives_as_it_was():
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    got = arrived(model)
    for a, b in zip(model.state_dict().values(), got.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad and p.is_leaf for p in got.parameters())
    got(torch.ones(2, 300)).sum().backward()


def test_arrays_stay_writable_read_only_or_in_fortran_order():
    for value in (np.ones((BIG, 2)), np.asfortranarray(np.ones((BIG, 2))), np.arange(2 * BIG)[::2], np.ones(2)):
        got = arrived(value)
        assert np.array_equal(got, value) and got.flags.writeable
        assert got.flags.f_contiguous or not value.flags.f_contiguous
    fixed = np.ones(BIG)
    fixed.flags.writeable = False
    assert not arrived(fixed).flags.writeable


@pytest.mark.parametrize("value", [np.zeros(BIG, "float32"), torch.zeros(BIG), torch.nn.Parameter(torch.zeros(BIG))])
def test_large_memory_is_not_copied(value):
    packed = pack({"x": [value]})
    (buffer,) = packed.buffers
    array = value if isinstance(value, np.ndarray) else value.detach().numpy()
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)
    (_, memory) = pieces(0, packed)
    assert np.shares_memory(np.frombuffer(memory, np.uint8), array)
    room = messages.room(memory.nbytes)
    assert room.ctypes.data % 64 == 0 and room.nbytes == memory.nbytes
    (got,) = Packed(packed.data, [room]).value()["x"]
    assert np.shares_memory(got if isinstance(got, np.ndarray) else got.detach().numpy(), room)


def test_what_is_small_stays_in_the_pickle():
    packed = pack([np.zeros(LARGE // 8 - 1), torch.zeros(3)])
    assert packed.buffers == [] and len(pieces(0, packed)) == 1
    assert [len(x) for x in pickle.loads(packed.data)] == [LARGE // 8 - 1, 3]
