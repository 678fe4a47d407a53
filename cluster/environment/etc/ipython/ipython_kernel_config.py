"""Kernels of this environment: what a cell starts with `!` is this environment's, and none needs to open a TCP port.

`!torchrun` and `!mpiexec` are found without an activated environment, and start more ranks than there are cores.

A kernel that is configured to talk over Unix sockets (transport "ipc") opens no port. ipykernel does for one thing all
the same: what children by os.fork() print comes in on a port of 127.0.0.1, at which any account of the machine can
send. Here it comes over one more socket, beside the others of the kernel.
"""

import atexit
import os
import sys
from pathlib import Path

import zmq
from ipykernel.iostream import IOPubThread
from zmq.eventloop.zmqstream import ZMQStream

from hpdl_lab.features import launch_environment

os.environ |= launch_environment()
os.environ["PATH"] = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)])

LONGER = "f"  # than the path of the socket on which the kernel publishes its output; few paths have room for more

over_tcp = IOPubThread._setup_pipe_in, IOPubThread._setup_pipe_out


def listen(thread):
    """In the kernel: take what its forked children print."""
    address = thread.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if not address.startswith("ipc://"):
        return over_tcp[0](thread)
    path = Path(address.removeprefix("ipc://") + LONGER)
    thread._pipe_uuid, thread._pipe_address = os.urandom(16), f"ipc://{path}"
    socket = thread.socket.context.socket(zmq.PULL)
    socket.linger = 0
    socket.bind(thread._pipe_address)
    atexit.register(lambda: thread._is_master_process() and path.unlink(missing_ok=True))
    thread._pipe_in = ZMQStream(socket, thread.io_loop)
    thread._pipe_in.on_recv(thread._handle_pipe_msg)


def connect(thread):
    """In a forked child: (context, socket) by which it sends one message to the kernel."""
    if not hasattr(thread, "_pipe_address"):
        return over_tcp[1](thread)
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.linger = 3000  # ms
    socket.connect(thread._pipe_address)
    return context, socket


IOPubThread._setup_pipe_in, IOPubThread._setup_pipe_out = listen, connect
