"""Notebook 03's ward: seven specimens under letters, and the diagnosis of each."""

PATIENTS = {  # letter: name of the specimen, which gives too much away
    "A": "both_receive_first",
    "B": "counts_differ",
    "C": "branch_around_collective",
    "D": "opposite_communicators",
    "E": "unequal_loops",
    "F": "straggler",
    "G": "a_rank_raises",
}

DIAGNOSES = {  # diagnosis: what it means
    "circle": "each of some ranks waits for the next in the same call, and the last for the first",
    "mismatch": "a send and its receive do not mean the same message",
    "absent": "a rank never calls what the others wait in, because its program goes another way",
    "order": "all ranks make the same calls, but not in the same order",
    "error": "a rank raised an exception, and what it owed the others never comes",
    "slow": "nobody is stuck: one rank is late, and all others wait for it",
}


def diagnose():
    """Say what ails each of the programs A to G, which `lab.zoo()` shows.

        "circle"     each of some ranks waits for the next in the same call, and the last for the first
        "mismatch"   a send and its receive do not mean the same message
        "absent"     a rank never calls what the others wait in, because its program goes another way
        "order"      all ranks make the same calls, but not in the same order
        "error"      a rank raised an exception, and what it owed the others never comes
        "slow"       nobody is stuck: one rank is late, and all others wait for it

    Returns: dict, such as {"A": "slow", "B": ...}. A diagnosis may fit more than one program.
    """
    return {
        "A": "circle",
        "B": "mismatch",
        "C": "absent",
        "D": "order",
        "E": "absent",
        "F": "slow",
        "G": "error",
    }
