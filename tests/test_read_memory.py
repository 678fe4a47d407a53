"""Systems that let no process read another one's memory, from the start or later: exchanges are staged then."""

import json
import subprocess
import sys

import pytest

# Two threads play ranks. A seccomp filter refuses process_vm_readv to the thread that asks for it.
RANKS = """
import ctypes, json, platform, struct, sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from hpdl_lab.features import compiled_module

core = compiled_module()
NUMBER = {"x86_64": 310, "aarch64": 270}[platform.machine()]

def refuse():
    lines = [(0x20, 0, 0, 0), (0x15, 0, 1, NUMBER), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0

memory = core.SharedMemory.create(core.ShmGroup.nbytes_for(2))
core.ShmGroup.choose(2, 64)

def play(rank):
    if sys.argv[1] == "at the start" and rank == 1:
        refuse()
    group = core.ShmGroup(memory, rank, 2)
    assert group.all_reduce(np.ones(1 << 16, np.float32), 600, True)
    reads = [group.reads]
    if sys.argv[1] == "later" and rank == 1:
        refuse()
    right = []
    for n in 1 << 20, 1 << 17:
        out = np.zeros((2, n), np.float32)
        assert group.all_gather(np.full(n, rank + 1, np.float32), out, 600, True)
        right.append(bool((out == [[1], [2]]).all()))
        reads.append(group.reads)
    return {"reads": reads, "right": right}

with ThreadPoolExecutor(2) as threads:
    print(json.dumps(list(threads.map(play, range(2)))))
"""


@pytest.mark.parametrize(
    "when, reads",
    [("never", [True, True, True]), ("at the start", [False, False, False]), ("later", [True, False, False])],
)
def test_what_cannot_be_read_is_staged(when, reads):
    ran = subprocess.run([sys.executable, "-c", RANKS, when], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for rank in json.loads(ran.stdout):
        assert rank == {"reads": reads, "right": [True, True]}
