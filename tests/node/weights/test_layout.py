"""What lies in the cache, as the plane is told of it."""

from __future__ import annotations

from pathlib import Path

from llmgw.node.weights import layout
from llmgw.node.weights.manifest import File, Manifest
from llmgw.tinymodel import write_tiny


def held(root: Path) -> Manifest:
    """A tiny model in a cache, whole and checked."""
    made = write_tiny(root / "made.gguf", context=2048)
    file = File(name="tiny.gguf", size=made.stat().st_size, digest="sha256:" + "0" * 64)
    manifest = Manifest(
        source="hf://org/model", folder="models--org--model", revision="v1", files=(file,), entry="tiny.gguf"
    )
    blob = layout.blob(root, manifest, file)
    blob.parent.mkdir(parents=True)
    made.rename(blob)
    layout.point(root, manifest, file)
    checked = File(name=file.name, size=file.size, digest=file.digest, checked=layout.stamp(blob))
    return Manifest(
        source="hf://org/model", folder="models--org--model", revision="v1", files=(checked,), entry="tiny.gguf"
    )


def test_complete_weights_tell_the_shape_of_their_model(tmp_path: Path) -> None:
    found = layout.facts(tmp_path, held(tmp_path))
    assert (found.complete, found.error) == (True, "")
    assert (found.context, found.heads, found.layers, found.kv_bytes_per_token) == (2048, 4, 2, 1024)


def test_weights_that_are_not_all_there_tell_none(tmp_path: Path) -> None:
    manifest = held(tmp_path)
    layout.blob(tmp_path, manifest, manifest.files[0]).unlink()
    found = layout.facts(tmp_path, manifest)
    assert (found.complete, found.context, found.kv_bytes_per_token) == (False, None, None)
