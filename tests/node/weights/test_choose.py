from __future__ import annotations

import pytest

from llmgw.node.weights.choose import chosen, entry_of
from llmgw.node.weights.errors import FetchFailed
from llmgw.node.weights.manifest import File


def names(*there: str, inside: str = "", source: str = "hf://o/m") -> list[str]:
    return [file.name for file in chosen([File(name=name, size=1) for name in there], inside, source)]


def test_safetensors_are_taken_and_the_same_weights_in_other_forms_are_not() -> None:
    there = [".gitattributes", "README.md", "config.json", "tokenizer.model", "model-00001-of-00002.safetensors",
             "model-00002-of-00002.safetensors", "pytorch_model.bin", "tf_model.h5", "q4.gguf",
             "original/consolidated.00.pth", "onnx/model.onnx", "consolidated.safetensors"]  # fmt: skip
    assert names(*there) == ["README.md", "config.json", "tokenizer.model", "model-00001-of-00002.safetensors",
                             "model-00002-of-00002.safetensors"]  # fmt: skip


def test_consolidated_tensors_alone_are_the_model() -> None:
    assert names("params.json", "consolidated.safetensors") == ["params.json", "consolidated.safetensors"]


def test_one_gguf_model_in_parts_is_one_model() -> None:
    there = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert names("README.md", *there) == ["README.md", *there]
    assert entry_of([File(name=name, size=1) for name in reversed(there)], "") == there[0]


def test_several_gguf_models_have_to_be_named() -> None:
    with pytest.raises(FetchFailed, match=r"several models: q4\.gguf, q8\.gguf.*hf://o/m@main/q4\.gguf"):
        names("q4.gguf", "q8.gguf")


def test_a_part_that_is_named_means_all_parts() -> None:
    there = ("d/m-00001-of-00002.gguf", "d/m-00002-of-00002.gguf", "d/other.gguf")
    assert names(*there, inside="d/m-00001-of-00002.gguf") == list(there[:2])


def test_a_folder_means_what_is_in_it() -> None:
    assert names("a/x.gguf", "ab/y.gguf", "z.gguf", inside="a/") == ["a/x.gguf"]


def test_what_is_not_there_names_what_is_near() -> None:
    with pytest.raises(FetchFailed, match=r"has no q4\.guf: did you mean q4\.gguf"):
        names("q4.gguf", inside="q4.guf")


def test_pytorch_weights_are_taken_where_there_is_nothing_else() -> None:
    assert names("config.json", "pytorch_model.bin") == ["config.json", "pytorch_model.bin"]


def test_a_repository_without_weights_says_so() -> None:
    with pytest.raises(FetchFailed, match="holds no weights"):
        names("README.md", "config.json")
