"""Types of the arguments of commands, for argparse, each with one sentence for what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from .. import units

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
T = TypeVar("T")


def _in_one_sentence(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the same argparse type, whose ValueError is shown as it is."""

    def type_(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return type_


@_in_one_sentence
def ranks(text: str) -> int:
    """Return a number of ranks or repeats, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text} is not a number from 1 on")
    return int(text)


@_in_one_sentence
def sizes(text: str) -> list[int]:
    """Return bytes of each: "4,1KiB" -> [4, 1024]."""
    return [units.parse_bytes(part, "a message size") for part in text.split(",")]


def name_list(text: str) -> tuple[str, ...]:
    """Split "gpipe,1f1b" into ("gpipe", "1f1b"); "none" -> ()."""
    return () if text == "none" else tuple(text.split(","))


@_in_one_sentence
def memory_size(text: str) -> int:
    """Return bytes of memory, such as "3G" or "256GB" (10^9) or "12GiB" (2^30)."""
    nbytes = units.parse_bytes(text, "memory")
    if not 0.5e9 <= nbytes <= 1e15:
        raise ValueError(f"memory is at least 0.5G, which JupyterLab and a kernel with torch take, got {text}")
    return nbytes


def number_between(what: str, least: float, most: float, besides: float | None = None) -> Callable[[str], float]:
    """Return a type: a number from `least` to `most`, or `besides`."""

    @_in_one_sentence
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := float(text)) <= most or value == besides:
                return value
        also = "" if besides is None else f", or {besides:g}"
        raise ValueError(f"{text} is not {what}: a number from {least:g} to {most:,g}{also}")

    return parse


def file(path: str) -> str:
    """Return a path that can be written: known before the measuring, not after it."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def folder(path: str) -> str:
    """Return the whole path of a folder; not "", which an unset variable of the shell leaves, and means this folder."""
    if not path:
        raise argparse.ArgumentTypeError('"" is no folder; "." is the one where you are')
    return os.path.abspath(path)


@contextlib.contextmanager
def own_engines() -> Generator[str]:
    """Start and find engines in a place of their own within it: a notebook's engines are left alone."""
    with tempfile.TemporaryDirectory(prefix="hpdl-", dir="/tmp") as path:
        os.environ["XDG_RUNTIME_DIR"] = path
        yield path
