"""What the compiled module must know of the MPI library that mpi4py has loaded: what mpi.h would have said."""

import ctypes
import os
import sys
from typing import Any

from ...features import Missing, dev_shm
from ..buffers import DTYPES
from ..errors import CommError
from . import segments

PROBE = 0x1234567  # a tag that no other field of a status holds


def load(core: Any) -> Any:
    """Start MPI where it has not been, and hand its functions to the compiled module: (mpi4py.MPI, core.Mpi)."""
    import mpi4py

    try:
        dev_shm.require_room(1)  # whoever started the ranks may not have asked
    except Missing as error:
        raise CommError(str(error)) from None
    # A rank that failed must be able to end: MPI_Finalize would wait for it, or for its peers. See Session.leave.
    mpi4py.rc.finalize = False
    os.environ.setdefault("UCX_TLS", "^sysv")  # whose memory is open to the user's group
    earlier = None if "mpi4py.MPI" in sys.modules else segments.shared()
    from mpi4py import MPI

    require_own_memory(MPI, earlier)
    return MPI, core.Mpi(MPI.__file__, MPI.COMM_WORLD.rank, constants(MPI))


def require_own_memory(MPI: Any, earlier: Any) -> None:
    """Raise CommError where another account may read what ranks of this machine send each other.

    earlier: what was shared before MPI was started; None where the program has started it by itself.
    """
    by_chance = MPI.Get_library_version().startswith("Intel")  # its names nobody can foresee, and it removes them
    mapped = segments.shared()
    new = {key: path for key, path in mapped.items() if key not in (earlier or ())}
    segments.require_own(new, unknown=earlier is not None and not by_chance)


def constants(MPI: Any) -> Any:
    """The numbers that differ from one MPI to the next, as 64-bit words."""
    names = {
        "float32": MPI.FLOAT,
        "float64": MPI.DOUBLE,
        "int32": MPI.INT32_T,
        "int64": MPI.INT64_T,
        "uint8": MPI.UINT8_T,
    }
    info = {
        "any_tag": MPI.ANY_TAG,
        "error_truncate": MPI.ERR_TRUNCATE,
        "in_place": int(MPI.IN_PLACE),
        "request_null": MPI.REQUEST_NULL.handle,
        "byte": MPI.BYTE.handle,
        "sum": MPI.SUM.handle,
        "status_nbytes": MPI._sizeof(MPI.Status),
        "tag_offset": tag_offset(MPI),
        **{name: names[name].handle for name in DTYPES if name in names},
    }
    return {name: value & (1 << 64) - 1 for name, value in info.items()}


def tag_offset(MPI: Any) -> Any:
    """Where in an MPI_Status the tag lies, in bytes: every MPI has an order of its own, so a marked tag is searched."""
    status = MPI.Status()
    status.Set_tag(PROBE)
    raw = ctypes.string_at(MPI._addressof(status), MPI._sizeof(MPI.Status))
    return raw.index(PROBE.to_bytes(4, "little"))
