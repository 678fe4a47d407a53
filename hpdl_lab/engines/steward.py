"""The first process of a Slurm job: it starts engines in the job's allocation whenever the notebook asks for some.

So `lab.restart()` needs no second wait in the queue. The engines are started by the mpiexec of this environment, which
has Slurm start its daemons on the other nodes (by srun): whatever PMI this Slurm speaks, the MPI library need not.
When the gateway has gone, with the notebook's machine or in peace, the job ends.

Slurm starts it, in the job script, as `python -m hpdl_lab.engines.steward GATEWAY_FILE`.
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress

from .. import features
from . import far_engines, node
from .keeper import die_with_parent

FAREWELL, KILL = 10.0, 3.0  # s for engines to end by themselves, and for mpiexec to end them
LINES = 1 << 16  # bytes of what engines print that are passed on at a time


class Launcher:
    """mpiexec with the engines of step `number`; what it prints, and its end, is told to the gateway by `peer`."""

    def __init__(self, peer, number, process):
        self.peer, self.number, self.process = peer, number, process
        self.telling = asyncio.create_task(self._tell())

    @classmethod
    async def start(cls, peer, number, argv):
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=far_engines.launch_environment(far_engines.interface_of(node.address_here(peer))),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        return cls(peer, number, process)

    async def _tell(self):
        while said := await self.process.stdout.read(LINES):
            self.peer.send(step=self.number, said=said.decode(errors="replace"))
        self.peer.send(step=self.number, ended=await self.process.wait())

    async def end(self):
        """Return when no engine is left: outposts end theirs when the gateway lets go of them."""
        for seconds, signum in ((FAREWELL, signal.SIGTERM), (KILL, signal.SIGKILL)):
            try:
                async with asyncio.timeout(seconds):
                    await self.process.wait()
                return
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signum)
        await self.process.wait()


async def serve(file):
    """Start and end engines as the gateway says; returns when it has gone."""
    peer = await node.dial(node.load(file), role="job", node=node.name())
    launcher = None
    while told := await peer.receive():
        if launcher is not None:  # "start" as well as "kill": one step at a time
            await launcher.end()
            launcher = None
        if "start" in told:
            try:
                launcher = await Launcher.start(peer, told["start"], far_engines.argv(file, told["start"], told["n"]))
            except (OSError, features.Missing) as error:
                peer.send(step=told["start"], said=f"{error}\n")
                peer.send(step=told["start"], ended=1)
    if launcher is not None:
        await launcher.end()


def main():
    try:
        asyncio.run(serve(sys.argv[1]))
    except OSError as error:
        print(f"node {node.name()} does not see {sys.argv[1]} ({error})", file=sys.stderr)
        return node.UNSEEN
    except node.Unreached as error:
        print(error, file=sys.stderr)
        return node.UNREACHED
    return 0


if __name__ == "__main__":
    sys.exit(main())
