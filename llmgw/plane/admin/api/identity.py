"""Who may join and who holds what: join tokens and certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from quart import Blueprint, Response

from llmgw.plane.admin.answers import answer, body
from llmgw.plane.tokens import DEFAULT_LIFE, Token
from llmgw.wire.api import CertsReply, CertView, DoneReply, TokenReply, TokensReply, TokenView

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


class NewToken(Struct, frozen=True, forbid_unknown_fields=True):
    """A wanted join token: for how many seconds, for which node ("": any)."""

    seconds: float = DEFAULT_LIFE
    node: str = ""
    note: str = ""
    replace: bool = False


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("identity", __name__)

    @part.post("/tokens")
    async def create() -> Response:
        wanted = await body(NewToken)
        text, token = await admin.tokens.create(
            wanted.seconds, node=wanted.node or None, note=wanted.note, replace=wanted.replace
        )
        return answer(
            TokenReply(
                id=token.id,
                token=text,
                expires_clock=token.expires,
                expires_in=token.expires - admin.wall(),
                plane=admin.agents_url,
            ),
            201,
        )

    @part.get("/tokens")
    async def tokens() -> Response:
        now = admin.wall()
        return answer(TokensReply(tokens=tuple(token_view(token, now) for token in await admin.tokens.list())))

    @part.delete("/tokens/<id>")
    async def revoke(id: str) -> Response:
        state = (await admin.tokens.revoke(id)).state(admin.wall())
        return answer(DoneReply(text=f"token {id} is {state}"))

    @part.get("/certs")
    async def certs() -> Response:
        now = admin.wall()
        return answer(
            CertsReply(
                certs=tuple(
                    CertView(
                        name=found.name,
                        role=found.role,
                        serial=found.serial,
                        state=found.state(now),
                        issued_clock=found.issued,
                        expires_clock=found.not_after,
                        expires_in=found.not_after - now,
                        renews=found.renews,
                        token=found.token,
                        revoked_clock=found.revoked_at,
                        why=found.why,
                    )
                    for found in admin.authority.list()
                )
            )
        )

    return part


def token_view(token: Token, now: float) -> TokenView:
    return TokenView(
        id=token.id,
        state=token.state(now),
        node=token.node,
        note=token.note,
        replace=token.replace,
        created_clock=token.created,
        expires_clock=token.expires,
        expires_in=token.expires - now,
        used_clock=token.used_at,
        used_by=token.used_by,
        used_from=token.used_from,
    )
