"""The classroom: a hub for many attendees, what it needs, and its rehearsal.

    instructor's shell                                  attendee's browser
        |  hpdl plan    plan.py    will it fit, and what hurts first; constants from costs.py
        |  hpdl hub     hub.py     ------ proxy ---------->|  login, server, notebook, engines
        |  hpdl drill   drill.py   ------ proxy ------>  attendee.py, which does what the browser does

`costs.py` holds what one attendee costs, measured; `census.py` counts the processes of a hub and what they use.

`release.py` writes an attendee's notebooks and merges updates of them (`forms.py` reads what notebooks/build.py built,
`merge.py` merges cell by cell); `course.py` writes the same lessons as a course for nbgrader.
"""
