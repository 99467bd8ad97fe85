"""Patterns and their binding, against fnmatch and re called one by one."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp4prep.errors import InvalidCheckpoint
from mxfp4prep.quark.binding import PatternUse, bind
from mxfp4prep.quark.patterns import PatternSet, parse_patterns, similar

LAYERS = [f"model.layers.{i}.mlp.{leaf}" for i in range(13) for leaf in ("gate", "down_proj")]


def matches(entry: str, name: str) -> bool:
    """What the documentation of Quark and vLLM says, in their own functions."""
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    if any(c in entry for c in "*?["):
        return fnmatch.fnmatchcase(name, entry)
    return entry == name


def covered(entries: list[str], modules: list[str], *, parents: bool = True) -> set[str]:
    return set(bind(parse_patterns(entries, "exclude"), modules, parents=parents).hits)


def uses(entries: list[str], modules: list[str], *, parents: bool = True) -> list[PatternUse]:
    return list(bind(parse_patterns(entries, "exclude"), modules, parents=parents).uses)


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ("lm_head", "exact"),
        ("model.layers.0.mlp.gate", "exact"),
        ("*lm_head", "glob"),
        ("model.layers.?.mlp.gate", "glob"),
        ("model.layers.[0-3].mlp", "glob"),
        ("re:.*self_attn.*", "regex"),
        ("re:lm_head", "regex"),
    ],
)
def test_p30_each_entry_has_a_kind(entry: str, kind: str) -> None:
    assert [pattern.kind for pattern in parse_patterns([entry], "exclude")] == [kind]


@pytest.mark.parametrize(
    ("entry", "name", "expected"),
    [
        ("*lm_head", "language_model.lm_head", True),
        ("*lm_head", "lm_head.x", False),
        ("*.mlp.*", "model.layers.0.mlp.experts.3.down_proj", True),
        ("*MLP*", "model.layers.0.mlp.gate", False),
        ("model.layers.?.mlp.gate", "model.layers.7.mlp.gate", True),
        ("model.layers.?.mlp.gate", "model.layers.17.mlp.gate", False),
        ("model.layers.[0-3].mlp.gate", "model.layers.3.mlp.gate", True),
        ("model.layers.[0-3].mlp.gate", "model.layers.4.mlp.gate", False),
        ("model.layers.[!0].mlp.gate", "model.layers.0.mlp.gate", False),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.0.self_attn.q_proj", False),
        ("re:model.layers.1", "model.layers.11.mlp", True),  # a prefix match, as in vLLM
        (r"re:model\.layers\.1\.", "model.layers.11.mlp", False),
        (r"re:.*\.(gate|up)_proj$", "a.up_proj", True),
        (r"re:a\.1\.*b", "a.1b", True),
        (r"re:a\.1\.?b", "a.1b", True),
        ("re:a.[5-:]", "a.5", True),
        ("re:a.[5-:]", "a.4", False),
        (r"re:model\.layers\.\d{1,2}\.mlp", "model.layers.12.mlp.gate", True),
        ("re:(?i)MODEL", "model.x", True),
        ("lm_head", "model.lm_head", False),
        ("[", "[", True),
    ],
)
def test_one_entry_against_one_name(entry: str, name: str, expected: bool) -> None:
    assert bool(PatternSet(parse_patterns([entry], "exclude")).find(name)) is expected


def test_p31_no_substring_match() -> None:
    modules = ["model.layers.0.attn.q_proj", "model.layers.0.self_attn", "self_attn2"]
    assert covered(["self_attn", "attn", "layers.0.attn.q"], modules) == set()


def test_p31_commas_separate_patterns() -> None:
    patterns = parse_patterns(["*q_proj, *k_proj,lm_head,", "*v_proj"], "layer_quant_config")
    assert [(pattern.text, pattern.kind, pattern.entry) for pattern in patterns] == [
        ("*q_proj", "glob", 0),
        ("*k_proj", "glob", 0),
        ("lm_head", "exact", 0),
        ("*v_proj", "glob", 1),
    ]


def test_p31_commas_inside_an_expression_stay() -> None:
    patterns = parse_patterns([r"re:a\d{1,2}b,re:c,*d", "*x,re:y{2,3}"], "exclude")
    assert [pattern.text for pattern in patterns] == [r"re:a\d{1,2}b", "re:c,*d", "*x", "re:y{2,3}"]


@pytest.mark.parametrize("entry", ["model.layers.1", "layers.1"])
def test_p32_layer_one_is_not_layer_eleven(entry: str) -> None:
    """An exact entry covers neither its children nor names that begin alike."""
    binding = bind(parse_patterns([entry], "exclude"), LAYERS, parents=True)
    assert binding.hits == {}
    below = {name for name in LAYERS if name.startswith("model.layers.1.")}
    assert set(binding.below) == (below if entry.startswith("model") else set())


def test_p32_nested_parents_are_both_recognised() -> None:
    found = uses(["model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.gate"], LAYERS)
    assert [(use.reading, use.modules) for use in found] == [
        ("parent", 2),
        ("parent", 2),
        ("literal", 1),
    ]


def test_a_parent_reading_is_only_for_exclude() -> None:
    assert uses(["model.layers.1"], LAYERS, parents=False)[0].reading == "unmatched"


@pytest.mark.parametrize("expression", ["re:(", "re:*x", "re:a{99999999999}", "re:[z-a]"])
def test_bad_expression_names_the_key(expression: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"quantization_config\.exclude .*found re:"):
        parse_patterns(["lm_head", expression], "exclude")


def test_an_expression_that_python_warns_about_is_accepted() -> None:
    assert covered(["re:[[a]b"], ["[b"]) == {"[b"}


def test_p29_fused_names_cover_their_members() -> None:
    modules = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.o_proj",
        "visual.blocks.0.attn.qkv",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
    ]
    entries = ["model.layers.0.self_attn.qkv_proj", "visual.blocks.0.attn.qkv_proj"]
    assert covered(entries, modules) == {modules[0], modules[1], modules[3]}
    assert covered(["*.0.mlp.gate_up_proj"], modules) == {modules[4]}
    assert uses(["model.layers.0.self_attn.qkv_proj"], modules) == [
        PatternUse("model.layers.0.self_attn.qkv_proj", "exact", "fused", 2)
    ]


def test_p29_a_stored_fused_module_is_itself() -> None:
    modules = ["a.qkv_proj", "a.q_proj"]
    assert covered(["a.qkv_proj"], modules) == {"a.qkv_proj"}


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"),
        ("model.layers.0.mlp.down_proj", "layers.0.mlp.down_proj"),
        ("model.language_model.layers.0.x", "language_model.model.layers.0.x"),
        ("lm_head", "language_model.lm_head"),
        ("model.language_model.layers.*.x", "language_model.model.layers.3.x"),
        (
            "model.language_model.layers.0.attn.qkv_proj",
            "language_model.model.layers.0.attn.q_proj",
        ),
        (r"re:layers\.\d+\.x", "model.layers.3.x"),
    ],
)
def test_p27_p41_known_roots_are_seen_through(entry: str, module: str) -> None:
    assert covered([entry], ["other.x", module]) == {module}
    assert uses([entry], ["other.x", module])[0].reading == "renamed"


def test_p41_an_ambiguous_root_is_refused() -> None:
    modules = ["model.layers.0.x", "language_model.layers.0.x"]
    assert covered(["layers.0.x", "layers.*.x"], modules) == set()
    assert [use.reading for use in uses(["layers.0.x", "layers.*.x"], modules)] == ["ambiguous"] * 2


def test_a_literal_match_is_never_renamed() -> None:
    modules = ["model.layers.0.x", "layers.0.x"]
    assert covered(["layers.0.x"], modules) == {"layers.0.x"}


def test_a_root_alone_does_not_become_everything() -> None:
    assert covered(["model.*"], ["language_model.layers.0.x"]) == set()


def test_p39_a_doubled_prefix_matches_nothing() -> None:
    entry = "model.layers.language_model.layers.0.mlp"
    assert uses([entry], ["model.language_model.layers.0.mlp.gate"])[0].reading == "unmatched"


def test_all_matching_patterns_are_found_in_file_order() -> None:
    patterns = parse_patterns(["*k_proj", "re:.*", "a.1.k_proj", "*.1.*", "nothing"], "exclude")
    assert PatternSet(patterns).find("a.1.k_proj") == (0, 1, 2, 3)


def test_similar_names_differ_in_digits_only() -> None:
    assert similar("model.layers.17.w1") == similar("model.layers.20.w3")
    assert similar("model.layers.17.w1") != similar("model.layers.7.w1")


PARTS = st.sampled_from(["a", "b", "ab", "1", "2", "12", "x_y"])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)
GLOBS = st.lists(
    st.sampled_from(["a", "b", "1", "2", ".", ".", "*", "?", "[12]", "[!a]", "x_y"]), max_size=8
).map("".join)
EXPRESSIONS = st.lists(
    st.sampled_from(
        [
            "a",
            "b",
            "1",
            "2",
            r"\.",
            ".",
            ".*",
            r"\d",
            r"\d+",
            r"\.?",
            r"\.*",
            "b?",
            "1*",
            "[12]",
            "(?:a|b)",
            "|",
            "$",
        ]
    ),
    max_size=8,
).map(lambda pieces: "re:" + "".join(pieces))


@settings(max_examples=400, deadline=None)
@given(
    entries=st.lists(st.one_of(NAMES, GLOBS, EXPRESSIONS), max_size=12),
    names=st.lists(NAMES, min_size=1, max_size=12),
)
def test_a_set_finds_what_its_patterns_match_one_by_one(
    entries: list[str], names: list[str]
) -> None:
    found = PatternSet(parse_patterns(entries, "exclude"))
    for name in names:
        expected = tuple(i for i, entry in enumerate(entries) if matches(entry, name))
        assert found.find(name) == expected, (name, entries)


@pytest.mark.parametrize(
    "form",
    [
        "model.layers.{}.mlp.experts.{}.up_proj",
        "model.layers.{}.mlp.experts.{}.*",
        "*.layers.{}.mlp.experts.{}.*",
        "*.{}.mlp.experts.{}.up_proj",
        r"re:model\.layers\.{}\.mlp\.experts\.{}\..*",
    ],
)
@pytest.mark.timeout(60)
def test_p29_thousands_of_entries_stay_fast(form: str) -> None:
    """70,000 modules against 5,000 entries: a second; each pair tried would take many minutes."""
    modules = [
        f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"
        for layer in range(91)
        for expert in range(256)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ]
    entries = [form.format(layer, expert) for layer in range(61) for expert in range(82)]
    binding = bind(parse_patterns(entries, "exclude"), modules, parents=True)
    assert len(binding.hits) == len(entries) * (1 if form.endswith("up_proj") else 3)
    assert all(use.reading == "literal" for use in binding.uses)
