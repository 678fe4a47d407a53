"""Decode on real ranks: the tokens of one process, with heads or blocks shared out, and prompts read elsewhere."""

import functools

import pytest
import torch

from hpdl_lab import models
from hpdl_lab.inference.engine import Engine
from hpdl_lab.inference.stages import part_for_rank, run_interleaved
from hpdl_lab.inference.transfer import generate_disaggregated
from hpdl_lab.mesh import DeviceMesh

NEW = 8
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [9], [3, 2, 3, 8, 4]]


@functools.cache
def problem():
    fields = {"vocabulary": 12, "block": 32, "layers": 6, "heads": 12, "kv_heads": 6, "width": 24, "hidden": 24}
    model = models.build("llama", dtype="float64", **fields)
    return model, Engine(model).generate(PROMPTS, NEW)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_ranks_share_heads_or_blocks(comm, axis):
    if 6 % comm.size:
        pytest.skip(f"6 key heads and 6 blocks are not for {comm.size} ranks")
    model, want = problem()
    part = part_for_rank(DeviceMesh(comm, **{axis: comm.size}), model)
    assert Engine(part, slots=3, page_size=4, budget=8).generate(PROMPTS, NEW) == want
    if axis == "pp" and comm.size > 1:
        engines = [Engine(part, slots=2) for _ in range(comm.size)]
        streams = [engines[i % comm.size].submit(prompt, NEW) for i, prompt in enumerate(PROMPTS)]
        run_interleaved(part, engines)
        assert [stream.request.output_tokens for stream in streams] == want


def test_one_rank_reads_prompts_and_the_others_decode(comm):
    if comm.size < 2:
        pytest.skip("one rank cannot read for another")
    model, want = problem()
    mine = generate_disaggregated(comm, model, PROMPTS, NEW)
    assert mine == {i: new for i, new in enumerate(want) if comm.rank and i % (comm.size - 1) == comm.rank - 1}
    assert int(comm.all_reduce(torch.tensor(len(mine)))) == len(PROMPTS)
