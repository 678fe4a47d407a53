"""Checks that teach: every module of lessons/ is found by `exercises.py`, and its EXERCISES are the table.

A new exercise is one function and one record: a check, and the library function that solves the exercise. Its hints and
its explanation are in notebooks/hints/, the wrong answers that the check must reject in tests/answers/. A notebook
source names the function:

    # %% exercise="hpdl_lab.collectives.ring:reduce_scatter"
    # %% check="hpdl_lab.collectives.ring:reduce_scatter"

and `python notebooks/build.py` writes both forms. tests/test_checks.py runs every answer of every record.

A check runs the answer in all cases on simulated ranks, then on the engines, and raises Broken("invariant: sentence");
`exercises.check` attaches the events of the run that was judged. Runs of other functions, to compare with or to
explain, are made with evidence=False. What most checks need is in checkers.py:

    def add(comm, fn, n):                      # on every rank: what the answer returns, and what it left
        x = inputs(comm.size, n)[comm.rank]
        return fn(comm, x), x

    def judge(run, where, n):                  # where: "With 4 ranks", "On 4 engines"
        sums = [inputs(len(run), n).sum(axis=0)] * len(run)
        check_arrays(run, sums, where, "x", "return x,", lambda out, r: reason(out, mistakes(run, r)) or "sum: ")

    def check_add(fn, runner=None):
        run = in_all_cases(fn, add, ((3, 9), (4, 10), (1, 5)), lambda p, n: f"with {p} ranks", judge)
        check_waits(run.events, len(run))
        return Passed("the sum, on 1, 3 and 4 simulated ranks", *engine_facts(runner, judge, add, fn, 10), run=run)

    EXERCISES = (Exercise("5.1", "add", library.add, 1, check_add),)
"""
