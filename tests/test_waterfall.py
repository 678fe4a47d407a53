"""The bars of a step: exact on spans that are known, and close to what a step measures of itself."""

import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader

from hpdl_lab import lab
from hpdl_lab.comm.torch.group import process_group
from hpdl_lab.performance import profile_step
from hpdl_lab.performance.gpt_step import REPAIRS, gpt_step
from hpdl_lab.performance.profile_step import (
    BARS,
    EXPOSED,
    HOST,
    IMBALANCE,
    INPUT,
    MATMUL,
    MEMORY,
    OPTIMIZER,
    RECORDED,
    SKIPPED,
    STEPS,
    TIMED,
    WARMED,
    Recorder,
    Span,
    analyze,
    mean_bars,
    report_text,
)
from hpdl_lab.performance.two_profilers import ddp_step_seen_twice

MS = 10**6  # ns
MAIN = [
    Span(0, 100 * MS, "ProfilerStep#1"),
    Span(0, 10 * MS, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
    Span(2 * MS, 4 * MS, "aten::stack"),  # within the loader
    Span(12 * MS, 42 * MS, "aten::addmm"),
    Span(13 * MS, 15 * MS, "aten::copy_"),
    Span(45 * MS, 55 * MS, "aten::gelu"),
    Span(80 * MS, 90 * MS, "Optimizer.step#AdamW.step"),
    Span(82 * MS, 84 * MS, "aten::mm"),
]
LOOP = [Span(50 * MS, 75 * MS, "gloo:all_reduce"), Span(90 * MS, 91 * MS, "gloo:all_reduce")]


def ms(bars):
    return {name: round(1e3 * seconds, 6) for name, seconds in bars.items() if seconds}


def test_every_moment_of_a_step_belongs_to_one_bar():
    found = analyze(MAIN, [], LOOP, (0, 0))
    wanted = {INPUT: 10, HOST: 2 + 3 + 5 + 9, MEMORY: 2 + 10, MATMUL: 28, EXPOSED: 20 + 1, OPTIMIZER: 10}
    assert ms(found.bars) == wanted and sum(found.bars.values()) == pytest.approx(0.1)


def test_the_cost_of_recording_is_taken_away_and_a_small_operation_is_dispatch():
    found = analyze([Span(0, 10 * MS, "ProfilerStep#1"), Span(2 * MS, 3 * MS, "aten::mul")], [], [], (MS / 10, MS / 2))
    assert ms(found.bars) == {HOST: 9 - 0.1 + 0.4, MEMORY: 1 - 0.1 - 0.4}


def test_a_gpu_that_computes_hides_the_host_and_its_messages():
    device = [Span(20 * MS, 60 * MS, "ampere_sgemm_128x64"), Span(55 * MS, 70 * MS, "elementwise_kernel")]
    nccl = [Span(50 * MS, 80 * MS, "ncclDevKernel_AllReduce")]
    found = analyze(MAIN, device, nccl, (0, 0))
    assert ms(found.bars) == {INPUT: 10, HOST: 10 + 20, MATMUL: 40, MEMORY: 10, EXPOSED: 10}


def test_waiting_for_a_rank_that_has_not_begun_is_imbalance():
    early, late = (analyze(MAIN, [], [Span(begin * MS, 78 * MS, "gloo:all_reduce")], (0, 0)) for begin in (55, 65))
    assert (ms(early.bars)[EXPOSED], ms(late.bars)[EXPOSED]) == (23, 13)
    bars = ms(mean_bars([early, late]))
    assert (bars[IMBALANCE], bars[EXPOSED]) == ((10 + 0) / 2, (13 + 13) / 2)


def test_nobody_waits_for_a_communication_that_goes_on_after_the_next_operation_has_begun():
    found = analyze(MAIN, [], [Span(42 * MS, 79 * MS, "gloo:all_reduce")], (0, 0))
    assert ms(found.bars)[EXPOSED] == 79 - 55  # not the 3 ms between two operations during which it is under way


def test_torch_profiler_and_the_laboratory_see_the_same_exposed_communication(cluster):
    for by_torch, by_lab, step, _ in cluster.run(ddp_step_seen_twice, ranks=range(2)):
        assert 0 < by_lab < step and abs(by_torch - by_lab) < 0.05 * step


def test_the_bars_are_what_the_recorded_steps_measure_of_themselves():
    """Parts of 5 to 30 ms, each timed by the step itself: no bar is off by more than a tenth of these steps."""
    times = []  # of each step: {bar: seconds}
    a = torch.randn(600, 600)
    items = iter(DataLoader(Slow(), batch_size=None))

    def timed(bar, part):
        began = time.perf_counter()
        part()
        times[-1][bar] = time.perf_counter() - began

    def compute():
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass

    def step():
        times.append(dict.fromkeys(BARS, 0.0))
        timed(INPUT, lambda: next(items))
        timed(HOST, compute)
        timed(MATMUL, lambda: [a @ a for _ in range(5)])
        timed(MEMORY, lambda: [a.exp() for _ in range(30)])

    recorder = Recorder()
    while not (step(), recorder.boundary())[1]:
        pass
    for round_, found in enumerate(recorder.rounds):
        end = SKIPPED + (round_ + 1) * (TIMED + WARMED + RECORDED)
        wanted = {bar: sum(step[bar] for step in times[end - RECORDED : end]) / RECORDED for bar in BARS}
        whole = sum(wanted.values())
        assert found.bars == pytest.approx(wanted, abs=0.1 * whole)
    result = recorder.result()
    assert result.flops == 5 * 2 * 600**3
    assert f"{100 * result.bars[MATMUL] / result.step_s:.1f}%" in report_text([result])


class Slow:
    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        time.sleep(0.01)
        return i


def take_steps(comm, *repaired):
    with process_group(comm):
        step = gpt_step(comm, *repaired)
        return [step() for _ in range(4)]


def test_repairs_change_no_loss(cluster):
    slow, *repaired = (
        torch.tensor(cluster.run(take_steps, *names, ranks=range(2))).mean(0)
        for names in ((), REPAIRS[:3], REPAIRS[3:5], REPAIRS)
    )
    assert slow[-1] < slow[0] - 0.1
    for losses in repaired:
        torch.testing.assert_close(losses, slow, rtol=1e-4, atol=0)


def test_a_repair_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="no repair is called 'inputs': there are input, dispatch"):
        gpt_step(None, "inputs")


def test_a_script_without_enough_steps_is_told_how_many_are_needed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    done = subprocess.run([sys.executable, profile_step.__file__, script], capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "trained" and f"fewer than {STEPS + 1} steps" in done.stdout, done


def test_a_waterfall_needs_engines():
    with pytest.raises(ValueError, match=r"no engines run: lab.start\(2\)"):
        lab.waterfall()
