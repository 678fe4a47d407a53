"""One start of engines on other machines, as a process of this one: what mpiexec is for engines of this machine.

Started by the keeper as `python -I -S step.py SOCKET REQUEST`: it hands the request to the gateway, prints what the
engines print, and ends when they have ended. When it is killed, they end.
"""

import os
import socket
import sys


def main():
    gateway = socket.socket(socket.AF_UNIX)
    gateway.connect(sys.argv[1])
    gateway.sendall(sys.argv[2].encode() + b"\n")
    while said := gateway.recv(1 << 16):
        os.write(2, said)


if __name__ == "__main__":
    main()
