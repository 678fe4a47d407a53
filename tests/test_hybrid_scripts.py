"""What notebook 11 runs: the changed script takes the steps of the plain one, also from a checkpoint, and prices."""

import pytest

from hpdl_lab import data
from hpdl_lab.comm import sim
from hpdl_lab.parallel.scripts import hybrid_script, price, script, simulated_step
from tests.wording import raises


def test_three_changed_lines_take_the_steps_of_one_rank_and_go_on_on_another_mesh(tmp_path):
    text, path = data.load("text"), str(tmp_path / "gpt.checkpoint")
    alone = sim.run(1, script, text, 4)[0]
    first = sim.run(4, hybrid_script, text, {"dp": 2, "pp": 2}, 2, None, path)
    then = sim.run(2, hybrid_script, text, {"tp": 2}, 2, path, threads=True)
    for rank in range(4):
        assert first[rank].losses == pytest.approx(alone.losses[:2], abs=1e-10)
    assert then[1].losses == pytest.approx(alone.losses[2:], abs=1e-10)
    assert first[0].held + first[1].held > alone.held > first[0].held  # the table of tokens is on both stages


def test_the_published_grid_is_priced_near_the_published_step():
    """NVIDIA, Megatron-LM, README.md, "GPT-3 Example": 32 s on 1,024 A100."""
    found = price(8, 16, 8)
    assert found.seconds == pytest.approx(32, rel=0.15)
    assert found.nbytes < 80e9
    with raises(ValueError, "dp=1024"):
        price(1024, 1, 1)


def test_simulated_ranks_take_the_models_time():
    simulated, modelled = simulated_step(2, 4, 2, micro_batches=4)
    assert simulated == pytest.approx(modelled, rel=0.05)
