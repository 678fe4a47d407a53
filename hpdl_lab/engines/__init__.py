"""The engine cluster under the notebook: real MPI processes that are ipyparallel engines.

    notebook kernel --- keeper          one small process that owns all others and ends them (keeper.py)
        |                 |-- controller        ipyparallel's, for %px (controller.py)
        |                 `-- mpiexec
        |                       |-- engine 0    one MPI rank each (engine.py), serving tasks (server.py, task.py)
        `--- one socket ------- `-- engine n-1

`cluster.Cluster` starts, attaches, resizes and stops; `client.Client` runs a function on every engine and streams what it
says; `outcome.py` turns what the ranks raised into one text. `session_dir.py` says where the sockets and files live.
"""
