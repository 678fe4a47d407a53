"""Checks that teach: one file per notebook, and the table of all exercises in `exercises.py`.

A new exercise is one record: the library function that solves it, a check that raises Broken with the sentence to say,
three hints for each invariant, and the wrong answers that the check must reject. A notebook source names the function:

    # %% exercise="hpdl_lab.collectives.ring:reduce_scatter"
    # %% check="hpdl_lab.collectives.ring:reduce_scatter"

and `python notebooks/build.py` writes both forms. tests/test_checks.py runs every answer of every record.
"""
