"""The process that submits the Slurm job of the engines, watches it, and cancels it when it is ended itself.

    keeper --- slurm_job --- sbatch, scontrol, squeue, scancel          the first node of the job
                   `-- job.json: how the job is doing                     `-- one command, which starts the engines

Started by the keeper, which ends it with SIGTERM, as the system does when the keeper is killed. It ends by itself when
the job has ended. The job has a name of its own, by which it is cancelled also where sbatch has not answered yet.
"""

import contextlib
import ctypes
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time

from . import session_dir, slurm_options, slurm_queue, slurm_reasons

PR_SET_PDEATHSIG = 1  # linux/prctl.h
FIRST_LOOK, LAST_LOOK = 0.2, 5.0  # s between two looks at the job; longer and longer while nothing happens
FORGOTTEN = 3  # looks without the job after which it has ended: slurmctld may have been restarted meanwhile
CANCEL_SECONDS = 15
DOUBT = 2.0  # s that a reason lasts which is believed
LAST = ("COMPLETED", "FAILED", *slurm_reasons.ENDED)  # states that no other follows

# The folder is looked for first, by the shell, which every node has.
SCRIPT = "#!/bin/sh\n[ -r {shared} ] || exit {not_shared}\nexec {command}\n"


def argv(path, n, options, command, shared, bound=True):
    """The command line of this process.

    path: of the session directory. options: see slurm_options.checked. command: list; the first node runs it once.
    shared: folder that the nodes see as well; job.log in it is what the job prints. bound: cancel the job when the
    process that has started this one is killed.
    """
    own = ["bound" if bound else "free", path, str(n), json.dumps(options), shared]
    return [sys.executable, "-m", "hpdl_lab.engines.slurm_job", *own, *command]


class Job:
    """The job of `n` engines."""

    def __init__(self, path, n, options, shared, command):
        self.path, self.n, self.options, self.shared, self.python = path, n, options, shared, command[0]
        self.script = SCRIPT.format(
            shared=shlex.quote(shared), not_shared=slurm_reasons.NOT_SHARED, command=shlex.join(command)
        )
        self.name = f"hpdl-{secrets.token_hex(4)}"
        self.log = os.path.join(shared, "job.log")
        self.number = ""
        self.told = {}
        self.doubt = None, 0.0  # why it can never start, since when

    def submit(self):
        """Have sbatch take the job; False when it does not, which is told."""
        asked = slurm_options.arguments(self.n, self.options)
        own = ["--parsable", "--no-requeue", "--export=ALL", f"--job-name={self.name}", f"--output={self.log}"]
        try:
            code, out, err = slurm_queue.command(["sbatch", *own, *asked], self.script, slurm_reasons.FULL)
        except FileNotFoundError:
            self.tell("ended", text=slurm_reasons.NO_SLURM.format(n=self.n))
            return False
        if code != 0 or not out.strip():
            if code < 0:  # it was not waited for any longer: perhaps the job has been taken meanwhile
                self.cancel()
            self.tell("ended", text=slurm_reasons.refusal(err, self.n, " ".join(asked), slurm_queue.partitions))
            return False
        self.number = out.strip().partition(";")[0]  # behind it, the cluster's name
        return True

    def watch(self):
        """Tell how the job is doing until it has ended, or has waited for too long."""
        give_up = time.monotonic() + slurm_options.wait(self.options)
        interval, missing = FIRST_LOOK, 0
        while True:
            job = slurm_queue.job(self.number)
            missing = missing + 1 if job is None else 0
            if missing == FORGOTTEN:
                return self.tell("ended", text=f"Slurm knows nothing of job {self.number} any more: it has ended")
            before = self.told
            if job:
                state = job["JobState"]
                if state in LAST:
                    return self.tell_end(job)
                if state in ("PENDING", "CONFIGURING"):
                    self.tell_wait(job)
                    if text := self.hopeless(job) or self.waited_out(give_up):
                        self.cancel()
                        return self.tell("ended", text=text)
                elif state == "RUNNING" and before.get("state") != "running":
                    hosts = slurm_queue.hosts(job["NodeList"])
                    text = f"Slurm job {self.number} runs on {', '.join(hosts)}"
                    self.tell("running", text=text, hosts=hosts, partition=job["Partition"])
            interval = FIRST_LOOK if self.told != before else min(1.3 * interval, LAST_LOOK)
            slurm_queue.pause(interval)

    def hopeless(self, job):
        """The sentence for a job that can never start; None for another.

        A reason is believed when it lasts: at first Slurm gives reasons of which it thinks better a moment later.
        """
        text, now = slurm_reasons.never(job), time.monotonic()
        if text is None or text != self.doubt[0]:
            self.doubt = text, now
        return text if now - self.doubt[1] > DOUBT else None

    def waited_out(self, give_up):
        """The sentence for a job that has waited for too long; "" while it has not."""
        if time.monotonic() < give_up:
            return ""
        seconds = slurm_options.wait(self.options)
        return (
            f"{self.told['text']}. It was cancelled after {seconds} s in the queue: wait={2 * seconds} waits longer; "
            f"fewer engines, or less time=, may start sooner"
        )

    def tell_wait(self, job):
        start = job["StartTime"] if job["StartTime"] != "Unknown" else ""
        ahead = slurm_queue.place(self.number, job["Partition"])
        text = slurm_reasons.waiting(job, ahead, start)
        self.tell("pending", text=text, reason=job["Reason"], start=start, partition=job["Partition"])

    def tell_end(self, job):
        nodes = slurm_queue.failed(job["NodeList"]) if job["JobState"] == "NODE_FAIL" else {}
        text = slurm_reasons.ending(job, nodes, last_line(self.log), self.shared, self.python)
        self.tell("ended", text=text, reason=job["Reason"], partition=job["Partition"])

    def tell(self, state, text, reason="", start="", partition="", hosts=()):
        """Write job.json, all at once, when something has changed."""
        told = {"state": state, "id": self.number, "text": text, "reason": reason, "start": start}
        told |= {"partition": partition, "hosts": list(hosts)}
        if told == self.told:
            return
        self.told = told
        with contextlib.suppress(FileNotFoundError):  # the session has ended
            session_dir.write(session_dir.job_file(self.path), json.dumps(told))

    def cancel(self):
        """End the job, by its name: sbatch may not have told the number."""
        give_up = time.monotonic() + CANCEL_SECONDS
        argv = ["scancel", f"--name={self.name}", f"--user={os.getuid()}"]
        while time.monotonic() < give_up:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                done = subprocess.run(argv, timeout=CANCEL_SECONDS, preexec_fn=slurm_queue.unblock_signals)
                if done.returncode == 0:
                    return
            time.sleep(0.5)


def last_line(log):
    """The last line of the job's output that says something; "" where there is none."""
    try:
        with open(log, errors="replace") as file:
            lines = [line.strip() for line in file.read()[-8000:].splitlines()]
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line), "")


def main():
    bound, path, n, options, shared, *command = sys.argv[1:]
    slurm_queue.block_signals()
    if bound == "bound":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return
    os.umask(0o077)
    job = Job(path, int(n), json.loads(options), shared, command)
    try:
        if job.submit():
            job.watch()
    except slurm_queue.Ended:
        job.cancel()


if __name__ == "__main__":
    main()
