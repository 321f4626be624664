"""What a plane needs after its state was restored from a backup: an epoch that its agents still obey.

Every start of a plane takes the next epoch, and agents refuse a lower one than they have obeyed (D4). A restored
state counts from where the backup was made, which is below that.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import trio

from llmgw.errors import BadInput
from llmgw.plane.store.records import EPOCH
from llmgw.plane.store.sqlite import SqliteStore, reading

#: More starts than any plane has between two backups.
LEAP = 1000


async def raise_epoch(path: Path, *, at_least: int = 0, steps: tuple[str, ...] | None = None) -> int:
    """Raise the epoch in a state above any that an agent can have obeyed since the backup; the new one.

    `at_least`: one that is known to have been obeyed. `steps`: see `SqliteStore.open`.
    Raises LlmgwError while a plane runs on this state, and BadInput where there is none.
    """
    if not await trio.Path(path).is_file():
        raise BadInput(f"{path} is not there", remedy="put the backup there first")
    async with await SqliteStore.open(path, steps=steps) as store:
        known = (await store.load(EPOCH)).values.get(EPOCH, b"0")
        try:
            epoch = max(at_least, msgspec.json.decode(known, type=int)) + LEAP
        except msgspec.MsgspecError as error:
            raise BadInput(f"the stored epoch {known!r} cannot be read: {error}") from None
        await store.commit({EPOCH: msgspec.json.encode(epoch)})
    return epoch


def epoch_in(path: Path) -> int:
    """The epoch in a state that no plane has open; 0 where it cannot be read."""
    try:
        with reading(path) as db:
            row = db.execute("select value from entries where key = ?", (EPOCH,)).fetchone()
        return msgspec.json.decode(row[0], type=int) if row else 0
    except (sqlite3.Error, msgspec.MsgspecError, TypeError):
        return 0
