"""CUDA kernels in Python, thread by thread: what they compute, what they cost, and what is wrong with them."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import cuda

from hpdl_lab import lab
from hpdl_lab.checks.exercises import check, find
from hpdl_lab.features import Missing
from hpdl_lab.kernels import ladder, on_gpu
from hpdl_lab.kernels.threads import KernelError, Launch, by_warps, conflicts, counts, races
from tests.wording import raises


def vector(n):
    return (np.arange(n) % 13).astype(np.float32)


@pytest.mark.parametrize("kernel", ladder.RUNGS, ids=lambda kernel: kernel.__name__)
def test_every_rung_adds_any_number_of_elements(kernel):
    for blocks, n in ((1, 0), (1, 1), (2, 127), (3, 1000)):
        out = np.zeros(1, np.float32)
        Launch(kernel, blocks, ladder.THREADS, vector(n), out)
        assert out[0] == vector(n).sum(), (blocks, n)


def test_what_the_rungs_cost():
    """4 blocks of 4 warps add 4,096 elements: 7 halvings of 2 reads and 1 write, by 2, 1, 1 ... warps."""
    costs = {}
    for kernel in ladder.RUNGS:
        launch = Launch(kernel, 4, ladder.THREADS, vector(4096), np.zeros(1, np.float32))
        costs[kernel.__name__] = counts(launch)
    assert [row["atomics"] for row in costs.values()] == [4096, 4, 4, 4]
    assert {row["sectors"] for row in costs.values()} == {4096 * 4 // 32}
    assert [row["barriers"] for row in costs.values()] == [0, 8, 8, 2]
    assert costs["sequential"]["shared"] == 4 * (4 + 3 * (2 + 6) + 1) and costs["sequential"]["conflicts"] == 0
    turns = (3 * (1 + 1) + 3 * 3) + 3 * 3 * 3 + 3 * 1  # two warps in 2 turns, one in 4 at distance 2 to 16, 2 at 32
    assert costs["interleaved"]["conflicts"] == 4 * turns
    assert costs["gpu_sum"]["shared"] == 4 * (4 + 3 * 2 + 2) and costs["gpu_sum"]["conflicts"] == 0
    assert {row["races"] for row in costs.values()} == {0}


def test_numbas_own_simulator_agrees():
    script = (
        "import numpy as np; from hpdl_lab.kernels import ladder, on_gpu\n"
        "x, out = (np.arange(300) % 13).astype(np.float32), np.zeros(1, np.float32)\n"
        "on_gpu.compiled(ladder.sequential)[1, ladder.THREADS](x, out); print(out[0] == x.sum())"
    )
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, cwd="/tmp")
    assert done.stdout == "True\n", done.stderr


def test_a_kernel_that_goes_through_an_array_reads_its_elements_and_no_other():
    def add(x, out):
        out[0] = sum(x)

    out = np.zeros(1, np.float32)
    launch = Launch(add, 1, 1, vector(20), out)
    assert out[0] == vector(20).sum()
    assert [access.element for access in launch.log if access.kind == "read"] == list(range(20))


def test_one_pass_reads_and_writes_every_element_once():
    tensors = [np.full(100, rank + 1.0, np.float32) for rank in range(3)]
    launch = Launch(ladder.add_slices, 2, 32, tensors, 32, 64)
    for rank, x in enumerate(tensors):
        assert (x[32:96] == 6).all() and (x[:32] == rank + 1).all() and (x[96:] == rank + 1).all()
    assert [sum(a.kind == kind for a in launch.log) for kind in ("read", "write", "atomic")] == [192, 192, 0]
    assert counts(launch)["sectors"] == 2 * 3 * 64 * 4 // 32


def shuffles(out):
    t = cuda.threadIdx.x
    out[t, 0] = cuda.shfl_down_sync(0xFFFFFFFF, t, 30)
    out[t, 1] = cuda.shfl_up_sync(0xFFFFFFFF, t, 30)
    out[t, 2] = cuda.shfl_xor_sync(0xFFFFFFFF, t, 1)
    out[t, 3] = cuda.shfl_sync(0xFFFFFFFF, t, 5)
    out[t, 4] = cuda.syncthreads_count(t > 40) + 100 * cuda.syncthreads_or(t == 3) + 1000 * cuda.syncthreads_and(t)


def test_shuffles_stay_within_a_warp_and_keep_what_has_no_source():
    out = np.zeros((64, 5), np.int64)
    Launch(shuffles, 1, 64, out)
    t = np.arange(64)
    assert (out[:, 0] == np.where(t % 32 < 2, t + 30, t)).all()
    assert (out[:, 1] == np.where(t % 32 >= 30, t - 30, t)).all()
    assert (out[:, 2] == t ^ 1).all() and (out[:, 3] == t // 32 * 32 + 5).all()
    assert (out[:, 4] == 23 + 100).all()


def hidden_race(x, out):
    """Right whenever thread 0 comes last, and here as well: it waits for shuffles of its own warp."""
    sums = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    sums[t] = x[t]
    if t < 32:
        cuda.shfl_sync(0xFFFFFFFF, t, 0)
        out[t] = sums[t] + sums[t + 32]


def test_a_race_is_found_also_where_the_result_is_right():
    x, out = vector(64), np.zeros(32, np.float32)
    launch = Launch(hidden_race, 1, 64, x, out)
    assert (out == x[:32] + x[32:]).all()
    assert {(a.thread, b.thread) for a, b in races(launch.log)} == {(t + 32, t) for t in range(32)}


def columns(out):
    tile = cuda.shared.array((32, 32), np.float64)
    t = cuda.threadIdx.x
    tile[t, 0] = t
    tile[0, t] = t


def test_conflicts_of_a_column_and_of_elements_of_8_bytes():
    launch = Launch(columns, 1, 32, np.zeros(1))
    assert [conflicts(found) for found in by_warps(launch.log, shared=True)] == [2 * 15, 0]


def beyond(x, out):
    out[cuda.grid(1)] = x[cuda.grid(1)]


def slices(x, out):
    out[0] = x[:2]


def half_a_mask(x, out):
    out[0] = cuda.shfl_down_sync(0xFFFF, x[0], 16) if cuda.threadIdx.x < 16 else 0


def test_what_a_gpu_would_not_say():
    x, out = vector(40), np.zeros(64, np.float32)
    with raises(KernelError, "thread 8 of block 1 reads x[40]", "40 elements"):
        Launch(beyond, 2, 32, x, out)
    with raises(TypeError, "x[i]"):
        Launch(slices, 1, 1, x, out)
    with raises(KernelError, "lane 16", "0xffff"):
        Launch(half_a_mask, 1, 32, x, out)


def test_numba_is_imported_by_the_first_kernel_and_not_before():
    script = (
        "import sys; from hpdl_lab.checks.lessons import lesson_05_reduction as lesson; "
        "print(lesson.EXERCISES[0].id, 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "5.3 False\n", done.stderr


ROW = {"size": 256 << 20, "time_us": 100.0, "GBps": 2684.0}


@pytest.mark.parametrize(
    ("rows", "failed", "says"),
    [
        (lambda kernels: iter([ROW | {"wrong": 0}]), None, "256 MiB in 100 us, 2,684 GB/s"),
        (lambda kernels: iter([ROW | {"wrong": 1}]), "gpu", "the sum of 256 MiB"),
        (lambda kernels: iter([1 / 0]), "gpu", "ZeroDivisionError"),
    ],
)
def test_with_a_gpu_the_check_asks_it_too(rows, failed, says, monkeypatch):
    monkeypatch.setattr(on_gpu, "why_not", lambda: "")
    monkeypatch.setattr(on_gpu, "rows", rows)
    result = check(find("5.3"), ladder.gpu_sum)
    assert result.failed == failed and says in str(result)


def test_the_ladder_is_shown_with_counts_and_without_a_gpu_with_no_times(monkeypatch):
    monkeypatch.setattr(on_gpu, "why_not", lambda: "no NVIDIA driver")
    shown = str(lab.show("ladder", ladder.sequential))
    assert "not timed: no NVIDIA driver" in shown
    rows = {line.split()[0]: line.split()[1:] for line in shown.split("\n") if line.startswith("  ") and "," in line}
    assert rows["naive"][:2] == ["4,096", "512"]
    assert next(line for line in shown.split("\n") if "yours" in line).split()[1:] == ["4", "512", "8", "116", "0", "0"]
    with pytest.raises(Missing, match="no NVIDIA driver"):
        next(on_gpu.rows())


def test_a_numba_that_cannot_compile_says_so_and_blames_no_kernel(monkeypatch):
    """A GPU, and a numba without NVVM: that is the reason why nothing is timed, and no fault of the answer."""

    def without_nvvm(kernel):
        raise OSError("libNVVM cannot be found.\nSee the documentation")

    monkeypatch.setattr(on_gpu.gpu, "why_no_gpu", lambda: "")
    monkeypatch.setattr(on_gpu, "compiled", without_nvvm)
    on_gpu.why_not.cache_clear()
    assert "(OSError: libNVVM cannot be found.)" in on_gpu.why_not() and "hpdl_lab[gpu]" in on_gpu.why_not()
    result = check(find("5.3"), ladder.gpu_sum)
    on_gpu.why_not.cache_clear()
    assert result and "counted, not timed: numba cannot compile" in str(result)


def test_the_banks_of_a_kernel_are_drawn():
    drawn = lab.show(ladder.interleaved, prediction=2)
    assert "23 accesses" in drawn.text and "4 turns at worst (predicted: 2)" in drawn.text
    assert drawn.data["conflicts"] == 180
    with raises(ValueError, "naive"):
        lab.show(ladder.naive)
