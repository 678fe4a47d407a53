"""Hints for notebook 04: three levels for each invariant that an answer may break. "" serves all others."""

COMMON = {
    "deadlock": (
        "Read the table: who waits for whom, and in what? On a ring where everybody waits in the same call, nobody "
        "is in the other one.",
        "Every rank has to send and to receive in the same step. comm.sendrecv starts both before it waits for either.",
        "In place of send and recv:\n\n    comm.sendrecv(mine, (r + 1) % p, arriving, (r - 1) % p)",
    ),
    "sizes": (
        "Where p does not divide N, the chunks are not equally long. Which lines of yours assume that they are?",
        "chunk(x, p, i) cuts unevenly for you, and bounds(n, p, i) says where. Send and receive exactly as many "
        "elements as the "
        "chunk of that step has. A chunk may be empty.",
        "Never compute N // p yourself. Take theirs = chunk(x, p, ...) first, then receive into something of "
        "len(theirs).",
    ),
    "one rank": (
        "With p = 1 there is nobody to talk to. How many steps does your loop make then?",
        "A loop over range(p - 1) makes no step with one rank, and the answer is x itself.",
        "Put every send and receive inside `for i in range(p - 1):`.",
    ),
    "returns": (
        "Read the line `Returns:` of the docstring, and the last line of your function.",
        "x is changed in place, but the caller uses what comes back.",
        "reduce_scatter ends with `return chunk(x, p, r)`; all_gather and all_reduce end with `return x`.",
    ),
    "timeout": (
        "The message names the line that was running. What ends the loop around it?",
        "The number of steps is known before the first one: for i in range(p - 1).",
        "Replace `while` by `for i in range(p - 1):`.",
    ),
    "wait": (
        "isend and irecv only start a message, and return a Work. What has to be done with it?",
        "work.wait() returns when the message has left. Before that its tensor must not be touched.",
        "Keep every Work, and call wait() on it before its tensor changes; or use comm.sendrecv, which waits for both.",
    ),
    "dtype": (
        "Which buffer do you make yourself, and of which dtype is it?",
        "torch.empty(n) is float32, whatever x is.",
        "torch.empty_like(theirs), or new_like(x, len(theirs)), has the dtype of x.",
    ),
    "peers": (
        "Draw the ring. Which two ranks does rank r know?",
        "Chunks that are meant for a far rank travel through all the ranks between.",
        "Send to (r + 1) % p and receive from (r - 1) % p, in every step; only the chunk changes.",
    ),
    "bounds": (
        "Some element before or behind x has changed. Which of your slices may be longer than what is left of x?",
        "The chunks are not equally long. A slice such as x[a:b] ends with x; a view made in another way may not.",
        "Take every piece of x as chunk(x, p, i).",
    ),
    "engines": (
        "On simulated ranks a message is copied at once; on real ones it is under way while your code goes on.",
        "Between isend or irecv and wait() its tensor belongs to the communicator.",
        "comm.sendrecv waits for both. Use the buffer after it, not before.",
    ),
    "raises": (
        "The message names the rank, the line, and what Python did not like there.",
        "Try it by hand: which values do r, i and p have on that line, on that rank?",
        "chunk(x, p, i) takes i modulo p for you; ranks need it too: (r + 1) % p.",
    ),
}

REDUCE_SCATTER_HINTS = COMMON | {
    "": (
        "Take p = 3 and follow one chunk through the table in the docstring. At which rank is it after each step, "
        "and how many contributions does it hold?",
        "p - 1 steps. In step i: send chunk r-i-1 to the right, receive the left neighbor's chunk r-i-2 into a "
        "buffer, and add "
        "the buffer to your own chunk r-i-2.",
        "    for i in range(p - 1):\n"
        "        mine, theirs = chunk(x, p, r - i - 1), chunk(x, p, r - i - 2)\n"
        "        arriving = torch.empty_like(theirs)\n"
        "        ...   # one call of comm.sendrecv, then one addition",
    ),
    "chunk": (
        "The walk is right, but it starts one chunk too early or too late. Which chunk is sent in step 0 by rank 0?",
        "Rank r must end with chunk r. In its last step, i = p - 2, it adds to chunk r-i-2 = r-p, which is chunk r.",
        "In step i, send chunk r-i-1 and add to chunk r-i-2.",
    ),
    "bytes": (
        "Compare: the vector has N elements, a chunk has N/p. Which of the two is in your comm.sendrecv?",
        "In each step one chunk is enough: the one to which you have just added.",
        "comm.sendrecv(chunk(x, p, r - i - 1), ...), never comm.sendrecv(x, ...).",
    ),
    "steps": (
        "How many ranks must a chunk visit before all p contributions are in it? It starts with one.",
        "p - 1 hops, so p - 1 steps: range(p - 1). In each of them all ranks send and receive at the same time.",
        "for i in range(p - 1), with one comm.sendrecv in it.",
    ),
}

ALL_GATHER_HINTS = COMMON | {
    "": (
        "In step 0 every rank knows one chunk: its own. So that is the one it can send. What can it send in step 1?",
        "In step i pass on what arrived in step i-1: chunk r-i. What arrives is the left neighbor's chunk r-i-1.",
        "    for i in range(p - 1):\n        comm.sendrecv(chunk(x, p, r - i), ..., chunk(x, p, ...), ...)",
    ),
    "chunk": (
        "On rank r only chunk r is worth anything at the start. Which chunk do you send first?",
        "Nothing is added here: what arrives replaces what was there, and it is received straight into its place.",
        "In step i, send chunk r-i and receive into chunk r-i-1.",
    ),
    "bytes": (
        "Each rank lacks p - 1 chunks. How many elements has it to receive, at least?",
        "One chunk per step, passed on from neighbor to neighbor; no rank is special.",
        "comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, chunk(x, p, r - i - 1), (r - 1) % p)",
    ),
    "steps": (
        "How many chunks does a rank lack at the start? One arrives per step.",
        "p - 1 steps: range(p - 1).",
        "for i in range(p - 1), with one comm.sendrecv in it.",
    ),
}

ALL_REDUCE_HINTS = COMMON | {
    "": (
        "You have both halves. What does rank r hold after the first, and what does the second need?",
        "First reduce_scatter(comm, x), then all_gather(comm, x); both work on x in place.",
        "    reduce_scatter(comm, x)\n    return all_gather(comm, x)",
    ),
    "bytes": (
        "A rank sends (p-1)/p of the vector in reduce_scatter and as much again in all_gather. Where does more come "
        "from?",
        "Use your two functions. comm.all_reduce and comm.broadcast of simulated ranks send everything through rank 0.",
        "    reduce_scatter(comm, x)\n    return all_gather(comm, x)",
    ),
    "steps": (
        "p - 1 steps for each half. Which half is missing, is done twice, or goes round once too often?",
        "reduce_scatter leaves one chunk of the sum on each rank; all_gather brings the others. Each has a loop over "
        "range(p - 1).",
        "    reduce_scatter(comm, x)\n    return all_gather(comm, x)\n\n"
        "each once, and each right by itself: lab.check(reduce_scatter), lab.check(all_gather)",
    ),
    "in place": (
        "The caller keeps x and looks at it afterwards. Did you work on a copy?",
        "reduce_scatter and all_gather change the tensor that they are given. Give them x itself.",
        "    reduce_scatter(comm, x)\n    return all_gather(comm, x)",
    ),
    "bitwise": (
        "Two ranks hold different bits. Is every element added up in one place only?",
        "Each chunk has one owner, which adds; everybody else copies what the owner has.",
        "    reduce_scatter(comm, x)\n    return all_gather(comm, x)",
    ),
}
