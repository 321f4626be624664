"""Epochs: the number that grows each time a plane begins to lead, and fences earlier ones off (D4)."""

from __future__ import annotations

from llmgw.plane.store import Moved, Store

KEY = "plane/epoch"


async def next_epoch(store: Store) -> int:
    """Take the next epoch. Two planes that ask at once get different ones."""
    while True:
        snapshot = await store.load(KEY)
        epoch = int(snapshot.values.get(KEY, b"0")) + 1
        try:
            await store.commit({KEY: str(epoch).encode()}, if_revision=snapshot.revision)
        except Moved:
            continue
        return epoch
