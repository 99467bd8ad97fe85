"""convert --for: what each engine can take, in the files as much as in the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from prepared_factory import decode64, edit_manifest
from quark_factory import model_config, quant_config, quant_layer, write_checkpoint
from safetensors.torch import load_file

import mxfp4prep
from mxfp4prep import cli
from mxfp4prep import manifest as m
from mxfp4prep.alignment import REASONS
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.deployment import Deployment
from mxfp4prep.engines import ENGINES, predict
from mxfp4prep.errors import InvalidManifest, Unsupported, UsageError
from mxfp4prep.inventory import prepared_config
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.restore import restore
from mxfp4prep.survey import survey
from mxfp4prep.targets import TARGETS
from mxfp4prep.verify import verify

AT = "model.layers.0"
GATE, UP, DOWN = (f"{AT}.mlp.{part}_proj" for part in ("gate", "up", "down"))
O_PROJ = f"{AT}.self_attn.o_proj"
DENSE = {GATE: (512, 512), UP: (512, 512), DOWN: (512, 512), O_PROJ: (512, 512)}
QUARK_ORDER = ["sglang", "atom"]


def bank(layer: int, width: int, hidden: int, experts: int = 2) -> dict[str, tuple[int, int]]:
    """Linears of a bank of experts that stands in its layer alone."""
    at = f"model.layers.{layer}.mlp.experts"
    return {
        f"{at}.{expert}.{part}_proj": (hidden, width) if part == "down" else (width, hidden)
        for expert in range(experts)
        for part in ("gate", "up", "down")
    }


def planned(root, engine, tp=(1,), ep=False, **kwargs):
    deployment = Deployment(expert_parallel=ep)
    surveyed = survey(open_checkpoint(root), surveyed_degrees(tp), (), deployment)
    return make_plan(surveyed, tp, engine=engine, **kwargs)


def made(root, linears, engine, tp=(1,), ep=False, config=None, **kwargs):
    """Layer -> (reasons, weight layout, scale layout)."""
    write_checkpoint(root / "m", linears, config=config)
    plan = planned(root / "m", engine, tp, ep, **kwargs)
    return {p.layer.name: (p.reasons, p.weight_layout, p.scale_layout) for p in plan.layers}


ASM = ((), "tile16x16", "tile32x8")


def left(*reasons: str) -> tuple[tuple[str, ...], str, str]:
    """A layer that is left as it was, for these reasons."""
    return (*reasons, "kept"), "raw", "raw"


def files_of(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


# --- there, and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", TARGETS)
def test_every_real_checkpoint_for_every_engine(mxfp4_fixture, tmp_path, engine):
    out = convert(planned(mxfp4_fixture, engine, (1, 2)), tmp_path / "out").out
    report = verify(out, "deep", mxfp4_fixture)
    assert (report.problems, report.skipped) == ((), ())
    source = {}
    for path in mxfp4_fixture.glob("*.safetensors"):
        source |= load_file(path)
    loaded = mxfp4prep.load(out)
    assert loaded.manifest.target.engine == engine
    assert len(loaded) >= 2
    for record in loaded.manifest.layers:
        packed, scale = source[record.weight.tensor], source[record.scale.tensor]
        expected = decode64(packed, scale.view(torch.uint8), record.k)
        assert torch.equal(loaded[record.name].dequantize().double(), expected), record.name
        if engine in QUARK_ORDER and record.path != "asm":
            stored = load_file(out / record.scale.file)[record.scale.tensor]
            assert torch.equal(stored, scale), "not transposed"
    back = restore(out, tmp_path / "back")
    assert files_of(back.out) == files_of(mxfp4_fixture)
    assert back.header_only == ()


def test_vllm_and_mxfp4prep_get_the_same_bytes(tmp_path):
    write_checkpoint(tmp_path / "m", DENSE | {O_PROJ: (512, 640)})
    outs = [
        convert(planned(tmp_path / "m", engine), tmp_path / engine).out
        for engine in ("mxfp4prep", "vllm")
    ]
    shards = [(out / "model.safetensors").read_bytes() for out in outs]
    assert shards[0] == shards[1]
    own, other = (json.loads((out / "mxfp4prep.json").read_bytes()) for out in outs)
    assert "engine" not in own["target"]
    assert other["target"].pop("engine") == "vllm"
    assert other["target"] == own["target"]
    assert other["layers"] == own["layers"]
    assert [layer["reasons"] for layer in own["layers"]].count(["scale_cols"]) == 1


def test_the_engine_is_checked_and_planned_with(tmp_path):
    write_checkpoint(tmp_path / "m", DENSE | {O_PROJ: (512, 640)})
    out = convert(planned(tmp_path / "m", "sglang"), tmp_path / "out").out
    assert m.parse((out / "mxfp4prep.json").read_bytes()).target.engine == "sglang"
    edit_manifest(out, lambda document: document["target"].update(engine="vllm"))
    said = [p.what for p in verify(out, "quick").problems if p.tensor == O_PROJ]
    assert any("reasons" in what and "'engine', 'kept'" in what for what in said)
    edit_manifest(out, lambda document: document["target"].update(engine="tgi"))
    with pytest.raises(InvalidManifest, match=r"target\.engine: .*'sglang'.*found 'tgi'"):
        mxfp4prep.load(out)


# --- SGLang --------------------------------------------------------------------------------------


def test_sglang_takes_asm_above_128_fused_rows_a_rank(tmp_path):
    found = made(tmp_path, DENSE | {O_PROJ: (128, 512), GATE: (96, 512), UP: (64, 512)}, "sglang")
    assert found[DOWN] == ASM
    assert found[O_PROJ] == left("engine")
    assert found[GATE] == left("bad_tile", "engine")
    assert found[UP] == left("group_part", "engine")


def test_sglang_counts_the_fused_rows_and_every_degree(tmp_path):
    linears = DENSE | {GATE: (160, 512), UP: (160, 512), O_PROJ: (160, 512)}
    found = made(tmp_path, linears, "sglang")
    assert set(found.values()) == {ASM}
    assert made(tmp_path / "8", DENSE, "sglang", (1, 4))[GATE] == ASM  # 256 rows of both
    at8 = made(tmp_path / "4", DENSE, "sglang", (1, 8))
    assert at8[GATE] == at8[UP] == left("engine")  # 128 rows of both
    assert at8[DOWN] == left("scale_cols", "engine")


def test_sglang_pads_experts_to_256_a_rank(tmp_path):
    linears = bank(1, 512, 512) | bank(2, 768, 256)
    assert set(made(tmp_path, linears, "sglang", (1,)).values()) == {ASM}
    at2 = made(tmp_path / "2", linears, "sglang", (2,))
    assert at2["model.layers.1.mlp.experts.1.down_proj"] == ASM
    assert at2["model.layers.2.mlp.experts.1.up_proj"] == left("engine_pad")  # 384 a rank
    assert at2["model.layers.2.mlp.experts.1.down_proj"] == left("scale_cols", "engine_pad")
    assert set(made(tmp_path / "ep", linears, "sglang", (2,), ep=True).values()) == {ASM}


def test_what_an_engine_cannot_run_is_left_to_it(tmp_path):
    weight_only = model_config(quant_config(global_quant_config=quant_layer(inputs=None)))
    found = made(tmp_path, DENSE | bank(1, 256, 256), "sglang", config=weight_only)
    assert set(found.values()) == {left("engine")}


# --- ATOM ----------------------------------------------------------------------------------------


def test_atom_takes_asm_for_all_linears_or_for_none(tmp_path):
    experts = bank(1, 256, 256)
    found = made(tmp_path, DENSE | experts, "atom")
    assert set(found.values()) == {ASM}
    mixed = made(tmp_path / "mixed", DENSE | experts | {O_PROJ: (512, 640)}, "atom")
    assert mixed[O_PROJ] == left("scale_cols", "engine")
    assert {mixed[name] for name in (GATE, UP, DOWN)} == {left("engine_all")}
    assert {mixed[name] for name in experts} == {ASM}


def test_atom_heads_are_no_linears(tmp_path):
    everything = model_config(quant_config(exclude=[]))
    found = made(tmp_path, DENSE | {"lm_head": (1024, 512)}, "atom", config=everything)
    assert found.pop("lm_head") == left("engine")
    assert set(found.values()) == {ASM}


def test_atom_linears_of_few_rows_are_wrong_on_its_asm_gemm(tmp_path):
    found = made(tmp_path, DENSE | {O_PROJ: (64, 512)}, "atom")
    assert found[O_PROJ] == left("engine")
    assert found[DOWN] == left("engine_all")
    said = predict("atom", survey(open_checkpoint(tmp_path / "m"), (1,))).outcomes[O_PROJ][1]
    assert said.outcome == "corrupt"


def test_atom_experts_of_256_are_asm_and_others_left_whole_banks_at_a_time(tmp_path):
    linears = DENSE | bank(1, 512, 256) | bank(2, 512, 128) | bank(3, 1024, 256)
    found = made(tmp_path, linears, "atom", (4,))
    banks = {
        number: {reasons for name, reasons in found.items() if name.startswith(f"{number}", 13)}
        for number in (1, 2, 3)
    }
    assert banks[1] == {left("engine_pad"), left("scale_cols", "engine_pad")}  # 128 a rank
    assert all("engine_pad" in reasons for reasons, *_ in banks[2])  # hidden 128
    assert banks[3] == {ASM}
    one = "model.layers.3.mlp.experts.1.down_proj"
    kept = planned(tmp_path / "m", "atom", (4,), keep=[one])
    reasons = {p.layer.name: p.reasons for p in kept.layers}
    assert reasons[one] == ("kept",)
    assert reasons["model.layers.3.mlp.experts.0.gate_proj"] == ("engine_all", "kept")


def test_a_bank_in_one_tensor_is_left_as_it_was(tmp_path):
    generator = torch.Generator().manual_seed(1)
    name = f"{AT}.mlp.experts.down_proj"
    extra = {
        f"{name}.weight": torch.randint(
            0, 256, (2, 256, 128), generator=generator, dtype=torch.uint8
        ),
        f"{name}.weight_scale": torch.full((512, 8), 120, dtype=torch.uint8),
    }
    write_checkpoint(tmp_path / "m", {}, extra=extra)
    [own] = planned(tmp_path / "m", "mxfp4prep").layers
    [other] = planned(tmp_path / "m", "atom").layers
    assert own.path == "asm"
    assert (other.reasons, other.weight_layout) == (("engine", "kept"), "raw")


# --- beside the other options --------------------------------------------------------------------


@pytest.mark.parametrize("engine", QUARK_ORDER)
def test_layout_triton_is_not_for_engines_that_want_the_plain_scale(tmp_path, engine):
    write_checkpoint(tmp_path / "m", DENSE)
    with pytest.raises(UsageError, match=f"--layout triton: {TARGETS[engine].label} reads") as no:
        planned(tmp_path / "m", engine, layout="triton")
    assert "--keep '*'" in (no.value.hint or "")
    plan = planned(tmp_path / "m", engine, keep=["*"])
    assert {p.reasons for p in plan.layers} == {("kept",)}
    planned(tmp_path / "m", "vllm", layout="triton")


def test_layout_asm_refuses_what_the_engine_does_not_take(tmp_path):
    write_checkpoint(tmp_path / "m", DENSE | {O_PROJ: (128, 512)})
    planned(tmp_path / "m", "vllm", layout="asm")
    with pytest.raises(Unsupported, match=r"1 of 4 layers.*found engine, kept") as caught:
        planned(tmp_path / "m", "sglang", layout="asm")
    assert "those layers stay as they were" in (caught.value.hint or "")


def test_keep_wins_and_takes_along_what_must_go_with_it(tmp_path):
    write_checkpoint(tmp_path / "m", DENSE)
    for engine, others in (("sglang", ()), ("atom", ("engine_all", "kept"))):
        reasons = {
            p.layer.name: p.reasons
            for p in planned(tmp_path / "m", engine, keep=["*.o_proj"]).layers
        }
        assert reasons == {O_PROJ: ("kept",), GATE: others, UP: others, DOWN: others}


@pytest.mark.parametrize(
    ("engine", "linears", "says"),
    [
        ("sglang", DENSE, "to run with SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM=1, for a loader"),
        ("sglang", {DOWN: (512, 640)}, "would hold it, for a loader"),
        ("atom", DENSE, "would hold it, for a loader"),
        (
            "atom",
            {DOWN: (512, 640)},
            "to run with ATOM_USE_FP4_NON_SHUFFLE_TRITON_GEMM=1, for a loader",
        ),
        ("vllm", DENSE, None),
        ("mxfp4prep", DENSE, None),
    ],
)
def test_who_reads_it_is_said(tmp_path, engine, linears, says):
    write_checkpoint(tmp_path / "m", linears)
    told = [f for f in planned(tmp_path / "m", engine).findings if f.code == "engine"]
    assert [finding.severity for finding in told] == ([] if says is None else ["warning"])
    assert says is None or says in told[0].message
    assert says is None or "mxfp4prep restore" in told[0].message


def test_what_cannot_be_split_is_stored_as_it_was(tmp_path):
    write_checkpoint(tmp_path / "m", {DOWN: (512, 1408)})
    for engine, stored in (("sglang", "as they were"), ("vllm", "on the Triton path")):
        found = [
            f for f in planned(tmp_path / "m", engine, (8,)).findings if f.code == "impossible"
        ]
        assert f"stored {stored}, and loading" in found[0].message


# --- the page that says it -----------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "engines.md").read_text("utf-8")


def test_the_page_names_every_target_switch_and_reason():
    [table] = re.findall(r"^\| `--for` \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    for target in TARGETS.values():
        assert f"`{target.name}`" in table
        for switch in filter(None, (*target.asm, target.plain)):
            assert f"`{switch}=1`" in table
    listed = set(re.findall(r"^\| `(engine\w*)` \|", PAGE, re.MULTILINE))
    assert listed == {code for code in REASONS if code.startswith("engine")}
    assert ENGINES["sglang-0.5"].version.split()[1] in PAGE
    assert ENGINES["atom"].version.split()[1] in PAGE


def test_the_commands_on_the_page_are_taken(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "original", DENSE)
    monkeypatch.chdir(tmp_path)
    convert(planned(tmp_path / "original", "atom"), tmp_path / "model-mxfp4prep")
    commands = re.findall(r"^mxfp4prep (.+)$", PAGE, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["restore", "audit", "audit"]
    for command in commands:
        assert cli.main([*command.split()]) in (0, 1), capsys.readouterr().err
    assert files_of(tmp_path / "model") == files_of(tmp_path / "original")


def test_its_links_lead_somewhere():
    heads = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}
    targets = re.findall(r"\]\(([^)\s]+)\)", PAGE)
    assert len(targets) > 2
    for target in targets:
        path, _, anchor = target.partition("#")
        if path:
            assert (Path(__file__).parent.parent / "docs" / path).is_file()
        else:
            assert anchor in anchors


# what SGLang 0.5.23 and ATOM make of config.json rests on these keys and words


def test_what_engines_read_in_config_json(mxfp4_fixture):
    config = json.loads((mxfp4_fixture / "config.json").read_text())
    section = json.loads(prepared_config(config))["quantization_config"]
    assert section["quant_method"].lower() == "mxfp4prep"
    assert not section.keys() & {"quant_algo", "quantized_layers", "activation_scheme", "scheme"}
    assert not section.keys() & {"weight_block_size", "config_groups", "ignore", "exclude"}
    words = str(section).lower()
    assert re.search("fp8|float8", words) or re.search("fp4|float4", words)
    assert "block" in words, "ATOM takes scales as 1 x 128, which no stored scale fits"
