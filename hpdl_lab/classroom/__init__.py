"""The classroom: a hub for many attendees, what it needs, and its rehearsal.

    instructor's shell                                  attendee's browser
        |  hpdl plan    plan.py    will it fit, and what hurts first; constants from costs.py
        |  hpdl hub     hub.py     ------ proxy ---------->|  login, server, notebook, engines
        |  hpdl drill   drill.py   ------ proxy ------>  attendee.py, which does what the browser does

A hub: `settings.py` what was asked for, `state.py` what it has made and whose that is, `authenticator.py` who may log
in, `spawner.py` starts a server in the attendee's `sandbox.py`, within `limits.py`; `server.py` is what then runs;
`sockets.py` keeps the ports. cluster/jupyterhub_config.py puts these together.
"""
