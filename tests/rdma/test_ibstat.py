from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.ibstat import address, parse
from tests.rdma import captures


@pytest.mark.parametrize("name", [name for name in captures.every("ibstat.out") if "no-umad" not in name])
def test_every_recorded_adapter_is_read(name: str) -> None:
    (found,) = parse(captures.text(name).splitlines())
    assert found.device == "ibsim0"
    assert set(found.ports) == {1}
    assert found.ports[1]["Port GUID"].startswith("0x")


def test_a_node_of_mixed_adapters_is_read_up_to_the_one_that_broke() -> None:
    text = captures.text("fake-sysfs-errors.txt")
    whole = text[text.index("== ibstat on fake sysfs") : text.index("\nrc=0", text.index("== ibstat on fake sysfs"))]
    found = parse(whole.splitlines())
    assert [one.device for one in found] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4"]
    assert [one.ports[1]["Link layer"] for one in found][2] == "Ethernet"
    assert found[3].ports[1]["State"] == "Initializing"
    broken = parse(text[text.index("== ports missing on mlx5_1") :].splitlines())
    assert [one.device for one in broken] == ["mlx5_0"]


def test_an_address_has_a_gid_and_a_lid() -> None:
    assert address(captures.text("healthy/ibaddr.out")) == ("fe80::946d:ae03:0:5001", 17)
    assert address(captures.text("misc/ibaddr.txt")) == ("fec0::a01:946d:ae03:0:3001", 7)
    assert address("nothing") is None


@given(st.text())
def test_any_text_is_read_without_an_exception(text: str) -> None:
    parse(text.splitlines())
    parse(f"CA 'x'\n{text}".splitlines())
