"""models.toml, and every way to get it wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from llmgw.errors import BadInput
from llmgw.plane.models import models_of, revised
from llmgw.plane.world import Model, Profile, Revision
from llmgw.toml import BadToml
from llmgw.wire.facts import ModelName, Resources
from tests.plane.worlds import model, profile

WHOLE = """
[profiles.small]
engine = "llamacpp"
engine_version = "b10068"
source = "/models/tiny.gguf"
args = ["--jinja"]
env = { OMP_WAIT_POLICY = "passive" }
context = 4096
ready_within = "5m"
grace = 10
labels = { zone = "a" }
resources = { cpu_threads = 1, memory = "512MiB", disk = "3 MB" }

[[models]]
name = "tiny"
profile = "small"
replicas = 2

[[models]]
name = "org/other"
profile = "small"
args = []
resources = { cpu_threads = 2 }

[[models]]
name = "big"
engine = "vllm"
source = "hf://org/big"
resources = { gpus = 8, gpu_memory = "80GiB", compute_capability = "9.0" }
"""


def test_a_whole_file_is_read() -> None:
    big, other, tiny = models_of(WHOLE)
    assert tiny == Model(
        name=ModelName("tiny"),
        replicas=2,
        profile=Profile(
            engine="llamacpp",
            engine_version="b10068",
            source="/models/tiny.gguf",
            args=("--jinja",),
            env={"OMP_WAIT_POLICY": "passive"},
            context=4096,
            ready_within=300.0,
            grace=10.0,
            labels={"zone": "a"},
            resources=Resources(cpu_threads=1, memory_bytes=512 << 20, disk_bytes=3_000_000),
        ),
    )
    assert (other.name, other.replicas, other.profile.args) == ("org/other", 1, ())
    assert other.profile.resources == Resources(cpu_threads=2, memory_bytes=512 << 20, disk_bytes=3_000_000)
    assert big.profile.resources == Resources(gpus=8, gpu_memory_bytes=80 << 30, compute_capability=(9, 0))


def test_a_profile_may_stand_inside_its_model() -> None:
    text = '[[models]]\nname = "a"\nprofile = { engine = "vllm", source = "/m" }\ncontext = 10'
    (found,) = models_of(text)
    assert (found.profile.engine, found.profile.source, found.profile.context) == ("vllm", "/m", 10)


def test_an_empty_file_wants_nothing() -> None:
    assert models_of("") == ()


def test_no_replicas_at_all_may_be_wanted() -> None:
    (found,) = models_of('[[models]]\nname = "a"\nengine = "vllm"\nsource = "/m"\nreplicas = 0')
    assert found.replicas == 0


def test_a_replica_may_need_several_nodes_and_say_what_joins_them() -> None:
    small, large = models_of("""
[profiles.pair]
engine = "vllm"
source = "hf://org/large"
nodes = 2
network = "rdma"
rails = 8
spread = "rack"
resources = { gpus = 8 }

[[models]]
name = "large"
profile = "pair"
replicas = 3
surge = 2
idle = "30m"
apart = ["a", "large", "a"]

[[models]]
name = "a"
profile = "pair"
nodes = 4
network = ""
""")
    assert large.name == "large"
    assert (large.profile.nodes, large.profile.network, large.profile.rails, large.profile.spread) == (
        2,
        "rdma",
        8,
        "rack",
    )
    assert (large.profile.apart, large.surge, large.idle) == (("a", "large"), 2, 1800.0)
    assert (small.profile.nodes, small.profile.network, small.surge, small.idle) == (4, "", 1, 0.0)


def test_what_joins_several_nodes_does_not_matter_to_a_replica_of_one() -> None:
    (found,) = models_of(A.replace("vllm", "llamacpp") + 'network = "nvlink"')
    assert (found.profile.nodes, found.profile.network) == (1, "nvlink")


def test_engines_may_be_written_as_people_write_them() -> None:
    (found,) = models_of('[[models]]\nname = "a"\nengine = "llama.cpp"\nsource = "/m"')
    assert found.profile.engine == "llamacpp"


DOCUMENTS = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["README.md", "docs/operating.md"])
def test_the_examples_in_the_documents_can_be_applied(name: str) -> None:
    examples = re.findall(r"```toml\n(.*?)```", (DOCUMENTS / name).read_text(), re.DOTALL)
    assert [entry.name for text in examples if "[[models]]" in text for entry in models_of(text)]


def test_every_key_is_in_the_handbook() -> None:
    text = (DOCUMENTS / "docs" / "operating.md").read_text()
    section = text[text.index("## models.toml") : text.index("## plane.toml")]
    keys = {*Profile.__struct_fields__, *Model.__struct_fields__} - {"revision", "history"}
    keys |= {"gpus", "gpu_memory", "compute_capability", "cpu_threads", "memory", "disk"}
    assert {key for key in keys if f"`{key}`" not in section} == set()


A = '[[models]]\nname = "a"\nengine = "vllm"\nsource = "/m"\n'
BAD = [
    ("x =", "models.toml, line 1, column 4: not TOML"),
    ('[[models]]\nname = "a\n', "models.toml, line 2, column"),
    ("models = 3", "models: tables are due, not the number 3"),
    ("[models]\nname = 3", "write [[models]]"),
    ("[profiles]\nsmall = 3", "profiles.small: a table is due"),
    ("[[model]]", "unknown key 'model': did you mean 'models'?"),
    (A + "replica = 2", "line 5: unknown key 'replica' in [models[0]]: did you mean 'replicas'?"),
    (A + "resources = { gpu = 1 }", "line 5: unknown key 'gpu' in [models[0].resources]: did you mean 'gpus'?"),
    ("[profiles.s]\nenigne = 'vllm'", "line 2: unknown key 'enigne' in [profiles.s]: did you mean 'engine'?"),
    ("[[models]]\nengine = 'vllm'", "line 1: models[0]: the key 'name' is missing"),
    ('[[models]]\nname = "a"\nsource = "/m"', "line 1: models[0]: the key 'engine' is missing"),
    ('[[models]]\nname = "a"\nengine = "vllm"', "line 1: models[0]: the key 'source' is missing"),
    ('[[models]]\nname = "a"\nengine = "vlm"\nsource = "/m"', "there is no engine 'vlm': did you mean 'vllm'?"),
    ('[[models]]\nname = "a"\nengine = "tgi"\nsource = "/m"', "use one of llamacpp, sglang, vllm"),
    (
        '[profiles.small]\n[[models]]\nname = "a"\nprofile = "smal"',
        "line 4: models[0].profile: there is no profile 'smal'",
    ),
    ('[[models]]\nname = "a"\nprofile = "x"', "known profiles are: none"),
    (A + A, "two models are called 'a'"),
    (A.replace('"a"', '"a/b"') + A.replace('"a"', '"a_b"'), "are one in names of files"),
    (A + "replicas = -1", "line 5: models[0].replicas: -1 replicas cannot be meant"),
    (A + "replicas = 2.5", "replicas: a whole number is due, not the number 2.5"),
    (A + "replicas = true", "a whole number is due, not true"),
    (A + "replicas = 1000000", "cannot be meant"),
    (A + 'args = "--x"', "models[0].args: a list is due, not the text '--x'"),
    (A + "args = [1]", "text is due, not the number 1"),
    (A + 'args = ["a\\u0000"]', "a NUL character"),
    (A + "env = { X = 1 }", "text is due, not the number 1"),
    (A + 'env = { "a b" = "1" }', "'a b' cannot be the name of a variable"),
    (A + "context = 0", "context: 0 cannot be meant: give 1 or more"),
    (A + "nodes = 0", "nodes: 0 cannot be meant: give 1 or more"),
    (A + "nodes = 257", "nodes: 257 cannot be meant: give 256 or less"),
    (A + "rails = -1", "rails: -1 cannot be meant: give 0 or more"),
    (A + "rails = 65", "rails: 65 cannot be meant: give 64 or less"),
    (A + 'network = "rmda"', "network: there is no network 'rmda': did you mean 'rdma'?"),
    (A + 'network = "InfiniBand"', "did you mean 'rdma'?"),
    (A + 'network = "pigeons"', "use one of rdma, nvlink, tcp, or leave it out"),
    (A + "network = 1", "network: text is due, not the number 1"),
    (
        A + 'network = "tcp"\nrails = 8',
        "line 6: models[0].rails: 8 rails are asked for, but its nodes are joined by TCP",
    ),
    (A + 'network = "nvlink"\nrails = 8', "8 rails are asked for, but its nodes are joined by NVLink"),
    (A + 'nodes = 2\nnetwork = "nvlink"', "line 6: models[0].network: NVLink joins GPUs, but no GPUs are asked for"),
    (
        '[profiles.p]\nengine = "llamacpp"\nnodes = 2\nnetwork = "rdma"\n'
        '[[models]]\nname = "a"\nsource = "/m"\nprofile = "p"',
        "line 8: models[0].profile: llama.cpp's members reach each other by TCP, not by rdma: set network",
    ),
    (A + 'spread = "rack=3"', "line 5: models[0].spread: 'rack=3' cannot be a label's name: use 1 to 128"),
    (A + 'labels = { "my rack" = "3" }', "line 5: models[0].labels: 'my rack' cannot be a label's name"),
    (A + 'labels = { rack = "a\\nb" }', "the label rack cannot have the value 'a\\nb': use up to 256"),
    (A + 'apart = "b"', "apart: a list is due, not the text 'b'"),
    (A + 'apart = ["b"]', "line 5: models[0].apart: there is no model 'b' to stay apart from"),
    (A.replace('"a"', '"alpha"') + A + 'apart = ["alfa"]', "did you mean 'alpha'?"),
    (A + "surge = -1", "surge: a surge of -1 cannot be meant: give 0 to 10000; 0 stops one replica before"),
    (A + "surge = 0.5", "surge: a whole number is due"),
    (A + "idle = 0.2", "idle: 0.2 s without a request are no idle time: give 1 s or more, or 0"),
    (A + 'idle = "soon"', "'soon' is not a duration"),
    (A + "idel = 60", "unknown key 'idel' in [models[0]]: did you mean 'idle'?"),
    (A + "network = 'rdma'\nrail = 8", "unknown key 'rail' in [models[0]]: did you mean 'rails'?"),
    (A + "ready_within = 0", "ready_within: 0 cannot be meant"),
    (A + 'ready_within = "soon"', "'soon' is not a duration"),
    (A + 'resources = { memory = "5 lots" }', "'5 lots' is not a size"),
    (A + "resources = { memory = -1 }", "not less than nothing (-1)"),
    (A + "resources = { gpus = -1 }", "gpus: -1 cannot be meant"),
    (A + "resources = 3", "resources: a table is due"),
    (A + 'resources = { gpu_memory = "1GiB" }', "gpu_memory is asked for, but no GPUs: set gpus as well"),
    (A + 'resources = { compute_capability = "nine" }', 'write it as "9.0"'),
    (A + "resources = { compute_capability = 90 }", "90 is not a compute capability"),
    (A.replace('"/m"', '" "'), "an empty source says nothing"),
    *[
        (A.replace('"a"', f'"{name}"'), "cannot be a model's name")
        for name in ("", "a b", "a/", "/a", "../a", "a//b", "-a", "ä", "x" * 97)
    ],
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_bad_input_is_named_with_its_place(text: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        models_of(text)
    assert words in str(caught.value)
    assert str(caught.value).startswith("models.toml")


def test_the_name_of_the_file_is_the_callers() -> None:
    with pytest.raises(BadToml, match=r"/etc/llmgw/models.toml, line 1"):
        models_of("x", "/etc/llmgw/models.toml")


PIECES = (
    "[[models]]",
    "[profiles.a]",
    "[models]",
    'name = "a"',
    'engine = "vllm"',
    'source = "/m"',
    'profile = "a"',
    "replicas = 1",
    "resources = {}",
    "resources = { gpus = 1 }",
    "labels = { a = 1 }",
    "profiles = 1",
    "args = []",
    "env = 5",
    "nodes = 2",
    "rails = 8",
    'network = "tcp"',
    'apart = ["a"]',
    "surge = 0",
    'idle = "5m"',
    "x = 1",
)
toml_like = st.lists(st.sampled_from(PIECES), max_size=12).map("\n".join)


@given(toml_like | st.text(max_size=60))
def test_any_text_is_models_or_a_clear_error(text: str) -> None:
    try:
        found = models_of(text)
    except BadInput as bad:
        said: BadInput | None = bad
    else:
        said = None
        assert all(isinstance(entry, Model) for entry in found)
    assert said is None or str(said).startswith("models.toml")


def test_a_revision_grows_with_the_profile_and_not_with_the_replicas() -> None:
    first = revised(Map(), (model("a"), model("b")))
    assert {name: entry.revision for name, entry in first.items()} == {"a": 1, "b": 1}
    second = revised(first, (model("a", replicas=5), model("b", of=profile(threads=2)), model("c")))
    assert {name: (entry.revision, entry.replicas) for name, entry in second.items()} == {
        "a": (1, 5),
        "b": (2, 1),
        "c": (1, 1),
    }
    assert set(revised(second, ())) == set()


ALONE = ModelName("a")


def test_a_changed_profile_leaves_the_one_before_in_the_history() -> None:
    before = revised(Map(), (model("a"),))
    assert before[ALONE].history == ()
    after = revised(before, (model("a", of=profile(threads=2)),), clock=50.0)[ALONE]
    assert after.history == (Revision(revision=1, profile=before[ALONE].profile, clock=50.0),)


def test_more_replicas_or_another_surge_keep_the_history() -> None:
    models = revised(revised(Map(), (model("a"),)), (model("a", of=profile(threads=2)),), clock=50.0)
    wanted = replace(model("a", replicas=7, of=profile(threads=2)), surge=3, idle=60.0)
    found = revised(models, (wanted,), clock=60.0)[ALONE]
    assert (found.replicas, found.surge, found.idle, found.revision) == (7, 3, 60.0, 2)
    assert found.history == models[ALONE].history


def test_only_the_last_few_profiles_are_kept() -> None:
    models: Map[ModelName, Model] = Map()
    for threads in range(1, 10):
        models = revised(models, (model("a", of=profile(threads=threads)),), clock=float(threads))
    assert [entry.revision for entry in models[ALONE].history] == [4, 5, 6, 7, 8]
    assert [entry.profile.resources.cpu_threads for entry in models[ALONE].history] == [4, 5, 6, 7, 8]
    assert models[ALONE].revision == 9
