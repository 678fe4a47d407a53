"""The layout of a cluster: how many engines, where (here, emulated, in a job, beside ipyparallel), which device."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from ..units import require_int

Options: TypeAlias = dict[str, Any]  # of a Slurm job: see checked_job_options

QUEUE_SECONDS = 600  # s in the queue, unless said otherwise
CLIENT_SECONDS = 30  # s for the engines of a cluster that runs already, likewise
TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+|\d+-\d+:\d\d|\d+-\d+:\d\d:\d\d")  # as `man sbatch` lists them
NAME = re.compile(r"[^\s\x00-\x1f]+")
NAMED = ("partition", "account", "qos", "reservation", "queue")
NUMBERS = ("nodes", "gpus", "wait")
NAMES = ("partition", "account", "qos", "reservation", *NUMBERS, "time")
TAKEN = {  # by each place
    "slurm": NAMES,
    "pbs": ("queue", "account", *NUMBERS, "time"),
    "lsf": ("queue", "account", *NUMBERS, "time"),
    "ssh": ("hosts", "wait"),
    "ipyparallel": ("connection", "profile", "name", "wait"),
}
COMMANDS = {"pbs": "qsub", "lsf": "bsub", "ssh": "ssh"}  # by which ipyparallel starts engines there
CLUSTER = {"connection", "profile"}  # one of them is said of a cluster of ipyparallel
EXAMPLE = 'lab.start(8, where="slurm", partition="gpu", nodes=2, gpus=1, time="1:00:00")'


def checked_job_options(said: Options, n: int) -> Options:
    """Return the options `said` for the job of `n` engines, fit for JSON: {one of NAMES: value}.

    partition, account, qos, reservation: as the site names them.
    nodes: that share the engines evenly. gpus: for each engine.
    time: of the job; minutes, or as Slurm spells it, such as "1:30:00".
    wait: seconds that the job may wait in the queue before it is given up; default 600.

    Raises: ValueError with the numbers.
    """
    for name, value in said.items():
        if name in NAMED and not (isinstance(value, str) and NAME.fullmatch(value)):
            raise ValueError(f"{name}={value!r}: a name without blanks is needed, as in {EXAMPLE}")
        if name in NUMBERS:
            require_int(name, value, least=1)
    if "nodes" in said:
        require_int(f"nodes for {n} engines", said["nodes"], 1, n)
    time = said.get("time", 1)
    if isinstance(time, bool) or not TIME.fullmatch(str(time)):
        raise ValueError(f'time={time!r}: minutes, "hours:minutes:seconds" or "days-hours" are needed, as in {EXAMPLE}')
    return said | {"time": str(time)} if "time" in said else said


def minutes(time: str) -> int:
    """Return the minutes, rounded up, of a time as `checked_job_options` takes it: "90", "1:30:00", "1-12"."""
    days, _, clock = str(time).rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:  # hours, hours:minutes, ...
        hours, minute, second = [*parts, 0, 0][:3]
    else:  # minutes, minutes:seconds, hours:minutes:seconds
        hours, minute, second = [[0, *parts, 0], [0, *parts], parts][len(parts) - 1]
    return (int(days or 0) * 24 + hours) * 60 + minute + (second > 0)


def sbatch_arguments(n: int, options: Options) -> list[str]:
    """Return the options of sbatch for `n` engines; `options` as `checked_job_options` returns them."""
    found = [f"--ntasks={n}"]
    found += [f"--{name}={options[name]}" for name in (*NAMED, "time") if name in options]
    if nodes := options.get("nodes"):
        found += [f"--nodes={nodes}", f"--ntasks-per-node={-(-n // nodes)}"]
    if "gpus" in options:
        found.append(f"--gpus-per-task={options['gpus']}")
    return found


def queue_seconds(options: Options) -> int:
    """Return the seconds that the job may wait."""
    return options.get("wait", QUEUE_SECONDS)


UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # bit/s
SLOWEST, FASTEST = 10**6, 10**11  # bit/s: slower, engines do not start in time; no processor moves more

LATE_S = 0.5e-3  # s: timers may come that late
LARGEST_PACKET, SMALLEST_PACKET = 65_536, 9_000  # bytes that TCP may hand over at once, to be cut by the interface
HEADERS = 2_500  # bytes, of the parts of the largest packet
WINDOW_S, SMALLEST_WINDOW = 2e-3, 256 << 10  # s, bytes: that may be under way between two hosts
QUEUE_NBYTES = 64 << 20  # room for the windows of all senders to one host: nothing is lost, as under flow control


class LinkRate(NamedTuple):
    """A link of `bits` per second in each direction."""

    bits: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bits / 8

    @property
    def packet(self) -> int:
        """Bytes of the largest packet that TCP hands over: a slow link would be one packet's for too long."""
        return min(max(int(self.bandwidth * LATE_S), SMALLEST_PACKET), LARGEST_PACKET)

    @property
    def burst(self) -> int:
        """Bytes that may pass at once after a pause."""
        return max(self.packet + HEADERS, int(self.bandwidth * LATE_S))

    def tbf(self) -> str:
        """Return the arguments of `tc qdisc`: the token bucket that shapes one direction."""
        return f"tbf rate {self.bits}bit burst {self.burst} limit {QUEUE_NBYTES}"

    def windows(self) -> dict[str, str]:
        """Return files in /proc/sys/net and what they hold: how much TCP may have under way."""
        most = max(SMALLEST_WINDOW, int(self.bandwidth * WINDOW_S))
        return {"ipv4/tcp_rmem": f"4096 131072 {most}", "ipv4/tcp_wmem": f"4096 65536 {most}"}

    def __str__(self) -> str:
        unit = next(unit for unit in reversed(UNITS) if self.bits >= UNITS[unit])
        return f"{self.bits / UNITS[unit]:.12g}{unit}"


def parse_link(text: str) -> LinkRate:
    """Read a link: "1gbit" -> Link(1000000000). Raises ValueError with the spelling that is wanted."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)([kmg]bit)", text.strip().lower()) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f'link={text!r}: a speed as tc spells it is needed, such as "100mbit", "1gbit" or "10gbit"')
    link = LinkRate(round(float(found[1]) * UNITS[found[2]]))
    if not SLOWEST <= link.bits <= FASTEST:
        raise ValueError(f"link={text!r}: from {LinkRate(SLOWEST)} to {LinkRate(FASTEST)} can be emulated")
    return link


PLACES = ("local", "emulated", "slurm", "pbs", "lsf", "ssh", "ipyparallel")
DEVICES = ("cpu", "cuda")
MOST_HOSTS = 64  # each is a network of its own to the system; a lesson needs four
DEFAULT_LINK = "1gbit"


class Layout(NamedTuple):
    """The number `n` of engines, and where they are: one of PLACES. device: one of DEVICES.

    hosts, link: of emulated hosts, else 0 and "".
    job: what is asked of Slurm, PBS or LSF, as layout.checked_job_options returns it; {"hosts": [...]} for ssh;
    {"connection": of a client} or {"profile": its folder}, and {"name"}, for a cluster of ipyparallel; {} elsewhere.
    """

    n: int
    where: str = "local"
    hosts: int = 0
    link: str = ""
    device: str = "cpu"
    job: Options = {}

    def __str__(self) -> str:
        engines = "1 engine" if self.n == 1 else f"{self.n} engines"
        gpu = " on GPUs" if self.device == "cuda" else ""
        hosts = f" on {self.hosts} emulated host{'s' * (self.hosts > 1)} at {self.link}" if self.hosts else ""
        jobs = {"slurm": " in a Slurm job", "pbs": " in a PBS job", "lsf": " in an LSF job", "ssh": " on hosts by ssh"}
        jobs["ipyparallel"] = " on the hosts of an ipyparallel cluster"
        return f"{engines}{gpu}{hosts}{jobs.get(self.where, '')}"

    @property
    def remote(self) -> bool:
        """True if the engines are on machines that others have chosen: see remote.py."""
        return self.where in TAKEN

    @property
    def remarks(self) -> list[str]:
        """Remarks on engines that are laid out so: sentences without their full stops."""
        if not self.hosts:
            return []
        return [f"messages between hosts take their time on links of {self.link} each way, through one switch"]

    def asked(self) -> Options:
        """Return it as arguments of `wanted`."""
        said = self._asdict()
        job = said.pop("job")
        return (said if self.hosts else said | {"hosts": None, "link": None}) | job


def wanted(
    n: int,
    where: str | None = None,
    link: str | None = None,
    hosts: int | Sequence[str] | None = None,
    device: str | None = None,
    running: Layout | None = None,
    **job: Any,
) -> Layout:
    """Return the Layout that was asked for; what was not said stays as it is in `running`, or is the default.

    hosts: how many are emulated; or the names of hosts that ssh reaches.
    job: what is asked of a batch system: see layout.checked_job_options.
    Raises: ValueError for what makes no sense; whether this machine can do it, launch.check_layout says.
    """
    require_int("the number of engines", n, least=1)
    if unknown := set(job) - {name for names in TAKEN.values() for name in names}:
        raise TypeError(f"unknown: {', '.join(sorted(unknown))}=; Slurm is asked by {', '.join(NAMES)}")
    job = {name: value for name, value in job.items() if value is not None}
    if hosts is not None and not isinstance(hosts, int):
        job["hosts"], hosts = _host_names(hosts), None
    implied = _implied(job) if job else "local" if link is None and hosts is None else "emulated"
    place = _choice("where", where, PLACES) or (running.where if running else None) or implied
    for name in job:
        if name not in TAKEN.get(place, ()):
            homes = [home for home, names in TAKEN.items() if name in names]
            example = {"slurm": EXAMPLE, "ssh": 'lab.start(4, where="ssh", hosts=["n1", "n2"])'}.get(homes[0], "")
            example = example or f'lab.start(4, where="{homes[0]}", ...)'
            raise ValueError(f"{name}= belongs to where={' or '.join(map(repr, homes))}: {example}")
    if place != "emulated" and (link is not None or hosts is not None):
        raise ValueError('link= and hosts= belong to emulated hosts: lab.start(4, where="emulated", link="1gbit")')
    same = running if running and running.where == place else None
    device = _choice("device", device, DEVICES) or (running.device if running else "cuda" if job.get("gpus") else "cpu")
    if place in TAKEN:
        before = same.job if same else {}
        if CLUSTER & set(job):  # it may be another one, with another name
            same_one = "connection" in job and job["connection"] == before.get("connection")
            before = {name: value for name, value in before.items() if name == "wait"}
            if same_one and same:  # by another name
                job = {name: value for name, value in job.items() if name != "name"}
                before |= {name: value for name, value in same.job.items() if name == "name"}
        job = checked_job_options(before | job, n)
        if place == "ssh" and not job.get("hosts"):
            raise ValueError('where="ssh" needs the names of hosts: lab.start(4, where="ssh", hosts=["n1", "n2"])')
        if place == "ipyparallel" and not CLUSTER & set(job):
            raise ValueError('where="ipyparallel" needs a cluster: lab.start(profile="site"), or client=, or cluster=')
        return Layout(n, place, device=device, job=job)
    if place == "local":
        return Layout(n, device=device)
    if hosts is None:
        hosts = same.hosts if same and same.n == n else n
    require_int(f"the number of hosts for {n} engines", hosts, 1, min(n, MOST_HOSTS))
    link = str(parse_link(link if link is not None else same.link if same else DEFAULT_LINK))
    return Layout(n, place, hosts, link, device)


def _implied(job: Options) -> str:
    """Return the place to which the options `job` belong, if `where` is not said."""
    return next((place for place, names in TAKEN.items() if set(job) <= set(names)), "slurm")


def _host_names(said: object) -> list[str]:
    """Return the names of hosts. Raises ValueError."""
    names = list(said) if isinstance(said, list | tuple) else []
    if not names or not all(isinstance(name, str) and NAME.fullmatch(name) for name in names):
        raise ValueError(f'hosts={said!r}: how many to emulate, or a list of names that ssh knows, such as ["n1"]')
    return names


def _choice(name: str, value: str | None, known: tuple[str, ...]) -> str | None:
    """Return `value`, None included. Raises ValueError unless it is one of `known`."""
    if value is not None and value not in known:
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, known))} is needed")
    return value
