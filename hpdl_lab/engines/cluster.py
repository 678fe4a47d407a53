"""The engine cluster as one object: start it or attach to it, run functions on it, restart it, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, cast

from ..comm.base import OnRow, Results
from ..comm.errors import name_ranks
from ..units import counted
from . import errors, launch, layout, pool, px, remote, session_dir, supervisor_client
from .errors import EngineError, EngineMute
from .launch import START_SECONDS, Launching
from .messages import Function, Info
from .pool import EnginePool, warn
from .remote import ipython
from .script import Script

if TYPE_CHECKING:
    from ipyparallel import Client

    from ..comm.inject import Injection


class Cluster:
    """MPI engines that this kernel, perhaps with others, uses. `with Cluster.start(4) as ...` stops what it started."""

    def __init__(
        self,
        path: str,
        supervisor: supervisor_client.SupervisorConnection,
        reasons: Sequence[str] = (),
        attached: bool = False,
    ) -> None:
        self.path = path
        self.attached = attached  # another kernel had started it
        self.reasons = list(reasons)  # why the session directory is not in the best place
        self.layout: layout.Layout | None = None  # None while another kernel starts the engines
        self._supervisor: supervisor_client.SupervisorConnection | None = supervisor
        self._pool: EnginePool | None = None
        self._unwell: EngineError | None = None  # found by `start`, not raised yet
        self._parallel: Client | None = None
        self._shown_in: int | None = None  # number of the cell that has shown the table

    @property
    def laid_out(self) -> layout.Layout:
        """The layout. Raises EngineError while another kernel starts the engines."""
        if self.layout is None:
            raise EngineError("another notebook is starting the engines: try again when it has done so")
        return self.layout

    @property
    def n(self) -> int:
        """Number of engines."""
        return self.laid_out.n

    @property
    def where(self) -> str:
        """Their place: one of layout.PLACES."""
        return self.laid_out.where

    @property
    def link(self) -> str:
        """The speed of the links between emulated hosts, such as "1gbit"; "" for engines on one host."""
        return self.laid_out.link

    @property
    def device(self) -> str:
        """Their device: "cpu" or "cuda"."""
        return self.laid_out.device

    @property
    def infos(self) -> list[Info]:
        """Descriptions of the engines by themselves, in rank order: dicts with rank, pid, host, cores, gpu."""
        return self._pool.infos if self._pool else []

    @property
    def supervisor(self) -> supervisor_client.SupervisorConnection:
        """The connection to the supervisor. Raises EngineError if this kernel has left the cluster."""
        if self._supervisor is None:
            raise EngineError("the engine cluster has ended: call lab.start()")
        return self._supervisor

    # -- start and stop -----------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, n: int, **how: Any) -> Cluster:
        """Attach to this user's cluster, or start one of `n` engines. how: see layout.wanted.

        Raises: ValueError, EngineError: one sentence with the numbers and the remedy.
        """
        wanted = layout.wanted(n, **how)
        launch.check_layout(wanted)
        path, reasons = session_dir.find_session_dir()
        give_up = time.monotonic() + supervisor_client.PATIENCE
        while time.monotonic() < give_up:
            with contextlib.suppress(supervisor_client.SupervisorEnding), session_dir.locked(path):
                if supervisor := supervisor_client.attach(path):
                    self = cls(path, supervisor, reasons, attached=True)
                    self.layout = wanted  # what `restart` starts if the other kernel has not come so far
                    try:
                        self._connect()
                    except EngineError as error:  # this cluster can still be restarted: `fault` says what is wrong
                        self._unwell = error
                    return self
                session_dir.empty(path)
                self = cls(path, supervisor_client.start(path), reasons)
                try:
                    self._launch(wanted)
                except BaseException:  # the stop button as well: half a cluster is of no use
                    self.stop()
                    raise
                return self
            time.sleep(0.02)
        raise EngineError(
            f"the cluster in {path} does not end: look for its supervisor.py with ps, kill it, and try again"
        )

    @classmethod
    def find(cls) -> Cluster | None:
        """Attach to this user's cluster; None if there is none. Its layout is None while it is being started."""
        path, reasons = session_dir.find_session_dir()
        try:
            supervisor = supervisor_client.attach(path)
        except supervisor_client.SupervisorEnding:
            return None
        if supervisor is None:
            return None
        self = cls(path, supervisor, reasons, attached=True)
        with contextlib.suppress(EngineError):
            self._connect()
        return self

    def _launch(self, wanted: layout.Layout) -> None:
        self.layout = wanted
        if text := launch.announcement(wanted):
            print(text, flush=True)
        Launching(self.path, wanted, self.supervisor).go()
        self._connect()

    def _connect(self) -> EnginePool:
        try:
            with open(session_dir.session_file(self.path)) as file:
                self.layout = layout.Layout(**json.load(file))
        except (OSError, ValueError, TypeError):
            raise EngineError("the start of the engines was interrupted: call lab.restart()") from None
        self._pool = EnginePool(self.path, self.n)
        return self._pool

    def restart(self, n: int | None = None, announce: str = "", **how: Any) -> None:
        """Start new engines in place of the old ones, laid out as these were but for what is said; variables stay.

        announce: a line to print before the old ones end, which they do only if this machine can hold the new ones.
        """
        wanted = layout.wanted(self.n if n is None else n, running=self.layout, **how)
        launch.check_layout(wanted)
        if not self.alive():
            raise EngineError("the engine cluster has ended: call lab.start()")
        if announce:
            print(announce, flush=True)
        self._disconnect()
        with session_dir.locked(self.path):
            keep = remote.kept(self.path, self.supervisor.ask("status")["running"], self.layout, wanted)
            self.supervisor.ask("kill", keep=keep)
            session_dir.forget_engines(self.path, keep)
            self._launch(wanted)

    def stop(self) -> None:
        """End every process of the cluster and remove its files, for all kernels that use it."""
        try:
            if self._supervisor is not None:
                with contextlib.suppress(OSError):
                    self._supervisor.ask("stop")
        finally:
            self.detach()

    def detach(self) -> None:
        """Leave the cluster to the other kernels that use it; it ends when there are none."""
        self._disconnect()
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None

    def _disconnect(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None
            self.activate_px()  # %px asks again who is there

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.attached:
            self.detach()
        else:
            self.stop()

    def alive(self) -> bool:
        """Return False when the cluster has ended: stopped in some notebook, or its supervisor was killed."""
        if self._supervisor is None:
            return False
        try:
            self._supervisor.ask("status")
        except OSError:
            return False
        return True

    def kernels(self) -> list[int]:
        """Return the process ids of the kernels that use this cluster."""
        return self.supervisor.ask("status")["attached"]

    # -- run ----------------------------------------------------------------------------------------------------------

    def fault(self) -> str | None:
        """Return what is wrong with the engines, in one sentence; None when they are well.

        Raises: EngineMute when they may only be busy, perhaps for another notebook: whether to end that is not for us.
        """
        try:
            self._check_engines()
        except EngineMute:
            raise
        except EngineError as error:
            return str(error)
        return None

    def run(
        self,
        fn: Function | str | os.PathLike[str],
        *args: object,
        ranks: int | Iterable[int] | None = None,
        deadline: float = 10,
        limit: float | None = None,
        on_row: OnRow | None = None,
        inject: Injection | None = None,
        **keywords: object,
    ) -> Results:
        """Call `fn(comm, *args, **keywords)`, or run a file, on every rank, or on `ranks`; see `lab.run`."""
        script = isinstance(fn, str | os.PathLike) and str(fn).endswith(".py")
        call = cast("Function", Script(fn) if script else fn)  # a wrong one is refused by name in pool._package
        engines = self._check_engines()
        run = engines.run(call, args, keywords, ranks, deadline, on_row, inject, limit)
        error = engines.error_of(run)
        if run.dead:  # all of them, perhaps, because another notebook has ended the cluster meanwhile
            self._require_alive(engines, [run.engines[i].rank for i in run.dead])
        if run.stuck:
            warn(f"{name_ranks(run.stuck)} ignored the interrupt, as compiled code can: replacing the engines.")
            self.restart()
        if error is not None:
            raise error from None
        return pool.results(run.outcomes, run.rows)

    def interrupt(self) -> bool:
        """End the run that another thread of this notebook has under way; return True if there is one."""
        return self._pool is not None and self._pool.interrupt()

    def _require_alive(self, engines: EnginePool, ranks: Sequence[int]) -> None:
        """Raise EngineError if `ranks` have not died by themselves: with their cluster, or with its Slurm job."""
        if not self.alive():
            self.detach()
            raise EngineError("the engine cluster was stopped in another notebook, or killed: call lab.start()")
        if self.laid_out.remote and (text := remote.end_of_job(self.path, engines.endings(ranks).values())):
            again = "" if self.where == "ipyparallel" else " in a new job"
            if "connection" in self.laid_out.job:
                again = ", or lab.start(client=...) if the cluster was started again"
            raise EngineError(f"{text}: call lab.restart() for {counted(self.n, 'engine')}{again}; your variables stay")

    def _check_engines(self) -> EnginePool:
        """Return the engines, connected to again if another notebook has replaced them.

        Raises: EngineError if some have died, or if the cluster has ended.
        """
        if self._supervisor is None:
            raise EngineError("the engine cluster has ended: call lab.start()")
        engines = self._pool
        if engines is None:
            if self._unwell is not None:
                error, self._unwell = self._unwell, None
                raise error
            if self.laid_out.remote and (text := remote.ended(self.path)):  # a restart has failed
                raise EngineError(f"{text.partition(': ')[0]}: call lab.restart()")
            engines = self._connect()
        if not (gone := engines.gone()):
            return engines
        self._require_alive(engines, gone)
        if dead := engines.endings(gone, unknown=""):
            raise EngineError(
                f"{errors.dead_text(dead)}: call lab.restart() for {self.n} new engines; your variables stay"
            )
        self._disconnect()
        with session_dir.locked(self.path):  # once the other notebook's are all there
            return self._connect()

    # -- ipyparallel --------------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """ipyparallel's Client of these engines: `cluster.client[:]` is the view that `%px` uses.

        Raises: EngineError when the engines, or the controller between, cannot serve it.
        """
        engines = self._check_engines()
        if self._parallel is not None:
            self._check_px(engines)
        else:
            with engines.between_runs():  # engines join ipyparallel as they would run a task
                self._open_px()
                engines.join_px()
                self._parallel = px.connect(self.path, self.n, START_SECONDS, lambda: self._check_px(engines))
        return self._parallel

    def activate_px(self) -> None:
        """Point the magics `%px` and `%%px` of this notebook at these engines; in a plain script there are none."""
        if (shell := ipython()) is not None:
            px.offer_magics(self, shell)

    def _open_px(self) -> None:
        """Start the controller, unless another notebook has done so."""
        with session_dir.locked(self.path):
            self.supervisor.ask("status")  # when it answers, a start that was interrupted has left its log
            if not os.path.exists(session_dir.log_file(self.path, "controller")):
                Launching(self.path, self.laid_out, self.supervisor).open_px()

    def _check_px(self, engines: EnginePool) -> None:
        """Raise EngineError when the controller or an engine has ended; `%px` asks again who is there."""
        gone = engines.gone()
        if not gone and "controller" in self.supervisor.ask("status")["running"]:
            return
        self.activate_px()
        if gone:
            self._require_alive(engines, gone)
            if dead := engines.endings(gone, unknown=""):
                raise EngineError(f"{errors.dead_text(dead)}: call lab.restart() for new engines")
            raise EngineError("the engines were replaced, perhaps by another notebook: run this cell again")
        why = launch.cause(session_dir.tail(self.path, "controller")) or "without a word"
        raise EngineError(f"the controller of %px has ended ({why}): call lab.restart()")

    # -- display ------------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Show who runs where, and the cheat sheet: as HTML in a notebook, as text elsewhere."""
        infos, notes = self.infos, [*self.reasons, *self.laid_out.remarks, *remote.remarks(self.path)]
        shell = ipython()
        if shell is None:
            print(table_text(infos, notes), flush=True)
            return
        from IPython.display import display

        self._shown_in = shell.execution_count
        both = {"text/html": table_html(infos, notes), "text/plain": table_text(infos, notes)}
        display(both, raw=True)

    def _ipython_display_(self) -> None:
        shell = ipython()  # `lab.start(4)` at the end of a cell has shown it already
        if shell is None or self._shown_in != shell.execution_count:
            self.show()

    def __repr__(self) -> str:
        return f"<{self.layout} in {self.path}>"


COLUMNS = ("rank", "host", "cores", "GPU", "pid")

CHEAT_SHEET = (
    ("lab.run(fn, x)", "calls fn(comm, x) on every rank; results come in rank order"),
    ("%%px", "runs the cell on every engine; mpi_rank and mpi_size are there"),
    ("stop button", "ends a stuck cell and says who waits for whom"),
    ("lab.restart()", "new engines when one has died; your variables stay"),
    ("lab.stop()", "ends the engines; so does closing the notebook's kernel"),
)


def _table_rows(infos: Sequence[Info]) -> list[tuple[str, ...]]:
    """Return a row of strings per engine."""
    return [
        (str(i["rank"]), i["host"], name_ranks(i["cores"]).partition(" ")[2], i["gpu"], str(i["pid"])) for i in infos
    ]


def _table_notes(infos: Sequence[Info], reasons: Sequence[str]) -> list[str]:
    """Return sentences below the table: too few cores; `reasons`, such as why the session directory is elsewhere."""
    cores = {(i["machine"], c) for i in infos for c in i["cores"]}  # emulated hosts share the machine's
    found = [f"Note: {reason}." for reason in reasons]
    if len(infos) > len(cores):
        found.append(
            f"{len(infos)} engines take turns on {len(cores)} cores: results are right, timings show no scaling."
        )
    return found


def table_text(infos: Sequence[Info], reasons: Sequence[str] = ()) -> str:
    """Write the table for a terminal."""
    if not infos:
        return "no engines are running: lab.start(4)"
    cells = [COLUMNS, *_table_rows(infos)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines += ["", *_table_notes(infos, reasons)]
    lines += [f"{command:<16}{what}" for command, what in CHEAT_SHEET]
    return "\n".join(lines)


def table_html(infos: Sequence[Info], reasons: Sequence[str] = ()) -> str:
    """Write the table for a notebook."""
    if not infos:
        return "<p>no engines are running: <code>lab.start(4)</code></p>"
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in _table_rows(infos))
    below = "".join(f"<p>{escape(note)}</p>" for note in _table_notes(infos, reasons))
    sheet = "".join(f"<tr><td><code>{escape(c)}</code></td><td>{escape(what)}</td></tr>" for c, what in CHEAT_SHEET)
    return f"<table><tr>{head}</tr>{body}</table>{below}<table>{sheet}</table>"
