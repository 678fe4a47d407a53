"""The connection to ipyparallel, on which `%px` runs: engines that a client has missed."""

import time

import ipyparallel
import pytest

from hpdl_lab.engines import px_client
from hpdl_lab.engines.errors import EngineError


class Deaf(ipyparallel.Client):
    """A Client for which the news of engines comes to nothing: what happens by chance, made certain."""

    made = deaf = 0

    def _update_engines(self, engines):
        type(self).made += 1
        if self.made > self.deaf:
            super()._update_engines(engines)


@pytest.fixture
def deaf_clients(monkeypatch):
    def make(number):
        monkeypatch.setattr(Deaf, "made", 0)
        monkeypatch.setattr(Deaf, "deaf", number)
        monkeypatch.setattr(ipyparallel, "Client", Deaf)

    return make


def test_engines_that_a_client_has_missed_are_asked_for_again(cluster, deaf_clients, within):
    deaf_clients(2)
    begin = time.monotonic()
    client = px_client.connect(cluster.path, 4, 30)
    try:
        assert client.ids == [0, 1, 2, 3] and Deaf.made == 3
        assert client[:].apply_sync(lambda: 7) == [7] * 4
    finally:
        client.close()
    assert 2 * px_client.PATIENCE < time.monotonic() - begin < within(5)


def test_engines_that_never_appear_are_an_error_with_the_remedy(cluster, deaf_clients):
    deaf_clients(100)
    with pytest.raises(EngineError, match=r"%px knows 0 of 4 engines after 0.1 s: call lab.restart\(\)"):
        px_client.connect(cluster.path, 4, 0.1)
