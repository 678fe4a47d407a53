"""csrc/cuda without a GPU: it compiles without a warning, and its kernels compute rightly on the CPU's threads."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpdl_lab.comm.device.comm import MOST_TENSORS
from hpdl_lab.features import gpu
from tests.wording import raises

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "csrc" / "cuda"
SOURCES = sorted(CUDA.glob("*.cu"))
NVCC = shutil.which("nvcc", path="/usr/local/cuda/bin") or shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc on PATH nor in /usr/local/cuda/bin")


def include():
    """The folder of CUDA's headers, as this nvcc finds it."""
    dry = subprocess.run([NVCC, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True)
    return re.search(r'-I"?([^"\s]*include)', dry.stderr)[1]


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_it_compiles_for_sm_80_and_sm_90_and_warnings_are_errors(source, tmp_path):
    strict = ["-Xcompiler", "-Wall,-Wextra,-Werror,-fPIC", "-Werror", "all-warnings", "-std=c++17", "-O3"]
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in (80, 90)]
    command = [NVCC, *strict, *targets, "-c", source, "-o", tmp_path / "object.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_there_is_something_to_compile():
    assert [path.name for path in SOURCES] == ["one_pass.cu", "reduction.cu"]


@pytest.mark.slow
@needs_nvcc
def test_the_kernels_are_right_on_the_cpu(tmp_path):
    """Coroutines for threads: see tests/fakes/cuda_on_cpu.h for what that shows and what it does not."""
    flags = [
        "-std=c++17",
        "-O1",
        "-U_FORTIFY_SOURCE",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        f"-I{CUDA}",
        "-isystem",
    ]
    program = tmp_path / "kernels"
    source = ROOT / "tests" / "fakes" / "kernels_on_cpu.cpp"
    subprocess.run(["c++", *flags, include(), source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"it ended with signal {-done.returncode}: beyond the end of memory?"
    assert int(done.stdout.split()[0]) > 300


@needs_nvcc
def test_this_build_has_the_module():
    cuda = gpu.cuda_module()
    assert [name for name, _ in cuda.rungs()][0] == "interleaved" and len(cuda.rungs()) == 8
    assert cuda.partials(0, 1000) == 4 and cuda.partials(4, 513) == 2
    with raises(ValueError, "0", "7", "9"):
        cuda.partials(9, 1)
    with raises(ValueError, "one_pass", "1", "16 tensors", "17"):
        cuda.one_pass([0] * 17, 0, 1, 0, 0)


@needs_nvcc
@pytest.mark.skipif(not gpu.no_driver(), reason="there is a GPU driver: tests/gpu asks it")
def test_without_a_driver_every_call_says_so():
    cuda = gpu.cuda_module()
    for call in (cuda.device_count, lambda: cuda.DeviceMemory(0, 256), lambda: cuda.PeerMemory(0, bytes(64))):
        with pytest.raises(RuntimeError, match=r"cuda\w+ failed: cudaError\w+: \w+"):
            call()


def test_numbers_that_stand_in_two_languages_agree():
    header = (CUDA / "one_pass.h").read_text()
    assert int(re.search(r"kMaxTensors = (\d+)", header)[1]) == MOST_TENSORS
