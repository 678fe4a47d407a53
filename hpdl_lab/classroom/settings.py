"""The settings of a hub: `hpdl hub` writes them into the state folder, JupyterHub and its spawner read them there."""

import json
import os
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

VARIABLE = "HPDL_HUB"  # the state folder of the hub, in the environment of the hub's processes
STATE = "/var/lib/hpdl-hub"
API_TOKEN = "api_token"  # file: what `hpdl hub --forget-password` asks a running hub with, and the key of /hub/own
PACKAGE = Path(__file__).resolve().parents[2]  # the clone, or the site-packages that holds this package
CONFIGURATION = PACKAGE / "cluster" / "jupyterhub_config.py"
LOG_BYTES, LOGS = 10_000_000, 3  # of each log, and how many older ones are kept
# Bytes: JupyterLab with one kernel; an engine at work; a rank of a script that torchrun runs meanwhile.
MEMORY_OF_SERVER, MEMORY_OF_ENGINE = 1.0e9, 0.8e9


@dataclass(frozen=True)
class Settings:
    """The settings of one hub. Their defaults are the same as in `hpdl hub --help`."""

    users: tuple[str, ...] = ()  # names that may log in; none: whom the authenticator of the site lets in
    state: str = STATE
    engines: int = 4  # the most that one attendee may start
    memory: int = 0  # bytes for each attendee; 0: what a server and the engines take
    cores: float = 0  # for each attendee; 0: one for each engine, as far as the machine has them
    idle: float = 60  # minutes without activity after which a server is stopped with its engines; 0: never
    start_timeout: int = 120  # seconds that a server may take to start
    address: str = "127.0.0.1"  # the one on which browsers reach the proxy
    port: int = 8000  # 0: any free one
    certificate: str = ""  # paths of the certificate chain and of its key: https
    key: str = ""
    trust_attendees: bool = False  # start even if attendees cannot be kept apart, or not within limits
    subdomain_host: str = ""  # "https://hub.example.org": attendees' servers are at names below it, ada.hub.example.org
    emulated: bool = False  # attendees may make user namespaces, as emulated hosts need
    dummy: bool = False  # any password does; on the loopback address only
    profile: str = ""  # folder of a profile of ipyparallel, by which attendees' engines start; "": on this machine
    hub_port: int = 8081  # on the loopback address: running servers know it
    proxy_port: int = 8001  # of the proxy's own interface, on the loopback address
    sandbox: bool = False  # bubblewrap works here, and is used
    groups: tuple[str, ...] = ()  # folders below which each attendee gets a control group; empty: no limits

    @property
    def private(self) -> Path:
        """The folder that only the hub may read."""
        return Path(self.state, "hub")

    @property
    def notebooks(self) -> Path:
        """The folder that attendees' notebooks are copied from."""
        return Path(self.state, "notebooks")

    @property
    def certificates(self) -> Path:
        """The folder of JupyterHub's internal certificate authorities, and what they have signed."""
        return self.private / "internal-ssl"

    @property
    def passwords(self) -> Path:
        """The file with the hashes of attendees' passwords."""
        return self.private / "passwords.json"

    @property
    def memory_limit(self) -> int:
        """Bytes that one attendee may use."""
        return int(self.memory or MEMORY_OF_SERVER + self.engines * MEMORY_OF_ENGINE)

    @property
    def core_limit(self) -> float:
        """Cores that one attendee may use, no more than the machine has."""
        return min(self.cores or self.engines, len(os.sched_getaffinity(0)))

    @property
    def url(self) -> str:
        """The address that attendees type into their browser."""
        host = os.uname().nodename if self.address in ("0.0.0.0", "::") else self.address
        return self.subdomain_host or self._url(host)

    @property
    def local_url(self) -> str:
        """The same from this machine."""
        return self._url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address))

    @property
    def bind_url(self) -> str:
        """The address at which the proxy listens."""
        return self._url(self.address)

    def _url(self, host: str) -> str:
        return f"http{'s' if self.certificate else ''}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """True if only this machine reaches the proxy."""
        return self.address in ("localhost", "::1") or self.address.startswith("127.")

    @property
    def look_seconds(self) -> int:
        """Time between two reports of a server's activity, and between two looks for idle servers."""
        return max(1, min(60, int(self.idle * 60 / 5))) if self.idle else 60

    def replace(self, **fields: Any) -> "Settings":
        """Return a copy with other values of some fields."""
        return replace(self, **fields)

    def save(self) -> None:
        """Write it for the hub's processes."""
        write_whole(self.private / "settings.json", json.dumps(asdict(self), indent=1))


def read_settings(state: str | None = None) -> Settings | None:
    """Return the settings of the hub whose state is in `state`; without one, of the hub that started this process.

    Returns: Settings; None if neither is said, as when a site starts JupyterHub itself, or if the hub just starts.
    """
    state = state or os.environ.get(VARIABLE)
    path = Path(state or "", "hub", "settings.json")
    if not state or not path.exists():
        return None
    said = json.loads(path.read_text())
    lists = {name: tuple(value) for name, value in said.items() if isinstance(value, list)}
    return Settings(**said | lists)


def write_whole(path: str | Path, text: str | bytes) -> None:
    """Write a file that only this user may read, so that others find the old one or the new one, never half of it."""
    new = f"{path}.{secrets.token_hex(4)}.new"  # two processes may write it
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
    os.rename(new, path)
