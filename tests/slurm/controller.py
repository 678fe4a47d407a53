"""A real Slurm in a private folder, on free ports: munged, slurmctld and two slurmd, which end with this process.

    with Slurm() as slurm:
        slurm.ask("srun", "-N2", "hostname")

Each slurmd has a machine of its own (nodes.py) where this system allows that, else both run on this one. A node claims
eight CPUs and two GPUs, whatever there is. There is no accounting: what slurmctld remembers is all there is to ask.
"""

import contextlib
import os
import pwd
import random
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from hpdl_lab.classroom import settings
from tests.slurm.nodes import Network, Refused, end, held

CPUS = 8  # of each node
PATIENCE = 600  # s, for each daemon: the machine may be busy
PACKAGES = "slurmctld slurmd slurm-client munge"

CONFIGURATION = """
ClusterName=hpdl
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=2
SchedulerParameters=bf_interval=1,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{changed}
{nodes}
PartitionName=class Nodes=ALL Default=YES MaxTime=60 State=UP
PartitionName=short Nodes=n1 MaxNodes=1 MaxTime=10 State=UP
PartitionName=closed Nodes=ALL MaxTime=60 State=DOWN
"""
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"  # Slurm wants files that exist


class Slurm:
    """hidden: folders of this machine that are empty on the nodes. alone: a machine of its own for each node.

    changed: lines in slurm.conf, such as MaxJobCount=2.
    """

    def __init__(self, hidden=(), alone=True, **changed):
        missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
        if missing:
            raise FileNotFoundError(f"no {', '.join(missing)}: apt-get install {PACKAGES}")
        self.hidden = [str(folder) for folder in hidden]
        self.opened = walls(sys.prefix, sys.base_prefix, settings.PACKAGE)
        self.alone, self.changed = alone, changed
        self.began = time.time()
        self.folder = Path(tempfile.mkdtemp(prefix="hpdl-slurm-", dir="/tmp"))
        self.folder.chmod(0o755)  # other users submit jobs too
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.processes = {}  # name -> Popen
        self.network = None
        self.addresses = {}  # of nodes: name -> (address, port)

    def __enter__(self):
        try:
            if self.alone:
                try:
                    self.network = Network()
                except Refused as refused:
                    print(f"both nodes share this machine: {refused}")
            self.port, *others = free_ports(3)
            for number, port in enumerate(others, 1):
                there = self.network.node_address(number) if self.network else "127.0.0.1"
                self.addresses[f"n{number}"] = (there, port)
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        if not self.network and "slurmctld" in self.processes:
            self.ask("scancel", "--state=PENDING,RUNNING", "--signal=KILL")
        for name in reversed(list(self.processes)):
            self.kill(name)
        if self.network:
            self.network.close()
        else:
            self._kill_strays()
        for path in Path("/tmp").glob("hydra_hwloc_xmlfile_*"):  # MPICH's mpiexec leaves one when its job is cancelled
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime > self.began:
                    path.unlink()
        shutil.rmtree(self.folder)

    def _start(self):
        self.configure()
        for name in ("state", *self.addresses):
            (self.folder / name).mkdir(mode=0o700)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self._run("munged", "munged", "--foreground", *options)
        self._wait_for("munged", (self.folder / "munge.socket").is_socket)
        self.start_controller()
        for name in self.addresses:
            self.start_node(name)

    def configure(self, **changed):
        """Write slurm.conf, with `changed` in front: of several lines for one thing Slurm reads the first.

        Commands read it at once, daemons when they start, or when they are told: `scontrol reconfigure`.
        """
        host = socket.gethostname().partition(".")[0]
        mine = "" if self.network else f"NodeHostname={host}"
        nodes = [
            f"NodeName={name} NodeAddr={address} Port={port} CPUs={CPUS} RealMemory=8000 Gres=gpu:2 {mine}"
            for name, (address, port) in self.addresses.items()
        ]
        text = CONFIGURATION.format(
            host=host,
            address=self.network.address if self.network else "127.0.0.1",
            port=self.port,
            user=pwd.getpwuid(os.geteuid()).pw_name,
            folder=self.folder,
            nodes="\n".join(nodes),
            changed="\n".join(f"{name}={value}" for name, value in (self.changed | changed).items()),
        )
        for name, content in {"gres.conf": GPUS, "cgroup.conf": "CgroupPlugin=cgroup/v1\n", "slurm.conf": text}.items():
            new = self.folder / f"{name}.new"
            new.write_text(content)
            new.rename(self.folder / name)

    def start_controller(self):
        """Start slurmctld; return when it answers."""
        self._run("slurmctld", "slurmctld", "-D")
        self._wait_for("slurmctld", lambda: self.ask("scontrol", "ping").returncode == 0)

    def restart_controller(self, **changed):
        """slurmctld with `changed` lines in slurm.conf, such as SlurmdTimeout=3; without, with those of the start."""
        self.stop_controller()
        self.configure(**changed)
        self.go_on()

    def stop_controller(self):
        ending = self.processes.pop("slurmctld")
        ending.terminate()  # it saves what it knows of jobs: killed, it would take one that has ended for running
        ending.wait(PATIENCE)

    def go_on(self):
        """Start slurmctld again, and have nodes report to it now: by itself it would ask them seconds later."""
        self.start_controller()
        self.ask("scontrol", "reconfigure")

    def start_node(self, name):
        """Start the slurmd of node `name`; return when it takes jobs."""
        if self.network:
            with open(self.folder / f"{name}.said", "ab") as log:
                number, environment = int(name.removeprefix("n")), {**os.environ, **self.environment}
                command = ["slurmd", "-D", "-N", name]
                self.processes[name] = self.network.add(number, command, environment, log, self.hidden, self.opened)
        else:
            self._run(name, "slurmd", "-D", "-N", name)
        self._wait_for(name, lambda: self.states()[name] in ("idle", "mix", "alloc"))

    def kill(self, name):
        """End a daemon at once; with a slurmd its machine, as in a power failure."""
        end(self.processes.pop(name))

    def _run(self, name, *command):
        with open(self.folder / f"{name}.said", "ab") as log:
            self.processes[name] = held(command, stderr=log, env={**os.environ, **self.environment})

    def ask(self, *command, seconds=PATIENCE):
        """Run a command of Slurm; its CompletedProcess."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)

    def states(self):
        """{name of a node: "idle", "mix", "alloc", "down", ...}; a "*" behind it: it does not answer."""
        nodes = self.ask("sinfo", "--noheader", "--Node", "--partition=class", "--format=%N %t").stdout
        return dict(line.split() for line in nodes.splitlines())

    def jobs(self):
        """Numbers of the jobs that wait, run, or are about to end."""
        return self.ask("squeue", "--noheader", "--format=%i").stdout.split()

    def _wait_for(self, name, ready):
        give_up = time.monotonic() + PATIENCE
        while not ready():
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not dead and time.monotonic() < give_up, f"no {name}; {dead} ended:\n{self.said()}"
            time.sleep(0.02)

    def said(self):
        """The last lines of all logs."""
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.said")]
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(logs))

    def _kill_strays(self):
        """What a slurmd leaves running on this machine when it ends: jobs, and the processes that watch over them."""
        ours = f"SLURM_CONF={self.environment['SLURM_CONF']}"
        while strays := [process for process in psutil.process_iter() if ours in environment_of(process)]:
            for process in strays:
                process.kill()
            psutil.wait_procs(strays, timeout=1)


def environment_of(process):
    """Lines such as "NAME=value", of the start of the process; none where it has ended."""
    try:
        with open(f"/proc/{process.pid}/environ", errors="replace") as file:
            return file.read().split("\0")
    except OSError:
        return []


def free_ports(count):
    """That many ports that nobody uses now, and that the system gives to nobody who asks for any."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(max(1024, first // 2), max(2048, first))
    found = []
    for port in random.sample(below, len(below)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("this machine has no free ports")


def walls(*paths):
    """{folder: the paths in it}: the first folder on the way to each that other accounts cannot enter."""
    found = {}
    for path in map(os.path.realpath, paths):
        ways = [*reversed(Path(path).parents), Path(path)]
        if wall := next((way for way in ways if not way.stat().st_mode & stat.S_IXOTH), None):
            found.setdefault(str(wall), []).append(path)
    return found
