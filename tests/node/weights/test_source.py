from __future__ import annotations

import pytest

from llmgw.node.weights.errors import FetchFailed
from llmgw.node.weights.source import parse


def test_a_source_that_cannot_be_meant_is_weights_that_are_missing() -> None:
    with pytest.raises(FetchFailed, match=r"'nope' is no source of weights: use hf://") as raised:
        parse("nope")
    assert raised.value.code == "missing-weights"
