"""Converted training scripts that lab.check_script must reject, with the reason meant for it, or accept.

Each is the solution of notebooks/scripts with edits, in the form of tests/answers:

    same data: see the same 32 examples      the invariant that fails, and a part of the message meant for it
        old => new                           one part of a line in the place of another
        - line                               lines in the place of others
        + line
"""

import re
import textwrap

from hpdl_lab.checks.scripts.table import SCRIPTS, script_of

EDIT = re.compile(r"((?:^- .*\n?)+)((?:^\+ ?.*\n?)*)|^(.+) => (.*)$", re.M)

MANUAL = """
- model = DistributedDataParallel(model)  # rank 0's weights for all; averages gradients in backward
+ for p in model.parameters():
+     dist.broadcast(p.data, 0)
-         loss.backward()
+         loss.backward()
+         for p in model.parameters():
+             dist.all_reduce(p.grad)
+             p.grad /= ranks
model.module => model
"""

WRONG = {
    "6.7": """
same data: all 2 ranks see the same 32 examples
    - sampler = DistributedSampler(train)  # every rank its own examples
    - loader = DataLoader(train, BATCH // ranks, sampler=sampler, drop_last=True)
    + generator = torch.Generator()
    + sampler = torch.utils.data.RandomSampler(train, generator=generator)
    + loader = DataLoader(train, BATCH, sampler=sampler, drop_last=True)
    sampler.set_epoch(epoch) => generator.manual_seed(epoch)
same data: no rank sees the other 16
    sampler = DistributedSampler(train) => sampler = DistributedSampler(train, ranks, 0)
epoch: step 3 sees the same examples as step 0
    - sampler.set_epoch(epoch)  # another order in every epoch
    + pass
batch: take 24 + 24 = 48 examples
    DataLoader(train, BATCH // ranks, => DataLoader(train, 24,
batch: take 32 + 32 = 64 examples
    DataLoader(train, BATCH // ranks, => DataLoader(train, BATCH,
steps: takes 3 steps, where the one-rank script takes 6
    range(2) => range(1)
order: of them are
    DistributedSampler(train) => DistributedSampler(train, seed=1)
order: no shuffling
    DistributedSampler(train) => DistributedSampler(train, shuffle=False)
rest: step 3 is taken with 1 + 1 examples
    sampler=sampler, drop_last=True => sampler=sampler
shares: the ranks take 20 + 12 examples
    - for x, y in loader:
    + order = torch.randperm(97, generator=torch.Generator().manual_seed(epoch))[:96].split(BATCH)
    + for x, y in (train[part.tensor_split((20,))[rank]] for part in order):
model: rank 0 never called a model
    mean = loss.detach() / ranks => raise SystemExit
    model(x) => torch.ones(len(x) * 64, 81, dtype=torch.float64, requires_grad=True).unsqueeze(0)
deadlock: rank 1 has ended
    - sampler = DistributedSampler(train)  # every rank its own examples
    - loader = DataLoader(train, BATCH // ranks, sampler=sampler, drop_last=True)
    + generator = torch.Generator()
    + def order(epoch):
    +     return torch.randperm(97, generator=generator.manual_seed(epoch))[rank::ranks].tolist()
    - sampler.set_epoch(epoch)  # another order in every epoch
    - for x, y in loader:
    + for x, y in DataLoader(train, BATCH // ranks, sampler=order(epoch)):
deadlock: rank 0 waits in line
    - mean = loss.detach() / ranks
    - dist.all_reduce(mean)  # on every rank, or rank 0 waits forever
    - if rank == 0:
    + if rank == 0:
    +     mean = loss.detach() / ranks
    +     dist.all_reduce(mean)
deadlock: no rank may leave one out
    - if rank == 0:
    -     print(f"test loss {loss.item():.12f}")
    + if rank == 0:
    +     dist.barrier()
    + else:
    +     dist.all_reduce(loss.detach())
    + if rank == 0:
    +     print(f"test loss {loss.item():.12f}")
twice: averaged twice
    - loss.backward()
    + loss.backward()
    + for p in model.parameters():
    +     p.grad /= ranks
traffic: is something averaged
    - loss.backward()
    + loss.backward()
    + for p in model.parameters():
    +     dist.all_reduce(p.grad)
    +     p.grad /= ranks
sum @manual: 2 times as large as in the one-rank script
    - p.grad /= ranks
    + pass
average @manual: rank 0 and rank 1 step with different gradients of tokens.weight
    - dist.all_reduce(p.grad)
    - p.grad /= ranks
    + pass
weights @manual: rank 1 starts from another model than rank 0
    - dist.broadcast(p.data, 0)
    + pass
    dtype="float64") => dtype="float64", seed=rank)
update: the gradients are right in step 0 and wrong in step 1
    torch.optim.AdamW(model.parameters(), lr=3e-3) => torch.optim.SGD(model.parameters(), lr=3e-3)
rate: a learning rate of 0.006
    lr=3e-3 => lr=3e-3 * ranks
loss: the loss of its own share
    - mean = loss.detach() / ranks
    - dist.all_reduce(mean)  # on every rank, or rank 0 waits forever
    + mean = loss
loss: 2 times the loss
    mean = loss.detach() / ranks => mean = loss.detach()
print: every line appears 2 times
    - if rank == 0:
    -     print(f"step {step} loss {mean.item():.12f}")
    + print(f"step {step} loss {mean.item():.12f}")
saved: every rank has written gpt.pt
    -     torch.save(model.module.state_dict(), "gpt.pt")
    - dist.destroy_process_group()
    + torch.save(model.module.state_dict(), "gpt.pt")
    + dist.destroy_process_group()
checkpoint: save model.module.state_dict()
    model.module.state_dict() => model.state_dict()
destroy: ends with its process group
    - dist.destroy_process_group()
    + pass
init: needs a process group
    - dist.init_process_group("gloo")  # on GPUs: "nccl", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    + pass
init @alone: each of the 2 ranks trained by itself
""",
    "8.6": """
init @alone: each of the 2 ranks trained by itself
optimizer: are not parameters of the model any more
    - optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # of the shards
    + pass
    - for block in model.blocks:
    + optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    + for block in model.blocks:
clip: where the one-rank script has clipped it to 0.9999997
    - torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # the norm over all shards
    + pass
clip: each rank has divided its shards by a norm of its own
    - torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # the norm over all shards
    + local = [p.grad.to_local() for p in model.parameters()]
    + norm = torch.nn.utils.get_total_norm(local)
    + for grad in local:
    +     grad.mul_(min(1.0, CLIP / norm.item()))
accumulate: divide each loss by their number
    - loss = loss_of(x_i, y_i) / len(micro_batches)
    + loss = loss_of(x_i, y_i)
accumulate: a forward of rank 0 has 16 examples
    - micro_batches = list(zip(x.split(MICRO), y.split(MICRO), strict=True))
    + micro_batches = [(x, y)]
gradient: has no gradient on rank 0
    - model.set_requires_gradient_sync(i == len(micro_batches) - 1)  # one reduce-scatter in a step
    + model.set_requires_gradient_sync(False)
    - torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # the norm over all shards
    + pass
traffic: adds all gradients over ranks 4 times
    - model.set_requires_gradient_sync(i == len(micro_batches) - 1)  # one reduce-scatter in a step
    + pass
loss: the loss of its own share
    mean += loss.detach() / ranks => mean += loss.detach()
    - dist.all_reduce(mean)  # on every rank, or rank 0 waits forever
    + pass
shards: where 1/2 of them is its share
    - for block in model.blocks:
    -     fully_shard(block)  # one block is gathered at a time
    - fully_shard(model)  # and what is left: embeddings, norm, head
    + for block in model.blocks:
    +     fully_shard(block)
    +     break
    - model.set_requires_gradient_sync(i == len(micro_batches) - 1)  # one reduce-scatter in a step
    + pass
    - torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # the norm over all shards
    + for p in model.parameters():
    +     if not hasattr(p.grad, "to_local"):
    +         dist.all_reduce(p.grad)
    +         p.grad /= ranks
    + squares = torch.zeros((), dtype=torch.float64)
    + for p in model.parameters():
    +     grad = p.grad.full_tensor() if hasattr(p.grad, "to_local") else p.grad
    +     squares += (grad**2).sum()
    + for p in model.parameters():
    +     p.grad *= min(1.0, CLIP / (squares.item() ** 0.5 + 1e-6))
units: gathers 855 KiB at once
    - for block in model.blocks:
    -     fully_shard(block)  # one block is gathered at a time
    + pass
deadlock: rank 1 has ended
    - dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="checkpoint")  # each rank its own shards
    + if rank == 0:
    +     dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="checkpoint")
saved: one rank has gathered everything
    - from torch.distributed.checkpoint.state_dict import get_state_dict
    + from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    - weights, moments = get_state_dict(model, optimizer)
    + options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    + weights, moments = get_state_dict(model, optimizer, options=options)
    - dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="checkpoint")  # each rank its own shards
    + if rank == 0:
    +     dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="checkpoint", no_dist=True)
saved: there is no checkpoint in the folder
    - dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="checkpoint")  # each rank its own shards
    + torch.save(weights, "gpt.pt")
checkpoint: needs AdamW's moments
    {"model": weights, "optimizer": moments} => {"model": weights}
checkpoint: is not the model of the one-rank script
    - step = 0
    + early = {name: weight.clone() for name, weight in model.state_dict().items()}
    + step = 0
    {"model": weights, => {"model": early,
destroy: ends with its process group
    - dist.destroy_process_group()
    + pass
""",
    "9.5": """
shards: no layer is cut over tp
    parallelize_module(model, mesh, plan) => parallelize_module(model, mesh, {"attention.q": ColwiseParallel()})
shards: blocks.0.attention.q.weight and 7 more layers are not cut over tp
    - plan = {f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"}
    - plan |= {"blocks.*.attention.out": RowwiseParallel()}
    + plan = {}
raises: has to take its inputs in parts
    "blocks.*.mlp.2": RowwiseParallel()} => }
forward: 4 sums
    "blocks.*.mlp.2": RowwiseParallel() => "blocks.*.mlp.2": RowwiseParallel(output_layouts=dist.tensor.Partial())
examples: All ranks of a tensor-parallel group work on the same examples
    - generator = torch.Generator()
    - loader = DataLoader(train, BATCH, sampler=RandomSampler(train, generator=generator), drop_last=True)
    + sampler = torch.utils.data.DistributedSampler(train)
    + loader = DataLoader(train, BATCH // ranks, sampler=sampler, drop_last=True)
    generator.manual_seed(epoch) => sampler.set_epoch(epoch)
weights: rank 1 starts from another model
    dtype="float64") => dtype="float64", seed=rank)
optimizer: Shard the model first
    - parallelize_module(model, mesh, plan)
    - optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    + optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    + parallelize_module(model, mesh, plan)
deadlock: waits in line
    - loss = loss_of(text.test_x[:32], text.test_y[:32])  # on every rank: there are sums in it
    + if rank == 0:
    +     loss = loss_of(text.test_x[:32], text.test_y[:32])
checkpoint: full_state_dict=True
    torch.save(state, "gpt.pt") => torch.save(model.state_dict(), "gpt.pt")
saved: every rank has written gpt.pt
    -     torch.save(state, "gpt.pt")
    - dist.destroy_process_group()
    + torch.save(state, "gpt.pt")
    + dist.destroy_process_group()
gradient: averaged over just these
    - loss.backward()
    + loss.backward()
    + for p in model.parameters():
    +     grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
    +     dist.all_reduce(grad)
    +     grad /= ranks
traffic: is something averaged
    - loss.backward()
    + loss.backward()
    + for _ in range(20):
    +     dist.all_reduce(torch.zeros(131072, dtype=torch.float64))
""",
    "11.4": """
axes: the sampler has to count along dp
    DistributedSampler(train, dp.size(), dp.get_local_rank()) => DistributedSampler(train, 2, mesh["tp"].get_local_rank())
examples: All ranks of a tp group work on the same examples
    DistributedSampler(train, dp.size(), dp.get_local_rank()) => DistributedSampler(train)
same data: all 2 replicas see the same
    DistributedSampler(train, dp.size(), dp.get_local_rank()) => DistributedSampler(train, dp.size(), 0)
shards: no layer is cut over tp
    parallelize_module(model, mesh["tp"], plan) => parallelize_module(model, mesh["tp"], {})
shards: blocks.0.mlp.0.weight and 3 more layers are not cut over tp
    - plan |= {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()}
    + plan = dict(plan)
epoch: step 3 sees the same examples as step 0
    - sampler.set_epoch(epoch)  # another order in every epoch
    + pass
loss: the loss of its own share
    - mean = loss.detach() / dp.size()
    - dist.all_reduce(mean, group=dp.get_group())  # on every rank
    + mean = loss
average: with different gradients of tokens.weight
    fully_shard(model, mesh=dp) => dp
gradient: averaged over just these
    - fully_shard(model, mesh=dp)  # averages gradients over dp, and shards what is left
    + pass
    - loss.backward()
    + loss.backward()
    + for p in model.parameters():
    +     grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
    +     dist.all_reduce(grad)
    +     grad /= 4
optimizer: Shard the model first
    - fully_shard(model, mesh=dp)  # averages gradients over dp, and shards what is left
    - optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    + optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    + fully_shard(model, mesh=dp)
deadlock: waits in line
    - state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # gathers, so on every rank
    + if rank == 0:
    +     state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
""",
}

RIGHT = {
    "6.7": {
        "manual": MANUAL,
        "fully sharded": """
- from torch.nn.parallel import DistributedDataParallel
+ from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
+ from torch.distributed.fsdp import fully_shard
- model = DistributedDataParallel(model)  # rank 0's weights for all; averages gradients in backward
+ for block in model.blocks:
+     fully_shard(block)
+ fully_shard(model)
- if rank == 0:
-     print(f"test loss {loss.item():.12f}")
+ state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
+ if rank == 0:
+     print(f"test loss {loss.item():.12f}")
model.module.state_dict() => state
""",
    },
    "8.6": {
        "kept until the step": """
fully_shard(block)  # one block is gathered at a time => fully_shard(block, reshard_after_forward=False)
""",
        "one unit more, and states as they are": """
- for block in model.blocks:
-     fully_shard(block)  # one block is gathered at a time
+ for block in model.blocks:
+     fully_shard(block.mlp)
+     fully_shard(block)
- weights, moments = get_state_dict(model, optimizer)
+ _, moments = get_state_dict(model, optimizer)
+ weights = model.state_dict()
""",
    },
    "9.5": {
        "put together by hand": """
- state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # gathers, so on every rank
+ state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
""",
    },
    "11.4": {
        "averaged by hand": """
- fully_shard(model, mesh=dp)  # averages gradients over dp, and shards what is left
+ pass
- loss.backward()
+ loss.backward()
+ for p in model.parameters():
+     grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
+     dist.all_reduce(grad, group=dp.get_group())
+     grad /= dp.size()
""",
    },
}


def edited(text: str, edits: str) -> str:
    """The script after the edits; lines keep the indentation of what they replace."""
    for removed, added, old, new in EDIT.findall(textwrap.dedent(edits)):
        if not removed:
            text = replaced(text, old.strip(), new.strip())
            continue
        gone, put = (re.sub(r"^[-+] ?", "", block, flags=re.M).rstrip("\n").split("\n") for block in (removed, added))
        gone, put = (textwrap.dedent("\n".join(lines)).split("\n") for lines in (gone, put))
        pattern = r"^( *)" + r"\n".join(r"\1" * (i > 0) + re.escape(line) for i, line in enumerate(gone)) + "$"
        found = re.findall(pattern, text, re.M)
        if len(found) != 1:
            raise LookupError(f"{gone} is {len(found)} times in the script")
        text = re.sub(pattern, lambda m, put=put: "\n".join(m[1] + line for line in put), text, flags=re.M)
    return text


def replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise LookupError(f"{old!r} is {text.count(old)} times in the script")
    return text.replace(old, new)


def wrong_scripts():
    """Yield (exercise, failed, says, text of the script)."""
    for exercise in SCRIPTS:
        for entry in re.split(r"\n(?=\S)", WRONG[exercise.id].strip("\n")):
            line, _, edits = entry.partition("\n")
            failed, _, says = line.partition(": ")
            failed, _, base = failed.partition(" @")
            text = script_of(exercise.alone).read_text() if base == "alone" else exercise.solution
            if base in RIGHT[exercise.id]:
                text = edited(text, RIGHT[exercise.id][base])
            yield exercise, failed, says, edited(text, edits)
