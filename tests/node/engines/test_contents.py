import json
import struct
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.engines.contents import read_contents
from llmgw.node.engines.gguf import Broken, header
from llmgw.tinymodel import write_tiny


def test_a_gguf_tells_its_shape(tmp_path: Path) -> None:
    contents = read_contents(write_tiny(tmp_path / "m.gguf", context=2048))
    assert (contents.kind, contents.context, contents.heads, contents.faults) == ("gguf", 2048, 4, ())
    assert contents.kv_bytes_per_token == 1024  # 2 layers, 2 KV heads of 64, keys and values, 2 bytes


def test_a_folder_with_one_model_is_that_model(tmp_path: Path) -> None:
    first = write_tiny(tmp_path / "m.gguf", parts=3)
    contents = read_contents(tmp_path)
    assert (contents.path, contents.faults) == (first, ())
    assert contents.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("missing", [1, 64, 4096, 1_000_000, 2_300_000])
def test_a_gguf_without_its_end_is_broken(tmp_path: Path, missing: int) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-missing])
    assert [fault.code for fault in read_contents(path).faults] == ["broken-weights"]


def test_a_missing_and_a_cut_off_part_are_named(tmp_path: Path) -> None:
    first = write_tiny(tmp_path / "m.gguf", parts=4)
    (tmp_path / "m-00002-of-00004.gguf").unlink()
    third = tmp_path / "m-00003-of-00004.gguf"
    third.write_bytes(third.read_bytes()[:-10_000])
    faults = read_contents(first).faults
    assert [fault.code for fault in faults] == ["missing-weights", "broken-weights"]
    assert "m-00002-of-00004.gguf" in faults[0].text
    assert "m-00003-of-00004.gguf" in faults[1].text


def test_another_part_than_the_first_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m.gguf", parts=2)
    (fault,) = read_contents(tmp_path / "m-00002-of-00002.gguf").faults
    assert "first" in fault.text


def test_nothing_there_is_a_fault_and_no_traceback(tmp_path: Path) -> None:
    assert [fault.code for fault in read_contents(tmp_path / "x.gguf").faults] == ["missing-weights"]
    assert [fault.code for fault in read_contents(tmp_path).faults] == ["missing-weights"]


def hub(folder: Path, *, cut: int = 0, index: list[str] | None = None) -> Path:
    shape = {
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "hidden_size": 4096,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    head = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "F16", "shape": [50], "data_offsets": [0, 100]}}
    ).encode()
    data = struct.pack("<Q", len(head)) + head + bytes(100)
    (folder / "model-1.safetensors").write_bytes(data[: len(data) - cut])
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: n for n in index}}))
    return folder


def test_a_hub_folder_tells_its_shape(tmp_path: Path) -> None:
    contents = read_contents(hub(tmp_path))
    assert (contents.kind, contents.context, contents.heads, contents.faults) == ("hub", 8192, 32, ())
    assert contents.kv_bytes_per_token == 2 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ({}, ""),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": {"odd": 1}}, ""),
        ({"text_config": {"num_hidden_layers": 2}, "torch_dtype": "float16"}, "float16"),
    ],
)
def test_a_config_tells_how_wide_the_values_are(tmp_path: Path, more: dict[str, object], dtype: str) -> None:
    path = hub(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    assert read_contents(tmp_path).dtype == dtype


@pytest.mark.parametrize(
    ("cut", "index", "codes"),
    [
        (1, None, ["broken-weights"]),
        (150, None, ["broken-weights"]),
        (0, ["model-1.safetensors", "model-2.safetensors"], ["missing-weights"]),
        (0, ["../x.safetensors"], ["broken-weights"]),
    ],
)
def test_a_hub_folder_that_is_not_whole_says_what_lacks(
    tmp_path: Path, cut: int, index: list[str] | None, codes: list[str]
) -> None:
    assert [fault.code for fault in read_contents(hub(tmp_path, cut=cut, index=index)).faults] == codes


def safetensors(folder: Path, name: str) -> None:
    (folder / name).write_bytes((hub(folder) / "model-1.safetensors").read_bytes())
    (folder / "model-1.safetensors").unlink()


def test_parts_that_were_not_downloaded_are_missed_without_an_index_too(tmp_path: Path) -> None:
    """A download that was interrupted before the index came (DL01)."""
    safetensors(tmp_path, "model-00002-of-00006.safetensors")
    (fault,) = read_contents(tmp_path).faults
    assert fault.code == "missing-weights"
    assert "5 of the model's 6 files are not there: model-00001-of-00006.safetensors, " in fault.text
    assert fault.text.endswith("model-00004-of-00006.safetensors and 2 more")


@pytest.mark.parametrize("last", [2, 3])
@pytest.mark.parametrize("index", [True, False])
def test_parts_that_count_from_0_are_whole(tmp_path: Path, last: int, index: bool) -> None:
    """As published: 0 to 159 of 160, and 0 to 2 of 2."""
    names = [f"model-{number:05d}-of-00003.safetensors" for number in range(last + 1)]
    for name in names:
        safetensors(tmp_path, name)
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: n for n in names}}))
    assert read_contents(tmp_path).faults == ()
    (tmp_path / names[2]).unlink()
    assert [fault.code for fault in read_contents(tmp_path).faults] == ["missing-weights"]


def test_an_index_knows_better_than_names(tmp_path: Path) -> None:
    safetensors(tmp_path, "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_contents(tmp_path).faults == ()


def test_what_pytorch_wrote_is_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    names = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for name in names:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("data.pkl", b"x" * 1000)
    assert read_contents(tmp_path).faults == ()
    first = tmp_path / names[0]
    first.write_bytes(first.read_bytes()[:-30])
    (tmp_path / names[1]).unlink()
    assert [fault.code for fault in read_contents(tmp_path).faults] == ["broken-weights", "missing-weights"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "pointer of Git LFS"),
        (b"", "does not begin as a safetensors file does"),
        (bytes(4096), "does not begin as a safetensors file does"),  # made room for, and never written
    ],
)
def test_a_file_that_is_something_else_says_what(tmp_path: Path, data: bytes, words: str) -> None:
    safetensors(tmp_path, "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(data)
    (fault,) = read_contents(tmp_path).faults
    assert fault.code == "broken-weights"
    assert words in fault.text


def test_more_than_a_file_should_have_is_not_called_cut_off(tmp_path: Path) -> None:
    safetensors(tmp_path, "model.safetensors")
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    (fault,) = read_contents(tmp_path).faults
    assert fault.text.endswith("something else was written behind it")


def test_a_config_without_weights_is_missing_weights_and_a_broken_config_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert [fault.code for fault in read_contents(tmp_path).faults] == ["broken-weights", "missing-weights"]


@given(st.binary(max_size=400))
def test_no_bytes_make_the_header_reader_do_anything_but_refuse(data: bytes) -> None:
    with pytest.raises(Broken):
        header(b"GGUF" + data[:3])
    with suppress(Broken):
        header(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + data)


@given(st.integers(24, 9000), st.integers(0, 255))
def test_one_wrong_byte_in_a_header_never_crashes_it(at: int, byte: int) -> None:
    data = bytearray(DATA)
    data[at] = byte
    with suppress(Broken):
        header(bytes(data))


def _data() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_tiny(Path(folder) / "m.gguf").read_bytes()[:20000]


DATA = _data()
