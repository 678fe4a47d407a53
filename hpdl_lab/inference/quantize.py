"""Weights of linear layers for decoding, which reads all of them for a token: in long rows, or in int8.

int8 has a quarter of the bytes of float32:

    W (out, in) float32     ->  whole numbers -127 ... 127 (out, in) int8, and a scale for each of `out` rows
    x (n, in), a token each ->  likewise, a scale for each token, computed in every forward
    y = x W^T               ~   (whole x) (whole W)^T, exact in int32, times both scales

Products of whole numbers do not depend on the order in which they are added: a token's y is bit for bit the same, in
whatever batch it is computed.   Ref: Dettmers et al. 2022, "LLM.int8()", arXiv:2208.07339, section 2.1 (vector-wise).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGEST = 127


def _whole_numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole (n, m) int8 and scale (n, 1) float32: x ~ whole * scale, off by 1/254 of a row's largest at most."""
    x = x.float()  # 16 bits hold no quotient to half a unit
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x / scale).round_().to(torch.int8), scale


class Int8Linear(nn.Module):
    """A linear layer in whole numbers. out (in + 4) bytes instead of out in itemsize, and the bias."""

    whole: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        whole, scale = _whole_numbers(linear.weight.detach())
        self.register_buffer("whole", whole)  # (out, in) int8
        self.register_buffer("scale", scale)  # (out, 1)
        self.bias, self.in_features, self.out_features = linear.bias, linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        return self.whole * self.scale

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = _whole_numbers(x.flatten(0, -2))  # (n, in), (n, 1)
        if x.device.type == "cpu":
            y = torch._int_mm(rows, self.whole.t())  # (n, in) @ (in, out) = (n, out) int32
        else:  # float32 holds whole numbers up to 2^24
            y = rows.float() @ self.whole.t().float()
        y = (y * scale).mul_(self.scale.t()).to(x.dtype)
        return (y if self.bias is None else y + self.bias).unflatten(0, x.shape[:-1])


def long_rows(model: nn.Module) -> nn.Module:
    """Lay the weights of all linear layers out in memory along the longer of their two dimensions, in place.

    The product with one vector then reads them in fewer and longer runs, up to twice as fast out of the caches. Shapes
    and numbers stay; returns the model, whose parameters have memory of their own from now on.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.out_features > layer.in_features:
            layer.weight.data = layer.weight.data.t().contiguous().t()
    return model


def quantize(model: nn.Module) -> nn.Module:
    """Put the weights of all linear layers of a model into int8, in place; returns the model, for inference only.

    Embeddings, norms, weights that are tied to an embedding, and experts stay as they are.
    Raises:  ValueError for a model without linear layers, such as a rank's shard of one.
    """
    linears = [(m, name) for m in model.modules() for name, c in m.named_children() if isinstance(c, nn.Linear)]
    if not linears:
        raise ValueError(
            f"this {type(model).__name__} has no nn.Linear to put into int8: layers that tp cuts stay as they are"
        )
    for module, name in linears:
        setattr(module, name, Int8Linear(getattr(module, name)))
    return model


def weight_bytes(model: nn.Module) -> int:
    """Return bytes of all parameters and buffers of a model."""
    return sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
