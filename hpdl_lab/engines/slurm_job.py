"""The process that submits the Slurm job of the engines, watches it, and cancels it when it is ended itself.

    supervisor --- slurm_job --- sbatch, scontrol, squeue, scancel      the first node of the job
                       `-- job.json: how the job is doing             `-- one command, which starts the engines

Started by the supervisor, which ends it with SIGTERM, as the system does when the supervisor is killed. It ends by
itself when the job has ended. The job has a name of its own, by which it is cancelled even if sbatch has not
answered yet.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from . import layout, session_dir
from .supervisor import die_with_parent

Json: TypeAlias = dict[str, Any]
Record: TypeAlias = dict[str, str]  # of a job, as `scontrol` shows it
FULL = "temporarily unable to accept job"  # after which sbatch tries again and again
REFUSED = (  # sbatch's message -> cause and remedy; {partitions}: the site's, {slurm}: the whole message
    (
        FULL,
        "its queue is full, for everybody: try again when other jobs have ended, or use engines of this machine, "
        "lab.start({n})",
    ),
    (
        "job submit limit|Job violates accounting/QOS policy",
        "you have as many jobs, or ask for as much, as this account may ({slurm}): end other jobs (squeue --me, "
        "scancel), or ask for fewer engines, fewer nodes or less time",
    ),
    ("[Ii]nvalid partition", "it has no such partition; there are: {partitions}"),
    (
        "partition not available",
        "this partition takes no jobs now, or none of yours ({slurm}); there are: {partitions}",
    ),
    ("[Ii]nvalid account", "the account, or this account in this partition, is not yours to use: sacctmgr show assoc"),
    ("[Ii]nvalid qos", "there is no such QOS for your account: sacctmgr show assoc format=account,qos"),
    ("reservation", "this reservation does not exist now, or is not for you: scontrol show reservation"),
    ("time limit", "the time is more than this partition grants: ask for less with time=, see sinfo --format='%P %l'"),
    ("Memory specification", "no node has so much memory: see sinfo --format='%P %m'"),
    (
        "node configuration is not available|[Nn]ode count|More processors|[Ii]nvalid generic resource|CPU count",
        "no nodes of this partition have what is asked for, {asked}: see sinfo --format='%P %D nodes, %c CPUs, %G'",
    ),
    (
        "Unable to contact|connect failure|Connection refused|timed out|establish a configuration source",
        "slurmctld, which takes jobs, does not answer: try again in a minute, and tell the administrators if it stays "
        "so; meanwhile engines of this machine: lab.start({n})",
    ),
    (
        "authentication|munge|credential",
        "this machine is not trusted by Slurm ({slurm}): munge has to run here with the key of the site",
    ),
)

WAITS = {  # the reason of a job that waits, as squeue prints it -> what it waits for
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs before it come first",
    "Resources": "the nodes, or the CPUs and GPUs in them, are in use",
    "Reservation": "its reservation has not begun",
    "BeginTime": "it is to begin later",
    "NodeDown": "a node that it needs is down",
    "QOSMaxJobsPerUserLimit": "you have as many jobs running as this QOS allows",
    "QOSMaxCpuPerUserLimit": "you use as many CPUs as this QOS allows",
    "QOSGrpNodeLimit": "this QOS uses as many nodes as it may",
    "AssocGrpCpuLimit": "your account uses as many CPUs as it may",
    "AssocMaxJobsLimit": "you have as many jobs running as your account allows",
    "Licenses": "a license that it needs is in use",
}

NEVER = {  # reasons that no waiting ends -> the remedy
    "PartitionTimeLimit": "its time is more than the partition grants: ask for less with time=",
    "PartitionNodeLimit": "it asks for more nodes than the partition has or grants: ask for fewer with nodes=",
    "PartitionConfig": "it asks for more than all nodes of the partition have: ask for fewer engines",
    "PartitionDown": "the partition is closed: choose another with partition=, see sinfo",
    "PartitionInactive": "the partition is closed: choose another with partition=, see sinfo",
    "BadConstraints": "no node has what it asks for: ask for fewer engines, nodes or GPUs",
    "InvalidAccount": "its account is not valid: sacctmgr show assoc",
    "InvalidQOS": "its QOS is not valid for your account: sacctmgr show assoc format=account,qos",
    "AccountNotAllowed": "the partition is not open to its account: choose another with partition= or account=",
    "QOSNotAllowed": "the partition is not open to its QOS: choose another with partition= or qos=",
    "ReservationDeleted": "its reservation has been deleted: scontrol show reservation",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held: scontrol release",
    "JobLaunchFailure": "it could not be started on the nodes, and Slurm holds it: tell the administrators",
}
NEVER_PATTERN = re.compile(r"(QOS|Assoc)Max\w+Per(Job|Node)Limit")  # a limit that this one job exceeds by itself

ENDED = {  # the state of a job that has ended -> the sentence's end
    "CANCELLED": "was cancelled, with scancel or by an administrator",
    "TIMEOUT": "reached its time limit of {limit} (hours:minutes:seconds): ask for more with time=",
    "DEADLINE": "reached its deadline",
    "NODE_FAIL": "was ended by Slurm because a node failed{failed}",
    "BOOT_FAIL": "was ended by Slurm because a node did not boot",
    "OUT_OF_MEMORY": "took more memory than it was given: start fewer engines on a node (nodes=), "
    "or set SBATCH_MEM_PER_CPU, such as 4G, before",
    "PREEMPTED": "had to make room for a job that comes first",
    "REVOKED": "was moved to another cluster",
}

NOT_SHARED, NOT_REACHED = 66, 67  # exit codes of node_agent.py: no shared folder, no way to the relay
BY_EXIT = {  # the exit code of a job that has failed by itself; {log}: the last line that it wrote
    NOT_SHARED: "the nodes do not see the folder {shared} of this machine: set HPDL_SHARED to a folder that they do, "
    "for most sites one below the home directory or the scratch file system",
    NOT_REACHED: "{log}",
    126: "the nodes cannot run {python}: install this environment where the nodes see it",
    127: "the nodes do not have {python}: install this environment where the nodes see it",
}
NO_OUTPUT_FILE = "0:53"  # how Slurm says that the folder of a job's output is not there


def _refusal(said: str, n: int, asked: str, partitions: str) -> str:
    """Return the sentence for what sbatch printed instead of taking the job.

    Args:    n: engines. asked: the options of sbatch. partitions: names of those there are.
    """
    last = said.strip().rpartition("\n")[2] or "nothing"
    slurm = re.sub(r"^sbatch: (error|fatal): (Batch job submission failed: )?", "", last)
    for words, remedy in REFUSED:
        if re.search(words, said):
            return f"Slurm refused the job: {remedy.format(n=n, slurm=slurm, asked=asked, partitions=partitions)}"
    return f"Slurm refused the job: {slurm}"


def _waiting(job: Record, ahead: int, start: str) -> str:
    """Return the sentence for a job that waits. ahead: jobs before it; start: such as "14:05"."""
    reason = job["Reason"]
    why = WAITS.get(reason, reason)
    if reason.startswith("ReqNodeNotAvail"):
        why = "nodes that it needs are down, or reserved for others"
    text = f"Slurm job {job['JobId']} waits in partition {job['Partition']}: {why} ({reason})"
    if ahead:
        text += f"; {ahead} job{'s' * (ahead > 1)} before it"
    return text + (f"; Slurm expects it to start at {start}" if start else "")


def _never(job: Record) -> str | None:
    """Return the sentence for a job that will never start as it is; None for one that may."""
    reason = job["Reason"].partition(",")[0]
    remedy = NEVER.get(reason)
    if remedy is None and NEVER_PATTERN.fullmatch(reason):
        remedy = f"it exceeds a limit ({reason}): ask for fewer engines, fewer nodes or less time"
    if remedy is None:
        return None
    return f"Slurm job {job['JobId']} would never start in partition {job['Partition']}: {remedy}"


def _ending(job: Record, failed: dict[str, str], log: str, shared: str, python: str) -> str:
    """Return the sentence for a job that has ended.

    Args:    failed: {node that does not answer: what Slurm says of it}.
             log: the last line that the job has written. shared: the folder for what machines share.
    """
    name, state = f"Slurm job {job['JobId']}", job["JobState"]
    if state in ENDED:
        nodes = ", ".join(f"{node} {why}" for node, why in failed.items())
        return f"{name} {ENDED[state].format(limit=job['TimeLimit'], failed=f': {nodes}' if nodes else '')}"
    if state == "COMPLETED":
        return f"{name} ended by itself{f': {log}' if log else ''}"
    if job["ExitCode"] == NO_OUTPUT_FILE:
        return f"{name} failed: {BY_EXIT[NOT_SHARED].format(shared=shared)}"
    code, _, number = job["ExitCode"].partition(":")
    if int(code) in BY_EXIT:
        return f"{name} failed: {BY_EXIT[int(code)].format(log=log, shared=shared, python=python)}"
    if number != "0":
        known = int(number) in set(signal.Signals)
        how = f"was killed by signal {number}{f' ({signal.Signals(int(number)).name})' if known else ''}"
    else:
        how = f"ended with exit code {code}" + (f" ({job['Reason']})" if job["Reason"] == "BadConstraints" else "")
    return f"{name} {how}{f': {log}' if log else ''}"


SECONDS = 60  # for one command: without an answer they give up by themselves, after 10 to 20 s


async def _slurm_command(argv: list[str], text: str = "", hopeless: str = "\0") -> tuple[int, str, str]:
    """Run a command with `text` as its input; return (exit code, what it printed, what it complained of).

    hopeless: words of a complaint after which the command is killed. It is killed too if this is cancelled.
    """
    process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    stdin = cast("asyncio.StreamWriter", process.stdin)
    stdout, stderr = cast("asyncio.StreamReader", process.stdout), cast("asyncio.StreamReader", process.stderr)
    out, complaints = b"", ""

    async def complain() -> None:
        nonlocal complaints
        async for line in stderr:
            complaints += line.decode(errors="replace")
            if hopeless in complaints:
                return process.kill()

    try:
        async with asyncio.timeout(SECONDS):
            stdin.write(text.encode())
            stdin.close()
            out, _ = await asyncio.gather(stdout.read(), complain())
            await process.wait()
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if not isinstance(error, TimeoutError):
            raise
    return process.returncode or 0, out.decode(errors="replace"), complaints


async def _slurm_job_record(number: str) -> Record | None:
    """Return Slurm's Record of job `number`: {"JobState": "PENDING", ...}; {} without an answer; None: forgotten."""
    code, out, err = await _slurm_command(["scontrol", "--oneliner", "show", "job", number])
    if code == 0:
        return dict(word.split("=", 1) for word in out.split() if "=" in word)
    return None if "Invalid job id" in err else {}


async def _position_in_queue(number: str, partition: str) -> int:
    """Count the jobs that wait in `partition` before job `number`, as far as this user may see."""
    argv = ["squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--sort=-p,i", "--format=%i"]
    numbers = (await _slurm_command(argv))[1].split()
    return numbers.index(number) if number in numbers else 0


async def _node_names(nodes: str) -> list[str]:
    """Return ["n1", "n2"] for "n[1-2]"."""
    return (await _slurm_command(["scontrol", "show", "hostnames", nodes]))[1].split() if nodes else []


async def _failed_nodes(nodes: str) -> dict[str, str]:
    """Return {name of a node: why it is down}, of `nodes` such as "n[1-2]"."""
    states = "--states=DOWN,FAIL,NO_RESPOND,DRAIN"
    argv = ["sinfo", "--noheader", "--Node", f"--nodes={nodes}", states, "--format=%N %E"]
    lines = (await _slurm_command(argv))[1].splitlines() if nodes else []
    return dict(line.split(" ", 1) for line in lines)


async def _partition_names() -> str:
    """Return the names of all partitions, such as "gpu, short"."""
    names = (await _slurm_command(["sinfo", "--noheader", "--format=%R"]))[1].split()
    return ", ".join(dict.fromkeys(names)) or "none that you see"


FIRST_LOOK, LAST_LOOK = 0.2, 5.0  # s between two looks at the job; longer and longer while nothing happens
FORGOTTEN = 3  # looks without the job after which it has ended: slurmctld may have been restarted meanwhile
CANCEL_SECONDS = 15
DOUBT = 2.0  # s that a reason must last
LAST = ("COMPLETED", "FAILED", *ENDED)  # states that no other follows

# The folder is looked for first, by the shell, which every node has.
SCRIPT = "#!/bin/sh\n[ -r {shared} ] || exit {not_shared}\nexec {command}\n"


def argv(path: str, n: int, options: layout.Options, command: list[str], shared: str) -> list[str]:
    """Return the command line of this process.

    path: of the session directory. options: see layout.checked_job_options. command: the first node runs it once.
    shared: folder that the nodes see as well; job.log in it is what the job prints.
    """
    own = [path, str(n), json.dumps(options), shared]
    return [sys.executable, "-m", "hpdl_lab.engines.slurm_job", *own, *command]


class _Job:
    """The job of `n` engines."""

    def __init__(self, path: str, n: int, options: layout.Options, shared: str, command: list[str]) -> None:
        self.path, self.n, self.options, self.shared, self.python = path, n, options, shared, command[0]
        self.script = SCRIPT.format(shared=shlex.quote(shared), not_shared=NOT_SHARED, command=shlex.join(command))
        self.name = f"hpdl-{secrets.token_hex(4)}"
        self.log = os.path.join(shared, "job.log")
        self.number = ""
        self.written: Json = {}
        self.doubt: tuple[str | None, float] = None, 0.0  # why it can never start, since when

    async def submit(self) -> bool:
        """Have sbatch take the job; False if it refuses, which job.json says."""
        asked = layout.sbatch_arguments(self.n, self.options)
        own = ["--parsable", "--no-requeue", "--export=ALL", f"--job-name={self.name}", f"--output={self.log}"]
        code, out, err = await _slurm_command(["sbatch", *own, *asked], self.script, FULL)
        if code != 0 or not out.strip():
            if code < 0:  # it was not waited for any longer: perhaps the job has been taken meanwhile
                self.cancel()
            partitions = await _partition_names() if "partition" in err else ""
            self.tell("ended", text=_refusal(err, self.n, " ".join(asked), partitions))
            return False
        self.number = out.strip().partition(";")[0]  # behind it, the cluster's name
        return True

    async def watch(self) -> None:
        """Write how the job is doing until it has ended, or has waited for too long."""
        give_up = time.monotonic() + layout.queue_seconds(self.options)
        interval, missing = FIRST_LOOK, 0
        while True:
            job = await _slurm_job_record(self.number)
            missing = missing + 1 if job is None else 0
            if missing == FORGOTTEN:
                return self.tell("ended", text=f"Slurm knows nothing of job {self.number} any more: it has ended")
            before = self.written
            if job:
                state = job["JobState"]
                if state in LAST:
                    return await self.tell_end(job)
                if state in ("PENDING", "CONFIGURING"):
                    await self.tell_wait(job)
                    if text := self.hopeless(job) or self.waited_out(give_up):
                        self.cancel()
                        return self.tell("ended", text=text)
                elif state == "RUNNING" and before.get("state") != "running":
                    hosts = await _node_names(job["NodeList"])
                    text = f"Slurm job {self.number} runs on {', '.join(hosts)}"
                    self.tell("running", text=text, hosts=hosts, partition=job["Partition"])
            interval = FIRST_LOOK if self.written != before else min(1.3 * interval, LAST_LOOK)
            await asyncio.sleep(interval)

    def hopeless(self, job: Record) -> str | None:
        """Return the sentence for a job that can never start; None for another.

        A reason counts once it has lasted: Slurm may withdraw the first one a moment later.
        """
        text, now = _never(job), time.monotonic()
        if text is None or text != self.doubt[0]:
            self.doubt = text, now
        return text if now - self.doubt[1] > DOUBT else None

    def waited_out(self, give_up: float) -> str:
        """Return the sentence for a job that has waited for too long; "" while it has not."""
        if time.monotonic() < give_up:
            return ""
        seconds = layout.queue_seconds(self.options)
        return (
            f"{self.written['text']}. It was cancelled after {seconds} s in the queue: wait={2 * seconds} waits "
            f"longer; fewer engines, or less time=, may start sooner"
        )

    async def tell_wait(self, job: Record) -> None:
        start = job["StartTime"] if job["StartTime"] != "Unknown" else ""
        ahead = await _position_in_queue(self.number, job["Partition"])
        text = _waiting(job, ahead, start)
        self.tell("pending", text=text, reason=job["Reason"], start=start, partition=job["Partition"])

    async def tell_end(self, job: Record) -> None:
        nodes = await _failed_nodes(job["NodeList"]) if job["JobState"] == "NODE_FAIL" else {}
        text = _ending(job, nodes, session_dir.last_line(session_dir.read_tail(self.log)), self.shared, self.python)
        self.tell("ended", text=text, reason=job["Reason"], partition=job["Partition"])

    def tell(
        self, state: str, text: str, reason: str = "", start: str = "", partition: str = "", hosts: Sequence[str] = ()
    ) -> None:
        """Write job.json, all at once, when something has changed."""
        job: Json = {"state": state, "id": self.number, "text": text, "reason": reason, "start": start}
        job |= {"partition": partition, "hosts": list(hosts)}
        if job == self.written:
            return
        self.written = job
        with contextlib.suppress(FileNotFoundError):  # the session has ended
            session_dir.write_private_file(session_dir.job_file(self.path), json.dumps(job))

    def cancel(self) -> None:
        """End the job, by its name: sbatch may not have printed the number."""
        give_up = time.monotonic() + CANCEL_SECONDS
        argv = ["scancel", f"--name={self.name}", f"--user={os.getuid()}"]
        while time.monotonic() < give_up:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                done = subprocess.run(argv, timeout=CANCEL_SECONDS)
                if done.returncode == 0:
                    return
            time.sleep(0.5)


async def _monitor(job: _Job) -> None:
    """Submit the job and return when it has ended; on SIGTERM end it."""
    loop, task = asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        if await job.submit():
            await job.watch()
    except asyncio.CancelledError:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)  # one more would end this process half way
        job.cancel()


def _main() -> None:
    path, n, options, shared, *command = sys.argv[1:]
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return
    os.umask(0o077)
    asyncio.run(_monitor(_Job(path, int(n), json.loads(options), shared, command)))


if __name__ == "__main__":
    _main()
