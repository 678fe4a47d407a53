"""What may be asked of Slurm for the job of the engines, and the options of `sbatch` that say so.

What is not here is set as for any job of the site: sbatch reads SBATCH_CONSTRAINT, SBATCH_MEM_PER_CPU and others.
"""

import re

WAIT = 600  # s in the queue, unless said otherwise
TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+|\d+-\d+:\d\d|\d+-\d+:\d\d:\d\d")  # as `man sbatch` lists them
NAME = re.compile(r"[^\s\x00-\x1f]+")
NAMED = ("partition", "account", "qos", "reservation")
NUMBERS = ("nodes", "gpus", "wait")
NAMES = (*NAMED, *NUMBERS, "time")
EXAMPLE = 'lab.start(8, where="slurm", partition="gpu", nodes=2, gpus=1, time="1:00:00")'


def checked(said, n):
    """`said` of the job of `n` engines, fit for JSON: {one of NAMES: value}.

    partition, account, qos, reservation: as the site names them.
    nodes: that share the engines evenly. gpus: for each engine.
    time: of the job; minutes, or as Slurm spells it, such as "1:30:00".
    wait: seconds that the job may wait in the queue before it is given up; default 600.

    Raises: ValueError with the numbers.
    """
    for name, value in said.items():
        if name in NAMED and not (isinstance(value, str) and NAME.fullmatch(value)):
            raise ValueError(f"{name}={value!r}: a name without blanks is needed, as in {EXAMPLE}")
        if name in NUMBERS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: a whole number from 1 on is needed, as in {EXAMPLE}")
    if said.get("nodes", 1) > n:
        raise ValueError(f"nodes={said['nodes']}: {n} engines can share {n} nodes at most")
    time = said.get("time", 1)
    if isinstance(time, bool) or not TIME.fullmatch(str(time)):
        raise ValueError(f'time={time!r}: minutes, "hours:minutes:seconds" or "days-hours" are needed, as in {EXAMPLE}')
    return said | {"time": str(time)} if "time" in said else said


def arguments(n, options):
    """The options of sbatch for `n` engines; `options` as `checked` returns them."""
    found = [f"--ntasks={n}"]
    found += [f"--{name}={options[name]}" for name in (*NAMED, "time") if name in options]
    if nodes := options.get("nodes"):
        found += [f"--nodes={nodes}", f"--ntasks-per-node={-(-n // nodes)}"]
    if "gpus" in options:
        found.append(f"--gpus-per-task={options['gpus']}")
    return found


def wait(options):
    """Seconds that the job may wait."""
    return options.get("wait", WAIT)
