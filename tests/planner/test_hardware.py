from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.config.errors import ConfigError
from elastic_train.planner.hardware_table import accelerator, accelerators

OWN = """
name: mine
memory_bytes: 16_000_000_000
peak_flops: {bf16: 1e14}
memory_bytes_per_second: 9e11
link_bytes_per_second: 32e9
network_bytes_per_second: 12.5e9
per_node: 4
"""


def own(folder: Path, text: str = OWN) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_every_number_has_a_source() -> None:
    for each in accelerators().values():
        numbers = {"peak_flops", "memory_bytes", "memory_bytes_per_second", "link_bytes_per_second"}
        numbers |= {"network_bytes_per_second", "link_latency_seconds", "network_latency_seconds"}
        numbers |= {"efficiency", "transfer_efficiency", "fp8_share", "masked_attention", "launch_seconds"}
        numbers |= {
            "host_link_bytes_per_second",
            "host_memory_bytes_per_second",
            "host_memory_bytes",
            "exchange_seconds",
            "collective_shares",
        }
        assert each.sources is not None
        assert set(each.sources) == numbers, each.name
        assert 0 < each.efficiency <= 1


def test_peaks_are_dense_and_bandwidths_in_one_direction() -> None:
    h100 = accelerator("H100-80GB")
    assert [h100.peak(precision) for precision in ("fp32", "bf16", "fp8")] == pytest.approx(
        [67e12, 989.4e12, 989.4e12 * 2], rel=1e-4
    )
    assert h100.link_bytes_per_second == 900e9 / 2
    assert h100.memory_bytes / 2**30 == pytest.approx(79.11, abs=0.01)
    assert accelerator("a100-80gb").network_bytes_per_second == 200e9 / 8


def test_fp32_is_without_tf32_and_memory_what_torch_can_allocate() -> None:
    """Data sheets of the vendors; total capacities in torch's out-of-memory messages."""
    expected = {
        "a100-40gb": (19.5, 39.50),
        "a100-80gb": (19.5, 79.15),
        "h100-80gb": (67, 79.11),
        "h200": (67, 139.80),
        "b200": (75, 178.35),
        "mi300x": (163.4, 191.98),
    }
    for name, (teraflops, gib) in expected.items():
        chip = accelerator(name)
        assert chip.peak("fp32") == pytest.approx(teraflops * 1e12)
        assert chip.memory_bytes / 2**30 == pytest.approx(gib, abs=0.01)


def test_a_mesh_of_links_has_only_those_between_the_ranks() -> None:
    """MI300X: 64 GB/s to each of the seven others."""
    for ranks, links in ((1, 1), (2, 1), (4, 3), (8, 7)):
        assert accelerator("mi300x").link_between(ranks) == pytest.approx(links * 64e9)
        assert accelerator("h100-80gb").link_between(ranks) == 450e9


@pytest.mark.parametrize(("name", "nearest"), [("h100", "h100-80gb"), ("a100", "a100-80gb"), ("mi300", "mi300x")])
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is not known; nearest: {nearest}; known: a100-40gb, .*, cpu"):
        accelerator(name)


def test_a_precision_without_units_is_refused() -> None:
    with pytest.raises(ValueError, match="a100-80gb has no fp8 units; it computes in fp32, bf16"):
        accelerator("a100-80gb").peak("fp8")


def test_ranks_share_the_cores_of_a_cpu() -> None:
    assert accelerator("h100-80gb").sharing(8) == 1.0
    cpu = accelerator("cpu")
    assert cpu.computing_at_once is not None
    assert cpu.sharing(1) == 1.0
    assert cpu.sharing(4 * cpu.computing_at_once) == 4.0


def test_a_file_describes_an_accelerator(tmp_path: Path) -> None:
    mine = accelerator(own(tmp_path))
    assert (mine.name, mine.per_node, mine.peak("bf16"), mine.overlaps) == ("mine", 4, 1e14, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.replace("per_node: 4", "per_node: 0"), "per_node=0: Input should be greater than or equal to 1"),
        (OWN.replace("name: mine", ""), "name is missing"),
        (OWN + "colour: red", "colour='red': Extra inputs are not permitted"),
        (OWN.replace("bf16: 1e14", "int4: 1e14"), "peak_flops.int4"),
        (OWN.replace("1e14", ".inf"), "peak_flops.bf16=inf: Input should be a finite number"),
        ("- a\n- b", "must be a mapping of the fields name, memory_bytes, "),
        ("name: [", "mine.yaml: line"),
    ],
)
def test_a_wrong_file_is_refused_with_its_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml") as caught:
        accelerator(own(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        accelerator(str(tmp_path / "none.yaml"))


def test_ranks_share_the_memory_of_a_cpu() -> None:
    cpu, gpu = accelerator("cpu"), accelerator("h100-80gb")
    assert cpu.memory_for(8) == cpu.memory_bytes // 8
    assert cpu.memory_for(1000) == cpu.memory_bytes // cpu.per_node
    assert gpu.memory_for(8) == gpu.memory_bytes
