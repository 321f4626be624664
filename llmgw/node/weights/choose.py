"""Which files of a repository a model needs: one format of the weights, and all that is not weights. Pure.

Repositories hold the same weights again and again, for other programs. An engine wants safetensors; where there are
none, one GGUF model; else what PyTorch wrote.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from llmgw.node.weights.errors import FetchFailed
from llmgw.node.weights.manifest import File

_PART = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<parts>\d{5})\.gguf")
_OTHERS = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite", ".pb",
           ".mlmodel", ".mlpackage", ".npz")  # fmt: skip
#: Folders with the same weights in a form that no engine of ours reads.
_FOLDERS = ("original/", "onnx/", "openvino/", "coreml/", "metal/", "mlx/", "tflite/", "flax/", ".")


def chosen(files: Sequence[File], inside: str, source: str) -> tuple[File, ...]:
    """The files that a source means. Raises FetchFailed when it means none, or cannot be told which."""
    by_name = {file.name: file for file in files}
    if inside:
        return _inside(files, by_name, inside.rstrip("/"), source)
    kept = [file for file in files if not file.name.startswith(_FOLDERS)]
    if any(file.name.endswith(".safetensors") for file in kept):
        kept = [file for file in kept if not file.name.lower().endswith(_OTHERS)]
        whole = [f for f in kept if not f.name.rpartition("/")[2].startswith("consolidated")]
        return tuple(whole if any(f.name.endswith(".safetensors") for f in whole) else kept)
    models = {_stem(file.name) for file in kept if file.name.endswith(".gguf") and "mmproj" not in file.name}
    if len(models) > 1:
        names = sorted(f.name for f in kept if f.name.endswith(".gguf") and "mmproj" not in f.name)
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        raise FetchFailed(
            f"{source} holds several models: {shown}", remedy=f"name one, such as {_named(source)}/{names[0]}"
        )
    if models:
        kept = [file for file in kept if not file.name.lower().endswith(_OTHERS) or file.name.endswith(".gguf")]
    if not any(file.name.lower().endswith((".safetensors", *_OTHERS)) for file in kept):
        raise FetchFailed(f"{source} holds no weights", remedy="see whether the repository is the one you mean")
    return tuple(kept)


def _inside(files: Sequence[File], by_name: dict[str, File], inside: str, source: str) -> tuple[File, ...]:
    if inside in by_name:
        stem = _stem(inside)
        return tuple(file for file in files if file.name == inside or (stem != inside and _stem(file.name) == stem))
    within = tuple(file for file in files if file.name.startswith(inside + "/"))
    if within:
        return within
    near = get_close_matches(inside, by_name, n=1)
    raise FetchFailed(
        f"{source}: the repository has no {inside}",
        remedy=f"did you mean {near[0]}?" if near else "see the repository's list of files",
    )


def _stem(name: str) -> str:
    """A file's name, or what all parts of one split model have in common."""
    found = _PART.fullmatch(name)
    return f"{found['stem']}-of-{found['parts']}" if found else name


def _named(source: str) -> str:
    return source.rstrip("/") if "@" in source else f"{source.rstrip('/')}@main"


def entry_of(files: Sequence[File], inside: str) -> str:
    """What an engine is given below the snapshot: a GGUF model's first file, else the folder ("": the whole)."""
    models = sorted(f.name for f in files if f.name.endswith(".gguf") and "mmproj" not in f.name)
    tensors = any(file.name.endswith(".safetensors") for file in files)
    if models and not tensors and len({_stem(name) for name in models}) == 1:
        return models[0]
    return inside.rstrip("/")
