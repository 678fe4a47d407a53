"""One start of engines on other machines, as a process of this one: what mpiexec is for engines of this machine.

Started by the supervisor as `python -I -S step.py SOCKET REQUEST`: it hands the request to the relay, prints what the
engines print, and ends when they have ended. When it is killed, they end.
"""

import os
import socket
import sys


def main() -> None:
    relay = socket.socket(socket.AF_UNIX)
    relay.connect(sys.argv[1])
    relay.sendall(sys.argv[2].encode() + b"\n")
    while output := relay.recv(1 << 16):
        os.write(2, output)


if __name__ == "__main__":
    main()
