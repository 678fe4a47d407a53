"""The engine cluster as one object: start it or attach to it, run functions on it, restart it, stop it."""

import contextlib
import json
import os
import sys
import time

from ..comm.errors import RankFailed, name_ranks
from . import client, diagnosis, keeper_client, launch, outcome, package, session_dir, table
from .errors import EngineError, RunStopped, without_traceback
from .run import Run

START_SECONDS = 60  # a cold disk and a busy machine included


class Cluster:
    """`n` MPI engines, of which this kernel is one user. `with Cluster.start(4) as cluster:` stops what it has started."""

    def __init__(self, path, keeper, n, reasons=(), attached=False):
        self.path = path
        self.n = n
        self.attached = attached  # another kernel had started it
        self.reasons = list(reasons)  # why the session directory is not in the best place
        self._keeper = keeper
        self._lock = client.RunLock(path)
        self._board = None
        self._running = False
        self._engines = []
        self._died = {}  # rank -> how, since the last start
        self._parallel = None

    # -- start and stop -----------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, n):
        """Attach to this user's cluster, or start one of `n` engines.

        Raises: ValueError, EngineError: one sentence with the numbers and the remedy.
        """
        launch.check_count(n)
        path, reasons = session_dir.find()
        for _ in range(100):
            with contextlib.suppress(keeper_client.KeeperEnding), session_dir.locked(path):
                if keeper := keeper_client.attach(path):
                    return cls._attach(path, keeper, reasons)
                session_dir.empty(path)
                self = cls(path, keeper_client.start(path), n, reasons)
                self._launch()
                return self
            time.sleep(0.05)
        raise EngineError(f"the cluster in {path} does not end: find its keeper with ps, kill it, and try again")

    @classmethod
    def _attach(cls, path, keeper, reasons):
        with open(session_dir.session_file(path)) as file:
            self = cls(path, keeper, json.load(file)["n"], reasons, attached=True)
        self._engines = client.connect(path, self.n)
        return self

    def _launch(self):
        """Start controller and engines at the same time, and connect to the engines."""
        self._died.clear()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(launch.board_file(self.path))
        from ..comm.board import Board

        self._board = Board.create(launch.board_file(self.path), self.n)
        self._spawn("controller", launch.controller_argv())
        self._spawn("engines", launch.engines_argv(self.path, self.n))
        with open(session_dir.session_file(self.path), "w") as file:
            json.dump({"n": self.n}, file)
        self._wait_for_engines()
        self._engines = client.connect(self.path, self.n)

    def _spawn(self, name, argv):
        env = launch.environment(self.path, self.n, self._keeper.pid)
        self._keeper.ask("spawn", name=name, argv=argv, env=env, cwd=os.getcwd(), log=launch.log_file(self.path, name))

    def _wait_for_engines(self):
        give_up = time.monotonic() + START_SECONDS
        look = 0.0
        while not all(os.path.exists(session_dir.engine_socket(self.path, rank)) for rank in range(self.n)):
            time.sleep(0.01)
            now = time.monotonic()
            if now > look:
                look = now + 0.25
                running = self._keeper.ask("status")["running"]
                if len(running) < 2 or now > give_up:
                    self._give_up(running, now > give_up)

    def _give_up(self, running, late):
        message = diagnosis.start_failure(self.path, self.n, running, START_SECONDS if late else None)
        self.stop()
        raise EngineError(message)

    def stop(self):
        """End every process of the cluster and remove its files, for all kernels that use it."""
        if self._keeper is None:
            return
        self._disconnect()
        with contextlib.suppress(OSError):
            self._keeper.ask("stop")
        self._keeper.close()
        self._keeper = None
        self._lock.close()

    def restart(self, n=None):
        """New engines, `n` or as many as before, in place of the old ones; the notebook keeps its variables."""
        if n is not None:
            launch.check_count(n)
        if not self.alive():
            raise EngineError("the engine cluster has ended: call lab.start()")
        self._disconnect()
        with session_dir.locked(self.path):
            self._keeper.ask("kill")
            for rank in range(self.n):
                for path in (session_dir.engine_socket(self.path, rank), session_dir.exit_file(self.path, rank)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
            for kind in ("client", "engine"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(launch.connection_file(self.path, kind))
            self.n = n or self.n
            self._launch()

    def _disconnect(self):
        for engine in self._engines:
            engine.close()
        self._engines = []
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None

    def alive(self):
        """False when the cluster has ended: stopped here or in another notebook, or its keeper was killed."""
        if self._keeper is None:
            return False
        try:
            self._keeper.ask("status")
        except OSError:
            return False
        return True

    def kernels(self):
        """Process ids of the kernels that use this cluster."""
        return self._keeper.ask("status")["attached"]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.attached:
            self.detach()
        else:
            self.stop()

    def detach(self):
        """Leave the cluster to the other kernels that use it; it ends when there are none."""
        self._disconnect()
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
            self._lock.close()

    # -- ipyparallel --------------------------------------------------------------------------------------------------

    @property
    def client(self):
        """ipyparallel's Client of these engines: `cluster.client[:]` is the view that `%px` uses."""
        if self._parallel is None:
            from ipyparallel import Client

            self._parallel = Client(
                launch.connection_file(self.path, "client"), profile_dir=launch.profile_dir(self.path)
            )
            self._parallel.wait_for_engines(self.n, timeout=START_SECONDS, interactive=False)
        return self._parallel

    def activate_px(self):
        """Point the magics `%px` and `%%px` of this notebook at these engines."""
        view = self.client[:]
        view.block = True
        view.activate()

    # -- run ------------------------------------------------------------------------------------------------------------

    def run(self, fn, *args, ranks=None, deadline=10, on_row=None):
        """`fn(comm, *args)` on every rank, or on `ranks`; see `lab.run`."""
        if self._running:
            raise EngineError("a run is under way in this notebook: lab.run inside on_row has to wait for its end")
        self._check_engines()
        chosen = self._chosen(ranks)
        task, own = package.package(fn, args, len(chosen))
        paths = package.own_paths()
        with self._lock.held() as number:
            self._running = True
            try:
                run = Run(number, [self._engines[r] for r in chosen], lambda: self._waits(chosen), on_row)
                common = {
                    "run": number,
                    "ranks": None if ranks is None else chosen,
                    "deadline": deadline,
                    "sys_path": paths,
                    "task": task,
                }
                run.execute({rank: common | {"own": own[i]} for i, rank in enumerate(chosen)})
            finally:
                self._running = False
        return self._conclude(run)

    def _chosen(self, ranks):
        if ranks is None:
            return list(range(self.n))
        chosen = [ranks] if isinstance(ranks, int) else list(ranks)
        bad = [r for r in chosen if not isinstance(r, int) or not 0 <= r < self.n]
        if bad or not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(f"ranks={ranks!r}: choose different ranks from 0 to {self.n - 1}")
        return chosen

    def _check_engines(self):
        if not self._engines:
            raise EngineError("the engine cluster has ended: call lab.start()")
        gone = [engine for engine in self._engines if engine.is_closed()]
        if not gone:
            return
        if not self.alive():
            self._disconnect()
            raise EngineError("the engine cluster was stopped in another notebook or killed: call lab.start()")
        dead = self._dead([engine.rank for engine in gone])
        if dead:
            raise EngineError(
                f"{diagnosis.dead_text(dead)}: call lab.restart() for {self.n} new engines; your variables stay"
            )
        self._disconnect()
        with open(session_dir.session_file(self.path)) as file:
            self.n = json.load(file)["n"]
        self._engines = client.connect(self.path, self.n)

    def _waits(self, ranks):
        """Who waits for whom now, from the board."""
        if self._board is None:
            from ..comm.board import Board

            self._board = Board.open(launch.board_file(self.path))
        return tuple(self._board.waits(ranks))

    def _dead(self, ranks):
        """{rank: how it ended} of those of `ranks` whose process has ended."""
        for rank in ranks:
            try:
                with open(session_dir.exit_file(self.path, rank)) as file:
                    self._died[rank] = diagnosis.ending(file.read())
            except OSError:
                continue
        return {r: how for r, how in self._died.items() if r in ranks}

    def _conclude(self, run):
        """Results of a run that went well; otherwise the exception that says what happened."""
        for rank in run.unsent:
            self._engines[rank] = client.EngineConnection(self.path, rank)
        error = self._error(run)
        if run.stuck:
            text = f"{name_ranks(run.stuck)} ignored the interrupt (compiled code, it seems): the engines are replaced."
            print(text, file=sys.stderr, flush=True)
            self.restart()
        if error is not None:
            raise error from None
        return outcome.results([run.outcomes[r] for r in run.engines], run.rows)

    def _error(self, run):
        if run.raised is not None:
            return run.raised
        if run.stopped:
            return RunStopped("\n".join(["stopped by you; until then", *map(str, run.picture)]), run.picture)
        if run.dead:
            time.sleep(0.02)  # the shell that writes the exit status ends a moment later than the engine
            dead = self._dead(run.dead) or dict.fromkeys(run.dead, "without a trace")
            return without_traceback(
                RankFailed(f"{diagnosis.dead_text(dead)}. Call lab.restart() for new engines", run.picture)
            )
        return outcome.error_of([run.outcomes[r] for r in run.engines if r in run.outcomes])

    # -- display --------------------------------------------------------------------------------------------------------

    def __repr__(self):
        return table.text([e.info for e in self._engines], self.reasons)

    def _repr_html_(self):
        return table.html([e.info for e in self._engines], self.reasons)
