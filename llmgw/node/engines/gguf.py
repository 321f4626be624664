"""The header of a GGUF file (versions 2 and 3 of the format, little-endian): its metadata and how long it must be."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping

import attrs

#: Bytes of the fixed value types by their numbers; 8 is a string and 9 an array.
_FIXED = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
#: (values in a block, bytes of a block) of ggml's tensor types by their numbers. A type not listed counts as no bytes.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
_MOST_ENTRIES = 1 << 20
_MOST_TENSORS = 1 << 20


class Broken(Exception):
    """Bytes that are no GGUF header, with what is wrong."""


@attrs.frozen
class Header:
    """Metadata (arrays left out) and `end`, the least length in bytes of the whole file."""

    entries: Mapping[str, int | float | str | bool]
    end: int

    def whole(self, key: str) -> int | None:
        value = self.entries.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def architecture(self) -> str:
        return str(self.entries.get("general.architecture", ""))

    def _of_architecture(self, key: str) -> int | None:
        return self.whole(f"{self.architecture}.{key}")

    @property
    def context(self) -> int | None:
        """The longest context in tokens that the model was trained for."""
        return self._of_architecture("context_length")

    @property
    def heads(self) -> int | None:
        return self._of_architecture("attention.head_count")

    @property
    def layers(self) -> int | None:
        return self._of_architecture("block_count")

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Of the cache with 16-bit values. None for models whose attention is not the same in every layer."""
        layers, heads, embd = (
            self.layers,
            self.heads,
            self._of_architecture("embedding_length"),
        )
        kv_heads = self._of_architecture("attention.head_count_kv")
        special = ("attention.sliding_window", "attention.kv_lora_rank", "ssm.state_size", "full_attention_interval")
        if not layers or not heads or not embd or not kv_heads or any(self._of_architecture(key) for key in special):
            return None
        key = self._of_architecture("attention.key_length") or embd // heads
        value = self._of_architecture("attention.value_length") or embd // heads
        return layers * kv_heads * (key + value) * 2


class _Reader:
    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def fixed(self, form: str) -> int | float | bool:
        try:
            (value,) = struct.unpack_from(form, self._data, self.at)
        except struct.error:
            raise Broken(f"cut off in its header, after {len(self._data)} bytes") from None
        self.at += struct.calcsize(form)
        assert isinstance(value, int | float)
        return value

    def count(self, form: str = "<Q") -> int:
        return int(self.fixed(form))

    def bytes(self) -> bytes:
        length = self.count()
        if self.at + length > len(self._data):
            raise Broken("cut off in its header, or not a model")
        self.at += length
        return self._data[self.at - length : self.at]

    def skip(self, kind: int, depth: int = 0) -> None:
        """Pass a value over."""
        if kind in _FIXED:
            self.at += struct.calcsize(_FIXED[kind])
        elif kind == _STRING:
            length = self.count()  # which moves `at` itself
            self.at += length
        elif kind == _ARRAY and depth < 4:
            inner, length = self.count("<I"), self.count()
            if inner in _FIXED:
                self.at += length * struct.calcsize(_FIXED[inner])
            else:
                for _ in range(length):
                    self.skip(inner, depth + 1)
                    self.within()
        else:
            raise Broken(f"a value of a kind ({kind}) that no version of the format has")
        self.within()

    def within(self) -> None:
        if self.at > len(self._data):
            raise Broken(f"cut off in its header, after {len(self._data)} bytes")


def header(data: bytes | mmap.mmap) -> Header:
    """Read a header. Raises Broken for anything else."""
    if data[:4] != b"GGUF":
        raise Broken("not a GGUF file")
    reader = _Reader(data)
    reader.at = 4
    version = reader.count("<I")
    if version not in (2, 3):
        raise Broken(f"GGUF version {version}, which is not 2 or 3" if version < 1 << 16 else "a big-endian GGUF")
    tensors, length = reader.count(), reader.count()
    if tensors > _MOST_TENSORS or length > _MOST_ENTRIES:
        raise Broken(f"a header with {tensors} tensors and {length} entries cannot be meant")
    entries: dict[str, int | float | str | bool] = {}
    for _ in range(length):
        key = reader.bytes().decode(errors="replace")
        kind = reader.count("<I")
        if kind in _FIXED:
            entries[key] = reader.fixed(_FIXED[kind])
        elif kind == _STRING:
            entries[key] = reader.bytes().decode(errors="replace")
        else:
            reader.skip(kind)
    last = 0
    for _ in range(tensors):
        reader.bytes()
        values = 1
        for _ in range(min(reader.count("<I"), 8)):
            values *= reader.count()
        in_block, block = _BLOCKS.get(reader.count("<I"), (1, 0))
        last = max(last, reader.count() + values // in_block * block)
    alignment = entries.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise Broken(f"an alignment of {alignment}")
    return Header(entries, reader.at + -reader.at % alignment + last if tensors else reader.at)
