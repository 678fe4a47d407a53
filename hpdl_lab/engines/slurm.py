"""Engines in a Slurm job, seen from the notebook's machine: relay and job as children of the keeper, and their end.

    keeper --- relay        what the nodes connect to (relay.py)
           |-- job          has Slurm start an agent on a node, follows the job, ends it (slurm_job.py)
           |-- controller   as for engines of this machine
           `-- engines      asks the relay for engines, prints what they print (step.py)

Relay and job outlive `lab.restart()`: new engines in the same job wait in no queue.
"""

import json
import shutil
import sys
import time
from contextlib import suppress

from . import diagnosis, reach, session_dir, slurm_job, step
from .errors import EngineError


class QueueLine:
    """`with QueueLine() as line: line.show(text)`, again and again while the job waits."""

    def __init__(self):
        self._began = time.monotonic()
        self._shown = None
        self._handle = None

    def __enter__(self):
        return self

    def show(self, text):
        """Show the sentence `text`, to which the seconds so far are added in a notebook."""
        if not in_notebook():
            if text != self._shown:
                print(f"{text}. Ctrl-C ends the wait, and the job.", flush=True)
            self._shown = text
            return
        line = f"{text}. {time.monotonic() - self._began:.0f} s so far; the stop button ends the wait, and the job."
        if line == self._shown:
            return
        self._shown = line
        if self._handle is None:
            from IPython.display import display

            self._handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": line}, raw=True)

    def __exit__(self, *exc):
        """In a notebook the line goes away."""
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


def in_notebook():
    """Whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


JOB = ("relay", "job")
START_SECONDS = 240  # all nodes read the same files of one file system, some for the first time
RELAY_FAREWELL, JOB_FAREWELL = 5.0, 20.0  # s: to remove a folder; for scancel
LOOK = 0.1  # s between two looks at the state of the job
NEWS = 10.0  # s: until Slurm has noticed, and told, that a node or a job has gone
LOST = ("vanished", "has gone")  # what is said of an engine that said nothing of its end: by the relay, and here


def check():
    """Raise EngineError where this machine knows no Slurm."""
    if shutil.which("sbatch") is None:
        raise EngineError(
            'there is no command sbatch here: lab.start(where="slurm") works where Slurm\'s commands are, '
            "as on a login node, or in a notebook server that is itself a job; here there is lab.start(4)"
        )


def step_argv(path, layout):
    """The process that asks the relay for engines, and ends with them."""
    request = json.dumps({"n": layout.n})
    return [sys.executable, "-I", "-S", step.__file__, session_dir.relay_socket(path), request]


def prepare(launching):
    """Return when a job runs in which engines can be started. Raises EngineError with the reason where none will."""
    path = launching.path
    if "job" not in launching.keeper.ask("status")["running"]:
        partition = launching.layout.job.get("partition") or ""
        argv = [sys.executable, "-m", "hpdl_lab.engines.relay", path, partition]
        launching.spawn("relay", argv, farewell=RELAY_FAREWELL)
        launching.wait_for([session_dir.relay_file(path)])
        with open(session_dir.relay_file(path)) as file:
            shared = json.load(file)["shared"]
        agent = [sys.executable, "-m", "hpdl_lab.engines.node_agent", reach.shared_relay_file(shared)]
        argv = slurm_job.argv(path, launching.layout.n, launching.layout.job, agent, shared)
        launching.spawn("job", argv, farewell=JOB_FAREWELL)
    with QueueLine() as line:
        while (told := state(path)).get("state") != "running":
            gone = launching.ended()
            if text := ended(path):  # looked at after `gone`: the process "job" writes it before it ends
                raise EngineError(text)
            if gone:
                raise EngineError(diagnosis.start_failure(path, launching.layout.n, gone, 0))
            if told:
                line.show(told["text"])
            time.sleep(LOOK)


def kept(path, running, before, wanted):
    """Names of the processes that go on when engines `before` are replaced by `wanted`, both a Layout.

    running: names of the processes that are alive.
    """
    same = before == wanted and before.where == "slurm" and set(JOB) <= set(running)
    return JOB if same and state(path).get("state") == "running" and not lost_a_node(path, before.n) else ()


def lost_a_node(path, n):
    """Has one of `n` engines vanished? Then the job can start no engines there, though Slurm may not know it yet."""
    for rank in range(n):
        with suppress(OSError), open(session_dir.exit_file(path, rank)) as file:
            if file.read().startswith(LOST):
                return True
    return False


def state(path):
    """What the process "job" has written last: {"id", "state", "text", ...}; {} when nothing yet."""
    try:
        with open(session_dir.job_file(path)) as file:
            return json.load(file)
    except OSError:
        return {}


def remarks(path):
    """What to know of engines in a job: sentences without their full stops."""
    told = state(path)
    return [told["text"]] if told.get("state") == "running" else []


def ended(path):
    """How the job ended, as a sentence; None while it has not."""
    told = state(path)
    return told["text"] if told.get("state") == "ended" else None


def end_of_job(path, endings):
    """How the job ended, as a sentence without its full stop; None while it runs.

    endings: what is known of the engines that have gone. Where they vanished, Slurm is given time to say why.
    """
    vanished = any(ending.startswith(LOST) for ending in endings)
    give_up = time.monotonic() + (NEWS if vanished else 0)
    while (text := ended(path)) is None:
        if time.monotonic() >= give_up:
            return None
        time.sleep(LOOK)
    return text.rstrip(".")
