"""What a careless caller might hand over as a tensor, and what should come of it."""

import sys
import warnings

import numpy as np

# The first of hpdl_lab.comm.buffers.DTYPES, in its order: those with sums, and NumPy's, that need no torch.
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8")
COUNTS = (0, 1, 2, 3, 7, 64, 511, 513, 1000, 2500)
CLEAR = (ValueError, TypeError, RuntimeError, MemoryError, OverflowError, AttributeError, KeyError)


def attempt(function, *args):
    """(what it returns, None), or (None, the error), which must be of a clear kind and say something."""
    try:
        return function(*args), None
    except CLEAR as error:
        assert str(error).strip(), f"{type(error).__name__} without a word"
        assert not isinstance(error, SystemError), error
        return None, error


def values(rng, count, dtype):
    """(count,) small whole numbers, of which sums are exact in every dtype."""
    return np.array([rng.randrange(16) for _ in range(min(count, 64))] * (count // 64 + 1))[:count].astype(dtype)


def array_of(rng, count, dtype):
    """A good array, sometimes of an odd kind: two-dimensional, at an odd place of a longer one, of a subclass."""
    kind = rng.randrange(4)
    if kind == 0 and count % 2 == 0:
        return values(rng, count, dtype).reshape(2, -1)
    if kind == 1:
        return values(rng, count + 3, dtype)[3:]
    if kind == 2:
        return values(rng, count, dtype).view(Vector)
    return values(rng, count, dtype)


class Vector(np.ndarray):
    """An array of a class of its own."""


class Thing:
    """No tensor at all, whatever it pretends to be."""

    flags, dtype, shape = None, "float32", (3,)


def flaw(rng, count, dtype):
    """(object, what is wrong with it): a word of FLAWS."""
    kind = rng.choice(("unaligned", "read-only", "strided", "swapped", "dtype", "no array", "overlong"))
    if kind == "unaligned" and np.dtype(dtype).itemsize > 1 and count > 0:
        memory = np.zeros(count * np.dtype(dtype).itemsize + 1, np.uint8)
        return memory[1:].view(dtype), "unaligned"
    if kind == "read-only":
        x = values(rng, count, dtype)
        x.flags.writeable = False
        return x, "read-only"
    if kind == "strided":
        wide = values(rng, 2 * count + 4, dtype)
        return wide[::2][: count + 2], "strided"
    if kind == "swapped" and np.dtype(dtype).itemsize > 1:
        return values(rng, count, np.dtype(dtype).newbyteorder()), "dtype"
    if kind == "dtype":
        return np.zeros(count, rng.choice(("O", "u4", "S0", "M8[s]", "f4,i4", "U3"))), "dtype"
    if kind == "overlong":
        return np.broadcast_to(np.zeros((), dtype), (1 << 40,)), "strided"
    return rng.choice((None, 3, -1.5, "x", b"abcd", bytearray(8), memoryview(bytes(8)), [1.0], Thing(), Thing, {},
                       np.float32(3), range(3))), "no array"  # fmt: skip


def tensor_flaw(rng, count):
    """A torch tensor that cannot be sent, where torch is loaded."""
    torch = sys.modules["torch"]
    warnings.simplefilter("ignore")  # of kinds that are no longer in fashion
    return rng.choice((
        torch.zeros(2 * count + 4)[::2],
        torch.zeros(count + 2, 3).t(),
        torch.zeros(1).expand(count + 2),
        torch.zeros(count, device="meta"),
        torch.zeros(count + 1).to_sparse(),
        torch.zeros(count, dtype=torch.uint32),
        torch.zeros(count, dtype=torch.float8_e8m0fnu),
        torch.ones(count + 1, dtype=torch.complex64).conj(),
        torch.tensor(1 + 2j).conj().imag,
        torch.quantize_per_tensor(torch.zeros(count + 1), 1.0, 0, torch.quint8),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    ))  # fmt: skip


def refused(what, writable, added):
    """Is memory with this flaw refused? Read-only is good enough to read, an odd address is to move."""
    return {"unaligned": added, "read-only": writable}.get(what, True)
