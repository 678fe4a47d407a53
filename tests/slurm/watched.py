"""The process beside a job of engines, and what it tells: what a test of jobs starts."""

import json
import os
import subprocess
import time

import pytest

from hpdl_lab.engines import layout, session_dir, slurm_job
from tests.slurm.controller import PATIENCE


class Watched:
    """A slurm_job process, and what it tells."""

    def __init__(self, folder, n, script, shared=None, **said):
        self.path = str(folder)
        self.shared = str(shared or folder)
        options = layout.checked_job_options(said, n)
        command = slurm_job.argv(self.path, n, options, ["/bin/sh", "-c", script], self.shared)
        self.process = subprocess.Popen(command)

    def told(self, state, has=""):
        """job.json as soon as it tells `state`, with the text `has`, or the end of the job."""
        give_up, told = time.monotonic() + PATIENCE, {}
        while time.monotonic() < give_up:
            if os.path.exists(file := session_dir.job_file(self.path)):
                with open(file) as opened:
                    told = json.load(opened)
                if told["state"] == "ended" or (told["state"] == state and has in told["text"]):
                    return told
            time.sleep(0.02)
        pytest.fail(f"not {state} {has!r} within {PATIENCE} s: {told}")

    def end(self):
        self.process.terminate()
        return self.process.wait()
