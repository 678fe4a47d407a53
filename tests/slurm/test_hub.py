"""JupyterHub on Slurm by cluster/slurm/: a server is a job of its attendee's account, answers, stops, and is gone."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import requests

from tests.slurm.controller import free_ports

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600  # s
NAME = f"hpdl-s{os.getpid()}"  # of the account
# What a site would edit, and an authenticator that needs no password file of this machine.
EDITED = """
load_subconfig({config!r})
c = get_config()
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_bind_url = c.JupyterHub.hub_bind_url.rpartition(":")[0] + ":{hub_port}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_port}"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = "a secret"
c.JupyterHub.db_url = "sqlite:///{state}/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = "{state}/cookie_secret"
c.ConfigurableHTTPProxy.pid_file = "{state}/proxy.pid"
c.SlurmSpawner.req_memory, c.SlurmSpawner.req_runtime = "100M", "0:30:00"
c.SlurmSpawner.state_exechost_re, c.SlurmSpawner.state_exechost_exp = r" n(\\d)$", r"{node}"  # no DNS knows n1
"""


@pytest.fixture
def account():
    """A Unix account of its own, with a home that the nodes see."""
    if os.geteuid() != 0:
        pytest.skip("a Unix account for an attendee takes root")
    home = tempfile.mkdtemp(prefix="hpdl-home-", dir="/tmp")
    os.rmdir(home)
    subprocess.run(["useradd", "--create-home", "--home-dir", home, NAME], check=True)
    yield Path(home)
    subprocess.run(["userdel", NAME], check=True)
    shutil.rmtree(home)


@pytest.fixture
def hub(slurm, account, tmp_path):
    """The address of a hub that runs, with its real proxy."""
    if not slurm.network and slurm.opened:
        pytest.skip("this system allows no namespaces, and this Python is in a folder that only root enters")
    port, hub_port, proxy_port = free_ports(3)
    config = tmp_path / "jupyterhub_config.py"
    numbers = {"port": port, "hub_port": hub_port, "proxy_port": proxy_port, "state": tmp_path}
    numbers["node"] = f"{slurm.network.subnet}.\\1" if slurm.network else "127.0.0.1"
    config.write_text(EDITED.format(config=str(ROOT / "cluster" / "slurm" / "jupyterhub_config.py"), **numbers))
    log = tmp_path / "hub.log"
    with open(log, "w") as said:
        command = [sys.executable, "-m", "jupyterhub", "-f", str(config)]
        process = subprocess.Popen(command, stdout=said, stderr=said, cwd=tmp_path)
    url = f"http://127.0.0.1:{port}"
    give_up = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"{url}/hub/api", timeout=300).ok:
                break
        assert process.poll() is None and time.monotonic() < give_up, log.read_text()
        time.sleep(0.1)
    yield Browser(url, log)
    process.terminate()
    process.wait(PATIENCE)
    if left := slurm.jobs():
        slurm.ask("scancel", *left)


class Browser:
    """What a browser does: keep cookies, send the form's token."""

    def __init__(self, url, log):
        self.url, self.log = url, log
        self.session = requests.Session()

    def ask(self, method, path, **how):
        headers = {"X-XSRFToken": self.session.cookies.get("_xsrf", path="/hub/") or ""}
        return self.session.request(method, self.url + path, headers=headers, timeout=PATIENCE, **how)

    def log_in(self, name):
        self.ask("GET", "/hub/login")
        form = {"username": name, "password": "a secret", "_xsrf": self.session.cookies.get("_xsrf", path="/hub/")}
        done = self.ask("POST", "/hub/login", data=form, allow_redirects=False)
        assert done.status_code == 302, done.text

    def wait_for(self, what, seen):
        give_up = time.monotonic() + PATIENCE
        while not (found := seen()):
            assert time.monotonic() < give_up, f"no {what}: {self.log.read_text()[-5000:]}"
            time.sleep(0.5)
        return found


def test_a_server_is_a_job_that_answers_and_ends(hub, slurm, account):
    hub.log_in(NAME)
    hub.ask("GET", "/hub/home")
    server = f"/hub/api/users/{NAME}/server"
    assert hub.ask("POST", server).status_code in (201, 202)
    hub.wait_for("server", lambda: hub.ask("GET", f"/hub/api/users/{NAME}").json()["server"])
    shown = slurm.ask("squeue", "--noheader", "--format=%u %T %C").stdout
    assert shown == f"{NAME} RUNNING 4\n"

    hub.ask("GET", f"/user/{NAME}/lab")  # a detour by way of the hub, for a cookie
    page = hub.ask("GET", f"/user/{NAME}/api/status")  # through the proxy, from the node
    assert page.status_code == 200 and "started" in page.json(), page.text
    assert (account / ".jupyter-server.log").stat().st_mode & 0o077 == 0
    names = {file.name for file in (account / "notebooks").glob("*.ipynb")}
    assert "04_ring_all_reduce.ipynb" in names
    stranger = requests.get(f"{hub.url}/user/{NAME}/api/status", timeout=PATIENCE)
    assert stranger.status_code == 403 or "/hub/login" in stranger.url

    assert hub.ask("DELETE", server).status_code in (202, 204)
    hub.wait_for("end of the job", lambda: not slurm.jobs())
    hub.wait_for("end", lambda: not hub.ask("GET", f"/hub/api/users/{NAME}").json()["servers"])
    left = subprocess.run(["pgrep", "-u", NAME], capture_output=True, text=True).stdout
    assert re.findall(r"\d+", left) == []
