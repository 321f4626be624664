"""The host's interfaces."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llmgw.node.interfaces import cidr, interfaces
from llmgw.node.view import View


def test_addresses_have_their_prefix_lengths() -> None:
    assert cidr(socket.AF_INET, "10.0.0.1", "255.255.252.0") == "10.0.0.1/22"
    assert cidr(socket.AF_INET6, "fe80::1%eth0", "ffff:ffff:ffff:ffff::") == "fe80::1/64"
    assert cidr(socket.AF_INET, "10.0.0.1", None) == "10.0.0.1/32"
    assert cidr(socket.AF_PACKET, "02:fc:00:00:00:01", None) is None
    assert cidr(socket.AF_INET, "junk", "255.0.0.0") is None


def test_loopback_and_idle_virtual_interfaces_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.node.interfaces._addresses", dict)
    for name, text in (("eth0", "25000"), ("veth1", "10000"), ("lo", ""), ("ib0", "-1")):
        folder = tmp_path / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(text)
        (folder / "operstate").write_text("up")
    for name in ("eth0", "ib0"):
        (tmp_path / "sys/class/net" / name / "device").mkdir()
    found = {each.name: each for each in interfaces(View(root=tmp_path))}
    assert set(found) == {"eth0", "ib0"}
    assert found["eth0"].speed_mbps == 25000
    assert found["ib0"].speed_mbps is None
    assert found["eth0"].up


@pytest.mark.real
def test_this_machines_own_interfaces_are_found() -> None:
    assert all("/" in address for each in interfaces(View()) for address in each.addresses)
