from __future__ import annotations

from msgspec.structs import replace

from llmgw.rdma.meeting import meeting
from llmgw.wire.agent import Register
from llmgw.wire.facts import Host, Interface, NodeId, Port


def node(
    name: str, *interfaces: tuple[str, str], address: str = "", rails: tuple[str, ...] = (), boot: str = ""
) -> Register:
    return Register(
        node=NodeId(name),
        version="1",
        address=address,
        host=Host(
            boot_id=boot,
            interfaces=tuple(Interface(name=dev, addresses=(addr,), up=True) for dev, addr in interfaces),
        ),
        ports=tuple(Port(device=f"rxe{n}", netdev=dev) for n, dev in enumerate(rails)),
    )


def found(client: Register, server: Register, peer: str, rail: str = "") -> str:
    said = meeting(client, server, peer, rail_netdev=rail)
    return said.address if said else ""


A = node("a", ("eth0", "10.0.0.1/24"))
B = node("b", ("eth0", "10.0.0.2/24"))


def test_an_address_from_the_settings_wins() -> None:
    assert found(A, node("b", ("eth0", "10.0.0.2/24"), address="b.example"), "10.0.0.2") == "b.example"


def test_where_the_stream_comes_from_is_an_address_of_the_server() -> None:
    assert found(A, B, "10.0.0.2") == "10.0.0.2"


def test_behind_a_translated_address_a_common_network_is_used_and_not_the_rail_under_test() -> None:
    """Both guests of a rig see themselves as 10.0.2.15, and the plane sees 127.0.0.1."""
    a = node(
        "a",
        ("eth0", "10.0.2.15/24"),
        ("eth1", "192.168.100.11/24"),
        ("eth2", "192.168.101.11/24"),
        rails=("eth1", "eth2"),
    )
    b = node(
        "b",
        ("eth0", "10.0.2.15/24"),
        ("eth1", "192.168.100.12/24"),
        ("eth2", "192.168.101.12/24"),
        rails=("eth1", "eth2"),
    )
    assert found(a, b, "127.0.0.1", "eth1") == "192.168.101.12"
    assert found(a, b, "127.0.0.1", "eth2") == "192.168.100.12"


def test_the_rail_under_test_is_the_last_resort_and_is_said() -> None:
    a = node("a", ("eth1", "192.168.100.11/24"), rails=("eth1",))
    b = node("b", ("eth1", "192.168.100.12/24"), ("eth1.5", "10.5.0.12/24"), rails=("eth1",))
    said = meeting(a, b, "127.0.0.1", rail_netdev="eth1")
    assert said is not None
    assert said.over_rail


def test_a_bridge_that_every_node_has_leads_nowhere() -> None:
    a = node("a", ("docker0", "172.17.0.1/16"), ("eth0", "10.0.0.1/24"))
    b = node("b", ("docker0", "172.17.0.1/16"), ("eth0", "10.0.0.2/24"))
    assert found(a, b, "172.17.0.1") == "10.0.0.2"


def test_two_agents_of_one_machine_meet_on_loopback() -> None:
    one = node("a", ("eth0", "10.0.0.1/24"), boot="x")
    other = node("b", ("eth0", "10.0.0.1/24"), boot="x")
    assert found(one, other, "127.0.0.1") == "127.0.0.1"


def test_another_rail_that_is_down_is_no_way_to_meet() -> None:
    a = node("a", ("eth1", "192.168.100.11/24"), ("eth2", "192.168.101.11/24"), rails=("eth1", "eth2"))
    b = node("b", ("eth1", "192.168.100.12/24"), ("eth2", "192.168.101.12/24"), rails=("eth1", "eth2"))
    down = replace(b, ports=(replace(b.ports[0], state="DOWN"), b.ports[1]))
    said = meeting(a, down, "127.0.0.1", rail_netdev="eth2")
    assert said is not None
    assert (said.address, said.over_rail) == ("192.168.101.12", True)
    assert found(replace(a, ports=down.ports), b, "127.0.0.1", "eth2") == "192.168.101.12"


def test_ipv4_over_another_rail_comes_before_ipv6_beside_the_rails() -> None:
    """Older perftest exchanges nothing over IPv6; addresses that end at a site's border are not tried at all."""
    a = node("a", ("eth0", "fd00::1/64"), ("eth2", "192.168.101.11/24"), rails=("eth2",))
    b = node("b", ("eth0", "fd00::2/64"), ("eth2", "192.168.101.12/24"), rails=("eth2",))
    assert found(a, b, "127.0.0.1", "eth1") == "192.168.101.12"
    assert found(a, b, "127.0.0.1", "eth2") == "fd00::2"
    assert meeting(node("a", ("eth0", "fec0::1/64")), node("b", ("eth0", "fec0::2/64")), "127.0.0.1") is None


def test_no_common_network_is_none() -> None:
    assert meeting(A, node("b", ("eth0", "172.30.0.1/24")), "127.0.0.1") is None
