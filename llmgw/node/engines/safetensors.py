"""The files of a model as hubs have them: which there are, whether each is whole, and the config.json beside them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from zipfile import is_zipfile

import attrs
import msgspec

_MOST_HEADER = 100 << 20  # the format's own limit


@attrs.frozen
class Config:
    """A model's shape as its config.json has it; None where that says nothing."""

    context: int | None = None
    heads: int | None = None
    kv_bytes_per_token: int | None = None
    error: str = ""
    layers: int | None = None
    dtype: str = ""


class _Shape(msgspec.Struct):
    max_position_embeddings: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    head_dim: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    text_config: dict[str, object] | None = None
    dtype: object = None
    torch_dtype: object = None  # as transformers called it before version 5


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def config(path: Path) -> Config:
    """Read config.json. What cannot be understood is left out; what is no JSON at all is an error."""
    try:
        raw = json.loads(path.read_bytes())
        if not isinstance(raw, dict):
            return Config(error=f"{path} is not an object")
        inner = raw.get("text_config")
        known = inner if isinstance(inner, dict) else raw  # models that see have their language half inside
        shape = msgspec.convert({key: value for key, value in known.items() if value is not None}, _Shape, strict=False)
        words = (shape.dtype, shape.torch_dtype, raw.get("dtype"), raw.get("torch_dtype"))
        dtype = next((word for word in words if isinstance(word, str)), "")
    except msgspec.ValidationError:
        return Config()
    except (OSError, ValueError, RecursionError) as error:
        return Config(error=f"{path} cannot be read: {error}")
    layers = shape.num_hidden_layers
    return Config(shape.max_position_embeddings, shape.num_attention_heads, _cache(shape), layers=layers, dtype=dtype)


def _cache(shape: _Shape) -> int | None:
    """Bytes of the cache for one token with 16-bit values: of grouped-query attention, or of a latent one."""
    layers, heads, hidden = shape.num_hidden_layers, shape.num_attention_heads, shape.hidden_size
    if not layers or shape.sliding_window or shape.layer_types:
        return None
    if shape.kv_lora_rank:
        return layers * (shape.kv_lora_rank + (shape.qk_rope_head_dim or 0)) * 2
    if not heads or not (shape.head_dim or hidden):
        return None
    return 2 * layers * (shape.num_key_value_heads or heads) * (shape.head_dim or (hidden or 0) // heads) * 2


#: What a model is saved as, the better first: its index, and its files.
_KINDS = (("model.safetensors.index.json", "*.safetensors"), ("pytorch_model.bin.index.json", "*.bin"))
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<parts>\d{5})(?P<suffix>\.\w+)")


def listed(folder: Path) -> tuple[tuple[str, ...], str]:
    """The files that make the model, and an error. With an index, what it lists; else all there are, and what their
    names say is there beside them (`model-00001-of-00003.safetensors`)."""
    for file, pattern in _KINDS:
        index = folder / file
        if index.is_file():
            try:
                names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
            except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                return (), f"{index} cannot be read: {error}"
            outside = sorted(name for name in names if "/" in name or name.startswith("."))
            if outside:
                return (), f"{index} names files outside the model's folder: {outside[0]}"
        else:
            names = {path.name for path in folder.glob(pattern)}
            names |= {part for each in map(_PART.fullmatch, names) if each for part in _parts(each, names)}
        if names:
            return tuple(sorted(names)), ""
    return (), ""


def _parts(one: re.Match[str], names: set[str]) -> Iterator[str]:
    """All parts of a model, by the name of one. Where there is one with number 0 the last may have the number before
    the count or the count itself, as published models have it: only the former is looked for."""
    count = int(one["parts"])
    last = count - 1 if _numbered(one, 0) in names else count
    return (_numbered(one, number) for number in range(1, min(last, 9999) + 1))


def _numbered(one: re.Match[str], number: int) -> str:
    return f"{one['stem']}-{number:05d}-of-{one['parts']}{one['suffix']}"


def cut_off(path: Path) -> str:
    """What is wrong with the end of a model's file; "" when it ends as it should. Raises OSError."""
    there = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(24)
    if first == b"version https://git-lfs.":
        return f"{path} is a pointer of Git LFS and not the file itself (`git lfs pull`)"
    if path.suffix == ".bin":
        # As PyTorch saves since 1.6: a zip, whose directory is at its end. What it saved before tells no length.
        broken = there == 0 or (first[:2] == b"PK" and not is_zipfile(path))
        return f"{path} has {there} bytes and no end: a download was probably cut off" if broken else ""
    due = expected_size(path)
    if due is None:
        return f"{path} does not begin as a safetensors file does"
    if there == due:
        return ""
    what = "a download was probably cut off" if there < due else "something else was written behind it"
    return f"{path} has {there} bytes of {due}: {what}"


def expected_size(path: Path) -> int | None:
    """How many bytes the file must have by its own header: 8, the header, and the end of the last tensor."""
    try:
        with path.open("rb") as file:
            first = file.read(8)
            if len(first) < 8:
                return None
            (length,) = struct.unpack("<Q", first)
            if length > _MOST_HEADER:
                return None
            entries = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        ends = [msgspec.json.decode(entry, type=_Tensor).data_offsets[1] for entry in entries.values()]
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return 8 + int(length) + max(ends, default=0)
