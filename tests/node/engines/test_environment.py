from llmgw.node.engines.environment import engine_environment, scrubbed, smallest_memory, visible_gpus
from llmgw.wire.facts import ModelName, ShardId, ShardSpec
from tests.node.engines.specs import FACTS, GPUS, MIG, spec

AGENT = {
    "PATH": "/bin",
    "HOME": "/root",
    "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    "NCCL_SOCKET_IFNAME": "=ib0",
    "LLAMA_ARG_PORT": "1",
    "VLLM_PORT": "tcp://1",
    "SGLANG_X": "1",
    "https_proxy": "x",
    "HTTP_PROXY": "x",
    "no_proxy": "y",
    "LLMGW_NODE_TOKEN": "secret",
    "LD_PRELOAD": "x.so",
    "CUDA_VISIBLE_DEVICES": "0",
    "PYTHONPATH": "/x",
    "NOTIFY_SOCKET": "/run/x",
    "INVOCATION_ID": "1",
    "OMP_NUM_THREADS": "99",
    "VIRTUAL_ENV": "/v",
}


def test_nothing_that_would_change_an_engine_comes_through() -> None:
    assert set(scrubbed(AGENT)) == {"PATH", "HOME", "LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME"}


def environment(env: dict[str, str], gpus: tuple[str, ...] = ()) -> dict[str, str]:
    profile = ShardSpec(engine="e", model=ModelName("m"), source="/m", env=env, gpus=gpus)
    return engine_environment(
        AGENT, {"HF_HUB_OFFLINE": "1"}, profile, shard=ShardId("s"), generation=3, token="t", state="/state"
    )


def test_a_profile_may_set_what_was_scrubbed_but_never_who_the_engine_is() -> None:
    env = environment({"VLLM_USE_V1": "1", "HF_HUB_OFFLINE": "0", "LLMGW_TOKEN": "forged", "LLMGW_PROBE": "1"})
    assert (env["VLLM_USE_V1"], env["HF_HUB_OFFLINE"], env["LLMGW_TOKEN"]) == ("1", "0", "t")
    assert (env["LLMGW_SHARD"], env["LLMGW_GENERATION"], env["LLMGW_STATE"]) == ("s", "3", "/state")
    assert "LLMGW_PROBE" not in env


def test_engines_write_no_colours_and_leave_their_environment_readable() -> None:
    env = environment({})
    assert (env["NO_COLOR"], env["TERM"], env["OMP_WAIT_POLICY"], env["SPT_NOENV"]) == ("1", "dumb", "passive", "1")


def test_gpus_are_named_by_uuid_slices_too_and_a_cpu_shard_sees_none() -> None:
    assert environment({}, (GPUS[1], MIG))["CUDA_VISIBLE_DEVICES"] == f"{GPUS[1]},{MIG}"
    assert visible_gpus(()) == {"CUDA_VISIBLE_DEVICES": "", "GGML_VK_VISIBLE_DEVICES": ""}


def test_the_smallest_of_the_chosen_gpus_counts() -> None:
    assert smallest_memory(spec("vllm", chosen=(GPUS[0], MIG)), FACTS.gpus) == 20 << 30
    assert smallest_memory(spec("vllm", chosen=(GPUS[0], "GPU-x")), FACTS.gpus) is None


def of_several(
    network: dict[str, str], env: dict[str, str] | None = None, agent: dict[str, str] | None = None
) -> dict[str, str]:
    return engine_environment(
        agent or {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0", "UCX_TLS": "tcp"},
        {"NCCL_DEBUG": "INFO"},
        spec("vllm", gpus=1, peers=("10.0.0.1", "10.0.0.2"), network=network, env=env),
        shard=ShardId("s"),
        generation=1,
        token="t",
        state="/state",
    )


def test_what_the_plane_knows_of_the_wires_stands_above_the_agents_and_below_the_profiles() -> None:
    env = of_several({"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=mlx5_0"}, {"NCCL_IB_HCA": "=mlx5_1"})
    assert {name: value for name, value in env.items() if name.startswith("NCCL_")} == {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_IB_HCA": "=mlx5_1",
    }, "half of the agent's and half of the plane's would be a network that nobody meant"
    assert (env["GLOO_SOCKET_IFNAME"], env["UCX_TLS"]) == ("ib0", "tcp"), "the plane says nothing of these"


def test_where_the_plane_writes_nothing_the_agents_own_network_stays() -> None:
    env = of_several({})
    assert (env["NCCL_IB_DISABLE"], env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("1", "=ib0", "ib0")
