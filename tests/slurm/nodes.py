"""Machines for a Slurm of our own: each a set of namespaces with a network, a name, processes and /dev/shm of its own.

    this machine: slurmctld, notebooks      10.X.Y.254
        |
      switch                                in a namespace of its own
        |-- n1                              10.X.Y.1
        `-- n2                              10.X.Y.2

On a node, 127.0.0.1 is the node, the process numbers of a notebook mean nothing, the monotonic clock is minutes ahead,
and the folders in `hidden` are empty: what works here does not lean on being one machine. All is held by
processes below this one, and vanishes with them.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MTU = 9000
AHEAD = 1000  # s: the monotonic clock of n1 is ahead of that of this machine by so much, that of n2 by twice that
KINDS = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# The first process of a node, with which all its others end. It waits for a line: until the network is there.
INIT = """
set -e
hostname "$NODE"
mount -t tmpfs tmpfs /dev/shm
for folder in $HIDDEN; do mount -t tmpfs tmpfs "$folder"; done
for wall in $WALLS; do
    view=$(mktemp -d) && mount -t tmpfs -o mode=755 tmpfs "$view"
    for path in $BEHIND; do case $path in "$wall"/*)
        mkdir -p "$view${path#"$wall"}" && mount --bind "$path" "$view${path#"$wall"}" ;;
    esac; done
    mount --move "$view" "$wall" && rmdir "$view"
done
echo ready
read -r network
"$@" </dev/null &
wait $!
"""


class Refused(Exception):
    """This system allows no such machines; the message says why."""


class Network:
    """A switch that this machine is plugged into; `add` makes one more machine."""

    def __init__(self):
        if missing := [name for name in ("ip", "unshare", "nsenter") if not shutil.which(name)]:
            raise Refused(f"no command {missing[0]}")
        self.subnet = free_subnet()
        self.name = f"slurm{self.subnet.rpartition('.')[2]}"
        self.switch = held(["unshare", "--net", "sh", "-c", "echo ready; exec cat"])
        try:
            wait_ready(self.switch)
            batch(self.switch, "link add switch type bridge", f"link set switch mtu {MTU} up")
            self._plug(self.name, None, 254)
        except BaseException:
            self.close()
            raise

    @property
    def address(self):
        """Of this machine, as the nodes see it."""
        return f"{self.subnet}.254"

    def node_address(self, number):
        return f"{self.subnet}.{number}"

    def add(self, number, command, environment, log, hidden, opened):
        """Make node n`number`, on which `command` runs; returns a process with which the whole node ends."""
        behind = [path for paths in opened.values() for path in paths]
        own = {"HIDDEN": " ".join(hidden), "WALLS": " ".join(opened), "BEHIND": " ".join(behind)}
        environment = {**environment, "NODE": f"n{number}", **own}
        clock = ["--time", f"--monotonic={AHEAD * number}"]
        node = held(["unshare", *KINDS, *clock, "sh", "-c", INIT, "init", *command], env=environment, stderr=log)
        try:
            wait_ready(node)
            self._plug("net0", node, number)
            node.stdin.write(b"plugged\n")
            node.stdin.flush()
        except BaseException:
            end(node)
            raise
        return node

    def _plug(self, name, machine, number):
        """Join interface `name` of `machine` (a process there; None: this one) to the switch."""
        there = machine.pid if machine else os.getpid()
        veth = f"port{number} mtu {MTU} type veth peer name {name} mtu {MTU} netns {there}"
        batch(self.switch, f"link add {veth}", f"link set port{number} master switch up")
        batch(machine, "link set lo up", f"link set {name} up", f"addr add {self.subnet}.{number}/24 dev {name}")

    def close(self):
        end(self.switch)


def held(command, **how):
    """Start `command`, to be killed when this process ends."""
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        **how,
    )


def wait_ready(process):
    if process.stdout.readline() != b"ready\n":
        raise Refused("namespaces are refused")


def end(process):
    """Kill it, its children, and, where such a child is the first process of a node, all of the node."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as told:
        children = [int(pid) for pid in told.read().split()]
    handles = [os.pidfd_open(pid) for pid in children]
    for handle in handles:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    for handle in handles:
        select.select([handle], [], [])
        os.close(handle)
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def batch(machine, *lines):
    """Have `ip` do `lines` on `machine` (None: this one)."""
    enter = ["nsenter", f"--net=/proc/{machine.pid}/ns/net"] if machine else []
    done = subprocess.run([*enter, "ip", "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"ip says: {(done.stderr or done.stdout).strip()}")


def free_subnet():
    """Three bytes of addresses that nothing on this machine uses, such as "10.78.5"."""
    used = subprocess.run(["ip", "route", "show"], capture_output=True, text=True).stdout
    for number in range(os.getpid() % 200, 256):
        if f"10.78.{number}." not in used:
            return f"10.78.{number}"
    raise Refused("no free network 10.78.*")
