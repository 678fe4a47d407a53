"""Reading: virtual time is that of torch's DataLoader, and the throttled reader takes as long as it was given."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hpdl_lab.performance import reading
from hpdl_lab.performance.reading import Throttled, measure_loader, play


class Numbers(Dataset):
    """Example i is (i, the worker that reads it)."""

    def __len__(self):
        return 13

    def __getitem__(self, i):
        return i, get_worker_info().id


def test_torch_deals_batches_to_workers_in_turn_and_fills_the_places_when_a_batch_is_taken():
    loader = iter(DataLoader(Numbers(), None, num_workers=2, prefetch_factor=3))
    for i, example in enumerate(loader):
        assert [*example] == [i, i % 2] and loader._send_idx == min(13, i + 1 + 2 * 3)


def test_virtual_time_by_hand():
    played = play([2, 2, 5, 1, 1], 1, 2, 1)
    assert played.begins == [0, 0, 2, 3, 7] and played.ends == [2, 2, 7, 4, 8]
    assert played.taken == [2, 3, 7, 8, 9]
    assert played.seconds == 7 and played.waiting(1) == pytest.approx(3 / 4)
    assert play([2, 2, 5, 1, 1], 1, 2, 2, late=1).begins == [0, 0, 2, 2, 7]


@pytest.mark.parametrize("workers", [1, 3])
def test_real_reading_takes_as_long_as_in_virtual_time(workers):
    reads, step = [0.02, 0.03, 0.02, 0.08, 0.02, 0.02, 0.03, 0.02], 0.015
    most = 10 * play(reads, step, workers, 2).seconds + 5  # workers may start late
    assert 7 * step < measure_loader(reads, step, workers, 2) < most


def test_the_throttled_reader_returns_the_bytes_of_a_batch_no_sooner_than_given(tmp_path):
    (tmp_path / "shard").write_bytes(bytes(range(250)) * 400)
    dataset, start = Throttled(str(tmp_path / "shard"), [0, 0.05], 50_000), time.perf_counter()
    batch = dataset[1]
    assert time.perf_counter() - start >= 0.05 and batch.equal(torch.arange(250, dtype=torch.uint8).repeat(200))


def test_a_made_up_epoch_is_the_same_each_time_and_its_storm_comes_first():
    reads, storm = reading.trace(14), reading.trace(3, slow=0, storm=12)
    assert reads == reading.trace(14) and sum(storm[:12]) / 12 > 0.3 > max(storm[12:])
    waits = round(play(reads, 0.03, 4, 6).waiting(0.03), 3)  # what notebook 14 says
    assert waits == 0.051 and reading.workers_and_prefetch(reads, 0.03, 16, 48)[0] == 5


def test_the_table_shows_that_many_files_take_longer_than_a_shard():
    lines = reading.table_of_storages().splitlines()[1:]
    assert len(lines) == len(reading.STORAGES) and all(float(x.split()[-2]) > float(x.split()[-1]) for x in lines)
