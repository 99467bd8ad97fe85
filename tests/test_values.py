"""Scale bytes of real and made checkpoints, counted by torch and by plain Python beside ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quark_factory import model_config, mxfp4_tensors, quant_config, write_checkpoint
from safetensors import safe_open

from mxfp4prep import io, values
from mxfp4prep.checkpoint import Checkpoint, open_checkpoint
from mxfp4prep.errors import IOFailed, Unsupported
from mxfp4prep.findings import Finding
from mxfp4prep.parallel import Topology
from mxfp4prep.quark import QuarkLayer, classify
from mxfp4prep.values import LayerValues, ScaleValues, read_values, value_findings

FIXTURES = Path(__file__).parent / "data" / "fixtures"
UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"
BANK = "model.layers.0.mlp.experts.up_proj"


def opened(root: Path) -> tuple[Checkpoint, tuple[QuarkLayer, ...]]:
    checkpoint = open_checkpoint(root)
    config = checkpoint.config
    return checkpoint, classify(checkpoint.tensors, config, Topology.from_config(config)).layers


def read(root: Path) -> ScaleValues:
    return read_values(*opened(root))


def scales(root: Path) -> dict[str, torch.Tensor]:
    """Every U8 or E8M0 scale, read by the safetensors library."""
    found = {}
    for path in sorted(root.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name.endswith(("weight_scale", "weight_quantizer.scale")):
                    tensor = file.get_tensor(name)
                    if tensor.element_size() == 1:
                        found[name] = tensor.view(torch.uint8)
    return found


def with_scales(root: Path, **filled: torch.Tensor) -> Path:
    """A checkpoint whose linears (n, 32 * columns) have exactly these scales, by leaf name."""
    extra = {}
    for leaf, scale in filled.items():
        *lead, n, columns = scale.shape
        name = f"model.layers.0.mlp.{leaf}"
        extra[f"{name}.weight"] = torch.zeros((*lead, n, 16 * columns), dtype=torch.uint8)
        extra[f"{name}.weight_scale"] = scale
    return write_checkpoint(root, {}, extra=extra)


def test_real_checkpoints_against_torch(mxfp4_fixture):
    found = read(mxfp4_fixture)
    stored = torch.cat([scale.flatten() for scale in scales(mxfp4_fixture).values()])
    ordinary = stored[(stored > 1) & (stored < 255)]
    assert found == ScaleValues(
        nbytes=stored.numel(),
        scales=stored.numel(),
        nan=0,
        zero_blocks=int((stored < 2).sum()),
        minimum=int(ordinary.min()),
        maximum=int(ordinary.max()),
        layers=(),
        zero_layers=(),
    )
    assert [finding.code for finding in value_findings(found)] == ["zero_blocks"]


@pytest.mark.parametrize(
    ("release", "byte"), [("0.9", 0), ("0.10", 0), ("0.11.2", 0), ("0.12.post1", 1)]
)
def test_p59_blocks_of_zeros_are_counted_whichever_byte_the_release_wrote(release, byte):
    root = FIXTURES / f"version-{release}"
    # Two blocks of each of the seven weights were made of zeros.
    assert read(root).zero_blocks == 14
    assert sum(int((scale == byte).sum()) for scale in scales(root).values()) == 14


def test_every_byte_value_is_counted_as_what_it_means(tmp_path):
    every = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    found = read(with_scales(tmp_path / "m", up_proj=every))
    assert found == ScaleValues(
        nbytes=256,
        scales=256,
        nan=1,
        zero_blocks=2,
        minimum=2,
        maximum=254,
        layers=(LayerValues(UP, 1, ((7, 31),), 2, 2, 254),),
    )


def planted(scale: torch.Tensor, places: list[int]) -> torch.Tensor:
    scale.view(-1)[places] = 255
    return scale


def test_p59_nan_is_counted_and_placed_across_the_borders_of_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(values, "CHUNK_NBYTES", 100)
    scale = planted(torch.full((30, 24), 120, dtype=torch.uint8), [0, 99, 100, 199, 300, 719])
    scale[1, 0], scale[29, 22] = 3, 251
    clean = torch.full((4, 8), 90, dtype=torch.uint8)
    found = read(with_scales(tmp_path / "m", down_proj=scale, up_proj=clean))
    # 99 = 4 * 24 + 3, 100 = 4 * 24 + 4, 199 = 8 * 24 + 7, 300 = 12 * 24 + 12, 719 = 29 * 24 + 23
    places = ((0, 0), (4, 3), (4, 4), (8, 7), (12, 12), (29, 23))
    assert found.layers == (LayerValues(DOWN, 6, places, 0, 3, 251),)
    assert (found.nan, found.minimum, found.maximum) == (6, 3, 251)


def test_only_the_first_places_are_kept_and_all_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(values, "CHUNK_NBYTES", 10)
    scale = torch.full((4, 8), 255, dtype=torch.uint8)
    (layer,) = read(with_scales(tmp_path / "m", up_proj=scale)).layers
    assert layer == LayerValues(UP, 32, tuple((0, column) for column in range(8)), 0, 0, 0)


def test_layers_with_nan_come_in_the_order_they_were_asked_for(tmp_path):
    ones = torch.full((4, 8), 100, dtype=torch.uint8)
    root = with_scales(
        tmp_path / "m", a=planted(ones.clone(), [5]), b=ones, c=planted(ones.clone(), [6, 7])
    )
    checkpoint, layers = opened(root)
    found = read_values(checkpoint, reversed(layers))
    assert [(layer.layer[-1], layer.nan) for layer in found.layers] == [("c", 2), ("a", 1)]
    assert read_values(checkpoint, layers[1:2]).layers == ()
    assert read_values(checkpoint, layers[:1]).scales == 32
    assert read_values(checkpoint, ()) == ScaleValues(0, 0, 0, 0, 0, 0, ())


@pytest.mark.parametrize("flat", [False, True])
def test_a_bank_counts_rows_over_all_its_experts(tmp_path, flat):
    scale = torch.randint(60, 200, (3, 16, 8), generator=torch.Generator().manual_seed(3))
    scale = scale.to(torch.uint8)
    scale[2, 5, 7] = scale[0, 1, 2] = 255
    scale[1] = 1
    extra = {
        f"{BANK}.weight": torch.zeros((3, 16, 128), dtype=torch.uint8),
        f"{BANK}.weight_scale": scale.reshape(48, 8) if flat else scale,
    }
    found = read(write_checkpoint(tmp_path / "m", {}, extra=extra))
    (layer,) = found.layers
    assert layer.nan_places == ((1, 2), (2 * 16 + 5, 7))
    assert layer.zero_blocks == found.zero_blocks == 16 * 8
    assert found.zero_layers == (f"{BANK} (expert 1)",)


def test_p51_p52_both_scale_dtypes_mean_the_same_bytes(tmp_path):
    made = {}
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        tensors = mxfp4_tensors(UP, 64, 256, generator=torch.Generator().manual_seed(1))
        scale = tensors[f"{UP}.weight_scale"]
        scale[0, :5] = torch.tensor([120, 125, 127, 130, 140])
        scale[9, 3], scale[9, 4] = 255, 0
        tensors[f"{UP}.weight_scale"] = scale.view(dtype)
        made[dtype] = read(write_checkpoint(tmp_path / str(dtype), {}, extra=tensors))
    assert made[torch.uint8] == made[torch.float8_e8m0fnu]
    assert made[torch.uint8].layers[0].nan_places == ((9, 3),)
    assert made[torch.uint8].zero_blocks >= 1


def test_a_layer_of_zero_blocks_only_is_named(tmp_path):
    ones = torch.ones((4, 8), dtype=torch.uint8)
    mixed = ones.clone()
    mixed[0] = 0
    almost = ones.clone()
    almost[3, 7] = 2
    found = read(with_scales(tmp_path / "m", a=ones, b=mixed, c=almost))
    assert found.zero_layers == ("model.layers.0.mlp.a", "model.layers.0.mlp.b")
    assert (found.zero_blocks, found.minimum, found.maximum) == (95, 2, 2)


def test_what_stands_late_in_a_long_chunk_is_seen(tmp_path):
    scale = torch.full((200, 100), 120, dtype=torch.uint8)
    scale[:60] = 0
    scale[170:, :50] = torch.arange(118, 123).repeat(10)
    scale[198, 0], scale[198, 99], scale[199, 99] = 17, 201, 255
    (layer,) = read(with_scales(tmp_path / "m", up_proj=scale)).layers
    assert layer == LayerValues(UP, 1, ((199, 99),), 6000, 17, 201)


def test_extremes_are_a_layers_own_and_zeros_are_none_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(values, "CHUNK_NBYTES", 2)
    filled = {
        "a": [[0, 1], [255, 1], [110, 112]],  # zeros first, before anything is known
        "b": [[100, 130], [120, 120], [2, 255]],
        "c": [[1, 255]],  # nothing ordinary, after much is known
        "d": [[115, 114], [255, 113], [0, 1]],
    }
    root = with_scales(tmp_path / "m", **{k: torch.tensor(v).byte() for k, v in filled.items()})
    found = read(root)
    extremes = {layer.layer[-1]: (layer.minimum, layer.maximum) for layer in found.layers}
    assert extremes == {"a": (110, 112), "b": (2, 130), "c": (0, 0), "d": (113, 115)}
    assert (found.minimum, found.maximum) == (2, 130)


def plainly(scale: bytes, columns: int) -> tuple[int, list[tuple[int, int]], int, int, int]:
    """What one layer's bytes hold, one byte at a time."""
    nan = [i for i, byte in enumerate(scale) if byte == 255]
    ordinary = [byte for byte in scale if 2 <= byte <= 254]
    places = [(i // columns, i % columns) for i in nan]
    zeros = sum(byte < 2 for byte in scale)
    return len(nan), places[:8], zeros, min(ordinary, default=0), max(ordinary, default=0)


BYTES = st.one_of(st.sampled_from([0, 1, 2, 120, 121, 254, 255]), st.integers(0, 255), st.just(118))


@settings(max_examples=150, deadline=None)
@given(
    columns=st.integers(1, 5),
    layers=st.lists(st.lists(BYTES, min_size=1, max_size=60), min_size=1, max_size=3),
    chunk=st.integers(1, 40),
)
def test_any_bytes_in_chunks_of_any_size(tmp_path_factory, columns, layers, chunk):
    filled = {}
    for i, content in enumerate(layers):
        padded = content + [119] * (-len(content) % columns)
        filled[f"l{i}"] = torch.tensor(padded, dtype=torch.uint8).reshape(-1, columns)
    root = with_scales(tmp_path_factory.mktemp("any") / "m", **filled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "CHUNK_NBYTES", chunk)
        found = read(root)
    expected = {
        f"model.layers.0.mlp.{leaf}": plainly(bytes(scale.flatten().tolist()), columns)
        for leaf, scale in filled.items()
    }
    assert {each.layer for each in found.layers} == {n for n, v in expected.items() if v[0]}
    for each in found.layers:
        nan, places, zeros, minimum, maximum = expected[each.layer]
        assert each == LayerValues(each.layer, nan, tuple(places), zeros, minimum, maximum)
    whole = b"".join(bytes(scale.flatten().tolist()) for scale in filled.values())
    nan, _, zeros, minimum, maximum = plainly(whole, columns)
    assert (found.nan, found.zero_blocks) == (nan, zeros)
    assert (found.minimum, found.maximum) == (minimum, maximum)
    dead = {f"model.layers.0.mlp.{leaf}" for leaf, s in filled.items() if int(s.max()) < 2}
    assert set(found.zero_layers) == dead


# What is read, and how much of it at a time


def sparse(root: Path, n: int, k: int) -> Path:
    """One linear of real size whose weight is a hole; the scale is 120 but for its last row."""
    shapes = {f"{UP}.weight": [n, k // 2], f"{UP}.weight_scale": [n, k // 32]}
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + shape[0] * shape[1]
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    root.mkdir()
    (root / "config.json").write_text(json.dumps(model_config(quant_config(exclude=[]))))
    with (root / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.seek(n * k // 2, os.SEEK_CUR)
        file.write(b"x" * ((n - 1) * k // 32) + b"\xff" * (k // 32))
    return root


def test_memory_is_bounded_and_nothing_but_scales_is_read(tmp_path, monkeypatch):
    root = sparse(tmp_path / "m", 16384, 32768)  # 16 MiB of scales beside 256 MiB of weight
    checkpoint, layers = opened(root)
    reads = []
    pread = io.pread_into

    def watched(fd, view, offset, where):
        reads.append((offset, len(view)))
        pread(fd, view, offset, where)

    monkeypatch.setattr(io, "pread_into", watched)
    seen = []
    tracemalloc.start()
    found = read_values(checkpoint, layers, seen.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.layers == (
        LayerValues(UP, 1024, tuple((16383, c) for c in range(8)), 0, ord("x"), ord("x")),
    )
    start = checkpoint.shards[0].header.data_start + layers[0].scale.begin
    assert max(size for _, size in reads) <= 8 << 20
    assert len(reads) > 1
    assert [offset for offset, _ in reads] == [
        start + sum(size for _, size in reads[:i]) for i in range(len(reads))
    ]
    assert sum(size for _, size in reads) == sum(seen) == 16 << 20 == found.nbytes
    assert peak < 10 << 20


def test_each_shard_is_opened_once_and_read_forwards(tmp_path, monkeypatch):
    linears = {f"model.layers.{i}.mlp.{leaf}": (64, 64) for i in range(9) for leaf in ("b", "a")}
    root = write_checkpoint(tmp_path / "m", linears, shards=3)
    checkpoint, layers = opened(root)
    opens, reads = [], []
    open_read, pread = io.open_read, io.pread_into
    monkeypatch.setattr(io, "open_read", lambda path: (opens.append(path), open_read(path))[1])
    monkeypatch.setattr(
        io, "pread_into", lambda fd, *rest: (reads.append((fd, rest[1])), pread(fd, *rest))[1]
    )
    closed = []
    close = io.close
    monkeypatch.setattr(io, "close", lambda fd, *rest: (closed.append(fd), close(fd, *rest))[1])
    found = read_values(checkpoint, reversed(layers))
    assert [path.name for path in opens] == [shard.name for shard in checkpoint.shards]
    assert len(closed) == 3
    assert found.nbytes == 18 * 128
    offsets = [offset for _, offset in reads]
    assert sum(a >= b for a, b in pairwise(offsets)) <= 2


def test_neither_torch_nor_numpy_is_loaded(mxfp4_fixture):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mxfp4prep.checkpoint import open_checkpoint\n"
        "from mxfp4prep.survey import survey\n"
        "from mxfp4prep.values import read_values, value_findings\n"
        f"found = survey(open_checkpoint(Path({str(mxfp4_fixture)!r})))\n"
        "made = read_values(found.checkpoint, [item.layer for item in found.layers])\n"
        "assert made.nbytes and value_findings(made)\n"
        "print(sorted({'torch', 'numpy', 'mmap'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# What can go wrong


def test_a_checkpoint_on_the_hub_has_to_be_downloaded_first(tmp_path):
    checkpoint, layers = opened(with_scales(tmp_path / "m", a=torch.ones(4, 8).to(torch.uint8)))
    remote = replace(checkpoint, absent=frozenset({"model.safetensors"}))
    with pytest.raises(Unsupported, match=r"model\.safetensors") as raised:
        read_values(remote, layers)
    assert "download" in raised.value.hint
    elsewhere = replace(checkpoint, absent=frozenset({"other.safetensors"}))
    assert read_values(elsewhere, layers).nbytes == 32


def two_layers(root: Path) -> tuple[Path, Checkpoint, tuple[QuarkLayer, ...]]:
    root = write_checkpoint(root, {UP: (64, 256), DOWN: (64, 256)})
    return root / "model.safetensors", *opened(root)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_than_its_header_said_is_refused(tmp_path, change):
    path, checkpoint, layers = two_layers(tmp_path / "m")
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(IOFailed) as raised:
        read_values(checkpoint, layers)
    assert str(raised.value) == (
        "model.safetensors: the file changed since its header was read: "
        f"found {size + change} bytes, expected {size} bytes, untouched"
    )
    assert "download" in raised.value.hint


def test_a_file_that_shrinks_between_two_reads_is_an_error(tmp_path):
    path, checkpoint, layers = two_layers(tmp_path / "m")
    with pytest.raises(IOFailed, match="became shorter while being read"):
        read_values(checkpoint, layers, lambda nbytes: os.truncate(path, 100))


def test_a_file_that_is_rewritten_meanwhile_is_an_error(tmp_path):
    path, checkpoint, layers = two_layers(tmp_path / "m")
    with pytest.raises(IOFailed, match="changed since its header was read"):
        read_values(checkpoint, layers, lambda nbytes: os.utime(path, (1, 1)))


def test_a_file_that_is_gone_is_an_error(tmp_path):
    path, checkpoint, layers = two_layers(tmp_path / "m")
    path.unlink()
    with pytest.raises(IOFailed, match="no such file"):
        read_values(checkpoint, layers)


def test_a_failed_read_closes_the_file(tmp_path, monkeypatch):
    _, checkpoint, layers = two_layers(tmp_path / "m")
    closed = []
    close = io.close
    monkeypatch.setattr(io, "close", lambda fd, *rest: (closed.append(fd), close(fd, *rest))[1])

    def failing(fd, view, offset, where):
        raise IOFailed(where, "the disk reported an input/output error")

    monkeypatch.setattr(io, "pread_into", failing)
    with pytest.raises(IOFailed, match="input/output"):
        read_values(checkpoint, layers)
    assert len(closed) == 1


# What is said about it


def test_clean_scales_are_not_worth_a_word():
    assert value_findings(ScaleValues(100, 100, 0, 0, 110, 124, ())) == ()


def test_the_finding_about_nan_says_how_many_and_where():
    layers = (
        LayerValues("a", 1, ((3, 4),), 0, 2, 3),
        LayerValues("b", 1005, tuple((0, c) for c in range(8)), 0, 2, 3),
        LayerValues("c", 2, ((5, 6), (7, 8)), 0, 2, 3),
        LayerValues("d", 1, ((1, 1),), 0, 2, 3),
    )
    (found,) = value_findings(ScaleValues(100_000, 100_000, 1009, 0, 2, 3, layers))
    assert (found.code, found.severity, found.where) == ("nan_scale", "warning", "a")
    assert found.message.startswith(
        "1,009 scale bytes are 255 (NaN) in 4 layers: a at [3, 4], "
        "b at [0, 0], [0, 1], [0, 2] and 1,002 more, c at [5, 6], [7, 8] and 1 more; "
    )


def test_findings_about_zeros():
    names = ("model.a", "model.b (expert 3)")
    dead, blocks = value_findings(ScaleValues(2_000, 2_000, 0, 1500, 2, 3, (), names))
    assert (dead.code, dead.severity, dead.where) == ("zero_layer", "warning", "model.a")
    assert "in 2 layers: model.a, model.b (expert 3); dead by intent" in dead.message
    assert isinstance(blocks, Finding)
    assert (blocks.code, blocks.severity) == ("zero_blocks", "note")
    assert blocks.message.startswith("1,500 of 2,000 scale bytes are 0 or 1")
    one, _ = value_findings(ScaleValues(2_000, 2_000, 0, 1500, 2, 3, (), names[:1]))
    assert "in 1 layer: model.a; " in one.message
