"""The model of `llmgw.tinymodel` as a hub has models: what vLLM and SGLang load, without any download.

A folder with config.json, tokenizer.json and safetensors files of 16-bit brain floats. It is the same walk through the
same sentences; nothing but the standard library is needed to write it.
"""

from __future__ import annotations

import argparse
import json
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path

from llmgw.tinymodel import (
    BEGIN,
    CHAT_TEMPLATE,
    END,
    SPACE,
    TURN_END,
    UNKNOWN,
    Vocabulary,
    check_shape,
    tables,
    vocabulary,
)

_SPECIAL = 5  # the first tokens are no text
_TEXT = 261  # and the next 256 are single bytes

#: A tensor's shape and its values.
Values = tuple[tuple[int, ...], bytes]


def _brain(halves: bytes) -> bytes:
    """16-bit floats as 16-bit brain floats: the upper half of a 32-bit one."""
    wide = array("f", struct.unpack(f"<{len(halves) // 2}e", halves)).tobytes()
    narrow = bytearray(len(halves))
    narrow[0::2], narrow[1::2] = wide[2::4], wide[3::4]
    return bytes(narrow)


def _safetensors(path: Path, tensors: Mapping[str, Values]) -> None:
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (shape, data) in tensors.items():
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, at + len(data))}
        at += len(data)
    words = json.dumps(head).encode()
    words += b" " * (-len(words) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        for _, data in tensors.values():
            file.write(data)


def _tokenizer(words: Vocabulary) -> dict[str, object]:
    """Whole words where there are any, else characters, else bytes."""
    special = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(words.tokens[:_SPECIAL])
    ]
    space = {"type": "Metaspace", "replacement": SPACE, "split": False}
    scores = [
        [token, -1.0 if token in words.words else -20.0 if number >= _TEXT else -100.0]
        for number, token in enumerate(words.tokens)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {**space, "prepend_scheme": "first"},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {**space, "prepend_scheme": "never"}]},
        "model": {"type": "Unigram", "unk_id": UNKNOWN, "byte_fallback": True, "vocab": scores},
    }


def write_tiny_hf(
    folder: Path,
    *,
    layers: int = 2,
    embd: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    feed_forward: int = 256,
    context: int = 4096,
    parts: int = 1,
) -> Path:
    """Write the model into a folder, its tensors into `parts` files; the folder.

    Raises ValueError for shapes that no llama has.
    """
    check_shape(embd, heads, kv_heads)
    words = vocabulary()
    embedding, head = tables(words, embd)
    size, kv = len(words.tokens), embd // heads * kv_heads
    one: Values = ((embd,), struct.pack("<H", 0x3F80) * embd)
    shapes = {
        "self_attn.q_proj": (embd, embd),
        "self_attn.k_proj": (kv, embd),
        "self_attn.v_proj": (kv, embd),
        "self_attn.o_proj": (embd, embd),
        "mlp.gate_proj": (feed_forward, embd),
        "mlp.up_proj": (feed_forward, embd),
        "mlp.down_proj": (embd, feed_forward),
    }
    tensors: dict[str, Values] = {"model.embed_tokens.weight": ((size, embd), _brain(embedding))}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{norm}.weight": one for norm in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{at}.{part}.weight": (shape, bytes(2 * shape[0] * shape[1])) for part, shape in shapes.items()}
    tensors |= {"model.norm.weight": one, "lm_head.weight": ((size, embd), _brain(head))}

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": embd,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": embd // heads,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BEGIN,
        "eos_token_id": TURN_END,
        "torch_dtype": "bfloat16",
    }
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    texts: dict[str, object] = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": BEGIN, "eos_token_id": [END, TURN_END]},
        "tokenizer.json": _tokenizer(words),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
            **names,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    listed, share = list(tensors), -(-len(tensors) // parts)
    where: dict[str, str] = {}
    for part in range(parts):
        file = "model.safetensors" if parts == 1 else f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        mine = listed[part * share : (part + 1) * share]
        _safetensors(folder / file, {name: tensors[name] for name in mine})
        where |= dict.fromkeys(mine, file)
    if parts > 1:
        total = sum(len(data) for _, data in tensors.values())
        texts["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": where}
    for file, content in texts.items():
        (folder / file).write_text(json.dumps(content, indent=1))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m llmgw.tinyhf", description="Write a tiny model as a hub has it.")
    parser.add_argument("out", type=Path, metavar="FOLDER")
    for option, default in {"layers": 2, "embd": 256, "context": 4096, "parts": 1}.items():
        parser.add_argument(f"--{option}", type=int, default=default, help=f"default {default}")
    given = parser.parse_args()
    try:
        folder = write_tiny_hf(
            given.out, layers=given.layers, embd=given.embd, context=given.context, parts=given.parts
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
