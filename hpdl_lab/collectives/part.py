"""Some of the ranks, numbered anew: a collective among them is the same function."""


class Part:
    """The messages of `comm` among `members`, of which members[i] is rank i here.

    Unlike comm.split it costs no message, and has nothing but messages. Ranks of several parts may talk in each of
    them, in the same order on both ends.
    """

    def __init__(self, comm, members):
        self.comm, self.members = comm, members
        self.rank, self.size = members.index(comm.rank), len(members)

    def isend(self, x, to):
        return self.comm.isend(x, self.members[to])

    def irecv(self, x, source):
        return self.comm.irecv(x, self.members[source])

    def send(self, x, to):
        self.comm.send(x, self.members[to])

    def recv(self, x, source):
        return self.comm.recv(x, self.members[source])

    def sendrecv(self, x, to, y, source):
        return self.comm.sendrecv(x, self.members[to], y, self.members[source])
