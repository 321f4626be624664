"""A real model in a blink: a llama-architecture GGUF that a llama.cpp server loads and talks with.

For demos and tests that must not download anything. The engine runs a genuine forward pass over it
(attention, KV cache, feed-forward, norms, sampling), yet nothing was trained: every block adds nothing to
the residual stream, each word's embedding is an axis of its own, and the head holds the logarithms of how
often one word follows another in the few sentences below. So what is sampled is a walk through those
sentences: readable English that ends by itself with the end-of-turn token. Temperature 0 and a fixed seed
repeat a text exactly. With `noise` the blocks do add a little, and the text depends on more than the last word.

Nothing but the standard library is needed, and nothing of ours.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

SENTENCES = """\
A model is loaded from its weights. The weights lie on the disk of every node that serves the model.
The plane looks at the fleet and chooses a node for every replica. A node with enough memory takes the replica.
The engine reads the weights and then it answers requests. An answer comes as a stream of small words.
A request goes through the gateway to the replica with the shortest queue. The gateway waits while an engine loads.
When an engine dies the node tells the plane and the plane starts a new one.
No request is lost when the first word is still to come.
The fabric carries what the nodes say to each other. A slow link makes the whole replica slow.
Look at the map of the fabric and find the slow link. The node measures the link and the plane keeps the result.
Every node sends a short report and the plane listens. A silent node is first unreachable and later it is lost.
Nothing is started twice and nothing is stopped by guess. The engine lives on when the agent stops.
"""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

SPACE = "\u2581"  # how SentencePiece writes the space before a word
UNKNOWN, BEGIN, END, TURN, TURN_END = range(5)
_CONTROL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")

# Of the GGUF specification, version 3: value types, tensor types, token types, alignment.
_UINT16, _UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 2, 4, 5, 6, 7, 8, 9
_F32, _F16 = 0, 1
_NORMAL_TOKEN, _UNKNOWN_TOKEN, _CONTROL_TOKEN, _BYTE_TOKEN = 1, 2, 3, 6
_ALIGNMENT = 32


class Vocabulary(NamedTuple):
    """Tokens in the order of their numbers, and for each word (and full stop) of the sentences its number."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    scores: tuple[float, ...]
    words: dict[str, int]


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # fastest dimension first, as GGUF has it
    kind: int
    data: bytes


def _spoken() -> list[str]:
    """The sentences as the tokens a tokenizer will make of them."""
    return [word if word == "." else SPACE + word for word in SENTENCES.replace(".", " .").split()]


def vocabulary() -> Vocabulary:
    """Control tokens, all bytes, printable ASCII, and every word with all its beginnings.

    SentencePiece joins neighbours two at a time, best score first, so a word is only found when each of its
    beginnings is a token as well and longer pieces score higher.
    """
    words = list(dict.fromkeys(_spoken()))
    beginnings = (word[:length] for word in words for length in range(1, len(word) + 1))
    pieces = dict.fromkeys([SPACE, *map(chr, range(33, 127)), *beginnings])
    tokens = [*_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [_UNKNOWN_TOKEN, *[_CONTROL_TOKEN] * 4, *[_BYTE_TOKEN] * 256, *[_NORMAL_TOKEN] * len(pieces)]
    scores = [*[0.0] * 261, *(len(piece) - 100.0 for piece in pieces)]
    number = {token: at for at, token in enumerate(tokens)}
    return Vocabulary(tuple(tokens), tuple(kinds), tuple(scores), {word: number[word] for word in words})


def followers(words: Sequence[str], numbers: dict[str, int]) -> dict[int | None, dict[int, float]]:
    """For each token the probabilities of the next one. None is the beginning of a sentence.

    After a full stop the turn ends once in three times; else another sentence begins.
    """
    counts: dict[int | None, Counter[int]] = {}
    before: int | None = None
    for word in words:
        counts.setdefault(before, Counter())[numbers[word]] += 1
        before = None if word == "." else numbers[word]
    chances: dict[int | None, dict[int, float]] = {
        token: {after: count / row.total() for after, count in row.items()} for token, row in counts.items()
    }
    chances[numbers["."]] = {TURN_END: 1 / 3, **{after: chance * 2 / 3 for after, chance in chances[None].items()}}
    return chances


def tables(words: Vocabulary, embd: int) -> tuple[bytes, bytes]:
    """The embedding and the head, as rows of 16-bit floats, one row for each token."""
    axes = {number: axis for axis, number in enumerate(words.words.values(), start=1)}  # axis 0: all other tokens
    if len(axes) >= embd:
        raise ValueError(f"embd must be at least {len(axes) + 1}, so that each word has an axis of its own")
    # The norm before the head makes a vector of length sqrt(embd) out of an axis.
    scale = 1.0 / math.sqrt(embd)
    never = struct.pack("<e", -14.0 * scale)
    one = struct.pack("<e", 1.0)
    embedding = bytearray(2 * embd * len(words.tokens))
    for token in range(len(words.tokens)):
        struct.pack_into("2s", embedding, 2 * (token * embd + axes.get(token, 0)), one)
    head = bytearray((never * (len(axes) + 1) + bytes(2 * (embd - len(axes) - 1))) * len(words.tokens))
    for before, row in followers(_spoken(), words.words).items():
        axis = 0 if before is None else axes[before]
        for after, chance in row.items():
            struct.pack_into("<e", head, 2 * (after * embd + axis), math.log(chance) * scale)
    return bytes(embedding), bytes(head)


class _Noise:
    """Matrices of 16-bit floats spread evenly between -size and size; all zero for size 0."""

    def __init__(self, size: float, seed: int) -> None:
        self._random = random.Random(seed) if size else None
        levels = [struct.pack("<e", size * (level - 127.5) / 127.5) for level in range(256)]
        # A random byte picks a level; translating its halves apart is what makes this fast.
        self._low = bytes(level[0] for level in levels)
        self._high = bytes(level[1] for level in levels)

    def matrix(self, rows: int, columns: int) -> bytes:
        values = bytearray(2 * rows * columns)
        if self._random is not None:
            picks = self._random.randbytes(rows * columns)
            values[0::2] = picks.translate(self._low)
            values[1::2] = picks.translate(self._high)
        return bytes(values)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _text(key: str, value: str) -> bytes:
    return _entry(key, _STRING, _string(value))


def _uint(key: str, value: int) -> bytes:
    return _entry(key, _UINT32, struct.pack("<I", value))


def _float(key: str, value: float) -> bytes:
    return _entry(key, _FLOAT32, struct.pack("<f", value))


def _flag(key: str, value: bool) -> bytes:
    return _entry(key, _BOOL, struct.pack("<?", value))


def _array(key: str, kind: int, values: Sequence[bytes]) -> bytes:
    return _entry(key, _ARRAY, struct.pack("<IQ", kind, len(values)) + b"".join(values))


def _write(path: Path, entries: Sequence[bytes], tensors: Iterable[Tensor]) -> None:
    tensors = list(tensors)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries)
    at = 0
    for tensor in tensors:
        head += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + struct.pack("<IQ", tensor.kind, at)
        at += len(tensor.data) + -len(tensor.data) % _ALIGNMENT
    # Beside the file and renamed: whoever sees the name sees a whole file.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(head + bytes(-len(head) % _ALIGNMENT))
        for tensor in tensors:
            file.write(tensor.data + bytes(-len(tensor.data) % _ALIGNMENT))
    partial.replace(path)


def check_shape(embd: int, heads: int, kv_heads: int) -> None:
    """Raises ValueError for shapes that no llama has."""
    if embd % heads or heads % kv_heads or (embd // heads) % 2:
        raise ValueError("heads must divide embd into even parts, and kv_heads must divide heads")


def write_tiny(
    path: Path,
    *,
    name: str = "tiny",
    layers: int = 2,
    embd: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    feed_forward: int = 256,
    context: int = 4096,
    noise: float = 0.0,
    seed: int = 1,
    parts: int = 1,
) -> Path:
    """Write the model; the path of its file. In `parts`, the path of the first part, the one an engine is given.

    Larger `layers`, `embd` and `feed_forward` make it slower and heavier (12, 512, 1536: 77 MB). `noise` around
    0.02 keeps the text readable. Raises ValueError for shapes that no llama has.
    """
    check_shape(embd, heads, kv_heads)
    words = vocabulary()
    embedding, head = tables(words, embd)
    ones = struct.pack("<f", 1.0) * embd
    kv = embd // heads * kv_heads
    size = len(words.tokens)
    blocks = _Noise(noise, seed)
    tensors = [Tensor("token_embd.weight", (embd, size), _F16, embedding)]
    for layer in range(layers):
        shapes = {"attn_q": (embd, embd), "attn_k": (embd, kv), "attn_v": (embd, kv), "attn_output": (embd, embd)}
        shapes |= {"ffn_gate": (embd, feed_forward), "ffn_up": (embd, feed_forward), "ffn_down": (feed_forward, embd)}
        tensors += [Tensor(f"blk.{layer}.{norm}.weight", (embd,), _F32, ones) for norm in ("attn_norm", "ffn_norm")]
        tensors += [
            Tensor(f"blk.{layer}.{part}.weight", shape, _F16, blocks.matrix(*shape)) for part, shape in shapes.items()
        ]
    tensors += [
        Tensor("output_norm.weight", (embd,), _F32, ones),
        Tensor("output.weight", (embd, size), _F16, head),
    ]
    entries = [
        _text("general.architecture", "llama"),
        _text("general.name", name),
        _uint("general.alignment", _ALIGNMENT),
        _uint("general.file_type", 1),
        _uint("llama.vocab_size", size),
        _uint("llama.context_length", context),
        _uint("llama.embedding_length", embd),
        _uint("llama.block_count", layers),
        _uint("llama.feed_forward_length", feed_forward),
        _uint("llama.attention.head_count", heads),
        _uint("llama.attention.head_count_kv", kv_heads),
        _float("llama.attention.layer_norm_rms_epsilon", 1e-6),
        _uint("llama.rope.dimension_count", embd // heads),
        _float("llama.rope.freq_base", 10000.0),
        _text("tokenizer.ggml.model", "llama"),
        _text("tokenizer.ggml.pre", "default"),
        _array("tokenizer.ggml.tokens", _STRING, [_string(token) for token in words.tokens]),
        _array("tokenizer.ggml.scores", _FLOAT32, [struct.pack("<f", score) for score in words.scores]),
        _array("tokenizer.ggml.token_type", _INT32, [struct.pack("<i", kind) for kind in words.kinds]),
        _uint("tokenizer.ggml.bos_token_id", BEGIN),
        _uint("tokenizer.ggml.eos_token_id", END),
        _uint("tokenizer.ggml.eot_token_id", TURN_END),
        _uint("tokenizer.ggml.unknown_token_id", UNKNOWN),
        _flag("tokenizer.ggml.add_bos_token", True),
        _flag("tokenizer.ggml.add_space_prefix", True),
        _text("tokenizer.chat_template", CHAT_TEMPLATE),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    if parts == 1:
        _write(path, entries, tensors)
        return path
    stem, share = path.name.removesuffix(".gguf"), -(-len(tensors) // parts)
    paths = [path.with_name(f"{stem}-{part:05d}-of-{parts:05d}.gguf") for part in range(1, parts + 1)]
    for part, file in enumerate(paths):
        split = [
            _entry("split.no", _UINT16, struct.pack("<H", part)),
            _entry("split.count", _UINT16, struct.pack("<H", parts)),
            _entry("split.tensors.count", _INT32, struct.pack("<i", len(tensors))),
        ]
        _write(file, [*(entries if part == 0 else ()), *split], tensors[part * share : (part + 1) * share])
    return paths[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m llmgw.tinymodel", description="Write a tiny model that talks.")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--name", default="tiny")
    for option, default in {"layers": 2, "embd": 256, "feed-forward": 256, "context": 4096, "seed": 1}.items():
        parser.add_argument(f"--{option}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--noise", type=float, default=0.0, help="about 0.02 makes the text depend on the whole context"
    )
    parser.add_argument("--parts", type=int, default=1, help="write the model in so many files")
    given = parser.parse_args()
    try:
        path = write_tiny(
            given.out,
            name=given.name,
            layers=given.layers,
            embd=given.embd,
            feed_forward=given.feed_forward,
            context=given.context,
            noise=given.noise,
            seed=given.seed,
            parts=given.parts,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
