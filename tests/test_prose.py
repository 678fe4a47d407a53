"""The checker of English finds what it is for, in each kind of text, and nothing in texts that are in order."""

import pytest

from tests import prose

LONG = " ".join(["word"] * (prose.LIMIT + 1))
SOURCE = '# %% [markdown]\n# Fine.\n# Whoever waits.\n\n# %%\nx = "those of"\n'
MODULE = 'def f():\n    """Wait.\n\n    Rank 0 hears it.\n    """  # nobody\n'
FILES = {
    "docs/page.md": ("Two ranks.\n\nA list of which\none is short.\n", ["page.md:3: 'of which'"]),
    "notebooks/source/00_x.py": (SOURCE, ["00_x.py:3: 'Whoever'"]),
    "hpdl_lab/module.py": (MODULE, ["module.py:4: 'hears'", "module.py:5: 'nobody'"]),
    "docs/teaching/00_x.md": (f"# Head\n\n{LONG}.\n", [f"00_x.md:1: {prose.LIMIT + 1} words: word"]),
    "docs/fine.md": (f"# Head\n\nRank 0 sends.\n\n| a table | {LONG} |\n\n    {LONG}\n", []),
}


@pytest.mark.parametrize("name", FILES)
def test_each_kind_of_text_is_read(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    text, wanted = FILES[name]
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = prose.found_in(path)
    assert len(found) == len(wanted) and all(part in line for part, line in zip(wanted, found, strict=True)), found


def test_all_texts_of_the_repository_are_among_the_files():
    names = {path.relative_to(prose.ROOT).as_posix() for path in prose.files([])}
    assert {"README.md", "docs/teaching/00_why.md", "notebooks/source/00_why.py", "hpdl_lab/cli/check.py"} <= names
    assert {"notebooks/hints/04.md", "hpdl_lab/checks/lessons/lesson_04.py", "cluster/jupyterhub_config.py"} <= names
