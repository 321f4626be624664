"""Why weights could not be had. `code` becomes the cause of the shard that waited for them."""

from __future__ import annotations

from llmgw.errors import LlmgwError


class FetchFailed(LlmgwError):
    """The files are not there and could not be brought."""

    code = "missing-weights"


class Unreachable(FetchFailed):
    """Nobody answered, or only with errors that pass: trying again later may help."""

    code = "weights-unreachable"
    #: Seconds after which the other side wants to be asked again; 0: it did not say.
    after: float = 0.0


class DiskFull(FetchFailed):
    """The disk of the cache has not the room."""

    code = "disk-full"


class BrokenWeights(FetchFailed):
    """What was brought is not what was announced."""

    code = "broken-weights"
