"""One part of run.py, in a process of its own, with the module that it is told to take."""

import argparse
import gc
import importlib.util
import random
import sys


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=("alone", "threads", "ranks"))
    for name, kind in (("cases", int), ("seed", int), ("size", int), ("at", str), ("module", str)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    if options.module:
        take(options.module)
    from hpdl_lab.features import compiled_module

    core = compiled_module()
    if options.name == "threads":
        import threads

        threads.run(core, options.seed, options.size, options.cases)
        return
    from hpdl_lab.comm.mpi.session import session_of_this_process

    session = session_of_this_process()
    if options.name == "alone":
        import alone

        torch = import_torch() if options.torch else None
        cases = alone.run(core, session, random.Random(options.seed), options.cases, torch)
    else:
        import ranks

        cases = ranks.run(core, session, options.seed, options.cases)
    with open(f"{options.at}{session.rank}", "w") as file:
        for case in cases:
            file.seek(0)
            file.write(f"{case}\n")
            file.truncate()
            file.flush()


def import_torch():
    """Without looking for garbage, which would take a third of the time."""
    gc.disable()
    import torch

    gc.freeze()
    gc.enable()
    return torch


def take(path):
    """Make the file `path` the module hpdl_lab._core of this process."""
    spec = importlib.util.spec_from_file_location("hpdl_lab._core", path)
    import hpdl_lab  # noqa: F401  (the package, before its module)

    sys.modules["hpdl_lab._core"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
