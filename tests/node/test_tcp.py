import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import Unavailable
from llmgw.node.tcp import Ports, choose, is_free, width
from llmgw.wire.facts import ShardId
from llmgw.wire.spans import spanned
from tests.ports import free_ports

PURPOSES = ("http", "master", "internal+")


@given(
    st.sets(st.integers(100, 160)),
    st.sets(st.integers(100, 160)),
    st.integers(90, 200),
    st.sampled_from([("http",), PURPOSES]),
)
def test_chosen_numbers_are_allowed_free_and_nobody_elses_and_found_when_there_are_any(
    reserved: set[int], busy: set[int], after: int, purposes: tuple[str, ...]
) -> None:
    allowed = range(100, 160)
    found = choose(purposes, allowed, reserved, after, lambda number: number not in busy)
    bad = reserved | busy
    possible = any(not bad & set(range(n, n + width(purposes))) for n in range(100, 161 - width(purposes)))
    assert (found is not None) == possible
    if found is not None:
        numbers = list(spanned(found))
        assert tuple(found) == purposes
        assert len(set(numbers)) == width(purposes)
        assert set(numbers) <= set(allowed)
        assert not set(numbers) & bad


def test_two_shards_never_share_a_number_and_a_released_one_is_not_given_again_at_once() -> None:
    ports = Ports(range(100, 100 + 3 * width(PURPOSES)), free=lambda _: True)
    one = ports.take(ShardId("a"), PURPOSES, {})
    two = ports.take(ShardId("b"), PURPOSES, {})
    assert not set(spanned(one)) & set(spanned(two))
    ports.release(ShardId("a"))
    assert set(spanned(ports.take(ShardId("c"), PURPOSES, {}))).isdisjoint({*spanned(one), *spanned(two)})


def test_numbers_that_the_plane_gave_are_kept_to() -> None:
    ports = Ports(range(100, 120), free=lambda number: number != 300)
    assert ports.take(ShardId("a"), PURPOSES, {"http": 200}) == {"http": 200, "master": 100, "internal+": 101}
    with pytest.raises(Unavailable, match="port 300"):
        ports.take(ShardId("b"), PURPOSES, {"http": 300})
    with pytest.raises(Unavailable, match="no 10 free ports"):
        Ports(range(100, 105), free=lambda _: True).take(ShardId("c"), PURPOSES, {})


@pytest.mark.real
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_port_that_somebody_listens_on_is_not_free_whatever_the_address(address: str) -> None:
    (number,) = free_ports(1)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((address, number))
        taken.listen()
        assert not is_free(number)
    assert is_free(number)
