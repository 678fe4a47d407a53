"""lab.check_script rejects every wrong script for the reason meant for it, within its time, and accepts right ones."""

import time

import pytest

from hpdl_lab.checks.scripts.table import SCRIPTS, check_script, script_of
from tests import script_answers

WRONG = [*script_answers.wrong_scripts()]
RIGHT = [(exercise, name, edits) for exercise in SCRIPTS for name, edits in script_answers.RIGHT[exercise.id].items()]


def checked(exercise, text, folder):
    path = folder / exercise.file
    path.write_text(text)
    return check_script(exercise, path)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("exercise", "failed", "says", "text"), WRONG, ids=[f"{e.id}-{failed}-{says[:30]}" for e, failed, says, _ in WRONG]
)
def test_a_wrong_script_is_rejected_with_its_message_in_time(exercise, failed, says, text, tmp_path):
    began = time.monotonic()
    result = checked(exercise, text, tmp_path)
    assert (result.failed, says.lower() in result.message.lower()) == (failed, True), result
    assert time.monotonic() - began < 60


@pytest.mark.timeout(120)
@pytest.mark.parametrize("exercise", SCRIPTS, ids=lambda e: e.id)
def test_the_solution_passes(exercise):
    result = check_script(exercise, script_of(exercise.file))
    assert result, result
    assert "as on one rank, to 1e-12" in str(result)
