from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.rails import Pairing, Side, narrow, nccl_ib_hca, pair, pci_key
from tests.rdma.ports import gpus, ib, roce


def devices(pairing: Pairing) -> list[tuple[str, str]]:
    return [(rail.a.device, rail.b.device) for rail in pairing.rails]


def at(device: str, bus: int, gpu: int | None = None, **more: object) -> object:
    near = () if gpu is None else (f"GPU-{gpu}",)
    return ib(device, pci=f"0000:{bus:02x}:00.0", nearest_gpus=near, **more)


def side(name: str, *ports: object, gpu_count: int = 0) -> Side:
    return Side(name, ports, gpus(gpu_count))  # type: ignore[arg-type]


def test_an_extra_storage_adapter_shifts_nothing() -> None:
    """RA01: B's storage adapter sits in the middle and takes the name mlx5_3."""
    a = side("a", *(at(f"mlx5_{n}", n + 16, n) for n in range(8)), gpu_count=8)
    names = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8"]
    b = side("b", *(at(name, n + 16, n) for n, name in enumerate(names)), at("mlx5_3", 0x12), gpu_count=8)
    pairing = pair(a, b)
    assert devices(pairing) == [(f"mlx5_{n}", names[n]) for n in range(8)]
    assert any("mlx5_3/1 is near no GPU" in note for note in pairing.notes)


def test_a_storage_adapter_next_to_a_gpu_is_told_by_its_kind() -> None:
    a = side("a", *(at(f"mlx5_{n}", n + 16, n) for n in range(4)), gpu_count=4)
    storage = at("mlx5_3", 0x12, 3, hca_type="MT4123", board="MT_0000000223")
    b = side("b", *(at(f"mlx5_{n}", n + 16, n) for n in range(3)), storage, at("mlx5_4", 0x13, 3), gpu_count=4)
    assert devices(pair(a, b)) == [
        ("mlx5_0", "mlx5_0"),
        ("mlx5_1", "mlx5_1"),
        ("mlx5_2", "mlx5_2"),
        ("mlx5_3", "mlx5_4"),
    ]
    assert sorted(devices(pair(b, a)))[-1] == ("mlx5_4", "mlx5_3")
    assert "b mlx5_3/1 (GPU 3) has no partner on a: not tested" in pair(a, b).notes


def test_of_two_alike_next_to_a_gpu_none_is_guessed_to_be_the_rail() -> None:
    a = side("a", *(at(f"mlx5_{n}", n + 16, n) for n in range(2)), gpu_count=2)
    b = side("b", at("mlx5_0", 16, 0), at("mlx5_1", 17, 1), at("mlx5_2", 18, 1), gpu_count=2)
    pairing = pair(a, b)
    assert devices(pairing) == [("mlx5_0", "mlx5_0")]
    words = "which of a mlx5_1 and b mlx5_1, mlx5_2 (GPU 1) are one rail cannot be told: set rail labels"
    assert words in pairing.notes
    alone = pair(side("a", at("x", 1, 0), gpu_count=2), side("b", at("y", 1, 0), at("z", 2, 0), gpu_count=2))
    assert (alone.rails, "set rail labels" in alone.refusal) == ((), True)


def test_labels_win_over_everything() -> None:
    a = side("a", at("x0", 1, rail=1), at("x1", 2, rail=0))
    b = side("b", at("y0", 1, rail=0), at("y1", 2, rail=1))
    assert sorted(devices(pair(a, b))) == [("x0", "y1"), ("x1", "y0")]


def test_a_labelled_rail_without_a_partner_is_said() -> None:
    """RA06: narrowed to what both have, and said."""
    a = side("a", at("x0", 1, rail=0), at("x1", 2, rail=1))
    b = side("b", at("y1", 2, rail=1))
    pairing = pair(a, b)
    assert devices(pairing) == [("x1", "y1")]
    assert "a x0/1 (rail 0) has no partner on b: not tested" in pairing.notes


def test_with_equal_counts_the_pci_address_orders_and_not_the_name() -> None:
    a = side("a", at("mlx5_10", 0x0A), at("mlx5_2", 0x9A))
    b = side("b", at("mlx5_0", 0x1B), at("mlx5_1", 0x0B))
    assert devices(pair(a, b)) == [("mlx5_10", "mlx5_1"), ("mlx5_2", "mlx5_0")]


def test_unequal_counts_without_evidence_are_refused_and_not_guessed() -> None:
    pairing = pair(side("a", at("x0", 1), at("x1", 2)), side("b", at("y0", 1)))
    assert not pairing.rails
    assert "a has 2 InfiniBand ports and b has 1" in pairing.refusal
    assert "set rail labels" in pairing.refusal


def test_unequal_counts_are_narrowed_where_subnets_tell_the_rails_apart() -> None:
    a = Side("a", (roce("r0", "10.0.0.1", pci="0000:01:00.0"), roce("r1", "10.0.1.1", pci="0000:02:00.0")))
    b = Side("b", (roce("r0", "10.0.1.2", pci="0000:01:00.0"),))
    pairing = pair(a, b)
    assert devices(pairing) == [("r1", "r0")]
    assert any("paired by subnet" in note for note in pairing.notes)


def test_two_adapters_of_one_gpu_pair_in_pci_order() -> None:
    a = side("a", at("a1", 9, 0), at("a0", 8, 0), at("a2", 10, 1), gpu_count=2)
    b = side("b", at("b0", 4, 0), at("b1", 5, 0), at("b2", 6, 1), gpu_count=2)
    assert devices(pair(a, b)) == [("a0", "b0"), ("a1", "b1"), ("a2", "b2")]


def test_being_next_to_every_gpu_is_no_affinity() -> None:
    everywhere = ("GPU-0", "GPU-1")
    a = side("a", ib("a0", pci="0000:01:00.0", nearest_gpus=everywhere), gpu_count=2)
    b = side("b", ib("b0", pci="0000:01:00.0", nearest_gpus=everywhere), gpu_count=2)
    assert [rail.by for rail in pair(a, b).rails] == ["pci"]


def test_infiniband_never_pairs_with_roce_and_other_ports_are_no_rails() -> None:
    a = Side("a", (ib("i0"), roce("r0"), ib("vf0", vf=True), ib("s0", role="storage")))
    b = Side("b", (ib("i0"), ib("e0", kind="efa")))
    pairing = pair(a, b)
    assert devices(pairing) == [("i0", "i0")]
    for words in ("vf0/1 is a virtual function", "s0/1 is a storage port", "e0/1 is EFA", "a has 1 RoCE port(s)"):
        assert any(words in note for note in pairing.notes)


def test_a_node_without_rails_is_refused_by_name() -> None:
    assert pair(side("a", at("x", 1)), side("b")).refusal == "no RDMA port that could be a rail on b"


def test_narrowing_names_the_rails_there_are() -> None:
    pairing = pair(side("a", at("x0", 1), at("x1", 2)), side("b", at("y0", 1), at("y1", 2)))
    assert devices(narrow(pairing, ["1"])) == [("x1", "y1")]
    assert devices(narrow(pairing, ["x0"])) == [("x0", "y0")]
    assert narrow(pairing, ["9"]).refusal == "no rail 9; the rails are 0, 1"


def test_nccl_gets_exact_names() -> None:
    """RA02: mlx5_1 alone would match mlx5_10 and mlx5_11 too."""
    assert nccl_ib_hca([ib("mlx5_1"), ib("mlx5_10", number=2)]) == "=mlx5_1:1,mlx5_10:2"
    assert nccl_ib_hca([]) == ""


def test_pci_addresses_order_as_numbers() -> None:
    assert pci_key("0000:0a:00.0") < pci_key("0000:1a:00.0") < pci_key("000f:01:00.0") < pci_key("?")


@given(
    st.lists(st.tuples(st.integers(0, 255), st.none() | st.integers(0, 7)), max_size=9),
    st.lists(st.tuples(st.integers(0, 255), st.none() | st.integers(0, 7)), max_size=9),
    st.booleans(),
)
def test_no_port_is_used_twice_and_swapping_the_nodes_swaps_the_pairs(
    left: list[tuple[int, int | None]], right: list[tuple[int, int | None]], labelled: bool
) -> None:
    def make(name: str, rows: list[tuple[int, int | None]]) -> Side:
        ports = [
            at(f"{name}{n}", bus, None if labelled else gpu, rail=gpu if labelled else None)
            for n, (bus, gpu) in enumerate(rows)
        ]
        return side(name, *ports, gpu_count=8)

    a, b = make("a", left), make("b", right)
    there, back = pair(a, b), pair(b, a)
    assert len({x for x, _ in devices(there)}) == len(there.rails) == len({y for _, y in devices(there)})
    assert sorted(devices(there)) == sorted((y, x) for x, y in devices(back))
    assert there.rails or there.refusal
