"""The ranks of training scripts under observation: python -m hpdl_lab.checks.scripts.observe

It imports torch once, and forks a process for each line [SCRIPT, FOLDER, RANKS] of its input, whose number it prints.
The script is left as it is, and runs as `__main__`. torch's own hooks (before forward, before a step of the optimizer)
and its flight recorder note what the rank does; each rank works in a folder of its own, so that two ranks that save the
same file are seen.

    FOLDER/torchrun.out what the launcher of the ranks printed
    FOLDER/0/           where rank 0 works
    FOLDER/0.out        what it printed
    FOLDER/0.jsonl      what it did, one event a line: began, weights, forward, output, step, raised, ended
    FOLDER/0.now        where it is, written anew four times a second
"""

import importlib
import json
import math
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ...features.freed_memory import uncollected

IMPORTED = (  # what a rank may need, and what takes it longest
    "hpdl_lab.data.text",
    "hpdl_lab.models.gpt",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
BEAT = 0.25  # s between two looks at where the script is
WIDTHS = {"Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Byte": 1, "Bool": 1, "Char": 1}  # bytes; 8 of all others


class Observer:
    """Notes the events of this rank in FOLDER/RANK.jsonl."""

    def __init__(self, script: Path, folder: Path, rank: int) -> None:
        self.script, self.now = script, folder / f"{rank}.now"
        self.file = open(folder / f"{rank}.jsonl", "w", buffering=1)
        self.depth, self.model, self.names = 0, None, {}

    def note(self, what: str, **event: Any) -> None:
        self.file.write(json.dumps({"what": what, "time_ns": time.time_ns(), **event}) + "\n")

    def before_forward(self, module: Any, args: tuple) -> None:
        """Of every module; the outermost one that reads tokens, (b, s) of integers, is the model."""
        import torch

        self.depth += 1
        x = args[0] if args else None
        if self.depth > 1 or not isinstance(x, torch.Tensor) or x.ndim != 2 or x.is_floating_point():
            return
        if self.model is not module:
            self.model = module
            named = {name.replace("module.", ""): p for name, p in module.named_parameters()}  # DDP's prefix
            self.names = {id(p): name for name, p in named.items()}
            self.note("weights", weights={name: described(p) for name, p in named.items()})
        rows = [zlib.crc32(row.numpy().tobytes()) for row in x.detach().cpu()]
        self.note("forward", rows=rows, training=torch.is_grad_enabled())

    def after_forward(self, module: Any, args: tuple, output: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and module is self.model:
            self.note("output")

    def before_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = {self.names[id(p)]: squares(p.grad) for p in params if id(p) in self.names and p.grad is not None}
        strange = sum(id(p) not in self.names for p in params)
        self.note("step", grads=grads, strange=strange, rate=optimizer.param_groups[0]["lr"], group=in_group())

    def place(self) -> tuple[int, str] | None:
        """(line, its text) of the script where the main thread is now; None if it has not come there."""
        frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
        return line_of(traceback.StackSummary.extract(traceback.walk_stack(frame)), self.script) if frame else None

    def watch(self) -> None:
        """In a thread of its own: say where the script is, so that nobody need ask a rank that waits."""
        while True:
            place, cpu = self.place(), time.process_time() + for_a_core()
            aside = self.now.with_suffix(".new")
            aside.write_text(json.dumps({"place": place, "cpu": cpu, "time": time.monotonic()}))
            aside.replace(self.now)
            time.sleep(BEAT)


def for_a_core() -> float:
    """s that the main thread of this process has waited for a core: on a busy machine it may get none for seconds."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def described(param: Any) -> dict[str, Any]:
    """What this rank holds of a parameter: numbers, of how many, their sum of squares; and the mesh it is cut on."""
    mesh = getattr(param, "device_mesh", None)
    of = {"mesh": mesh.mesh.tolist(), "axes": list(mesh.mesh_dim_names or ())} if mesh is not None else {}
    return {"held": local(param).numel(), "of": param.numel(), "squares": squares(param), **of}


def in_group() -> bool:
    """Whether there is a process group."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def local(x: Any) -> Any:
    return (x.to_local() if hasattr(x, "to_local") else x).detach()


def squares(x: Any) -> float:
    return float((local(x).double() ** 2).sum())


def line_of(stack: Any, script: Path) -> tuple[int, str] | None:
    """(line, its text) of the frame nearest to the error that is in the script, of a traceback's frames."""
    found = [(frame.lineno, (frame.line or "").strip()) for frame in stack if frame.filename == str(script)]
    return found[-1] if found else None


def collectives() -> list[list[Any]]:
    """[time in ns, what, bytes] of each collective of this rank, from torch's flight recorder.

    bytes: of the larger of what goes in and what comes out.
    """
    import torch

    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None:  # a torch without it, or without torch.distributed
        return []
    entries = json.loads(dump()).get("entries", [])
    rows = []
    for entry in sorted(entries, key=lambda entry: entry["record_id"]):
        name = entry["profiling_name"].rpartition(":")[2]
        sizes = [nbytes(entry[f"{side}_sizes"], entry[f"{side}_dtypes"]) for side in ("input", "output")]
        rows.append([entry["time_created_ns"], name, max(sizes)])
    return rows


def nbytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    return sum(math.prod(size) * WIDTHS.get(dtype, 8) for size, dtype in zip(sizes, dtypes, strict=False))


def serve() -> None:
    """Fork a process for each line of input, until there is no more."""
    with uncollected():
        for module in IMPORTED:
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: they are gone when they have ended
    for line in sys.stdin:
        if pid := os.fork():
            print(pid, flush=True)
        else:
            script, folder, ranks = json.loads(line)
            return main(Path(script), Path(folder), ranks)


def main(script: Path, folder: Path, ranks: int) -> None:
    """Run the script on one rank, here, or on several, by what torchrun is made of, in a session of its own.

    torchrun starts each rank as a new Python, which imports torch; these are forked from this process, which has.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with open(os.devnull) as nothing, open(folder / "torchrun.out", "wb") as out:
        for descriptor, file in enumerate((nothing, out, out)):
            os.dup2(file.fileno(), descriptor)
    if ranks == 1:
        sys.exit(run_rank(script, folder))
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),  # by itself it leaves a folder in TMPDIR
    )
    elastic_launch(config, run_rank)(script, folder)


def run_rank(script: Path, folder: Path) -> int:
    """Run the script as this rank, under observation; returns the exit status."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once, also in the midst of a collective
    rank = int(os.environ.get("RANK", "0"))
    (folder / str(rank)).mkdir(exist_ok=True)
    os.chdir(folder / str(rank))
    with open(folder / f"{rank}.out", "wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    observer = Observer(script, folder, rank)
    observer.note("began", pid=os.getpid())
    hooks: Any = torch.nn.modules.module
    hooks.register_module_forward_pre_hook(observer.before_forward)
    hooks.register_module_forward_hook(observer.after_forward, always_call=True)
    register_optimizer_step_pre_hook(observer.before_step)
    threading.Thread(target=observer.watch, daemon=True).start()
    sys.argv, sys.path[0] = [str(script)], str(script.parent)
    status = observed(observer, lambda: runpy.run_path(str(script), run_name="__main__"))
    sys.stdout.flush()
    if status and "RANK" in os.environ:
        sys.exit(status)  # elastic_launch ends the other ranks
    return status


def observed(observer: Observer, run: Callable[[], Any]) -> int:
    """Run the script to its end; what it raises is noted with the line of the script. Returns the exit status."""
    try:
        run()
    except SystemExit as stop:
        if stop.code:
            raise
    except BaseException as error:
        trace = error.__traceback__
        place = line_of(traceback.extract_tb(trace), observer.script)
        if isinstance(error, SyntaxError) and error.filename == str(observer.script):
            place = (error.lineno or 0, (error.text or "").strip())
        observer.note("raised", kind=type(error).__name__, text=str(error), place=place)
        while trace and trace.tb_frame.f_code.co_filename != str(observer.script):
            trace = trace.tb_next  # from the script on
        traceback.print_exception(error.with_traceback(trace or error.__traceback__))
        return 1
    observer.note("ended", group=in_group(), collectives=collectives())
    return 0


if __name__ == "__main__":
    serve()
