from __future__ import annotations

import pytest

from lsverify.errors import InputError
from lsverify.policies import ALLOWED, Policy, coin_up, parse_policy

LENGTHS = (1, 2, 5, 40)


@pytest.mark.parametrize(
    ("spec", "tail", "window"),
    [
        ("exact", 1, None),
        ("detach", 1, 0),
        ("window:0", 1, 0),
        ("window:64", 1, 64),
        ("tail:1", 1, 0),
        ("tail:3", 3, 0),
        ("tail:3+window:2", 3, 2),
        ("window:2+tail:3", 3, 2),
        ("window:007", 1, 7),
    ],
)
def test_the_grammar(spec, tail, window):
    assert parse_policy(spec) == Policy(spec, tail=tail, window=window)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        " ",
        "Exact",
        "exact ",
        "full",
        "exact+window:3",
        "detach+tail:2",
        "window",
        "window:",
        "window:-1",
        "window:+1",
        "window:1.5",
        "window:x",
        "window: 3",
        "window:3\n",
        "window:3+",
        "+window:3",
        "window:3+window:3",
        "tail:2+tail:3",
        "tail:2,window:3",
        "tail:2+window:3+tail:2",
        "tail",
        "head:3",
        "layers",
        "kinds",
        "stale:",
        "stale:x",
        "roulette",
        "window:" + 5000 * "9",
        "window:\u0663",
    ],
)
def test_a_malformed_policy_gets_one_line_that_names_it_and_the_allowed_forms(spec):
    with pytest.raises(InputError) as caught:
        parse_policy(spec)
    message = str(caught.value)
    assert message == f"policy {spec!r} is not known: use {ALLOWED}"
    assert "\n" not in message
    for form in (
        "exact",
        "detach",
        "window:M",
        "tail:K",
        "layers:",
        "kinds:",
        "roulette:P",
        "stale:N",
    ):
        assert form in ALLOWED


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("layers:", "layers are all, or numbers and ranges from 0"),
        ("layers:3-1", "layers are all, or numbers and ranges from 0"),
        ("layers:-1", "layers are all, or numbers and ranges from 0"),
        ("layers:1,,2", "layers are all, or numbers and ranges from 0"),
        ("kinds:index", "an indexer's keys choose positions and carry no gradient"),
        ("kinds:attention,index", "an indexer's keys choose positions and carry no gradient"),
        ("kinds:keys", "kind 'keys' is not known, use all, or some of attention"),
        ("kinds:", "kind '' is not known, use all, or some of attention"),
        ("roulette:0", "roulette needs a probability above 0 and at most 1"),
        ("roulette:1.01", "roulette needs a probability above 0 and at most 1"),
        ("roulette:half", "roulette needs a probability above 0 and at most 1"),
        ("stale:0", "a capture serves at least 1 optimizer step"),
        ("stale:2+window:3", "stale cannot be swept"),
        ("stale:2+kinds:all", "stale cannot be swept"),
        ("roulette:0.5+stale:2", "stale cannot be swept"),
    ],
)
def test_a_part_that_cannot_be_gets_its_reason_in_one_line(spec, told):
    with pytest.raises(InputError) as caught:
        parse_policy(spec)
    assert str(caught.value).startswith(f"policy {spec!r}: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_choice_of_state_is_swept_through_the_whole_prompt_unless_a_window_is_named():
    assert parse_policy("layers:0,2-3").layers == {0, 2, 3}
    assert parse_policy("layers:0").window is None
    assert parse_policy("kinds:recurrent+window:64").window == 64
    assert parse_policy("roulette:0.25").window is None
    assert parse_policy("tail:3+stale:4") == Policy("tail:3+stale:4", tail=3, window=0, refresh=4)
    whole = parse_policy("layers:all+kinds:all")
    assert not whole.chooses
    assert whole.reference == "full"


def test_what_is_carried_is_of_both_the_layers_and_the_kinds():
    policy = parse_policy("layers:1+kinds:conv,recurrent")
    assert policy.carries(1, "conv")
    assert not policy.carries(0, "conv")
    assert not policy.carries(1, "attention")
    assert not policy.carries(None, "conv")


def test_a_coin_is_a_function_of_step_and_prompt_and_falls_as_often_as_it_says():
    assert all(coin_up(1.0, "prompt", seed) for seed in range(200))
    coins = [[coin_up(0.25, name, seed) for seed in range(4000)] for name in ("one", "other")]
    assert coins[0] == [coin_up(0.25, "one", seed) for seed in range(4000)]
    for found in coins:
        # Four standard deviations of 4000 coins.
        assert abs(sum(found) / 4000 - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5
    both = sum(a and b for a, b in zip(*coins, strict=True)) / 4000
    assert abs(both - 0.0625) < 4 * (0.0625 / 4000) ** 0.5
    policy = parse_policy("roulette:0.25")
    assert {policy.scale("one", seed) for seed in range(100)} == {0.0, 4.0}
    assert parse_policy("exact").scale("one", 3) == 1.0


@pytest.mark.parametrize("spec", ["tail:0", "tail:0+window:3", "tail:000"])
def test_a_live_tail_of_no_token_is_refused(spec):
    with pytest.raises(InputError, match=r"needs at least 1 token, use tail:1 or more"):
        parse_policy(spec)


def same(one, other):
    """Equal in what a sweep does, up to where the live tail begins."""
    return all(parse_policy(one).stop(p) == parse_policy(other).stop(p) for p in LENGTHS)


def test_identities():
    assert same("window:0", "detach")
    assert same("detach", "tail:1")
    for k in (1, 2, 3, 7):
        assert same(f"tail:{k}", f"window:{k - 1}")
        for m in (0, 1, 4, 39):
            assert same(f"tail:{k}+window:{m}", f"window:{m + k - 1}")
    for p in LENGTHS:
        exact, widest = parse_policy("exact"), parse_policy(f"window:{p - 1}")
        assert exact.stop(p) == widest.stop(p) == 0
        assert exact.boundary(p) == widest.boundary(p)


def test_different_policies_stop_at_different_places():
    assert not same("window:1", "detach")
    assert not same("tail:2", "tail:3")
    assert not same("exact", "window:38")
    assert same("exact", "window:39")


def test_a_policy_beyond_the_prompt_is_clamped_to_it():
    for spec, boundary, stop in (("tail:9", 0, 0), ("window:9", 4, 0), ("tail:3+window:9", 2, 0)):
        policy = parse_policy(spec)
        assert policy.clamped(5)
        assert (policy.boundary(5), policy.stop(5)) == (boundary, stop)


@pytest.mark.parametrize(
    ("spec", "fits", "clamped"),
    [("tail:5", 5, 4), ("window:4", 5, 4), ("tail:2+window:3", 5, 4), ("window:1", 2, 1)],
)
def test_a_policy_that_just_fits_is_not_clamped(spec, fits, clamped):
    policy = parse_policy(spec)
    assert not policy.clamped(fits)
    assert policy.stop(fits) == 0
    assert policy.clamped(clamped)


def test_exact_and_detach_fit_every_prompt():
    for spec in ("exact", "detach"):
        assert not any(parse_policy(spec).clamped(p) for p in LENGTHS)


def test_a_one_token_prompt_makes_all_policies_equal():
    for spec in ("exact", "detach", "window:3", "tail:4", "tail:2+window:2"):
        assert (parse_policy(spec).boundary(1), parse_policy(spec).stop(1)) == (0, 0)


@pytest.mark.parametrize(
    ("spec", "reference"),
    [
        ("exact", "full"),
        ("detach", "stopped at B"),
        ("window:0", "stopped at B"),
        ("window:5", "stopped at B-5"),
        ("tail:1", "stopped at B"),
        ("tail:4", "stopped at P-4"),
        ("tail:4+window:2", "stopped at P-6"),
        ("kinds:recurrent", "only kinds:recurrent at B"),
        ("layers:0,2+kinds:conv", "only layers:0,2 and kinds:conv at B"),
        ("window:5+kinds:conv", "stopped at B-5, only kinds:conv at B"),
        ("roulette:0.5", "full in expectation"),
        ("stale:4", "stopped at B, captured every 4 steps"),
    ],
)
def test_what_a_policy_claims(spec, reference):
    policy = parse_policy(spec)
    assert policy.reference == reference


def test_a_policy_cannot_be_changed():
    with pytest.raises(AttributeError):
        parse_policy("exact").window = 3
