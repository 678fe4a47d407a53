"""What `%px` shows of engines that were faster than the notebook.

ipyparallel 9.2 sends a cell, and begins to listen to it only then. What engines have printed by then it displays under
one name for all of them, so that the last one's text takes the others' place; of their errors it only says "2 errors".
"""

import asyncio
from contextlib import ExitStack, contextmanager

from ipyparallel import AsyncResult
from ipyparallel.client import view


class Result(AsyncResult):
    """ipyparallel's result of a cell, of which everything is shown, once, however early it came."""

    @contextmanager
    def stream_output(self):
        with ExitStack() as stack:
            begin = self._begin(stack, super().stream_output())
            asyncio.run_coroutine_threadsafe(begin, self._client._io_loop.asyncio_loop).result()
            yield

    async def _begin(self, stack, stream):
        """Show what has come, and listen; in the thread that takes engines' messages, so that none comes meanwhile."""
        stack.enter_context(stream)
        for engine, future in zip(self._targets, self._children, strict=True):
            if error := future.output.metadata["error"]:
                content = {"ename": error.ename, "evalue": error.evalue, "traceback": [error.traceback]}
                message = {"header": {"msg_type": "error"}, "content": content}
                self._iopub_streaming_output_callback(engine, future, message)

    def _iopub_streaming_output_callback(self, eid, msg_future, msg):
        msg.setdefault("parent_header", {"msg_id": msg_future.msg_id})  # names its display; missing if it came early
        super()._iopub_streaming_output_callback(eid, msg_future, msg)


def show_all():
    """Have the views of this process give such results."""
    view.AsyncResult = Result
