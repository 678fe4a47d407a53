"""How a cluster is laid out: how many engines, where (here, on emulated hosts, in a Slurm job), on which device."""

from typing import NamedTuple

from . import link as links
from . import slurm_options

PLACES = ("local", "emulated", "slurm")
DEVICES = ("cpu", "cuda")
MOST_HOSTS = 64  # each is a network of its own to the system; a lesson needs four
DEFAULT_LINK = "1gbit"


class Layout(NamedTuple):
    """n: engines. where: of PLACES. hosts, link: of emulated hosts, else 0 and "". device: of DEVICES.

    job: what is asked of Slurm, as slurm_options.checked returns it; {} elsewhere.
    """

    n: int
    where: str = "local"
    hosts: int = 0
    link: str = ""
    device: str = "cpu"
    job: dict = {}

    def __str__(self):
        engines = "1 engine" if self.n == 1 else f"{self.n} engines"
        gpu = " on GPUs" if self.device == "cuda" else ""
        hosts = f" on {self.hosts} emulated host{'s' * (self.hosts > 1)} at {self.link}" if self.hosts else ""
        return f"{engines}{gpu}{hosts}{' in a Slurm job' if self.where == 'slurm' else ''}"

    @property
    def remarks(self):
        """What to know of engines that are laid out so: sentences without their full stops."""
        if not self.hosts:
            return []
        return [f"messages between hosts take their time on links of {self.link} each way, through one switch"]

    def asked(self):
        """As arguments of `wanted`."""
        said = self._asdict()
        job = said.pop("job")
        return (said if self.hosts else said | {"hosts": None, "link": None}) | job


def wanted(n, where=None, link=None, hosts=None, device=None, running=None, **job):
    """The Layout that was asked for; what was not said stays as it is in `running`, or is the default.

    job: what is asked of Slurm: see slurm_options.checked.
    Raises: ValueError for what makes no sense; whether this machine can do it, launch.check says.
    """
    check_whole(n, "the number of engines", "lab.start(4)")
    if n < 1:
        raise ValueError(f"{n} engines cannot do anything: start at least 1, as in lab.start(4)")
    if unknown := set(job) - set(slurm_options.NAMES):
        raise TypeError(f"unknown: {', '.join(sorted(unknown))}=; Slurm is asked by {', '.join(slurm_options.NAMES)}")
    job = {name: value for name, value in job.items() if value is not None}
    place = choice("where", where, PLACES) or (running.where if running else None) or implied(link, hosts, job)
    if place != "slurm" and job:
        raise ValueError(f'{next(iter(job))}= belongs to a Slurm job: lab.start(4, where="slurm", partition="...")')
    if place != "emulated" and (link is not None or hosts is not None):
        raise ValueError('link= and hosts= belong to emulated hosts: lab.start(4, where="emulated", link="1gbit")')
    same = running if running and running.where == place else None
    device = choice("device", device, DEVICES) or (running.device if running else "cuda" if job.get("gpus") else "cpu")
    if place == "slurm":
        job = slurm_options.checked((same.job if same else {}) | job, n)
        return Layout(n, place, device=device, job=job)
    if place == "local":
        return Layout(n, device=device)
    if hosts is None:
        hosts = same.hosts if same and same.n == n else n
    check_whole(hosts, "the number of hosts", 'lab.start(4, where="emulated")')
    if not 1 <= hosts <= min(n, MOST_HOSTS):
        raise ValueError(f"hosts={hosts}: from 1 to {min(n, MOST_HOSTS)} hosts can share {n} engines")
    link = str(links.parse(link if link is not None else same.link if same else DEFAULT_LINK))
    return Layout(n, place, hosts, link, device)


def implied(link, hosts, job):
    """The place that the other arguments speak of."""
    if job:
        return "slurm"
    return "local" if link is None and hosts is None else "emulated"


def check_whole(number, what, example):
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"{what} is a whole number, got {number!r}: {example}")


def choice(name, value, known):
    """`value`, None included. Raises ValueError unless it is one of `known`."""
    if value is not None and value not in known:
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, known))} is needed")
    return value
