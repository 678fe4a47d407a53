"""Training scripts in the styles of public tutorials, for `hpdl watch`: right ones, and each mistake in one of those.

The table says how each is started and what is to be found. Start each in an empty folder: some write a checkpoint, and
right_ddp_trainer.py goes on from the one that it finds. Each right one takes 16 to 36 steps, in half a second or less.

Two keys may look alike: a rank that is alone in a collective waits for one that has ended, or that has
gone on to another collective. The key is that of the mistake in the source.

torch 2.13 may abort a rank of gloo at the end of Python, when all is done, with "terminate called without an active
exception": a thread of the group still wants Python's lock. 0.1 s of sleep in an atexit handler prevents it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Watched:
    """A script: how it is started, and what a report on it must say.

    file:   its name.
    ranks:  for torchrun and mpiexec; `launch="spawn"` starts that many ranks itself, under plain Python.
    finds:  the key of the finding, or None where there is none.
    line:   a piece of the line of the source that the finding names; "" where several would do.
    words:  what the sentence of the finding has in it, or the report on a right script.
    needs:  a package of tests/installed.py that the script imports, in the folder TRAINERS there.
    """

    file: str
    ranks: int = 2
    finds: str | None = None
    line: str = ""
    words: tuple[str, ...] = ()
    launch: Literal["torchrun", "spawn", "mpi"] = "torchrun"
    args: tuple[str, ...] = ()
    needs: str = ""


RIGHT = (
    Watched("right_accelerate.py", needs="accelerate"),
    Watched("right_accumulation.py"),
    Watched("right_autocast.py"),
    Watched("right_average_gradients.py"),
    Watched("right_buffer.py"),
    Watched("right_compile.py"),
    Watched("right_ddp_functions.py"),
    Watched("right_ddp_trainer.py", args=("--epochs", "4", "--batch-size", "64")),
    Watched("right_deep.py"),
    Watched("right_dropout.py"),
    Watched("right_early_stopping.py"),
    Watched("right_flat_gradients.py"),
    Watched("right_frozen.py"),
    Watched("right_fsdp.py"),
    Watched("right_hf_trainer.py", needs="accelerate"),
    Watched("right_iterable.py"),
    Watched("right_join.py"),
    Watched("right_lightning.py", needs="lightning"),
    Watched("right_local_sgd.py", args=("--local-steps", "4")),
    Watched("right_mesh.py", ranks=4),
    Watched("right_mingpt.py", words=("around each of the 4 blocks (TransformerEncoderLayer)",)),
    Watched("right_module_level.py"),
    Watched("right_mpi4py.py", launch="mpi"),
    Watched("right_nanogpt.py"),
    Watched("right_pipeline.py"),
    Watched("right_raw_loop.py"),
    Watched("right_records.py"),
    Watched("right_send_recv.py"),
    Watched("right_spawn.py", launch="spawn"),
    Watched("right_tensor_parallel.py"),
    Watched("right_weighted.py"),
    Watched("right_zero.py"),
)
HANG = (
    Watched("broken_deadlock_loss.py", finds="deadlock", line="dist.all_reduce(total)", words=("rank 0",)),
    Watched("broken_deadlock_barrier.py", finds="deadlock", line="dist.barrier()", words=("rank 0",)),
    Watched("broken_deadlock_eval.py", finds="deadlock", line="criterion(model(x), y)", words=("rank 0",)),
    Watched("broken_deadlock_checkpoint.py", finds="deadlock", line="get_model_state_dict(model", words=("rank 0",)),
    Watched("broken_deadlock_recv.py", finds="deadlock", line="dist.recv(gradient, src=1)", words=("rank 0",)),
    Watched("broken_deadlock_tag.py", finds="deadlock", line="dist.recv(h, src=0, tag=1)", words=("rank 1",)),
    Watched("broken_mismatch_size.py", finds="mismatch", line="dist.all_reduce(sums)"),
    Watched("broken_mismatch_dtype.py", finds="mismatch", line="dist.all_reduce(total)", words=("float64",)),
    Watched("broken_mismatch_order.py", finds="mismatch", line="dist.all_reduce(tensor)"),
    Watched("broken_mismatch_kind.py", finds="mismatch", line="dist.broadcast(mean, src=0)", words=("broadcast",)),
    Watched("broken_left_steps.py", finds="left", line="loss.backward()", words=("rank 1",)),
    Watched("broken_left_spawn.py", finds="left", line="loss.backward()", words=("rank 1",), launch="spawn"),
    Watched("broken_left_early_stopping.py", finds="left", line=".backward()", words=("rank 0",)),
    Watched("broken_left_return.py", finds="left", line="dist.all_reduce(total)", words=("rank 1",)),
    Watched("broken_error_index.py", finds="error", line="criterion(model(x[batch])", words=("rank 1", "IndexError")),
    Watched("broken_error_key.py", finds="error", line="{0: 1e-2}[rank]", words=("rank 1", "KeyError")),
    Watched("broken_error_label.py", finds="error", line="cross_entropy(model(x), y)", words=("rank 1", "IndexError")),
    Watched("broken_never_met_spawn.py", finds="never_met", line="dist.init_process_group", launch="spawn"),
    Watched("broken_never_met_return.py", finds="never_met", line="dist.init_process_group", words=("rank 1",)),
    Watched("broken_caught_step.py", finds="caught", words=("rank 1", "ValueError")),
    Watched("broken_caught_loss.py", finds="caught", words=("rank 1", "KeyError")),
)
WRONG = (
    Watched("broken_init.py", finds="init", words=("init_process_group",)),
    Watched("broken_weights_seed.py", finds="weights"),
    Watched("broken_weights_buffer.py", finds="weights", words=("center",)),
    Watched("broken_weights_frozen.py", finds="weights"),
    Watched("broken_weights_left_out.py", finds="weights", words=("head",)),
    Watched("broken_not_averaged_forgotten.py", finds="not_averaged"),
    Watched("broken_not_averaged_module.py", finds="not_averaged"),
    Watched("broken_not_averaged_no_sync.py", finds="not_averaged"),
    Watched("broken_sum.py", finds="sum", line="dist.all_reduce(param.grad.data"),
    Watched("broken_sum_mpi.py", finds="sum", line="comm.Allreduce(", launch="mpi"),
    Watched("broken_twice.py", finds="twice"),
    Watched("broken_same_data_shuffle.py", finds="same_data", words=("DistributedSampler",)),
    Watched("broken_same_data_order.py", finds="same_data", words=("DistributedSampler",)),
    Watched("broken_same_data_nanogpt.py", finds="same_data"),
    Watched("broken_overlap_seed.py", finds="overlap"),
    Watched("broken_overlap_slices.py", finds="overlap"),
    Watched("broken_unread_stride.py", finds="unread"),
    Watched("broken_unread_replicas.py", finds="unread"),
    Watched("broken_epoch.py", finds="epoch", words=("set_epoch",)),
    Watched("broken_epoch_workers.py", finds="epoch", words=("set_epoch",)),
    Watched("broken_uneven.py", finds="uneven"),
    Watched("broken_eval_shard.py", finds="eval_shard"),
    Watched("broken_file.py", finds="file", line="torch.save(", words=("gpt_snapshot.pt",)),
    Watched("broken_optimizer.py", finds="optimizer"),
    Watched("broken_optimizer_parallel.py", finds="optimizer"),
)
NOTES = (
    Watched("broken_loss_shard.py", finds="loss_shard", line="print("),
    Watched("broken_prints.py", finds="prints", line="print("),
    Watched("broken_batchnorm.py", finds="batchnorm"),
    Watched("broken_dropout.py", finds="dropout"),
    Watched("broken_dropout_parallel.py", finds="dropout", words=("share each layer",)),
    Watched("broken_lr.py", finds="lr"),
)
SLOW = (
    Watched("broken_per_parameter.py", finds="per_parameter", line="dist.all_reduce(p.grad)"),
    Watched("broken_buckets.py", finds="buckets", words=("bucket_cap_mb",)),
    Watched("broken_item.py", finds="item", line="loss.item()"),
    Watched("broken_barrier.py", finds="barrier", line="dist.barrier()"),
    Watched("broken_straggler.py", finds="straggler", words=("rank 1",)),
    Watched("broken_straggler_model.py", finds="straggler", words=("rank 1",), launch="mpi"),
    Watched("broken_input.py", finds="input"),
    Watched("broken_threads.py", finds="threads"),
)
CASES: tuple[Watched, ...] = (*RIGHT, *HANG, *WRONG, *NOTES, *SLOW)


def text_of(file: str) -> str:
    """Return the text of a script. Raises ValueError if lines of broken.txt do not stand once in the right script."""
    if (FOLDER / file).exists():
        return (FOLDER / file).read_text()
    entries = (FOLDER / "broken.txt").read_text().split("\n\n")
    (entry,) = [entry for entry in entries if entry.startswith(f"{file} = ")]
    head, *lines = entry.rstrip("\n").split("\n")
    right, _, mistake = head.removeprefix(f"{file} = ").partition(": ")
    text = "\n" + re.sub(r'\A""".*?"""\n', "", (FOLDER / right).read_text(), flags=re.DOTALL)
    for old, new in changes(lines):
        if text.count(old) != 1:
            raise ValueError(f"{file}: these lines stand {text.count(old)} times in {right}:{old}")
        text = text.replace(old, new)
    return f'"""As {right}: {mistake}."""\n' + text.removeprefix("\n")


def changes(lines: list[str]) -> list[tuple[str, str]]:
    """Return (old, new) of each group of lines with - and then +, both between line breaks."""
    groups: list[tuple[list[str], list[str]]] = []
    before = "+"
    for line in lines:
        if line.startswith("-") and not before.startswith("-"):
            groups.append(([], []))
        if line != "...":
            groups[-1][line.startswith("+")].append(line[1:])
        before = line
    return [("\n" + "".join(f"{x}\n" for x in old), "\n" + "".join(f"{x}\n" for x in new)) for old, new in groups]
