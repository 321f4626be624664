"""The plane's side of a join: a token for an identity, over a stream that has no certificate yet."""

from __future__ import annotations

import structlog
import trio

from llmgw import pki
from llmgw.errors import LlmgwError
from llmgw.plane.certs import Authority
from llmgw.plane.tokens import Tokens
from llmgw.wire.agent import Join
from llmgw.wire.codec import MOST_BYTES_STRANGER, Broken, agent_codec, encode
from llmgw.wire.control import Joined, JoinHello
from llmgw.wire.stream import Closed, Frames

log = structlog.get_logger("llmgw.joining")

#: How long a stranger may take to say what it wants.
JOIN_WITHIN = 10.0


async def answer_join(frames: Frames, address: str, *, authority: Authority, tokens: Tokens) -> None:
    """Say who we are, take one Join, answer it. The caller closes. Raises Closed when the stranger leaves."""
    await frames.send(encode(JoinHello(ca=authority.ca_pem)))
    join: Join | None = None
    with trio.move_on_after(JOIN_WITHIN):
        join = _join(await frames.receive())
    if join is None:
        log.warning("join refused", address=address, reason="no Join came in time, or something else did")
        await frames.send(encode(Joined(error=f"a Join is due within {JOIN_WITHIN:g} s, and nothing else")))
        return
    try:
        certificate = await _admit(join, address, authority, tokens)
    except LlmgwError as error:
        log.warning("join refused", address=address, node=join.node, reason=str(error))
        await frames.send(encode(Joined(error=str(error))))
        return
    log.info("node joined", node=join.node, address=address, version=join.version)
    await frames.send(encode(Joined(node=join.node, certificate=certificate, ca=authority.ca_pem)))
    with trio.move_on_after(JOIN_WITHIN):
        # The node leaves when it has it all; until then closing could cut the answer off.
        try:
            await frames.receive()
        except Closed:
            return


async def refuse_join(frames: Frames, address: str) -> None:
    """What a plane in insecure mode answers: there is no identity to be had."""
    log.warning("join refused", address=address, reason="this plane runs without certificates")
    await frames.send(encode(Joined(error="this plane runs in insecure mode, without certificates: no join is needed")))


async def _admit(join: Join, address: str, authority: Authority, tokens: Tokens) -> str:
    pki.check_name(join.node)
    mark = pki.key_mark(pki.requested_key(join.csr))
    token = await tokens.check(join.token, join.node, mark)
    again = token.used_at is not None  # the same node with the same key: its answer was lost
    if not (token.replace or again):
        authority.refuse_taken(join.node)
    token = await tokens.redeem(join.token, join.node, mark, address)
    return await authority.issue(join.node, join.csr, replace=token.replace or again, token=token.id)


def _join(data: bytes) -> Join | None:
    if len(data) > MOST_BYTES_STRANGER:
        return None
    try:
        frame = agent_codec.decode(data)
    except Broken:
        return None
    return frame if isinstance(frame, Join) else None
