"""Answers to exercise 14.1 that the check must reject or accept; CI proves both."""


def by_the_formulas(parameters, layers, width, sequence, tokens_per_s, devices, peak, recomputed=0.0):
    model = 6 * parameters + 12 * layers * width * sequence
    again = recomputed * (2 * parameters + 4 * layers * width * sequence)
    most = devices * peak
    return model * tokens_per_s / most, (model + again) * tokens_per_s / most


def seconds_of_a_token(parameters, layers, width, sequence, tokens_per_s, devices, peak, recomputed=0.0):
    products = [parameters] + 2 * layers * [sequence * width]
    at_best = 2 * sum(products) / peak / devices
    taken = 1 / tokens_per_s
    return [passes * at_best / taken for passes in (3, 3 + recomputed)]


WRONG = {
    "14.1": """
recomputation: even if a part of it is computed twice
    return (3 * share, => return ((3 + recomputed) * share,
recomputation: even if a part of it is computed twice
    return (3 * share, => return (4 * share,
recomputation: even if a part of it is computed twice
    return (8 * parameters * tokens_per_s / (devices * peak), 0)
attention: need no parameters
    2 * parameters + 2 * 2 * layers * sequence * width => 2 * parameters
attention: Some products of attention are missing
    2 * 2 * layers => 2 * layers
attention: Some products of attention are missing
    -     return (3 * share,
    +     share += (2 * parameters * 2) * tokens_per_s / (devices * peak)
    +     return (share,
backward: That is for parameters in forward
    return (2 * parameters * tokens_per_s / (devices * peak), 0)
backward: forward alone
    return (3 * share, => return (share,
backward: gradients of inputs
    return (3 * share, => return (2 * share,
factor: That is half
    (devices * peak) => (devices * 2 * peak)
factor: That is half
    2 * parameters + 2 * 2 * layers => parameters + 2 * layers
factor: That is twice as much
    (devices * peak) => (devices * peak / 2)
devices: for one device
    (devices * peak) => peak
tokens: not sequences
    forward * tokens_per_s => forward * tokens_per_s * sequence
units: in percent
    return (3 * share, (3 + recomputed) * share) => return (300 * share, 100 * (3 + recomputed) * share)
units: which share of the peak
    return (3 * share, => return (3 * forward * tokens_per_s,
recomputed: spends FLOPs on that
    (3 + recomputed) * share => 3 * share
recomputed: how much of it is repeated
    (3 + recomputed) * share => 4 * share
recomputed: Which share of a step is forward
    (3 + recomputed) * share => 3 * (1 + recomputed) * share
recomputed: more than the model needs
    (3 + recomputed) * share => 9 / (3 + recomputed) * share
attention: Attention is computed again
    (3 + recomputed) * share => 3 * share + 2 * parameters * recomputed * tokens_per_s / (devices * peak)
order: HFU first
    return (3 * share, (3 + recomputed) * share) => return ((3 + recomputed) * share, 3 * share)
mfu: the MFU should be
    return (3 * share, => return (7 * share,
hfu: the HFU should be
    (3 + recomputed) * share => (5 + recomputed) * share
returns: returned None
    print(end='')
returns: two numbers
    return 3 * (2 * parameters + 4 * layers * sequence * width) * tokens_per_s / (devices * peak)
returns: two numbers
    return (0.4, None)
""",
}
RIGHT = {"14.1": (by_the_formulas, seconds_of_a_token)}
COMPLETED = {
    "14.1": ["2 * 2", "3", "3"],
}
