"""The start of an attendee's server for JupyterHub: as a user id of their own, in a sandbox, within limits."""

import asyncio
import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, TypeAlias

import psutil
from jupyterhub.spawner import Spawner
from jupyterhub.utils import can_connect, random_port
from traitlets import List, Unicode, default

from . import limits, sandbox, settings
from .sandbox import UnixAccount
from .state import HubState, own

Json: TypeAlias = dict[str, Any]
LOG = "server.log"  # in the attendee's home: what the last server printed
TERM_SECONDS = 5  # for a server to end its kernels and engines in order; then the sandbox is killed


class AttendeeSpawner(Spawner):
    """An attendee's JupyterLab with its kernels and engines, on this machine."""

    readable = List(Unicode(), config=True, help="Folders, such as data sets, that every attendee may read.")

    _first: psutil.Process | None = None  # of the sandbox, which ends with it
    _started: subprocess.Popen[bytes] | None = None  # what this process has started, if it did

    @property
    def _given(self) -> settings.Settings:
        given = settings.read_settings()
        if given is None:
            raise RuntimeError(f"the environment variable {settings.VARIABLE} names no state folder of a hub")
        return given

    @property
    def _account(self) -> UnixAccount:
        return HubState.open(self._given.state).account(self.user.name)

    # An address for each: the certificate of one attendee is no good at the address of another.

    @default("ip")
    def _default_ip(self) -> str:
        return self._account.ip

    @default("ssl_alt_names")
    def _default_ssl_alt_names(self) -> list[str]:
        return [f"IP:{self.ip}"]

    @default("ssl_alt_names_include_local")
    def _default_ssl_alt_names_include_local(self) -> bool:
        return False

    async def move_certs(self, paths: dict[str, str]) -> dict[str, str]:
        """Copy the server's certificate into the sandbox."""
        account, moved = self._account, {}
        for kind, path in paths.items():
            there = os.path.join(account.given, kind)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(there)
            with open(os.open(there, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
                file.write(Path(path).read_bytes())
            own(there, account.uid)
            moved[kind] = f"{sandbox.GIVEN}/own/{kind}" if self._given.sandbox else there
        return moved

    def get_env(self) -> dict[str, str]:
        return super().get_env() | sandbox.attendee_environment(self._given, self._account)

    def get_state(self) -> Json:
        process = self._first
        return super().get_state() | ({"first": [process.pid, process.create_time()]} if process else {})

    def load_state(self, state: Json) -> None:
        super().load_state(state)
        pid, created = state.get("first", (0, 0))
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            if (process := psutil.Process(pid)).create_time() == created:
                self._first = process

    async def start(self) -> tuple[str, int]:
        """Start the server; return the address and port at which it listens."""
        self.port: int = self.port or random_port()
        argv, env = [*self.cmd, *self.get_args()], self.get_env()
        await asyncio.to_thread(self._start, argv, env)
        while not can_connect(self.ip, self.port):
            if (code := await self.poll()) is not None:
                error = RuntimeError(f"{self.user.name}'s server ended at its start with exit code {code}: see {LOG}")
                vars(error)["jupyterhub_message"] = str(error)  # shown to the attendee
                raise error
            await asyncio.sleep(0.1)
        return self.ip, self.port

    def _start(self, argv: list[str], env: dict[str, str]) -> None:
        given, account = self._given, self._account
        sandbox.end_all(account)
        sandbox.write_names(account)
        if given.profile:
            sandbox.write_profile(given, account)
        groups = limits.make(given, account.name)
        read, write = os.pipe()
        try:
            self._started = subprocess.Popen(
                sandbox.command(given, account, argv, LOG, groups, self.readable, write),
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[write],
                preexec_fn=sandbox.before_start,
            )
        finally:
            os.close(write)
        pid = self._started.pid
        if given.sandbox:
            with contextlib.suppress(ValueError):  # bubblewrap has failed, and said why in the hub's log; poll sees it
                with open(read) as info:
                    pid = json.load(info)["child-pid"]
        else:
            os.close(read)
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            self._first = psutil.Process(pid)

    async def poll(self) -> int | None:
        """Return None while the server runs, else its exit code."""
        code = self._started.poll() if self._started else None
        if self._first is not None and code is None and _is_alive(self._first):
            return None
        await asyncio.to_thread(self._clear)
        return (self._started.wait() if self._started else 0) or 0

    async def stop(self, now: bool = False) -> None:
        """Ask the server to end, then end whatever else runs in the sandbox."""
        await asyncio.to_thread(self._stop, 0 if now else TERM_SECONDS)

    def _stop(self, seconds: float) -> None:
        if self._first is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for server in self._first.children():  # of the shell that the sandbox ends with
                    server.terminate()
            give_up = time.monotonic() + seconds
            while _is_alive(self._first) and time.monotonic() < give_up:
                time.sleep(0.05)
            sandbox.kill_tree(self._first.pid)
        self._clear()

    def _clear(self) -> None:
        given, account = self._given, self._account
        sandbox.end_all(account)
        limits.remove(given, account.name)


def _is_alive(process: psutil.Process) -> bool:
    """Return True while a process still runs: it itself, not another one that has got its number."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
