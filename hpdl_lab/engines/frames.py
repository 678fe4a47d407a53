"""The messages between a notebook's kernel and an engine: one byte of kind, eight of length, then a pickle.

kernel -> engine   TASK {run, ranks, deadline, inject, sys_path, task, own}   INTERRUPT run   STATE question   PX None
                   DEAD rank
engine -> kernel   HELLO {rank, pid, host, ..., now_ns}    ROW row    TEXT (stream, text)    DONE outcome
                   STATE {slot, px, now_ns, asked}
"""

import pickle
import struct

TASK, INTERRUPT, HELLO, ROW, TEXT, DONE, STATE, PX, DEAD = range(9)

HEADER = struct.Struct("<BQ")


def pack(kind, content):
    """One message as bytes."""
    body = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(kind, len(body)) + body


class Reader:
    """Cuts the bytes of one connection into messages."""

    def __init__(self):
        self.received = bytearray()

    def feed(self, data):
        """Take `data` and yield (kind, content) of every message that is now whole."""
        self.received += data
        while len(self.received) >= HEADER.size:
            kind, nbytes = HEADER.unpack_from(self.received)
            stop = HEADER.size + nbytes
            if len(self.received) < stop:
                return
            body = bytes(self.received[HEADER.size : stop])
            del self.received[:stop]
            yield kind, pickle.loads(body)
