"""Converted training scripts that lab.check_script must reject, with the reason meant for it, or accept.

Each is the solution of notebooks/scripts with edits, in the form of tests/answers:

    same data: see the same 32 examples      the invariant that fails, and a part of the message meant for it
        old => new                           one part of a line in the place of another
        - line                               lines in the place of others
        + line
"""

import re
import textwrap

from hpdl_lab.checks.scripts.table import ALONE, SCRIPTS, script_of

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
same data: nobody sees the other 16
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
order: of which
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
sum @manual: 2 times those of the one-rank script
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
update: the gradients of step 0 are right, those of step 1 are not
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
    "9.6": """
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
gradient: averaged over just those
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
    "11.5": """
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
gradient: averaged over just those
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
    "9.6": {
        "put together by hand": """
- state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # gathers, so on every rank
+ state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
""",
    },
    "11.5": {
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
            text = script_of(ALONE).read_text() if base == "alone" else exercise.solution
            if base in RIGHT[exercise.id]:
                text = edited(text, RIGHT[exercise.id][base])
            yield exercise, failed, says, edited(text, edits)
