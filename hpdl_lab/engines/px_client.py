"""The connection to ipyparallel's controller, over which `%px` runs."""

import os
import time

from . import session_dir
from .errors import EngineError

LINE = ("pxresult", "pxconfig", "autopx", "result")  # as ipyparallel names them


def offer_magics(cluster, shell):
    """Have the magics in the IPython shell `shell`, for the engines of `cluster`."""
    for name in LINE:
        shell.register_magic_function(first_use(cluster, shell, name), "line", name)
    shell.register_magic_function(first_use(cluster, shell, "px"), "line_cell", "px")


def first_use(cluster, shell, name):
    """Magic `name`, which puts ipyparallel's magics in the places of all these, and runs its own."""

    def magic(line, cell=None):
        view = cluster.client[:]
        view.block = True
        view.activate()
        return shell.run_line_magic(name, line) if cell is None else shell.run_cell_magic(name, line, cell)

    return magic


PATIENCE = 1.0  # s: engines are announced within two heartbeats, 0.2 s


def connect(path, n, seconds, look):
    """ipyparallel's Client of the session at `path`, which knows all `n` engines.

    A Client asks who is there, and listens for news only afterwards: an engine that is announced in between is unknown
    to it for ever. So where engines are missing after a while, another Client asks again.
    look() is called meanwhile: it raises EngineError when the controller or an engine has ended.
    Raises: EngineError when engines are still missing after `seconds`.
    """
    from ipyparallel import Client

    from . import px_result

    px_result.show_all()
    give_up = time.monotonic() + seconds
    while not os.path.exists(session_dir.connection_file(path, "client")) and time.monotonic() < give_up:
        look()
        time.sleep(0.01)
    while True:
        look()
        client = Client(session_dir.connection_file(path, "client"), profile_dir=session_dir.profile_dir(path))
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
