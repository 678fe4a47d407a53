"""Hints of notebook 06: three for each kind of mistake, from a nudge to the lines themselves."""

AVERAGE_ALL_GRADIENTS_LAST = (
    "flat = torch.cat([grad.reshape(-1) for grad in grads])\n"
    "all_reduce(comm, flat)\n"
    "flat /= comm.size\n"
    "for param, mean in zip(params, flat.split([p.numel() for p in params])):\n"
    "    param.grad = mean.view(param.shape)"
)
AVERAGE_ALL_GRADIENTS = {
    "": (
        "Four moves: pack, add over ranks, divide, unpack. `grads` is what to pack: the scaffold has put zeros "
        "where a gradient is missing.",
        "torch.cat joins flat tensors; flat.split(list of numbers) takes them apart again, in the same order.",
        AVERAGE_ALL_GRADIENTS_LAST,
    ),
    "mean": (
        "all_reduce adds. How often do you divide, and by what?",
        "Divide by comm.size, once: before all_reduce or after it.",
        AVERAGE_ALL_GRADIENTS_LAST,
    ),
    "messages": (
        "Is all_reduce inside a loop?",
        "Pack first: torch.cat([g.reshape(-1) for g in grads]) is one tensor.",
        AVERAGE_ALL_GRADIENTS_LAST,
    ),
    "sizes": (
        "Which parameters did rank 1 leave out?",
        "Loop over `grads`, which has zeros for those, and hand back to every parameter.",
        AVERAGE_ALL_GRADIENTS_LAST,
    ),
    "hand back": (
        "What does p.grad hold after your function? Is it the flat tensor, or what was there before?",
        "param.grad = mean.view(param.shape) puts the mean in its place, also where there was none.",
        AVERAGE_ALL_GRADIENTS_LAST,
    ),
    "order": (
        "In which order did you pack, and in which do you take apart?",
        "zip(params, flat.split([p.numel() for p in params])) pairs them rightly, if flat was packed like it.",
        AVERAGE_ALL_GRADIENTS_LAST,
    ),
}

GRADIENT_READY_LAST = (
    "reducer.missing[reducer.bucket_of[index]] -= 1\n"
    "while ...there is a next bucket, and nothing is missing in it...:\n"
    "    bucket = reducer.buckets[len(reducer.works)]\n"
    "    reducer.works.append(comm.background(reducer.all_reduce, bucket.packed()))"
)
GRADIENT_READY = {
    "": (
        "Two moves: count the gradient in its bucket, then look at the next bucket, and again, and again.",
        "The next bucket has the number len(reducer.works). It may start when its `missing` is 0.",
        GRADIENT_READY_LAST,
    ),
    "order": (
        "In which order do buckets start on the other ranks? It has to be the same, without asking them.",
        "Do not look at the bucket of `index`, but at bucket len(reducer.works), the next in order.",
        GRADIENT_READY_LAST,
    ),
    "waits": (
        "Which call of yours returns only when other ranks have done something?",
        "comm.background(f, x) starts f(comm, x) and returns a Work. Who calls its wait(), and when?",
        GRADIENT_READY_LAST,
    ),
    "last": (
        "Gradients 0 to 3 are there before 4 and 5 on some rank. How many buckets does the last one complete?",
        "An `if` starts one bucket; a `while` starts all that are complete and next.",
        GRADIENT_READY_LAST,
    ),
    "late": (
        "When is bucket 0 complete, and when do you start it?",
        "Look at the next bucket at every call, not only at the last one.",
        GRADIENT_READY_LAST,
    ),
    "early": (
        "How do you know that a bucket is complete?",
        "reducer.missing[b] is how many gradients bucket b still waits for: count down first, then look.",
        GRADIENT_READY_LAST,
    ),
    "twice": (
        "After bucket 0 has been started, what keeps you from starting it again?",
        "Append each Work to reducer.works: its length is the number of the next bucket.",
        GRADIENT_READY_LAST,
    ),
}

DDP_HOOK_LAST = (
    "flat = bucket.buffer()\n"
    "state.all_reduce(state.comm, flat)\n"
    "flat /= state.comm.size\n"
    "future = torch.futures.Future()\n"
    "future.set_result(flat)\n"
    "return future"
)
DDP_HOOK = {
    "": (
        "Three moves: add the bucket over ranks, divide, and promise the result: DDP wants a future.",
        "bucket.buffer() is the flat tensor; state.comm and state.all_reduce are what you work with.",
        DDP_HOOK_LAST,
    ),
    "future": (
        "A future is a box that is filled later, or at once. What do you return, and who fills it?",
        "future = torch.futures.Future(); future.set_result(tensor); return future",
        DDP_HOOK_LAST,
    ),
    "mean": (
        "Without a hook DDP divides by the number of ranks. With a hook, who does?",
        "You: flat /= state.comm.size, once.",
        DDP_HOOK_LAST,
    ),
    "buffer": (
        "Which tensor holds the sum, and which one do you give to the future?",
        "all_reduce works in place: what you give to it is what holds the sum.",
        DDP_HOOK_LAST,
    ),
    "all_reduce": (
        "Whose all_reduce do you call?",
        "state.all_reduce(state.comm, flat), with a communicator as its first argument.",
        DDP_HOOK_LAST,
    ),
    "order": (
        "In which order does DDP call your hook, and in which do you call all_reduce?",
        "Reduce each bucket when it comes: the order is the same on every rank.",
        DDP_HOOK_LAST,
    ),
}

BROADCAST_PARAMETERS_LAST = "for tensor in (*model.parameters(), *model.buffers()):\n    comm.broadcast(tensor.data)"
BROADCAST_PARAMETERS = {
    "": (
        "comm.broadcast(x) copies rank 0's x into x of every rank. Which tensors does a model hold?",
        "Parameters and buffers: model.parameters() and model.buffers(). Every rank calls broadcast for each.",
        BROADCAST_PARAMETERS_LAST,
    ),
    "buffers": (
        "A batch norm keeps a running mean. Is that a parameter?",
        "model.buffers() lists what is a part of the model, but is not trained.",
        BROADCAST_PARAMETERS_LAST,
    ),
    "raises": (
        "The message names the line. If it speaks of a leaf Variable: autograd watches parameters.",
        "Either work inside `with torch.no_grad():`, or on tensor.data, the same memory without autograd.",
        BROADCAST_PARAMETERS_LAST,
    ),
    "object": (
        "An optimizer keeps the Parameter objects that it was given. Which line makes new ones?",
        "Copy into the tensor that is there: comm.broadcast(p.data) does, p.data.copy_(x) does as well.",
        BROADCAST_PARAMETERS_LAST,
    ),
    "copy": (
        "Which of your lines makes a new tensor, and who gets to see it?",
        "clone, torch.cat and state_dict of something else are copies: write back with tensor.data.copy_(...).",
        BROADCAST_PARAMETERS_LAST,
    ),
    "deadlock": (
        "The table says who waits for whom, and in which call. Do all ranks say the same root?",
        "A broadcast is a collective: rank 0 sends in it, the others receive in it, so all of them call it, "
        "with the same root.",
        BROADCAST_PARAMETERS_LAST,
    ),
}

ASSIGN_BUCKETS_LAST = (
    "buckets, room = [], 0\n"
    "for index in reversed(range(len(nbytes))):\n"
    "    if not buckets or nbytes[index] > room:\n"
    "        ...   # begin a bucket: how much room has it?\n"
    "    buckets[-1].append(index)\n"
    "    room -= nbytes[index]\n"
    "return buckets"
)
ASSIGN_BUCKETS = {
    "": (
        "Walk from the last index to the first, with a bucket in your hand. When do you put it down?",
        "When the next gradient does not fit: then begin another. A new bucket takes its first gradient "
        "whatever its size.",
        ASSIGN_BUCKETS_LAST,
    ),
    "order": (
        "Which gradient does backward make first?",
        "That of the last layer: for index in reversed(range(len(nbytes))).",
        ASSIGN_BUCKETS_LAST,
    ),
    "cover": (
        "Which indices does your loop reach, first and last? And what is in your hand when it is over?",
        "reversed(range(len(nbytes))) goes from the last index to 0. Put a bucket into the list when you begin it, not "
        "when it is full: then none is forgotten.",
        ASSIGN_BUCKETS_LAST,
    ),
    "first": (
        "How much room has the first bucket, and how much has every other one?",
        "room = limit if buckets else first, before the new bucket is put into the list.",
        ASSIGN_BUCKETS_LAST,
    ),
    "limit": (
        "Do you look before you put a gradient in, or after?",
        "nbytes[index] > room: then it does not fit any more, and goes into a new bucket.",
        ASSIGN_BUCKETS_LAST,
    ),
}

TRAIN_STEPS_LAST = (
    "for i in range(int(counts.max())):\n"
    "    parts = steps[i] if i < len(steps) else []\n"
    "    optimizer.zero_grad()\n"
    "    for k, (x, y) in enumerate(parts):\n"
    "        with ...nothing for the last one... else strategy.accumulating():\n"
    "            loss_of(model, x, y).backward()\n"
    "    strategy.add_gradients(comm, model)\n"
    "    optimizer.step()"
)
TRAIN_STEPS = {
    "": (
        "Two loops: over the steps, as many as any rank has, and over the micro-batches of this rank. Which lines "
        "belong into the inner one?",
        "Only forward and backward do. zero_grad comes before them; add_gradients and step behind, on every rank.",
        TRAIN_STEPS_LAST,
    ),
    "lengths": (
        "How many steps does the rank with most have, and who knows it?",
        "counts has the number of every rank: counts.max(). A rank without a batch has `parts = []` then.",
        TRAIN_STEPS_LAST,
    ),
    "accumulation": (
        "What is in .grad after the second micro-batch, if that of the first has been added over ranks already?",
        "Backward adds to .grad by itself. strategy.add_gradients comes once, behind the loop over micro-batches.",
        TRAIN_STEPS_LAST,
    ),
    "accumulating": (
        "When may the strategy send a bucket? When its gradient is complete: in which backward is that?",
        "contextlib.nullcontext() is a with that does nothing: for the last micro-batch, and for it alone.",
        TRAIN_STEPS_LAST,
    ),
    "memory": (
        "What has to be kept between a forward and its backward?",
        "loss_of(model, x, y).backward() at once, for each micro-batch: then only one is in memory at a time.",
        TRAIN_STEPS_LAST,
    ),
}
