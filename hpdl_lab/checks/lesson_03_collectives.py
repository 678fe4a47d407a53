"""Notebook 03, collectives: which of the eight does the job?"""

import re

from ..collectives import jobs as reference
from .ranks import alone, capital
from .record import Broken, Exercise, Passed

RIGHT = reference.which_collective()
LETTERS = {name.replace("_", ""): name for name in reference.DOES} | {"bcast": "broadcast"}
TOO_MUCH = {  # (right, named): what the named one does beyond the job
    ("reduce", "all_reduce"): "all_reduce would do it, and send the sum to ranks that do not need it",
    ("gather", "all_gather"): "all_gather would do it, and send the lists to ranks that do not need them",
    ("scatter", "broadcast"): "broadcast would do it, but every rank would get the rows of all the others too",
    ("reduce_scatter", "all_reduce"): "all_reduce would do it, but every rank would get the other rows of the sum too",
    ("all_to_all", "all_gather"): "all_gather would do it, but every rank would get what is meant for others too",
    ("all_reduce", "all_gather"): "all_gather would do, if every rank then added: p vectors to receive, not two",
}


def check_which_collective(fn, runner=None):
    named = alone(fn, where="here")
    if named is None:
        raise Broken("returns", "Your function returned nothing: return a dict, letter to name.")
    if not isinstance(named, dict):
        raise Broken("returns", f"Your function returned a {type(named).__name__}: return a dict, letter to name.")
    named = {str(letter).upper(): said for letter, said in named.items()}
    for job in reference.JOBS:
        check_job(job, named)
    unknown = [key for key in named if key not in RIGHT]
    if unknown:
        raise Broken("missing", f"There is no job {unknown[0]!r}: they are called A to H.")
    return Passed(("8 of 8 jobs, each with the collective that sends no more than is needed",))


def spelled(said):
    """The name of this lesson for what MPI, mpi4py, NCCL or torch call otherwise: "Allreduce" -> "all_reduce"."""
    letters = re.sub("[^a-z]", "", said.lower().rpartition(".")[2]) if isinstance(said, str) else ""
    letters = re.sub("^(mpi|nccl)|(block|intotensor|tensor|single)$", "", letters)
    return LETTERS.get(letters, str(said))


def check_job(job, named):
    """Raise Broken unless this job is done by the collective that is named for it, and not by a larger one."""
    right = RIGHT[job.letter]
    if job.letter not in named:
        raise Broken("missing", f"Job {job.letter} has no answer. {job.text}")
    said = spelled(named[job.letter])
    if said not in reference.DOES:
        known = ", ".join(reference.DOES)
        message = f"Job {job.letter}: no collective is called {named[job.letter]!r}. The eight are {known}."
        raise Broken("name", message)
    if said == right:
        return
    if (right, said) in TOO_MUCH:
        message = f"Job {job.letter}: {TOO_MUCH[right, said]}. Here {job.needs}."
        raise Broken("too much", message)
    message = f"Job {job.letter}: {said} {reference.DOES[said]}. {capital(job.needs)}."
    raise Broken("job", message)


EXERCISES = (
    Exercise(
        id="3.3",
        title="which collective is it",
        reference=reference.which_collective,
        stars=1,
        check=check_which_collective,
        parallel=False,
        explanation=(
            "Training uses all eight: B is data parallelism, G and F are the two halves of B and of sharded training "
            "(ZeRO), H sends words to experts, D and A start a run, C and E end it. Whoever asks for more than is "
            "needed pays for it in bytes."
        ),
    ),
)
