"""What the arguments of commands may be: argparse types, each with one sentence for what is wrong."""

import argparse
import os


def ranks(text):
    """A number of ranks or repeats, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def file(path):
    """A path that can be written: known before the measuring, not after it."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def folder(path):
    """A path; not "", which a variable of the shell that is not set leaves, and which would mean this folder."""
    if not path:
        raise argparse.ArgumentTypeError('"" is no folder; "." is the one where you are')
    return path
