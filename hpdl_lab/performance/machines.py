"""Processors as data: peaks, memory and power as data sheets state them, with source and year.

Peaks are dense: every product counts, none is skipped because a factor is zero. Data sheets often print larger numbers,
which hold for matrices with two zeros in every four numbers; `sparsity` is the factor between the two. A number that
the vendor does not state is None, and a dtype without a stated peak is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BYTES = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}  # of one number in memory


@dataclass(frozen=True)
class _Processor:
    """A processor as its vendor describes it.

    kind:      "GPU", "CPU", "TPU", "IPU", "FPGA" or "accelerator".
    year:      of its introduction.
    peak:      FLOP/s by dtype, dense; operations per second for "int8".
    bandwidth: bytes/s of its memory.
    memory:    bytes of that memory; watts: of the processor or of its card or module; both None if not stated.
    source:    who states the numbers, where, and in which year.
    sparsity:  the factor by which the vendor's peaks with structured sparsity are larger, 1 if there are none. It does
               not apply to "float32".
    """

    name: str
    kind: str
    year: int
    peak: Mapping[str, float]
    bandwidth: float
    memory: float | None
    watts: float | None
    source: str
    sparsity: float = 1.0

    def ridge(self, dtype: str) -> float:
        """Return the FLOPs per byte of memory traffic from which on `peak` is the bound, and not the memory."""
        return self.peak[dtype] / self.bandwidth


AMPERE = {"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12}
HOPPER = {"float32": 66.9e12, "tf32": 494.7e12, "bfloat16": 989.4e12, "float16": 989.4e12, "float8": 1978.9e12}
BLACKWELL = {"tf32": 1.125e15, "bfloat16": 2.25e15, "float16": 2.25e15, "float8": 4.5e15}
CDNA_3 = {"float32": 163.4e12, "tf32": 653.7e12, "bfloat16": 1307.4e12, "float16": 1307.4e12, "float8": 2614.9e12}
GAUDI_3 = {"bfloat16": 1678e12, "float8": 1678e12}  # of the matrix engines; 1,835e12 when it was introduced
BOW = {"float32": 87.1e12, "float16": 348.6e12}
GENOA = {"float32": 64 * 3.1e9 * 32}  # cores, base clock, and 16 multiplications and 16 additions per cycle
GRACE = {"float32": 7.1e12}  # twice what is stated for float64: a vector holds twice as many numbers

H100_SOURCE = "NVIDIA, H100 Tensor Core GPU Architecture; 2022; bandwidth: its data sheet; 2023"
H200_SOURCE = "NVIDIA, H200 Tensor Core GPU data sheet; 2024; with the peaks of the H100"
B200_SOURCE = "NVIDIA, HGX B200 and DGX B200 data sheets, an eighth of what they state for 8 GPUs; 2024"
GRACE_SOURCE = "NVIDIA, Grace CPU Superchip data sheet, half of what it states for 2 CPUs; 2023"
EPYC_SOURCE = "AMD, EPYC 9004 Series data sheet, with 12 channels of DDR5-4800; 2022"
BOW_SOURCE = "Graphcore, Bow Pod256 data sheet, a 256th of its peaks; Bow product page, memory on the chip; 2022"
U280_SOURCE = "Xilinx, Alveo U280 Data Center Accelerator Card data sheet, DS963, its HBM2 only; 2019"

PROCESSORS = {
    processor.name: processor
    for processor in (
        _Processor("A100 SXM 80GB", "GPU", 2020, AMPERE, 2039e9, 80e9, 400, "NVIDIA, A100 data sheet; 2021", 2),
        _Processor("H100 SXM", "GPU", 2022, HOPPER, 3.35e12, 80e9, 700, H100_SOURCE, 2),
        _Processor("H200 SXM", "GPU", 2024, HOPPER, 4.8e12, 141e9, 700, H200_SOURCE, 2),
        _Processor("B200 SXM", "GPU", 2024, BLACKWELL, 8e12, 180e9, 1000, B200_SOURCE, 2),
        _Processor("MI300X", "GPU", 2023, CDNA_3, 5.3e12, 192e9, 750, "AMD, Instinct MI300X data sheet; 2023", 2),
        _Processor("Gaudi 3", "accelerator", 2024, GAUDI_3, 3.7e12, 128e9, 900, "Intel, Gaudi 3 White Paper; 2024"),
        _Processor(
            "TPU v5p", "TPU", 2023, {"bfloat16": 459e12}, 2765e9, 95e9, None, "Google, Cloud TPU documentation; 2023"
        ),
        _Processor(
            "TPU v6e", "TPU", 2024, {"bfloat16": 918e12}, 1638e9, 32e9, None, "Google, Cloud TPU documentation; 2024"
        ),
        _Processor("Grace", "CPU", 2023, GRACE, 0.5e12, 240e9, 250, GRACE_SOURCE),
        _Processor("EPYC 9554", "CPU", 2022, GENOA, 460.8e9, None, 360, EPYC_SOURCE),
        _Processor("Bow IPU", "IPU", 2022, BOW, 65e12, 0.9e9, None, BOW_SOURCE),
        _Processor("Alveo U280", "FPGA", 2018, {"int8": 24.5e12}, 460e9, 8e9, 225, U280_SOURCE),
    )
}


def table_of_processors() -> str:
    """Return PROCESSORS as lines of text: the peak in 16 bits if there is one, and its ridge."""
    lines = [f"{'':14}{'':12}{'year':>5} {'dtype':9}{'TFLOP/s':>8}{'TB/s':>7}{'ridge, FLOPs per byte':>23}"]
    for p in PROCESSORS.values():
        dtype = min(p.peak, key=lambda dtype: (BYTES[dtype] < 2, BYTES[dtype]))
        peak, bandwidth = p.peak[dtype] / 1e12, p.bandwidth / 1e12
        lines.append(f"{p.name:14}{p.kind:12}{p.year:5} {dtype:9}{peak:8.1f}{bandwidth:7.2f}{p.ridge(dtype):23.0f}")
    return "\n".join(lines)
