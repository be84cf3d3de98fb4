"""What vendors and others have published of machines, set down before anything was compared with it: each constant with
its source.

Rates are dense, in one direction, per GPU. What a program really gets is in the efficiencies: measurements that others
have published of single kernels; none is fitted to the time of a training step.
"""

from __future__ import annotations

from typing import Any

import torch

GIGA, TERA, MICRO = 1e9, 1e12, 1e-6

_MAMF = "ml-engineering (S. Bekman), Maximum Achievable Matmul FLOPS, bf16"
_TUNING = "NCCL 2.30.7, src/graph/tuning.cc, ncclTunerConstantsDefaults"
_NVLINK = (
    "NCCL 2.30.7, src/graph/topo.h: what a link carries (SM80, SM90, SM100_NVLINK_BW), times those of the data sheet"
)
_NIC = "SimAI (astra-sim-alibabacloud), calbusbw.h: what one NIC carries"
_SHARED = {
    "ranks_per_node": "8 GPUs of a HGX or DGX board",
    "launch": "assumed: what eager PyTorch needs on the host for one operation",
    "call": f"{_TUNING}: base latency of rings and trees, LL128",
    "within.latency": f"{_TUNING}: a step of a ring over NVLink, LL128",
    "between.latency": f"{_TUNING}: a step of a ring over the network, LL128 (of a tree, or one GPU a node: 8.5)",
    "memory_efficiency": "assumed: streams come to nine tenths of a data sheet's bandwidth",
    "units": "the data sheet's number of multiprocessors; products run in waves of 128 x 128 tiles (NVIDIA, Matrix "
    "Multiplication Background User's Guide)",
}
_EVERY = {"ranks_per_node": 8, "launch": 5 * MICRO, "call": 14.0 * MICRO, "memory_efficiency": 0.9, "ahead": True}


def _sheet(sheet: str, said: dict[str, str], **fields: Any) -> dict[str, Any]:
    own = dict.fromkeys(("flops", "memory_bandwidth", "memory"), sheet)
    return {**_EVERY, **fields, "sources": {**own, **_SHARED, **said}}


def _rates(fp64: float, fp32: float, half: float, int8: float, fp8: float | None = None) -> dict[torch.dtype, float]:
    rates = {torch.float64: fp64, torch.float32: fp32, torch.bfloat16: half, torch.float16: half, torch.int8: int8}
    if fp8 is not None:
        rates |= {torch.float8_e4m3fn: fp8, torch.float8_e5m2: fp8}
    return {dtype: TERA * rate for dtype, rate in rates.items()}


_HOPPER = _rates(67, 67, 989.4, 1978.9, 1978.9)
_HOPPER_SAID = {
    "product_efficiency": f"{_MAMF}: 794.5 of 989",
    "attention_efficiency": "FlashAttention-3 (arXiv 2407.08608), abstract: that of FlashAttention-2 on H100",
    "within.bandwidth": f"{_NVLINK}: 18 x 20.6 GB/s",
    "between.bandwidth": f"{_NIC}: ConnectX-7, 400 Gb/s",
}
_HOPPER_FIELDS: dict[str, Any] = {
    "flops": _HOPPER,
    "within": (1.9 * MICRO, 370.8 * GIGA),
    "between": (4.0 * MICRO, 48.5 * GIGA),
    "product_efficiency": 0.803,
    "attention_efficiency": 0.35,
    "units": 132,
}

SHEETS: dict[str, dict[str, Any]] = {
    "a100": _sheet(
        "NVIDIA A100 data sheet, SXM 80 GB",
        {
            "product_efficiency": f"{_MAMF}: 271.2 of 312",
            "attention_efficiency": "FlashAttention-2 (arXiv 2307.08691), abstract: 0.50 to 0.73 on A100, the middle",
            "within.bandwidth": f"{_NVLINK}: 12 x 20 GB/s",
            "between.bandwidth": f"{_NIC}: ConnectX-6, 200 Gb/s",
        },
        flops=_rates(19.5, 19.5, 312, 624),
        memory_bandwidth=2.039 * TERA,
        memory=80 * GIGA,
        within=(1.9 * MICRO, 240 * GIGA),
        between=(4.0 * MICRO, 23.5 * GIGA),
        product_efficiency=0.869,
        attention_efficiency=0.615,
        units=108,
    ),
    "h100": _sheet(
        "NVIDIA H100 data sheet, SXM",
        _HOPPER_SAID,
        **_HOPPER_FIELDS,
        memory_bandwidth=3.35 * TERA,
        memory=80 * GIGA,
    ),
    "h200": _sheet(
        "NVIDIA H200 data sheet, SXM",
        _HOPPER_SAID,
        **_HOPPER_FIELDS,
        memory_bandwidth=4.8 * TERA,
        memory=141 * GIGA,
    ),
    "b200": _sheet(
        "NVIDIA HGX B200 data sheet",
        {
            "product_efficiency": f"{_MAMF}: 1745 of 2250",
            "attention_efficiency": "assumed: as on H100, until a kernel of PyTorch's own is published",
            "within.bandwidth": f"{_NVLINK}: 18 x 40.1 GB/s",
            "between.bandwidth": f"{_NIC}: ConnectX-7, 400 Gb/s",
        },
        flops=_rates(37, 75, 2250, 4500, 4500),
        memory_bandwidth=7.7 * TERA,
        memory=180 * GIGA,
        within=(1.9 * MICRO, 721.8 * GIGA),
        between=(4.0 * MICRO, 48.5 * GIGA),
        product_efficiency=0.776,
        attention_efficiency=0.35,
        units=148,
    ),
}
"""Name to fields of Hardware."""
