"""`from hpdl_lab import lab`: every verb is there, and what it needs is imported when it is first used."""

import ast
import inspect
import subprocess
import sys

import pytest

from hpdl_lab import lab


@pytest.mark.parametrize("use", ["lab", "lab.start, lab.run, lab.guess, lab.doctor, dir(lab)"])
def test_to_import_the_verbs_needs_neither_torch_nor_matplotlib(use):
    code = f"import sys; from hpdl_lab import lab; {use}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "hpdl_lab.lab" in loaded
    assert not loaded & {"torch", "matplotlib", "pandas", "ipyparallel", "IPython", "ipywidgets"}


def test_type_checkers_see_the_verbs_where_they_are():
    (block,) = (node for node in ast.parse(inspect.getsource(lab)).body if isinstance(node, ast.If))
    seen = {line.module: tuple(name.name for name in line.names) for line in block.body}
    assert seen == lab.VERBS


def test_every_verb_is_there_with_its_help_and_its_signature():
    assert dir(lab) == lab.__all__
    for name in lab.__all__:
        verb = getattr(lab, name)
        assert callable(verb) and verb.__name__ == name and inspect.getdoc(verb), name
        assert inspect.signature(verb).return_annotation is not inspect.Signature.empty, name
    assert lab.check is lab.check


def test_what_is_no_verb_is_an_attribute_error():
    with pytest.raises(AttributeError, match="chekc"):
        lab.chekc  # noqa: B018
