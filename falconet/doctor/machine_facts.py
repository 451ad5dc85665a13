"""The facts about this machine: versions, processor, memory, devices, libraries and optional parts."""

import importlib.metadata
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

import falconet
from falconet.data import input
from falconet.numerics.precision import automatic
from falconet.parallel import host
from falconet.parallel.world import cores
from falconet.report.console import counted

GIB = 2**30
DRIVER = Path("/proc/driver/nvidia/version")
LIBRARIES = ("torchvision", "timm", "numpy", "pillow", "safetensors")
OPTIONAL = {  # by extra: packages that stand for it
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "aim": "aim",
    "plots": "matplotlib",
    "nvml": "nvidia-ml-py",
    "search": "optuna",
    "serve": "aiohttp",
    "export": "onnx",
    "telemetry": "opentelemetry-sdk",
}
INSTEAD = {"mlflow-skinny": "mlflow"}  # the whole package has another name
# Processor features that matter: Linux's name, ours, and their use.
FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "amx_bf16": "AMX-BF16",
    "amx_fp16": "AMX-FP16",
    "asimd": "NEON",
    "bf16": "BF16",
    "asimdhp": "FP16",
}


def lines() -> Iterator[str]:
    yield f"falconet {falconet.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    yield f"processor: {host.processor()}, {counted(cores(), 'CPU core')} for this process"
    yield f"  {flags_line(host.processor_flags(), automatic('cpu'))}"
    yield f"memory: {host.total_memory() / GIB:.1f} GiB, {host.available() / GIB:.1f} GiB available to this process"
    yield from _devices()
    yield f"photos are decoded by {input.decoder()}"
    yield "libraries: " + ", ".join(f"{name} {_version(name) or 'missing'}" for name in LIBRARIES)
    found = {extra: _version(package) or _version(INSTEAD.get(package, package)) for extra, package in OPTIONAL.items()}
    there = [f"{extra} ({OPTIONAL[extra]} {version})" for extra, version in found.items() if version]
    missing = [extra for extra, version in found.items() if not version]
    yield f"optional parts: {', '.join(there) or 'none'}"
    if missing:
        yield f"  missing: {', '.join(missing)}; pip install 'falconet[{missing[0]}]' installs {missing[0]}"


def flags_line(flags: frozenset[str], precision: str) -> str:
    """A line about the processor's instructions and what Falconet does with them."""
    known = [words for name, words in FLAGS.items() if name in flags]
    why = "it multiplies in bf16" if precision == "bf16.32" else "it has no bf16 instructions, and would emulate them"
    half = "" if {"avx512_fp16", "amx_fp16", "asimdhp"} & flags else "; 16.16 and 16.32 compute in fp32: no fp16 units"
    has = ", ".join(known) or "none of the instructions that matter"
    return f"has {has}; --precision auto is {precision}: {why}{half}"


def _devices() -> Iterator[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        yield f"0 CUDA devices; {built}"
        return
    versions = f"driver {_driver()}, CUDA {torch.version.cuda}, cuDNN {_cudnn()}, NCCL {_nccl()}"
    yield f"{counted(count, 'CUDA device')}, {versions}"
    for number in range(count):
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        yield (
            f"  {number}: {about.name}, {total / GIB:.1f} GiB, {free / GIB:.1f} GiB free, compute capability"
            f" {about.major}.{about.minor}; --precision auto is {automatic('cuda')}"
        )


def _driver() -> str:
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    return found[1] if found else "unknown"


def _cudnn() -> str:
    return str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
