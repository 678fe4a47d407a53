"""The classroom: a hub for many attendees, what it needs, and its rehearsal.

    instructor's shell                                  attendee's browser
        |  hpdl plan    plan.py    will it fit, and what hurts first; constants from costs.py
        |  hpdl hub     hub.py     ------ proxy ---------->|  login, server, notebook, engines
        |  hpdl drill   drill.py   ------ proxy ------>  attendee.py, which does what the browser does

A hub: `settings.py` what was asked for, `preparation.py` what is made before the start, `leftovers.py` what is ended
and removed after it; `users.py` and `accounts.py` who may log in, and as which Unix account; `spawner.py` starts a
server as that account (`account_process.py`, `enter.py`), within `limits.py`, with the view of `reach.py`; `server.py`
is what then runs; `proxy.py` and `ports.py` say by which way browsers come. cluster/jupyterhub_config.py puts these
together.

`costs.py` holds what one attendee costs, measured; `census.py` counts the processes of a hub and what they use.

`release.py` writes an attendee's notebooks and merges updates of them (`forms.py` reads what notebooks/build.py built,
`merge.py` merges cell by cell); `course.py` writes the same lessons as a course for nbgrader.
"""
