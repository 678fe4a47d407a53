"""What steward and outposts know of their node: its name, and how the gateway of the notebook is reached from it."""

import json
import os
import socket

from . import tunnel

EACH = 8.0  # s for each address of the gateway: packets to a closed port may vanish
UNSEEN, UNREACHED = 66, 67  # exit codes of a job: the node does not see the shared folder; it cannot reach the gateway


class Unreached(Exception):
    """The gateway cannot be reached; the message is one sentence with the remedy."""


def name():
    """The name by which Slurm knows this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def load(file):
    """Where the gateway is: {"addresses", "port", "key"}. Raises OSError where the file is not seen from here."""
    with open(file) as opened:
        return json.load(opened)


async def dial(told, **hello):
    """A connection to the gateway, as Steering, on which `hello` has been said. Raises Unreached."""
    tried = []
    for address in told["addresses"]:
        try:
            peer = tunnel.Steering(*await tunnel.connect_proved(address, told["port"], told["key"], EACH))
        except (OSError, TimeoutError) as error:
            tried.append(f"{address}: {getattr(error, 'strerror', '') or error or f'no answer within {EACH:g} s'}")
            continue
        peer.send(**hello)
        return peer
    raise Unreached(
        f"node {name()} cannot reach the gateway of the notebook at port {told['port']} ({'; '.join(tried)}): "
        "let nodes connect to that machine, or set HPDL_ADDRESS to an address and HPDL_PORTS to ports that they may use"
    )


def address_here(peer):
    """The address of this node from which it talks to the gateway."""
    return peer.writer.get_extra_info("sockname")[0]
