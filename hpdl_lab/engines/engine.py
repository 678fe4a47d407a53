"""The process of one engine: an MPI rank that serves the tasks of `lab.run`, and becomes an ipyparallel engine for %px.

mpiexec starts it (launch.py). It opens the socket on which it takes tasks (server.py), and exits when the keeper dies.
Most notebooks never use %px, whose imports take three times as long as all others here: once one does, the engine goes
on in px_engine.py.
"""

import gc
import os
import signal
import sys
import threading

from ..comm.errors import CommError
from ..comm.mpi import session_of_this_process
from ..features.freed_memory import keep_freed_memory
from ..features.torch_compiler import put_off_torch_compiler
from . import session_dir
from .server import Server


def main():
    keep_freed_memory()
    put_off_torch_compiler()
    path, size = os.environ["HPDL_SESSION"], int(os.environ["HPDL_SIZE"])
    try:
        session = session_of_this_process()  # `comm.world()` in a cell of %px uses the same
    except CommError as error:
        raise SystemExit(str(error)) from None
    rank = session.rank
    if session.size != size:
        from .keeper import shared_memory
        from .launch import mpiexec

        for path in shared_memory([os.getpid()]):  # Open MPI, which takes this for its only rank, would leave it
            os.unlink(path)
        raise SystemExit(
            f"mpiexec started {size} engines, but this one is in an MPI job of {session.size}: "
            f"mpi4py has loaded another MPI than {mpiexec()} belongs to"
        )
    server = Server(session, rank, session_dir.engine_socket(path, rank), int(os.environ["HPDL_KEEPER"]))
    signal.signal(signal.SIGINT, server.on_sigint)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.environ.get("HPDL_TORCH") != "later":
        threading.Thread(target=import_torch, args=(server,), daemon=True).start()
    server.listen()
    server.work()
    from . import px_engine

    px_engine.serve(server, session_dir.connection_file(path, "engine"))


def import_torch(server):
    """Import torch once a first kernel has been answered, while the attendee reads; who needs it now waits for it.

    With HPDL_TORCH=later in the environment nobody does: engines that live for seconds have no use for it.
    """
    server.answered.wait()
    gc.disable()  # it would go over all that is imported, again and again: a fifth of the time
    try:
        import torch  # noqa: F401
    except ImportError:
        pass  # an exercise that needs it says so itself
    finally:
        gc.enable()
    server.submit(keep_for_good)


def keep_for_good():
    """Between two tasks: spare the collector all that is there by now, most of it torch, in every task to come."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
