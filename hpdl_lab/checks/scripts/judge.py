"""The judge of a converted training script: its ranks against the one-rank script, one invariant after the other.

Each judge takes a `Case` and raises Broken("invariant: sentence with numbers"), or returns.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from ...units import bytes_text, counted
from ...watch.records import Event
from ...watch.strategy import nbytes
from ..ranks import full_stop
from ..record import Broken
from .launch import LIMIT, SAVED, SHARED, STALL, ScriptRank, ScriptRun

if TYPE_CHECKING:
    from torch import Tensor


TOLERANCE = 1e-10  # of a loss in float64 that all ranks have a part of
OF_NORM = 1e-6  # relative, of a gradient's sum of squares: more than rounding, less than any mistake
LAYERS = ("attention.q.weight", "attention.k.weight", "attention.v.weight", "attention.out.weight")
LAYERS += ("mlp.0.weight", "mlp.2.weight")
TOO_MUCH = 1.5  # times the bytes that are needed


@dataclass
class ScriptCase:
    """A run to be judged.

    alone: the one-rank script; dp, tp: how many ranks share the batch, and each layer; sharded: by FSDP2.
    """

    run: ScriptRun
    alone: ScriptRun
    dp: int
    tp: int
    sharded: bool = False

    @property
    def ranks(self) -> list[ScriptRank]:
        return self.run.ranks

    @property
    def one(self) -> ScriptRank:
        return self.alone.ranks[0]

    @cached_property
    def steps(self) -> list[list[Event]]:
        """The events of each step, of all ranks."""
        return [list(events) for events in zip(*(rank.optimizer_steps for rank in self.ranks), strict=False)]

    def held(self, rank: int) -> dict[str, int]:
        """Return {name: numbers that this rank holds of a parameter}."""
        return {name: weight["held"] for name, weight in self.ranks[rank].weights.items()}

    @cached_property
    def whole(self) -> dict[str, int]:
        """{name: numbers in a parameter}."""
        return {name: weight["held"] for name, weight in self.one.weights.items()}

    def copies(self, name: str) -> float:
        """Return how many times all ranks together hold a parameter."""
        return sum(self.held(rank).get(name, 0) for rank in range(len(self.ranks))) / self.whole[name]

    def ratio(self, step: int, name: str) -> float:
        """Return a gradient's norm, as of the whole parameter, over its norm in the one-rank script."""
        right = self.one.optimizer_steps[step]["grads"][name]
        total = sum(event["grads"].get(name, 0.0) for event in self.steps[step]) / (self.copies(name) or 1)
        return 1.0 if right < 1e-20 > total else (total / max(right, 1e-30)) ** 0.5

    def loss(self, step: str) -> tuple[str, float, float]:
        """Return (the loss as rank 0 printed it, its value, the value of the one-rank script)."""
        text = self.ranks[0].losses[step]
        return text, float(text), float(self.one.losses[step])

    def same(self, step: str) -> bool:
        """Return True if a loss is as in the one-rank script, to as many digits as are printed."""
        text, got, right = self.loss(step)
        digits = len(text.lower().partition("e")[0].partition(".")[2])
        return abs(got - right) <= max(TOLERANCE, 0.51 * 10.0**-digits)

    @property
    def group(self) -> str:
        return "tensor-parallel group" if self.dp == 1 else "tp group"


def judge_script(case: ScriptCase) -> None:
    """Raise Broken for the first invariant that the script breaks."""
    own = (_small_forwards, _small_units, _adds_once, _saves_shards) if case.sharded else (_saves_once, _sends_enough)
    numbers = _same_examples, _same_weights, _same_gradients, _prints_the_loss
    for invariant in (_updates_the_model, _ends, _begins_together, *numbers, _shards, *own, _destroys):
        invariant(case)


def _updates_the_model(case: ScriptCase) -> None:
    """Require that the optimizer has parameters of the model."""
    strange = max(
        (event["strange"] for rank in case.ranks if rank.weights for event in rank.optimizer_steps), default=0
    )
    if strange:
        raise Broken(f"""optimizer: {counted(strange, "parameter")} of the optimizer are not parameters of the model
            any more: sharding puts new ones in their place. Shard the model first, then make the optimizer.""")


def _ends(case: ScriptCase) -> None:
    """Raise Broken if the script waits forever or raises."""
    ranks, where = case.ranks, [_at(rank) for rank in case.ranks]
    table = "\n".join(f"rank {r} {text}" for r, text in enumerate(where))
    raised = [(event["time_ns"], r, event) for r, rank in enumerate(ranks) for event in rank.all("raised")]
    gone = [r for r, rank in enumerate(ranks) if rank.first("ended")]
    lost = [r for r, rank in enumerate(ranks) if not rank.first("ended") and not rank.all("raised")]
    if raised:
        _, r, event = min(raised, key=lambda row: row[0])
        _why_raised(r, event, gone, lost, _last_lines(ranks[r]))
    if case.run.stalled:
        waiting = [r for r in range(len(ranks)) if r not in gone]
        text = f"rank {waiting[0]} {where[waiting[0]]}"
        others = [r for r in range(len(ranks)) if where[r] != where[waiting[0]]]
        text += f", and rank {others[0]} {where[others[0]]}" if others else ", and so do all others"
        raise Broken(
            f"""deadlock: for {STALL:g} s no rank has computed: {text}. A collective returns when all ranks of its group
            have called it, so no rank may leave one out, or call another one first.""",
            table,
        )
    if case.run.late:
        there = table.replace("waits in", "is in")
        raise Broken(f"time: after {LIMIT:g} s the script still runs. Is there a loop that never ends?", there)
    if lost:
        found = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", case.run.output)
        if found:  # by torchrun, which ends the other ranks before they can say anything
            r, code = map(int, found[-1])
            ended, printed = f"rank {r} ended with exit code {code}", _last_lines(ranks[r])
        else:
            ended, printed = f"rank {lost[0]} ended", case.run.output
        raise Broken(f"launch: {ended} before the end of the script, without an error.", printed)


def _why_raised(r: int, event: Event, gone: list[int], lost: list[int], printed: str) -> None:
    """Raise Broken about the first error, of rank r; gone: ranks that had ended; lost: ranks without a word."""
    _, line, code = event["places"][-1] if event["places"] else ("", 0, "")
    place = f" in line {line}, `{code}`" if event["places"] else ""
    text = event["text"].strip().split("\n")[0]
    if re.search("onnection|remote worker|closed by peer", event["text"]):
        if gone:
            raise Broken(f"""deadlock: rank {gone[0]} has ended, and rank {r} still needs it{place}. A collective is
                called by every rank: as many steps on each, and nothing collective under `if rank == 0`.""")
        if lost:
            raise Broken(f"""launch: rank {lost[0]} ended before the end of the script, without an error, while rank {r}
                needed it{place}.""")
    if "process group has not been initialized" in text or "init_process_group" in text:
        raise Broken(f"""init: rank {r} needs a process group{place}, and there is none: the first line of every rank is
            dist.init_process_group("gloo").""")
    if "shapes cannot be multiplied" in text:
        text += """. A layer that is cut by columns leaves each rank a part of its outputs; the layer behind it has to
            take its inputs in parts (RowwiseParallel)"""
    raise Broken(f"raises: rank {r} raised {event['kind']}{place}: {full_stop(text)}", printed)


def _at(rank: ScriptRank) -> str:
    """Return "waits in line 41: dist.all_reduce(mean)"."""
    if rank.first("ended"):
        return "has ended"
    if rank.place is None:
        return "has not begun"
    return f"waits in line {rank.place[1]}, `{rank.place[2]}`"


def _last_lines(rank: ScriptRank) -> str:
    return "\n".join(rank.printed.strip().split("\n")[-10:])


def _begins_together(case: ScriptCase) -> None:
    """Require a process group, and at least one step of a model on every rank."""
    p, wanted = len(case.ranks), len(case.one.optimizer_steps)
    taken = [len(rank.optimizer_steps) for rank in case.ranks]
    blind = [r for r, rank in enumerate(case.ranks) if not rank.weights]
    if blind:
        raise Broken(f"model: rank {blind[0]} never called a model with tokens of shape (b, s).")
    if not any(event["group"] for rank in case.ranks for event in [*rank.optimizer_steps, *rank.all("left")]):
        raise Broken(f"""init: each of the {p} ranks trained by itself: without dist.init_process_group none of them
            knows of the others.""")
    if min(taken, default=0) == 0:
        raise Broken(f"steps: rank {taken.index(0)} took no step, where the one-rank script takes {wanted}.")


def _same_examples(case: ScriptCase) -> None:
    """Require the global batch of the one-rank script in every step, another part of it in each of the replicas."""
    whole = case.one.batches
    batches = [rank.batches for rank in case.ranks]
    groups = _tp_groups(case)
    for step, right in enumerate(whole):
        mine = [of[step] for of in batches if step < len(of)]
        if len(mine) < len(batches):
            raise Broken(f"""steps: a rank takes {min(map(len, batches))} steps, where the one-rank script takes
                {len(whole)}.""")
        _check_groups(case, groups, step, mine, right)
        shares = [mine[group[0]] for group in groups]
        together = Counter(number for share in shares for number in share)
        if together == Counter(right):
            continue
        raise Broken(_why_other_examples(case, step, shares, right, batches))
    if any(len(of) > len(whole) for of in batches):
        raise Broken(f"""rest: rank 0 takes {len(batches[0])} steps, where the one-rank script takes {len(whole)} and
            leaves out the examples that fill no batch (drop_last=True).""")


def _tp_groups(case: ScriptCase) -> list[list[int]]:
    """Return the ranks of each replica: of its mesh if a layer is a DTensor, else neighbors."""
    everybody = range(len(case.ranks))
    if case.tp == 1:
        return [[rank] for rank in everybody]
    plain = [list(everybody)[i : i + case.tp] for i in range(0, len(everybody), case.tp)]
    found = set()
    for rank in everybody:
        weights = case.ranks[rank].weights
        layer, norm = (weights.get(f"blocks.0.{name}", {}) for name in (LAYERS[-1], "norm1.weight"))
        mesh, extra = layer.get("mesh"), set(layer.get("axes", ())) - set(norm.get("axes", ()))
        if not mesh or len(extra) != 1:
            return plain
        flat = mesh if isinstance(mesh[0], int) else None
        if flat is None:
            rows = mesh if layer["axes"].index(next(iter(extra))) == 1 else [*map(list, zip(*mesh, strict=True))]
            flat = next(row for row in rows if rank in row)
        if len(flat) != case.tp:
            return plain
        found.add(tuple(flat))
    return [list(group) for group in sorted(found)]


def _check_groups(
    case: ScriptCase, groups: list[list[int]], step: int, mine: list[list[int]], right: list[int]
) -> None:
    """Require that ranks that share layers see the same examples."""
    for group in groups:
        for rank in group[1:]:
            if Counter(mine[rank]) == Counter(mine[group[0]]):
                continue
            alike = next((r for r in range(len(mine)) if r not in group and mine[r] == mine[rank]), None)
            if alike is not None:
                raise Broken(f"""axes: in step {step} rank {rank} sees the examples of rank {alike}, and rank
                    {group[0]} others; but it is ranks {group} that share each layer. The batch is split over dp, and
                    the sampler has to count along dp too.""")
            raise Broken(f"""examples: in step {step} ranks {group[0]} and {rank} share each layer, but see different
                examples, {len(mine[group[0]])} and {len(mine[rank])} of {len(right)}: the sum of their parts means
                nothing. All ranks of a {case.group} work on the same examples.""")


def _why_other_examples(
    case: ScriptCase, step: int, shares: list[list[int]], right: list[int], batches: list[list[list[int]]]
) -> str:
    """Return the reason why the replicas' shares are not the batch of the one-rank script."""
    n, sizes = len(shares), [len(share) for share in shares]
    who = "ranks" if case.tp == 1 else "replicas"
    if n == 1:
        if sizes[0] < len(right):
            return f"""examples: in step {step} all ranks see the same {sizes[0]} examples, where the one-rank script
                has {len(right)}. Tensor parallelism shares layers, not the batch."""
        return _other_order(step, shares, right, "the ranks")
    if all(Counter(share) == Counter(shares[0]) for share in shares[1:]):
        if sizes[0] == len(right):
            return f"""same data: in step {step} all {n} {who} see the same {sizes[0]} examples, so each does the work
                of one rank, and nothing is gained. A DistributedSampler gives every rank its own."""
        return f"""same data: in step {step} all {n} {who} see the same {sizes[0]} examples, and no rank sees the other
            {len(right) - sizes[0]}. A DistributedSampler gives every rank its own."""
    if step and sum(sizes) < len(right) and sizes[0] < len(batches[0][step - 1]):
        return f"""rest: step {step} is taken with {" + ".join(map(str, sizes))} examples, the rest of an epoch, which
            the sampler fills up with examples seen before; the one-rank script leaves it out (drop_last=True)."""
    before = [Counter(number for of in batches for number in of[k]) for k in range(step)]
    if Counter(number for of in batches for number in of[step]) in before:
        return f"""epoch: step {step} sees the same examples as step
            {before.index(Counter(number for of in batches for number in of[step]))}: a DistributedSampler shuffles
            anew only if it knows the epoch, sampler.set_epoch(epoch)."""
    if sum(sizes) != len(right):
        return f"""batch: in step {step} the {n} {who} take {" + ".join(map(str, sizes))} = {sum(sizes)} examples, where
            the one-rank script takes {len(right)}: each rank's share is BATCH // {n}. (A larger batch is another
            training, with another learning rate.)"""
    return _other_order(step, shares, right, f"the {n} {who} together")


def _other_order(step: int, shares: list[list[int]], right: list[int], who: str) -> str:
    seen = {number for share in shares for number in share}
    return f"""order: in step {step} {who} see {len(seen)} different examples; {len(seen & set(right))} of them are
        among the {len(right)} of the one-rank script: another seed, no shuffling, or a shuffle of its own on every
        rank. A DistributedSampler with its default seed has the order of the one-rank script."""


def _same_weights(case: ScriptCase) -> None:
    """Require that all ranks start from the weights of the one-rank script."""
    weights = [rank.weights for rank in case.ranks]
    for name, right in case.one.weights.items():
        if name not in weights[0]:
            raise Broken(f"model: the model has no parameter {name}; the model of the one-rank script has it.")
        full = [r for r, of in enumerate(weights) if of[name]["held"] == right["held"]]
        values = [weights[r][name]["squares"] for r in full]
        for r, value in zip(full, values, strict=True):
            if _differs(value, values[0]):
                raise Broken(f"""weights: rank {r} starts from another model than rank {full[0]}: the norm of {name} is
                    {value**0.5:.6g} and {values[0] ** 0.5:.6g}. Equal steps keep equal replicas equal, they do not make
                    them so: the same seed on all ranks, or rank 0's weights to all (DDP sends them).""")
        total = sum(of[name]["squares"] for of in weights) / case.copies(name)
        if _differs(total, right["squares"]):
            raise Broken(f"""weights: the ranks start from other weights than the one-rank script: the norm of {name} is
                {total**0.5:.6g}, where {right["squares"] ** 0.5:.6g} is right.""")


def _differs(a: float, b: float, relative: float = OF_NORM) -> bool:
    return abs(a - b) > relative * max(abs(a), abs(b)) and max(abs(a), abs(b)) > 1e-20


def _same_gradients(case: ScriptCase) -> None:
    """Require for every step the gradient of the whole batch, and the rate of the one-rank script."""
    for step, right in enumerate(case.one.optimizer_steps):
        if case.tp > 1 and step == 0 and "step 0" in case.ranks[0].losses and not case.same("step 0"):
            forward(case)
        events = case.steps[step]
        for r, event in enumerate(events):
            if _differs(event["rate"], right["rate"]):
                raise Broken(f"""rate: rank {r} steps with a learning rate of {event["rate"]:g}, where the one-rank
                    script has {right["rate"]:g}: the batch of all ranks together is as large as before, so is the
                    rate.""")
        for name in right["grads"]:
            _check_gradient(case, step, name, events)
        ratios = {name: case.ratio(step, name) for name in right["grads"]}
        wrong = [name for name, ratio in ratios.items() if _differs(ratio, 1.0)]
        if wrong:
            clipped = _why_other_norm(case, step, ratios) if case.sharded else None
            raise Broken(clipped or _why_other_gradients(case, step, ratios, wrong))


def _check_gradient(case: ScriptCase, step: int, name: str, events: list[Event]) -> None:
    """Require a gradient of `name` on every rank, the same on all ranks that hold it whole."""
    missing = [r for r, event in enumerate(events) if name not in event["grads"] and case.held(r).get(name)]
    if missing:
        raise Broken(f"gradient: in step {step} {name} has no gradient on rank {missing[0]}.")
    full = [r for r in range(len(events)) if case.held(r)[name] == case.whole[name]]
    for r in full[1:]:
        a, b = (events[k]["grads"][name] for k in (full[0], r))
        if _differs(a, b):
            raise Broken(f"""average: in step {step} rank {full[0]} and rank {r} step with different gradients of
                {name}, of norms {a**0.5:.6g} and {b**0.5:.6g}, so their models drift apart. Gradients are averaged over
                the ranks that hold a parameter, before the step: DistributedDataParallel does it, or
                dist.all_reduce(p.grad) and a division.""")


def _why_other_gradients(case: ScriptCase, step: int, ratios: dict[str, float], wrong: list[str]) -> str:
    """Return the reason for norms of gradients that differ from the one-rank script."""
    p, values = case.dp, [ratios[name] for name in wrong]
    for factor, reason in ((p, "sum"), (len(case.ranks), "sum"), (1 / p, "twice"), (1 / len(case.ranks), "twice")):
        if factor == 1 or any(_differs(value, factor) for value in values) or len(wrong) < 0.9 * len(ratios):
            continue
        hidden = "AdamW nearly hides it, as its steps do not depend on the gradient's scale; SGD would take steps"
        if reason == "sum":
            return f"""sum: in step {step} the gradients are {factor:g} times as large as in the one-rank script:
                added, and not divided by the number of replicas. {hidden} {factor:g} times as long."""
        return f"""twice: in step {step} the gradients are 1/{1 / factor:g} as large as in the one-rank script: averaged
            twice. DDP and FSDP have divided already. {hidden} {1 / factor:g} times too short."""
    sizes = [len(rank.batches[step]) for rank in case.ranks]
    if len(set(sizes)) > 1:
        return f"""shares: in step {step} the ranks take {" + ".join(map(str, sizes))} examples: a mean of means is not
            the mean of all of them. Give all ranks as many, or weigh what they have."""
    if step:
        return f"""update: the gradients are right in step {step - 1} and wrong in step {step}: the step between them
            is not the AdamW step of the one-rank script, or the weights were changed."""
    names = f"{wrong[0]} and {len(wrong) - 1} more parameters" if len(wrong) > 1 else wrong[0]
    return f"""gradient: in step {step} the gradients of {names} are wrong: the norm of the first is
        {values[0]:.4g} times its norm in the one-rank script. Which ranks hold the same part of it, and has it been
        averaged over just these ranks?"""


def _why_other_norm(case: ScriptCase, step: int, ratios: dict[str, float]) -> str | None:
    """Return the reason for gradients that are clipped otherwise than in the one-rank script, which clips to 1."""
    squares = case.one.optimizer_steps[step]["grads"]
    norm = sum(squares.values()) ** 0.5
    got = sum(ratios[name] ** 2 * square for name, square in squares.items()) ** 0.5
    if max(ratios.values()) > (1 + 1e-4) * min(ratios.values()):
        return f"""clip: in step {step} the gradients of some parameters are scaled by {min(ratios.values()):.3g}, of
            others by {max(ratios.values()):.3g}: each rank has divided its shards by a norm of its own. The norm is the
            root of the sum of squares over all shards: clip_grad_norm_ of DTensors adds over ranks, one of local
            tensors does not."""
    if norm > 0.999:
        return f"""clip: in step {step} the norm of the gradient is {got:.7g}, where the one-rank script has clipped it
            to {norm:.7g}. Clipping stands between the last backward of a step and optimizer.step()."""
    return f"""accumulate: in step {step} the norm of the gradient is {got:.4g} after clipping, where the one-rank
        script has {norm:.4g}, which needs no clipping. A step's gradient is the mean over its micro-batches: divide
        each loss by their number."""


def forward(case: ScriptCase) -> None:
    """Raise Broken if the first loss, before any step, of a model whose layers are shared is wrong."""
    text, _, right = case.loss("step 0")
    rank = case.ranks[0]
    begun, over = (rank.first(what)["time_ns"] for what in ("forward", "output"))
    layers = sum(name.endswith(LAYERS[-1]) for name in case.whole)
    sums = sum("all_reduce" in entry["op"] for entry in rank.between(begun, over))
    if not any(_differs(case.ratio(0, name), 1.0) for name in case.one.optimizer_steps[0]["grads"]):
        return  # what is printed is wrong, and nothing else
    raise Broken(f"""forward: the loss of step 0, before any step, is {text}, where the one-rank script has
        {right:.12f}. The model adds over ranks {counted(sums, "time")} in forward; {layers} layers need {2 * layers}
        sums, one behind each pair of columns and rows: without it a rank goes on with a part of a sum.""")


def _prints_the_loss(case: ScriptCase) -> None:
    """Require that rank 0 alone prints the loss of the whole batch of every step, and of the test batch."""
    first = case.ranks[0].losses
    loud = [r for r, rank in enumerate(case.ranks) if r and rank.losses]
    missing = [step for step in case.one.losses if step not in first]
    if missing:
        raise Broken(f"""print: rank 0 has not printed the loss of {missing[0]}: a line such as "{missing[0]} loss
            {case.one.losses[missing[0]]}" is looked for.""")
    for step in case.one.losses:
        if case.same(step):
            continue
        text, got, right = case.loss(step)
        if step == "test":
            raise Broken(f"""test: the training is right, but the test loss is {text}, where the one-rank script has
                {right:.12f}: is it the loss of the same 32 examples, and of all of them?""")
        if case.dp > 1 and not _differs(got, case.dp * right, 1e-9):
            raise Broken(f"""loss: the training is right, but in {step} {text} is printed, {case.dp} times the loss:
                a sum over {case.dp} ranks, not divided by {case.dp}.""")
        if case.dp > 1:
            raise Broken(f"""loss: the training is right, but in {step} rank 0 prints {text}, the loss of its own share;
                the mean over the batch of all ranks is {right:.12f}. Add the losses over ranks, and divide.""")
        raise Broken(f"loss: the training is right, but in {step} {text} is printed, where {right:.12f} is right.")
    if loud:
        raise Broken(f"""print: rank {loud[0]} prints losses as well, so every line appears {1 + len(loud)} times: only
            rank 0 prints.""")


def _shards(case: ScriptCase) -> None:
    """Require that every layer that is to be shared over tp is cut. A norm is shared over dp at most, by FSDP."""
    if case.tp == 1:
        return
    names = [name for name in case.whole if name.endswith(LAYERS)]
    share = {name: case.held(0)[name] / case.whole[name] for name in case.whole}
    kept = [name for name in names if share[name] * case.tp > share["norm.weight"] * 1.01]
    total, held = sum(case.whole.values()), sum(case.held(0).values())
    if len(kept) == len(names):
        raise Broken(f"""shards: all numbers are right, but no layer is cut over tp: rank 0 holds {held:,} of {total:,}
            parameters. parallelize_module leaves out, without an error, what its plan does not name:
            model.named_modules() lists the names.""")
    if kept:
        more = f" and {counted(len(kept) - 1, 'more layer')}" if kept[1:] else ""
        raise Broken(f"""shards: all numbers are right, but {kept[0]}{more} are not cut over tp, so that rank 0 holds
            {held:,} of {total:,} parameters: which of the {len(names)} layers does the plan not name?""")


def _saves_once(case: ScriptCase) -> None:
    """Require that rank 0 alone has saved the model: whole, and under the names of the one-rank script."""
    savers = [r for r, rank in enumerate(case.ranks) if SAVED in rank.files]
    if not savers:
        raise Broken(f"saved: no rank has saved {SAVED}; the one-rank script does.")
    if savers != [0]:
        who = "every rank" if len(savers) == len(case.ranks) else f"rank {savers[-1]}"
        raise Broken(f"""saved: {who} has written {SAVED}: in one folder they write into the same file at the same time,
            and what is left in it is anybody's guess. Only rank 0 saves.""")
    got, right = case.run.state, cast("dict[str, Tensor]", case.alone.state)
    again = "model.load_state_dict of the one-rank script could not take it"
    if isinstance(got, Exception):
        raise Broken(f"""checkpoint: {SAVED} cannot be read on one rank ({type(got).__name__}): shards of DTensors, not
            tensors? full_tensor(), or get_model_state_dict with full_state_dict=True, puts each of them together, on
            all ranks.""")
    if not isinstance(got, dict) or set(got) != set(right):
        strange = sorted(set(got) - set(right))[:1] if isinstance(got, dict) else [type(got).__name__]
        why = " DDP keeps the model in .module: save model.module.state_dict()." if "module." in str(strange) else ""
        raise Broken(f"checkpoint: {SAVED} holds {(strange or ['too little'])[0]}: {again}.{why}")
    for name, tensor in right.items():
        shape = tuple(getattr(got[name], "shape", ()))
        if shape != tuple(tensor.shape):
            raise Broken(f"""checkpoint: {name} in {SAVED} has shape {shape}, where {tuple(tensor.shape)} is the
                whole: {again}.""")
        if type(got[name]) is not type(tensor):
            raise Broken(f"""checkpoint: {name} in {SAVED} is a {type(got[name]).__name__}, rank 0's shard of it. Put it
                together first, on all ranks: full_tensor(), or get_model_state_dict with full_state_dict=True.""")
        if float((got[name] - tensor).abs().max()) > 1e-6:
            raise Broken(f"checkpoint: {name} in {SAVED} differs from the one-rank script's after its last step.")


def step_traffic(case: ScriptCase, rank: int = 0) -> Counter:
    """Return {what: bytes} of the collectives of one rank in its second step; ("calls", what): how many there are."""
    events = case.ranks[rank]
    begun, over = (event["time_ns"] for event in events.optimizer_steps[:2])
    found: Counter = Counter()
    for entry in events.between(begun, over):
        found[entry["op"]] += nbytes(entry)
        found["calls", entry["op"]] += 1
    return found


def described(found: Counter) -> str:
    """Return "12 all_reduce of 12.6 MB together"."""
    names = [what for what in found if isinstance(what, str)]
    text = [f"{found['calls', what]} {what}, {bytes_text(found[what])}" for what in sorted(names)]
    return "; ".join(text) or "nothing"


def _sends_enough(case: ScriptCase) -> None:
    """Raise Broken if a rank adds or gathers much more than a right answer; FSDP gathers parameters in both passes."""
    found, needed = step_traffic(case), _needed_bytes(case)
    for what, often in (("all_reduce", 1), ("all_gather", 2)):
        if found[what] > TOO_MUCH * often * needed:
            raise Broken(f"""traffic: all numbers are right, but in a step rank 0 sends {described(found)}, where one
                all_reduce of {bytes_text(needed)} in all is needed: is something averaged, or put together, that was so
                already?""")


def _needed_bytes(case: ScriptCase) -> float:
    """Return the bytes of the gradients that are averaged over dp, and of the sums of layers that tp shares."""
    width, parameters = 8, sum(case.whole.values())
    gradients = parameters if case.tp == 1 else case.dp * sum(case.held(0).values())  # FSDP holds a share of them
    rows, d = len(case.ranks[0].batches[0]), case.whole["norm.weight"]
    positions = case.whole["positions.weight"] // d
    layers = sum(name.endswith(LAYERS[-1]) for name in case.whole)
    sums = 6 * layers * rows * positions * d  # forward 2; backward 1 of the MLP, 3 of q, k and v
    return width * ((case.dp > 1) * gradients + (case.tp > 1) * sums)


def _destroys(case: ScriptCase) -> None:
    """Require that no process group is left at the end."""
    left = [r for r, rank in enumerate(case.ranks) if rank.first("left")["group"]]
    if left:
        raise Broken(f"""destroy: all numbers are right, but rank {left[0]} ends with its process group:
            dist.destroy_process_group() at the end waits for what is under way; with NCCL a rank without it warns, and
            may hang.""")


def _forwards(case: ScriptCase) -> list[Event]:
    """Return the training forwards of rank 0 in its second step."""
    begun, over = (event["time_ns"] for event in case.ranks[0].optimizer_steps[:2])
    return [e for e in case.ranks[0].all("forward") if e["training"] and begun < e["time_ns"] < over]


def _small_forwards(case: ScriptCase) -> None:
    """Require micro-batches of the size that they have in the one-rank script."""
    most, allowed = (
        max(len(e["rows"]) for e in rank.all("forward") if e["training"]) for rank in (case.ranks[0], case.one)
    )
    if most > allowed:
        raise Broken(f"""accumulate: all numbers are right, but a forward of rank 0 has {most} examples, where
            {allowed} fit into the memory of the one-rank script: keep its micro-batches.""")


def _small_units(case: ScriptCase) -> None:
    """Require that rank 0 holds its share of the parameters, and gathers them block by block."""
    total, held = sum(case.whole.values()), sum(case.held(0).values())
    if held > 1.1 * total / case.dp:
        raise Broken(f"""shards: all numbers are right, but rank 0 holds {held:,} of {total:,} parameters, where
            1/{case.dp} of them is its share: fully_shard(model) replaces each parameter by this rank's shard.""")
    begun, over = (event["time_ns"] for event in case.ranks[0].optimizer_steps[:2])
    entries = case.ranks[0].between(begun, over)
    largest = max((nbytes(entry) for entry in entries if entry["op"] == "all_gather"), default=0)
    if largest > 0.9 * 8 * total:
        raise Broken(f"""units: all numbers are right, but rank 0 gathers {bytes_text(largest)} at once: the whole
            model. fully_shard(block) for each of model.blocks, then fully_shard(model), gather a block at a time.""")


def _adds_once(case: ScriptCase) -> None:
    """Require that gradients are added over ranks once in a step, and parameters gathered twice in a micro-batch."""
    found, needed, times = step_traffic(case), 8 * sum(case.whole.values()), len(_forwards(case))
    sums = (found["all_reduce"] + found["reduce_scatter"]) / needed  # gloo has an all-reduce in the place of the other
    if sums > TOO_MUCH:
        raise Broken(f"""traffic: all numbers are right, but in a step of {times} micro-batches rank 0 adds all
            gradients over ranks {sums:.0f} times. model.set_requires_gradient_sync(False) in all micro-batches but the
            last leaves one reduce-scatter in a step.""")
    if found["all_gather"] > TOO_MUCH * 2 * times * needed:
        raise Broken(f"""traffic: all numbers are right, but in a step of {times} micro-batches rank 0 sends
            {described(found)}: FSDP gathers each parameter in forward and in backward, no more.""")


def _saves_shards(case: ScriptCase) -> None:
    """Require a checkpoint of the model and of AdamW's moments, and that each rank has written its part of it."""
    got, right = case.run.shared, cast("dict[str, Tensor]", case.alone.shared)
    if got is None:
        raise Broken(f"""saved: there is no checkpoint in the folder "{SHARED}": every rank calls
            dcp.save(state, checkpoint_id="{SHARED}").""")
    if not isinstance(got, dict):
        raise Broken(f"checkpoint: the one in {SHARED} cannot be read ({type(got).__name__}: {got}).")
    wrote = case.run.wrote
    name, most = max(wrote.items(), key=lambda file: file[1])
    if most > 0.75 * sum(wrote.values()):
        raise Broken(f"""saved: all numbers are right, but the file {name} has {bytes_text(most)} of the
            {bytes_text(sum(wrote.values()))} in {SHARED}: one rank has gathered everything and written it. dcp.save of
            DTensors lets each rank write its own shards.""")
    for weight in case.whole:
        for part, what in (("", "the model"), (".exp_avg", "AdamW's moments"), (".exp_avg_sq", "AdamW's moments")):
            wanted, found = (
                [tensor for key, tensor in state.items() if f".{key}".endswith(f".{weight}{part}")]
                for state in (right, got)
            )
            if not found:
                raise Broken(f"""checkpoint: {SHARED} has no {weight}{part}. A training that goes on needs {what}:
                    get_state_dict(model, optimizer) returns weights and moments by the names of parameters.""")
            if found[0].shape != wanted[0].shape or float((found[0] - wanted[0]).abs().max()) > 1e-6:
                raise Broken(f"""checkpoint: {weight}{part} in {SHARED} is not {what} of the one-rank script after its
                    last step.""")
