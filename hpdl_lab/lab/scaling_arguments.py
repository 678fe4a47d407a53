"""What `lab.scaling` is asked for, checked before anything starts: each wrong argument ends in one sentence."""

from collections.abc import Iterable
from numbers import Real

from ..comm.network import Network
from ..models.mlp import mlp
from ..parallel.data_parallel import DataParallel
from .choice import model_and_data
from .scaling_points import job_of

KINDS = ("strong", "weak")
FEW_FEATURES, LARGE = 512, 32  # n where it is not given: for rows of numbers, and for larger examples
LAYERS = (64, 512, 256, 10)  # of the network that is trained where no model is given


def require_sane(n, network, deadline):
    """Raise ValueError or TypeError where one of these cannot be."""
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        raise ValueError(f"n must be a whole number of examples, or units of work, at least 1, got {n!r}")
    if network is not None and not isinstance(network, Network):
        raise TypeError(f"network={network!r}: one of comm.network is needed, such as Switch() or FatTree(16, 4)")
    if not isinstance(deadline, Real) or not deadline > 0:
        raise ValueError(f"deadline must be a number of seconds above 0, got {deadline!r}")


def asked_kinds(kind):
    """("strong", "weak") or one of them. Raises ValueError."""
    kinds = (kind,) if isinstance(kind, str) else tuple(kind) if isinstance(kind, Iterable) else (kind,)
    if not kinds or set(kinds) - set(KINDS):
        raise ValueError(f'kind={kind!r}: "strong", "weak" or both are needed')
    return tuple(dict.fromkeys(kinds))


def whole_numbers(values, name):
    """[numbers of ranks] in rising order. Raises ValueError for what is none."""
    values = (values,) if isinstance(values, Real) else values
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ValueError(f"{name} must be numbers of ranks, such as (1, 2, 4), got {values!r}")
    values = list(values)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be whole numbers of ranks, at least 1, got {value!r}")
    return sorted(set(values))


def asked_prediction(prediction):
    """{kind: {ranks: speedup}}, from that or from {ranks: speedup}, which is for every kind. Raises ValueError."""
    if prediction is None:
        return {}
    wanted = "a prediction is {ranks: speedup}, such as {2: 1.9, 1024: 300}"
    if not isinstance(prediction, dict) or not prediction:
        raise ValueError(f"{wanted}, got {prediction!r}")
    both = prediction if set(prediction) <= set(KINDS) else {kind: prediction for kind in KINDS}
    for points in both.values():
        for p, speedup in points.items() if isinstance(points, dict) else [(points, None)]:
            good = isinstance(p, int) and p >= 1 and isinstance(speedup, Real) and speedup > 0
            if not good:
                raise ValueError(f"{wanted}, at least 1 rank and a speedup above 0, got {p!r}: {speedup!r}")
    return both


def asked_work(work, n, most, all_reduce, strategy, model, data, size):
    """(what is scaled, n): a Job for at most `most` ranks, or the attendee's `work`. Raises ValueError, TypeError."""
    if work is None:
        return asked_job(model, strategy, all_reduce, data, size, n, most)
    for name, value in {"all_reduce": all_reduce, "strategy": strategy, "model": model, "data": data}.items():
        if value is not None:
            raise ValueError(f"give work or {name}, not both: {name} is for the training step that is the default")
    if not callable(work):
        raise TypeError(f"lab.scaling needs work f(comm, n), got {type(work).__name__}: lab.scaling(work)")
    return work, n or FEW_FEATURES


def asked_job(model, strategy, all_reduce, data, size, n, most):
    """(the Job of a training step, with the examples that `most` ranks need; n). Raises as asked_work, LookupError."""
    if strategy is not None and all_reduce is not None:
        raise ValueError("give a strategy or an all_reduce, not both: DataParallel(all_reduce=...) is a strategy")
    if all_reduce is not None and not callable(all_reduce):
        raise TypeError(f"all_reduce must be a function f(comm, x), got {type(all_reduce).__name__}")
    strategy = DataParallel(all_reduce) if strategy is None else strategy
    if isinstance(strategy, type) or not hasattr(strategy, "add_gradients"):
        raise TypeError(
            f"strategy must be an instance of one of parallel/data_parallel.py, DataParallel(), got {strategy!r}"
        )
    if not getattr(strategy, "synchronous", True):
        raise ValueError(f"{strategy!r} is asynchronous: its ranks take no step together that could be timed")
    default = model is None and data is None
    choice = model_and_data(mlp(LAYERS) if default else model, data, size)
    rows = choice.data.train_x.is_floating_point() and choice.data.train_x.ndim == 2
    n = n or (FEW_FEATURES if rows else LARGE)
    used = slice(0, n * most)  # examples beyond these would only travel to the engines
    x, y = choice.data.train_x[used], choice.data.train_y[used]
    return job_of(choice.model, strategy, choice.data._replace(train_x=x, train_y=y, test_x=x[:0], test_y=y[:0])), n
