"""A source that cannot be meant, as a node says it: weights that cannot be had."""

from __future__ import annotations

from llmgw import sources
from llmgw.node.weights.errors import FetchFailed
from llmgw.sources import BadSource, HubSource, WebSource


def parse(source: str) -> HubSource | WebSource:
    """Read a source. Raises FetchFailed for one that cannot be meant."""
    try:
        return sources.parse(source)
    except BadSource as error:
        raise FetchFailed(error.what, remedy=error.remedy) from None
