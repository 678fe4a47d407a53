"""What the arguments of commands may be: argparse types, each with one sentence for what is wrong."""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from .. import units


def in_one_sentence(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same argparse type, whose ValueError is shown as it is."""

    def type_(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return type_


@in_one_sentence
def ranks(text: str) -> int:
    """A number of ranks or repeats, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text} is not a number from 1 on")
    return int(text)


@in_one_sentence
def sizes(text: str) -> list[int]:
    """Bytes of each: "4,1KiB" -> [4, 1024]."""
    return [units.parse_bytes(part, "a message size") for part in text.split(",")]


def names(text: str) -> tuple[str, ...]:
    """ "gpipe,1f1b" -> ("gpipe", "1f1b"); "none" -> ()."""
    return () if text == "none" else tuple(text.split(","))


@in_one_sentence
def memory(text: str) -> int:
    """Bytes of memory, such as "3G" or "256GB" (10^9) or "12GiB" (2^30)."""
    nbytes = units.parse_bytes(text, "memory")
    if not 0.5e9 <= nbytes <= 1e15:
        raise ValueError(f"memory is at least 0.5G, which JupyterLab and a kernel with torch take, got {text}")
    return nbytes


def number(what: str, least: float, most: float, besides: float | None = None) -> Callable[[str], float]:
    """A type: a number from `least` to `most`, or `besides`."""

    @in_one_sentence
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := float(text)) <= most or value == besides:
                return value
        also = "" if besides is None else f", or {besides:g}"
        raise ValueError(f"{text} is not {what}: a number from {least:g} to {most:,g}{also}")

    return parse


def file(path: str) -> str:
    """A path that can be written: known before the measuring, not after it."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def folder(path: str) -> str:
    """The whole path of a folder; not "", which an unset variable of the shell leaves: it would mean this folder."""
    if not path:
        raise argparse.ArgumentTypeError('"" is no folder; "." is the one where you are')
    return os.path.abspath(path)


@contextlib.contextmanager
def own_engines() -> Iterator[str]:
    """Within it, this process starts and finds engines in a place of their own: those of a notebook are left alone."""
    with tempfile.TemporaryDirectory(prefix="hpdl-", dir="/tmp") as path:
        os.environ["XDG_RUNTIME_DIR"] = path
        yield path
