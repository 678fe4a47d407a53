"""Data parallelism around parameter servers: gradients go in, sums come out, everybody at once.

    one server                          two servers
    1 --g1--> 0 --g0+g1+g2--> 1         every rank --first half of g--> 0 --its sum--> every rank
    2 --g2--> 0 --g0+g1+g2--> 2         every rank --second half ----> 1 --its sum--> every rank

The servers add; the optimizer stays on every rank. In Li et al. the server updates as well, and sends weights instead
of sums: as many bytes either way, with the state of the optimizer in one place only, but every strategy would need a
training loop of its own. That the links of the servers are the bottleneck is seen in both. The messages are those of
collectives/parameter_server.py; a server that updates, in a few lines, is in descent_with_server.py.
"""

from functools import partial

from ..collectives import parameter_server
from .data_parallel import DataParallel


class ParameterServer(DataParallel):
    """Synchronous: ranks 0 to servers - 1 add the gradients of all ranks, each its part of them, and send them back.

    servers: from 1 to the number of ranks; with as many servers as ranks it is a direct reduce-scatter and all-gather.
    Steps: 2(p - 1) at a single server.   Bytes per rank: a server sends (p - 1 + servers - 1)/servers * (N + 1) *
    itemsize, the others (N + 1) * itemsize.   Ref: Li et al. 2014, "Parameter Server".
    """

    def __init__(self, servers=1):
        if not isinstance(servers, int) or servers < 1:
            raise ValueError(f"servers={servers!r}: a whole number of at least 1 is needed")
        super().__init__(partial(parameter_server.all_reduce, servers=servers))
        self.servers = servers
