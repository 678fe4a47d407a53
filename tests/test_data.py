"""Data: real digits and a real text, made sets whose best loss is known; shards lose and repeat nothing."""

import bz2
import copy
import hashlib
import itertools
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from hpdl_lab import data
from hpdl_lab.data import dataset as scikit_learn
from hpdl_lab.data import diabetes, text
from hpdl_lab.data.dataset import DataError, digits
from hpdl_lab.data.loading import batch_indices, check_batch, shard_indices
from tests.properties import given
from tests.wording import raises


def test_digits_are_cut_into_disjoint_sets_of_known_size():
    data = digits()
    assert data.train_x.shape == (1437, 64) and data.test_x.shape == (360, 64)
    assert data.train_x.dtype == torch.float32 and data.train_y.dtype == torch.int64
    assert float(data.train_x.min()) == 0 and float(data.train_x.max()) == 1
    # 1,797 scans of which a few are identical by chance: the sets share no row that the data holds once.
    rows = torch.cat([data.train_x, data.test_x])
    assert len(rows) == 1797
    assert torch.bincount(data.test_y, minlength=10).min() > 20


def test_the_text_has_more_than_a_megabyte_and_comes_back_from_tokens():
    whole = text.read()
    assert len(whole.encode()) == 1_194_395 and len(whole) == 1_191_161
    assert whole.startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.") and whole.endswith("another orphan.\n\n")
    assert len(text.vocabulary()) == 81
    assert text.decode(text.encode(whole[:5000])) == whole[:5000]
    assert text.decode(text.encode(text.vocabulary())) == text.vocabulary()


@pytest.fixture(scope="module")
def whole():
    """The text as tokens."""
    return text.encode(text.read())


@pytest.mark.parametrize("block", [1, 7, 64])
def test_windows_of_the_text_follow_each_other_and_say_what_comes_next(block, whole):
    found = data.load("text", block=block)
    n = found.train_x.numel()
    assert torch.equal(found.train_x.flatten(), whole[:n]) and torch.equal(found.train_y.flatten(), whole[1 : n + 1])
    assert found.train_x.shape[1] == found.positions == block and found.classes == 81
    assert found.train_x.numel() + found.test_x.numel() > len(whole) - 2 * block - 2
    assert abs(found.test_x.numel() / len(whole) - 0.1) < 0.001


def test_the_last_tenth_of_the_text_is_not_trained_on(whole):
    found = data.load("text", block=100)
    cut = len(whole) - len(whole) // 10
    assert torch.equal(found.test_x[0], whole[cut : cut + 100])
    assert found.train_x.numel() + 1 <= cut  # not even as what comes next


def test_a_share_of_the_teachers_labels_is_wrong():
    n, classes, noise = 1000, 5, 0.2
    made = data.load("synthetic", n=n, shape=(3, 4), classes=classes, noise=noise, seed=1, dtype="float64")
    pure = data.load("synthetic", n=n, shape=(3, 4), classes=classes, noise=0, seed=1, dtype="float64")
    assert made.train_x.shape == (1000, 3, 4) and made.test_x.shape == (200, 3, 4) and made.classes == classes
    assert int((made.train_y != pure.train_y).sum()) == 200


def test_the_second_half_of_a_copy_is_known():
    made = data.load("copy", n=50, length=6, vocabulary=4)
    assert made.train_x.shape == (50, 11) and made.test_x.shape == (10, 11) and made.positions == 11
    assert torch.equal(made.train_x[:, 1:], made.train_y[:, :-1])
    assert torch.equal(made.train_y[:, 5:], made.train_x[:, :6])  # from position 5 on the answer is 5 positions back


@pytest.mark.parametrize("name", data.SETS)
def test_a_set_is_the_same_every_time_and_ranks_share_it(name):
    first = data.load(name, dtype="float64")
    assert all(torch.equal(a, b) for a, b in zip(first, data.load(name, dtype="float64"), strict=True))
    assert copy.deepcopy(first) is first
    assert first.train_x.dtype == (torch.int64 if name in ("text", "copy") else torch.float64)
    assert first.train_y.dtype == torch.int64 and int(first.train_y.min()) >= 0


@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("mnist", {}, LookupError, ("'mnist'", "digit_images")),
        ("text", {"blocks": 3}, ValueError, ("'blocks'",)),
        ("text", {"block": 119_116}, ValueError, ("block=119116", "1", "119,115 characters")),
        ("text", {"block": 64.0}, ValueError, ("block=64.0", "64")),
        ("synthetic", {"shape": 8}, ValueError, ("shape=8", "(64,)")),
        ("digits", {"dtype": "float33"}, ValueError, ("dtype='float33'", "float16", "bfloat16")),
        ("synthetic", {"n": 0}, ValueError, ("0 examples", "(64,)", "10 classes")),
        ("synthetic", {"noise": 1.0}, ValueError, ("noise=1.0", "[0", "1")),
        ("copy", {"length": 0}, ValueError, ("4096 sequences", "0 tokens", "16")),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_numbers(name, options, error, says):
    with raises(error, *says):
        data.load(name, **options)


def test_a_missing_or_damaged_text_ends_in_one_sentence_that_says_what_to_do(tmp_path):
    again = r"git checkout hpdl_lab/data/moby_dick.txt.bz2 in a clone, else install hpdl_lab again$"
    with pytest.raises(DataError, match="cannot be read: FileNotFoundError.*" + again):
        text.read(tmp_path / "gone.bz2")
    cut, other = tmp_path / "cut.bz2", tmp_path / "other.bz2"
    cut.write_bytes(text.CORPUS.read_bytes()[:100_000])
    with pytest.raises(DataError, match="cut.bz2 cannot be read: .*" + again):
        text.read(cut)
    other.write_bytes(bz2.compress(b"Call me Ahab."))
    with pytest.raises(DataError, match="other.bz2 is damaged: its checksum is another.*" + again):
        text.read(other)


def test_digits_without_scikit_learn_end_in_one_sentence_that_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as if it were not there
    with raises(DataError, "--force-reinstall"):
        digits()


def test_the_tables_are_those_that_scikit_learn_gives():
    """Of load_digits() and load_diabetes(scaled=False) of scikit-learn 1.9, whose import would take seconds: SHA-256
    of data and target, side by side, and what is told of the columns.
    """
    patients = (
        scikit_learn.sklearn_table("diabetes_data_raw.csv.gz"),
        scikit_learn.sklearn_table("diabetes_target.csv.gz"),
    )
    given = {
        "30aa855cd90427ff3c4996b3f40109597c57049f8a038cc52db1efeac8ad2e26": [
            scikit_learn.sklearn_table("digits.csv.gz", delimiter=",")
        ],
        "839c546b0b4ac02c2e6cbe5e5c92313cefa993446c9733e9b49477cc3f96e104": patients,
    }
    for digest, columns in given.items():
        assert hashlib.sha256(np.column_stack(columns).astype("<f8").tobytes()).hexdigest() == digest
    told = Path(find_spec("sklearn").origin).parent / "datasets" / "descr" / "diabetes.rst"
    names = re.findall(r"^    - (\w+)", told.read_text(), re.MULTILINE)
    assert [names[column] for column in diabetes.CHOLESTEROL] == ["s1", "s2"] and len(names) == 10


def test_a_character_that_the_text_does_not_have_is_named():
    with raises(ValueError, "'#'", "81"):
        text.encode("whale #1")


SIZES = st.integers(1, 200)


@given(n=SIZES, batch=SIZES, p=st.integers(1, 9), seed=st.integers(0, 3))
def test_shards_of_an_epoch_lose_and_repeat_nothing(n, batch, p, seed):
    steps = -(-n // batch)
    epoch = list(itertools.islice(batch_indices(n, batch, seed), steps))
    assert torch.equal(torch.cat(epoch).sort().values, torch.arange(n))
    for indices in epoch:
        shards = [shard_indices(indices, r, p) for r in range(p)]
        sizes = [len(mine) for mine in shards]
        assert torch.equal(torch.cat(shards), indices)
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(n=SIZES, batch=SIZES, start=st.integers(0, 30), seed=st.integers(0, 3))
def test_batches_from_a_step_on_are_those_of_the_whole_course(n, batch, start, seed):
    whole = list(itertools.islice(batch_indices(n, batch, seed), start + 3))
    rest = list(itertools.islice(batch_indices(n, batch, seed, start), 3))
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[start:], strict=True))


def test_batches_of_nothing_and_ranks_without_examples_are_refused():
    check_batch(n=4, batch=4, size=4)
    for n, batch, facts in ((100, 3, "batch of 3 .* 4 ranks"), (2, 128, "training set of 2 .* 4 ranks")):
        with pytest.raises(ValueError, match=facts):
            check_batch(n, batch, size=4)
    with raises(ValueError, "0", "10"):
        next(batch_indices(10, 0))
