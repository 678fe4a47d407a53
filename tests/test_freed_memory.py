"""What a step frees, the next one finds: no page comes from the system twice."""

import platform
import subprocess
import sys

import pytest

ROUNDS, BLOCKS, BYTES = 5, 6, 4 << 20
PAGES = ROUNDS * BLOCKS * BYTES // 4096
PROBE = f"""
import resource, sys
from hpdl_lab.features.freed_memory import keep_freed_memory

def round():
    return [b"x" * {BYTES} for _ in range({BLOCKS})]

if "keep" in sys.argv:
    keep_freed_memory()
round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*options):
    return int(subprocess.run([sys.executable, "-c", PROBE, *options], capture_output=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told what to keep")
def test_pages_are_kept_from_round_to_round():
    assert page_faults() > PAGES / 2, "the C library keeps them by itself now: hpdl_lab/features/freed_memory.py can go"
    assert page_faults("keep") < PAGES / 20
