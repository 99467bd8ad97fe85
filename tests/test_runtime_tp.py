"""Cutting for ranks: the right rows and columns, only their bytes, repacked where it must be."""

from __future__ import annotations

import warnings

import pytest
import torch
from prepared_factory import Layer, build, fake_quantize64

import mxfp4prep
from mxfp4prep import RepackWarning
from mxfp4prep.errors import CannotShard, UsageError

BLOCK = "model.layers.0"
HIDDEN, HEADS, KV_HEADS, HEAD, INTER = 256, 8, 2, 64, 512
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD}
Q, KV = HEADS * HEAD, KV_HEADS * HEAD


def rank_block(start: int, rows: int, tp: int, rank: int) -> list[int]:
    """Rows of an even cut of rows start..start+rows."""
    width = rows // tp
    return list(range(start + rank * width, start + (rank + 1) * width))


def kv_block(start: int, tp: int, rank: int) -> list[int]:
    """Rows of the KV heads a rank needs: the head that its query heads belong to."""
    first = rank * HEADS // tp // (HEADS // KV_HEADS)
    heads = max(1, KV_HEADS // tp)
    return list(range(start + first * HEAD, start + (first + heads) * HEAD))


ROWS = {  # name -> (n, rows of a rank)
    f"{BLOCK}.self_attn.q_proj": (Q, lambda tp, rank: rank_block(0, Q, tp, rank)),
    f"{BLOCK}.self_attn.k_proj": (KV, lambda tp, rank: kv_block(0, tp, rank)),
    f"{BLOCK}.self_attn.v_proj": (KV, lambda tp, rank: kv_block(0, tp, rank)),
    f"{BLOCK}.mlp.gate_proj": (INTER, lambda tp, rank: rank_block(0, INTER, tp, rank)),
    f"{BLOCK}.mlp.up_proj": (INTER, lambda tp, rank: rank_block(0, INTER, tp, rank)),
    "fused.self_attn.qkv_proj": (
        Q + 2 * KV,
        lambda tp, rank: (
            rank_block(0, Q, tp, rank) + kv_block(Q, tp, rank) + kv_block(Q + KV, tp, rank)
        ),
    ),
    "fused.mlp.gate_up_proj": (
        2 * INTER,
        lambda tp, rank: rank_block(0, INTER, tp, rank) + rank_block(INTER, INTER, tp, rank),
    ),
    "model.fc1": (1024, lambda tp, rank: rank_block(0, 1024, tp, rank)),
    "model.router": (64, lambda tp, rank: list(range(64))),
}
COLUMNS = {f"{BLOCK}.mlp.down_proj": (256, 2048), "model.fc2": (64, 2048)}


@pytest.fixture(scope="module", params=["asm", "triton", "kept"])
def model(request, tmp_path_factory):
    path = request.param
    layers = [Layer(name, n, HIDDEN, path, bias=True) for name, (n, _) in ROWS.items()]
    layers += [Layer(name, n, k, path, bias=True) for name, (n, k) in COLUMNS.items()]
    root = tmp_path_factory.mktemp("tp") / path
    return root, build(root, layers, config=CONFIG, shards=3), path


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", list(ROWS))
def test_row_pieces(model, name, tp):
    root, layers, path = model
    layer, rows_of = layers[name], ROWS[name][1]
    x = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(1))
    expected = fake_quantize64(x) @ layer.dense.T + layer.bias_values.double()
    for rank in range(tp):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            piece = mxfp4prep.load(root, tp_rank=rank, tp_size=tp)[name]
        rows = rows_of(tp, rank)
        assert (piece.n, piece.k, piece.path) == (len(rows), HIDDEN, path)
        assert torch.equal(piece.dequantize().double(), layer.dense[rows])
        assert torch.equal(piece.bias, layer.bias_values[rows])
        torch.testing.assert_close(piece(x).double(), expected[:, rows], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", list(COLUMNS))
def test_column_pieces_add_up(model, name, tp):
    root, layers, path = model
    layer = layers[name]
    width = layer.k // tp
    x = torch.randn((3, layer.k), generator=torch.Generator().manual_seed(1))
    total = torch.zeros((3, layer.n), dtype=torch.float64)
    for rank in range(tp):
        piece = mxfp4prep.load(root, tp_rank=rank, tp_size=tp)[name]
        columns = slice(rank * width, (rank + 1) * width)
        assert (piece.n, piece.k, piece.path) == (layer.n, width, path)
        assert torch.equal(piece.dequantize().double(), layer.dense[:, columns])
        assert (piece.bias is None) == (rank > 0), "one rank adds the bias"
        total += piece(x[:, columns]).double()
    expected = fake_quantize64(x) @ layer.dense.T + layer.bias_values.double()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_only_the_bytes_of_the_piece_are_read(model, tp):
    root, _, _ = model
    for name, (n, rows_of) in ROWS.items():
        prepared = mxfp4prep.load(root, tp_rank=tp - 1, tp_size=tp)
        assert prepared.bytes_read == 0
        prepared[name]
        rows = len(rows_of(tp, tp - 1))
        assert prepared.bytes_read == rows * (HIDDEN // 2 + HIDDEN // 32) + 2 * n  # a bf16 bias
        prepared[name]
        assert prepared.bytes_read == rows * (HIDDEN // 2 + HIDDEN // 32) + 2 * n, "kept"
    for name, (n, k) in COLUMNS.items():
        prepared = mxfp4prep.load(root, tp_rank=tp - 1, tp_size=tp)
        prepared[name]
        bias = 2 * n  # read by all ranks, kept by the first
        assert prepared.bytes_read - n * (k // tp // 2 + k // tp // 32) in (0, bias)


def one(tmp_path, layer: Layer, **config):
    build(tmp_path, [layer], config=config)
    return layer


REPACKED = [  # stored asm; at this degree it is not, for this reason
    (Layer(f"{BLOCK}.self_attn.o_proj", 512, 512), 4, "K is not a multiple of 256"),
    (Layer("model.fc1", 192, 256), 2, "96 scale rows"),
    (Layer("model.fc1", 96, 256), 2, "not a multiple of 32"),
    (Layer("model.fc1", 64, 256), 4, "not a multiple of 32"),
    (Layer("mlp.gate_up_proj", 192, 256), 4, "multiple of 32"),
    (Layer("mlp.gate_up_proj", 192, 256), 2, "96 scale rows"),
    (Layer("mlp.gate_up_proj", 96, 256), 1, "96 scale rows"),
    (Layer("mlp.gate_up_proj", 320, 256), 2, "borders cut through tiles"),
]


@pytest.mark.parametrize(("layer", "tp", "why"), REPACKED)
def test_repacked_exactly_once_with_a_warning(tmp_path, layer, tp, why):
    layer = one(tmp_path, Layer(layer.name, layer.n, layer.k))
    pieces = []
    for rank in range(tp):
        prepared = mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=tp)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            piece = prepared[layer.name]
            assert prepared[layer.name] is piece
        assert caught[0].category is RepackWarning
        assert len(caught) == 1
        assert layer.name in str(caught[0].message)
        assert why in str(caught[0].message)
        assert piece.path == "triton"
        assert piece.layouts == ("raw", "transposed")
        assert prepared.bytes_read == layer.n * (layer.k // 2 + layer.k // 32), "read whole"
        pieces.append(piece.dequantize().double())
    if layer.name.endswith("o_proj"):
        assert torch.equal(torch.cat(pieces, dim=1), layer.dense)
    elif layer.name.endswith("gate_up_proj"):
        gates, ups = zip(*(piece.chunk(2) for piece in pieces), strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), layer.dense)
    else:
        assert torch.equal(torch.cat(pieces), layer.dense)


def test_repack_warning_is_a_runtime_warning():
    assert issubclass(RepackWarning, RuntimeWarning)


def test_repacked_layer_still_computes(tmp_path):
    layer = one(tmp_path, Layer("self_attn.o_proj", 512, 512))
    x = torch.randn((5, 512), generator=torch.Generator().manual_seed(0))
    total = torch.zeros((5, 512), dtype=torch.float64)
    for rank in range(4):
        with pytest.warns(RepackWarning):
            piece = mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=4)["self_attn.o_proj"]
        total += piece(x[:, rank * 128 : (rank + 1) * 128]).double()
    expected = fake_quantize64(x) @ layer.dense.T
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-3)


def test_triton_and_kept_layers_cut_at_any_32_columns(tmp_path):
    """21 groups do not divide; 20 do."""
    for path in ("triton", "kept"):
        root = tmp_path / path
        layer = one(root, Layer("mlp.down_proj", 50, 640, path))
        pieces = [
            mxfp4prep.load(root, tp_rank=rank, tp_size=4)[layer.name].dequantize()
            for rank in range(4)
        ]
        assert torch.equal(torch.cat(pieces, dim=1).double(), layer.dense)


@pytest.mark.parametrize(
    ("layer", "tp", "reason", "words"),
    [
        (Layer("mlp.down_proj", 64, 1408, "triton"), 8, "split_groups", "5.5 groups"),
        (Layer("mlp.down_proj", 64, 1440, "triton"), 2, "split_groups", "22.5 groups"),
        (Layer("mlp.down_proj", 64, 320, "triton"), 3, "split_cols", "do not divide"),
        (Layer("model.fc1", 100, 64, "triton"), 8, "split_rows", "do not divide"),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path, layer, tp, reason, words):
    one(tmp_path, layer)
    prepared = mxfp4prep.load(tmp_path, tp_rank=1, tp_size=tp)
    with pytest.raises(CannotShard, match=words) as caught:
        prepared[layer.name]
    assert caught.value.reason == reason
    assert caught.value.where == layer.name
    assert "tp 1, 2" in caught.value.hint
    assert prepared.bytes_read == 0


@pytest.mark.parametrize(
    ("rows", "tp", "expected"),
    [
        (480, 4, [128, 128, 128, 96]),
        (96, 8, [16, 16, 16, 16, 16, 16, 0, 0]),
        (448, 1, [448]),
    ],
)
def test_lm_head_rows_are_padded_to_64_before_the_cut(tmp_path, rows, tp, expected):
    path = "triton" if rows == 96 else "asm"
    layer = one(tmp_path, Layer("lm_head", rows, 256, path))
    x = torch.ones((2, 256))
    pieces = []
    for rank in range(tp):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RepackWarning)
            piece = mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=tp)["lm_head"]
        assert piece(x).shape == (2, expected[rank])
        pieces.append(piece.dequantize().double())
    assert torch.equal(torch.cat(pieces), layer.dense)


def test_kv_heads_need_the_head_counts(tmp_path):
    """Without them rows are cut evenly: 96 rows by 2 ranks are 48 each, wherever heads begin."""
    layer = one(tmp_path, Layer("self_attn.k_proj", 96, 64, "triton"))
    piece = mxfp4prep.load(tmp_path, tp_rank=1, tp_size=2)[layer.name]
    assert torch.equal(piece.dequantize().double(), layer.dense[48:])


def test_the_manifest_decides_over_the_name_table(tmp_path):
    """A user rule may have said that this o_proj is replicated, or that one is column-parallel."""
    replicated = Layer("a.o_proj", 64, 256, parallel="replicated", bias=True)
    column = Layer("b.o_proj", 64, 256, parallel="column", bias=True)
    row = Layer("c.q_proj", 64, 512, parallel="row")
    build(tmp_path, [replicated, column, row])
    prepared = mxfp4prep.load(tmp_path, tp_rank=1, tp_size=2)
    assert torch.equal(prepared["a.o_proj"].dequantize().double(), replicated.dense)
    assert torch.equal(prepared["a.o_proj"].bias, replicated.bias_values)
    assert torch.equal(prepared["b.o_proj"].dequantize().double(), column.dense[32:])
    assert torch.equal(prepared["c.q_proj"].dequantize().double(), row.dense[:, 256:])


def test_a_rule_that_makes_a_projection_plain_column_ignores_heads(tmp_path):
    """Sibling k_proj makes the table say qkv; the manifest says column: 6 heads do not matter."""
    q = Layer("self_attn.q_proj", 96, 64, "triton", parallel="column")
    k = Layer("self_attn.k_proj", 32, 64, "triton")
    build(tmp_path, [q, k], config={"num_attention_heads": 6, "num_key_value_heads": 2})
    piece = mxfp4prep.load(tmp_path, tp_rank=3, tp_size=4)["self_attn.q_proj"]
    assert torch.equal(piece.dequantize().double(), q.dense[72:])


@pytest.mark.parametrize(
    ("name", "n", "rows"),
    [
        ("in_proj_qkvz", 192, [*range(96, 192)]),  # stored key head by key head
        ("in_proj_qkv", 128, [*range(16, 32), *range(48, 64), *range(96, 128)]),  # q, k, v
        ("in_proj_z", 64, [*range(32, 64)]),
    ],
)
def test_linear_attention_projections(tmp_path, name, n, rows):
    config = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    layer = one(tmp_path, Layer(f"linear_attn.{name}", n, 64, "triton"), **config)
    piece = mxfp4prep.load(tmp_path, tp_rank=1, tp_size=2)[layer.name]
    assert torch.equal(piece.dequantize().double(), layer.dense[rows])


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (2, 2), (-1, 2), (1, 1)])
def test_ranks_that_do_not_exist(tmp_path, rank, size):
    one(tmp_path, Layer("model.fc1", 64, 64, "triton"))
    with pytest.raises(UsageError, match="rank"):
        mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=size)


def stored_bytes(rows: int, columns: int) -> int:
    """Of an MXFP4 matrix: two codes a byte, and a scale byte for 32."""
    return rows * (columns // 2 + columns // 32)


FUSED = {  # name -> (rows that the ranks share, rows of KV heads)
    "fused.self_attn.qkv_proj": (Q, 2 * KV),
    "fused.mlp.gate_up_proj": (2 * INTER, 0),
    f"{BLOCK}.self_attn.k_proj": (0, KV),
    f"{BLOCK}.mlp.gate_proj": (INTER, 0),
}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", FUSED)
def test_ranks_read_the_whole_once_and_kv_heads_as_often_as_they_are_held(tmp_path, name, tp):
    shared, kv = FUSED[name]
    build(tmp_path, [Layer(name, shared + kv, HIDDEN)], config=CONFIG)
    read = []
    for rank in range(tp):
        prepared = mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=tp)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepared[name]
        read.append(prepared.bytes_read)
    copies = max(1, tp // KV_HEADS)  # ranks that hold the same KV head
    assert read == [stored_bytes(shared // tp + kv * copies // tp, HIDDEN)] * tp
    assert sum(read) == stored_bytes(shared + copies * kv, HIDDEN)


EXPERTS = "model.layers.1.mlp.experts"


def expert_layers(form: str, path: str) -> list[Layer]:
    """Three experts of HIDDEN x 2048, in banks, each with gate and up in one, or in three."""
    width, lead = 2048, {"path": path}
    if form == "banks":
        up = Layer(f"{EXPERTS}.gate_up_proj", 2 * width, HIDDEN, experts=3, **lead)
        return [up, Layer(f"{EXPERTS}.down_proj", HIDDEN, width, experts=3, **lead)]
    parts = (
        {"gate_up_proj": 2 * width} if form == "fused" else {"gate_proj": width, "up_proj": width}
    )
    return [
        Layer(f"{EXPERTS}.{expert}.{leaf}", *shape, **lead)
        for expert in range(3)
        for leaf, shape in {
            **{leaf: (rows, HIDDEN) for leaf, rows in parts.items()},
            "down_proj": (HIDDEN, width),
        }.items()
    ]


@pytest.mark.parametrize("path", ["asm", "triton", "kept"])
@pytest.mark.parametrize("form", ["banks", "fused", "apart"])
def test_each_rank_reads_its_share_of_every_expert(tmp_path, form, path):
    layers = expert_layers(form, path)
    build(tmp_path, layers, shards=2)
    whole = 3 * (stored_bytes(2 * 2048, HIDDEN) + stored_bytes(HIDDEN, 2048))
    for tp in (1, 2, 8):
        for rank in {0, tp - 1}:
            prepared = mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=tp)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                prepared.experts(EXPERTS)
            assert prepared.bytes_read == whole // tp


def test_a_repacked_bank_is_read_whole_by_every_rank(tmp_path):
    """Width 512 by 4 ranks is 128 columns a rank: no ASM tile of 256, for down alone."""
    up = Layer(f"{EXPERTS}.gate_up_proj", 1024, HIDDEN, experts=3)
    build(tmp_path, [up, Layer(f"{EXPERTS}.down_proj", HIDDEN, 512, experts=3)])
    for rank in range(4):
        prepared = mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=4)
        with pytest.warns(RepackWarning, match="down"):
            prepared.experts(EXPERTS)
        up_share, down = stored_bytes(1024 // 4, HIDDEN), stored_bytes(HIDDEN, 512)
        assert prepared.bytes_read == 3 * (up_share + down)
