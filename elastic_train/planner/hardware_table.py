"""The accelerators that are known by name. Every number names its source.

Vendors print sparse peaks, and bandwidths of both directions together: an H100 is sold with 1,979 TFLOP/s in bf16 and
900 GB/s of NVLink, which are 989 and 450 here.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from elastic_train.config.errors import ConfigError
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.hardware_file import load_accelerator

_A100 = "NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950), SXM: dense peaks, HBM, NVLink 600 GB/s"
_H100 = "NVIDIA H100 data sheet (resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet), SXM5, halved"
_H200 = "NVIDIA H200 data sheet (nvidia.com/en-us/data-center/h200): H100's units and links, 4.8 TB/s of HBM3e"
_B200 = "NVIDIA HGX B200 (nvidia.com/en-us/data-center/hgx), dense; DGX B200: 64 TB/s of HBM3e and 14.4 TB/s of NVLink"
_MI300X = "AMD Instinct MI300X data sheet (amd.com/en/products/accelerators/instinct/mi300/mi300x.html)"
_TORCH = "total capacity in torch's out-of-memory messages; nvidia-smi says 0.5 to 1 GiB more"
_HOPS = "NCCL's tuning model (src/graph/tuning.cc): a few microseconds per hop; taken as 2 on NVLink and 5 on a network"
_NCCL = "nccl-tests: bus bandwidth of about 360 of an H100's 450 GB/s, and 40 of 50 GB/s between nodes"
_HOP_FIELDS = ("link_latency_seconds", "network_latency_seconds")
_THIS_CPU = (
    "measured in CPU seconds on one thread of a 2-core Xeon (Sapphire Rapids): products of 1,024 x 1,024, fused AdamW, "
    "gloo collectives of 16 MiB over loopback; the rest fitted to CPU seconds of rows of benchmarks/strategies.py and "
    "benchmarks/layout_choice.py; how far it is off: docs/benchmarks.md, Planner"
)
_MASKED = (
    "arXiv:2307.08691, section 4.1: FlashAttention-2 is about twice as fast as xFormers' memory-efficient kernel, "
    "which torch takes under a mask; measured on A100, assumed elsewhere"
)
_LAUNCHES = "assumed: some 50 kernels of a block in one direction, about 6 microseconds each"
_TITAN = "set by torchtitan's published tokens/s, "
"""``benchmarks/llama3_h100_202412_torchtitan.md`` and others: PyTorch FSDP2 as here; see test_published_runs.py"""


def _sources(
    data_sheet: str, memory: str, network: str, cpus: str, efficiency: str = "", *, host_memory: str = ""
) -> dict[str, str]:
    return {
        "peak_flops": data_sheet,
        "memory_bytes": memory,
        "memory_bytes_per_second": data_sheet,
        "link_bytes_per_second": data_sheet,
        "network_bytes_per_second": network,
        "host_link_bytes_per_second": data_sheet,
        "host_memory_bytes": host_memory,
        "host_memory_bytes_per_second": f"{cpus}, an eighth of it; that the update reaches it is assumed",
        "link_latency_seconds": _HOPS,
        "network_latency_seconds": _HOPS,
        "efficiency": f"{_TITAN}{efficiency}",
        "fp8_share": f"{_TITAN}8B with and without Float8 on H100",
        "transfer_efficiency": _NCCL,
        "masked_attention": _MASKED,
        "launch_seconds": _LAUNCHES,
        "exchange_seconds": "part of the hops",
        "collective_shares": "none: NCCL's collectives reach the same bus bandwidth (nccl-tests)",
    }


def _gpu(
    name: str,
    gibibytes: float,
    peaks: dict[str, float],
    *,
    memory: float,
    link: float,
    network: float,
    host_link: float,
    host_memory: float,
    host_tebibytes: int,
    efficiency: float,
    sources: dict[str, str],
    mesh: bool = False,
) -> Accelerator:
    """``memory``, ``link``, ``network`` and ``host_memory`` in bytes per second; eight of them in a node."""
    return Accelerator(
        name=name,
        memory_bytes=int(gibibytes * 2**30),
        peak_flops=peaks,
        memory_bytes_per_second=memory,
        link_bytes_per_second=link,
        network_bytes_per_second=network,
        host_link_bytes_per_second=host_link,
        host_memory_bytes_per_second=host_memory,
        host_memory_bytes=host_tebibytes * 2**40,
        link_latency_seconds=2e-6,
        network_latency_seconds=5e-6,
        per_node=8,
        efficiency=efficiency,
        launch_seconds=3e-4,
        mesh=mesh,
        sources=sources,
    )


_A100_PEAKS = {"fp32": 19.5e12, "bf16": 312e12}
_HOPPER_PEAKS = {"fp32": 67e12, "bf16": 989.4e12, "fp8": 1978.9e12}
_B200_PEAKS = {"fp32": 75e12, "bf16": 2250e12, "fp8": 4500e12}
_MI300X_PEAKS = {"fp32": 163.4e12, "bf16": 1307.4e12, "fp8": 2614.9e12}
_A100_NODE = _sources(
    _A100,
    _TORCH,
    "DGX A100: eight 200 Gb/s cards for compute",
    "DGX A100: two EPYC 7742 with 8 channels of DDR4-3200",
    "8B and 70B on 64 A100",
    host_memory="DGX A100: 1 TB with A100 of 40 GB, 2 TB with those of 80 GB",
)
_H100_NODE = _sources(
    _H100,
    _TORCH,
    "DGX H100: eight 400 Gb/s cards for compute; arXiv:2407.21783 sec. 3.3.1 has as many",
    "DGX H100: two Xeon 8480C with 8 channels of DDR5-4800",
    "8B to 405B, compiled, on H100 of 500 W: at 700 W expect more",
    host_memory="DGX H100: 2 TB",
)
_H200_NODE = _sources(
    _H200,
    _TORCH,
    "DGX H200: eight 400 Gb/s cards for compute",
    "DGX H200: two Xeon 8480C with 8 channels of DDR5-4800",
    "8B in fp8 on 32 and 64 H200",
    host_memory="DGX H200: 2 TB",
)
_B200_NODE = _sources(
    _B200,
    _TORCH,
    "DGX B200 user guide: eight 400 Gb/s ConnectX-7 cards for compute",
    "DGX B200: two Xeon 8570 with 8 channels of DDR5-5600",
    host_memory="DGX B200: 2 TB, up to 4",
) | {"efficiency": "assumed, that of h100-80gb; no published run was compared"}
_MI300X_NODE = _sources(
    _MI300X,
    "vram total of amd-smi",
    "usual servers have eight 400 Gb/s cards",
    "usual servers have two EPYC 9004 with 12 channels of DDR5-4800",
    host_memory="assumed: 2 TiB a node",
) | {
    "link_bytes_per_second": "seven Infinity Fabric links of 64 GB/s each way, one to each of the others",
    "efficiency": "assumed; no published run was compared",
}
_CPU = Accelerator(
    name="cpu",
    memory_bytes=24 * 2**30,
    peak_flops={"fp32": 155e9, "bf16": 83e9},
    memory_bytes_per_second=16e9,
    link_bytes_per_second=1.2e9,
    network_bytes_per_second=1.2e9,
    host_link_bytes_per_second=16e9,
    host_memory_bytes_per_second=16e9,
    host_memory_bytes=24 * 2**30,
    link_latency_seconds=6.5e-5,
    network_latency_seconds=6.5e-5,
    per_node=64,
    efficiency=0.54,
    masked_attention=1.0,
    transfer_efficiency=1.0,
    collective_shares={"reduce_scatter": 0.37, "all_gather": 0.56},
    exchange_seconds=4.4e-4,
    block_seconds=2.4e-3,
    computing_at_once=2,
    overlaps=False,
    sources=_sources(_THIS_CPU, _THIS_CPU, _THIS_CPU, _THIS_CPU)
    | dict.fromkeys(_HOP_FIELDS, _THIS_CPU)
    | dict.fromkeys(("memory_bytes", "host_memory_bytes"), "MemTotal of that machine, rounded; its ranks share it")
    | {"efficiency": _THIS_CPU, "fp8_share": "no fp8 units", "transfer_efficiency": _THIS_CPU}
    | {"exchange_seconds": _THIS_CPU}
    | {"collective_shares": "benchmarks/collectives.py, 5 and 20 MB on 2 to 8 ranks: of what gloo's all-reduce reaches"}
    | {"masked_attention": "torch's flash kernel for CPUs takes masks", "launch_seconds": "part of block_seconds"},
)
_TABLE = (
    _gpu(
        "a100-40gb",
        39.50,
        _A100_PEAKS,
        memory=1.555e12,
        link=300e9,
        network=25e9,
        host_link=32e9,
        host_memory=51.2e9,
        host_tebibytes=1,
        efficiency=0.59,
        sources=_A100_NODE,
    ),
    _gpu(
        "a100-80gb",
        79.15,
        _A100_PEAKS,
        memory=2.039e12,
        link=300e9,
        network=25e9,
        host_link=32e9,
        host_memory=51.2e9,
        host_tebibytes=2,
        efficiency=0.59,
        sources=_A100_NODE,
    ),
    _gpu(
        "h100-80gb",
        79.11,
        _HOPPER_PEAKS,
        memory=3.35e12,
        link=450e9,
        network=50e9,
        host_link=64e9,
        host_memory=76.8e9,
        host_tebibytes=2,
        efficiency=0.41,
        sources=_H100_NODE,
    ),
    _gpu(
        "h200",
        139.80,
        _HOPPER_PEAKS,
        memory=4.8e12,
        link=450e9,
        network=50e9,
        host_link=64e9,
        host_memory=76.8e9,
        host_tebibytes=2,
        efficiency=0.51,
        sources=_H200_NODE,
    ),
    _gpu(
        "b200",
        178.35,
        _B200_PEAKS,
        memory=8e12,
        link=900e9,
        network=50e9,
        host_link=64e9,
        host_memory=89.6e9,
        host_tebibytes=2,
        efficiency=0.41,
        sources=_B200_NODE,
    ),
    _gpu(
        "mi300x",
        191.98,
        _MI300X_PEAKS,
        memory=5.3e12,
        link=448e9,
        network=50e9,
        host_link=64e9,
        host_memory=115.2e9,
        host_tebibytes=2,
        efficiency=0.3,
        mesh=True,
        sources=_MI300X_NODE,
    ),
    _CPU,
)


_CPU_HOST = replace(
    _CPU,
    name="cpu-host",
    link_latency_seconds=1e-4,
    network_latency_seconds=1e-4,
    computing_at_once=None,
    sources=_CPU.sources
    and _CPU.sources
    | dict.fromkeys(_HOP_FIELDS, "assumed: gloo over TCP between processes that nothing keeps waiting"),
)
"""A host of the pool on CPUs, which Ray reserves for it alone: none shares cores."""
_HOSTS = {"cpu": _CPU_HOST, "cuda": _TABLE[2]}


def host_of(device: str, largest_node: int | None = None) -> Accelerator:
    """What a job on ``hosts.device`` is planned for where nobody says more: CPUs, or H100.

    ``largest_node``: hosts on the fullest of the nodes; a node of the table has no more.
    """
    host = _HOSTS[device]
    return host if largest_node is None else replace(host, per_node=max(1, min(host.per_node, largest_node)))


def accelerators() -> dict[str, Accelerator]:
    """All accelerators that are known by name."""
    return {each.name: each for each in _TABLE}


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name, or of the YAML file of that name. Raises ConfigError with a sentence."""
    known = accelerators()
    if name.lower() in known:
        return known[name.lower()]
    if name.endswith((".yaml", ".yml")):
        return load_accelerator(name)
    begins = [each for each in known if each.startswith(name.lower())]
    near = begins[-1] if name and begins else difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
    raise ConfigError(
        [f"accelerator {name!r} is not known; nearest: {near}; known: {', '.join(known)}, or a YAML file of your own"]
    )
