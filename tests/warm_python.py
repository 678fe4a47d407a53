"""Stands in for `python` and `torchrun`: a process that warm.py forks runs what is asked for, and this ends as it does.

A copy of this file, executable and below those names, goes to PATH. HPDL_WARM is the server's socket.
"""

import json
import os
import re
import signal
import socket
import sys

READ_AT_IMPORT = re.compile("PYTHONPATH|TORCH_(?!NCCL_)")  # variables; the last ones torchrun sets itself
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    arguments = sys.argv[1:]
    if os.path.basename(sys.argv[0]) == "torchrun":
        arguments = ["-c", "from torch.distributed.run import main; main()", *arguments]
    plain = arguments[1:] if arguments[:1] == ["-u"] else arguments
    known = plain and (not plain[0].startswith("-") or plain[0] in ("-m", "-c"))
    if not known or any(map(READ_AT_IMPORT.match, os.environ)):
        os.execv(sys.executable, [sys.executable, *arguments])
    inherited = [fd for fd in map(int, os.listdir("/proc/self/fd")) if is_inherited(fd)]
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ["HPDL_WARM"])
    for signum in FORWARDED:
        signal.signal(signum, lambda signum, frame: server.sendall(bytes([signum])))
    request = {"arguments": arguments, "cwd": os.getcwd(), "environment": dict(os.environ), "fds": inherited}
    text = json.dumps(request).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "big")], inherited)
    server.sendall(text)
    status = int.from_bytes(server.recv(8), "big", signed=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # it was that of the listing
        return False


main()
