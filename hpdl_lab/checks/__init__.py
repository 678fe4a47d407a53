"""Checks that teach: every module of lessons/ is found by `exercises.py`, and its EXERCISES are the table.

A new exercise is one record: the library function that solves it, and a check that raises Broken with the sentence
to say. Its hints and its explanation are in notebooks/hints/, the wrong answers that the check must reject in
tests/answers/. A notebook source names the function:

    # %% exercise="hpdl_lab.collectives.ring:reduce_scatter"
    # %% check="hpdl_lab.collectives.ring:reduce_scatter"

and `python notebooks/build.py` writes both forms. tests/test_checks.py runs every answer of every record.

A check runs the answer by `ranks.simulate` and raises Broken(invariant, sentence); `exercises.check` attaches the
events of that run. Runs of other functions, to compare with or to explain, are made with evidence=False:

    def check_mean(fn, runner=None):
        run = simulate(4, fn, where="with 4 ranks")
        right = simulate(4, reference.mean, evidence=False)
        for r, (got, expected) in enumerate(zip(run, right, strict=True)):
            if got != expected:
                raise Broken("mean", f"With 4 ranks rank {r} returned {got}, and the mean is {expected}.")
        check_waits(run.events, 4)
        return Passed(("the mean, on 4 simulated ranks",), run.events, 4)
"""
