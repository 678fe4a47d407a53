"""The cost of a training in petaflop/s-days, days and kWh, of published trainings and of planned ones."""

import math
from typing import NamedTuple

from .machines import PROCESSORS

PETAFLOP_S_DAY = 1e15 * 86_400  # FLOPs
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (Chinchilla), arXiv:2203.15556: 1.4e12 tokens for 70e9 parameters
PUE = 1.1  # an assumption for sources that state none: GPT-3's data center has 1.10
H100 = PROCESSORS["H100 SXM"].peak["bfloat16"]  # the H800 has the same peak


class _Training(NamedTuple):
    """A published training."""

    name: str
    year: int
    flops: float
    devices: int
    hours: float  # of all devices together, with pauses
    peak: float  # dense FLOP/s of one device
    watts: float  # of one device; for GPT-3 and PaLM measured with its share of the host
    pue: float = PUE  # power usage effectiveness: the power of a whole data center over the power of its computers
    parameters: float = 0  # that a token uses
    tokens: float = 0

    def mfu(self) -> float:
        """Return the share of the peak that follows from the hours: papers state more, and leave pauses out."""
        return self.flops / (self.hours * 3600 * self.peak)


TRAININGS = (
    # Krizhevsky et al. 2012: 5 to 6 days, 90 epochs. OpenAI, AI and Compute; 2018. NVIDIA, GeForce GTX 580; 2010
    _Training("AlexNet", 2012, 6 * 0.75e9 * 1.2e6 * 90, 2, 2 * 5.5 * 24, 1.58e12, 244),
    # He et al. 2015, arXiv:1512.03385. Goyal et al. 2017, arXiv:1706.02677: 29 hours. NVIDIA, P100 data sheet; 2016
    _Training("ResNet-50", 2015, 6 * 3.8e9 * 1.28e6 * 90, 8, 8 * 29, 10.6e12, 300),
    # Xie et al. 2016, arXiv:1611.05431: 0.95 s per mini-batch, 90 epochs. NVIDIA, M40 data sheet; 2015
    _Training("ResNeXt-101 32x4d", 2016, 6 * 7.8e9 * 1.28e6 * 90, 8, 8 * 450e3 * 0.95 / 3600, 7e12, 250),
    # Brown et al. 2020, table D.1. Patterson et al. 2021, arXiv:2104.10350, table 4. NVIDIA, V100 data sheet; 2018
    _Training("GPT-3 175B", 2020, 3.14e23, 10_000, 10_000 * 14.8 * 24, 125e12, 330, 1.1, 175e9, 300e9),
    # Chowdhery et al. 2022, arXiv:2204.02311, appendix B
    _Training("PaLM 540B", 2022, 6 * 540e9 * 780e9, 6144, 6144 * 1200 + 3072 * 336, 275e12, 378.5, 1.08, 540e9, 780e9),
    # Llama Team 2024, arXiv:2407.21783. Meta, Llama 3.1 model card; 2024
    _Training("Llama 3.1 405B", 2024, 3.8e25, 16_384, 30.84e6, H100, 700, PUE, 405e9, 15.6e12),
    # DeepSeek-AI 2024, arXiv:2412.19437, table 1: pre-training alone; a token uses 37e9 of 671e9 parameters
    _Training("DeepSeek-V3", 2024, 6 * 37e9 * 14.8e12, 2048, 2.664e6, H100, 700, PUE, 37e9, 14.8e12),
)


def cost(flops: float, devices: int, peak: float, mfu: float, watts: float, pue: float) -> tuple[float, float, float]:
    """Return (petaflop/s-days, days, kWh) of a training at an assumed MFU; arguments as in Training."""
    hours = flops / (peak * mfu) / 3600  # of all devices
    return flops / PETAFLOP_S_DAY, hours / devices / 24, hours * watts / 1000 * pue


def chinchilla(flops: float) -> tuple[float, float]:
    """Return (parameters N, tokens D) with 6 N D = flops and D = 20 N."""
    return math.sqrt(flops / 6 / TOKENS_PER_PARAMETER), math.sqrt(flops / 6 * TOKENS_PER_PARAMETER)


def table_of_trainings(price: float) -> str:
    """Return TRAININGS as lines of text; price: of a kWh, in any currency. N, D: of Chinchilla's rule."""
    costs = f"{'petaflop/s-days':>34}{'days':>7}{'MFU':>5}{'kWh':>11}{'price':>12}"
    lines = [f"{costs}{'D/N':>6}{'N/10^9':>8}{'D/10^9':>8}"]
    for t in TRAININGS:
        work, days, kwh = cost(t.flops, t.devices, t.peak, t.mfu(), t.watts, t.pue)
        line = f"{t.name:18}{t.year}{work:12,.3f}{days:7.1f}{t.mfu():5.0%}{kwh:11,.0f}{kwh * price:12,.0f}"
        n, d = chinchilla(t.flops)
        lines.append(line + (f"{t.tokens / t.parameters:6.1f}{n / 1e9:8,.0f}{d / 1e9:8,.0f}" if t.tokens else ""))
    return "\n".join(lines)
