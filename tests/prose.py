"""Check the English of all texts: README, docs, notebooks, hints, docstrings and messages. `make lint` calls it.

python tests/prose.py               each phrase of PHRASES, with its place; exit 1 if there is one
python tests/prose.py --figures     words and length of sentences of each notebook, from their Markdown
python tests/prose.py FILE ...      these files only
"""

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG, LIMIT = 25, 30  # words of a sentence: figures count longer ones; none in LESSONS is above the limit
LESSONS = ("notebooks/source", "notebooks/hints", "docs/teaching")
TEXTS = "*.md docs notebooks/source notebooks/hints notebooks/scripts hpdl_lab cluster".split()
PHRASES = {  # a phrase, and what to write in its place
    r"\bof which\b": "begin a sentence of its own",
    r"\b(?:that|those) of\b": "repeat the noun",
    r"\bthose (?:who|that|which)\b": "name them",
    r"\bthat which\b": "what, or the noun",
    r"\b(?:nobody|whoever|whomever)\b": "name who does it",
    r"\bhears?\b|\bheard\b": "attends to, or receives",
    r"\bbears? to\b": "may be",
    r"\b(?:deals?|dealt) out\b": "shards, or distributes",
    r"\b(?:is|are|was|were) to be (?:seen|read|found|had)\b": "can be seen",
    r"\bcomes? the (?:next|first|last)\b": "the subject first",
    r"\bbit by bit\b": "bit for bit",
    r"\bat hand\b": "available",
    r"\bto none\b|\bof none\b": "to no ..., of no ...",
    r"\branks? (?:\d+ )?(?:knows?|learns?|says?|wants?|believes?|thinks?)\b": "ranks send, receive, compute",
    r"(?:None|False|True|nothing|Error|Raises?:? +\w+|elsewhere),? where\b": "if",
    r"\b(?:neighbour|colour|behaviour|favour|honour|labour)\w*|\bcentre\b|\bgrey\b|\b\w+ising\b(?<!rising)(?<!raising)"
    r"(?<!prising)(?<!advising)(?<!praising)(?<!mising)(?<!noising)(?<!vising)": "American spelling",
}
BANNED = re.compile("|".join(f"(?P<p{i}>{phrase})" for i, phrase in enumerate(PHRASES)), re.I)


def pieces(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text): a Markdown file whole, the Markdown of a notebook's source, strings of other Python files."""
    source = path.read_text()
    if path.suffix == ".md":
        yield 1, source
    elif path.parent.name == "source":
        cell, markdown, begin = [], False, 1
        for number, line in enumerate([*source.split("\n"), "# %%"], 1):
            if line.startswith("# %%"):
                if markdown:
                    yield begin, "\n".join(cell)
                cell, markdown, begin = [], line.startswith("# %% [markdown]"), number + 1
            else:
                cell.append(line.removeprefix("#").removeprefix(" "))
    else:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
                yield node.lineno, node.value
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def prose(text: str) -> str:
    """Return the sentences of a Markdown text: no code, no tables, no headings, no HTML, no writefile cells."""
    if text.startswith("%%"):
        return ""
    text = re.sub(r"```.*?```|<!--.*?-->|\$[^$]*\$", " ", text, flags=re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    lines = [line for line in text.split("\n") if not re.match(r" {4}|\||#|\s*[-─═]{3}", line)]
    return "\n".join(lines)


def sentences(text: str) -> list[str]:
    """Split prose at ends of sentences, at list items and at empty lines."""
    parts = re.split(r"\n\s*\n|\n\s*(?:\d+\.|[-*]) |(?<=[.!?:;])[\"')*_]*\s+(?=[A-Z\"'(*_`0-9]|code)", text)
    return [" ".join(part.split()) for part in parts if len(part.split()) > 2]


def files(names: list[str]) -> list[Path]:
    """The files to check: those given, or all texts that git knows."""
    if names:
        return [Path(name).resolve() for name in names]
    listed = subprocess.run(["git", "ls-files", *TEXTS], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [ROOT / name for name in listed.stdout.split() if name.endswith((".md", ".py"))]
    return [path for path in found if path.exists() and path.name != "prose.py"]


def found_in(path: Path) -> list[str]:
    """Return "place: phrase: what to write" for each banned phrase of a file, and sentences that are too long."""
    found = []
    place = path.relative_to(ROOT)
    for begin, text in pieces(path):
        for match in BANNED.finditer(text):
            line = begin + text[: match.start()].count("\n")
            advice = list(PHRASES.values())[int(str(match.lastgroup)[1:])]
            found.append(f"{place}:{line}: {' '.join(match[0].split())!r}: {advice}")
        if place.as_posix().startswith(LESSONS):
            long = [s for s in sentences(prose(text)) if len(s.split()) > LIMIT]
            found += [f"{place}:{begin}: {len(s.split())} words: {' '.join(s.split()[:8])} ..." for s in long]
    return found


def figures() -> None:
    """Print a table: words, median length of a sentence, and the share above LONG words, for each notebook."""
    print(f"| notebook | words | median sentence | above {LONG} words |\n|---|---|---|---|")
    for path in sorted((ROOT / "notebooks" / "source").glob("*.py")):
        text = "\n\n".join(prose(text) for _, text in pieces(path))
        lengths = [len(s.split()) for s in sentences(text)]
        above = sum(n > LONG for n in lengths) / len(lengths)
        print(f"| {path.stem} | {len(text.split()):,} | {statistics.median(lengths):g} | {above:.0%} |")


def main(arguments: list[str]) -> int:
    if "--figures" in arguments:
        figures()
        return 0
    found = [line for path in files(arguments) for line in found_in(path)]
    print("\n".join(found) or "English: nothing found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
