"""The cost of trainings against published numbers: petaflop/s-days, days, MWh, and Chinchilla's own size."""

import pytest

from hpdl_lab.performance.cost import TRAININGS, chinchilla, cost, table_of_trainings

BY_NAME = {training.name: training for training in TRAININGS}


def of(name):
    t = BY_NAME[name]
    return cost(t.flops, t.devices, t.peak, t.mfu(), t.watts, t.pue)


def test_gpt_3_as_published():
    """Brown et al. 2020, table D.1: 3,640 petaflop/s-days; Patterson et al. 2021, table 4: 14.8 days, 1,287 MWh."""
    t = BY_NAME["GPT-3 175B"]
    planned = cost(t.flops, t.devices, t.peak, 24.6 / 125, t.watts, t.pue)  # at the measured 24.6 teraFLOP/s
    assert planned == pytest.approx((3640, 14.8, 1287e3), rel=0.01)
    assert of(t.name) == pytest.approx(planned, rel=0.01)
    assert 6 * t.parameters * t.tokens == pytest.approx(t.flops, rel=0.01)


def test_other_published_numbers():
    assert of("AlexNet")[0] == pytest.approx(0.0054, rel=0.05)  # OpenAI, AI and Compute; 2018
    assert of("DeepSeek-V3")[1] == pytest.approx(3.7 * 14.8, rel=0.02)  # 3.7 days for each trillion tokens
    llama = BY_NAME["Llama 3.1 405B"]
    assert 6 * llama.parameters * llama.tokens == pytest.approx(llama.flops, rel=0.01)
    assert all(0.15 < t.mfu() < 0.5 for t in TRAININGS)


def test_chinchilla_is_on_its_own_line_and_the_table_takes_any_price():
    assert chinchilla(6 * 70e9 * 1.4e12) == pytest.approx((70e9, 1.4e12))  # Hoffmann et al. 2022
    free, dear = table_of_trainings(0).split("\n"), table_of_trainings(1).split("\n")
    assert len(free) == len(TRAININGS) + 1 and free[0] == dear[0]
    assert "1,289,376           0" in free[4] and "1,289,376   1,289,376" in dear[4]
