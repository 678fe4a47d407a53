"""hpdl watch says what is wrong with each broken script of tests/watched, and accuses no right one."""

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hpdl_lab import cli, lab, watch
from hpdl_lab.watch import collectives
from hpdl_lab.watch.launch import command_of, moved
from hpdl_lab.watch.observer import Observer
from hpdl_lab.watch.strategy import nbytes
from hpdl_lab.watch.training import Saving
from tests.installed import TRAINERS
from tests.watched import CASES, FOLDER, text_of

PATIENCE = 6.0  # s: ranks of these scripts wait for milliseconds
QUICK = ("right_ddp_trainer.py", "broken_deadlock_eval.py", "broken_sum.py")  # for `make test`
WAITS = ("deadlock", "left", "mismatch")  # one mistake, seen from one rank or from the other
NAMES = {  # of findings, by what CASES calls the mistake
    "deadlock": WAITS,
    "left": WAITS,
    "caught": WAITS,
    "init": ("no process group",),
    "eval_shard": ("evaluation",),
    "loss_shard": ("loss",),
}
LAUNCH = {"torchrun": "--nproc-per-node", "mpi": "-n"}


def watched(case, tmp_path, monkeypatch):
    if case.needs:
        assert (TRAINERS / case.needs).exists(), "tests/installed.py installs it"
        monkeypatch.setenv("PYTHONPATH", str(TRAINERS))
    (tmp_path / case.file).write_text(text_of(case.file))
    words = [LAUNCH[case.launch], str(case.ranks)] if case.launch in LAUNCH else []
    # workers of a DataLoader leave a folder behind if their rank is ended, under plain torchrun as well
    with tempfile.TemporaryDirectory(prefix="hpdl-") as temporary, open(tmp_path / "out", "w") as output:
        monkeypatch.setenv("TMPDIR", temporary)
        run = watch.run_watched(
            [*words, str(tmp_path / case.file), *case.args], case.launch == "mpi", PATIENCE, output=output
        )
    report = watch.judge_run(run)
    text = f"{report}\n{(tmp_path / 'out').read_text()[-3000:]}"
    assert "failed (" not in "".join(report.unseen()), text  # a hook
    return report, text


def rows(found):
    for case in CASES:
        if (case.finds is None) != found:
            marks = () if case.file in QUICK else (pytest.mark.slow,)
            yield pytest.param(case, id=case.file.removesuffix(".py"), marks=marks)


@pytest.mark.parametrize("case", [*rows(False)])
def test_a_right_script_is_not_accused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report, text = watched(case, tmp_path, monkeypatch)
    assert not report.strict and report.run.exit_code == 0, text
    assert report.run.size == case.ranks, text
    assert any(rank.step_count for rank in report.run.ranks), text
    assert all(words in " ".join(text.split()) for words in case.words), text


@pytest.mark.parametrize("case", [*rows(True)])
def test_a_broken_script_gets_its_sentence(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report, text = watched(case, tmp_path, monkeypatch)
    names = NAMES.get(case.finds, (case.finds.replace("_", " "),))
    found = [finding for finding in report.findings if finding.name in names]
    assert found, text
    said = str(found[0])
    assert all(word.lower() in said.lower() for word in case.words), text
    if case.line:
        place = found[0].place
        assert case.line in said or place and case.line in place[2], text
    if found[0].kind != "hang":
        assert not {finding.name for finding in report.findings if finding.kind in ("hang", "wrong")} - {*names}, text
    assert report.strict == (found[0].kind in ("hang", "wrong")), text


def test_the_command_line_is_that_of_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    words = ["--nproc-per-node=2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1", str(script), "--epochs", "2"]
    given = ["--monitor-interval=5", *words]
    assert command_of(given) == ([sys.executable, "-m", "hpdl_lab.watch.torchrun", *given], str(script))
    assert command_of(words)[0][3:] == ["--monitor-interval=1", *words]
    module = ["--nproc-per-node", "2", "-m", "a.b", "-x"]
    assert command_of(module)[0][3:] == ["--monitor-interval=1", "--standalone", *module]
    assert command_of([str(script), "-v"])[0] == [sys.executable, "-u", str(script), "-v"]
    assert command_of(["torchrun", *given]) == command_of(given)
    typed = ["mpiexec", "-n", "2", "python", str(script), "-v"]
    assert command_of(typed) == (typed, str(script))
    with pytest.raises(FileNotFoundError, match=r"no\.py is not there"):
        command_of(["--nproc-per-node", "2", "no.py"])
    with pytest.raises(ValueError, match="which script"):
        command_of(["--nproc-per-node", "2"])


HANGS = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("{backend}")
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    open("is_there", "w").close()
    {does}
dist.broadcast(torch.ones(3), 0)
dist.destroy_process_group()
"""


def test_ctrl_c_brings_a_report_and_leaves_nothing_behind(tmp_path, eventually):
    """A rank that reads or sleeps may go on by itself: it is the user who ends that."""
    (tmp_path / "hangs.py").write_text(HANGS.format(backend="gloo", does="time.sleep(1000)"))
    words = ["--json", "report.json", "--patience", "2", "--nproc-per-node", "2", "hangs.py"]
    command = [sys.executable, "-m", "hpdl_lab", "watch", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    eventually((tmp_path / "is_there").exists)
    time.sleep(4)  # longer than its patience
    family = psutil.Process(process.pid).children(recursive=True)
    assert process.poll() is None and len(family) >= 3
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert "rank 0 waits in broadcast" in said.lower() and "time.sleep(1000)" in said, said
    assert json.loads((tmp_path / "report.json").read_text())["interrupted"]
    assert not any(member.is_running() for member in family)


@pytest.mark.parametrize("backend", ["gloo", "hpdl"])
def test_a_rank_that_calls_another_collective_is_named_with_both_lines(backend, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = HANGS.format(backend=backend, does="dist.barrier()")
    Path("hangs.py").write_text(text.replace("import torch,", "import hpdl_lab.torch_backend, torch,"))
    assert cli.main(["watch", "--patience", "4", "--strict", "--nproc-per-node", "2", "hangs.py"]) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "rank 0 calls broadcast" in said.lower(), said
    assert "hangs.py:9" in said and "rank 1 calls barrier (hangs.py:8" in said, said


WAITS = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
if comm.rank == 0:
    comm.recv(source=1)
comm.Barrier()
"""


def test_ranks_of_mpi4py_that_wait_for_each_other_are_ended_though_they_spin(tmp_path, capfd):
    (tmp_path / "waits.py").write_text(WAITS)
    assert cli.main(["watch", "--mpi", "--patience", "3", "-n", "2", str(tmp_path / "waits.py")]) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "Rank 0 waits in recv from rank 1 (waits.py:5" in said and "rank 1 waits in barrier (waits.py:6" in said, (
        said
    )


SRUN = """#!/bin/sh
# srun, as far as ranks see it: `srun -N 1 -n 2 COMMAND`
export SLURM_NTASKS=$4
shift 4
for rank in 0 1; do SLURM_PROCID=$rank "$@" & ranks="$ranks $!"; done
for rank in $ranks; do wait "$rank" || code=1; done
exit ${code:-0}
"""
STEP = """
import os, torch, torch.distributed as dist
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", f"file://{os.getcwd()}/meeting", rank=rank, world_size=size)
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
if rank == 1:
    raise KeyError(os.environ["SLURM_NTASKS"])
"""


def test_ranks_of_srun_are_observed(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("srun").write_text(SRUN)
    Path("srun").chmod(0o755)
    Path("step.py").write_text(STEP)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert cli.main(["watch", "srun", "-N", "1", "-n", "2", sys.executable, "step.py"]) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "step.py | 2 ranks | gloo" in said and "Rank 1 raised KeyError at step.py:8" in said, said


def test_exit_codes_are_those_of_the_script_but_for_strict(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("alone.py").write_text("import sys, torch\nsys.exit(7)\n")
    assert cli.main(["watch", "alone.py"]) == 7
    Path("fails.py").write_text("import torch\nraise KeyError('x')\n")
    assert cli.main(["watch", "fails.py"]) == 1
    assert "KeyError at fails.py:2" in capfd.readouterr().err


def test_a_sitecustomize_of_the_user_still_runs(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    (tmp_path / "script.py").write_text("print('script', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert cli.main(["watch", str(tmp_path / "script.py")]) == 0
    assert capfd.readouterr().out.split() == ["mine", "script"]


def test_what_nccl_records_is_read_as_what_gloo_does(monkeypatch):
    """Its flight recorder has states where gloo's says retired; no GPU is here to write one."""
    entry = {"profiling_name": "nccl:all_reduce", "process_group": ("0", "default_pg"), "is_p2p": False}
    entry |= {"collective_seq_id": 7, "p2p_seq_id": 0, "time_created_ns": 1, "retired": False}
    entry |= {
        "input_sizes": [[3, 2]],
        "output_sizes": [[3, 2]],
        "input_dtypes": ["BFloat16"],
        "output_dtypes": ["BFloat16"],
    }
    entry["frames"] = [
        {"filename": torch.__file__, "line": 1, "name": "all_reduce"},
        {"filename": __file__, "line": 1, "name": "step"},
    ]
    rows = [entry | {"state": state} for state in ("completed", "started")]
    dump = pickle.dumps({"entries": rows})
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", lambda *options: dump)
    first, second = collectives.recorded_by_torch()
    assert (first["op"], first["seq"], first["sizes"], first["dtypes"][0]) == ("all_reduce", 7, [[3, 2]], "bfloat16")
    assert (first["done"], second["done"]) == (True, False)
    assert Path(first["place"][0]).name == "test_watch.py"
    assert nbytes(first) == 12


def test_a_rank_of_cuda_that_waits_is_not_taken_for_one_that_computes():
    """Its main thread asks the GPU again and again."""
    old = {"place": ["a.py", 1, "x"], "top": ["f", 3], "cpu": 1.0, "time": 10.0, "call": None}
    new = old | {"cpu": 2.0, "time": 11.0}
    assert moved(old, new)
    assert not moved(old, new | {"spins": True})
    assert moved(old, new | {"spins": True, "place": ["a.py", 2, "y"]})


def test_a_hook_that_fails_is_noted_once_and_never_reaches_the_script(tmp_path):
    observer, calls = Observer(tmp_path), []
    observer.pid, observer.file = os.getpid(), open(tmp_path / "notes", "w", buffering=1)

    def fails(x):
        calls.append(x)
        raise ValueError("no")

    hook = observer.quietly(fails)
    hook(1)
    hook(2)
    assert calls == [1]
    assert "ValueError: no" in (tmp_path / "notes").read_text()


def test_the_verb_draws_a_step_and_is_false_for_a_wrong_script(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    script = FOLDER / "right_ddp_trainer.py"
    seen = lab.watch(script, ranks=2, patience=PATIENCE)
    assert seen and seen.exit_code == 0 and "data parallel by DDP" in seen.text
    assert [text.get_text() for text in seen.figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    Path("raises.py").write_text("import torch\nraise KeyError('x')\n")
    assert not lab.watch("raises.py", ranks=2)


def test_a_trace_is_what_lab_show_draws(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = ["--trace", "trace.json", "--json", "report.json", "--nproc-per-node", "2"]
    assert cli.main(["watch", *words, str(FOLDER / "right_ddp_trainer.py")]) == 0
    assert "of 2 ranks" in str(lab.show("trace.json"))
    report = json.loads(Path("report.json").read_text())
    assert report["ranks"] == 2 and report["steps"] > 0 and {"total", "forward", "exposed"} <= set(report["times"][0])


def test_recomputation_saves_what_it_does(monkeypatch):
    """Bytes kept for backward with torch.utils.checkpoint around each block: the block's input in place of the rest."""

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            block = functools.partial(torch.nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.0, batch_first=True)
            self.first, self.last = torch.nn.Linear(8, 16), block()
            self.blocks = torch.nn.ModuleList([block(), block()])

        def forward(self, x, recompute):
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            return self.last(x)

    model, x = Blocks(), torch.randn(3, 5, 8)
    whole, less = Saving(model), Saving(model)
    with monkeypatch.context() as patch, whole:
        patch.setattr(torch.nn.Module, "__call__", whole.around(torch.nn.Module.__call__))
        model(x, False)
    with less:
        model(x, True)
    assert [(kind, given) for kind, _, given in whole.blocks] == [("TransformerEncoderLayer", 3 * 5 * 16 * 4)] * 2
    assert whole.bytes - sum(kept - given for _, kept, given in whole.blocks) == less.bytes
