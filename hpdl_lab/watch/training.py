"""The hooks of an observed process into torch: models, backward, optimizers, data loaders, process groups, output."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sized
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import collectives
from .observer import LAST, NAMED, OBSERVERS, Observer, is_child, sampled
from .places import Place, caller_is_authors, place_of, writer_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from .records import ParameterShard

T = TypeVar("T")

EVERY_STEP = 256  # first steps that are noted one by one; later ones as sums, once in a while
MOST_PRINTS, MOST_INDICES = 400, 400_000  # of a rank
MOST_SPANS = 2000  # of a step
MOST_SUBSET = 50_000  # indices of a Subset that are noted
PART = 1 << 16  # first numbers of a gradient that its projection takes
ROW = 256  # numbers of an example that its fingerprint takes
PREFIXES = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
NUMBER = re.compile(r"\d")
BATCHNORM = nn.modules.batchnorm._BatchNorm


def install(folder: Path) -> _Training:
    """Hook into torch, which has just been imported, and observe at once, but not in children of multiprocessing."""
    training = _Training(Observer(folder))
    training.hook()
    OBSERVERS.append(training.observer)
    if not is_child():
        training.observer.begin()
    return training


class _Clock:
    """The ns of a phase of a step, and how many of them the main thread neither ran nor waited for a core."""

    def __init__(self) -> None:
        self.begun, self.idle = time.perf_counter_ns(), _idle_ns()

    def spent(self) -> tuple[int, int]:
        """Return (ns, ns without work) since the beginning."""
        wall = time.perf_counter_ns() - self.begun
        return wall, max(0, wall - (_idle_ns() - self.idle))


def _idle_ns() -> int:
    """Return the ns that this thread has run or waited for a core."""
    with open(f"/proc/self/task/{threading.get_native_id()}/schedstat") as file:
        return time.thread_time_ns() + int(file.read().split()[1])


UNHASHED = {torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool}
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Training:
    """The hooks that follow the training in this process."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        observer.dump, observer.ending, observer.waited = collectives.entries, [self.last], self.waited
        self.roots: dict[int, weakref.ref[nn.Module]] = {}
        self.names: dict[int, str] = {}  # of parameters, by id
        self.stepping = self.backwards = 0
        self.main = threading.main_thread().ident
        self.optimizers = self.steps = self.forwards = self.evaluated = self.printed = self.indices = 0
        self.ns: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # of this step: "item FILE:LINE", ...
        self.sums: Counter[str] = Counter()  # of steps that are not noted one by one
        self.spans: list[tuple[str, int, int]] = []
        self.examples = self.read = 0  # of this step; of the last forward
        self.loss: float | None = None
        self.began = self.written = time.time_ns()
        self.clock: _Clock | None = None
        self.saving: Saving | None = None
        self.saved = -1  # bytes kept for backward in the second step
        self.blocks: list[tuple[str, int, int]] = []  # of each block then: class, bytes kept for backward, of its input
        self.looked_at = 0  # the step before which the weights were noted last
        self.epochs = -1  # the number of the last pass over a data loader
        self.epoch_of: dict[int, int] = {}  # of the pass under way, by the id of what draws its indices

    def hook(self) -> None:
        quietly = self.observer.quietly
        self.hook_models()
        made: Callable[..., None] = Optimizer.__init__

        @wraps(made)
        def counted_init(optimizer: Optimizer, /, *args: object, **named: object) -> None:
            self.optimizers += 1
            made(optimizer, *args, **named)

        _put(Optimizer, "__init__", counted_init)
        register_optimizer_step_pre_hook(quietly(self.before_step))
        register_optimizer_step_post_hook(quietly(self.after_step))
        self.hook_calls()
        self.hook_loaders()
        self.hook_output()
        self.hook_children()

    # -- models -----------------------------------------------------------------------------------------------------

    def hook_models(self) -> None:
        """Note what happens around calls of models: of the outermost modules with parameters.

        Within such a call nn.Module is as torch made it. A hook on a model would be pickled with it, and torch.compile
        would look into it.
        """
        call: Callable[..., object] = nn.Module.__call__
        before, after = self.observer.quietly(self.before), self.observer.quietly(self.after)

        @wraps(call)
        def watched_call(module: nn.Module, /, *args: object, **named: object) -> object:
            if torch.compiler.is_compiling() or threading.get_ident() != self.main or not self.is_model(module):
                return call(module, *args, **named)
            before(module, args, named)
            nn.Module.__call__ = self.saving.around(call) if self.saving else call
            try:
                return call(module, *args, **named)
            finally:
                nn.Module.__call__ = watched_call
                after(module)

        nn.Module.__call__ = watched_call

    def is_model(self, module: nn.Module) -> bool:
        known = self.roots.get(id(module))
        return known is not None and known() is module or next(module.parameters(), None) is not None

    def described(self, module: nn.Module) -> None:
        """Note a model."""
        named = {PREFIXES.sub(r"\1", name).replace("..", ".").lstrip("."): p for name, p in module.named_parameters()}
        self.names |= {id(p): name for name, p in named.items()}
        kinds = Counter(type(part).__name__ for part in module.modules())
        ddps = [ddp for ddp in (ref() for ref in DDPS) if ddp is not None]
        self.observer.note(
            "model",
            root=len(self.roots) - 1,
            kind=type(module).__name__,
            inside=any(ddp.module is module for ddp in ddps),
            ddps=len(ddps),
            place=place_of(sys._getframe()),
            parameters={name: _described(p) for name, p in named.items()},
            batchnorm=[type(m).__name__ for m in module.modules() if isinstance(m, BATCHNORM)],
            dropout=any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules()),
            kinds=dict(kinds),
            step=self.steps,
        )

    def live_roots(self) -> list[nn.Module]:
        return [root for root in (ref() for ref in self.roots.values()) if root is not None]

    def before(self, module: nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
        """Note the forward of a model before it begins."""
        if _is_capturing():
            return
        known = self.roots.get(id(module))
        if known is None or known() is not module:
            self.roots[id(module)] = weakref.ref(module)
            self.described(module)
        self.in_eval = not torch.is_grad_enabled()
        self.clock = _Clock()
        x = _first_tensor((args, named))
        count = len(x) if x is not None and x.ndim else 0
        training = torch.is_grad_enabled() and module.training
        if training:
            self.read, self.forwards = count, self.forwards + 1
        looked_at = sampled(self.forwards, 64) if training else sampled(self.evaluated, 64)
        rows = _fingerprints(x) if x is not None and count and looked_at else []
        if looked_at:
            more = {"rng": zlib.crc32(torch.get_rng_state().numpy().tobytes())} if self.steps < 3 else {}
            self.observer.note(
                "forward",
                root=[*self.roots].index(id(module)) if id(module) in self.roots else -1,
                step=self.steps,
                count=count,
                rows=rows,
                training=training,
                place=place_of(sys._getframe()),
                **more,
            )
        elif not training:
            self.counts["evaluated"] += count
        if not training:
            self.evaluated += 1
        if self.steps == 1 and training and self.saved < 0 and not _is_compiled(module):
            self.saving = Saving(module)
            self.saving.__enter__()

    def after(self, module: nn.Module) -> None:
        """Note its end, also if it raised."""
        if self.saving is not None:
            self.saving.__exit__(None, None, None)
            self.saved, self.blocks, self.saving = self.saving.bytes, self.saving.blocks, None
        if NAMED in os.environ:
            self.observer.note("output")
        self.phase("evaluation" if self.in_eval else "forward")

    def phase(self, name: str) -> None:
        """Add the time since the beginning of this phase."""
        if self.clock is None:
            return
        wall, blocked = self.clock.spent()
        if name != "evaluation":
            self.ns[name] += wall - blocked
            self.ns["exposed"] += blocked
        self.span(name, wall)
        self.clock = None

    def waited(self, ns: int) -> None:
        """Add the time of a wait, unless it is part of a phase, whose idle time counts."""
        if self.clock is None:
            self.spent("exposed", ns)

    def spent(self, name: str, ns: int) -> None:
        """Add time of a phase that has just ended."""
        if self.observer.active:
            self.ns[name] += ns
            self.span(name, ns)

    def span(self, name: str, ns: int) -> None:
        if self.steps < EVERY_STEP and len(self.spans) < MOST_SPANS:
            now = time.time_ns()
            self.spans.append((name, now - ns, now))

    # -- steps ------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: tuple[object, ...], named: dict[str, object]) -> None:
        self.stepping += 1
        if self.stepping > 1:  # an optimizer inside of one, as in ZeroRedundancyOptimizer
            return
        self.step_begins()
        if self.steps in (0, 1) or NAMED in os.environ:
            self.describe_optimizer(optimizer)
        self.clock = _Clock()

    def step_begins(self) -> None:
        if _is_capturing():
            return
        if sampled(self.steps):
            self.look_at_weights()
        if self.steps < 3:
            self.observer.note("reduced", step=self.steps, projections=self.projections())

    def look_at_weights(self) -> None:
        self.looked_at = self.steps
        names = sorted(self.names[key] for key in _late() if key in self.names)
        self.observer.note("weights", step=self.steps, late=names, **self.fingerprints())

    def describe_optimizer(self, optimizer: Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        more: dict[str, dict[str, float]] = {}
        if NAMED in os.environ:
            grads = {self.names[id(p)]: p.grad for p in params if id(p) in self.names and p.grad is not None}
            more["grads"] = {name: squares(grad) for name, grad in grads.items()}
        inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's
        state = [x for values in inner.state.values() for x in values.values() if isinstance(x, Tensor)]
        self.observer.note(
            "optimizer",
            step=self.steps,
            kind=type(optimizer).__name__,
            rate=float(optimizer.param_groups[0].get("lr", 0.0)),
            strange=sum(id(p) not in self.names for p in params),
            stale=sum(id(p) not in self.names and p.grad is None for p in params),
            parameters=len(params),
            group=dist.is_available() and dist.is_initialized(),
            place=place_of(sys._getframe()),
            bytes={"gradients": sum(map(_held_bytes, (p.grad for p in params))), "state": sum(map(_held_bytes, state))},
            saved=self.saved,
            blocks=self.blocks,
            **more,
        )

    def after_step(self, optimizer: Optimizer, args: tuple[object, ...], named: dict[str, object]) -> None:
        self.stepping = max(0, self.stepping - 1)
        if self.stepping:
            return
        self.phase("optimizer")
        self.step_ends()

    def step_ends(self) -> None:
        now = time.time_ns()
        self.ns["observer"], self.observer.spent_ns = self.observer.spent_ns, 0
        step = {"ns": dict(self.ns), "at": self.began, "till": now, "examples": self.examples, "loss": self.loss}
        if self.steps < EVERY_STEP:
            self.observer.note("step", step=self.steps, **step, counts=dict(self.counts), spans=self.spans)
        else:
            self.sums.update({**self.ns, "examples": self.examples, "steps": 1, "all": now - self.began})
            self.sums.update(self.counts)
            if now - self.written > 1e9:
                self.write_sums(now)
        self.observer.live |= {"step": self.steps + 1, "ns": dict(self.ns), "step_ns": now - self.began}
        self.observer.live |= {"examples": self.observer.live.get("examples", 0) + self.examples}
        self.steps, self.began, self.examples, self.backwards = self.steps + 1, now, 0, 0
        self.ns.clear()
        self.counts.clear()
        self.spans.clear()

    def write_sums(self, now: int) -> None:
        self.written = now
        self.observer.note("steps", upto=self.steps, sums=dict(self.sums))
        self.sums.clear()

    def backward_begins(self, tensors: object, weighted: bool) -> None:
        if _is_capturing():
            return
        if self.backwards and not self.optimizers:  # a loop that changes its parameters by itself
            self.step_begins()
            self.step_ends()
        x = tensors[0] if isinstance(tensors, list | tuple) else tensors
        self.loss = float(x.detach()) if isinstance(x, Tensor) and x.numel() == 1 and x.device.type == "cpu" else None
        if self.backwards == 0 and self.steps < 3:
            self.observer.note("loss", step=self.steps, **_kind_of_loss(x, weighted), place=place_of(sys._getframe()))
        self.examples += self.read  # of the last forward before it: others may be for something else
        self.clock = _Clock()

    def backward_ends(self) -> None:
        if _is_capturing():
            return
        self.phase("backward")
        self.backwards += 1
        if self.steps < 3:
            self.observer.note("local", step=self.steps, backwards=self.backwards, projections=self.projections())

    def projections(self) -> dict[str, float]:
        """Return, for each gradient, its product with fixed numbers: linear, so that sums over ranks can be checked."""
        found = {}
        for module in self.live_roots():
            for p in module.parameters():
                if p.grad is not None and id(p) in self.names and not hasattr(p, "placements") and not p.grad.is_sparse:
                    part = p.grad.detach().reshape(-1)[:PART].double()
                    found[self.names[id(p)]] = float(part @ _fixed_numbers(len(part)).to(part.device))
        return found

    def fingerprints(self) -> dict[str, dict[str, int]]:
        """Return a number for the bits of each parameter and buffer that this rank holds."""
        hashes: dict[str, int] = {}
        buffers, ignored = {}, _ignored_by_ddp()
        for module in self.live_roots():
            for p in module.parameters():
                if id(p) in self.names and id(p) not in ignored:
                    hashes.setdefault(self.names[id(p)], _bits(p))  # of a copy, such as an average, not
            for name, x in module.named_buffers():
                if x.numel():
                    buffers[name] = _bits(x)
        return {"hashes": hashes, "buffers": buffers}

    # -- calls ------------------------------------------------------------------------------------------------------

    def hook_calls(self) -> None:
        """Put our own functions around backward, waits, Tensor.item, torch.save and the process group."""
        begins, ends = self.observer.quietly(self.backward_begins), self.observer.quietly(self.backward_ends)

        def around_backward(function: Callable[..., T]) -> Callable[..., T]:
            @wraps(function)
            def backward(tensors: object, *args: object, **named: object) -> T:
                given = [*args[:1], named.get("grad_tensors")]
                begins(tensors, any(x is not None for x in given))
                result = function(tensors, *args, **named)
                ends()
                return result

            return backward

        _replace(torch.autograd.backward, around_backward(torch.autograd.backward))
        item = Tensor.item

        def counted_item(x: Tensor, /) -> float:
            if not torch.compiler.is_compiling() and (place := caller_is_authors()):
                self.counts[f"item {place[0]}:{place[1]}"] += 1
            return item(x)

        _put(Tensor, "item", counted_item)
        writes = self.observer.quietly(self.writes)

        saves: Callable[..., None] = torch.save

        @wraps(saves)
        def save(*args: object, **named: object) -> None:
            writes(args[1] if len(args) > 1 else named.get("f"), False)
            saves(*args, **named)

        _replace(saves, save)
        if dist.is_available():
            self.hook_distributed()

    def hook_distributed(self) -> None:
        work, meets, leaves = dist.Work, self.observer.quietly(self.meets), self.observer.quietly(self.leaves)
        wait: Callable[..., bool] = work.wait
        met, begin = self.observer.quietly(self.met), self.observer.begin

        def timed_wait(work: dist.Work, /, *args: object, **named: object) -> bool:
            begun = time.perf_counter_ns()
            try:
                return wait(work, *args, **named)
            finally:
                self.waited(time.perf_counter_ns() - begun)

        _put(work, "wait", timed_wait)

        def around_init(function: Callable[..., T]) -> Callable[..., T]:
            @wraps(function)
            def init_process_group(*args: object, **named: object) -> T:
                begin()
                meets(place_of(sys._getframe(1)), named.get("rank", -1))
                result = function(*args, **named)
                met()
                return result

            return init_process_group

        def around_destroy(function: Callable[..., T]) -> Callable[..., T]:
            @wraps(function)
            def destroy_process_group(*args: object, **named: object) -> T:
                leaves()
                return function(*args, **named)

            return destroy_process_group

        _replace(dist.init_process_group, around_init(dist.init_process_group))
        _replace(dist.destroy_process_group, around_destroy(dist.destroy_process_group))
        for function in (dist.send, dist.recv, dist.isend, dist.irecv):
            _replace(function, collectives.message_recorded(function))

        init: Callable[..., None] = nn.parallel.DistributedDataParallel.__init__

        @wraps(init)
        def ddp_init(module: nn.parallel.DistributedDataParallel, /, *args: object, **named: object) -> None:
            init(module, *args, **named)
            DDPS.append(weakref.ref(module))

        _put(nn.parallel.DistributedDataParallel, "__init__", ddp_init)

    def hook_children(self) -> None:
        """Note what ends a rank that multiprocessing has started: there no sys.excepthook is called."""

        def around(function: Callable[..., T]) -> Callable[..., T]:
            @wraps(function)
            def noted(*args: object) -> T:
                try:
                    return function(*args)
                except BaseException as error:
                    if not isinstance(error, SystemExit) or error.code:
                        self.observer.raised(error)
                    raise

            return noted

        spawn = sys.modules["torch.multiprocessing.spawn"]  # in torch.multiprocessing it is the function
        wrap = spawn._wrap

        @wraps(wrap)
        def noted_wrap(function: Callable[..., object], *args: object) -> None:
            wrap(around(function), *args)

        _put(spawn, "_wrap", noted_wrap)
        BaseProcess.run = around(BaseProcess.run)

    def meets(self, place: Place | None, rank: int) -> None:
        """Note the place at which it asks for a process group, and its rank there, -1 if the environment has it."""
        self.observer.note("meets", place=place, rank=rank if rank >= 0 else int(os.environ.get("RANK", -1)))

    def met(self) -> None:
        """Note the rank of this process."""
        backend = dist.get_backend()
        if backend == "undefined":  # chosen by torch: "cpu:gloo,cuda:nccl" if there is a GPU
            backend = str(dist.get_backend_config())
            backend = backend.removeprefix("cpu:") if "," not in backend else backend
        self.observer.live |= {"rank": dist.get_rank(), "spins": "nccl" in backend and torch.cuda.is_available()}
        self.observer.note("met", rank=dist.get_rank(), size=dist.get_world_size(), backend=backend)

    def leaves(self) -> None:
        """Note the weights and the groups while they are there."""
        if self.steps > self.looked_at:
            self.look_at_weights()
        if dist.is_available() and dist.is_initialized():
            world = dist.distributed_c10d._world
            groups = {
                world.pg_names[pg]: sorted(ranks) for pg, ranks in world.pg_group_ranks.items() if pg in world.pg_names
            }
            self.observer.note("groups", groups=groups)
            time.sleep(LAST)  # for gloo's threads, which may want Python's lock while torch waits for them

    # -- examples ---------------------------------------------------------------------------------------------------

    def hook_loaders(self) -> None:
        """Note the time that iterators of data loaders take, and the indices that they read."""
        kind = torch.utils.data.dataloader._BaseDataLoaderIter
        following, indexing, iterating = kind.__next__, kind._next_index, torch.utils.data.DataLoader.__iter__
        indexed, begins = self.observer.quietly(self.indexed), self.observer.quietly(self.epoch_begins)

        @wraps(following)
        def timed_next(iterator: _BaseDataLoaderIter, /) -> object:
            begun = time.perf_counter_ns()
            try:
                return following(iterator)
            finally:
                self.spent("data", time.perf_counter_ns() - begun)

        @wraps(indexing)
        def noted_index(iterator: _BaseDataLoaderIter, /) -> object:
            index = indexing(iterator)
            indexed(iterator, index)
            return index

        @wraps(iterating)
        def noted_iter(loader: DataLoader[object], /) -> _BaseDataLoaderIter:
            begins(loader)
            return iterating(loader)

        _put(kind, "__next__", timed_next)
        _put(kind, "_next_index", noted_index)
        _put(torch.utils.data.DataLoader, "__iter__", noted_iter)

    def epoch_begins(self, loader: DataLoader[object]) -> None:
        sampler = loader.sampler
        self.epochs += 1
        self.epoch_of[id(loader._index_sampler)] = self.epochs
        try:
            length = len(cast(Sized, loader.dataset))
        except TypeError:
            length = -1
        self.observer.note(
            "epoch",
            number=self.epochs,
            length=length,
            batch=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            drop_last=loader.drop_last,
            workers=loader.num_workers,
            sampler=type(sampler).__name__,
            shuffle=getattr(sampler, "shuffle", None),
            epoch=getattr(sampler, "epoch", None),
            replicas=getattr(sampler, "num_replicas", None),
            replica=getattr(sampler, "rank", None),
            step=self.steps,
            training=torch.is_grad_enabled(),
            rows=_rows_of(loader.dataset),
            place=place_of(sys._getframe()),
        )

    def indexed(self, iterator: _BaseDataLoaderIter, index: object) -> None:
        if isinstance(index, list) and index and isinstance(index[0], int) and self.indices < MOST_INDICES:
            self.indices += len(index)
            self.observer.note("indices", number=self.epoch_of[id(iterator._index_sampler)], index=index)

    # -- output -----------------------------------------------------------------------------------------------------

    def hook_output(self) -> None:
        """Note what is printed, and the files that are opened for writing."""
        prints = self.observer.quietly(self.prints)
        for stream in (sys.stdout, sys.stderr):
            if stream is None:
                continue
            write = stream.write

            def noted_write(text: str, write: Callable[[str], int] = write) -> int:
                if isinstance(text, str) and NUMBER.search(text):
                    prints(text)
                return write(text)

            _put(stream, "write", noted_write)
        writes = self.observer.quietly(self.writes)

        def audited(event: str, args: tuple[object, ...]) -> None:
            if event == "open" and isinstance(args[1], str) and args[1][0] in "wxa":
                writes(args[0], args[1][0] == "a")

        sys.addaudithook(audited)

    def prints(self, text: str) -> None:
        if self.printed < MOST_PRINTS and "Warning: " not in text:
            self.printed += 1
            self.observer.note("prints", text=text[:300], step=self.steps, place=place_of(sys._getframe()))

    def writes(self, path: object, append: bool) -> None:
        if isinstance(path, str | os.PathLike):
            name = os.path.abspath(os.fspath(path))
            place = writer_of(sys._getframe())
            if place and not str(name).startswith(("/dev/", "/proc/", str(self.observer.folder))):
                self.observer.note("writes", path=str(name), append=append, step=self.steps, place=place)

    def last(self) -> None:
        """Note the rest at the end."""
        if self.sums:
            self.write_sums(time.time_ns())
        if not self.observer.failed and not torch.cuda.is_initialized():  # a GPU may wait for ranks that never come
            self.leaves()
        left = dist.is_available() and dist.is_initialized()
        self.observer.note("left", group=left, steps=self.steps, threads=torch.get_num_threads())


DDPS: list[weakref.ref[nn.parallel.DistributedDataParallel]] = []


def _late() -> set[int]:
    """Return the ids of parameters that need a gradient now, and did not when DDP was made."""
    found = set()
    for ddp in filter(None, (ref() for ref in DDPS)):
        managed = {id(p) for p in ddp._module_parameters}
        found |= {id(p) for p in ddp.module.parameters() if p.requires_grad and id(p) not in managed}
    return found


class Saving(torch.autograd.graph.saved_tensors_hooks):
    """A count of the bytes of tensors in its block that a backward of the model needs, without its parameters.

    Each of the model's repeated blocks is counted for itself as well: torch.utils.checkpoint would keep its input only.
    """

    def __init__(self, model: nn.Module) -> None:
        self.bytes, self.seen = 0, set[int]()
        self.blocks: list[tuple[str, int, int]] = []
        self.repeated = set[int]()
        for part in model.modules():
            blocks = [*part] if isinstance(part, nn.ModuleList | nn.Sequential) else []
            kinds = Counter(type(block) for block in blocks if next(block.children(), None) is not None)
            self.repeated |= {id(block) for block in blocks if kinds[type(block)] > 1}
        self.inside = False
        super().__init__(self.pack, lambda x: x)

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage() if type(x) is Tensor else None
        if storage is not None and storage.data_ptr() not in self.seen and not isinstance(x, nn.Parameter):
            self.seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return x

    def around(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return nn.Module.__call__, which counts what the outermost repeated blocks keep."""

        def counted_call(module: nn.Module, /, *args: object, **named: object) -> T:
            if self.inside or id(module) not in self.repeated:
                return call(module, *args, **named)
            self.inside, before = True, self.bytes
            try:
                return call(module, *args, **named)
            finally:
                self.inside = False
                given = sum(_held_bytes(x) for x in (*args, *named.values()) if isinstance(x, Tensor))
                self.blocks.append((type(module).__name__, self.bytes - before, given))

        return counted_call


def _put(owner: object, name: str, wrapper: Callable[..., object]) -> None:
    """Replace the method `name` of a class or an object, or a function of a module."""
    setattr(owner, name, wrapper)


def _replace(original: Callable[..., object], wrapper: Callable[..., object]) -> None:
    """Put `wrapper` wherever torch's modules have `original` under its name."""
    name = original.__name__
    for module in [module for key, module in sys.modules.items() if key.partition(".")[0] == "torch"]:
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapper)


def _first_tensor(values: object) -> Tensor | None:
    """Return the first tensor with examples in arguments, as they are nested."""
    if isinstance(values, Tensor):
        return values if values.ndim else None
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return None
    return next((x for x in map(_first_tensor, values) if x is not None), None)


def _fingerprints(x: Tensor) -> list[int]:
    """Return, for each example of a batch, a number that tells it apart from others."""
    flat = x.detach().reshape(len(x), -1)
    part = flat[:, :: max(1, flat.shape[1] // ROW)] if NAMED not in os.environ else flat
    part = part.float() if part.dtype == torch.bfloat16 else part
    return [zlib.crc32(row.tobytes()) for row in part.cpu().contiguous().numpy()]


def _is_capturing() -> bool:
    """Return True if a CUDA graph is being captured, which nothing may disturb."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_compiled(module: nn.Module) -> bool:
    """Return True if a part of a model is compiled."""
    parts = module.modules()
    return any(type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None for part in parts)


def _ignored_by_ddp() -> set[int]:
    """Return the ids of parameters that DDP leaves alone."""
    found = set()
    for ddp in filter(None, (ref() for ref in DDPS)):
        found |= {id(p) for name, p in ddp.module.named_parameters() if name in ddp.parameters_to_ignore}
    return found


def _rows_of(dataset: object) -> list[int] | None:
    """Return [first, step, rows] of a dataset in the whole one: of a Subset or a slice of a tensor; None if unknown.

    If the indices of a Subset have no constant step: [-1, rows, *indices].
    """
    if isinstance(dataset, torch.utils.data.Subset):
        if len(dataset.indices) > MOST_SUBSET:
            return None
        indices, whole = [int(index) for index in dataset.indices], len(cast(Sized, dataset.dataset))
        step = indices[1] - indices[0] if len(indices) > 1 else 1
        if step > 0 and indices == [*range(indices[0], indices[-1] + 1, step)]:
            return [indices[0], step, whole]
        return [-1, whole, *indices]
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple) and tensors and tensors[0].ndim:
        x = tensors[0]
        row = x[0].numel() if len(x) else 0
        whole = x.untyped_storage().nbytes() // x.element_size()
        if row and x[0].is_contiguous() and x.stride(0) % row == 0 and whole > x.numel():
            return [x.storage_offset() // row, x.stride(0) // row, whole // row]
    return None


def _fixed_numbers(n: int) -> Tensor:
    """Return n numbers, always the same."""
    global FIXED
    if FIXED is None:
        FIXED = torch.sin(torch.arange(PART, dtype=torch.float64) ** 2 + 1)
    return FIXED[:n]


FIXED: Tensor | None = None


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return (x.to_local() if hasattr(x, "to_local") else x).detach()


def _held_bytes(x: Tensor | None) -> int:
    return 0 if x is None else local(x).numel() * x.element_size()


def _bits(x: Tensor) -> int:
    held = local(x).contiguous()
    if held.is_complex():
        held = torch.view_as_real(held)
    elif held.dtype in UNHASHED:
        held = held.view(WORDS[held.element_size()])
    return int(torch.hash_tensor(held).view(torch.int64)) if held.numel() else 0


def squares(x: Tensor) -> float:
    return float((local(x).double() ** 2).sum())


def _described(p: Tensor) -> ParameterShard:
    """Return this rank's part of a parameter: numbers, of how many; and the mesh that it is cut on."""
    found: ParameterShard = {
        "held": local(p).numel(),
        "of": p.numel(),
        "bytes": _held_bytes(p),
        "trained": p.requires_grad,
    }
    if NAMED in os.environ:
        found["squares"] = squares(p)
    mesh = getattr(p, "device_mesh", None)
    if mesh is not None:
        found["mesh"], found["axes"] = mesh.mesh.tolist(), list(mesh.mesh_dim_names or ())
        found["placements"] = [str(placement) for placement in cast("DTensor", p).placements]
    return found


def _kind_of_loss(x: object, weighted: bool) -> dict[str, object]:
    """Return {"mean": the last operation of a loss is one, "by": the number that it divides by, or None}."""
    node = getattr(x, "grad_fn", None)
    if node is None:
        return {"mean": False, "by": None}
    name = type(node).__name__
    by = getattr(node, "_saved_other", None) if name.startswith("Div") else None
    by = float(by) if isinstance(by, int | float) or isinstance(by, Tensor) and by.numel() == 1 else None
    mean = name.startswith("Mean") or getattr(node, "_saved_reduction", None) == 1
    return {"mean": mean and not weighted, "by": by}
