"""lab.compare: the bytes are those of the formulas, the picture has every name, and what cannot be is a sentence."""

import pytest
from matplotlib.text import Text

from hpdl_lab import lab
from hpdl_lab.parallel.compression import Cast, DataParallelCompressed
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.local_sgd import LocalSGD, Tournament
from hpdl_lab.verbs.compare import HELD_OUT, fewer_bytes
from tests.wording import raises

P, STEPS, N = 4, 4, 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10


def test_bytes_are_those_of_the_steps_alone():
    strategies = {"all": DataParallel(), "16 bits": DataParallelCompressed(Cast()), "seldom": LocalSGD(2)}
    result = lab.compare(strategies, ranks=P, steps=STEPS, prediction={"seldom": 0.5})
    whole = 2 * (P - 1) / P * 4
    assert result["all"].nbytes == whole * (N + 1) * STEPS
    assert result["16 bits"].nbytes == whole * (N / 2 + 1) * STEPS
    assert result["seldom"].nbytes == whole * N * STEPS / 2
    assert [len(row.losses) for row in result.rows.values()] == [STEPS] * 3 and "50.0%" in repr(result)
    assert result["all"].losses[0] == pytest.approx(result["16 bits"].losses[0], rel=1e-6)
    written = {text.get_text() for text in result.figure.findobj(Text)}
    assert written >= {"all", "16 bits", "seldom", "Up and to the left is better. Stars: your guess."}


def test_the_default_compares_what_the_notebook_speaks_of():
    from hpdl_lab import data

    digits = data.load("digits")
    strategies, rest = fewer_bytes(digits)
    held = next(s for s in strategies.values() if isinstance(s, Tournament))
    assert len(held.x) + len(rest.train_y) == len(digits.train_y) and len(held.x) == -(-len(digits.train_y) // HELD_OUT)
    assert len(strategies) == 12 and next(iter(strategies)) == "data parallel"


@pytest.mark.parametrize(
    ("options", "error", "facts"),
    [
        ({"strategies": DataParallel()}, TypeError, ("DataParallel()",)),
        ({"strategies": {"mine": 3}}, TypeError, ("3",)),
        ({"ranks": 1}, ValueError, ("ranks", "2", "1")),
        ({"prediction": {"top": 0.5}}, ValueError, ("'top'", "top-k, 1%")),
        ({"prediction": {"bf16": 97}}, ValueError, ("bf16", "97")),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(options, error, facts):
    with raises(error, *facts):
        lab.compare(**options)
