"""A model and a data set that fit each other, by name, as `lab.train` and `lab.scaling` choose them."""

import copy
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .. import data as sets
from .. import models
from ..data.dataset import Dataset
from ..parallel.data_parallel import DataParallel, Strategy
from ..parallel.reducer import AllReduce

Fields: TypeAlias = dict[str, Any]  # some of a Recipe

MODEL_FOR = {"digits": "mlp", "digit_images": "cnn", "text": "gpt", "synthetic": "mlp", "copy": "gpt"}


class Choice(NamedTuple):
    """A model with its data set.

    model: nn.Module; data: Dataset; words: such as "gpt on text"; recipe: fields of a Recipe that suit this model.
    """

    model: nn.Module
    data: Dataset
    words: str
    recipe: Fields


def model_and_data(
    model: str | nn.Module | None = None, data: str | Dataset | None = None, dtype: str = "float32"
) -> Choice:
    """Return the model and the data set that are meant.

    Args:    model: a name of models.MODELS, or an nn.Module; data: a name of data.SETS, or a Dataset. If one of them is
             not given, it is what suits the other; by default the mlp of lesson 04 on handwritten digits.
             dtype: of a model that is named.
    Returns: Choice.
    Raises:  LookupError for a name that is none; ValueError if the model does not read such data, or answers with
             too few numbers; TypeError for something that is neither a name nor a model or data set; DataError if
             the data is missing.
    """
    named = model if isinstance(model, str) else None
    if named is not None:
        models.module_of(named)  # first of all, whether there is such a model
    elif model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: the name of one ({', '.join(models.MODELS)}) or an nn.Module is needed")
    if data is None:
        kind = named or type(model).__module__.rpartition(".")[2]  # a GPT is of models/gpt.py
        data = models.MODELS[kind].data if kind in models.MODELS else "digits"
    if isinstance(data, str):
        what, data = data, sets.load(_wanted(data, named), dtype=dtype)
    elif isinstance(data, Dataset):
        what = "your data"
    else:
        kind = type(data).__name__
        raise TypeError(f"data is a {kind}: the name of a set ({', '.join(sets.SETS)}) or a Dataset is needed")
    if isinstance(model, nn.Module):
        chosen = model
        _require_reads(chosen, data)
    else:
        named = named or MODEL_FOR.get(what) or _suiting(data)
        chosen = models.build_for(data, named, dtype=dtype)
    recipe = dict(models.MODELS[named].recipe) if named else {}
    return Choice(chosen, data, f"{named or type(model).__name__} on {what.replace('_', ' ')}", recipe)


def _require_reads(model: nn.Module, data: Dataset) -> None:
    """Raise ValueError unless `model`, an attendee's, answers examples of `data` with a number for each class."""
    if any(is_lazy(p) or p.device.type != "cpu" for p in model.parameters()):
        return  # without values, or elsewhere than the data: consensus.py reports it
    x, y, kind = data.train_x[:2], data.train_y[:2], type(model).__name__
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            answer = copy.deepcopy(model).eval()(x)
    except RuntimeError as error:
        said = f"{kind} does not read examples of shape {tuple(x.shape[1:])} in {str(x.dtype).removeprefix('torch.')}"
        raise ValueError(f"{said}: {str(error).splitlines()[0]}") from error
    shape = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
    if shape[:-1] != tuple(y.shape) or int(shape[-1]) < data.classes:
        wanted = f"{(*y.shape, data.classes)}, a number for each of {data.classes} classes"
        raise ValueError(f"{kind} answers {len(x)} examples with {shape}: {wanted}, is needed")


def _suiting(data: Dataset) -> str:
    """Return the name of the first model that reads `data`."""
    for name in models.MODELS:
        if models.reads(name, data):
            return name
    raise ValueError(f"no model here reads examples of shape {tuple(data.train_x.shape[1:])}: give one of your own")


def _wanted(data: str, model: str | None) -> str:
    """Return the data set that is meant: for a model that reads images, "digits" means "digit_images"."""
    return "digit_images" if model and (data, models.MODELS[model].data) == ("digits", "digit_images") else data


def asked_strategy(strategy: Strategy | None, all_reduce: AllReduce | None) -> Strategy:
    """Return the strategy that is meant; by default DataParallel(all_reduce). Raises ValueError, TypeError."""
    if strategy is not None and all_reduce is not None:
        raise ValueError("give a strategy or an all_reduce, not both: DataParallel(all_reduce=...) is a strategy")
    if all_reduce is not None and not callable(all_reduce):
        raise TypeError(f"all_reduce={all_reduce!r}: a function f(comm, x) is needed, which makes x its sum over ranks")
    if strategy is not None and not isinstance(strategy, Strategy):
        got = getattr(strategy, "__name__", repr(strategy))
        raise TypeError(
            f"strategy={got}: an object of one of the classes in hpdl_lab.parallel is needed, such as "
            "DataParallel(all_reduce); a function alone is given as all_reduce=..."
        )
    return DataParallel(all_reduce) if strategy is None else strategy
