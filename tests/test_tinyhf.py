import json
import struct
from pathlib import Path

import pytest

from llmgw.node.engines.contents import read_contents
from llmgw.tinyhf import write_tiny_hf
from llmgw.tinymodel import vocabulary


@pytest.mark.parametrize("parts", [1, 3])
def test_a_hubs_model_is_complete_and_says_its_shape(tmp_path: Path, parts: int) -> None:
    folder = write_tiny_hf(tmp_path / "m", layers=3, parts=parts, context=512)
    found = read_contents(folder)
    assert (found.kind, found.faults, found.layers, found.heads, found.context) == ("hub", (), 3, 4, 512)
    assert len(list(folder.glob("*.safetensors"))) == parts


def test_an_embedding_is_one_axis_and_a_norm_is_ones(tmp_path: Path) -> None:
    data = (write_tiny_hf(tmp_path) / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    tensors = json.loads(data[8 : 8 + length])

    def values(name: str) -> list[float]:
        start, end = tensors[name]["data_offsets"]
        halves = struct.unpack(f"<{(end - start) // 2}H", data[8 + length + start : 8 + length + end])
        return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]

    assert set(values("model.norm.weight")) == {1.0}
    embedding = values("model.embed_tokens.weight")
    assert {sum(embedding[row : row + 256]) for row in range(0, len(embedding), 256)} == {1.0}
    assert sum(value > -0.5 for value in values("lm_head.weight")) > 100, "words follow words"


def test_its_tokens_are_those_of_the_other_model_each_at_its_number(tmp_path: Path) -> None:
    tokenizer = json.loads((write_tiny_hf(tmp_path) / "tokenizer.json").read_text())
    assert tuple(token for token, _ in tokenizer["model"]["vocab"]) == vocabulary().tokens
    assert [token["id"] for token in tokenizer["added_tokens"]] == [0, 1, 2, 3, 4]


def test_shapes_that_no_llama_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="heads must divide embd"):
        write_tiny_hf(tmp_path, embd=250)
