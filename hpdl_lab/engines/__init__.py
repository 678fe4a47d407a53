"""The engine cluster under the notebook: MPI processes that serve `lab.run`, and become ipyparallel engines for %px.

    notebook kernel --- supervisor      one small process that owns all others and ends them (supervisor.py)
        |                 |-- controller        ipyparallel's, once %px is used (px.py, px_processes.py)
        |                 `-- mpiexec
        |                       |-- engine 0    one MPI rank each (engine.py), running tasks (task.py)
        `--- one socket ------- `-- engine n-1

ipyparallel is used for %px only: before its first use neither its controller nor its engines are loaded.
On emulated hosts mpiexec's engines enter networks of their own (hosts.py). In a Slurm job they run on nodes, and a
relay makes their sockets appear in the session directory all the same (remote.py, relay.py).

`cluster.Cluster` starts, attaches, restarts and stops; `pool.EnginePool` is the engines of one start; `run.Run`
run a function and streams what they say; `errors.py` makes one text of what they raised.
"""
