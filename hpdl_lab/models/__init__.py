"""Small networks by name, readable torch: each tiny (for 2 cores), small, or as in its paper."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, replace
from dataclasses import fields as fields_of
from numbers import Integral
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..data.dataset import Dataset
    from .published import Config

Field: TypeAlias = float | str | tuple[int, ...]  # a size of a model, or a word


DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Model(NamedTuple):
    """A row of `MODELS`. The module of the same name has SIZES, build and fields_of.

    ndim, kind: dimensions of an example, and what they are; fitting: data sets with such examples.
    data, recipe: the data set and the fields of a parallel.training.Recipe with which it learns well in a minute.
    """

    ndim: int
    kind: str
    fitting: str
    data: str
    recipe: Mapping[str, float | str] = {}


_TOKENS = 1, "windows of tokens, (n, block) int64", "text, copy", "text"
_IMAGES = 3, "images, (n, channels, height, width)", "digit_images, synthetic with shape=(3, 32, 32)", "digit_images"
_DECODER = {"optimizer": "adamw", "lr": 3e-3, "batch": 32, "steps": 200}
MODELS = {
    "mlp": _Model(1, "rows of numbers, (n, features)", "digits, synthetic", "digits"),
    "cnn": _Model(*_IMAGES, {"lr": 0.1}),
    "gpt": _Model(*_TOKENS, _DECODER),
    "llama": _Model(*_TOKENS, _DECODER),
    "deepseek": _Model(*_TOKENS, _DECODER),
    "vit": _Model(*_IMAGES, {"optimizer": "adamw", "lr": 3e-3}),
    "mixer": _Model(*_IMAGES, {"optimizer": "adamw", "lr": 3e-3}),
}


def build(name: str, size: str = "tiny", seed: int = 0, dtype: str = "float32", **fields: Field) -> nn.Module:
    """Return the model of this name; the same seed gives the same parameters on every machine, drawn in float64.

        build("gpt", size="small", vocabulary=83, block=128)

    Args:    name: one of MODELS; size: "tiny", "small" or "paper"; fields: what shall differ from this size, see
             SIZES in the model's file.
    Returns: nn.Module.
    Raises:  LookupError for unknown names; ValueError for fields that are unknown or cannot be, and for a wrong
             dtype or seed.
    """
    module = module_of(name)
    if size not in module.SIZES:
        raise LookupError(f"{name} has no size {size!r}: {', '.join(module.SIZES)}")
    config = module.SIZES[size]
    settings = {field.name: getattr(config, field.name) for field in fields_of(config) if field.default is MISSING}
    unknown = [field for field in fields if field not in settings]
    if unknown:
        raise ValueError(f"{name} has no field {unknown[0]!r}: its fields are {', '.join(settings)}")
    for field, value in fields.items():
        _require_like(f"{name} cannot have {field}={value!r}", value, settings[field])
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(f"seed={seed!r}: a whole number is needed")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(map(repr, DTYPES))} is needed")
    return module.build(replace(config, **fields), seed, dtype)


def _require_like(what: str, value: object, example: int | str | tuple[int, ...]) -> None:
    """Raise ValueError unless `value` can be a size of a model: it is of the kind of `example`."""
    if isinstance(example, str):
        return  # the model itself checks its words
    several = isinstance(example, tuple)
    numbers: object = value if several else (value,)
    if not isinstance(numbers, tuple | list) or not all(map(_is_size, numbers)):
        needed = "whole numbers of at least 1 are" if several else "a whole number of at least 1 is"
        raise ValueError(f"{what}: {needed} needed, such as {example}")


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def build_for(
    data: Dataset, name: str, size: str = "tiny", seed: int = 0, dtype: str = "float32", **fields: Field
) -> nn.Module:
    """Return the model of this name, made for the shapes and the number of classes of a data set.

    Raises:  ValueError if the model does not read such data; as build.
    """
    module = module_of(name)
    if not reads(name, data):
        kind, fitting = MODELS[name].kind, MODELS[name].fitting
        x = data.train_x
        got = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        raise ValueError(f"{name} reads {kind}; this data is {got}. What it reads, for example: {fitting}")
    return build(name, size, seed, dtype, **{**module.fields_of(data), **fields})


def reads(name: str, data: Dataset) -> bool:
    """Return True if the model of this name reads such data: the number of dimensions of an example, tokens or not."""
    model = MODELS[name]
    return data.train_x.ndim - 1 == model.ndim and data.train_x.is_floating_point() == ("tokens" not in model.kind)


def from_transformers(
    theirs: nn.Module | Config, state_dict: Mapping[str, Tensor] | None = None, dtype: str | None = None
) -> nn.Module:
    """Make one of our models of a model of transformers, or of its config and weights; see models/published.py."""
    from .published import from_transformers

    return from_transformers(theirs, state_dict, dtype)


def module_of(name: str) -> ModuleType:
    """Return the module of a model: imported only here, because it takes torch along."""
    if name not in MODELS:
        raise LookupError(f"no model is called {name!r}: {', '.join(MODELS)}")
    return importlib.import_module(f".{name}", __name__)
