"""JupyterHub on a Slurm cluster: each attendee's server is a job of the attendee. A site edits it and runs, as root,

    make hub                                          where the nodes see it as well
    jupyterhub -f cluster/slurm/jupyterhub_config.py  on a machine with sbatch, such as a login node

Accounts and homes are the cluster's own. For a class on one machine there is cluster/jupyterhub_config.py.
"""

import sys
from pathlib import Path

import batchspawner  # its import gives the hub the address at which servers tell their port

from hpdl_lab.classroom import hub
from hpdl_lab.engines import slurm

c = get_config()  # noqa: F821  # JupyterHub puts it here

HERE = Path(__file__).resolve().parent
STATE = Path("/var/lib/jupyterhub")  # of root alone, mode 700

# -- who comes in ------------------------------------------------------------------------------------------------------

# The address that browsers use: this machine only, until TLS is there. Then https://:443, say.
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
# TLS: the certificate chain and its key.
c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = "", ""
# AUTHENTICATOR: the accounts of this machine. They must be the same on the nodes.
c.JupyterHub.authenticator_class = "pam"
# All accounts may log in. A class: c.Authenticator.allowed_users = {...} or c.PAMAuthenticator.allowed_groups = {...}
c.Authenticator.allow_all = True

# -- what they get -----------------------------------------------------------------------------------------------------

c.JupyterHub.spawner_class = batchspawner.SlurmSpawner
# Who submits: the attendee, so that Slurm's limits and accounting are theirs. Without sudo, which root does not need.
# umask: only the attendee can read what a server prints.
c.SlurmSpawner.exec_prefix = "umask 077; runuser -u {username} --"
# What a server is given. Its engines, lab.start(4), share it; lab.start(8, where="slurm") is another job.
c.SlurmSpawner.req_partition = ""  # of the site; "" is Slurm's default
c.SlurmSpawner.req_nprocs = "4"
c.SlurmSpawner.req_memory = "4G"
c.SlurmSpawner.req_runtime = "4:00:00"  # then the server ends, and with it its engines; notebooks are saved every 20 s
# scontrol create reservation ...: `hpdl plan` prints the line.
c.SlurmSpawner.req_reservation = ""
# The job, without srun around the server: engines are started by an mpiexec of their own.
c.SlurmSpawner.batch_script = (HERE / "server.sbatch").read_text()
# Takes a free port on the node and tells the hub, then brings the notebooks up to date and becomes the server.
c.SlurmSpawner.batchspawner_singleuser_cmd = f"{sys.executable} -m batchspawner.singleuser"
c.Spawner.cmd = [str(HERE / "single_user.py")]
# The attendee's copy of the notebooks, in JupyterLab.
c.Spawner.notebook_dir = "~/notebooks"
c.Spawner.default_url = "/lab"
c.Spawner.args = [
    # Kernels talk over sockets in a folder that only the attendee can enter. Over TCP any account could read along.
    "--KernelManager.transport=ipc",
    # Saves an open notebook every 20 s, and no debugger, which listens on a port: as on one machine.
    f"--LabApp.app_settings_dir={HERE.parent / 'hub'}",
    "--LabApp.news_url=None",
    # Not what starts clusters of its own, edits scripts as notebooks, or looks for language servers by npm: without it
    # a server starts in three quarters of the time, which counts where a class comes at once.
    "--ServerApp.jpserver_extensions=ipyparallel=False",
    "--ServerApp.jpserver_extensions=jupyterlab_jupytext=False",
    "--LanguageServerManager.autodetect=False",
]
# Where Slurm's configuration is, in case that it is not in its usual place.
c.Spawner.env_keep = ["PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SLURM_CONF"]
# Seconds that a server may wait in the queue and start; then its job is cancelled.
c.Spawner.start_timeout = 600
c.Spawner.http_timeout = 120
# The page shows at once that a server is on its way: jobs wait.
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}

# -- who connects to whom ----------------------------------------------------------------------------------------------

# The hub listens where the nodes reach it: servers ask it who a visitor is. A server listens on all addresses of its
# node. Between proxy, hub and servers it is plain HTTP: who can listen on the cluster's network reads cookies.
c.JupyterHub.hub_bind_url = f"http://{slurm.addresses()[0]}:8081"
# The proxy, for Node, as `make hub` installs it. Its own interface is on loopback.
c.ConfigurableHTTPProxy.command = hub.proxy_program()
# Who is there and whose job is whose: a hub that was restarted takes over running servers.
c.JupyterHub.db_url = f"sqlite:///{STATE / 'jupyterhub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(STATE / "cookie_secret")
c.ConfigurableHTTPProxy.pid_file = str(STATE / "proxy.pid")
# A hub that is restarted leaves servers to run.
c.JupyterHub.cleanup_servers = False
