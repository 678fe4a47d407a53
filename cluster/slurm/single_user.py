"""What batchspawner-singleuser runs in an attendee's job: it takes a Python file, not a module."""

from hpdl_lab.classroom import server

server.main()
