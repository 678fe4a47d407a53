"""What ranks are doing while a run goes on, and a stop button that is pressed when they do it, not after a time.

A rank may get no core for seconds between two lines. Who interrupts, or kills, when a time is over finds it elsewhere.
"""

import os
import signal
import threading
import time

import psutil

from hpdl_lab.comm.status.table import Slot
from hpdl_lab.engines import client
from hpdl_lab.engines.client import EngineConnection


class Onlooker(threading.Thread):
    """`with Onlooker(path, ranks, seen, act):` calls act() as soon as `seen(self)`, unless the block has ended before.

    It asks the engines `ranks` of the session at `path` over connections of its own, as a second notebook would.
    slots: {rank: what it does in a run that has begun since}, comm.status.table.Slot. rows: what `on_row` was given.
    """

    def __init__(self, path, ranks, seen, act):
        super().__init__(daemon=True)
        self.seen, self.act = seen, act
        self.slots, self.rows = {}, []
        self._engines = {rank: EngineConnection(path, rank) for rank in ranks}
        for engine in self._engines.values():
            engine.socket.settimeout(40)
        self._earlier = {rank: self._ask(engine).run for rank, engine in self._engines.items()}
        self._over = threading.Event()

    def on_row(self, row):
        """For `cluster.run`, where ranks report that they are there."""
        self.rows.append(row)

    def run(self):
        while not self._over.wait(0.02):
            try:
                told = {rank: self._ask(engine) for rank, engine in self._engines.items()}
            except OSError:  # an engine has gone, or its interpreter is held: the test will say what is wrong then
                return None
            self.slots = {rank: slot for rank, slot in told.items() if slot.run > self._earlier[rank]}
            if len(self.slots) == len(told) and self.seen(self):
                return self.act()
        return None

    def _ask(self, engine):
        engine.send(client.STATE, None)
        return Slot(*engine._first()[0][1]["slot"])

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc):
        self._over.set()
        self.join()
        for engine in self._engines.values():
            engine.close()


class StopButton(Onlooker):
    """Interrupts this process as soon as `seen`. seconds: since then."""

    def __init__(self, cluster, seen):
        super().__init__(cluster.path, range(cluster.n), seen, self.press)
        self.pressed = None

    def press(self):
        self.pressed = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    @property
    def seconds(self):
        return time.monotonic() - self.pressed


def waiting(op, line=""):
    """All wait in `op`, of this line where one is given."""

    def seen(onlooker):
        slots = onlooker.slots.values()
        return all((slot.state, slot.op) == ("waiting", op) and slot.line.endswith(line) for slot in slots)

    return seen


def computing(*ranks):
    """All have told by a row that they are there, then `ranks` have used cores, and the others wait."""
    used = []

    def seen(onlooker):
        if len({row["rank"] for row in onlooker.rows}) < len(onlooker.slots):
            return False
        if not used:
            used.append(UsedCores(onlooker.slots[rank].pid for rank in ranks))
        others = [slot for rank, slot in onlooker.slots.items() if rank not in ranks]
        return all(slot.state == "waiting" for slot in others) and used[0].by_all()

    return seen


class UsedCores:
    """Looks at the processes `pids`. by_all(): has each of them used a core for a while since?"""

    def __init__(self, pids):
        self.processes = [psutil.Process(pid) for pid in pids]
        self.before = self.seconds()

    def seconds(self):
        return [sum(process.cpu_times()[:2]) for process in self.processes]

    def by_all(self, least=0.1):
        return all(now - before > least for now, before in zip(self.seconds(), self.before, strict=True))
