"""Which ports are rails, and which rail."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.roles import assigned, nearest, pci_order
from llmgw.wire.facts import Port


def ib(device: str, pci: str, **more: object) -> Port:
    return Port(device=device, kind="ib", pci=pci, hca_type="MT4129", rate_gbps=400.0, **more)  # type: ignore[arg-type]


def rails(ports: tuple[Port, ...]) -> dict[str, int | None]:
    return {port.device: port.rail for port in ports}


def test_rails_follow_pci_addresses_as_numbers_and_not_names() -> None:
    ports = assigned([ib("mlx5_0", "0000:9a:00.0"), ib("mlx5_1", "0000:18:00.0"), ib("mlx5_2", "0001:01:00.0")])
    assert rails(ports) == {"mlx5_1": 0, "mlx5_0": 1, "mlx5_2": 2}


def test_soft_ports_without_pci_follow_their_names_as_people_count() -> None:
    ports = assigned([Port(device=f"rxe{number}", kind="roce") for number in (10, 2, 0)])
    assert rails(ports) == {"rxe0": 0, "rxe2": 1, "rxe10": 2}


def test_a_bond_beside_eight_rails_is_storage_with_a_label_of_its_own() -> None:
    eight = [ib(f"mlx5_{number}", f"0000:{number + 16:02x}:00.0") for number in range(8)]
    bond = Port(device="mlx5_bond_0", kind="roce", pci="0000:02:00.0", bond="bond0", rate_gbps=200.0)
    ports = assigned([*eight, bond], fabrics={"mlx5_bond_0": "storage", "mlx5_*": "compute"})
    by_name = {port.device: port for port in ports}
    assert by_name["mlx5_bond_0"].role == "storage"
    assert by_name["mlx5_bond_0"].rail is None
    assert by_name["mlx5_bond_0"].fabric == "storage"
    assert [by_name[f"mlx5_{number}"].rail for number in range(8)] == list(range(8))
    assert by_name["mlx5_3"].fabric == "compute"


def test_a_node_of_bonds_only_has_bonds_for_rails() -> None:
    bonds = [Port(device=f"mlx5_bond_{n}", kind="roce", bond=f"bond{n}", pci=f"0000:{n + 16:02x}:00.0") for n in (0, 1)]
    assert rails(assigned(bonds)) == {"mlx5_bond_0": 0, "mlx5_bond_1": 1}


def test_virtual_functions_are_no_rails_and_leave_no_gap() -> None:
    ports = assigned(
        [ib("mlx5_0", "0000:18:00.0"), ib("mlx5_1", "0000:18:00.2", vf=True), ib("mlx5_2", "0000:2a:00.0")]
    )
    assert rails(ports) == {"mlx5_0": 0, "mlx5_1": None, "mlx5_2": 1}
    assert ports[1].role == "vf"


def test_a_slow_ethernet_port_beside_the_fabric_is_management() -> None:
    fabric = [ib(f"mlx5_{number}", f"0000:{number + 16:02x}:00.0") for number in range(4)]
    ports = assigned([*fabric, Port(device="mlx5_9", kind="roce", pci="0000:01:00.0", rate_gbps=25.0)])
    assert ports[0].role == "management"
    assert rails(ports)["mlx5_0"] == 0


def test_configuration_comes_before_every_guess() -> None:
    ports = assigned(
        [ib("mlx5_0", "0000:18:00.0"), ib("mlx5_1", "0000:2a:00.0"), ib("mlx5_2", "0000:3a:00.0")],
        roles={"mlx5_1": "storage"},
        rails={"mlx5_2": 0},
    )
    assert {port.device: (port.role, port.rail) for port in ports} == {
        "mlx5_0": ("fabric", 1),
        "mlx5_1": ("storage", None),
        "mlx5_2": ("fabric", 0),
    }


def test_the_management_twin_of_an_adapter_is_no_rail() -> None:
    pair = [
        ib("mlx5_0", "0000:18:00.0", port_guid="946dae0300000001"),
        ib("smi0", "0000:18:00.0", port_guid="946dae0300000001"),
    ]
    assert rails(assigned(pair)) == {"mlx5_0": 0, "smi0": None}


def test_a_port_that_is_down_keeps_its_place() -> None:
    ports = assigned([ib("mlx5_0", "0000:18:00.0", state="DOWN"), ib("mlx5_1", "0000:2a:00.0")])
    assert rails(ports) == {"mlx5_0": 0, "mlx5_1": 1}


ROOT = "/sys/devices/pci0000:00"


def test_a_gpu_behind_the_same_switch_is_nearer_than_one_at_the_same_root() -> None:
    gpus = [
        ("same-switch", f"{ROOT}/0000:00:01.0/0000:10:00.0/0000:11:00.0", 0),
        ("same-root", f"{ROOT}/0000:00:02.0/0000:20:00.0", 0),
        ("elsewhere", "/sys/devices/pci0000:80/0000:80:01.0/0000:90:00.0", 0),
    ]
    mine = f"{ROOT}/0000:00:01.0/0000:10:00.0/0000:12:00.0"
    assert nearest(mine, 0, gpus) == ("same-switch",)
    assert nearest(f"{ROOT}/0000:00:03.0/0000:30:00.0", 0, gpus) == ("same-switch", "same-root")
    assert nearest("/sys/devices/pci0000:c0/0000:c0:01.0", 0, gpus) == ("same-switch", "same-root", "elsewhere")
    assert nearest("/sys/devices/pci0000:c0/0000:c0:01.0", 1, gpus) == ()
    assert nearest("", None, gpus) == ()


@given(
    st.lists(
        st.builds(
            Port,
            device=st.text(max_size=8),
            number=st.integers(1, 4),
            kind=st.sampled_from(["ib", "roce", "efa", "opa", "other"]),
            pci=st.sampled_from(["", "0000:18:00.0", "000f:01:00.1"]),
            vf=st.booleans(),
            bond=st.sampled_from(["", "bond0"]),
        ),
        max_size=12,
    ),
    st.dictionaries(st.text(max_size=3), st.integers(0, 5), max_size=3),
)
def test_every_port_comes_back_in_order_and_only_fabric_ports_have_rails(
    ports: list[Port], given_rails: dict[str, int]
) -> None:
    found = assigned(ports, rails=given_rails)
    assert len(found) == len(ports)
    assert list(found) == sorted(found, key=pci_order)
    assert all((port.rail is not None) == (port.role == "fabric" and port.kind in ("ib", "roce")) for port in found)
