"""What Slurm says, in sentences for attendees: why a job was refused, why it waits, how it ended, and what to do.

Each table is in the order in which it is looked through. The words on the left are Slurm's own.
"""

import re
import signal

NO_SLURM = (
    "this machine has no command sbatch, so it cannot ask Slurm for engines: use a login node of the cluster, "
    "or engines of this machine, lab.start({n})"
)
FULL = "temporarily unable to accept job"  # after which sbatch tries again and again
REFUSED = (  # what sbatch says -> the cause and the remedy; {partitions}: those of the site, {slurm}: what it said
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

NOT_SHARED, NOT_REACHED = 66, 67  # exit codes of the engines' side
BY_EXIT = {  # the exit code of a job that has failed by itself; {log}: the last line that it wrote
    NOT_SHARED: "the nodes do not see the folder {shared} of this machine: set HPDL_SHARED to a folder that they do, "
    "for most sites one below the home directory or the scratch file system",
    NOT_REACHED: "{log}",
    126: "the nodes cannot run {python}: install this environment where the nodes see it",
    127: "the nodes do not have {python}: install this environment where the nodes see it",
}
NO_OUTPUT_FILE = "0:53"  # how Slurm says that the folder of a job's output is not there


def refusal(said, n, asked, partitions):
    """The sentence for what sbatch printed instead of taking the job.

    Args:    n: engines. asked: the options of sbatch. partitions: a function that returns the names of those there are.
    """
    last = said.strip().rpartition("\n")[2] or "nothing"
    slurm = re.sub(r"^sbatch: (error|fatal): (Batch job submission failed: )?", "", last)
    for words, remedy in REFUSED:
        if re.search(words, said):
            known = {"n": n, "slurm": slurm, "asked": asked}
            if "{partitions}" in remedy:
                known["partitions"] = partitions()
            return f"Slurm refused the job: {remedy.format(**known)}"
    return f"Slurm refused the job: {slurm}"


def waiting(job, ahead, start):
    """The sentence for a job that waits. job: as `scontrol` shows it; ahead: jobs before it; start: such as "14:05"."""
    reason = job["Reason"]
    why = WAITS.get(reason, reason)
    if reason.startswith("ReqNodeNotAvail"):
        why = "nodes that it needs are down, or reserved for others"
    text = f"Slurm job {job['JobId']} waits in partition {job['Partition']}: {why} ({reason})"
    if ahead:
        text += f"; {ahead} job{'s' * (ahead > 1)} before it"
    return text + (f"; Slurm expects it to start at {start}" if start else "")


def never(job):
    """The sentence for a job that will never start as it is; None for one that may."""
    reason = job["Reason"].partition(",")[0]
    remedy = NEVER.get(reason)
    if remedy is None and NEVER_PATTERN.fullmatch(reason):
        remedy = f"it exceeds a limit ({reason}): ask for fewer engines, fewer nodes or less time"
    if remedy is None:
        return None
    return f"Slurm job {job['JobId']} would never start in partition {job['Partition']}: {remedy}"


def ending(job, failed, log, shared, python):
    """The sentence for a job that has ended.

    Args:    job: as `scontrol` shows it. failed: {node that does not answer: what Slurm says of it}.
             log: the last line that the job has written. shared: the folder for what machines tell each other.
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
