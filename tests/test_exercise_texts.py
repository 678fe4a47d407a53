"""Stub, docstring, hints and solution of an exercise agree: nothing to transcribe, nothing unexplained."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import nbformat
import pytest

from hpdl_lab.checks.exercises import EXERCISES, check
from hpdl_lab.plain_source import plain_source

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
BUDGET = re.compile(r"^ *(Steps|Bytes|Bytes per rank|Live micro-batches|Ref): .*?(?=^ *[A-Z][\w -]*: |\Z)", re.M | re.S)
LEAST = 3  # names and numbers of an expression that says more than p - 1


def named(exercise):
    return f"{exercise.id}-{exercise.name}"


def bare(text):
    """A formula without spaces, owners of attributes and arguments of calls: "1+max"."""
    text = re.sub(r"\s+", "", text.replace("·", "*"))
    for _ in range(3):
        text = re.sub(r"(\w)\([^()]*\)", r"\1", text)
    return re.sub(r"[\w\[\]()]+\.(?=[a-z])", "", text)


def formulas(function):
    """The index expressions and formulas in the body of a function, bare."""
    found = set()
    for node in ast.walk(ast.parse(plain_source(function))):
        leaves = [leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Name | ast.Constant)]
        if isinstance(node, ast.BinOp | ast.Subscript) and len(leaves) >= LEAST:
            found.add(bare(ast.unparse(node)))
    return {formula for formula in found if re.search(r"[-+*/@\[]", formula)}


@pytest.mark.parametrize("exercise", EXERCISES, ids=named)
def test_a_docstring_holds_goal_picture_and_budget_and_no_formula_of_the_solution(exercise):
    said = bare(BUDGET.sub("", inspect.getdoc(exercise.reference)))
    held = [formula for formula in formulas(exercise.reference) if formula in said]
    assert not held, f"{exercise.id}: the docstring holds {held}"


@pytest.fixture(scope="module")
def stubs():
    """{exercise: (its cell in the exercise form, the text cell above it)}."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for above, cell in zip(cells, cells[1:], strict=False):
            found[cell.id.removeprefix("exercise-").replace("-", ".")] = cell, above
    return found


@pytest.mark.parametrize("exercise", EXERCISES, ids=named)
def test_every_name_that_a_stub_imports_from_a_module_is_used_or_explained(exercise, stubs):
    cell, above = stubs[exercise.id]
    tree = ast.parse(cell.source)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    text = f"{ast.get_docstring(function)}\n{above.source}"
    unexplained = {name for name in imported - used if not re.search(rf"\b{name}\b", text)}
    assert not unexplained, f"{exercise.id}: {unexplained}"


IN_WORDS = {"3.3", "3.4", "3.5", "3.6", "3.7", "14.4"}  # exercises whose last hint holds no code: words, and repairs
COMPLETED = {  # {exercise: what its last hint leaves open, in its order}
    "1.3": ["curvatures.max()"],
    "2.2": ["w -= rate * total / (comm.size - 1)\nfor worker in range(1, comm.size):\n    comm.send(w, worker)"],
    "2.3": ["1 / (1 + max(len(graph.neighbors[comm.rank]), len(graph.neighbors[j])))"],
    "3.1": ["comm.recv(x, 0)\ncomm.send(x, 0)"],
    "4.1": ["theirs += comm.sendrecv(mine, (r + 1) % p, arriving, (r - 1) % p)"],
    "4.2": ["(r + 1) % p", "r - i - 1", "(r - 1) % p"],
    "4.4": ["(comm.rank - 1) % comm.size", "(comm.rank + 1) % comm.size", "for work in leaving:\n    work.wait()"],
    "4.5": ["seconds.get"],
    "5.1": ["n / p"],
    "5.2": ["chunk(view, comm.size, comm.rank)[:] = total"],
    "5.3": [
        "if t < 2 * WARP:\n    sums[t] += sums[t + 2 * WARP]\ncuda.syncthreads()",
        "cuda.shfl_down_sync(ALL_LANES, total, distance)",
    ],
    "5.4": [
        "for work in works[-2:]:\n    work.wait()",
        "works[k].wait()\ndevice.copy_in(staged[k], piece).wait()",
        "if k + 2 < len(pieces):\n    works.append(comm.irecv(staged[k + 2], src))",
    ],
    "5.5": ["stream.wait_event(comm_stream.record_event())"],
    "6.3": ["room = limit if buckets else first\nbuckets.append([])"],
    "6.4": ["len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0"],
    "6.6": ["for x, y in parts[-1:]:\n    loss_of(model, x, y).backward()"],
    "7.1": ["(full - base_rate)"],
    "7.2": ["weight_decay * length"],
    "7.5": ["job.all_reduce_s[ranks]"],
    "8.1": ["2 * 4", "1"],
    "8.2": ["block(again)"],
    "8.3": ["mean"],
    "8.4": ["comm.background(all_gather, layers[i + 1].allocate())"],
    "8.5": ["scaler.scale / 2, 0"],
    "9.1": ["bias"],
    "9.2": ["y + bias"],
    "9.3": ["part * width + rank * n", "part * width + (rank + 1) * n"],
    "9.4": ["comm, x, qkv_weight, qkv_bias", "out_weight, out_bias"],
    "9.5": ["scatter", "scatter"],
    "9.7": [
        "if r < comm.size - 1:\n"
        "    down = h - rows[r + 1][0]\n"
        "    works += sending(comm, x[:, :, down:], r + 1) + receiving(comm, bottom, r + 1)"
    ],
    "10.1": ['[Action(rank, "B", i) for i in range(micro_batches)]'],
    "10.2": [
        'Action(rank, "F", warm_up + i)',
        'Action(rank, "B", i)',
        '[Action(rank, "B", i) for i in range(micro_batches - warm_up, micro_batches)]',
    ],
    "10.3": [
        'if warm_up + i < micro_batches:\n    row.append(Action(rank, "F", warm_up + i))',
        "rank",
        "rank",
        '[Action(rank, "W", i) for i in range(max(0, micro_batches - rank), micro_batches)]',
    ],
    "10.4": ["schedule.rank_of(schedule.next(stage))", "schedule.rank_of(schedule.previous(stage))"],
    "10.5": ["sum(costs[j:i])", "i - j"],
    "11.1": ["tuple(reversed(place))"],
    "11.2": ["place[:axis] + place[axis + 1 :]"],
    "11.3": ['if placed.shared is not None:\n    placed.shared.all_reduce(grad)\nmesh["dp"].all_reduce(grad)'],
    "11.4": [
        "if found.nbytes <= limit and (best is None or (found.seconds, found.nbytes) < best[:2]):\n"
        "    best = found.seconds, found.nbytes, (dp, pp, tp)",
        'f"no grid of {ranks} ranks fits into {limit:,} bytes per rank: the least is {least:,}"',
    ],
    "13.1": ["scores.softmax(-1)[:, :, None] @ values[:, :, :s]"],
    "13.2": ["comm.all_reduce(gelu(norm(x) @ layer.up.T) @ layer.down.T)"],
    "13.3": ["slots - len(running)", "min(n, budget)"],
    "13.4": ["-(-tokens // page_size)"],
    "13.5": ["gamma + 1"],
    "12.1": ["t - s + 1", "b, h, s, v.shape[-1]"],
    "12.2": ["x[order // k]", "mine(there)", "back * weights.flatten()[order, None]"],
    "12.3": [
        "2 * p - 1 - comm.rank",
        "2 * p - 1 - source",
        "out * (lse - total).exp().unsqueeze(-1) + more * (weight - total).exp().unsqueeze(-1)",
    ],
    "12.4": ["k[..., : key_up.shape[-1]]", "heard"],
    "12.5": [
        "bar.end, message.end",
        "bar.begin, message.begin",
        "seconds",
        "message.end - message.begin - sum(under.values())",
    ],
    "14.1": ["2 * 2", "3", "3"],
    "14.2": ["m * n", "max"],
    "14.3": ["-(-domain // threads)", "2 * (ranks - 1) * gradients"],
    "14.5": ["taken[i - workers * prefetch] if i >= workers * prefetch else 0", "taken[i - 1] + step"],
    "14.6": ["2 * (ranks - 1)", "hidden * communication_s"],
    "15.1": ["rank_mtbf_s / ranks", "2 * cost_s * mtbf_s"],
    "15.2": [
        *("zlib.crc32(data)", "manifest(step, total, shards)", "disk.rename(PART, LATEST)", "(LATEST, *names)"),
        "comm.barrier()",
    ],
    "15.4": [
        "mine = [e for e in events if e.op in OPS[cause]]\n"
        "theirs = [e for e in lanes[mine[0].peer][step] if e.op == 'recv'] if cause == 'link' else mine\n"
        "need = sum(b.t1_ns - max(a.t0_ns, b.t0_ns) for a, b in zip(mine, theirs))\n"
        "needs.append(need / sum(e.nbytes for e in mine) if cause == 'link' else need)",
        *("median(usual)", "usual.index(max(usual))"),
    ],
    "15.5": [
        *("x.new_empty(len(held) + 2)", "checksums(held.abs())", "sums[theirs]"),
        *("len(held) * torch.finfo(x.dtype).eps * scale", "((r - 1) % p, hop)"),
    ],
    "15.3": [
        "step, shard = 0, torch.zeros(last - first, 3, dtype=torch.float64)\nshard[:, 0] = task.start[first:last]",
        *("3 * last", "step * task.batch + high", "k // task.examples", "k % task.examples"),
        *("task.gradient(weights, ids)", "step"),
        "weights = assembled(comm, shard[:, 0], first, n)\n"
        "if step % every == 0 or step == until:\n"
        "    save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)",
    ],
    "14.7": ['"NCCL_P2P_DISABLE set by environment to 1"', '"NCCL_IB_HCA set to"'],
}


def completed(hint, answers):
    """The code of a hint with the answers in the places of `...`, indented as these are."""
    first, *parts = hint.split("...")
    text = first
    for answer, part in zip(answers, parts, strict=True):
        indent = re.search(r"^ *(?=[^\n]*\Z)", text, re.M)[0]
        text += answer.replace("\n", f"\n{indent}") + part
    return text


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if e.id not in IN_WORDS], ids=named)
def test_the_last_hint_completed_is_a_right_answer(exercise, stubs):
    """In the attendee's cell, with the imports that stand there, and with the answers of the exercises before."""
    body = completed(exercise.hints[""][-1], COMPLETED.get(exercise.id, ()))
    stub = f'raise NotImplementedError("exercise {exercise.id}: write {exercise.name}")'
    cell = stubs[exercise.id][0].source
    assert stub in cell
    notebook = exercise.id.partition(".")[0]
    namespace = {e.name: e.reference for e in EXERCISES if e.id.partition(".")[0] == notebook and e is not exercise}
    exec(cell.replace(stub, textwrap.indent(body, "    ").lstrip()), namespace)
    result = check(exercise, namespace[exercise.name])
    assert result, result.message
