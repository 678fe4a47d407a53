"""Starts an attendee's server: as their Unix account, within their limits, with a folder of sockets of their own.

JupyterHub's LocalProcessSpawner starts, watches and stops the process; what is added here is who it is (enter.py), what
it may take (limits.py), what it may see (reach.py), and that nothing of it is left when it has stopped.
"""

import asyncio
import os

from jupyterhub.spawner import LocalProcessSpawner

from . import account_process, accounts, limits, settings

LOG = "server.log"  # in the attendee's home


class AttendeeSpawner(LocalProcessSpawner):
    """One attendee's JupyterLab with its kernels and engines, on this machine."""

    def _given(self):
        given = settings.read()
        if given is None:
            raise RuntimeError(
                f"the environment variable {settings.VARIABLE} names no state folder: see the configuration"
            )
        return given

    def _account(self):
        return accounts.of(self._given(), self.user.name)

    def make_preexec_fn(self, name):
        """Nothing: enter.py changes the account, after it has used root's rights for the rest."""
        return None

    def user_env(self, env):
        return env | account_process.environment(self._given(), self._account())

    def load_state(self, state):
        """As LocalProcessSpawner; but a number that another process got meanwhile, after a reboot, is not signalled."""
        super().load_state(state)
        try:
            if self.pid and os.stat(f"/proc/{self.pid}").st_uid != self._account().uid:
                self.pid = 0
        except (OSError, ValueError):
            self.pid = 0

    async def start(self):
        """Make account, home, groups and folder of sockets where they are not there; start the server."""
        given = self._given()
        account = accounts.ensure(given, self.user.name)
        accounts.end_processes(given, account)
        accounts.open_run(account)
        group = limits.of(given)
        groups = group.make(self.user.name, given.memory_limit, given.core_limit) if group else []
        plain, self.cmd = self.cmd, account_process.command(given, account, self.cmd, groups, LOG)
        try:
            return await super().start()
        finally:
            self.cmd = plain

    async def stop(self, now=False):
        """Stop the server and whatever else the attendee has left running."""
        await super().stop(now)
        await self._clear()

    async def poll(self):
        """As LocalProcessSpawner; a server that ended by itself leaves nothing either."""
        was, status = self.pid, await super().poll()
        if was and status is not None:
            await self._clear()
        return status

    async def _clear(self):
        given = self._given()
        account = accounts.of(given, self.user.name)
        await asyncio.to_thread(accounts.end_processes, given, account)
        await asyncio.to_thread(accounts.close_run, account)
        if group := limits.of(given):
            await asyncio.to_thread(group.remove, self.user.name)
