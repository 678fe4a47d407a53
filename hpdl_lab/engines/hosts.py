r"""The process that makes the emulated hosts of a cluster, and holds them until it is killed.

                      bridge "switch"                     in a network namespace of its own
         port0 |     port1 |     port2 |     port3 |      to a host: tc tbf at the port
          veth |      veth |      veth |      veth |      10.77.0.1, 10.77.0.2, ...
          net0 |      net0 |      net0 |      net0 |      from a host: tc tbf at net0
            host0       host1       host2       host3     each with a network and a host name of its own

No namespace has a name in the file system: this process and the engines hold them, so they vanish with these processes,
whatever ends them, and the links with them. Hosts share files and process numbers with the machine: all processes talk
over Unix sockets as they do without hosts.

    python -m hpdl_lab.engines.hosts DIRECTORY HOSTS BITS_PER_SECOND IP TC     the supervisor starts this one
    python -m hpdl_lab.engines.hosts engine                                    mpiexec starts these
    python -m hpdl_lab.engines.hosts shell DIRECTORY HOST                      `hpdl cluster shell`

When all is there the first writes hosts.json into the session directory: the paths of the namespaces of each host, in
the order to enter them. With DIRECTORY "-" it only tries: it ends at once, and says what is in the way.

Nothing that starts threads, as NumPy does, may be imported here: with threads, no user namespace can be entered.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys

from .layout import LinkRate
from .supervisor import die_with_parent

MOUNTS, NAMES, USERS, NETWORK = 0x00020000, 0x04000000, 0x10000000, 0x40000000  # CLONE_NEW... of linux/sched.h
BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18  # MS_... of linux/mount.h

SYSTEM = ctypes.CDLL(None, use_errno=True)


def _system_call(name: str, *arguments: object) -> None:
    """Call `name` of the C library. Raises OSError that names the call."""
    if getattr(SYSTEM, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _join_namespaces(paths: list[str]) -> None:
    """Enter the namespaces at `paths`, which are all opened first: a path may change once the first is entered."""
    for handle in [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]:
        _system_call("setns", handle, 0)
        os.close(handle)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    """Mount `source` on `target`, for this mount namespace."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _system_call("mount", *encoded, ctypes.c_ulong(flags), None)


SUBNET = "10.77.0"
INTERFACE = "net0"  # of every host
MTU = 9000  # bytes: jumbo frames, as cluster networks have: fewer packets for the processor, less lost to headers
SETTINGS = {  # files in /proc/sys/net, which every network namespace has of its own
    "ipv6/conf/default/disable_ipv6": "1",  # one address for each host
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_limit_output_bytes": str(128 << 10),  # a long queue at the link would keep short answers waiting
}
REFUSED = (
    "emulated hosts need root, or network namespaces for every user, which this system refuses ({why}): run as root, "
    "or have root call sysctl -w kernel.unprivileged_userns_clone=1 (Debian) or "
    "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); "
    "a container needs --privileged, a hub --emulated"
)


def namespaces_file(path: str) -> str:
    """Return the path of the file by which an engine finds its host's namespaces, in the session directory `path`."""
    return os.path.join(path, "hosts.json")


class Refused(Exception):
    """A reason why no hosts can be made here; the message is one sentence with the remedy."""


class _Switch:
    """The bridge that joins the hosts; `ip` and `tc` are the paths of these commands."""

    def __init__(self, link: LinkRate, ip: str, tc: str) -> None:
        self.link, self.ip, self.tc = link, ip, tc
        self.held: list[int] = []  # handles of open files; each keeps a namespace
        self.users = [f"/proc/{os.getpid()}/ns/user"] if _enter_new_namespaces() else []
        mount("none", "/", flags=PRIVATE | RECURSIVE)
        self.mounts, self.network = self.hold("mnt"), self.hold("net")
        _batch(ip, "link add switch type bridge", f"link set switch mtu {MTU} up")

    def hold(self, kind: str) -> str:
        """Keep the namespace of `kind` in which this process is; return a path at which others can join it."""
        self.held.append(os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC))
        return f"/proc/{os.getpid()}/fd/{self.held[-1]}"

    def add_host(self, number: int) -> list[str]:
        """Make host `number` and join it to the switch; return the paths of its namespaces."""
        _system_call("unshare", NETWORK | NAMES)
        socket.sethostname(f"host{number}")
        paths = [*self.users, self.mounts, self.hold("net"), self.hold("uts")]
        for name, value in (SETTINGS | self.link.windows()).items():
            if os.path.exists(file := f"/proc/sys/net/{name}"):  # a system may be without IPv6
                write(file, value)
        veth = f"name {INTERFACE} mtu {MTU} type veth peer name port{number} mtu {MTU} netns {self.network}"
        _batch(self.ip, "link set lo up", f"link add {veth}", f"addr add {SUBNET}.{number + 1}/24 dev {INTERFACE}")
        self.shape(INTERFACE)
        _join_namespaces([self.network])
        _batch(self.ip, f"link set port{number} master switch")
        self.shape(f"port{number}")
        return paths

    def shape(self, interface: str) -> None:
        """Give what leaves by `interface` the speed of the link, and bring it up."""
        _batch(self.ip, f"link set {interface} gso_max_size {self.link.packet} up")
        _batch(self.tc, f"qdisc add dev {interface} root {self.link.tbf()}")


def _enter_new_namespaces() -> bool:
    """Enter new namespaces for the switch; return True if that took a user namespace, in which this user is root."""
    kinds = NETWORK | MOUNTS
    try:
        _system_call("unshare", kinds)
        return False
    except PermissionError:
        pass
    uid, gid = os.geteuid(), os.getegid()
    try:
        _system_call("unshare", USERS)
        for name, value in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            write(f"/proc/self/{name}", value)
        _system_call("unshare", kinds)
    except OSError as error:
        raise Refused(REFUSED.format(why=error.strerror)) from None
    return True


def _write_names(path: str, count: int) -> None:
    """Let hosts be looked up by name: what is /etc/hosts for them."""
    write(file := os.path.join(path, "hosts.names"), "127.0.0.1 localhost\n")
    with open(file, "a") as names:
        names.writelines(f"{SUBNET}.{number + 1} host{number}\n" for number in range(count))
    mount(file, "/etc/hosts", flags=BIND)


def write(file: str, text: str) -> None:
    with open(file, "w") as opened:
        opened.write(text)


def _batch(command: str, *lines: str) -> None:
    """Have `ip` or `tc` do `lines`, in the namespaces where this process is now."""
    done = subprocess.run([command, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        said = [*done.stderr.splitlines(), *done.stdout.splitlines(), f"exit code {done.returncode}"]
        raise Refused(f"the emulated network cannot be made: {os.path.basename(command)} says: {said[0]}")


def _make() -> None:
    path, count, link = sys.argv[1], int(sys.argv[2]), LinkRate(int(sys.argv[3]))
    try:
        switch = _Switch(link, *sys.argv[4:])
        if path == "-":
            switch.add_host(0)
            return
        _write_names(path, count)
        hosts = [switch.add_host(number) for number in range(count)]
    except (Refused, OSError) as error:
        raise SystemExit(str(error)) from None
    die_with_parent()  # a new user namespace has cleared what the supervisor had set
    ready = namespaces_file(path)
    write(f"{ready}.new", json.dumps(hosts))
    os.rename(f"{ready}.new", ready)
    signal.pause()


def count_hosts(path: str) -> int:
    """Return how many emulated hosts the session at `path` has."""
    try:
        with open(namespaces_file(path)) as file:
            return len(json.load(file))
    except OSError:
        return 0


def enter(path: str, number: int) -> None:
    """Move this process to emulated host `number` of the session at `path`."""
    folder = os.getcwd()
    with open(namespaces_file(path)) as file:
        paths = json.load(file)[number]
    _join_namespaces(paths)
    os.chdir(folder)  # with new mounts, a process starts in the root directory


def _be_engine() -> None:
    """Be an engine on its emulated host: enter the namespaces of the host first (engine.py)."""
    rank, size, hosts = (int(os.environ[name]) for name in ("PMI_RANK", "PMI_SIZE", "HPDL_HOSTS"))
    enter(os.environ["HPDL_SESSION"], rank * hosts // size)  # neighbors share a host if there are more ranks than hosts
    from . import engine

    engine.main()


def _be_shell(path: str, number: str) -> None:
    """Be a shell on emulated host `number` of the session at `path`."""
    enter(path, int(number))
    shell = os.environ.get("SHELL", "/bin/sh")
    os.execvp(shell, [shell])


def _main() -> None:
    if sys.argv[1] == "engine":
        _be_engine()
    elif sys.argv[1] == "shell":
        _be_shell(*sys.argv[2:])
    else:
        _make()


if __name__ == "__main__":
    _main()
