"""Answers to 13.3, 13.4 and 13.5 that a check must reject or accept; CI proves both."""

from hpdl_lab.inference.scheduler import schedule, schedule_static


def in_three_rounds(running, waiting, slots, budget):
    """First decodes, then running prompts, then who waits."""
    counts = []
    for n in running:
        counts.append(1 if n == 1 and budget > 0 else 0)
        budget -= counts[-1]
    for i, n in enumerate(running):
        if n > 1:
            counts[i] = min(n, budget)
            budget -= counts[i]
    for n in waiting:
        if len(counts) == slots or budget == 0:
            break
        counts.append(min(n, budget))
        budget -= counts[-1]
    return counts


def by_sorting(running, waiting, slots, budget):
    """Positions in the order in which they are served."""
    everybody = list(running) + list(waiting)
    order = sorted(range(min(slots, len(everybody))), key=lambda i: (i >= len(running) or everybody[i] > 1, i))
    counts = {}
    for i in order:
        counts[i] = min(everybody[i], budget)
        budget = budget - counts[i]
    admitted = [counts[i] for i in sorted(counts) if i >= len(running) and counts[i] > 0]
    return tuple([counts[i] for i in range(len(running))] + admitted)


def whole_prompts(running, waiting, slots, budget):
    """A prompt waits for a step with room for all of it."""
    counts = [1] * len(running)
    for n in waiting[: slots - len(running)]:
        if n > budget - sum(counts):
            break
        counts.append(n)
    return counts


def one_page_after_the_other(free, pages, tokens, page_size):
    """From the other end of the list, with a look before the first page is taken."""
    if tokens > (len(pages) + len(free)) * page_size:
        return False
    while len(pages) * page_size < tokens:
        pages.append(free.pop(0))
    return True


def by_slices(free, pages, tokens, page_size):
    more = max(0, (tokens + page_size - 1) // page_size - len(pages))
    if more > len(free):
        return False
    pages += free[:more]
    del free[:more]
    return True


def the_smallest_first(free, pages, tokens, page_size):
    need, free[:] = -(-tokens // page_size) - len(pages), sorted(free)
    if need <= 0:
        return True
    if len(free) < need:
        return False
    pages.extend(free.pop(0) for _ in range(need))
    return True


def consecutive(free, pages, tokens, page_size):
    """As for an array that lies in one piece: the pages that are added follow each other."""
    need = max(0, -(-tokens // page_size) - len(pages))
    for first in sorted(free):
        run = [*range(first, first + need)]
        if set(run) <= set(free):
            for page in run:
                free.remove(page)
            pages += run
            return True
    return need == 0


def by_formula(acceptance, gamma):
    """The sum of a geometric series."""
    return gamma + 1 if acceptance == 1 else (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def place_by_place(acceptance, gamma):
    tokens, still = 1, 1
    for _ in range(gamma):
        still *= acceptance
        tokens += still
    return tokens


def one_after_the_other(acceptance, gamma):
    """If the first guess is kept, it is as with one guess less."""
    return 1.0 if gamma == 0 else 1 + acceptance * one_after_the_other(acceptance, gamma - 1)


WRONG = {
    "13.3": """
idle @schedule_static: that is static batching
idle: Requests are admitted only when none runs
    left = [*running, *waiting[:slots - len(running)]] => left = [*running] or [*waiting[:slots]]
idle: may take a free slot in the very next step
    waiting[:slots - len(running)] => waiting[:min(1, slots - len(running))]
slots: requests run, and there are 4 slots
    waiting[:slots - len(running)] => waiting
budget: over a budget of 8
    -         budget -= counts[i]
    +         pass
budget: over a budget of
    counts[i] = min(left[i], budget) => counts[i] = left[i]
    budget -= counts[i] => budget = max(0, budget - counts[i])
decodes: its user sees the answer stop
    for i in decodes + prompts: => for i in range(len(left)):
decodes: Decodes come first
    decodes + prompts => prompts + decodes
starvation: which came first
    decodes + prompts => decodes + prompts[::-1]
starvation: if enough others come later, it never will
    decodes + prompts => decodes + sorted(prompts, key=lambda i: left[i])
chunks @whole_prompts: is read in parts
chunks: as much as fits
    counts[i] = min(left[i], budget) => counts[i] = min(left[i], budget, 4)
admit: is admitted without a token
    -     while len(counts) > len(running) and counts[-1] == 0:
    -         counts.pop()
    +     pass
stuck: no request reads anything
    decodes + prompts => decodes
tokens: tokens to read, not
    counts[i] = min(left[i], budget) => counts[i] = budget // max(1, len(left))
returns: first one for each running request
    return counts => return {i: n for i, n in enumerate(counts)}
returns: returned None
    return counts => print(end='')
returns: and each gets a number
    return counts => return [n for n in counts if n]
returns: more than
    return counts => return counts + [1] * (slots - len(counts))
input: which belong to its caller
    -     return counts
    +     waiting.clear()
    +     return counts
raises: list assignment index out of range
    counts = [0] * len(left) => counts = [0] * len(running)
timeout: Is there a loop that never ends
    counts.pop() => counts[-1] = 0
""",
    "13.4": """
all or nothing: count first, then take
    while len(pages) * page_size < tokens:
        if not free:
            return False
        pages.append(free.pop())
    return True
refuse: Any free page will do
    missing > len(free) => missing >= len(free)
refuse @consecutive: Any free page will do
short: hold 8 of 9 tokens
    -(-tokens // page_size) => tokens // page_size
waste: Less than one page of a request may be empty
    -(-tokens // page_size) => (tokens // page_size + 1)
waste: where 3 hold them
    (-tokens // page_size) - len(pages) => (-tokens // page_size)
waste: where 2 hold them
    missing = max(0, -(-tokens // page_size) - len(pages))
    if missing > len(free):
        return False
    pages += free[-missing:]
    del free[-missing:]
    return True
twice: is free and in use
    pages.append(free.pop()) => pages.append(free[-1 - _])
twice: so that the next request writes over
    pages.append(free.pop()) => pages.append(free[-1])
leak: neither free nor in use
    missing = -(-tokens // page_size) - len(pages)
    if missing > len(free):
        return False
    for _ in range(missing):
        pages.append(free.pop())
        free[:] = free[:-1]
    return True
lost: leave them where they are
    missing = -(-tokens // page_size)
    if missing > len(free) + len(pages):
        return False
    free += pages[::-1]
    pages.clear()
    for _ in range(missing):
        pages.append(free.pop())
    return True
lost: hold its first tokens
    pages.append(free.pop()) => pages.insert(0, free.pop())
lost: leave them where they are
    -     for _ in range(missing):
    +     while len(pages) > -(-tokens // page_size):
    +         free.append(pages.pop())
    +     for _ in range(missing):
short: 3 pages are missing and 2 pages free
    missing = -(-tokens // page_size) - len(pages)
    for _ in range(min(missing, len(free))):
        pages.append(free.pop())
    return True
returns: nothing was returned
    return True => pages.sort
    return False => return None
returns: return True or False
    return True => return pages
raises: pop from empty list
    -     if missing > len(free):
    -         return False
    +     pass
""",
    "13.5": """
bonus: in the place of the first rejected guess
    range(gamma + 1) => range(1, gamma + 1)
bonus: it has read them all
    return sum(acceptance ** k for k in range(gamma))
independent: only if all before it were accepted
    return 1 + acceptance * gamma
independent: and the model adds one
    return acceptance * gamma
acceptance: That is the most
    return 1 + gamma
gamma: One guess too many
    range(gamma + 1) => range(gamma + 2)
gamma: without an end
    return 1 / (1 - acceptance) if acceptance < 1 else gamma + 1
value: every number of accepted guesses counts
    return 1 + acceptance ** gamma
value: and you say
    return 2 * sum(acceptance ** kept for kept in range(gamma + 1))
raises: division by zero
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)
returns: returned None
    print(end='')
returns: return a float
    return [acceptance ** kept for kept in range(gamma + 1)]
""",
}
RIGHT = {
    "13.3": (in_three_rounds, by_sorting),
    "13.4": (one_page_after_the_other, by_slices, the_smallest_first),
    "13.5": (by_formula, place_by_place, one_after_the_other),
}
COMPLETED = {
    "13.3": ["slots - len(running)", "min(n, budget)"],
    "13.4": ["-(-tokens // page_size)"],
    "13.5": ["gamma + 1"],
}
