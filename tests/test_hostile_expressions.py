"""Expressions that `re` would never finish with are refused; those that people write are not."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mxfp4prep.errors import InvalidCheckpoint
from mxfp4prep.quark.expressions import effort_of
from mxfp4prep.quark.patterns import PatternSet, parse_patterns

HOSTILE = {
    r"(a+)+$": "a" * 60 + "b",
    r"(a|a)*b": "a" * 60,
    r"(a|aa)+$": "a" * 60 + "b",
    r"(.*)*x": "a" * 60,
    r"(?:.*a){25}": "a" * 60,
    r"(\w+\s?)*$": "a" * 60 + "!",
    r"(?:a?){40}a{40}": "a" * 40,
    "a?" * 40 + "a" * 40: "a" * 40,
    r"(?:(?:a{0,100}){0,100}){0,100}$": "a" * 99 + "b",
    r"(?=(a+)+$)": "a" * 60 + "b",
    r"(?!(a+)+$)": "a" * 60 + "b",
    r"(?i:(a+)+)b": "a" * 60,
    r"(a*)\1*\1*b": "a" * 60,
    r"(?:ab|a)(?:b?)" * 40 + "$": "ab" * 40 + "c",
    r"(a|a)" * 40 + "b": "a" * 40,
    r".*.*.*.*.*x": "a" * 5000,
    r".*a.*a.*a.*a.*a.*b": "a" * 3000,
    r"[a-z]*[a-z]*[a-z]*[a-z]*1": "a" * 3000,
    r"(?:aa)*(?:aa)*(?:aa)*(?:aa)*b": "a" * 2000,
    r"(a*)(a*)(a*)(a*)b": "a" * 2000,
}
USUAL = (
    r".*self_attn.*",
    r"model\.layers\.1\.",
    r".*\.(gate|up)_proj$",
    r".*layers\.[0-9]+\..*experts\.[0-9]+\..*w1.*",
    r"^(?!.*expert).*",
    r"(?i)MODEL",
    r".*\..*\..*\.w1",
    r"model\.layers\.(?:[0-9]|1[0-9])\..*down_proj",
    r".*mlp\.experts\.\d+\.(?:gate|up|down)_proj",
    r"(?:model\.)?layers\.\d+\.(?:mlp|self_attn)\..+",
    r".*(?<!gate)_proj",
    r"\bmodel\b.*",
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("expression", HOSTILE)
def test_what_would_never_end_is_refused(expression):
    with pytest.raises(InvalidCheckpoint, match=r"^config\.json: .*regular expression") as caught:
        PatternSet(parse_patterns([f"re:{expression}"], "exclude")).find(HOSTILE[expression])
    assert caught.value.exit_code == 3
    assert len(str(caught.value)) < 700


def test_many_expressions_share_one_patience():
    entries = [f"re:.*a.*a.*{i}" for i in range(40)]
    patterns = PatternSet(parse_patterns(entries, "exclude"))
    assert patterns.find("a" * 200) == ()
    names = iter(["a" * (200 + i) for i in range(1, 40)])
    with pytest.raises(InvalidCheckpoint, match="would take too long"):
        list(map(patterns.find, names))
    assert len(list(names)) > 5


@pytest.mark.parametrize("expression", USUAL)
def test_what_people_write_matches_as_before(expression):
    """On the modules of a large model, with patience for ten times as many."""
    modules = [
        f"model.layers.{i}.mlp.experts.{j}.{leaf}_proj"
        for i in range(0, 61, 5)
        for j in range(0, 256, 8)
        for leaf in ("gate", "up", "down")
    ]
    find = PatternSet(parse_patterns([f"re:{expression}"], "exclude")).find
    compiled = re.compile(expression)
    assert [bool(find(m)) for m in modules] == [compiled.match(m) is not None for m in modules]
    assert sum(effort_of(expression).steps(m) for m in modules) < 10_000_000


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    pieces=st.lists(
        st.sampled_from(
            ["a", "b", r"\.", ".*", ".+?", "a*", "[ab]*", "[^a]+", r"\d{1,3}", "(?:a|b)", "(?:ab)?"]
        ),
        max_size=7,
    ),
    name=st.text("ab.1", max_size=30),
)
@example(pieces=["[ab]*", "[ab]*", "[ab]*", "b"], name="a" * 24)
@example(pieces=[".*", "a", ".*", "a", ".*", "b"], name="a" * 20)
def test_the_bound_is_one(pieces, name):
    """Steps counted by a matcher of our own, which tries every way as `re` does, stay below it."""
    expression = "".join(pieces)
    taken = tries(pieces, name, 0)
    assert taken <= 2 * (len(pieces) + 1) * effort_of(expression).steps(name), (expression, name)


def tries(pieces: list[str], name: str, at: int) -> int:
    """Attempts to match one piece at one place, of a search for a match that fails at its end."""
    if not pieces:
        return 1
    whole = re.compile(pieces[0])
    ends = [end for end in range(at, len(name) + 1) if whole.fullmatch(name, at, end)]
    if len(pieces) == 1:  # nothing follows that could fail
        return 1 + len(ends[:1])
    return 1 + sum(tries(pieces[1:], name, end) for end in ends)
