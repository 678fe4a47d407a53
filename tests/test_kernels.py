"""The reduction ladder's bookkeeping, over kernels that NumPy stands in for."""

import ctypes
import re

import pytest
import torch

from hpdl_lab import cli
from hpdl_lab.comm.buffers import DTYPES
from hpdl_lab.features import Missing, gpu
from hpdl_lab.kernels import reduction


class FakeCuda:
    """Two kernels: one is right, one forgets the last element."""

    def rungs(self):
        return [("right", "all of it"), ("wrong", "all but the last")]

    def memory_bandwidth(self, device):
        return 100e9

    def partials(self, rung, n):
        return 1

    def time_reduce(self, rung, dtype, x, n, partial, out, stream, repeats):
        memory = ctypes.c_char * (n * torch.empty(0, dtype=getattr(torch, DTYPES[dtype])).element_size())
        values = torch.frombuffer(memory.from_address(x), dtype=getattr(torch, DTYPES[dtype]))
        ctypes.c_float.from_address(out).value = float(values[: n - rung].double().sum())
        return [10.0] * repeats


class OnCpu(reduction.Ladder):
    def on_gpu(self, host):
        return host


def test_rows_are_right_first_and_timed_second():
    rows = list(OnCpu(cuda=FakeCuda()).rows([4096], ["float32", "bfloat16"]))
    assert [(r["type"], r["rung"], r["name"], r["wrong"]) for r in rows] == [
        ("float32", 1, "right", 0),
        ("float32", 2, "wrong", 1),
        ("bfloat16", 1, "right", 0),
        ("bfloat16", 2, "wrong", 1),
    ]
    first = rows[0]
    assert first["count"] == 1024 and rows[2]["count"] == 2048
    assert first["time_us"] == 10.0
    assert first["GBps"] == pytest.approx(0.4096) and first["of_bandwidth"] == pytest.approx(0.004096)


def test_the_numbers_add_exactly_in_any_order():
    x = reduction.random_whole_numbers(100_000, "bfloat16")
    assert torch.equal(x, reduction.random_whole_numbers(100_000, "bfloat16")) and x.abs().max() == reduction.LARGEST
    assert x.double().abs().sum() < 2**24
    assert x.float().sum() == x.double().sum() != 0


def test_without_a_gpu_the_command_says_why(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: "no NVIDIA driver: /dev/nvidia0 does not exist")
    assert cli.main(["bench", "reduction"]) == 1
    assert capsys.readouterr().err == "hpdl: no NVIDIA driver: /dev/nvidia0 does not exist\n"
    with pytest.raises(Missing):
        reduction.Ladder()


def test_the_command_prints_the_ladder_and_writes_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(reduction, "Ladder", lambda: OnCpu(cuda=FakeCuda()))
    monkeypatch.setattr(OnCpu, "about", lambda self: {"gpu": "H100", "date": "2026-11-21"})
    table = tmp_path / "table.md"
    assert cli.main(["bench", "reduction", "--sizes", "1MiB", "--markdown", str(table)]) == 1  # one kernel is wrong
    assert "H100" in capsys.readouterr().out
    assert re.search(r"1,048,576 \|.* float32 \| +1 \| right +\| +10.0 \|", table.read_text())
