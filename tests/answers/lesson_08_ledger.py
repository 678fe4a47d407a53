"""Answers to exercise 8.1 that the check must reject or accept; CI proves both."""


def as_a_table(parameters, ranks, stage, mixed=True):
    each = {"parameters": 2, "gradients": 2, "optimizer": 4 + 4 + 4} if mixed else {"p": 4, "g": 4, "o": 4 + 4}
    since = (3, 2, 1)
    return [parameters * n / [1, ranks][stage >= s] for n, s in zip(each.values(), since, strict=True)]


def rounded_up(parameters, ranks, stage, mixed=True):
    share = -(-parameters // ranks)
    number, states = (2, 12) if mixed else (4, 8)
    counts = [share if stage > 3 - k else parameters for k in (1, 2, 3)]
    return number * counts[0], number * counts[1], states * counts[2]


WRONG = {
    "8.1": """
master weights: what does Adam add its steps to
    3 * 4 if => 2 * 4 if
master weights: there is no copy
    else 2 * 4 => else 3 * 4
states: One number of 32 bits
    3 * 4 if => 4 if
states: One number for each parameter
    else 2 * 4 => else 4
states: That counts everything
    3 * 4 if => 16 if
precision: Adam's numbers are in it with 16 bits
    3 * 4 if => 3 * 2 if
precision: The master weights have 32 bits, too
    3 * 4 if => 2 + 4 + 4 if
precision: In mixed precision parameters have 16 bits
    2 if mixed else 4 => 4
precision: In mixed precision gradients have 16 bits
    number * parameters / (ranks if stage >= 2 => 4 * parameters / (ranks if stage >= 2
precision: In 32 bits parameters have 4 bytes
    2 if mixed else 4 => 2
shares: Stage 1 leaves parameters whole
    stage >= 3 => stage >= 1
shares: Stage 1 leaves gradients whole
    stage >= 2 => stage >= 1
shares: Stage 0 leaves the optimizer whole
    stage >= 1 => stage >= 0
shares: Stage 3 divides parameters
    stage >= 3 => stage >= 4
shares: Stage 1 divides the optimizer
    stage >= 1 => stage >= 2
ranks: That is what all 64 ranks hold together
    -     return (number * parameters / (ranks if stage >= 3 else 1)
    +     return (number * parameters * (1 if stage >= 3 else ranks)
units: That is right in GB
    number = 2 if mixed else 4 => number, parameters = (2 if mixed else 4), parameters / 10 ** 9
units: 2^30 bytes
    number = 2 if mixed else 4 => number, parameters = (2 if mixed else 4), parameters / 2 ** 30
units: no factor between them belongs in here
    number = 2 if mixed else 4 => number, parameters = (2 if mixed else 4), parameters * 10 ** 9 / 2 ** 30
units: That counts bits
    number = 2 if mixed else 4 => number, parameters = (2 if mixed else 4), parameters * 8
returns: return (bytes of parameters
    return (2 if mixed else 4) * 2 * parameters + (12 if mixed else 8) * parameters
returns: returned None
    print(16 * parameters)
bytes: you say
    3 * 4 if => 5 * 4 if
""",
}
RIGHT = {"8.1": (as_a_table, rounded_up)}
COMPLETED = {
    "8.1": ["2 * 4", "1"],
}
