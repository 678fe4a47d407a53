"""The connection to ipyparallel's controller, over which `%px` runs."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..system import until
from . import session_dir
from .errors import EngineError

LINE = ("pxresult", "pxconfig", "autopx", "result")  # as ipyparallel names them


def offer_magics(cluster: Any, shell: Any) -> None:
    """Have the magics in the IPython shell `shell`, for the engines of `cluster`."""
    for name in LINE:
        shell.register_magic_function(first_use(cluster, shell, name), "line", name)
    shell.register_magic_function(first_use(cluster, shell, "px"), "line_cell", "px")


def first_use(cluster: Any, shell: Any, name: str) -> Callable:
    """Magic `name`, which puts ipyparallel's magics in the places of all these, and runs its own."""

    def magic(line: str, cell: str | None = None) -> Any:
        view = cluster.client[:]
        view.block = True
        view.activate()
        return shell.run_line_magic(name, line) if cell is None else shell.run_cell_magic(name, line, cell)

    return magic


PATIENCE = 1.0  # s: engines are announced within two heartbeats, 0.2 s


def connect(path: str, n: int, seconds: float, look: Callable[[], None]) -> Any:
    """ipyparallel's Client of the session at `path`, which knows all `n` engines.

    A Client asks who is there, and listens for news only afterwards: an engine that is announced in between is unknown
    to it forever. So if engines are missing after a while, another Client asks again.
    look() is called meanwhile: it raises EngineError when the controller or an engine has ended.
    Raises: EngineError when engines are still missing after `seconds`.
    """
    from ipyparallel import Client

    show_all()
    give_up = time.monotonic() + seconds
    file = session_dir.connection_file(path, "client")

    def is_there() -> bool:
        look()
        return os.path.exists(file)

    until(is_there, seconds)
    while True:
        look()
        client = Client(file, profile_dir=session_dir.profile_dir(path))
        try:
            client.wait_for_engines(n, timeout=PATIENCE, interactive=False)
            return client
        except BaseException as error:  # the stop button as well: nothing may be left connected
            known = len(client.ids)
            client.close()
            if not isinstance(error, TimeoutError):
                raise
        if time.monotonic() > give_up:
            raise EngineError(f"%px knows {known} of {n} engines after {seconds:g} s: call lab.restart()")


def show_all() -> None:
    """Have the views of this process show what engines have said before ipyparallel listens.

    ipyparallel 9.2 sends a cell, and begins to listen to it only then. What engines have printed by then it displays
    under one name for all, so that the last one's text takes the others' place; of their errors it only says "2
    errors".
    """
    import asyncio

    from ipyparallel import AsyncResult
    from ipyparallel.client import view

    class Result(AsyncResult):
        """ipyparallel's result of a cell, of which everything is shown, once, however early it came."""

        @contextmanager
        def stream_output(self) -> Iterator[None]:
            with ExitStack() as stack:
                begin = self._begin(stack, super().stream_output())
                asyncio.run_coroutine_threadsafe(begin, self._client._io_loop.asyncio_loop).result()
                yield

        async def _begin(self, stack: ExitStack, stream: Any) -> None:
            """Show what has come, and listen: in the thread that takes messages, so that none comes meanwhile."""
            stack.enter_context(stream)
            for engine, future in zip(self._targets, self._children, strict=True):
                if error := future.output.metadata["error"]:
                    content = {"ename": error.ename, "evalue": error.evalue, "traceback": [error.traceback]}
                    message = {"header": {"msg_type": "error"}, "content": content}
                    self._iopub_streaming_output_callback(engine, future, message)

        def _iopub_streaming_output_callback(self, eid: int, msg_future: Any, msg: dict) -> None:
            msg.setdefault("parent_header", {"msg_id": msg_future.msg_id})  # names its display
            super()._iopub_streaming_output_callback(eid, msg_future, msg)

    view.AsyncResult = Result
