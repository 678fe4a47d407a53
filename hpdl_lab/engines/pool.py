"""The engines of one start, seen from a notebook: connected to, given functions to run, asked how they ended."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

import cloudpickle

from ..comm.base import OnRow, PerRank, Results, Row
from ..comm.errors import RankFailed
from ..plain_source import plain_signature
from ..system import until
from ..trace import INSTALLED, PACKAGE, Event
from ..units import require_number
from . import client, errors, session_dir
from .errors import EngineError, RunStopped, without_traceback
from .messages import Function, Info, Packed, RankTask, TaskOutcome, pack
from .run import Run
from .script import Script

if TYPE_CHECKING:
    from ..comm.inject import Injection

Arguments: TypeAlias = Sequence[object]
Keywords: TypeAlias = dict[str, object]


def _package(fn: Function, args: Arguments, keywords: Keywords, size: int) -> tuple[Packed, list[Packed | None]]:
    """Pickle a call for `size` ranks.

    Returns: (task, own): (fn, args, keywords), the same for all, and for each rank its own arguments ({position or
             name: value}, from `PerRank`) or None, all of them Packed.
    Raises:  TypeError naming what cannot travel; ValueError if a PerRank has not one item per rank.
    """
    if not callable(fn):
        raise TypeError(f"lab.run needs a function fn(comm, ...), got a {type(fn).__name__}: {repr(fn)[:80]}")
    _check_signature(fn, args, keywords)
    own: dict[int | str, PerRank] = {}
    for key, value in [*enumerate(args), *keywords.items()]:
        if isinstance(value, PerRank):
            if len(value) != size:
                raise ValueError(f"{_argument(key)} is a PerRank of {len(value)} items for {size} ranks")
            own[key] = value
    shared = [None if position in own else value for position, value in enumerate(args)]
    named = {name: None if name in own else value for name, value in keywords.items()}
    _carry_script(fn)
    try:
        task = pack((fn, shared, named))
    except Exception as error:
        raise TypeError(_culprit(fn, shared, named, error)) from None
    return task, [_dump({i: v[rank] for i, v in own.items()}) if own else None for rank in range(size)]


def _argument(key: int | str) -> str:
    """Return how a sentence calls the argument at position `key`, or of that name."""
    return f"argument {key if isinstance(key, str) else key + 1}"


def _check_signature(fn: Function, args: Arguments, keywords: Keywords) -> None:
    """Raise TypeError unless `fn(comm, *args, **keywords)` is a call that `fn` can take."""
    if isinstance(fn, Script) and keywords:
        raise TypeError(
            f'{fn.__name__} is a file, which takes no {", ".join(keywords)}=: lab.run("{fn.__name__}", "--x", 1)'
        )
    try:
        signature = plain_signature(fn)
    except (TypeError, ValueError):
        return  # a compiled function tells nothing; it will say so itself
    try:
        signature.bind(None, *args, **keywords)
    except TypeError as error:
        raise TypeError(_misfit(fn, signature, len(args), keywords, error)) from None


def _misfit(fn: Function, signature: inspect.Signature, count: int, keywords: Keywords, error: TypeError) -> str:
    """Say why `fn` cannot be called with comm, `count` arguments and `keywords`. error: Python's own."""
    called = f"{function_name(fn)}{signature}"
    parameters = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if missing := [p.name for p in parameters[count + 1 :] if p.default is p.empty and p.name not in keywords]:
        handed_over = ", ".join(p.name for p in parameters[1:])
        return f"{called} needs {' and '.join(missing)} as well: lab.run(fn, {handed_over})"
    if count + 1 > len(parameters):
        takes = "1 argument" if len(parameters) == 1 else f"{len(parameters)} arguments"
        given = f"{count + 1}: comm and {count} more" if count else "comm"
        return f"{called} takes {takes}, and lab.run gives it {given}"
    return f"{called} cannot be called so: {error}"


def function_name(fn: Function) -> str:
    """Return how a sentence calls `fn`."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return "your lambda" if name == "<lambda>" else name


def _dump(value: object) -> Packed:
    """Pack `value`, to be sent; a TypeError says what cannot travel."""
    try:
        return pack(value)
    except Exception as error:
        raise TypeError(f"a PerRank argument cannot travel to the engines: {_reason(error)}") from None


def _carry_script(fn: Function) -> None:
    """Let the attendee's own modules travel by value, as the notebook does: engines would keep an older version."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    path = os.path.realpath(getattr(module, "__file__", None) or "")
    if module is None or module.__name__ == "__main__" or not path.endswith(".py"):
        return
    if not path.startswith((os.path.realpath(PACKAGE) + os.sep, *INSTALLED)):
        cloudpickle.register_pickle_by_value(module)


def _culprit(fn: Function, args: Arguments, keywords: Keywords, error: BaseException) -> str:
    """Return the sentence that names what cannot be pickled: an argument, or a variable that the function uses."""
    for key, value in [*enumerate(args), *keywords.items()]:
        if (why := _trouble(value)) is not None:
            return f"{_argument(key)}, a {type(value).__name__}, cannot travel to the engines: {why}"
    name = function_name(fn)
    for variable, value in _variables(fn).items():
        if value is not fn and (why := _trouble(value)) is not None:
            if type(value).__module__.startswith(("IPython.", "ipykernel.")):
                return f"{name} cannot travel to the engines: it uses {variable}, which only the notebook has"
            return (
                f"{name} cannot travel to the engines: it uses the variable {variable}, "
                f"a {type(value).__name__} ({why}). Make {variable} inside the function instead"
            )
    return f"{name} cannot travel to the engines: {_reason(error)}"


def _trouble(value: object) -> str | None:
    """Return why `value` cannot be pickled; None if it can."""
    try:
        pack(value)
    except Exception as error:
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    """Return the message of a pickling error, without its nesting."""
    return (
        str(error).splitlines()[0]
        if isinstance(error, pickle.PicklingError | TypeError | RecursionError)
        else repr(error)
    )


def _variables(fn: Function) -> dict[str, object]:
    """Return the globals and closure variables that `fn` names: {name: value}."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return {}
    found: dict[str, object] = {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return found


def _own_paths() -> list[str]:
    """Return the entries of sys.path that the engines may lack: the folders of the attendee's modules."""
    here = os.getcwd()
    return [
        os.path.abspath(p) if p else here for p in sys.path if not os.path.realpath(p or here).startswith(INSTALLED)
    ]


ENDING_SECONDS = 3.0  # for the exit statuses of engines that have ended


class EnginePool:
    """The `n` engines of the session at `path`, for one run at a time, also when several notebooks use them."""

    def __init__(self, path: str, n: int) -> None:
        self.path = path
        self.n = n
        self.engines = client.connect(path, n)
        self._lock = client.RunLock(path)
        self._busy = threading.Lock()  # a button of the notebook runs in a thread of its own
        self._under_way: Run | None = None

    @property
    def infos(self) -> list[Info]:
        """Descriptions of the engines, by themselves."""
        return [engine.info for engine in self.engines]

    def join_px(self) -> None:
        """Have the engines register with ipyparallel's controller, between two runs; once is enough."""
        for engine in self.engines:
            with suppress(OSError):  # it has died: px.connect says so
                engine.send(client.PX, self.infos[0]["master"])

    def gone(self) -> list[int]:
        """Return the ranks of the engines that have closed their connection."""
        return [engine.rank for engine in self.engines if engine.is_closed()]

    def close(self) -> None:
        """Disconnect from all engines. A task of ours that still runs is interrupted by its engine."""
        for engine in self.engines:
            engine.close()
        self._lock.close()

    def run(
        self,
        fn: Function,
        args: Arguments,
        keywords: Keywords,
        ranks: int | Iterable[int] | None,
        deadline: float,
        on_row: OnRow | None,
        inject: Injection | None = None,
        limit: float | None = None,
    ) -> Run:
        """Call `fn(comm, *args, **keywords)` on `ranks` (None: all); return the finished Run, whatever became of it."""
        chosen = self._chosen(ranks)
        if limit is not None:
            limit = require_number("limit", limit, above=0)
        if inject is not None:
            inject.check(len(chosen))
        task, own = _package(fn, args, keywords, len(chosen))
        content: RankTask = {
            "run": 0,
            "ranks": None if ranks is None else chosen,
            "deadline": require_number("deadline", deadline, above=0),
            "inject": inject or None,
            "sys_path": _own_paths(),
            "task": task,
            "own": None,
            "master": self.infos[chosen[0]]["master"],
        }
        with self.between_runs() as number:
            engines = [self.engines[rank] for rank in chosen]
            for engine in engines:
                engine.refresh_clock()
            run = self._under_way = Run(number, engines, on_row, limit)
            try:
                run.execute([{**content, "run": number, "own": each} for each in own])
            except BaseException:  # a test's alarm, say: closing the connections ends the tasks
                self._reconnect(chosen)
                raise
            self._reconnect([chosen[i] for i in run.unsent])
        return run

    @contextmanager
    def between_runs(self) -> Generator[int]:
        """Keep out runs, and the first use of %px, of all notebooks meanwhile; yield the number of this one.

        Raises: EngineError if one of this notebook is under way.
        """
        if not self._busy.acquire(blocking=False):
            raise EngineError(
                "a run is under way in this notebook: start the next one when it has ended, not in on_row"
            )
        try:
            with self._lock.held() as number:
                yield number
        finally:
            self._under_way = None
            self._busy.release()

    def interrupt(self) -> bool:
        """End the run that is under way in another thread, as the stop button does; return True if there is one."""
        run = self._under_way
        if run is not None:
            run.stopped = True
        return run is not None

    def _reconnect(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.engines[rank].close()
            with suppress(OSError):  # it has died: the next run says so
                self.engines[rank] = client.EngineConnection(self.path, rank)

    def _chosen(self, ranks: int | Iterable[int] | None) -> list[int]:
        if ranks is None:
            return list(range(self.n))
        chosen = [ranks] if isinstance(ranks, int) else list(ranks)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(self.n)):
            raise ValueError(f"ranks={ranks!r}: choose one or more different ranks from 0 to {self.n - 1}")
        return chosen

    def error_of(self, run: Run) -> BaseException | None:
        """Return the exception that says what became of `run`; None when every rank returned."""
        if run.raised is not None:
            return run.raised
        if run.stopped:
            return RunStopped(
                f"stopped after {run.seconds:.3g} s, when", errors.annotate(run.picture, run.outcomes, run.dead)
            )
        if run.dead:
            waits = errors.annotate(run.picture, run.outcomes, run.dead)
            text = errors.dead_text(self.endings(sorted(run.engines[i].rank for i in run.dead)))
            text += ". Call lab.restart() for new engines; your variables stay"
            return without_traceback(RankFailed(text, waits))
        if run.late:
            waits = errors.annotate(run.picture, run.outcomes)
            return without_traceback(errors.too_late(waits, run.limit))
        return errors.error_of(run.outcomes, run.picture)

    def endings(self, ranks: Sequence[int], unknown: str = "has gone") -> dict[int, str]:
        """Return {rank: how its process ended}, as soon as it is known: exit statuses are written a moment later.

        Nothing is known of engines that another notebook has replaced. unknown: what to say of all if none is known; ""
        leaves them out.
        """
        found: dict[int, str] = {}

        def look() -> bool:
            for rank in ranks:
                with suppress(OSError), open(session_dir.exit_file(self.path, rank)) as file:
                    found[rank] = errors.ending(file.read())
            return len(found) == len(ranks) or any(self.engines[rank].is_replaced() for rank in ranks)

        until(look, ENDING_SECONDS, every=0.005)
        return found or (dict.fromkeys(ranks, unknown) if unknown else {})


def warn(text: str) -> None:
    """Print `text` for the attendee, on stderr."""
    print(text, file=sys.stderr, flush=True)


def results(outcomes: dict[int, TaskOutcome], rows: list[Row]) -> Results:
    """Return the Results, in rank order, of a run in which every rank returned; `outcomes` is {rank: outcome}."""
    ordered = [outcomes[rank] for rank in sorted(outcomes)]
    values = [o["value"].value() for o in ordered]
    events = [Event._make(e) for o in ordered for e in o["events"]]
    seconds = (max(o["t1_ns"] for o in ordered) - min(o["t0_ns"] for o in ordered)) / 1e9
    return Results(values, events, rows, seconds)
