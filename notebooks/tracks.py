"""How long each section of each notebook takes, and who does it: behind headers, README and plans.

A mark behind a heading in notebooks/source says it: `<!-- 2 two days 16 -->` is part two, in the shortest track that
has the section, and 16 minutes. Minutes are estimates for somebody who types: 200 words a minute, about 5, 12 and 22
minutes for an exercise of one, two and three stars with one or two failed checks, and cells as long as they run.
build.py writes tables of them into the headers of the notebooks, and between the marks `<!-- tracks: ... -->` of
README.md and docs/. The terms of a recap, at `<!-- terms -->`, come from docs/glossary.md.
"""

import re
from pathlib import Path
from typing import NamedTuple

GLOSSARY = Path(__file__).resolve().parent.parent / "docs" / "glossary.md"
TRACKS = ("half day", "full day", "two days", "homework")  # each has what those before it have
LENGTHS = {"half day": 240, "full day": 480, "two days": 960}  # minutes, with breaks
COUNTS = ("one", "two", "three")


class Section(NamedTuple):
    """part: 1, 2 ...; heading: as in the notebook, of an exercise its number; track: the shortest that has it."""

    part: int
    heading: str
    minutes: int
    track: str

    @property
    def exercise(self):
        """Its number, "4.1", or ""."""
        found = re.match(r"Exercise (\d+\.\d+)", self.heading)
        return found[1] if found else ""


class Notebook(NamedTuple):
    name: str
    title: str
    finds: str
    needs: str
    sections: tuple

    @property
    def parts(self):
        return self.sections[-1].part

    def of(self, track, part=None):
        """The sections that a track has, of one part or of all."""
        longest = TRACKS.index(track)
        return [s for s in self.sections if TRACKS.index(s.track) <= longest and part in (None, s.part)]

    def taught(self, track, part=None):
        """The sections that the plan of a track names: two days begin with the full day."""
        return [s for s in self.of(track, part) if track != "two days" or s.track == track]


TABLE = """
00_why  Why many computers
    why many computers, and three ways to share a training among them; what SGD, mini-batch and epoch are
    nothing: begin here
00_engines  Ranks are processes
    what a rank is, that ranks share nothing, and how to stop a cell that hangs
    [00](00_why.ipynb); two processor cores
01_gradient_descent  Gradient descent
    what a gradient step does, on a live loss landscape; the largest rate that is stable
    no engines: one process
02_parallel_gradient_descent  Parallel gradient descent
    why four ranks that average their gradients take the step of one; a parameter server; gossip on graphs
    [00](00_engines.ipynb), [01](01_gradient_descent.ipynb), for part two [03](03_messages.ipynb); four engines
03_messages  Messages
    what a message costs, eight collectives, and a zoo of deadlocks to diagnose and repair
    [00](00_engines.ipynb); four engines
04_ring_all_reduce  Ring all-reduce
    a ring, why 2(p-1)/p, and how close that is to the hardware; its relatives, and real links of 1 Gbit/s
    [02](02_parallel_gradient_descent.ipynb), [03](03_messages.ipynb); four engines
05_kernels  Kernels: from the memory bus to the stream
    what the compiled path does: bytes on the memory bus, one pass over shared memory, a sum on a GPU, staging in
    blocks, streams
    [04](04_ring_all_reduce.ipynb); four engines; no GPU
06_data_parallel  Data parallelism
    replicas, buckets, overlap with backward; a GPT on Moby-Dick; S-Caffe, Horovod, and PyTorch's DDP on your own ring
    [04](04_ring_all_reduce.ipynb); four engines
07_large_batch  Large batches and fewer bytes
    what a batch is worth, how large batches fail and what rescues them; gradients that travel in fewer bytes
    [06](06_data_parallel.ipynb); four engines
08_memory  What fits: memory and ZeRO
    16 bytes for each parameter, and how ZeRO 1, 2 and 3 divide them; activations that are computed twice; 16 bits
    [06](06_data_parallel.ipynb); four engines
09_tensor_parallel  Tensor parallelism
    one layer on several ranks: columns and rows, attention by heads, sequences and images that are cut; a GPT with
    every layer cut over the ranks
    [06](06_data_parallel.ipynb); four engines
10_pipeline_parallel  Pipeline parallelism
    stages and bubbles: GPipe, 1F1B, zero bubble, where to cut a model; GEMS and DualPipe in both directions; a GPT in
    four pieces
    [06](06_data_parallel.ipynb); four engines
11_hybrid_parallel  Hybrid parallelism
    a mesh of replicas, stages and shards in three changed lines; which gradient is added where; the best of 66 grids
    for GPT-3 on 1,024 GPUs
    [00](00_engines.ipynb), for parts two and three [06](06_data_parallel.ipynb); four engines
12_large_models  Models of today
    what LLaMA and DeepSeek changed: key heads that are shared, latents, experts to which tokens travel, sequences that
    ranks share; a ViT on four ranks
    [09](09_tensor_parallel.ipynb), [11](11_hybrid_parallel.ipynb); four engines
13_inference  Inference
    what a token costs: the cache of keys and values, decode on two ranks, continuous batching, pages, speculation;
    throughput against latency, live
    [00](00_engines.ipynb), for parts two and three [09](09_tensor_parallel.ipynb); four engines
14_performance  Where the time goes
    a waterfall of a training step, how much of its hardware it uses, ranks against threads, slow scripts, and input
    [08](08_memory.ipynb), [13](13_inference.ipynb); two cores
14_platforms  Frameworks, processors, links and their price
    when a framework knows its graph, what it sends, what other processors do differently, which link is fast enough,
    NCCL's log, switches and adapters that compute, and what a training costs in days and kWh
    [06](06_data_parallel.ipynb), [14](14_performance.ipynb); two cores
15_open_issues  What breaks
    a rank that is killed, how a training goes on with three, how often to save and how, copies in a neighbor's memory
    [04](04_ring_all_reduce.ipynb), [08](08_memory.ipynb); two cores
15_other_ranks  Other ranks
    with fewer ranks and then with more, with a slow rank, a wrong number, and old weights
    [08](08_memory.ipynb), [13](13_inference.ipynb), [15](15_open_issues.ipynb); two cores
15_race  The race
    plan a training on 64 simulated GPUs and one on this machine, and say how long they take
    [07](07_large_batch.ipynb), [11](11_hybrid_parallel.ipynb), [15](15_open_issues.ipynb); two cores
"""

# A notebook, with the part if it has several; or what else takes time, and its minutes: None is what is left.
PLANS = {
    "half day": (
        ("welcome, log in", 10),
        "00_why",
        "00_engines",
        "01_gradient_descent",
        "02_parallel_gradient_descent 1",
        "03_messages 1",
        ("break", 15),
        "04_ring_all_reduce 1",
        "06_data_parallel 1",
        "08_memory 1",
        "11_hybrid_parallel 1",
        "13_inference 1",
        ("to catch up, questions", None),
    ),
    "full day": (
        ("welcome, log in", 15),
        "00_why",
        "00_engines",
        "01_gradient_descent",
        "02_parallel_gradient_descent 1",
        ("break", 15),
        "03_messages 1",
        "03_messages 2",
        "02_parallel_gradient_descent 2",
        ("lunch", 60),
        "04_ring_all_reduce 1",
        "04_ring_all_reduce 2",
        ("break", 15),
        "06_data_parallel 1",
        "06_data_parallel 2",
        "08_memory 1",
        "10_pipeline_parallel 1",
        "11_hybrid_parallel 1",
        "13_inference 1",
        ("to catch up, questions", None),
    ),
    "two days": (
        ("the first day: as the full day", 480),
        ("what was hard yesterday", 15),
        "08_memory 1",
        "08_memory 2",
        "07_large_batch 1",
        ("break", 15),
        "09_tensor_parallel 1",
        "10_pipeline_parallel 1",
        "10_pipeline_parallel 2",
        ("lunch", 60),
        "12_large_models 1",
        "12_large_models 2",
        "12_large_models 3",
        "13_inference 2",
        "13_inference 3",
        ("break", 15),
        "14_performance 1",
        "15_race",
        ("to catch up, questions", None),
    ),
}


MARK = re.compile(rf" <!-- (\d) ({'|'.join(TRACKS)}) (\d+) -->$", re.M)
SECTION = re.compile(rf"^# ##? (Exercise \d+\.\d+|)(.*?){MARK.pattern}", re.M)


def sections_of(name):
    """The sections of a notebook whose headings have marks, in its order."""
    found = SECTION.findall((Path(__file__).parent / "source" / f"{name}.py").read_text())
    return tuple(Section(int(part), number or rest, int(time), track) for number, rest, part, track, time in found)


def parsed(text):
    """{name: Notebook} of a table like TABLE."""
    found = {}
    for block in re.split(r"^(?=\d)", text.strip(), flags=re.MULTILINE)[1:]:
        head, *words, needs = (line.strip() for line in block.strip().split("\n"))
        name, _, title = head.partition("  ")
        found[name] = Notebook(name, title, " ".join(words), needs, sections_of(name))
    return found


NOTEBOOKS = parsed(TABLE)


def minutes(sections):
    return sum(section.minutes for section in sections)


def exercises(sections):
    """ "4.1, 4.2" of those sections that are exercises, or ""."""
    return ", ".join(section.exercise for section in sections if section.exercise)


# -- what is written into notebooks ------------------------------------------------------------------------------------


def header(name):
    """The table at the top of a notebook: its minutes, what each track does of it, what it needs."""
    notebook = NOTEBOOKS[name]
    shares = []
    for track in LENGTHS:
        sections = notebook.of(track)
        shares.append(f"{minutes(sections)} minutes: {share(notebook, track)}" if sections else "not in it")
    return (
        "| minutes | half day | full day | two days | you need |\n|---|---|---|---|---|\n"
        f"| {minutes(notebook.sections)} | {' | '.join(shares)} | {notebook.needs} |"
    )


def share(notebook, track):
    """What of a notebook a track has: "all", "part one", or the numbers of exercises."""
    if notebook.of(track) == list(notebook.sections):
        return "all"
    found = []
    for part in range(1, notebook.parts + 1):
        sections = notebook.of(track, part)
        whole = sections == [s for s in notebook.sections if s.part == part]
        found.append(f"part {COUNTS[part - 1]}" if whole else exercises(sections))
    return ", ".join(filter(None, found)) or "without exercises"


def links(name):
    """The line at the end of a notebook that leads to those before and behind it."""
    names = [*NOTEBOOKS]
    at, line = names.index(name), []
    if at:
        line.append(f"Previous: {link(names[at - 1])}")
    if at + 1 < len(names):
        line.append(f"Next: {link(names[at + 1])}")
    return " · ".join(line)


def terms(name):
    """The table of a notebook's terms, as docs/glossary.md has it."""
    section = GLOSSARY.read_text().partition(f"(../notebooks/{name}.ipynb)\n\n")[2]
    return section.partition("\n\n")[0].rstrip()


def link(name):
    return f"[{name[:2]} · {NOTEBOOKS[name].title}]({name}.ipynb)"


def labelled(name, text):
    """Markdown with the track behind each heading of a section that not every track has."""
    for section in NOTEBOOKS[name].sections:
        if section.track != TRACKS[0] and NOTEBOOKS[name].of("two days"):
            text = re.sub(rf"^(##? {re.escape(section.heading)}(?!\d).*)$", rf"\1 · {section.track}", text, flags=re.M)
    return text


def filled(name, text):
    """Markdown of a notebook's source with header and links in the place of their marks."""
    if name not in NOTEBOOKS:
        return text
    for mark, made in (("tracks", header), ("terms", terms), ("links", links)):
        text = text.replace(f"<!-- {mark} -->", made(name))
    return labelled(name, MARK.sub("", text))


# -- what is written into pages ----------------------------------------------------------------------------------------


def plan(track):
    """The plan of a track as a Markdown table; its minutes add up to LENGTHS[track]."""
    rows = [f"| {track}, {LENGTHS[track]} minutes | minutes |", "|---|---|"]
    return "\n".join(rows + [f"| {what} | {time} |" for what, time in planned(track)])


def planned(track):
    """[(what is done, its minutes)] in order."""
    rows = []
    for row in PLANS[track]:
        if isinstance(row, str):
            name, _, part = row.partition(" ")
            notebook = NOTEBOOKS[name]
            sections = notebook.taught(track, int(part) if part else None)
            what = f"{name}, part {COUNTS[int(part) - 1]}" if part else name
            done = exercises(sections)
            row = (f"{what}: {done}" if done else what), minutes(sections)
        rows.append(row)
    left = LENGTHS[track] - sum(time or 0 for _, time in rows)
    return [(what, left if time is None else time) for what, time in rows]


def overview():
    """The README's table."""
    rows = [f"| {n.name} | {n.finds} | {minutes(n.sections)} |" for n in NOTEBOOKS.values()]
    return "\n".join(["| notebook | you find out | minutes |", "|---|---|---|", *rows])


def marks(name):
    """When each section begins, for an instructor: minutes from the start of the notebook, in each track."""
    rows, clock = ["| section | " + " | ".join(LENGTHS) + " | all |", "|---|---|---|---|"], dict.fromkeys(TRACKS, 0)
    for section in NOTEBOOKS[name].sections:
        cells = []
        for track in TRACKS:
            has = section in NOTEBOOKS[name].of(track)
            cells.append(f"{clock[track]}" if has else "-")
            clock[track] += section.minutes if has else 0
        rows.append(f"| {section.heading} | {' | '.join(cells)} |")
    return "\n".join([*rows, "| end | " + " | ".join(f"{time or '-'}" for time in clock.values()) + " |"])


def page(text):
    """A page with what stands between its marks written anew."""

    def block(found):
        what, _, of = found[1].partition(" of ")
        made = {"overview": overview, "plan": plan, "marks": marks}[what]
        return f"<!-- tracks: {found[1]} -->\n{made(of) if of else made()}\n<!-- end -->"

    return re.sub(r"<!-- tracks: (.+?) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)
