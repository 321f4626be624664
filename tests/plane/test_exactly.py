"""A replica finds nodes exactly when some pass, by looking at all of them."""

from __future__ import annotations

from itertools import combinations

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from llmgw.plane.checks import Need
from llmgw.plane.place import Rooms
from llmgw.plane.world import Shard, World
from llmgw.wire.facts import (
    NodeId,
    Weights,
)
from tests.plane.fabrics_of import (
    after_test,
    choose,
    ib,
    labelled,
    linked,
    placed,
    railed,
    refused,
    wanted,
)
from tests.plane.worlds import world

# --- exactly when there is one ---------------------------------------------------------------------------


#: A node's fabric and which of its three rails are up.
NODES = st.tuples(st.sampled_from(["red", "red", "blue"]), st.tuples(*[st.booleans()] * 3))
#: By pair of nodes: the rail that a test found bad.
BAD = st.dictionaries(st.sampled_from(list(combinations(range(6), 2))), st.sampled_from(["mlx5_0", "mlx5_2"]))


def fleet(made: list[tuple[str, tuple[bool, ...]]], bad: dict[tuple[int, int], str]) -> World:
    here = world(
        *(
            railed(f"n{n}", *(ib(at, fabric=fabric, state="ACTIVE" if ok else "DOWN") for at, ok in enumerate(up)))
            for n, (fabric, up) in enumerate(made)
        )
    )
    for (a, b), device in bad.items():
        if b < len(made):
            here = after_test(here, f"n{a}", f"n{b}", bad=[device])
    return here


def reach_one_another(here: World, some: tuple[NodeId, ...], rails: int) -> bool:
    """By the words of the rule, pair by pair."""
    up = []
    for name in some:
        facts = here.nodes[name].facts
        assert facts is not None
        up.append({(port.device, port.fabric) for port in facts.ports if port.state == "ACTIVE"})
    shared = set.intersection(*up)
    if not rails and (len(shared) < 3 or any(len(mine) < 3 for mine in up)):
        return False
    needed = rails or 3
    # Narrowed to any set of rails that all have, as long as no pair is known to be bad on one of them.
    for count in range(needed, len(shared) + 1):
        for used in combinations(sorted(shared), count):
            devices = {device for device, _ in used}
            bad = {
                end.rpartition(" ")[2].partition("/")[0]
                for pair in combinations(sorted(some), 2)
                if (test := here.evidence.get(pair)) is not None
                for end in test.bad
            }
            if not devices & bad:
                return True
    return False


@settings(max_examples=200)
@given(made=st.lists(NODES, min_size=1, max_size=6), bad=BAD, count=st.integers(2, 4), rails=st.integers(0, 3))
def test_a_replica_finds_nodes_exactly_when_some_reach_one_another(
    made: list[tuple[str, tuple[bool, ...]]], bad: dict[tuple[int, int], str], count: int, rails: int
) -> None:
    here, of = fleet(made, bad), wanted(count, rails=rails)
    found = choose(here, of)
    exists = any(reach_one_another(here, some, rails) for some in combinations(sorted(here.nodes), count))
    assert (found is not None) == exists
    if found is None:
        assert {reason.node for reason in refused(here, of)} == set(here.nodes)
    else:
        assert reach_one_another(here, found.nodes, rails)
        assert len({member.rdma for member in found.members}) == 1
        assert choose(here, of) == found


#: Place one more replica of so many nodes, or take one away again.
MOVES = st.lists(st.one_of(st.sampled_from(["one", "two", "three"]), st.integers(0, 9)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(moves=MOVES, spread=st.booleans())
def test_rooms_that_are_kept_choose_as_fresh_ones_do(moves: list[str | int], spread: bool) -> None:
    """Whatever was held and released: the first of several plans and the last look at the same fleet."""
    made = [replace(labelled(f"n{n}", 2), labels={"rack": f"r{n % 3}"}) for n in range(5)]
    made.append(replace(labelled("n5", 2, "blue"), weights=(Weights(source="hf://org/big", complete=True),)))
    here = after_test(after_test(world(*made), "n0", "n1", bad=["mlx5_0"]), "n2", "n3", good=["mlx5_0"])
    of = {
        word: wanted(count, name=word, gpus=3, spread="rack" if spread else "")
        for count, word in enumerate(("one", "two", "three"), 1)
    }
    rooms, standing = Rooms(here, 10.0), dict[str, tuple[Shard, ...]]()
    for turn, move in enumerate(moves):
        if isinstance(move, int):
            if len(standing) > move:
                for shard in standing.pop(list(standing)[move]):
                    rooms.release(shard)
            continue
        model = of[move]
        choice = rooms.choose(Need.of(model), model.name)
        now = attrs.evolve(here, shards=Map({one.id: one for shards in standing.values() for one in shards}))
        fresh = Rooms(now, 10.0).choose(Need.of(model), model.name)
        assert choice == fresh
        if choice is not None:
            _, standing[f"{turn}"] = placed(here, model, choice, f"{move}-{turn}")
            for shard in standing[f"{turn}"]:
                rooms.hold(shard)


@given(cliques=st.lists(st.integers(1, 2), min_size=1, max_size=5), count=st.integers(2, 4))
def test_a_replica_over_nvlink_finds_nodes_exactly_when_a_domain_has_so_many(cliques: list[int], count: int) -> None:
    here = world(*(linked(f"n{n}", clique) for n, clique in enumerate(cliques)))
    found = choose(here, wanted(count, gpus=4, network="nvlink"))
    assert (found is not None) == any(cliques.count(clique) >= count for clique in cliques)
    assert here.shards == Map()
