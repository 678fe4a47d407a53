"""The parent of one engine on a node of a Slurm job: it carries the engine's sockets to the gateway, and its end.

The engine finds a session directory as on the notebook's machine, with the same names in it; here it is a folder of the
node itself. This process holds nothing but bytes on their way: it also answers while compiled code blocks the engine.
It ends the engine, and itself, when the gateway has gone or lets go of it.

mpiexec starts it as `python -m hpdl_lab.engines.outpost GATEWAY_FILE STEP SIZE`; the engine takes over what mpiexec has
given it to start MPI with: variables, and an open connection.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from contextlib import suppress

from . import far_engines, node, session_dir, tunnel
from .keeper import die_with_parent, shared_memory

LOOK = 0.01  # s between two looks for the engine's socket


class Outpost:
    """Carries engine `rank` of `n`, whose files are in the folder `path` of this node."""

    def __init__(self, told, rank, n, path):
        self.told, self.rank, self.n, self.path = told, rank, n, path
        self.engine = None
        self.mapped = set()  # shared memory of the engine, which cannot be asked for it when it was killed
        self.tasks = set()

    async def serve(self, step):
        """Start the engine when the controller is there; returns when the gateway lets go."""
        peer = await node.dial(self.told, role="engine", step=step, rank=self.rank, node=node.name())
        if (told := await peer.receive()) is None:
            return
        await self.open_px(told["connection"])
        await self.start(node.address_here(peer))
        self.tasks |= {asyncio.create_task(self.tell_start(peer)), asyncio.create_task(self.tell_end(peer))}
        while told := await peer.receive():
            task = asyncio.create_task(self.open_stream(told["open"]))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def open_px(self, connection):
        """Let the engine find the controller's sockets in its own folder."""
        file = session_dir.connection_file(self.path, "engine")
        os.makedirs(os.path.dirname(file), 0o700)
        session_dir.write(file, json.dumps(connection | {"interface": f"ipc://{session_dir.px_sockets(self.path)}"}))
        for channel in range(1, session_dir.PX_CHANNELS + 1):
            await tunnel.serve_unix(
                f"{session_dir.px_sockets(self.path)}:{channel}",
                lambda reader, writer, channel=channel: self.carry((reader, writer), role="px", channel=channel),
            )

    async def carry(self, streams, **hello):
        """Join a connection of the engine with one to the gateway."""
        try:
            peer = await node.dial(self.told, **hello)
        except node.Unreached:
            return streams[1].close()
        return await tunnel.join(streams, (peer.reader, peer.writer))

    async def open_stream(self, number):
        """A kernel wants to talk to the engine."""
        with suppress(OSError):
            streams = await asyncio.open_unix_connection(session_dir.engine_socket(self.path, self.rank))
            await self.carry(streams, role="kernel", number=number)

    async def start(self, address):
        interface = far_engines.interface_of(address)
        self.engine = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hpdl_lab.engines.engine"),
            env=far_engines.environment(self.path, self.n, node.name(), interface),
            close_fds=False,  # MPICH's connection to mpiexec
            preexec_fn=die_with_parent,
        )

    async def tell_start(self, peer):
        """Tell when the engine takes connections."""
        while not os.path.exists(session_dir.engine_socket(self.path, self.rank)):
            await asyncio.sleep(LOOK)
        self.mapped = shared_memory([self.engine.pid])
        peer.send(listening=True)

    async def tell_end(self, peer):
        """Tell the exit status of the engine, as a shell writes it."""
        code = await self.engine.wait()
        peer.send(exit=code if code >= 0 else 128 - code)

    async def close(self):
        """End the engine, and leave nothing behind on this node."""
        for task in self.tasks:
            task.cancel()
        if self.engine is not None and self.engine.returncode is None:
            self.mapped |= shared_memory([self.engine.pid])
            self.engine.kill()
            await self.engine.wait()
        for file in self.mapped:
            with suppress(OSError):  # another outpost of this node was first
                os.unlink(file)
        shutil.rmtree(self.path, ignore_errors=True)


async def serve(file, step, n):
    rank = far_engines.rank()
    if rank is None:
        raise node.Unreached(f"no mpiexec has started {sys.executable}: the variable {far_engines.RANK[0]} is not set")
    outpost = Outpost(node.load(file), rank, n, session_dir.of_an_engine(rank))
    serving = asyncio.ensure_future(outpost.serve(step))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        pass  # Slurm ends the job
    finally:
        await outpost.close()


def main():
    os.umask(0o077)
    try:
        asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    except (OSError, node.Unreached) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
