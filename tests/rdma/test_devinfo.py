"""The MTU of links by `ibv_devinfo`."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.devinfo import active_mtus

RECORDED = Path(__file__).parent.parent / "recorded" / "sysfs"


def test_the_recorded_output_gives_each_ports_mtu() -> None:
    assert active_mtus((RECORDED / "ibv_devinfo-rxe.txt").read_text()) == {("rxe0", 1): 4096, ("rxe1", 1): 4096}


def test_a_device_with_two_ports_has_two() -> None:
    text = "hca_id:\tmlx5_0\n\tport:\t1\n\t\tactive_mtu:\t4096 (5)\n\tport:\t2\n\t\tactive_mtu:\tinvalid\n"
    assert active_mtus(text) == {("mlx5_0", 1): 4096}


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert all(port > 0 for _, port in active_mtus(text))
