"""An interrupt never cuts an import of torch short: a second import would crash the engine. Tasks go before it."""

import itertools
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from hpdl_lab.engines.engine import AGAIN, Server

TASK = ("kernel", "run 7")


@pytest.fixture
def server(monkeypatch):
    """A server without a socket amid a task; `sent` lists the signals that it has sent since."""
    server = Server.__new__(Server)
    server.interruptible, server.current, server._main = True, TASK, threading.main_thread().ident
    server.sent = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: server.sent.append((thread, number)))
    return server


@pytest.fixture
def later(monkeypatch):
    """`later()`: the server's timer, which starts once, has come to its end."""

    class Timer:
        def __init__(self, seconds, function, args):
            assert seconds == AGAIN
            self.end = partial(function, *args)

        def start(self):
            started.append(self)

    def end():
        (timer,) = started
        timer.end()

    started = []
    monkeypatch.setattr(threading, "Timer", Timer)
    return end


def interrupted_in(server, module):
    """Call the handler from the top level of a module of this name, below a function of its own."""
    source = "def below():\n    handler(2, sys._getframe())\nbelow()"
    exec(compile(source, "module.py", "exec"), {"__name__": module, "handler": server.on_sigint, "sys": sys})


def test_elsewhere_an_interrupt_ends_the_task_at_once(server):
    with pytest.raises(KeyboardInterrupt):
        interrupted_in(server, "attendee")
    server.interruptible = False
    interrupted_in(server, "attendee")  # no task: nothing happens
    assert server.sent == []


def test_amid_the_import_of_torch_it_is_sent_again_until_that_is_complete(server, later):
    interrupted_in(server, "torch")
    assert server.sent == []
    later()
    assert server.sent == [(server._main, signal.SIGINT)]


def test_what_has_ended_meanwhile_is_left_alone_and_so_is_the_next_task(server, later):
    interrupted_in(server, "torch")
    server.current = ("kernel", "run 8")
    later()
    assert server.sent == []


# -- torch in the background ------------------------------------------------------------------------------------------


def test_the_compiled_part_is_that_of_the_torch_that_is_imported_next():
    code = (
        "from hpdl_lab.engines import engine; engine.load_compiled_torch(); maps = open('/proc/self/maps').read()\n"
        "import torch; print('libtorch_python' in maps, 'libtorch_cpu' in maps, torch.ones(3).sum().item())\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libtorch_cpu' in line}, sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, libraries = done.stdout.splitlines()
    assert said == "True True 3.0" and "|" not in libraries


ENGINE = """
import sys, time, types
from hpdl_lab.engines import engine

def load():
    print(time.monotonic())
    time.sleep(0.05)
    print(time.monotonic())

wait = lambda: print("ready", flush=True) or sys.stdin.readline()
server = types.SimpleNamespace(rank=int(sys.argv[2]), connected=types.SimpleNamespace(wait=wait), submit=print)
sys.modules["torch"], engine.cores, engine.load_compiled_torch = types.ModuleType("torch"), lambda: 2, load
engine.import_torch(server, sys.argv[1])
"""


def test_half_of_the_cores_import_it_at_a_time(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    engines = [subprocess.Popen([sys.executable, "-c", ENGINE, str(tmp_path), str(r)], **pipes) for r in range(3)]
    assert [engine.stdout.readline() for engine in engines] == ["ready\n"] * 3
    for engine in engines:
        engine.stdin.write("\n")
        engine.stdin.flush()
    said = [engine.communicate()[0].split(maxsplit=2) for engine in engines]
    times = sorted((float(begin), float(end)) for begin, end, _ in said)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    assert all("keep_for_good" in job for *_, job in said)
