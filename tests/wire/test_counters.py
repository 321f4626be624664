"""Counters as bare numbers, in the order of names that were told once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.wire.agent import Heartbeat
from llmgw.wire.codec import agent_codec, encode
from llmgw.wire.counters import Packer, unpack
from llmgw.wire.facts import PortLoad

readings = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 2**64 - 1), max_size=8)


@given(st.lists(st.lists(readings, min_size=1, max_size=4), min_size=1, max_size=5))
def test_what_a_stream_was_told_gives_every_reading_back(beats: list[list[dict[str, int]]]) -> None:
    packer = Packer()
    names: tuple[str, ...] = ()
    told: tuple[PortLoad, ...] = ()
    for ports in beats:
        loads = tuple(PortLoad(f"mlx5_{n}", counters=port) for n, port in enumerate(ports))
        heard = agent_codec.decode(encode(packer.pack(Heartbeat(ports=loads))))
        assert isinstance(heard, Heartbeat)
        names = names if heard.counters is None else heard.counters
        told = told if heard.ports is None else heard.ports
        assert [port.device for port in told] == [port.device for port in loads]
        assert list(unpack(heard.counts, names) if heard.counts else [{} for _ in ports]) == ports


def test_names_and_states_are_told_once() -> None:
    packer = Packer()
    beat = Heartbeat(ports=(PortLoad("mlx5_0", state="ACTIVE", counters={"symbol_error": 1, "link_downed": 2}),))
    first, second = packer.pack(beat), packer.pack(beat)
    assert first.counters == ("symbol_error", "link_downed")
    assert first.ports == (PortLoad("mlx5_0", state="ACTIVE"),)
    assert (second.counters, second.ports, second.counts) == (None, None, first.counts)
    down = packer.pack(Heartbeat(ports=(PortLoad("mlx5_0", state="DOWN", counters={"symbol_error": 1}),)))
    assert down.ports == (PortLoad("mlx5_0", state="DOWN"),)
    assert packer.pack(Heartbeat()) == Heartbeat()
    assert packer.pack(Heartbeat(ports=())).ports == ()


@given(st.binary(max_size=50))
def test_counts_that_cannot_be_read_are_none_at_all(data: bytes) -> None:
    assert isinstance(unpack(data, ("a", "b")), tuple)
