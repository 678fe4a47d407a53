"""NCCL's functions, looked up in the library when the program runs. The only file that knows nccl.h.

ctypes releases the GIL during every call. Communicators do not block: what takes time answers IN_PROGRESS, and
`ncclCommGetAsyncError` says how it goes on.
"""

import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p

from ..features import Missing, nccl
from .errors import CommError

SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
SUM = 0  # ncclRedOp_t
DTYPE = {"uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
ID_NBYTES = 128
UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
ONE_GPU = ("Duplicate GPU", "using the same GPU")  # how NCCL says, before and since 2.30, that ranks share a GPU


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * ID_NBYTES)]


class Config(ctypes.Structure):
    """ncclConfig_t as it was in 2.18: `size` and `version` tell every later NCCL that it ends here."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
    ]

    @classmethod
    def of(cls, most_blocks=UNDEFINED):
        """A communicator that does not block. most_blocks: thread blocks of a kernel, where ranks share a GPU."""
        least = UNDEFINED if most_blocks == UNDEFINED else 1
        return cls(
            ctypes.sizeof(cls), 0xCAFEBEEF, nccl.OLDEST, 0, UNDEFINED, least, most_blocks, None, UNDEFINED
        )  # fmt: skip


_MOVE = [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]  # buffer, count, dtype, peer, comm, stream
PROTOTYPES = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(UniqueId)],
    "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclCommAbort": [c_void_p],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": _MOVE,
    "ncclRecv": _MOVE,
    "ncclBroadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, c_void_p],
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclReduceScatter": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclAllGather": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p],
}


class Nccl:
    """The library at `path`, called by `rank`, whose number stands in the texts of errors."""

    def __init__(self, path, rank):
        self.path, self.rank = path, rank
        self._library = ctypes.CDLL(path)
        self._functions = {}
        for name, arguments in PROTOTYPES.items():
            self._functions[name] = self._find(name, arguments, c_int)
        self._error_string = self._find("ncclGetErrorString", [c_int], c_char_p)
        self._last_error = self._find("ncclGetLastError", [c_void_p], c_char_p)
        number = c_int()
        self.call("ncclGetVersion", byref(number))
        self.version = number.value

    def _find(self, name, arguments, result):
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise Missing(f"{self.path} has no {name}: NCCL {nccl.text_of(nccl.OLDEST)} or newer is needed") from None
        function.argtypes, function.restype = arguments, result
        return function

    def call(self, name, *arguments):
        """Call a function. Returns SUCCESS or IN_PROGRESS; raises CommError with NCCL's own words."""
        return self.check(self._functions[name](*arguments), name)

    def check(self, code, name):
        """`code`, which `name` returned, where it is no error."""
        if code in (SUCCESS, IN_PROGRESS):
            return code
        raise CommError(f"{name} failed on rank {self.rank}: {self.text_of(code)}")

    def text_of(self, code):
        """What NCCL says about a code, with the remedy where it is known."""
        text, last = self._error_string(code).decode(), (self._last_error(None) or b"").decode().strip()
        text += f" ({last})" if last else ""
        if any(words in last for words in ONE_GPU):
            text += f". {one_gpu(self.version)}"
        return text

    def unique_id(self):
        """The 128 bytes by which ranks find each other. Opens a socket: made by one rank, told to the others."""
        made = UniqueId()
        self.call("ncclGetUniqueId", byref(made))
        return ctypes.string_at(byref(made), ID_NBYTES)

    def start(self, unique_id, rank, size, config):
        """Begin to make a communicator, of `size` ranks; returns its handle, a c_void_p."""
        handle = c_void_p()
        id_ = UniqueId.from_buffer_copy(unique_id)
        self.call("ncclCommInitRankConfig", byref(handle), size, id_, rank, byref(config))
        return handle

    def state(self, handle, doing):
        """SUCCESS, or IN_PROGRESS; CommError with what has failed since `doing`, on this rank or another."""
        code = c_int()
        self.call("ncclCommGetAsyncError", handle, byref(code))
        return self.check(code.value, doing)


def one_gpu(version):
    """What to do where ranks share a GPU and NCCL refuses."""
    if version < nccl.SHARES_A_GPU:
        return (
            f"NCCL {nccl.text_of(version)} runs one rank on each GPU, {nccl.text_of(nccl.SHARES_A_GPU)} and newer "
            "several: pip install --upgrade nvidia-nccl-cu12 (or -cu13), or start one rank for each GPU"
        )
    return nccl.ONE_RANK_EACH
