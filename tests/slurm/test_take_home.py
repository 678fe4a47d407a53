"""The launch script that notebook 11 ends with, as Slurm reads it."""

import nbformat


def test_slurm_takes_the_launch_script_of_notebook_11(slurm, tmp_path):
    notebook = nbformat.read("notebooks/11_hybrid_parallel.ipynb", as_version=4)
    (text,) = [cell.source for cell in notebook.cells if "#SBATCH" in cell.source]
    script = tmp_path / "take_home_11.sbatch"
    script.write_text(text.partition("\n")[2])
    smaller = ["--gpus-per-node=2", "--cpus-per-task=1"]  # the nodes here have no more
    done = slurm.ask("sbatch", "--test-only", *smaller, script)
    assert done.returncode == 0 and " on nodes n[1-2] in partition" in done.stderr, done
    script.write_text(script.read_text().replace("--nodes=2", "--nodes=3"))
    assert slurm.ask("sbatch", "--test-only", *smaller, script).returncode != 0
