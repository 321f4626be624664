"""Join tokens and certificates, one line each. Pure."""

from __future__ import annotations

from rich.console import RenderableType

from llmgw.ctl.client import Answer
from llmgw.ctl.show import Column, age, columns, when, word, words
from llmgw.wire.api import CertsReply, TokensReply

_TOKENS = (
    Column("ID"),
    Column("STATE"),
    Column("FOR NODE"),
    Column("EXPIRES"),
    Column("USED BY"),
    Column("USED", extra=2),
    Column("FROM", extra=3),
    Column("NOTE", extra=1),
)


def tokens(answer: Answer, width: int) -> RenderableType:
    rows = (
        (
            t.id,
            word(t.state),
            words(t.node or "any", "(replaces)" if t.replace else ""),
            f"in {age(t.expires_in)}" if t.expires_in > 0 and t.state == "open" else when(t.expires_clock),
            t.used_by,
            when(t.used_clock),
            t.used_from,
            t.note,
        )
        for t in answer.read(TokensReply).tokens
    )
    return columns(_TOKENS, rows, nothing="no token (`llmgw ctl token create`)", width=width)


_CERTS = (
    Column("NAME"),
    Column("ROLE"),
    Column("STATE"),
    Column("EXPIRES"),
    Column("ISSUED", extra=2),
    Column("WHY", extra=1),
    Column("SERIAL", extra=3),
)


def certs(answer: Answer, width: int) -> RenderableType:
    rows = (
        (
            c.name,
            c.role,
            word(c.state),
            f"in {age(c.expires_in)}" if c.expires_in > 0 else f"{age(-c.expires_in)} ago",
            when(c.issued_clock),
            c.why,
            c.serial,
        )
        for c in answer.read(CertsReply).certs
    )
    return columns(_CERTS, rows, nothing="no certificate was given out", width=width)
