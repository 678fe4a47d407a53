"""cluster/jupyterhub_config.py as a site edits and starts it, without `hpdl hub`."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from jupyterhub.app import JupyterHub
from jupyterhub.auth import Authenticator
from jupyterhub.proxy import ConfigurableHTTPProxy
from jupyterhub.spawner import Spawner
from traitlets.config.loader import PyFileConfigLoader

from hpdl_lab.classroom import bounds, hub, settings, state
from hpdl_lab.classroom.authenticator import AttendeeAuthenticator
from hpdl_lab.classroom.spawner import AttendeeSpawner

KINDS = (JupyterHub, Authenticator, AttendeeAuthenticator, Spawner, AttendeeSpawner, ConfigurableHTTPProxy)
SITE = {  # the line of each, and what a site puts there
    "c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = ": '"/etc/ssl/hub.pem", "/etc/ssl/hub.key"',
    "c.JupyterHub.authenticator_class = ": '"pam"',
    "c.JupyterHub.spawner_class = ": '"simple"',
}


@pytest.fixture
def private(tmp_path):
    """The private folder of a hub that was prepared."""
    folder = settings.Settings(state=str(tmp_path)).private
    folder.mkdir()
    (folder / hub.API_TOKEN).write_text("a token")
    return folder


@pytest.fixture
def asked(monkeypatch, private):
    """What the file has prepared: Settings. Nothing is."""
    said = []
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    monkeypatch.setattr(state.HubState, "make", lambda folder: SimpleNamespace(manifest=SimpleNamespace(names=[])))
    monkeypatch.setattr(hub, "proxy_program", lambda: ["node", "proxy"])
    monkeypatch.setattr(bounds, "bound_requests", lambda: None)
    monkeypatch.setattr(
        hub, "prepare_hub", lambda given, at: said.append(given) or given.replace(state=str(private.parent))
    )
    return said


def load(path):
    return PyFileConfigLoader(str(path)).load_config()


def test_a_site_starts_it_as_it_is_for_twelve_on_this_machine_only(asked):
    config = load(settings.CONFIGURATION)
    (given,) = asked
    assert len(config.Authenticator.allowed_users) == 12 and config.JupyterHub.bind_url == "http://127.0.0.1:8000"
    assert "dummy" not in config.JupyterHub.authenticator_class and not given.trust_attendees
    assert config.ConfigurableHTTPProxy.should_start
    for kind, options in config.items():
        (traits,) = (known.class_traits() for known in KINDS if known.__name__ == kind)
        assert set(options) <= set(traits), kind


def test_by_the_command_it_is_as_the_command_was_asked(asked, private, monkeypatch):
    given = settings.Settings(users=("ada",), state=str(private.parent), port=4321, idle=0, hub_port=5000)
    given.save()
    monkeypatch.setenv(settings.VARIABLE, given.state)
    config = load(settings.CONFIGURATION)
    assert asked == [] and not config.ConfigurableHTTPProxy.should_start
    assert config.JupyterHub.bind_url == "http://127.0.0.1:4321" and config.Authenticator.allowed_users == {"ada"}
    assert config.JupyterHub.hub_bind_url == "https://127.0.0.1:5000" and config.JupyterHub.internal_ssl
    assert "cull-idle" not in {service["name"] for service in config.JupyterHub.services}


def test_tls_authenticator_and_spawner_are_a_line_each_in_a_copy_anywhere(asked, tmp_path):
    text = settings.CONFIGURATION.read_text()
    for line, choice in SITE.items():
        text, found = re.subn(rf"^{re.escape(line)}.*$", line + choice, text, flags=re.M)
        assert found == 1, line
    (tmp_path / "jupyterhub_config.py").write_text(text)
    app = JupyterHub(config=load(tmp_path / "jupyterhub_config.py"))
    assert (app.ssl_cert, app.ssl_key) == ("/etc/ssl/hub.pem", "/etc/ssl/hub.key")
    assert app.authenticator_class.__name__ == "PAMAuthenticator"
    assert app.spawner_class.__name__ == "SimpleLocalProcessSpawner"
    (folder,) = (arg.partition("=")[2] for arg in app.config.Spawner.args if "app_settings_dir" in arg)
    assert (
        "@jupyterlab/debugger-extension"
        in json.loads(Path(folder, "page_config.json").read_text())["disabledExtensions"]
    ), "without it the debugger listens on a port"
