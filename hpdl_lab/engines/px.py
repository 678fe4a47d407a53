"""The connection to ipyparallel's controller, over which `%px` runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from ..system import until
from . import session_dir
from .errors import EngineError

if TYPE_CHECKING:
    from ipyparallel import Client
    from IPython.core.interactiveshell import InteractiveShell

LINE = ("pxresult", "pxconfig", "autopx", "result")  # as ipyparallel names them
Json: TypeAlias = dict[str, Any]


class Engines(Protocol):
    """The cluster.Cluster whose engines `%px` uses."""

    @property
    def client(self) -> Client: ...


def offer_magics(cluster: Engines, shell: InteractiveShell) -> None:
    """Have the magics in the IPython shell `shell`, for the engines of `cluster`."""
    for name in LINE:
        shell.register_magic_function(_first_use(cluster, shell, name), "line", name)
    shell.register_magic_function(_first_use(cluster, shell, "px"), "line_cell", "px")


def _first_use(cluster: Engines, shell: InteractiveShell, name: str) -> Callable[[str, str | None], object]:
    """Return magic `name`, which puts ipyparallel's magics in the places of all these, and runs its own."""

    def magic(line: str, cell: str | None = None) -> object:
        view = cluster.client[:]
        view.block = True
        view.activate()
        return shell.run_line_magic(name, line) if cell is None else shell.run_cell_magic(name, line, cell)

    return magic


LOOK = 0.25  # s: between looks for ranks that have died
PATIENCE = 1.0  # s: engines are announced within two heartbeats, 0.2 s


def connect(path: str, n: int, seconds: float, look: Callable[[], None]) -> Client:
    """Return ipyparallel's Client of the session at `path`, with all `n` engines.

    A Client asks for the engines, and takes news of them only afterwards: it never learns of an engine that is
    announced in between. So if engines are missing after a while, another Client asks again.
    look() is called meanwhile, and in waits for results: it raises EngineError when the controller or an engine has
    ended.
    Raises: EngineError when engines are still missing after `seconds`.
    """
    from ipyparallel import Client

    _show_all()
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
            cast("Any", client).look = look
            return client
        except BaseException as error:  # the stop button as well: nothing may be left connected
            known = len(client.ids)
            client.close()
            if not isinstance(error, TimeoutError):
                raise
        if time.monotonic() > give_up:
            raise EngineError(f"%px knows {known} of {n} engines after {seconds:g} s: call lab.restart()")


def _show_all() -> None:
    """Have the views of this process show what engines have said before ipyparallel listens.

    ipyparallel 9.2 sends a cell, and begins to listen to it only then. It displays what engines have printed by then
    under one name for all, so that the last one's text takes the others' place; of their errors it only says "2
    errors".
    """
    import asyncio

    from ipyparallel import AsyncResult
    from ipyparallel.client import view
    from ipyparallel.client.futures import MessageFuture

    class Result(AsyncResult):
        """ipyparallel's result of a cell; everything in it is shown, once, however early it came.

        A cell in which a rank has died ends, and names it; the others may wait for that rank, and would for ever.
        """

        def wait(self, timeout: float | None = -1, return_when: Any = None) -> Any:
            endless = return_when is None and (timeout is None or timeout < 0)
            while True:
                done = super().wait(LOOK if endless else timeout, return_when)
                if not self._success and hasattr(self._client, "look"):  # attendees may have Clients of other engines
                    self._client.look()
                if done or not endless:
                    return done

        @contextmanager
        def stream_output(self) -> Generator[None]:
            with ExitStack() as stack:
                begin = self._begin(stack, super().stream_output())
                asyncio.run_coroutine_threadsafe(begin, self._client._io_loop.asyncio_loop).result()
                yield

        async def _begin(self, stack: ExitStack, stream: AbstractContextManager[object]) -> None:
            """Show what has come, and listen: in the thread that takes messages, so that none comes meanwhile."""
            stack.enter_context(stream)
            for engine, future in zip(cast("list[int]", self._targets), self._children, strict=True):
                if error := future.output.metadata["error"]:
                    content = {"ename": error.ename, "evalue": error.evalue, "traceback": [error.traceback]}
                    message = {"header": {"msg_type": "error"}, "content": content}
                    self._iopub_streaming_output_callback(engine, future, message)

        def _iopub_streaming_output_callback(self, eid: int, msg_future: MessageFuture, msg: Json) -> None:
            msg.setdefault("parent_header", {"msg_id": msg_future.msg_id})  # names its display
            super()._iopub_streaming_output_callback(eid, msg_future, msg)

    view.AsyncResult = Result
