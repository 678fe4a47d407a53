"""JupyterHub for a class on one machine. `hpdl hub` runs this file; a site edits it and runs it itself:

    jupyterhub -f cluster/jupyterhub_config.py         as root, or as a service of systemd

Every line has its reason. The three that a site most often replaces, TLS, AUTHENTICATOR and SPAWNER, are one line each.
"""

import sys

from hpdl_lab.classroom import authenticator, bounds, hub, own, settings, state

c = get_config()  # noqa: F821  # JupyterHub puts it here

# What `hpdl hub` was asked for. Without it: who may log in, and what each of them may take; settings.py has all of it.
given = settings.read_settings()
by_hand = given is None
if by_hand:
    given = settings.Settings(users=tuple(authenticator.numbered(12)), address="127.0.0.1")
    folder = state.HubState.make(given.state)
    given = hub.prepare_hub(given, folder)
    hub.clear(given, folder, set(folder.manifest.names) - set(given.users))  # who was taken off the list

# -- who comes in ------------------------------------------------------------------------------------------------------

# The address that browsers use. Beyond this machine only with TLS: passwords would be readable on the way.
c.JupyterHub.bind_url = given.bind_url
# TLS: the certificate chain and its key. Empty where a web server in front of this one does TLS.
c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = given.certificate, given.key
# SUBDOMAINS: where the class has a wildcard name, "https://hub.example.org" gives each attendee a web address of their
# own: a page that one of them made cannot use the server of another who opens it, nor set the cookies of another.
c.JupyterHub.subdomain_host = given.subdomain_host
c.JupyterHub.cookie_host_prefix_enabled = given.subdomain_host.startswith("https://")
# Without it the proxy (hub/proxy.mjs) lets a browser only to its own server. By this page it proves whose it is.
c.JupyterHub.extra_handlers = [("/own", own.OwnHandler)]
# A page of a server cannot read the hub's pages in a window that it opens, nor the token that the hub's forms carry.
c.JupyterHub.tornado_settings = {
    "headers": {"Cross-Origin-Opener-Policy": "noopener-allow-popups"},
    "xsrf_cookie_kwargs": {"httponly": True},
}
# Requests are bounded in size and time, and so are the connections of each user id: no user fills the hub's memory.
bounds.bound_requests()
# AUTHENTICATOR: attendees choose a password at their first login, or have got one by the users file. Others: "pam" for
# the accounts of this machine, "oauthenticator.GitHubOAuthenticator", ... "dummy" lets in anybody: for rehearsals.
c.JupyterHub.authenticator_class = "dummy" if given.dummy else "hpdl_lab.classroom.authenticator.AttendeeAuthenticator"
# Only these names may log in. A site with accounts of its own: c.Authenticator.allow_all = True.
c.Authenticator.allowed_users = set(given.users)
# Nor who was on an earlier list: they lose their sessions and tokens.
c.Authenticator.allow_existing_users, c.Authenticator.delete_invalid_users = False, not given.dummy
# Hashes of the passwords, which only root can read, and which a restart keeps.
c.AttendeeAuthenticator.passwords = str(given.passwords)
# What the login page says above the form.
c.JupyterHub.template_vars = {"announcement_login": authenticator.GREETING}
# Sessions and tokens last for the day of a class.
c.JupyterHub.cookie_max_age_days = 1
c.JupyterHub.token_expires_in_max_seconds = 24 * 3600

# -- what they get -----------------------------------------------------------------------------------------------------

# SPAWNER: a sandbox by bubblewrap, as a user of the attendee's own, limited. Others: "dockerspawner.DockerSpawner",
# "batchspawner.SlurmSpawner" on a cluster (cluster/slurm/), or "systemdspawner.SystemdSpawner" where systemd runs, with
# c.SystemdSpawner.dynamic_users = c.SystemdSpawner.isolate_tmp = c.SystemdSpawner.isolate_devices = True
# c.SystemdSpawner.unit_extra_properties = {"PrivateIPC": "yes", "ProtectProc": "invisible", "ProtectHome": "tmpfs"}
c.JupyterHub.spawner_class = "hpdl_lab.classroom.spawner.AttendeeSpawner"
# Brings the attendee's notebooks up to date, then becomes JupyterHub's single-user server.
c.Spawner.cmd = [sys.executable, "-m", "hpdl_lab.classroom.server"]
# The attendee's copy of the notebooks, in JupyterLab.
c.Spawner.notebook_dir = "~/notebooks"
c.Spawner.default_url = "/lab"
c.Spawner.args = [
    # Kernels talk over sockets in a folder that only the attendee can enter. Over TCP any account could read along.
    "--KernelManager.transport=ipc",
    # Saves an open notebook every 20 s instead of 120, as a server that is stopped should lose little; and no debugger:
    # it listens on a port of this machine, at which it obeys any account.
    f"--LabApp.app_settings_dir={settings.CONFIGURATION.parent / 'hub'}",
    # No news from the internet, as in `make lab`.
    "--LabApp.news_url=None",
    # Not what starts clusters of its own, edits scripts as notebooks, or looks for language servers by npm: without it
    # a server starts in three quarters of the time, which counts where a class comes at once.
    "--ServerApp.jpserver_extensions=ipyparallel=False",
    "--ServerApp.jpserver_extensions=jupyterlab_jupytext=False",
    "--LanguageServerManager.autodetect=False",
]
# Seconds for a server to start, and to answer: a class that logs in at the same minute waits for cores.
c.Spawner.start_timeout = c.Spawner.http_timeout = given.start_timeout
# A server that does not start is tried again by its attendee, not given up for the whole hub.
c.Spawner.consecutive_failure_limit = 0

# -- idle servers ------------------------------------------------------------------------------------------------------

# Servers tell the hub of activity as often as idle ones are looked for.
c.Spawner.environment = {"JUPYTERHUB_ACTIVITY_INTERVAL": str(given.look_seconds)}
# Seconds between two looks at the proxy: one that was killed and started again gets its routes then.
c.JupyterHub.last_activity_interval = 5
# `hpdl hub --forget-password` may delete a user, with sessions and tokens, and nothing else.
c.JupyterHub.services = [{"name": "hpdl", "api_token": (given.private / hub.API_TOKEN).read_text()}]
c.JupyterHub.load_roles = [{"name": "hpdl", "scopes": ["delete:users", "delete:servers"], "services": ["hpdl"]}]
# Attendees may use and stop their server. They make no API tokens: one that a script made would outlive the script.
own_rights = ["read:users!user", "users:activity!user", "servers!user", "access:servers!user"]
c.JupyterHub.load_roles.append({"name": "user", "description": "An attendee", "scopes": own_rights})
if given.idle:
    # jupyterhub-idle-culler stops servers that are idle for so long, with their engines. Files stay.
    # It ends with its hub, also if the hub is killed: the next hub starts another.
    cull = (
        "import runpy; from hpdl_lab.classroom.hub import end_with_parent; end_with_parent(); "
        "runpy.run_module('jupyterhub_idle_culler', run_name='__main__', alter_sys=True)"
    )
    often = ["--timeout", f"{given.idle * 60:.0f}", "--cull-every", str(given.look_seconds)]
    proof = ["--ssl-enabled=true", f"--internal-certs-location={given.certificates}"]
    c.JupyterHub.services.append({"name": "cull-idle", "command": [sys.executable, "-c", cull, *often, *proof]})
    # It may see who is active and stop servers, and nothing else.
    scopes = ["list:users", "read:users:activity", "read:servers", "delete:servers"]
    c.JupyterHub.load_roles.append({"name": "cull-idle", "scopes": scopes, "services": ["cull-idle"]})

# -- what stays, and who connects to whom ------------------------------------------------------------------------------

# Who is there and whose server runs where: with it a hub that was restarted, or killed, takes over running servers.
c.JupyterHub.db_url = f"sqlite:///{given.private / 'jupyterhub.sqlite'}"
# Browsers stay logged in over a restart.
c.JupyterHub.cookie_secret_file = str(given.private / "cookie_secret")
# Hub, proxy and servers encrypt their connections and prove who they are: a server that an attendee starts in the
# place of another's is refused.
c.JupyterHub.internal_ssl = True
c.JupyterHub.internal_certs_location = str(given.certificates)
# Servers reach the hub here; the port stays, because servers that run over a restart know it.
c.JupyterHub.hub_bind_url = f"https://127.0.0.1:{given.hub_port}"
# The proxy, for Node. Its own interface is on loopback. `hpdl hub` starts it and holds the ports of both.
c.ConfigurableHTTPProxy.should_start = by_hand
node, script = hub.proxy_program()
c.ConfigurableHTTPProxy.command = [node, "--import", hub.GUARD, script]
c.ConfigurableHTTPProxy.api_url = f"https://127.0.0.1:{given.proxy_port}"
# By it a hub ends the proxy of one that was killed.
c.ConfigurableHTTPProxy.pid_file = str(given.private / "proxy.pid")
