"""convert, verify and restore on real checkpoints and on what may go wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, LOOKALIKES, with_path
from quark_factory import (
    FP8_WEIGHT,
    model_config,
    quant_config,
    quant_layer,
    write_checkpoint,
)
from safetensors import safe_open
from safetensors.torch import load_file

from mxfp4prep import io
from mxfp4prep import manifest as m
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert, default_output
from mxfp4prep.errors import (
    CannotShard,
    IntegrityError,
    InvalidCheckpoint,
    IOFailed,
    LayoutError,
    UnsafeOutput,
    Unsupported,
    UsageError,
)
from mxfp4prep.marks import DIGESTS_NAME
from mxfp4prep.parallel import parse_rules
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.restore import restore
from mxfp4prep.rewrite import write_file
from mxfp4prep.survey import survey
from mxfp4prep.verify import verify

LINEARS = {
    "model.layers.0.mlp.gate_proj": (128, 512),
    "model.layers.0.mlp.up_proj": (128, 512),
    "model.layers.0.mlp.down_proj": (512, 640),
    "model.layers.0.self_attn.o_proj": (512, 512),
}


def planned(root, tp=(1,), **kwargs):
    return make_plan(survey(open_checkpoint(root), surveyed_degrees(tp)), tp, **kwargs)


def converted(root, out, tp=(1,), workers=None, **kwargs):
    return convert(planned(root, tp, **kwargs), out, workers=workers)


def files_of(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def small(tmp_path):
    return write_checkpoint(
        tmp_path / "m",
        LINEARS,
        shards=2,
        side_files={
            "tokenizer.json": b"{}",
            "sub/modeling.py": b"x = 1\n",
            "chat_template.jinja": b"t",
        },
    )


@pytest.mark.parametrize("tp", [(1,), (1, 2, 4, 8)])
def test_every_real_checkpoint_goes_there_and_back(mxfp4_fixture, tmp_path, tp):
    before = files_of(mxfp4_fixture)
    out = converted(mxfp4_fixture, tmp_path / "out", tp).out
    report = verify(out, "deep", mxfp4_fixture)
    assert report.problems == ()
    assert report.skipped == ()
    back = restore(out, tmp_path / "back")
    assert files_of(back.out) == before
    assert back.header_only == ()
    assert files_of(mxfp4_fixture) == before


@pytest.mark.parametrize("name", sorted(LOOKALIKES))
def test_lookalikes_are_refused_by_name_and_nothing_is_left(name, tmp_path):
    with pytest.raises(Unsupported, match=LOOKALIKES[name]) as caught:
        converted(FIXTURES / name, tmp_path / "out")
    assert caught.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []


def test_prepared_shards_have_tile_row_shapes_and_unchanged_offsets(tmp_path):
    source = FIXTURES / "llama-w4a4-aligned"
    out = converted(source, tmp_path / "out").out
    name = "model.layers.0.mlp.down_proj"
    with safe_open(out / "model-00001-of-00002.safetensors", "pt") as shard:
        weight = shard.get_tensor(f"{name}.weight")
        assert shard.metadata() == {"format": "pt"}
    with safe_open(out / "model-00002-of-00002.safetensors", "pt") as shard:
        scale = shard.get_tensor(f"{name}.weight_scale")
    assert weight.shape == (16, 4096)
    assert scale.shape == (8, 512)
    # the layout of design, worked out here with indices: 16x16-byte tiles, column tiles of 32
    plain = load_file(source / "model-00001-of-00002.safetensors")[f"{name}.weight"]
    n, p = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    at = ((n // 16) * (256 // 32) + p // 32) * 512 + ((p % 32) // 16) * 256 + (n % 16) * 16 + p % 16
    assert torch.equal(weight.flatten()[at], plain)


def test_triton_layers_hold_the_transposed_scale(small, tmp_path):
    out = converted(small, tmp_path / "out").out
    name = "model.layers.0.mlp.down_proj"

    def tensor(root, key):
        for path in root.glob("*.safetensors"):
            tensors = load_file(path)
            if key in tensors:
                return tensors[key]
        raise KeyError(key)

    assert torch.equal(tensor(out, f"{name}.weight_scale"), tensor(small, f"{name}.weight_scale").T)
    assert torch.equal(tensor(out, f"{name}.weight"), tensor(small, f"{name}.weight"))


def test_manifest_says_what_was_done(small, tmp_path):
    result = converted(small, tmp_path / "out", (1, 2))
    manifest = m.parse((result.out / "mxfp4prep.json").read_bytes())
    assert manifest == result.manifest
    down = manifest.layer("model.layers.0.mlp.down_proj")
    assert (down.path, down.reasons) == ("triton", ["scale_cols"])
    assert down.verdict == {"1": "triton", "2": "triton", "4": "triton", "8": "impossible"}
    assert down.activation.model_dump() == {"dtype": "fp4", "scale_mode": "even", "static": False}
    assert (down.weight.layout, down.scale.layout) == ("raw", "transposed")
    assert manifest.target.tp == [1, 2]
    assert [t.name for t in manifest.tensors] == ["model.norm.weight"]
    text = (result.out / "mxfp4prep.json").read_text()
    for private in (str(tmp_path), os.uname().nodename, os.environ.get("USER", "\0")):
        assert private not in text or private == "root"


def test_sha256sums_is_what_coreutils_checks(small, tmp_path):
    out = converted(small, tmp_path / "out").out
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=out, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    listed = {line.rpartition(": ")[0] for line in done.stdout.splitlines()}
    assert listed == set(files_of(out)) - {"SHA256SUMS"}


def test_config_keeps_order_and_nests_the_original_verbatim(small, tmp_path):
    out = converted(small, tmp_path / "out").out
    before = json.loads((small / "config.json").read_text())
    after = json.loads((out / "config.json").read_text())
    assert list(after) == list(before)
    quantization = after.pop("quantization_config")
    assert quantization == {
        "quant_method": "mxfp4prep",
        "format_version": 1,
        "manifest": "mxfp4prep.json",
        "source_quantization_config": before.pop("quantization_config"),
    }
    assert after == before
    assert (out / "source" / "config.json").read_bytes() == (small / "config.json").read_bytes()


def test_right_index_is_copied_and_wrong_one_mended(small, tmp_path):
    name = "model.safetensors.index.json"
    out = converted(small, tmp_path / "a").out
    assert (out / name).read_bytes() == (small / name).read_bytes()
    assert not (out / "source" / name).exists()
    document = json.loads((small / name).read_text())
    total = document["metadata"]["total_size"]
    document["metadata"] = {"total_size": 1, "total_parameters": 7}
    del document["weight_map"]["model.norm.weight"]
    (small / name).write_text(json.dumps(document))
    out = converted(small, tmp_path / "b").out
    mended = json.loads((out / name).read_text())
    assert mended["metadata"] == {"total_size": total, "total_parameters": 7}
    assert "model.norm.weight" in mended["weight_map"]
    assert (out / "source" / name).read_bytes() == (small / name).read_bytes()
    assert files_of(restore(out, tmp_path / "back").out) == files_of(small)


def test_several_shards_without_an_index_get_one_that_restore_drops(tmp_path):
    root = write_checkpoint(tmp_path / "m", LINEARS, shards=2, index=False)
    out = converted(root, tmp_path / "out").out
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(open_checkpoint(root).tensors)
    assert files_of(restore(out, tmp_path / "back").out) == files_of(root)


def test_a_header_in_its_own_spelling_comes_back_exactly(tmp_path):
    root = write_checkpoint(tmp_path / "m", LINEARS)
    path = root / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    spelled = json.dumps(header, indent=1, sort_keys=True).encode()
    path.write_bytes(len(spelled).to_bytes(8, "little") + spelled + raw[8 + length :])
    out = converted(root, tmp_path / "out").out
    kept = out / "source" / "model.safetensors.header"
    assert verify(out, "deep", root).problems == ()
    assert files_of(restore(out, tmp_path / "back").out) == files_of(root)
    kept.write_bytes(kept.read_bytes().replace(b'"pt"', b'"qt"'))
    with pytest.raises(IntegrityError, match="is not the header that was kept"):
        restore(out, tmp_path / "again")


def test_own_sha256sums_of_the_source_survives(small, tmp_path):
    (small / "SHA256SUMS").write_text("0  x\n")
    out = converted(small, tmp_path / "out").out
    assert (out / "source" / "SHA256SUMS").read_text() == "0  x\n"
    assert verify(out, "deep", small).problems == ()
    assert files_of(restore(out, tmp_path / "back").out) == files_of(small)


def test_same_input_same_bytes_whatever_the_workers(small, tmp_path):
    trees = [files_of(converted(small, tmp_path / str(w), workers=w).out) for w in (1, 2, 4)]
    assert trees[0] == trees[1] == trees[2]


def test_p51_p52_scale_dtype_names_do_not_change_bytes(tmp_path):
    plain = write_checkpoint(tmp_path / "u8", LINEARS)
    tensors = load_file(plain / "model.safetensors")
    as_e8m0 = {
        name: t.view(torch.float8_e8m0fnu) if name.endswith("scale") else t
        for name, t in tensors.items()
    }
    other = write_checkpoint(tmp_path / "e8m0", {}, extra=as_e8m0)
    one, two = (converted(root, tmp_path / f"{root.name}-out").out for root in (plain, other))
    a, b = (load_file(out / "model.safetensors") for out in (one, two))
    for name in a:
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name
    assert b["model.layers.0.mlp.down_proj.weight_scale"].dtype == torch.float8_e8m0fnu
    assert files_of(restore(two, tmp_path / "back").out) == files_of(other)


def test_p59_nan_scales_are_kept_counted_and_marked(tmp_path):
    root = write_checkpoint(tmp_path / "m", LINEARS)
    tensors = load_file(root / "model.safetensors")
    scale = tensors["model.layers.0.mlp.down_proj.weight_scale"]
    scale[3, 4] = scale[5, 6] = 255
    scale[0, 0] = 0
    again = write_checkpoint(tmp_path / "nan", {}, extra=tensors)
    result = converted(again, tmp_path / "out")
    [finding] = [f for f in result.findings if f.code == "nan_scale"]
    assert finding.where == "model.layers.0.mlp.down_proj.weight_scale"
    assert finding.message.startswith("2 scale bytes are 255")
    assert result.manifest.layer("model.layers.0.mlp.down_proj").hazards == ["nan_scale"]
    assert files_of(restore(result.out, tmp_path / "back").out) == files_of(again)


def test_p54_fp8_layers_pass_through_byte_for_byte(tmp_path):
    every_byte = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    name = "model.layers.0.self_attn.q_proj"
    config = model_config(
        quant_config(layer_quant_config={"*q_proj": quant_layer(FP8_WEIGHT, None)})
    )
    extra = {f"{name}.weight": every_byte.view(4, 64), f"{name}.weight_scale": torch.rand(4)}
    root = write_checkpoint(tmp_path / "m", LINEARS, config=config, extra=extra)
    out = converted(root, tmp_path / "out").out
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors[f"{name}.weight"].view(torch.uint8), torch.arange(256).view(4, 64))
    assert torch.equal(tensors[f"{name}.weight_scale"], extra[f"{name}.weight_scale"])
    source, prepared = json.loads((out / DIGESTS_NAME).read_text())["tensors"][f"{name}.weight"]
    assert source == prepared


def test_p84_every_side_file_comes_along(small, tmp_path):
    side = ("tokenizer.json", "sub/modeling.py", "chat_template.jinja")
    out = converted(small, tmp_path / "out").out
    assert {name: (out / name).read_bytes() for name in side} == {
        name: (small / name).read_bytes() for name in side
    }


def test_p79_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """Eight sparse shards of 64 MB in a fresh process: what it takes beyond its imports."""
    linears = {f"model.layers.{i}.mlp.down_proj": (2048, 8192) for i in range(56)}
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.up_proj": (32, 256)})
    header: dict[str, object] = {}
    weight_map = {}
    for shard in range(8):
        header, offset = {}, 0
        for name in list(linears)[shard * 7 : shard * 7 + 7]:
            for tensor, cols in ((f"{name}.weight", 4096), (f"{name}.weight_scale", 256)):
                end = offset + 2048 * cols
                header[tensor] = {
                    "dtype": "U8",
                    "shape": [2048, cols],
                    "data_offsets": [offset, end],
                }
                weight_map[tensor] = f"model-{shard}.safetensors"
                offset = end
        raw = json.dumps(header).encode()
        with (root / f"model-{shard}.safetensors").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + offset)
    (root / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    program = (
        "import resource, sys, pathlib, torch\n"
        "from test_convert import converted, planned\n"
        "def peak():\n    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "converted(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), workers=2)\n"
        "print((peak() - before) // 1024)\n"
    )
    env = with_path(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", program, str(root), str(tmp_path / "out")],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 96  # MB; one shard alone is 59


def test_short_last_group_is_triton_only_and_reversible(tmp_path):
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.down_proj": (64, 80)})
    result = converted(root, tmp_path / "out")
    layer = result.manifest.layer("model.layers.0.mlp.down_proj")
    assert (layer.path, layer.hazards, layer.scale.shape) == ("triton", ["short_group"], [3, 64])
    assert files_of(restore(result.out, tmp_path / "back").out) == files_of(root)


def test_p10_odd_group_count_takes_the_triton_layout(tmp_path):
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.down_proj": (64, 672)})
    layer = converted(root, tmp_path / "out").manifest.layer("model.layers.0.mlp.down_proj")
    assert (layer.path, layer.scale.shape) == ("triton", [21, 64])


def test_expert_banks_with_flat_and_stacked_scales_come_back(tmp_path):
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randint(1, 255, shape, generator=generator, dtype=torch.uint8)

    for name, scale in (("flat", noise(3 * 64, 8)), ("stacked", noise(3, 64, 8))):
        at = "model.layers.0.mlp.experts.down_proj"
        root = write_checkpoint(
            tmp_path / name,
            {},
            extra={f"{at}.weight": noise(3, 64, 128), f"{at}.weight_scale": scale},
        )
        for layout in ("auto", "triton"):
            out = converted(root, tmp_path / f"{name}-{layout}", layout=layout).out
            assert verify(out, "deep", root).problems == ()
            assert files_of(restore(out, tmp_path / f"{name}-{layout}-back").out) == files_of(root)


def test_tensor_longer_than_one_piece_and_not_a_multiple_of_it(tmp_path):
    linears = {
        "model.layers.0.mlp.gate_proj": (8192 + 32, 2048),
        "model.layers.0.mlp.up_proj": (8192 + 32, 2048),
    }
    extra = {"model.embed_tokens.weight": torch.randn(3001, 1003)}
    root = write_checkpoint(tmp_path / "m", linears, extra=extra)
    out = converted(root, tmp_path / "out").out
    assert verify(out, "deep", root).problems == ()
    assert files_of(restore(out, tmp_path / "back").out) == files_of(root)


def everything(root: Path) -> dict[str, object]:
    """All names under `root` with what they are, links as links."""
    return {
        str(path): path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def unsafe(base: Path, source: Path, prepared: Path) -> dict[str, tuple[str, Path, bool]]:
    """(verb, output, --overwrite) by what is wrong with it; makes what must be there."""
    for name, target in (
        ("to-source", source),
        ("to-nowhere", base / "x"),
        ("loop", base / "loop"),
    ):
        (base / name).symlink_to(target)
    (base / "file").write_text("x")
    (base / "empty").mkdir()
    shutil.copytree(prepared, base / "with-notes")
    (base / "with-notes" / "notes.txt").write_text("x")
    shutil.copytree(prepared, base / "with-link")
    (base / "with-link" / "link").symlink_to(source)
    shutil.copytree(prepared, base / "bad-manifest")
    (base / "bad-manifest" / "mxfp4prep.json").write_text("{}")
    (base / "to-prepared").symlink_to(prepared)
    convert_to = {
        "the source": source,
        "the source by another way": source / ".." / source.name,
        "in the source": source / "out",
        "deep in the source": source / "sub" / "out",
        "in the source through a link": base / "to-source" / "out",
        "around the source": base,
        "the root": Path("/"),
        "a link to the source": base / "to-source",
        "a link to nothing": base / "to-nowhere",
        "a link to itself": base / "loop",
        "behind a link to itself": base / "loop" / "out",
        "a file": base / "file",
        "behind a file": base / "file" / "out",
        "nowhere": base / "no" / "out",
    }
    cases = {
        f"{what}{' with --overwrite' if overwrite else ''}": ("convert", path, overwrite)
        for what, path in convert_to.items()
        for overwrite in (False, True)
    }
    cases |= {
        "an empty folder": ("convert", base / "empty", False),
        "a prepared checkpoint": ("convert", prepared, False),
        "an empty folder with --overwrite": ("convert", base / "empty", True),
        "a foreign folder with --overwrite": ("convert", base / "with-notes" / "source", True),
        "a strange file in it": ("convert", base / "with-notes", True),
        "a strange link in it": ("convert", base / "with-link", True),
        "a manifest that is none": ("convert", base / "bad-manifest", True),
        "a link to a prepared one": ("convert", base / "to-prepared", True),
        "restore to itself": ("restore", prepared, False),
        "restore into itself": ("restore", prepared / "back", False),
        "restore around itself": ("restore", base, False),
        "restore to what exists": ("restore", source, False),
        "restore to a link": ("restore", base / "to-nowhere", False),
    }
    return cases


def test_no_unsafe_output_is_written_or_deleted(small, tmp_path, capsys, tried):
    from mxfp4prep import cli

    prepared = converted(small, tmp_path / "prepared").out
    cases = unsafe(tmp_path, small, prepared)
    before = everything(tmp_path)
    for what, (verb, out, overwrite) in cases.items():
        source = small if verb == "convert" else prepared
        flags = ["--overwrite"] if overwrite else []
        for resume in ([], ["--resume"]) if verb == "convert" else ([],):
            words = [verb, str(source), str(out), "--no-progress", *flags, *resume]
            assert cli.main(words) == (6 if "behind a link" in what else 5), what
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(":")[0] for line in lines[-2:]] == ["error", "hint"], what
        assert everything(tmp_path) == before, what
    tried("F7", len(cases))


class TestOutputSafety:
    def test_existing_output(self, small, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "precious").write_text("x")
        with pytest.raises(UnsafeOutput, match="exists already"):
            converted(small, out)
        with pytest.raises(UnsafeOutput, match="is not a prepared checkpoint"):
            convert(planned(small), out, overwrite=True)
        assert (out / "precious").read_text() == "x"

    def test_overwrite_replaces_a_prepared_checkpoint(self, small, tmp_path):
        out = converted(small, tmp_path / "out", layout="triton").out
        (out / "notes.txt").write_text("x")
        with pytest.raises(UnsafeOutput, match=r"will not delete them: found notes\.txt"):
            convert(planned(small), out, overwrite=True)
        (out / "notes.txt").unlink()
        convert(planned(small), out, overwrite=True)
        assert verify(out).problems == ()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]

    @pytest.mark.parametrize("where", ["m", "m/sub/out", ".", "link"])
    def test_in_around_or_through(self, small, tmp_path, where):
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UnsafeOutput):
            converted(small, tmp_path / where)
        assert not (tmp_path / "elsewhere").exists()

    def test_parent_missing(self, small, tmp_path):
        with pytest.raises(UnsafeOutput, match="no directory"):
            converted(small, tmp_path / "no" / "out")

    def test_prepared_source(self, small, tmp_path):
        out = converted(small, tmp_path / "out").out
        with pytest.raises(Unsupported, match="already prepared"):
            converted(out, tmp_path / "twice")

    @pytest.mark.parametrize(
        "name",
        [
            "source",
            "source/x",
            "SHA256SUMS/x",
            "mxfp4prep.json/x",
            "mxfp4prep.digests.json",
            "mxfp4prep.digests.json/x",
            "model-00001-of-00002.safetensors.mxfp4prep.part",
            "config.json.mxfp4prep.part/x",
            "sub/x.mxfp4prep.part",
        ],
    )
    def test_reserved_names(self, small, tmp_path, name):
        (small / name).parent.mkdir(exist_ok=True)
        (small / name).write_text("x")
        with pytest.raises(Unsupported, match="needs this name"):
            converted(small, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]

    def test_a_folder_called_as_an_index_that_the_output_needs(self, tmp_path):
        index = "model.safetensors.index.json"
        side_files = {f"{index}/x": b"x"}
        root = write_checkpoint(
            tmp_path / "m", LINEARS, shards=2, index=False, side_files=side_files
        )
        with pytest.raises(Unsupported, match="needs this name"):
            converted(root, tmp_path / "out")

    def test_files_called_like_ours_elsewhere_come_back(self, tmp_path):
        names = ("SHA256SUMS", "sub/source/x", "sub/SHA256SUMS/x", "sub/mxfp4prep.json", "a" * 240)
        side_files = {name: name.encode() for name in names}
        root = write_checkpoint(tmp_path / "m", LINEARS, side_files=side_files)
        out = converted(root, tmp_path / "out").out
        assert verify(out, "deep", root).problems == ()
        restore(out, tmp_path / "back")
        assert files_of(tmp_path / "back") == files_of(root)

    def test_a_name_that_is_too_long_while_it_is_written(self, small, tmp_path):
        (small / "sub" / ("\u00e9" * 120 + "a")).write_text("x")
        with pytest.raises(Unsupported, match="found 241 bytes, expected at most 240"):
            converted(small, tmp_path / "out")

    @pytest.mark.parametrize(
        "place", [b"m\xff", b"models--o\xff--n/snapshots/c\xff", b"models--o--n/snapshots/\xff"]
    )
    def test_a_source_whose_path_is_not_utf8_gives_an_output_that_can_be_read(
        self, tmp_path, place
    ):
        root = write_checkpoint(tmp_path / os.fsdecode(place), LINEARS)
        out = converted(root, tmp_path / "out").out
        assert verify(out, "deep", root).problems == ()
        source = m.parse((out / "mxfp4prep.json").read_bytes()).source
        assert "\\udcff" in f"{source.name} {source.repo} {source.commit}"

    def test_a_finding_about_half_a_character_can_be_read_again(self, tmp_path):
        config = model_config(quant_config(layer_type_quant_config={"\ud800": {}}))
        root = write_checkpoint(tmp_path / "m", LINEARS, config=config)
        out = converted(root, tmp_path / "out").out
        assert verify(out, "deep", root).problems == ()
        found = m.parse((out / "mxfp4prep.json").read_bytes()).findings
        assert any("\\ud800" in f"{finding.where} {finding.message}" for finding in found)

    def test_a_disk_that_takes_two_names_for_one_loses_no_file(self, tmp_path):
        record = write_file(tmp_path, "a", b"1", "side")
        (tmp_path / "A").symlink_to("a")  # stands for such a disk
        with pytest.raises(IOFailed, match="A: another file of this checkpoint has this name"):
            write_file(tmp_path, "A", b"2", "side")
        assert (tmp_path / record.name).read_bytes() == b"1"

    def test_a_file_that_holds_more_than_its_size_says(self, small, tmp_path, capsys):
        (small / "version").symlink_to("/proc/version")
        with pytest.raises(IOFailed, match="version: the file holds more than its size says"):
            converted(small, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]

    def test_another_mount_of_the_source_is_the_source(self, small, tmp_path, monkeypatch):
        (tmp_path / "mounted").mkdir()
        real = io.identity

        def identity(path, where=None):
            return real(small if path == tmp_path / "mounted" else path, where)

        monkeypatch.setattr(io, "identity", identity)
        with pytest.raises(UnsafeOutput, match="lies in the source"):
            converted(small, tmp_path / "mounted" / "out")
        assert list((tmp_path / "mounted").iterdir()) == []

    def test_default_name_is_beside_and_never_in_a_hub_cache(self, small, tmp_path, monkeypatch):
        assert default_output(small) == tmp_path / "m-mxfp4prep"
        monkeypatch.chdir(tmp_path)
        commit = "a" * 40
        snapshot = tmp_path / "models--org--Name-MXFP4" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for path in small.iterdir():
            if path.is_file():
                (snapshot / path.name).symlink_to(path)
        assert default_output(snapshot) == tmp_path / "Name-MXFP4-mxfp4prep"
        source = converted(snapshot, tmp_path / "out").manifest.source
        assert (source.name, source.repo, source.commit) == ("Name-MXFP4", "org/Name-MXFP4", commit)

    def test_workers(self, small, tmp_path):
        with pytest.raises(UsageError, match="--workers"):
            converted(small, tmp_path / "out", workers=0)

    def test_p82_room_is_checked_before_anything_is_written(self, small, tmp_path, monkeypatch):
        monkeypatch.setattr("mxfp4prep.io.free_nbytes", lambda path: 1 << 20)
        with pytest.raises(IOFailed, match="not enough room"):
            converted(small, tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_file_of_the_manifests_name_makes_no_prepared_checkpoint(small, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for content in ("", "{}"):
        (out / "mxfp4prep.json").write_text(content)
        with pytest.raises(UnsafeOutput, match="is not a prepared checkpoint"):
            convert(planned(small), out, overwrite=True)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (3,)), (torch.int64, (512,)), (torch.float64, (512,))]
)
def test_a_bias_that_cannot_go_with_its_layer_is_refused(tmp_path, dtype, shape):
    extra = {"model.layers.0.self_attn.o_proj.bias": torch.ones(shape, dtype=dtype)}
    root = write_checkpoint(tmp_path / "m", LINEARS, extra=extra)
    with pytest.raises(InvalidCheckpoint, match=r"o_proj\.bias: cannot go with its layer"):
        converted(root, tmp_path / "out")


@pytest.mark.parametrize(
    "rules", [["*.k_proj=qkv"], ["*qkv_proj=qkv"], ["*.k_proj=column", "*.v_proj=column"]]
)
def test_what_a_rule_says_holds_when_loading_too(tmp_path, rules):
    import mxfp4prep

    at = "model.layers.0.self_attn"
    linears = {f"{at}.{p}_proj": (n, 256) for p, n in (("q", 512), ("k", 128), ("v", 128))}
    linears["model.layers.1.self_attn.qkv_proj"] = (768, 256)
    root = write_checkpoint(tmp_path / "m", linears)
    surveyed = survey(open_checkpoint(root), (1, 4, 16), parse_rules(rules))
    out = convert(make_plan(surveyed, (1,), "triton"), tmp_path / "out").out
    for tp in (4, 16):
        prepared = mxfp4prep.load(out, tp_rank=1, tp_size=tp)
        for item in surveyed.layers:
            name, verdict = item.layer.name, item.verdicts[tp]
            if verdict.path == "impossible":
                with pytest.raises(CannotShard):
                    prepared[name]
            else:
                assert prepared[name].n == verdict.scale_shard[0], name


@pytest.mark.parametrize("name", ["back\\slash.txt", "a\\nb", "new\nline"])
def test_odd_side_file_names_go_there_and_back(small, tmp_path, name):
    (small / name).write_text("x")
    out = converted(small, tmp_path / "out").out
    assert verify(out, "deep", small).problems == ()
    assert files_of(restore(out, tmp_path / "back").out) == files_of(small)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, capture_output=True)
    assert done.returncode == 0


def test_config_with_a_lone_surrogate(tmp_path):
    root = write_checkpoint(tmp_path / "m", LINEARS, config=model_config(note="\ud800"))
    out = converted(root, tmp_path / "out").out
    assert json.loads((out / "config.json").read_text())["note"] == "\ud800"
    assert verify(out, "deep", root).problems == ()
    assert files_of(restore(out, tmp_path / "back").out) == files_of(root)


def test_source_rewritten_in_place_meanwhile(small, tmp_path, monkeypatch):
    plan = planned(small)
    path = small / "model-00002-of-00002.safetensors"
    from mxfp4prep import io

    real = io.pread_into

    def touch(fd, view, offset, where):
        real(fd, view, offset, where)
        if where == path.name:
            os.utime(path, ns=(5, 5))

    monkeypatch.setattr(io, "pread_into", touch)
    with pytest.raises(IOFailed, match="changed while it was being read"):
        convert(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("old", [b'"pt"', b'"BF16"'])
def test_restore_refuses_a_header_that_was_edited(small, tmp_path, old):
    out = converted(small, tmp_path / "out").out
    path = next(p for p in out.glob("*.safetensors") if old in p.read_bytes())
    new = {b'"pt"': b'"qt"', b'"BF16"': b'"I16" '}[old]
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(IntegrityError, match="is not the file that was prepared"):
        restore(out, tmp_path / "back")
    assert not (tmp_path / "back").exists()


class TestFailuresLeaveNothing:
    def check(self, tmp_path):
        assert [p.name for p in tmp_path.iterdir() if p.name != "m"] == []

    def test_source_changed_since_the_plan(self, small, tmp_path):
        plan = planned(small)
        name = "model-00001-of-00002.safetensors"
        tensors = load_file(small / name)
        from safetensors.torch import save_file

        save_file({**tensors, "new": torch.ones(3)}, small / name, metadata={"format": "pt"})
        with pytest.raises(IOFailed, match="changed since it was planned"):
            convert(plan, tmp_path / "out")
        self.check(tmp_path)

    def test_source_cut_while_being_read(self, small, tmp_path, monkeypatch):
        plan = planned(small)
        from mxfp4prep import io

        path = small / "model-00002-of-00002.safetensors"
        real = io.pread_into

        def cut(fd, view, offset, where):
            if where == path.name and path.stat().st_size > 5000:
                os.truncate(path, 5000)
            real(fd, view, offset, where)

        monkeypatch.setattr(io, "pread_into", cut)
        with pytest.raises(IOFailed, match="shorter"):
            convert(plan, tmp_path / "out", workers=1)
        self.check(tmp_path)

    @pytest.mark.parametrize("operation", ["write_all", "fsync", "rename", "create", "fsync_dir"])
    @pytest.mark.parametrize("nth", [1, 3, 8])
    def test_any_operation_may_fail(self, small, tmp_path, monkeypatch, operation, nth):
        from mxfp4prep import io

        real, calls = getattr(io, operation), []

        def fail(*args, **kwargs):
            calls.append(1)
            if len(calls) == nth:
                raise IOFailed("disk", "the disk is full")
            return real(*args, **kwargs)

        monkeypatch.setattr(io, operation, fail)
        try:
            converted(small, tmp_path / "out")
        except IOFailed:
            if operation != "fsync_dir":
                self.check(tmp_path)
        else:
            assert len(calls) < nth
        monkeypatch.undo()
        if not (tmp_path / "out").exists():
            converted(small, tmp_path / "out")
        assert verify(tmp_path / "out", "deep", small).problems == ()

    def test_interrupt(self, small, tmp_path):
        def interrupt(nbytes):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(planned(small), tmp_path / "out", progress=interrupt)
        self.check(tmp_path)

    def test_restore_refuses_damaged_bytes(self, small, tmp_path):
        out = converted(small, tmp_path / "out").out
        path = next(out.glob("model-00001*"))
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        with pytest.raises(IntegrityError, match="does not give the source's bytes back"):
            restore(out, tmp_path / "back")
        assert not (tmp_path / "back").exists()


def test_layout_rule_is_checked_again_when_bytes_move():
    from mxfp4prep.plan import TensorPlan
    from mxfp4prep.safefile import TensorEntry
    from mxfp4prep.stream import Scratch, move

    entry = TensorEntry("w", "U8", (17, 32), 0, 17 * 32)
    plan = TensorPlan(entry, entry, "tile16x16", 1, 17, 32)
    with pytest.raises(LayoutError, match="w"):
        list(move(0, 0, plan, inverse=False, scratch=Scratch(), take=bytearray, where="f"))


def test_digests_are_the_tensors_own(small, tmp_path):
    import xxhash

    result = converted(small, tmp_path / "out")
    raw = (result.out / "mxfp4prep.digests.json").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == result.manifest.digests.sha256
    document = json.loads(raw)
    assert document["algorithm"] == "xxh3_128"
    for root, position in ((small, 0), (result.out, 1)):
        for path in root.glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                found = xxhash.xxh3_128_hexdigest(tensor.view(torch.uint8).numpy().tobytes())
                assert document["tensors"][name][position] == found, name


def test_model_config_without_quark_is_refused(tmp_path):
    config = model_config()
    del config["quantization_config"]
    root = write_checkpoint(tmp_path / "m", LINEARS, config=config)
    with pytest.raises(Unsupported):
        converted(root, tmp_path / "out")
