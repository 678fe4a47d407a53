"""The classroom: a hub for many attendees, what it needs, and its rehearsal.

    instructor's shell                                  attendee's browser
        |  hpdl plan    plan.py    will it fit, and what runs out first; constants from costs.py
        |  hpdl hub     hub.py     ------ proxy ---------->|  login, server, notebook, engines
        |  hpdl drill   drill.py   ------ proxy ------>  attendee.py, which does what the browser does

A hub: `settings.py` what was asked for, `state.py` what it has made and whose that is, `authenticator.py` who may log
in, `spawner.py` starts a server in the attendee's `sandbox.py`, within `limits.py`; `server.py` is what then runs;
`sockets.py` keeps the ports. cluster/jupyterhub_config.py puts these together.

JupyterHub, its proxy, idle culler and internal TLS, bubblewrap and setpriv do the work. What is here by hand, and why:

    authenticator.py    no maintained authenticator slows guesses by name and address, and deletes who leaves the list
    spawner.py          SystemdSpawner needs systemd, which containers lack; where it runs, the configuration shows how
    limits.py           control groups without systemd, of both versions
    sockets.py          a proxy that is started again must not lose its port to an attendee's program
    drill.py            hubtraf logs in and runs a cell; it knows no engines, and measures no memory
    ../release/         nbgitpuller merges lines of JSON, nbdime loses some (release/merge.py has the figures)
"""
