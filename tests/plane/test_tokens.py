from __future__ import annotations

import pytest
import trio

from llmgw.errors import BadInput, NotFound, Refused
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.tokens import Tokens
from tests.fakes.clock import Clock

FINGERPRINT = "f" * 43


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def tokens(store: MemoryStore, clock: Clock) -> Tokens:
    return Tokens(store, FINGERPRINT, clock)


async def test_a_token_lets_one_machine_in_once(tokens: Tokens) -> None:
    text, token = await tokens.create(60)
    used = await tokens.redeem(text, "gpu-01", "key-a", "10.0.0.1")
    assert (used.id, used.used_by, used.used_from) == (token.id, "gpu-01", "10.0.0.1")
    with pytest.raises(Refused, match=f"token {token.id} was used by gpu-01 at 2026-01-01 .*: make a new one"):
        await tokens.redeem(text, "gpu-02", "key-b")
    with pytest.raises(Refused, match="was used by gpu-01"):
        await tokens.redeem(text, "gpu-01", "another key")


async def test_the_same_machine_may_come_again_when_the_answer_was_lost(tokens: Tokens, clock: Clock) -> None:
    text, _ = await tokens.create(60)
    await tokens.redeem(text, "gpu-01", "key-a")
    assert (await tokens.redeem(text, "gpu-01", "key-a")).used_by == "gpu-01"
    clock.forward(61)
    with pytest.raises(Refused, match="was used by"):
        await tokens.redeem(text, "gpu-01", "key-a")


async def test_two_machines_that_come_together_do_not_both_get_in(tokens: Tokens) -> None:
    text, _ = await tokens.create(60)
    outcomes: list[str] = []

    async def come(name: str) -> None:
        try:
            await tokens.redeem(text, name, f"key of {name}")
        except Refused:
            outcomes.append("refused")
        else:
            outcomes.append("in")

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(come, f"gpu-{number}")
    assert sorted(outcomes) == ["in", "refused", "refused", "refused", "refused"]


async def test_a_token_expires(tokens: Tokens, clock: Clock) -> None:
    text, token = await tokens.create(60)
    clock.forward(60)
    with pytest.raises(Refused, match=f"token {token.id} expired at 2026-01-01 00:01:00 UTC: make a new one"):
        await tokens.redeem(text, "gpu-01", "key")
    assert [found.state(clock()) for found in await tokens.list()] == ["expired"]


async def test_a_token_can_be_revoked(tokens: Tokens, clock: Clock) -> None:
    text, token = await tokens.create(60)
    assert (await tokens.revoke(token.id)).state(clock()) == "revoked"
    with pytest.raises(Refused, match=f"token {token.id} was revoked at"):
        await tokens.redeem(text, "gpu-01", "key")


async def test_revoking_a_used_token_leaves_it_used(tokens: Tokens, clock: Clock) -> None:
    text, token = await tokens.create(60)
    await tokens.redeem(text, "gpu-01", "key")
    assert (await tokens.revoke(token.id)).state(clock()) == "used"


async def test_a_token_that_is_not_there_cannot_be_revoked(tokens: Tokens) -> None:
    with pytest.raises(NotFound, match="there is no token 'nope'"):
        await tokens.revoke("nope")


async def test_a_token_for_one_node_is_refused_to_another(tokens: Tokens) -> None:
    text, _ = await tokens.create(60, node="gpu-01")
    with pytest.raises(Refused, match="this token is for gpu-01, not for gpu-02: join with --name gpu-01"):
        await tokens.redeem(text, "gpu-02", "key")
    assert (await tokens.redeem(text, "gpu-01", "key")).used_by == "gpu-01"


async def test_a_wrong_secret_and_a_wrong_id_are_refused_in_the_same_words(tokens: Tokens) -> None:
    text, token = await tokens.create(60)
    _, id, secret, _ = text.split(".")
    words = set()
    for wrong in (f"llmgw1.{id}.{'x' * 43}.{FINGERPRINT}", f"llmgw1.aaaaaaaa.{secret}.{FINGERPRINT}"):
        with pytest.raises(Refused) as caught:
            await tokens.redeem(wrong, "gpu-01", "key")
        words.add(str(caught.value))
    assert len(words) == 1
    assert token.id not in words.pop()


@pytest.mark.parametrize(
    "text", ["", "llmgw1.a", "llmgw1.a.b", "llmgw2.a.b.c", "llmgw1.a/b.c.d", "llmgw1...", "x" * 1000]
)
async def test_what_is_no_token_is_refused_without_being_repeated(tokens: Tokens, text: str) -> None:
    with pytest.raises(Refused, match="this is not a join token") as caught:
        await tokens.redeem(text, "gpu-01", "key")
    assert not text or text not in str(caught.value)


async def test_the_secret_is_stored_nowhere(tokens: Tokens, store: MemoryStore) -> None:
    text, _ = await tokens.create(60, note="rack 7")
    secret = text.split(".")[2].encode()
    snapshot = await store.load("")
    assert snapshot.values
    assert not any(secret in value for value in snapshot.values.values())
    assert not any(text in repr(token) for token in await tokens.list())


async def test_the_token_carries_the_fingerprint_of_the_ca(tokens: Tokens) -> None:
    text, _ = await tokens.create(60)
    assert text.rpartition(".")[2] == FINGERPRINT


async def test_tokens_outlive_the_plane(store: MemoryStore, clock: Clock) -> None:
    text, _ = await Tokens(store, FINGERPRINT, clock).create(60)
    assert await Tokens(store, FINGERPRINT, clock).redeem(text, "gpu-01", "key")


async def test_tokens_that_are_long_over_are_forgotten(tokens: Tokens, clock: Clock) -> None:
    await tokens.create(60, note="old")
    clock.forward(8 * 86400)
    await tokens.create(60, note="new")
    assert [token.note for token in await tokens.list()] == ["new"]


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), 366 * 86400])
async def test_a_life_that_cannot_be_meant_is_refused(tokens: Tokens, ttl: float) -> None:
    with pytest.raises(BadInput, match="a token cannot live for"):
        await tokens.create(ttl)


async def test_a_name_that_cannot_be_one_is_refused_before_anything_is_made(tokens: Tokens) -> None:
    with pytest.raises(BadInput, match="cannot be a name"):
        await tokens.create(60, node="not a name")
    with pytest.raises(BadInput, match="needs the node's name: add --node NAME"):
        await tokens.create(60, replace=True)
    assert await tokens.list() == ()


async def test_checking_a_token_does_not_use_it(tokens: Tokens) -> None:
    text, _ = await tokens.create(60)
    await tokens.check(text, "gpu-01", "key")
    assert (await tokens.redeem(text, "gpu-02", "key")).used_by == "gpu-02"
