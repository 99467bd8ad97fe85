"""What the README shows is what happens: its output, its Python, its links."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from prepared_factory import Layer, build

from mxfp4prep import cli, demo

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {"README.md": README} | {
    f"docs/{name}": (ROOT / "docs" / name).read_text("utf-8")
    for name in ("engines.md", "format.md")
}
BLOCKS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    if "integrations" not in block  # tests/serve runs that one
]

OF_OTHERS = {
    "pip": {"--extra-index-url"},
    "torchrun": {"--nproc-per-node"},
    "vllm": {"--tensor-parallel-size", "--load-format", "--model-loader-extra-config"},
    "lm_eval": {"--model"},
}
"""Options of other programs that the README names."""


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """What a command prints in a directory with the demo's checkpoint in it, line by line."""
    monkeypatch.chdir(tmp_path)
    demo.build(tmp_path / "model")

    def run(*words):
        capsys.readouterr()
        cli.main([*words])
        return capsys.readouterr().out.splitlines()

    return run


def sample(command):
    """The lines that the README has below a command, to the end of the block."""
    found = re.search(rf"^\$ {re.escape(command)}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found is not None, command
    return found[1].splitlines()


def test_the_audit_is_the_real_one_with_lines_left_out(shown, tried):
    lines = iter(shown("audit", "model"))
    for line in sample("mxfp4prep audit model"):
        assert line == "..." or line in lines, line  # `in` leaves the iterator behind the match
    tried("E1")


def test_the_conversion_is_the_real_one(shown, tmp_path, tried):
    # without spaces: the test's own path is long, and wrapped
    real = "".join("".join(shown("convert", "model", "--tp", "1,2")).split())
    words = "".join(sample("mxfp4prep convert model --tp 1,2")).split()
    assert "".join(words) == real.replace(str(tmp_path), "/models")
    tried("E1")


STAND_INS = {
    "MODEL": "model",
    "MODEL_DIR": "model",
    "MODEL@OLD": "model",
    "MODEL@NEW": "other.json",
    "cuda": "cpu",
}
"""What the README leaves to its reader, as it is here."""

LESS = {"bench": ["--m", "1", "--layers", "*.0.mlp.*_proj"]}
"""Options that make a command do less: on a CPU the whole takes minutes."""

ENDS_WITH = {"audit": 1, "diff": 1}
"""Exit codes other than 0: the demo's layers cannot be split at tp 8, and audits differ."""


def test_every_command_runs_one_after_the_other(shown, tmp_path, tried):
    """Those of ours, in a folder with the demo's checkpoint, each in the place of the last."""
    lines = re.findall(r"^\$ mxfp4prep (.+)$", README, re.MULTILINE)
    other = json.loads("\n".join(shown("audit", "model", "--format", "json")))
    other["layers"][0]["k"] += 32
    (tmp_path / "other.json").write_text(json.dumps(other))
    for line in lines:
        words = [STAND_INS.get(word, word) for word in shlex.split(line, comments=True)]
        code = cli.main([*words, *LESS.get(words[0], [])])
        assert code == ENDS_WITH.get(words[0], 0), line
    assert (tmp_path / "audit.html").read_text().startswith("<!doctype html")
    assert (tmp_path / "original-again/config.json").read_bytes() == (
        tmp_path / "model/config.json"
    ).read_bytes()
    assert len(lines) >= 16
    tried("E1", len(lines))


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A prepared checkpoint that has all that the README's Python asks for."""
    layers = [Layer("model.layers.0.mlp.down_proj", 64, 128, "triton")]
    for block in (*(f"experts.{expert}" for expert in range(4)), "shared_expert"):
        for part in ("gate", "up", "down"):
            layers.append(Layer(f"model.layers.1.mlp.{block}.{part}_proj", 64, 64, "triton"))
    norm = {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}
    build(tmp_path / "model-mxfp4prep", layers, copied=norm)
    monkeypatch.chdir(tmp_path)


def test_its_python_runs_and_does_what_it_says(checkpoint, tried):
    assert len(BLOCKS) == 2
    names = {}
    exec(BLOCKS[0], names)
    prepared = names["prepared"]
    assert "model.layers.1.mlp.experts.0.up_proj" in prepared.names
    assert prepared.expert_prefixes == ("model.layers.1.mlp.experts",)
    assert [tensor.name for tensor in prepared.manifest.tensors] == ["model.norm.weight"]
    assert (names["y"].shape, names["y"].dtype) == ((4, 64), torch.bfloat16)
    assert names["z"].shape == (4, 64)
    assert names["norm"].tolist() == [1] * 64
    assert list(names["layer"].parameters()) == []

    seen = []
    told = BLOCKS[1].replace("lambda done, total: None", "told")
    exec(told, names | {"told": lambda done, total: seen.append((done, total))})
    rest = 3 * 64 * 64 * 17 // 32 // 2 + 128  # bytes of half a shared expert, and the norm
    assert seen[-1] == (rest, rest)
    tried("E1", len(BLOCKS))


def test_its_modules_stay_and_are_filled(checkpoint):
    block = BLOCKS[1][BLOCKS[1].index("empty = ") :]
    names = {}
    exec("import torch, mxfp4prep\n" + block.replace("prepared.materialize(block)", ""), names)
    module = names["block"][0]
    assert module.weight.is_meta
    assert names["prepared"].materialize(names["block"]) is None
    assert names["block"][0] is module
    assert torch.equal(module.weight, names["prepared"]["model.layers.0.mlp.down_proj"].weight)


def test_a_backward_pass_is_refused_with_the_reason(checkpoint):
    names = {}
    exec(BLOCKS[0], names)
    x = names["x"].requires_grad_()
    with pytest.raises(Exception, match="has no gradient"):
        names["layer"](x).sum().backward()


def test_several_ranks_are_always_loaded_with_their_rank():
    for text in (README, *(path.read_text() for path in (ROOT / "examples").glob("*.py"))):
        for call in re.findall(r"load\([^()]*tp_size[^()]*\)", text):
            assert "tp_rank=" in call
        for call in re.findall(r"load\([^()]*ep_size[^()]*\)", text):
            assert "ep_rank=" in call


def anchors(text):
    """GitHub's anchors of the headings."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", PAGES[page])
    assert targets
    for target in targets:
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target


def test_its_options_exist(capsys):
    """Those in tables and examples, each of some command."""
    known = set()
    for verb in ("audit", "diff", "convert", "verify", "restore", "show", "selfcheck", "bench"):
        cli.main([verb, "--help"])
        known |= set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    code = re.findall(r"`([^`\n]+)`", README) + re.findall(
        r"^\$ mxfp4prep (.+)$", README, re.MULTILINE
    )
    used = {flag for text in code for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    assert used - known <= set().union(*OF_OTHERS.values())
    assert len(used) > 20
