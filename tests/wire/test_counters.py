"""Counters as bare numbers, in the order of names that were told once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.wire.agent import Heartbeat
from llmgw.wire.codec import agent_codec, encode
from llmgw.wire.counters import Packer, counters
from llmgw.wire.facts import PortLoad

readings = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 2**64 - 1), max_size=8)


@given(st.lists(st.lists(readings, min_size=1, max_size=4), min_size=1, max_size=5))
def test_what_a_stream_was_told_gives_every_reading_back(beats: list[list[dict[str, int]]]) -> None:
    packer = Packer()
    names: tuple[str, ...] = ()
    for ports in beats:
        beat = Heartbeat(ports=tuple(PortLoad(f"mlx5_{n}", counters=port) for n, port in enumerate(ports)))
        heard = agent_codec.decode(encode(packer.pack(beat)))
        assert isinstance(heard, Heartbeat)
        names = names if heard.counters is None else heard.counters
        assert [counters(port, names) for port in heard.ports or ()] == ports


def test_names_are_told_once() -> None:
    packer = Packer()
    beat = Heartbeat(ports=(PortLoad("mlx5_0", counters={"symbol_error": 1, "link_downed": 2}),))
    assert packer.pack(beat).counters == ("symbol_error", "link_downed")
    assert packer.pack(beat).counters is None
    assert packer.pack(Heartbeat()) == Heartbeat()
