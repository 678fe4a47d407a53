"""The magics `%px` and `%%px` of a notebook. At their first use the engines join ipyparallel, in a second."""

LINE = ("pxresult", "pxconfig", "autopx", "result")  # as ipyparallel names them


def offer(cluster, shell):
    """Have the magics in the IPython shell `shell`, for the engines of `cluster`."""
    for name in LINE:
        shell.register_magic_function(first_use(cluster, shell, name), "line", name)
    shell.register_magic_function(first_use(cluster, shell, "px"), "line_cell", "px")


def first_use(cluster, shell, name):
    """Magic `name`, which puts ipyparallel's magics in the places of all these, and runs its own."""

    def magic(line, cell=None):
        view = cluster.client[:]
        view.block = True
        view.activate()
        return shell.run_line_magic(name, line) if cell is None else shell.run_cell_magic(name, line, cell)

    return magic
