"""What one hub was asked for: `hpdl hub` writes it into the state folder, the hub and its spawner read it there.

STATE/               root's; others may pass through, not look around
  hub/               only root's: settings, hub database, cookie secret, hashed passwords, log
  notebooks/         the exercise forms from which each attendee gets a copy
  homes/NAME/        one attendee's files, only that account's
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

VARIABLE = "HPDL_HUB"  # the state folder of the hub, in the environment of the hub's processes
STATE = "/var/lib/hpdl-hub"
PARTS = ("homes", "notebooks", "hub")  # of a state folder; "hub", by which one is known, goes last
MEMORY_OF_SERVER, MEMORY_OF_ENGINE = 1.0e9, 0.5e9  # bytes: JupyterLab with one kernel, and an engine at work


class Settings(NamedTuple):
    """One hub. Whatever has a default here has the same one in `hpdl hub --help`."""

    users: tuple = ()  # names that may log in; none: whom the authenticator of the site lets in
    state: str = STATE
    engines: int = 4  # the most that one attendee may start
    memory: int = 0  # bytes for each attendee; 0: what a server and the engines take
    cores: float = 0  # for each attendee; 0: one for each engine, as far as the machine has them
    idle: float = 60  # minutes without activity after which a server is stopped with its engines; 0: never
    start_timeout: int = 120  # seconds that a server may take to start
    address: str = "127.0.0.1"  # the one on which browsers reach the proxy
    port: int = 8000
    certificate: str = ""  # paths of the certificate chain and of its key: https
    key: str = ""
    isolated: bool = True  # each attendee has a Unix account of their own
    dummy: bool = False  # any password does; on the loopback address only
    hub_port: int = 0  # on the loopback address: kept over restarts, as servers that run know it
    proxy_port: int = 0  # of the proxy's own interface, on the loopback address
    proxy: tuple = ()  # the command that starts it; empty: proxy.find looks for one
    groups: tuple = ()  # limits.Group of attendees: version and folders; empty where there is none
    why_no_groups: str = ""

    @property
    def private(self):
        """The folder that only the hub may read."""
        return Path(self.state, "hub")

    @property
    def notebooks(self):
        """The folder that attendees' notebooks are copied from."""
        return Path(self.state, "notebooks")

    @property
    def memory_limit(self):
        """Bytes that one attendee may use."""
        return int(self.memory or MEMORY_OF_SERVER + self.engines * MEMORY_OF_ENGINE)

    @property
    def core_limit(self):
        """Cores that one attendee may use, no more than the machine has."""
        return min(self.cores or self.engines, len(os.sched_getaffinity(0)))

    @property
    def url(self):
        """What attendees type into their browser."""
        return self._url(os.uname().nodename if self.everywhere else self.address)

    @property
    def local_url(self):
        """The same from this machine."""
        return self._url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address))

    @property
    def bind_url(self):
        """What the proxy listens on."""
        return self._url(self.address)

    def _url(self, host):
        return f"http{'s' if self.certificate else ''}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def everywhere(self):
        """Whether the proxy listens on every address of this machine."""
        return self.address in ("0.0.0.0", "::")

    @property
    def loopback(self):
        """Whether only this machine reaches the proxy."""
        return self.address == "localhost" or self.address == "::1" or self.address.startswith("127.")

    @property
    def look_seconds(self):
        """How often servers tell the hub of activity, and the hub looks for idle ones."""
        return max(1, min(60, int(self.idle * 60 / 5)))

    def save(self):
        """Write it for the hub's processes."""
        write_whole(self.private / "settings.json", json.dumps(self._asdict(), indent=1))


def read(state=None):
    """The settings of the hub whose state is in `state`; without one, of the hub that started this process.

    Returns: Settings; None where neither is said, as when a site starts JupyterHub itself.
    """
    state = state or os.environ.get(VARIABLE)
    if not state:
        return None
    said = json.loads(Path(state, "hub", "settings.json").read_text())
    lists = {name: tuple(value) for name, value in said.items() if isinstance(value, list)}
    return Settings(**said | lists)


def write_whole(path, text):
    """Write a file that only this user may read, so that others find the old one or the new one, never half of it."""
    new = f"{path}.new"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.rename(new, path)
