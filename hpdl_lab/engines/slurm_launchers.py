"""Plain ipyparallel's clusters on Slurm nodes, without settings: `ipp.Cluster(engines="hpdl-slurm", n=4)`.

    this machine: controller, on the address that nodes reach, encrypted (CurveZMQ)
                  slurm_job (slurm_job.py): submits the job, watches it, cancels it
    first node:   slurm_step (slurm_step.py): the environment's own mpiexec, whatever PMI this Slurm speaks
    all nodes:    ipengine --mpi, whose id is its MPI rank, with its own share of the job's GPUs

`ipcluster start --engines=hpdl-slurm -n 4` does the same from a shell. What the job asks for is said by the settings
below, such as `c.SlurmEngineSetLauncher.partition = "gpu"`. `lab.start(4, where="slurm")` needs none of this.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager, suppress

import psutil
from ipyparallel.cluster.launcher import LauncherError, LocalControllerLauncher, LocalEngineLauncher
from traitlets import Integer, Unicode

from . import reach, session_dir, shared_dir, slurm_job, slurm_options

FAREWELL = 20  # s for slurm_job to cancel the job
LOOK = 0.1  # s between two looks at the state of the job
CHANNELS = 15  # ports of a controller


@contextmanager
def ending_with_children(pid):
    """End process `pid`, a controller: in the context it is waited for, and what it has started ends after it.

    By itself a controller that is ended amid its start leaves its schedulers behind.
    """
    try:
        controller = psutil.Process(pid)
        controller.suspend()  # so that it starts no more, once it is out of the fork that it may be amid
        while controller.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.001)
        children = controller.children(recursive=True)
        controller.terminate()
        controller.resume()
    except psutil.NoSuchProcess:
        children = []
    yield
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()


class SlurmControllerLauncher(LocalControllerLauncher):
    """The controller as a process of this machine that the nodes reach."""

    partition = Unicode(config=True, help="whose nodes have to reach the controller; all by default")

    def find_args(self):
        own = [f"--ip={reach.addresses(self.partition or None)[0]}", "--IPController.enable_curve=True"]
        if within := reach.ports():
            ports = [reach.listeners([""], within) for _ in range(CHANNELS)]
            for sockets, _ in ports:
                sockets[0].close()
            own += [f"--IPController.ports={port}" for _, port in ports]
        return self.controller_cmd + self.cluster_args + own + self.controller_args

    async def stop(self):
        with ending_with_children(self.pid):
            await super().stop()


class SlurmEngineSetLauncher(LocalEngineLauncher):
    """Engines in a Slurm job; the process of this launcher is the one that watches the job."""

    stop_seconds_until_kill = Integer(FAREWELL, config=True)

    partition = Unicode(config=True, help="as sinfo names it")
    account = Unicode(config=True)
    qos = Unicode(config=True)
    reservation = Unicode(config=True)
    time = Unicode(config=True, help='minutes, or such as "1:30:00"')
    nodes = Integer(0, config=True, help="that share the engines evenly; as Slurm likes by default")
    gpus = Integer(0, config=True, help="for each engine")
    wait = Integer(slurm_options.WAIT, config=True, help="seconds that the job may wait in the queue")
    folder = Unicode(help="what the nodes and this machine share of this job").tag(to_dict=True)

    _last = {}

    async def start(self, n):
        """Submit the job of `n` engines; return when it runs. Raises LauncherError, with the reason, when it ends."""
        self.n = n
        await self._reach_controller()
        self.folder = tempfile.mkdtemp(prefix=f"{self.identifier}-", dir=shared_dir.root())
        super().start()
        try:
            await self._running()
        except BaseException:  # the stop button as well
            await self.stop()
            raise

    def find_args(self):
        said = {name: getattr(self, name) for name in slurm_options.NAMES if getattr(self, name)}
        command = [sys.executable, "-m", "hpdl_lab.engines.slurm_step", str(self.n), *self.engine_args]
        options = slurm_options.checked(said, self.n)
        return slurm_job.argv(self.folder, self.n, options, command, self.folder, bound=False)

    async def _reach_controller(self):
        """Replace a controller that only this machine reaches, as ipyparallel's own is; nobody can be using it yet."""
        cluster = self.parent
        if "IPP_CONNECTION_INFO" not in self.environment or not self._on_loopback():
            return
        if len(cluster.engines) > 1:
            raise LauncherError(
                "the controller listens on this machine only, and other engines use it already: start the cluster "
                'with a controller that nodes reach, Cluster(controller="hpdl-slurm", engines="hpdl-slurm")'
            )
        written = cluster.controller.connection_files
        with ending_with_children(cluster.controller.pid):
            await cluster.stop_controller()
        for file in written.values():  # whoever waits for the new ones must not find these
            with suppress(FileNotFoundError):
                os.unlink(file)
        cluster.controller_launcher_class = SlurmControllerLauncher
        await cluster.start_controller(partition=self.partition)
        info = await cluster.controller.get_connection_info()
        self.environment["IPP_CONNECTION_INFO"] = json.dumps(info["engine"])

    def _on_loopback(self):
        interface = json.loads(self.environment["IPP_CONNECTION_INFO"])["interface"]
        return any(name in interface for name in ("//127.", "//localhost", "//[::1]"))

    async def _running(self):
        shown = None
        while (told := self._told()).get("state") != "running":
            if told.get("state") == "ended":
                raise LauncherError(told["text"])
            if self.poll() is not None and not self._told():
                raise LauncherError(f"the process that was to submit the job has ended: {self.get_output().strip()}")
            if told and told["text"] != shown:
                shown = told["text"]
                self.log.info(shown)
            await asyncio.sleep(LOOK)
        self.log.info(told["text"])

    def _told(self):
        """What slurm_job tells of the job; the last of it when that has ended."""
        with suppress(OSError), open(session_dir.job_file(self.folder)) as file:
            self._last = json.load(file)
        return self._last

    async def stop(self):
        """Cancel the job; return when Slurm has been told."""
        await super().stop()
        self._told()
        shutil.rmtree(self.folder, ignore_errors=True)

    def notify_stop(self, data):
        """The job has ended: say how."""
        if told := self._told():
            data = data | {"job": told["text"]}
        shutil.rmtree(self.folder, ignore_errors=True)
        return super().notify_stop(data)
