from __future__ import annotations

from llmgw.plane.gateway.balance import Strikes, alive, failed, only, out, succeeded


def test_one_failure_is_enough_to_be_out_and_a_probe_to_be_back() -> None:
    strikes = failed(Strikes(), "a", "refused", 1.0)
    assert set(out(strikes)) == {"a"}
    assert out(alive(strikes, "a")) == {}


def test_failures_in_a_row_are_counted_until_a_request_succeeds() -> None:
    strikes = failed(alive(failed(Strikes(), "a", "x", 1.0), "a"), "a", "y", 2.0)
    assert (strikes["a"].failures, strikes["a"].reason) == (2, "y")
    assert failed(succeeded(alive(strikes, "a"), "a"), "a", "z", 3.0)["a"].failures == 1


def test_replicas_that_no_route_names_are_forgotten() -> None:
    strikes = failed(failed(Strikes(), "a", "x", 1.0), "b", "x", 1.0)
    assert set(only(strikes, frozenset(["b"]))) == {"b"}


def test_what_is_not_known_changes_nothing() -> None:
    assert alive(Strikes(), "a") == succeeded(Strikes(), "a") == Strikes()
