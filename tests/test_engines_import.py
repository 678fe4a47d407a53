"""An interrupt never cuts an import of torch short: a second import would crash the engine."""

import signal
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
