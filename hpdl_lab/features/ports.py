"""Ports of this machine and of other hosts, over which programs have to talk."""

import socket
import struct
from ipaddress import ip_address

from . import Missing

HERE = "127.0.0.1"
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1  # linux/netlink.h, linux/sock_diag.h
UID_OFFSET = 16 + 64  # of idiag_uid in the answer: a struct nlmsghdr, and what stands before it in inet_diag_msg
SECONDS = 3  # for a connection: a port that a firewall drops never answers


def require_loopback() -> None:
    """Raise Missing if a program cannot talk to another one on this machine, as Jupyter does with its kernels."""
    fix = "as root: ip link set lo up; or let the firewall pass traffic on lo"
    with socket.socket() as listener, socket.socket() as caller:
        try:
            listener.bind((HERE, 0))
            listener.listen()
            caller.settimeout(SECONDS)
            caller.connect(listener.getsockname())
        except OSError as error:
            what = f"{HERE} does not connect to itself ({_reason(error)}): Jupyter could not talk to its kernels"
            raise Missing(what, fix) from None


def require_free(port: int, host: str = HERE) -> None:
    """Raise Missing, with the process that holds it, if nothing can be served at `port` of the address `host`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just ended is no obstacle
        try:
            probe.bind((host, port))
        except PermissionError:
            what = f"port {port} is below 1024, which only root may serve on"
            raise Missing(what, "choose one from 1024 to 65535") from None
        except OSError as error:
            who = listener_at(port)
            what = f"port {port} of {host} is held by {who}" if who else f"port {port} of {host}: {_reason(error)}"
            raise Missing(what, "choose another port, or end what holds it") from None


def listener_at(port: int) -> str:
    """Return the process that listens at `port`, "process 4711 (node)"; "" if it cannot be seen, as another user's."""
    import psutil

    try:
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid]
        pid = next((c.pid for c in listening if c.laddr and c.laddr.port == port), None)
        return f"process {pid} ({psutil.Process(pid).name()})" if pid else ""
    except psutil.Error:
        return ""


def user_at(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, on this machine; 0 if it has gone or is not known."""
    try:
        (theirs, port, *_), (ours, here, *_) = connection.getpeername(), connection.getsockname()
        ends = [ip_address(ip).packed.ljust(16, b"\0") for ip in (theirs, ours)]
        asked = struct.pack("=BBxxI", connection.family, socket.IPPROTO_TCP, 0xFFFFFFFF)
        asked += struct.pack("!HH", port, here) + b"".join(ends) + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            kernel.send(struct.pack("=IHHII", 16 + len(asked), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0) + asked)
            return struct.unpack_from("=I", kernel.recv(4096), UID_OFFSET)[0]
    except (OSError, struct.error):
        return 0


def require_answer(host: str, port: int) -> None:
    """Raise Missing, with what is in the way, if `port` of another host cannot be reached from here."""
    try:
        socket.create_connection((host, port), SECONDS).close()
    except ConnectionRefusedError:
        raise Missing(
            f"{host} can be reached, but no server listens at its port {port}",
            "start the server there, and have it listen on the address of the network, not on 127.0.0.1",
        ) from None
    except socket.gaierror as error:
        raise Missing(f"the name {host} is unknown here ({error.strerror})", "use its address") from None
    except OSError as error:
        raise Missing(
            f"port {port} of {host} does not answer from {socket.gethostname()} ({_reason(error)})",
            "let the firewall pass TCP between these hosts, or name the network interface that joins them",
        ) from None


def _reason(error: OSError) -> str:
    """Return what an error says, such as "timed out" or "network is unreachable"."""
    return (error.strerror or str(error)).lower()
