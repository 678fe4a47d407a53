"""One start of the processes of a cluster: what the keeper is asked for, in which order, and what is waited for."""

import json
import os
import time

from ..features import dev_shm
from . import diagnosis, hosts, launch, session_dir, slurm
from .errors import EngineError

START_SECONDS = 60  # a cold disk and a busy machine included


class Launching:
    """Starts what `layout` wants in the session directory `path`, as children of the keeper."""

    def __init__(self, path, layout, keeper):
        self.path, self.layout, self.keeper = path, layout, keeper
        self.started = []  # names of processes

    def go(self):
        """Start hosts or a job, where they are wanted, then engines; in a Slurm job, %px's controller as well.

        Raises: EngineError when one of them ends, or has not come so far in time.
        """
        dev_shm.remove_abandoned()
        if self.layout.hosts:
            self.spawn("hosts", launch.hosts_argv(self.path, self.layout))
            self.wait_for([hosts.told_in(self.path)])
        if self.layout.where == "slurm":
            slurm.prepare(self)
            self.open_px()  # outposts want to know its sockets at once
        self.spawn("engines", launch.engines_argv(self.path, self.layout))
        session_dir.write(session_dir.session_file(self.path), json.dumps(self.layout._asdict()))
        seconds = slurm.START_SECONDS if self.layout.where == "slurm" else START_SECONDS
        self.wait_for([session_dir.engine_socket(self.path, rank) for rank in range(self.layout.n)], seconds)
        self.keeper.ask("ready")

    def open_px(self):
        """Start ipyparallel's controller, for %px."""
        self.spawn("controller", launch.controller_argv())

    def spawn(self, name, argv, **options):
        """Have the keeper start process `name`. options: see keeper.py."""
        env = launch.environment(self.path, self.layout, self.keeper.pid)
        log = session_dir.log_file(self.path, name)
        self.keeper.ask("spawn", name=name, argv=argv, env=env, cwd=os.getcwd(), log=log, **options)
        self.started.append(name)

    def wait_for(self, files, seconds=START_SECONDS):
        """Return when all `files` are there, which the processes make that were started."""
        give_up = time.monotonic() + seconds
        look = 0.0
        while not all(map(os.path.exists, files)):
            time.sleep(0.01)
            now = time.monotonic()
            if now > look:
                look = now + 0.25
                ended = self.ended()
                if told := slurm.ended(self.path):
                    raise EngineError(told)
                ranks = range(self.layout.n)
                dead = [rank for rank in ranks if os.path.exists(session_dir.exit_file(self.path, rank))]
                if ended or dead or now > give_up:
                    raise EngineError(diagnosis.start_failure(self.path, self.layout.n, ended, seconds))

    def ended(self):
        """Names of the processes that were started and have ended."""
        running = self.keeper.ask("status")["running"]
        return [name for name in self.started if name not in running]
