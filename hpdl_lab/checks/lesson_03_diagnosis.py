"""Notebook 03, the zoo: what ails these programs?"""

from .. import zoo
from ..comm import CommError, sim
from .ranks import alone
from .record import Broken, Exercise, Passed

RIGHT = zoo.diagnose()
DEADLINE = 1.0  # s of real time for a patient on simulated ranks


def check_diagnose(fn, runner=None):
    named = alone(fn, where="here")
    if not isinstance(named, dict):
        what = "nothing" if named is None else f"a {type(named).__name__}"
        raise Broken("returns", f"Your function returned {what}: return a dict, letter to diagnosis.")
    named = {
        str(letter).upper(): said.strip().lower() if isinstance(said, str) else said for letter, said in named.items()
    }
    for letter, right in RIGHT.items():
        if letter not in named:
            raise Broken("missing", f"Program {letter} has no diagnosis.")
        said = named[letter]
        if str(said) not in zoo.DIAGNOSES:
            known = ", ".join(zoo.DIAGNOSES)
            raise Broken("name", f"Program {letter}: there is no diagnosis {said!r}. There are {known}.")
        if said != right:
            raise contradiction(letter, said, right)
    unknown = [letter for letter in named if letter not in RIGHT]
    if unknown:
        raise Broken("missing", f"There is no program {unknown[0]!r}: they are called {', '.join(RIGHT)}.")
    return Passed((f"{len(RIGHT)} of {len(RIGHT)} programs",))


AGAINST = {  # (diagnosis, the right one): what in the table speaks against it; "" serves all others
    ("circle", "absent"): "The table shows ranks that wait, but no circle: whom they wait for does not wait.",
    ("circle", "order"): "They wait in a circle, but not in the same call.",
    ("absent", "circle"): "Every rank is there, and waits.",
    ("absent", "order"): "Every rank makes all its calls in the end: look in which order.",
    ("absent", "error"): "A rank is absent, that is true: but why?",
    ("slow", "circle"): "However long you wait, nothing changes: nobody computes.",
    ("slow", "absent"): "However long you wait, nothing changes: who is missing has finished.",
    ("order", "circle"): "With these calls no other order helps, as long as both ranks have the same.",
    ("absent", "slow"): "It does come to the call, only late.",
    ("error", "mismatch"): "It is the laboratory that stops it, because two ranks contradict each other.",
}
QUESTION = {  # what to look at, by the right diagnosis
    "circle": "What is the first call of each rank, and what does it need to end?",
    "mismatch": "Compare the two ends of each message: how many elements, of which kind?",
    "absent": "Count, for every rank, how often it comes to the call in which the others wait.",
    "order": "Write the calls of two ranks side by side.",
    "error": "Does every rank get through its own lines?",
    "slow": "Is there a rank that waits for nothing?",
}


def contradiction(letter, said, right):
    """Broken for a wrong diagnosis, with the table of a run."""
    against = AGAINST.get((said, right), f"{said!r} means: {zoo.DIAGNOSES[said]}. Not so here.")
    message = f"Program {letter}: you say {said!r}. {against} {QUESTION[right]}"
    return Broken("diagnosis", message, evidence(zoo.find(zoo.LETTERS[letter])))


def evidence(program):
    """What the ranks were doing when the program had been stopped, without the reason."""
    try:
        sim.run(program.ranks, program.broken, deadline=DEADLINE)
    except CommError as error:
        return "\n".join(str(error).split("\n")[1:])
    except Exception as error:  # what the ranks themselves raised
        return f"It ends with {type(error).__name__}: {error}"
    return ""


EXERCISES = (
    Exercise(
        id="3.4",
        title="diagnose seven programs",
        reference=zoo.diagnose,
        stars=2,
        check=check_diagnose,
        parallel=False,
        explanation=(
            "Nobody sees a deadlock: one sees ranks that wait. Who waits for whom, in which call, and who is missing: "
            "these three tell the diseases apart, and the doctor of this laboratory does nothing else."
        ),
    ),
)
