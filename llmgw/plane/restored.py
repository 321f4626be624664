"""What a plane needs after its state was restored from a backup: an epoch that its agents still obey.

Every start of a plane takes the next epoch, and agents refuse a lower one than they have obeyed (D4). A restored
state counts from where the backup was made, which is below that.
"""

from __future__ import annotations

import msgspec

from llmgw.errors import BadInput
from llmgw.plane.settings import PlaneSettings
from llmgw.plane.store.records import EPOCH
from llmgw.plane.store.sqlite import SqliteStore

#: More starts than any plane has between two backups.
LEAP = 1000


async def raise_epoch(settings: PlaneSettings) -> int:
    """Raise the stored epoch above any that an agent can have obeyed since the backup; the new one.

    Raises LlmgwError while a plane runs on this state, and BadInput where there is none.
    """
    path = settings.path(settings.store)
    if not path.is_file():
        raise BadInput(f"{path} is not there", remedy="put the backup there first")
    async with await SqliteStore.open(path) as store:
        known = (await store.load(EPOCH)).values.get(EPOCH, b"0")
        try:
            epoch = msgspec.json.decode(known, type=int) + LEAP
        except msgspec.MsgspecError as error:
            raise BadInput(f"the stored epoch {known!r} cannot be read: {error}") from None
        await store.commit({EPOCH: msgspec.json.encode(epoch)})
    return epoch
