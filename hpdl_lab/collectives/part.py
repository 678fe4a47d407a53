"""Some of the ranks, numbered anew: a collective among them is the same function."""


class Part:
    """The messages of `comm` among `members`, of which members[i] is rank i here.

    Unlike comm.split it costs no message, and has nothing but messages. Ranks of several parts may talk in each of
    them, in the same order on both ends.
    """

    def __init__(self, comm, members):
        self.comm, self.members = comm, members
        self.rank, self.size = members.index(comm.rank), len(members)

    def isend(self, x, dst):
        return self.comm.isend(x, self.members[dst])

    def irecv(self, x, src):
        return self.comm.irecv(x, self.members[src])

    def send(self, x, dst):
        self.comm.send(x, self.members[dst])

    def recv(self, x, src):
        return self.comm.recv(x, self.members[src])

    def sendrecv(self, x, dst, y, src):
        return self.comm.sendrecv(x, self.members[dst], y, self.members[src])
