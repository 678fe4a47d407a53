"""PyTorch's DDP on any all-reduce, on the engines: the hooks, the backend "hpdl", and the bench of all of them."""

import functools
import types

import pytest
import torch

from hpdl_lab import data
from hpdl_lab.bench import ddp as bench
from hpdl_lab.bench import launch
from hpdl_lab.bench.report import Report
from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.comm.torch.group import process_group
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.compression import PowerSGD, TopK
from hpdl_lab.parallel.ddp import Communication, Compression, compressed_hook, ddp_hook, ddp_hook_async
from hpdl_lab.parallel.scripts import ddp_script
from tests.wording import raises


def trained(comm, hook, all_reduce, steps=4, static_graph=False):
    """The parameters (N,) of a net after some steps of DDP on gloo, whose gradients `hook` has averaged, or gloo."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(comm.rank)
    net = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(5)])
    with process_group(comm):
        model = DistributedDataParallel(net, bucket_cap_mb=0.3, static_graph=static_graph)
        if hook is not None:
            model.register_comm_hook(Communication(comm, all_reduce) if all_reduce else Communication(comm), hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2]], ids=len)
def test_ddp_trains_on_an_attendees_ring(cluster, ranks):
    want = cluster.run(trained, None, None, ranks=ranks)[0]
    for hook, all_reduce in ((ddp_hook, ring.all_reduce), (ddp_hook_async, ring.all_reduce), (ddp_hook_async, None)):
        found = cluster.run(trained, hook, all_reduce, ranks=ranks)
        assert all(torch.equal(other, found[0]) for other in found)
        assert torch.equal(found[0], want) if len(ranks) == 2 else torch.allclose(found[0], want, rtol=1e-5, atol=1e-6)
        lanes = {e.lane for e in found.events if e.op == ("send" if all_reduce else "all_reduce")}
        assert lanes == ({"background"} if hook is ddp_hook_async else {""})


def test_the_hook_beside_of_a_static_graph(cluster):
    """Its first step sends all buckets at the end of backward."""
    found = cluster.run(trained, ddp_hook_async, ring.all_reduce, 4, True, ranks=[0, 1], deadline=10)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], cluster.run(trained, None, None, 4, True, ranks=[0, 1])[0])


def test_the_hook_beside_refuses_what_is_no_sum(cluster):
    def first_element(comm, x):
        return x[:1].clone()

    with pytest.raises(Exception, match=r"all_reduce .* shape \(1,\)"):
        cluster.run(trained, ddp_hook_async, first_element, ranks=[0, 1], deadline=10)
    assert cluster.run(trained, ddp_hook, ring.all_reduce, 1, ranks=[0, 1])[0].numel() == 5 * 300 * 301


def compressed(comm, compressor, steps):
    """Losses of PyTorch's DDP with a compressor in its hook, or with torch's own where that is None."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
    from torch.nn.parallel import DistributedDataParallel

    model, losses = mlp((64, 32, 10), seed=1).double(), []
    with process_group(comm):
        wrapped = DistributedDataParallel(model)
        if compressor is None:
            wrapped.register_comm_hook(torchs.PowerSGDState(None, 2, start_powerSGD_iter=2), torchs.powerSGD_hook)
        else:
            wrapped.register_comm_hook(Compression(comm, compressor), compressed_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            generator = torch.Generator().manual_seed(10 * comm.rank + step % 3)
            x = torch.randn(8, 64, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            loss = (wrapped(x) - x[:, :10]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_our_power_sgd_in_ddp_has_the_losses_of_torchs(cluster):
    theirs = cluster.run(compressed, None, 10, ranks=[0, 1])
    ours = cluster.run(compressed, PowerSGD(2), 10, ranks=[0, 1])
    dense = cluster.run(compressed, PowerSGD(2, least=1e9), 10, ranks=[0, 1])
    top_k = cluster.run(compressed, TopK(0.05), 10, ranks=[0, 1])
    for rank in range(2):
        assert ours[rank] == pytest.approx(theirs[rank], abs=1e-10)
        assert abs(ours[rank][-1] - dense[rank][-1]) > 1e-6
        assert top_k[rank][-1] < top_k[rank][0]


def promised(state, bucket, *value):
    """A future, with this value where one is given."""
    future = torch.futures.Future()
    if value:
        future.set_result(value[0])
    return future


def test_a_wrong_hook_is_a_sentence_where_ddp_would_crash_or_wait_for_ever(cluster):
    def run(**options):
        script = functools.partial(ddp_script, data=data.load("copy", n=64), steps=1, **options)
        return cluster.run(script, ranks=[0, 1], deadline=20)

    for hook, fact in (
        (lambda state, bucket: None, "NoneType"),
        (lambda state, bucket: bucket.buffer(), "Tensor"),
        (promised, "no value"),
        (lambda state, bucket: promised(state, bucket, [0.0]), "list"),
        (lambda state, bucket: promised(state, bucket, bucket.buffer()[:3].clone()), r"shape \(3,\)"),
    ):
        with pytest.raises(Exception, match=fact):
            run(hook=hook)
    with pytest.raises(Exception, match="element 0 of 5 should be 2"):
        run(all_reduce=lambda comm, x: -ring.all_reduce(comm, x))
    for hook in (ddp_hook_async, lambda mine, other_names: ddp_hook(mine, other_names)):
        assert len(run(all_reduce=ring.all_reduce, hook=hook)[0]) == 1


def test_engines_are_whole_after_a_rank_has_left_in_the_middle(cluster):
    def leaves(comm):
        with process_group(comm):
            if comm.rank == 1:
                raise LookupError("gone")
            torch.distributed.barrier()

    with pytest.raises(Exception, match="gone|onnect"):
        cluster.run(leaves, ranks=[0, 1], deadline=4)
    assert cluster.run(trained, ddp_hook, ring.all_reduce, 1, ranks=[0, 1])[0].numel() == 5 * 300 * 301


@pytest.mark.parametrize("all_reduce", [ring.all_reduce, lambda comm, x: comm.all_reduce(x), None])
def test_the_hook_averages_a_bucket(all_reduce):
    """On simulated ranks, with a bucket that DDP has not made."""

    def averaged(comm):
        bucket = types.SimpleNamespace(buffer=lambda: torch.full((10,), float(comm.rank)))
        return ddp_hook(Communication(comm, all_reduce) if all_reduce else Communication(comm), bucket).wait()

    assert all((x == 1.0).all() for x in sim.run(3, averaged))


def test_the_hook_takes_what_works_in_place_and_returns_nothing():
    def averaged(comm):
        bucket = types.SimpleNamespace(buffer=lambda: torch.full((10,), 3.0))
        return ddp_hook(Communication(comm, lambda comm, x: None), bucket).wait()

    assert all((x == 1.0).all() for x in sim.run(3, averaged))


def test_simulated_ranks_have_no_process_group():
    def within(comm):
        with process_group(comm):
            pass

    with raises(ValueError):
        sim.run(2, within)


# -- bench -----------------------------------------------------------------------------------------------------------


def test_contenders_come_to_the_same_and_are_timed(cluster):
    rows = cluster.run(bench.on_ranks, "tiny", 4, 3, ranks=[0, 1], deadline=30).rows
    assert [row["name"] for row in rows] == [name for name in (*bench.WITHOUT, *bench.SILENT) if name != bench.ON_NCCL]
    assert all(row["wrong"] == 0 and row["step_ms"][0] > 0 for row in rows)
    assert [row["name"] for row in rows if row["in_events_ms"] is None] == ["DDP on gloo"]
    (row,) = cluster.run(bench.memory_on_ranks, "tiny", 4, "overlapped", ranks=[0, 1], deadline=30).rows
    assert 50 < row["peak_MiB"] < 5000


def test_the_table_compares_with_ddp_on_gloo(monkeypatch, tmp_path, capsys):
    about = {"mpi": "M", "machine": "C", "instructions": "I", "system": "S", "versions": {"torch": "2"}, "date": "D"}

    def on_ranks(ranks, kind, runs, device):
        yield {"about": about}
        if kind == "ddp_memory":
            yield {"peak_MiB": 300.0}
            return
        for i, name in enumerate(name for name in (*bench.WITHOUT, *bench.SILENT) if name != bench.ON_NCCL):
            step = [40.0 - 10 * i, 39.0, 41.0]
            exposed = [20.0 - 5 * i, 1.0, 30.0]
            row = {"name": name, "parameters": 1234, "wrong": 0, "step_ms": step, "samples_per_s": 100.0}
            row["pull_us"] = [2.0, 1.9, 2.1]
            yield {**row, "exposed_ms": exposed, "in_events_ms": None}

    monkeypatch.setattr(launch, "on_ranks", on_ranks)
    bench.ddp(2, "tiny", 8, 5, Report("hpdl bench ddp", tmp_path / "rows.json", tmp_path / "table.md"))
    said, table = capsys.readouterr().out, (tmp_path / "table.md").read_text()
    for text in (said, table):
        assert "DDP on hpdl: 1.33 times the samples/s of DDP on gloo, 75% of its exposed time." in text
        assert "1,234 parameters." in text and "read in 2.0 us, 1.9 to 2.1" in text
        assert "bucketed: 2.00 times the samples/s of DDP on gloo, 50% of its exposed time." in text
    assert '"peak_MiB": 300.0' in (tmp_path / "rows.json").read_text()
    with raises(ValueError, "1", "2 ranks"):
        bench.ddp(2, "tiny", 1, 5)
