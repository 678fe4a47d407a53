"""cluster/jupyterhub_config.py as a site edits and starts it, without `hpdl hub`."""

import json
import re
from pathlib import Path

import pytest
from firstuseauthenticator import FirstUseAuthenticator
from jupyterhub.app import JupyterHub
from jupyterhub.auth import Authenticator
from jupyterhub.proxy import ConfigurableHTTPProxy
from jupyterhub.spawner import LocalProcessSpawner, Spawner
from traitlets.config.loader import PyFileConfigLoader

from hpdl_lab.classroom import preparation, settings

KINDS = (JupyterHub, Authenticator, FirstUseAuthenticator, Spawner, LocalProcessSpawner, ConfigurableHTTPProxy)
SITE = {  # the line of each, and what a site puts there
    "c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = ": '"/etc/ssl/hub.pem", "/etc/ssl/hub.key"',
    "c.JupyterHub.authenticator_class = ": '"pam"',
    "c.JupyterHub.spawner_class = ": '"simple"',
}


@pytest.fixture
def asked(monkeypatch):
    """What the file has prepared: Settings. Nothing is."""
    said = []
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    monkeypatch.setattr(preparation, "prepare", lambda given: said.append(given) or given)
    return said


def load(path):
    return PyFileConfigLoader(str(path)).load_config()


def test_a_site_starts_it_as_it_is_for_twelve_on_this_machine_only(asked):
    config = load(preparation.CONFIGURATION)
    (given,) = asked
    assert len(config.Authenticator.allowed_users) == 12 and config.JupyterHub.bind_url == "http://127.0.0.1:8000"
    assert "dummy" not in config.JupyterHub.authenticator_class and given.isolated
    for kind, options in config.items():
        (traits,) = (known.class_traits() for known in KINDS if known.__name__ == kind)
        assert set(options) <= set(traits), kind


def test_tls_authenticator_and_spawner_are_a_line_each_in_a_copy_anywhere(asked, tmp_path):
    text = preparation.CONFIGURATION.read_text()
    for line, choice in SITE.items():
        text, found = re.subn(rf"^{re.escape(line)}.*$", line + choice, text, flags=re.M)
        assert found == 1, line
    (tmp_path / "jupyterhub_config.py").write_text(text)
    hub = JupyterHub(config=load(tmp_path / "jupyterhub_config.py"))
    assert (hub.ssl_cert, hub.ssl_key) == ("/etc/ssl/hub.pem", "/etc/ssl/hub.key")
    assert hub.authenticator_class.__name__ == "PAMAuthenticator"
    assert hub.spawner_class.__name__ == "SimpleLocalProcessSpawner"
    (folder,) = (arg.partition("=")[2] for arg in hub.config.Spawner.args if "app_settings_dir" in arg)
    assert (
        "@jupyterlab/debugger-extension"
        in json.loads(Path(folder, "page_config.json").read_text())["disabledExtensions"]
    ), "without it the debugger listens on a port"


def test_every_setting_has_its_reason():
    """Above it, or above the setting before it, with which it stands."""
    reasoned = False
    for number, line in enumerate(preparation.CONFIGURATION.read_text().splitlines(), 1):
        bare = line.strip()
        if bare.startswith("c."):
            assert reasoned, f"line {number}: {line}"
        reasoned = bare.startswith("#") or (reasoned and bare != "")
