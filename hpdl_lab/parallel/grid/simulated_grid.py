"""A simulated step in a process of its own, for a notebook to end: `python -m hpdl_lab.parallel.grid.simulated_grid`.

It reads pickled arguments of simulation.simulate and writes the seconds of the step, or why there are none.
"""

import pickle
import subprocess
import sys

from ...features.uncollected import uncollected


class SimulatedGrid:
    """A simulation under way. stopped: whether somebody has ended it."""

    def __init__(self, *args, **options):
        """Begin simulation.simulate(*args, **options)."""
        self.stopped = False
        command = [sys.executable, "-m", __name__]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self.input = pickle.dumps((args, options))

    def seconds(self):
        """Wait for the end; returns virtual s of the step, None if it was stopped. Raises ValueError as simulate."""
        try:
            out, err = self.process.communicate(self.input)
        except BaseException:  # the stop button of the notebook
            self.process.kill()
            self.process.wait()
            raise
        if self.stopped:
            return None
        if self.process.returncode or not out:
            last = (err.decode(errors="replace").strip().splitlines() or ["without a word"])[-1]
            raise ValueError(f"the simulation ended: {last}")
        kind, value = pickle.loads(out)
        if kind == "refused":
            raise ValueError(value)
        return value

    def stop(self):
        self.stopped = True
        self.process.kill()


def main():
    with uncollected():  # a third of the time of a small grid
        from .simulation import simulate

    args, options = pickle.load(sys.stdin.buffer)
    try:
        answer = "seconds", simulate(*args, **options).seconds
    except ValueError as error:
        answer = "refused", str(error)
    sys.stdout.buffer.write(pickle.dumps(answer))


if __name__ == "__main__":
    main()
