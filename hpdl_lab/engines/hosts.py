r"""The process that makes the emulated hosts of a cluster, and holds them until it is killed.

                      bridge "switch"                     in a network namespace of its own
         port0 |     port1 |     port2 |     port3 |      to a host: tc tbf at the port
          veth |      veth |      veth |      veth |      10.77.0.1, 10.77.0.2, ...
          net0 |      net0 |      net0 |      net0 |      from a host: tc tbf at net0
            host0       host1       host2       host3     each with a network, a host name and mounts of its own

No namespace has a name in the file system: this process and the engines hold them, so they vanish with these processes,
whatever ends them, and the links with them. Hosts share files and process numbers with the machine: notebook, keeper
and engines talk over Unix sockets as they do without hosts.

Started by the keeper as `python -m hpdl_lab.engines.hosts DIRECTORY HOSTS BITS_PER_SECOND IP TC`. When all is there it
writes hosts.json into the session directory: {"user": path or null, "hosts": [[paths of the namespaces], ...]}.
"""

import json
import os
import signal
import socket
import subprocess
import sys

from . import namespaces, session_dir
from .link import Link

SUBNET = "10.77.0"
INTERFACE = "net0"  # of every host
MTU = 9000  # bytes: jumbo frames, as cluster networks have: fewer packets for the processor, less lost to headers
REFUSED = (
    "emulated hosts need root, or network namespaces for every user, which this system refuses ({why}): "
    "run as root, or have root call sysctl -w kernel.unprivileged_userns_clone=1 (Debian) or "
    "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); a container needs --privileged"
)
TCP = {  # files in /proc/sys/net/ipv4, which every network namespace has of its own
    "tcp_congestion_control": "reno",
    "tcp_limit_output_bytes": str(128 << 10),  # a long queue at the link would keep short answers waiting
}


class Refused(Exception):
    """The hosts cannot be made here; the message is one sentence with the remedy."""


class Switch:
    """The bridge that joins the hosts; `ip` and `tc` are the paths of these commands."""

    def __init__(self, link, ip, tc):
        self.link, self.ip, self.tc = link, ip, tc
        self.held = []  # open files, each of which keeps a namespace
        self.is_user = enter_new_namespaces()
        namespaces.mount("none", "/", flags=namespaces.PRIVATE | namespaces.RECURSIVE)
        self.network, _ = [self.hold(kind) for kind in ("net", "mnt")]
        batch(ip, "link add switch type bridge", f"link set switch mtu {MTU} up")

    def hold(self, kind):
        """Keep the namespace of `kind` in which this process is; returns a path at which others can join it."""
        self.held.append(os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC))
        return f"/proc/{os.getpid()}/fd/{self.held[-1]}"

    def add_host(self, number):
        """Make host `number` and join it to the switch; returns the paths of its namespaces."""
        namespaces.unshare(namespaces.NETWORK | namespaces.NAMES | namespaces.MOUNTS)
        socket.sethostname(f"host{number}")
        paths = [self.hold(kind) for kind in ("net", "uts", "mnt")]
        namespaces.mount("sysfs", "/sys", "sysfs")  # MPI libraries look there for the network interfaces
        veth = f"name {INTERFACE} mtu {MTU} type veth peer name port{number} mtu {MTU} netns {self.network}"
        address = f"addr add {SUBNET}.{number + 1}/24 dev {INTERFACE}"
        batch(self.ip, "link set lo up", f"link add {veth}", address, f"link set {INTERFACE} up")
        batch(self.tc, f"qdisc add dev {INTERFACE} root {self.link.tbf()}")
        for name, value in TCP.items():
            with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
                file.write(value)
        for handle in self.held[:2]:
            namespaces.join(handle)
        batch(self.ip, f"link set port{number} master switch up")
        batch(self.tc, f"qdisc add dev port{number} root {self.link.tbf()}")
        return paths


def enter_new_namespaces():
    """New namespaces for the switch; returns whether that took a user namespace too, in which this user is root."""
    kinds = namespaces.NETWORK | namespaces.MOUNTS
    try:
        namespaces.unshare(kinds)
        return False
    except PermissionError:
        pass
    uid, gid = os.geteuid(), os.getegid()
    try:
        namespaces.unshare(namespaces.USERS)
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
        namespaces.unshare(kinds)
    except OSError as error:
        raise Refused(REFUSED.format(why=error.strerror)) from None
    return True


def write_names(path, count):
    """Let names be looked up: /etc/hosts of all hosts, for this mount namespace and those that come from it."""
    file = session_dir.names_file(path)
    with open(file, "w") as names:
        names.write("127.0.0.1 localhost\n")
        names.writelines(f"{SUBNET}.{number + 1} host{number}\n" for number in range(count))
    namespaces.mount(file, "/etc/hosts", flags=namespaces.BIND)


def batch(command, *lines):
    """Have `ip` or `tc` do `lines`, in the namespaces where this process is now."""
    done = subprocess.run([command, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        said = [*done.stderr.splitlines(), *done.stdout.splitlines(), f"exit code {done.returncode}"]
        raise Refused(f"the emulated network cannot be made: {os.path.basename(command)} says: {said[0]}")


def main():
    path, count, link = sys.argv[1], int(sys.argv[2]), Link(int(sys.argv[3]))
    try:
        switch = Switch(link, *sys.argv[4:])
        write_names(path, count)
        hosts = [switch.add_host(number) for number in range(count)]
    except (Refused, OSError) as error:
        raise SystemExit(f"no emulated hosts: {error}") from None
    namespaces.die_with_parent()  # a new user namespace has cleared what the keeper had set
    ready = session_dir.hosts_file(path)
    with open(f"{ready}.new", "w") as file:
        json.dump({"user": f"/proc/{os.getpid()}/ns/user" if switch.is_user else None, "hosts": hosts}, file)
    os.rename(f"{ready}.new", ready)
    signal.pause()


if __name__ == "__main__":
    main()
