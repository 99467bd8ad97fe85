"""The options of `mxfp4prep audit`: deployments, engines, values, pages and tables."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quark_factory import (
    model_config,
    mxfp4_tensors,
    quant_config,
    quant_layer,
    write_checkpoint,
)
from test_cli import ROOT, Result, environment
from test_report import validate
from test_shared_experts import MLP, bank

from mxfp4prep import cli


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in this process."""

    def call(*words: object) -> Result:
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts and a shared one of width 1408, which eight ranks cannot share."""
    config = model_config(model_type="qwen3_moe", num_experts=2, num_experts_per_tok=1)
    return write_checkpoint(
        tmp_path_factory.mktemp("moe") / "model", bank(1408, 1408), config=config
    )


def document(run: Any, *words: object) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(run("audit", *words, "--format", "json").out)
    validate(loaded, "audit")
    return loaded


def paths(found: dict[str, Any], name: str) -> dict[str, str]:
    (layer,) = [layer for layer in found["layers"] if layer["name"] == name]
    return dict(layer["decided"])


def test_experts_by_tensor_and_by_expert_parallelism(run: Any, moe: Path) -> None:
    down = f"{MLP}.experts.0.down_proj"
    plain = document(run, moe, "--tp", "1,8")
    assert paths(plain, down) == {"1": "triton", "8": "impossible"}
    assert plain["deployment"] == {
        "expert_parallel": False,
        "sequence_parallel": False,
        "shared_experts": "auto",
    }
    whole = document(run, moe, "--tp", "1,8", "--ep")
    assert paths(whole, down) == {"1": "triton", "8": "triton"}
    placed = {layer["name"]: layer.get("placement") for layer in whole["layers"]}
    assert placed[down] == {"1": "sliced", "8": "distributed"}
    assert placed[f"{MLP}.shared_expert.down_proj"] == {"1": "fused", "8": "fused"}
    assert run("audit", moe, "--tp", "8").code == 1
    assert run("audit", moe, "--tp", "8", "--ep").code == 0


@pytest.mark.parametrize(
    ("words", "decision"),
    [
        ((), "fused"),
        (("--shared-experts", "separate"), "impossible"),
        (("--shared-experts", "separate", "--ep"), "replicated"),
        (("--shared-experts", "separate", "--sp"), "replicated"),
        (("--shared-experts", "fused", "--ep"), "fused"),
    ],
)
def test_the_decision_about_shared_experts_is_in_text_and_json(
    run: Any, moe: Path, words: tuple[str, ...], decision: str
) -> None:
    (shared,) = document(run, moe, "--tp", "8", *words)["shared_experts"]
    assert (shared["name"], shared["blocks"], shared["width"]) == (f"{MLP}.shared_expert", 1, 1408)
    assert shared["decision"] == {"8": decision}
    text = run("audit", moe, "--tp", "8", *words).out
    shown = decision.upper() if decision == "impossible" else decision
    assert [shown] == [
        line.split()[-1] for line in text.splitlines() if line.startswith(f"{MLP}.shared_expert ")
    ]
    assert ("5.5 groups" in " ".join(shared["message"].values())) == (decision != "fused")


def test_a_message_about_a_shared_expert_reaches_the_text(run: Any, moe: Path) -> None:
    text = " ".join(run("audit", moe, "--tp", "8", "--shared-experts", "separate").out.split())
    assert (
        "1408 / 8 = 176 columns = 5.5 groups of 32; choose tp 4, which fits it, or replicate it"
        in text
    )


def test_cost_and_recommendation_are_in_text_and_json(run: Any, moe: Path) -> None:
    found = document(run, moe, "--tp", "1,4")
    assert found["cost"].keys() == {"1", "4"}
    # nine matrices of 512 x 1408: 4 bits a value and a byte for 32 of them, and the norm
    assert found["cost"]["1"]["rank_mxfp4_nbytes"] == 9 * 512 * 1408 * 17 // 32
    assert found["cost"]["1"]["rank_nbytes"] == 9 * 512 * 1408 * 17 // 32 + 16
    advice = found["summary"]["recommendation"]
    assert advice
    *lines, _, _ = run("audit", moe, "--tp", "1,4").out.splitlines()
    start = max(i for i, line in enumerate(lines) if not line) + 1
    assert lines[start].startswith("- ")
    told = " ".join(line.removeprefix("- ").strip() for line in lines[start:])
    assert told == " ".join(advice.split())


def test_p27_p30_json_tells_what_became_of_every_pattern(run: Any, tmp_path: Path) -> None:
    quantization = quant_config(
        exclude=["lm_head", "*.gate", "re:model.layers.[0-9].self", "visual.blocks.0"],
        layer_quant_config={"*down_proj": quant_layer()},
    )
    extra = {
        f"{name}.weight": torch.zeros(8, 512, dtype=torch.bfloat16)
        for name in ("lm_head", "model.layers.0.mlp.gate")
    }
    linears = {"model.layers.0.mlp.down_proj": (256, 512)}
    config = model_config(quantization)
    root = write_checkpoint(tmp_path / "m", linears, config=config, extra=extra)
    patterns = document(run, root)["patterns"]
    assert [tuple(pattern.values()) for pattern in patterns] == [
        ("exclude", "lm_head", "exact", "literal", 1),
        ("exclude", "*.gate", "glob", "literal", 1),
        ("exclude", "re:model.layers.[0-9].self", "regex", "unmatched", 0),
        ("exclude", "visual.blocks.0", "exact", "unmatched", 0),
        ("layer_quant_config", "*down_proj", "glob", "literal", 1),
    ]


ENGINES = ("vllm-0.32", "vllm-0.33", "vllm-main", "sglang-0.5", "atom", "mxfp4prep")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_answers_for_each_layer_and_degree(run: Any, moe: Path, engine: str) -> None:
    found = document(run, moe, "--engine", engine)
    assert found["engine"]["name"] == engine
    assert found["engine"]["sources"]
    for tp in ("1", "2", "4", "8"):
        outcomes = [layer["engine"][tp]["outcome"] for layer in found["layers"]]
        counted = {name: count for name, count in found["engine"]["outcomes"][tp].items() if count}
        assert counted == {name: outcomes.count(name) for name in set(outcomes)}
    *lines, last = run("audit", moe, "--engine", engine).out.splitlines()
    assert any(line.startswith(f"{engine} (") for line in lines)
    assert max(map(len, lines)) <= 80
    assert last.startswith("next: ")


def test_no_engine_no_outcomes(run: Any, moe: Path) -> None:
    found = document(run, moe)
    assert found["engine"] is None
    assert not any("engine" in layer for layer in found["layers"])


def test_an_engine_that_answers_nonsense_is_a_no(run: Any, moe: Path) -> None:
    words = ("audit", moe, "--tp", "8", "--engine", "vllm-0.33")
    assert run(*words).code == 1
    assert run(*words, "--fail-on", "never").code == 0
    outcomes = document(run, *words[1:])["engine"]["outcomes"]["8"]
    assert outcomes["corrupt"] + outcomes["crash"] > 0


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("--switch", "A=1"), "--switch"),
        (("--aiter-configs", "/"), "--aiter-configs"),
        (("--engine", "vllm-0.33", "--switch", "NO_SUCH_SWITCH=1"), "NO_SUCH_SWITCH"),
        (("--engine", "vllm-0.33", "--switch", "words"), "words"),
        (("--engine", "vllm-9"), "vllm-9"),
        (("--shared-experts", "maybe"), "maybe"),
        (("--format", "yaml"), "yaml"),
    ],
)
def test_wrong_words(run: Any, moe: Path, words: tuple[str, ...], place: str) -> None:
    made = run("audit", moe, *words)
    assert made.code == 2
    assert place in made.err
    assert made.out == ""


def test_wrong_words_are_said_before_anything_is_read(run: Any, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert run("audit", nowhere, "--engine", "atom", "--switch", "NO=1").code == 2
    assert run("audit", nowhere, "--html", tmp_path / "page.txt").code == 5


def test_aiters_tables_are_read_once(run: Any, moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("mxfp4prep.engines.find_tuned", lambda folder: calls.append(folder))
    run("audit", moe, "--engine", "vllm-0.33")
    assert calls == [None]


def test_values_are_read_only_when_asked(run: Any, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    made = mxfp4_tensors(name, 64, 256, generator=torch.Generator().manual_seed(1))
    made[f"{name}.weight_scale"].clamp_(100, 140)
    made[f"{name}.weight_scale"][5, 3] = 255
    made[f"{name}.weight_scale"][7, 1] = 0
    root = write_checkpoint(tmp_path / "m", {}, extra=made)
    assert document(run, root)["values"] is None
    found = document(run, root, "--values")
    values = found["values"]
    assert (values["nbytes"], values["scales"]) == (64 * 8, 64 * 8)
    assert (values["nan"], values["zero_blocks"]) == (1, 1)
    assert [(v["layer"], v["nan_places"]) for v in values["layers"]] == [(name, [[5, 3]])]
    assert any(name in finding["where"] for finding in found["findings"])
    text = " ".join(run("audit", root, "--values").out.split())
    assert "1 are 255 (NaN), 1 are 0 or 1" in text


def test_the_short_answer_parts_degrees_by_the_worst(run: Any, tmp_path: Path) -> None:
    linears = {"model.layers.0.mlp.down_proj": (256, 1024), "model.layers.0.mlp.o_proj": (256, 512)}
    root = write_checkpoint(tmp_path / "m", linears)
    # scale columns: 32 and 16 at 1, 16 and 8 at 2, 8 and 4 at 4, 4 and 2 at 8; none of 32 at 32
    text = " ".join(run("audit", root, "--tp", "1,2,4,8,32").out.split())
    assert (
        "In short: all layers on ASM at tp 1, 2; some on Triton at tp 4; all on Triton at tp 8; "
        "some that cannot be split at tp 32."
    ) in text


def test_csv_has_a_row_per_layer_and_degree(run: Any, moe: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("audit", moe, "--format", "csv").out)))
    assert len(rows) == 9 * 4
    by = {(row["layer"], row["tp"]): row for row in rows}
    down = by[f"{MLP}.experts.1.down_proj", "4"]
    assert (down["path"], down["scale_rows"], down["scale_columns"]) == ("triton", "512", "11")
    assert down["reasons"] == "scale_cols"
    assert by[f"{MLP}.experts.1.down_proj", "8"]["path"] == "impossible"


def test_a_page_beside_any_format(run: Any, moe: Path, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    made = run("audit", moe, "--html", page, "--format", "json")
    validate(json.loads(made.out), "audit")
    assert str(page) in made.err
    text = page.read_text()
    assert text[:15].lower() == "<!doctype html>"
    for words in ((), ("--engine", "atom", "--ep", "--values")):
        run("audit", moe, *words, "--html", tmp_path / "other.html")
        shown = (tmp_path / "other.html").read_text().partition("<script>")[0]
        assert not re.search(r">[^<]*(?:True|False|None)\b[^<]*<", shown)
    assert "experts" in text
    first = page.read_bytes()
    assert run("audit", moe, "--html", page).code == made.code
    assert page.read_bytes() == first
    (tmp_path / "notes.html").write_text("mine")
    assert run("audit", moe, "--html", tmp_path / "notes.html").code == 5
    assert (tmp_path / "notes.html").read_text() == "mine"


def test_every_option_leaves_torch_alone(moe: Path, tmp_path: Path) -> None:
    words = ["--engine", "vllm-0.33", "--values", "--ep", "--html", str(tmp_path / "page.html")]
    for more in (words, ["--format", "json", *words], ["--format", "csv", *words]):
        code = (
            "import sys\nfrom mxfp4prep.cli import main\n"
            f"code = main({['audit', str(moe), '--fail-on', 'never', *more]!r})\n"
            "sys.stderr.write(str((code, 'torch' in sys.modules, 'numpy' in sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment(PYTHONPATH=str(ROOT)),
            check=True,
        )
        assert done.stderr.endswith("(0, False, False)"), done.stderr


def test_diff_of_two_deployments(run: Any, moe: Path, tmp_path: Path) -> None:
    for name, words in (("tp", ()), ("ep", ("--ep",))):
        out = run("audit", moe, *words, "--format", "json").out
        (tmp_path / f"{name}.json").write_text(out)
    same = run("diff", tmp_path / "tp.json", moe)
    assert same.code == 0
    other = run("diff", tmp_path / "tp.json", tmp_path / "ep.json", "--format", "json")
    assert other.code == 1
    validate(json.loads(other.out), "diff")
