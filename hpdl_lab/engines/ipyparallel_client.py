"""A cluster of ipyparallel as its user names it, a Client, a Cluster or a profile, as options of layout.Layout."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..system import until
from ..units import require_int
from .errors import EngineError
from .layout import CLIENT_SECONDS, Options

if TYPE_CHECKING:
    from ipyparallel import Client, Cluster

PROFILE = "HPDL_PROFILE"  # environment variable: the profile that lab.start uses if nothing is said, as on a hub
CHANNELS = ("control", "task", "mux", "iopub", "notification", "registration", "broadcast")
SECONDS = 10.0  # for a controller to answer


def connection_of(client: Client) -> Options:
    """Return the connection file of the controller of `client`, as a dict: it holds the keys."""
    config = client._config
    prefix = f"{config['interface']}:"
    return config | {channel: config[channel].removeprefix(prefix) for channel in CHANNELS}


def chosen(
    n: int | None, client: Client | None, cluster: Cluster | None, profile: str | None, wait: float = CLIENT_SECONDS
) -> tuple[int | None, Options]:
    """Return how many engines are wanted, and the options for layout.wanted; a Cluster that does not run is started.

    n: None for all that are there. One of the others is given. wait: s for engines to come.
    Raises: EngineError if no controller answers, or engines are missing; ValueError if more than one is given;
            TypeError for another object.
    """
    import ipyparallel

    if n is not None:
        require_int("the number of engines", n, least=1)
    if sum(given is not None for given in (client, cluster, profile)) != 1:
        raise ValueError("one of client=, cluster= and profile= names the cluster of ipyparallel, not several")
    for name, given, kind in (("client", client, ipyparallel.Client), ("cluster", cluster, ipyparallel.Cluster)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"{name}= takes an ipyparallel.{kind.__name__}, got a {type(given).__name__}")
    if profile is not None:
        return _of_profile(n, profile, wait)
    if cluster is not None:
        if cluster.controller is None:
            cluster.n = n or cluster.n
            cluster.start_cluster_sync()
        with cluster.connect_client_sync() as own:
            _require_engines(own, n or cluster.n or 1, max(wait, cluster.engine_timeout))
            return n or len(own.ids), {"connection": connection_of(own), "name": f"cluster {cluster.cluster_id}"}
    assert client is not None
    if client._closed:
        raise EngineError("this client of ipyparallel is closed: make a new one, ipp.Client(...)")
    if n is None and not client.ids:
        raise EngineError("the cluster of ipyparallel has no engines: start some, or say how many will come")
    _require_engines(client, n or 1, wait)
    return n or len(client.ids), {"connection": connection_of(client)}


def _require_engines(client: Client, n: int, wait: float) -> None:
    """Wait for `n` engines before the ranks that run are ended. Raises EngineError."""
    if not until(lambda: len(client.ids) >= n, wait, every=0.05):
        raise EngineError(too_few(len(client.ids), n, wait))


def too_few(there: int, n: int, wait: float) -> str:
    """Say how many engines are there, and what to do."""
    fewer = f"lab.start({there}, ...) takes what is there; " if there else ""
    return f"{there} of {n} engines of ipyparallel have come after {wait:g} s: {fewer}wait={2 * wait:g} waits longer"


def profile_folder(profile: str) -> str:
    """Return the path of the folder of a profile of IPython. Raises EngineError if there is none."""
    from IPython.core.profiledir import ProfileDir, ProfileDirError
    from IPython.paths import get_ipython_dir

    try:
        return ProfileDir.find_profile_dir_by_name(get_ipython_dir(), profile).location
    except ProfileDirError:
        raise EngineError(
            f"there is no profile {profile!r} of IPython: ipython profile create --parallel --profile={profile}, or "
            "ask the administrators of this site for theirs"
        ) from None


def _of_profile(n: int | None, profile: str, wait: float) -> tuple[int | None, Options]:
    """Return `chosen` of a profile: the cluster of it that runs, or that it is to be started."""
    import ipyparallel

    name, folder = f"profile {profile}", profile_folder(profile)
    if os.path.exists(os.path.join(folder, "security", "ipcontroller-client.json")):
        try:
            with ipyparallel.Client(profile=profile, timeout=SECONDS) as client:
                _require_engines(client, n or 1, wait)
                return n or len(client.ids), {"connection": connection_of(client), "name": name}
        except TimeoutError:
            pass  # its controller has gone, and left the file
    site = ipyparallel.Cluster(profile_dir=folder, shutdown_atexit=False)  # with what its files say
    return n or site.n, {"profile": folder, "name": name}
