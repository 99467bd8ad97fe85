"""Whole models: every route gives the factory's bytes, in file order, within bounded memory."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from prepared_factory import LAYOUT_IDS, Layer, build, lay_out

import mxfp4prep
from mxfp4prep import PreparedExperts, io
from mxfp4prep.errors import InvalidCheckpoint, IOFailed, Unsupported, UsageError
from mxfp4prep.runtime import lanes, reading, transfer
from mxfp4prep.runtime.blocks import Block, plain_units, runs
from mxfp4prep.runtime.lanes import BUFFERS, Lane, Ring

BLOCK = "model.layers.0"
BANKED, SINGLE = f"{BLOCK}.mlp.experts", "model.layers.1.mlp.experts"
HIDDEN, WIDTH, THREADS, PIECE = 256, 256, 3, 4096
CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


def layers_of_a_model() -> list[Layer]:
    layers = [
        Layer(f"{BLOCK}.self_attn.q_proj", 512, HIDDEN, bias=True),
        Layer(f"{BLOCK}.self_attn.k_proj", 256, HIDDEN, "triton"),
        Layer(f"{BLOCK}.self_attn.o_proj", HIDDEN, 1024),
        Layer(f"{BLOCK}.mlp.fc1", 256, HIDDEN, "kept", "w4a8", input_scale=0.5),
        Layer("model.layers.2.mlp.down_proj", 96, 2048, "triton"),
        Layer("model.layers.3.mlp.down_proj", HIDDEN, 1024, "kept"),
        Layer(f"{BANKED}.gate_up_proj", 2 * WIDTH, HIDDEN, experts=3, bias=True),
        Layer(f"{BANKED}.down_proj", HIDDEN, WIDTH, "triton", experts=3, bias=True),
    ]
    for expert in range(3):
        at = f"{SINGLE}.{expert}"
        layers += [
            Layer(f"{at}.gate_proj", WIDTH, HIDDEN, "triton"),
            Layer(f"{at}.up_proj", WIDTH, HIDDEN, "triton"),
            Layer(f"{at}.down_proj", HIDDEN, WIDTH),
        ]
    return layers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("loading") / "prepared"
    generator = torch.Generator().manual_seed(5)
    copied = {
        "model.norm.weight": torch.randn(HIDDEN, generator=generator).bfloat16(),
        "lm_head.weight": torch.randn((40, HIDDEN), generator=generator).half(),
        "one": torch.tensor(3),
        "none": torch.empty(0, 4),
    }
    return root, build(root, layers_of_a_model(), copied=copied, config=CONFIG, shards=3), copied


class LateLane:
    """Stands in for a GPU's: copies nothing before somebody waits for it. A buffer that is filled
    again too early, or copies nobody waited for, leave wrong bytes."""

    def __init__(self) -> None:
        self.buffers: list[int] = []
        self.on_their_way = 0

    def lane(self, *_: object) -> Lane:
        return Lane(self.buffer, self.send)

    def buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers.append(nbytes)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def send(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        self.on_their_way += 1

        def wait() -> None:
            self.on_their_way -= 1
            for target, piece in pairs:
                target.copy_(piece)

        return wait


@pytest.fixture
def small_pieces(monkeypatch):
    """So that a layer of some kilobytes is many units of work, for several threads."""
    for module in (reading, transfer):
        monkeypatch.setattr(module, "PIECE_NBYTES", PIECE)
    monkeypatch.setattr(reading, "thread_count", lambda nbytes: THREADS)


def lazily(root: Path, **options):
    return mxfp4prep.load(root, **options)


def at_once(root: Path, **options):
    return mxfp4prep.load(root, lazy=False, **options)


def checked(root: Path, **options):
    return mxfp4prep.load(root, verify=True, lazy=False, **options)


def checked_lazily(root: Path, **options):
    return mxfp4prep.load(root, verify=True, **options)


class Materialized:
    """Layers that were on meta first."""

    def __init__(self, root: Path, **options) -> None:
        self.prepared = mxfp4prep.load(root, device="meta", **options)

    def __getitem__(self, name: str):
        layer = self.prepared[name]
        self.prepared.materialize(layer, "cpu")
        return layer

    def experts(self, prefix: str):
        layer = self.prepared.experts(prefix)
        self.prepared.materialize(torch.nn.ModuleList([layer]), "cpu")
        return layer

    def tensor(self, name: str):
        meta = self.prepared.tensor(name)
        real = mxfp4prep.load(self.prepared.path).tensor(name)
        assert meta.is_meta
        assert (meta.shape, meta.dtype) == (real.shape, real.dtype)
        return real


ROUTES = {
    "lazy": lazily,
    "all": at_once,
    "checked": checked,
    "checked lazily": checked_lazily,
    "meta first": Materialized,
}


@pytest.fixture(params=[*ROUTES, "staged", "staged, checked"])
def route(request, small_pieces, monkeypatch):
    if request.param in ROUTES:
        return ROUTES[request.param]
    late = LateLane()
    monkeypatch.setattr(reading, "lane_to", late.lane)

    def staged(root: Path, **options):
        verify = "checked" in request.param
        late.buffers.clear()
        prepared = mxfp4prep.load(root, verify=verify, lazy=False, **options)
        assert late.buffers
        assert late.on_their_way == 0, "everything has arrived"
        assert max(late.buffers) <= (2 * PIECE if verify else PIECE), "a row of tiles is 2 pieces"
        assert len(late.buffers) <= THREADS * BUFFERS * (2 if verify else 1)
        return prepared

    return staged


def test_layers_are_the_stored_bytes(route, model):
    root, layers, _ = model
    prepared = route(root)
    for name, layer in layers.items():
        if ".experts" in name:
            continue
        weight, scale = LAYOUT_IDS[layer.path]
        assert torch.equal(prepared[name].weight, lay_out(layer.packed, weight)), name
        assert torch.equal(prepared[name].scale, lay_out(layer.scale, scale)), name
        if layer.bias_values is not None:
            assert torch.equal(prepared[name].bias, layer.bias_values)
    assert prepared[f"{BLOCK}.mlp.fc1"].input_scale.item() == 0.5


def test_experts_are_the_stored_bytes(route, model):
    root, layers, _ = model
    prepared = route(root)
    bank = prepared.experts(BANKED)
    up, down = layers[f"{BANKED}.gate_up_proj"], layers[f"{BANKED}.down_proj"]
    assert torch.equal(bank.w13, lay_out(up.packed, "tile16x16"))
    assert torch.equal(bank.w13_scale, lay_out(up.scale, "tile32x8"))
    assert torch.equal(bank.w2, down.packed)
    assert torch.equal(bank.w2_scale, lay_out(down.scale, "transposed"))
    assert torch.equal(bank.bias1, up.bias_values)
    single = prepared.experts(SINGLE)
    for expert in range(3):
        gate, up, down = (
            layers[f"{SINGLE}.{expert}.{part}_proj"] for part in ("gate", "up", "down")
        )
        assert torch.equal(single.w13[expert], torch.cat([gate.packed, up.packed]))
        scales = lay_out(torch.cat([gate.scale, up.scale]), "transposed")
        assert torch.equal(single.w13_scale[expert], scales), "columns of one matrix, two tensors"
        assert torch.equal(single.w2[expert], lay_out(down.packed, "tile16x16"))
        assert torch.equal(single.w2_scale[expert], lay_out(down.scale, "tile32x8"))


def test_copied_tensors(route, model):
    root, _, copied = model
    prepared = route(root)
    for name, tensor in copied.items():
        found = prepared.tensor(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor), name


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.filterwarnings("ignore::mxfp4prep.RepackWarning")
def test_pieces(route, model, tp):
    """Sliced where the layout allows it, else repacked: the same values either way."""
    root, layers, _ = model
    cuts = {  # name -> dimension that is cut
        f"{BLOCK}.self_attn.q_proj": 0,
        f"{BLOCK}.self_attn.k_proj": 0,
        f"{BLOCK}.self_attn.o_proj": 1,
        "model.layers.2.mlp.down_proj": 1,
        "model.layers.3.mlp.down_proj": 1,
    }
    for rank in range(tp):
        prepared = route(root, tp_rank=rank, tp_size=tp)
        for name, axis in cuts.items():
            expected = layers[name].dense.chunk(tp, axis)[rank]
            assert torch.equal(prepared[name].dequantize().double(), expected), name
        bank = prepared.experts(BANKED)
        if bank.w2_path == "triton":
            packed = layers[f"{BANKED}.down_proj"].packed.chunk(tp, -1)[rank]
            assert torch.equal(bank.w2, packed)


def test_at_once_is_each_byte_once(model, small_pieces):
    root, layers, copied = model
    prepared = at_once(root)
    shards = list(root.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(shard.read_bytes()[:8], "little") for shard in shards)
    stored = sum(shard.stat().st_size for shard in shards) - headers
    assert prepared.bytes_read == stored
    for name in layers:
        if ".experts" not in name:
            assert prepared[name] is prepared[name]
    assert isinstance(prepared.experts(BANKED), PreparedExperts)
    for name in copied:
        prepared.tensor(name)
    prepared.load_all()
    assert prepared.bytes_read == stored, "kept"
    assert checked(root).bytes_read == stored, "checked while it is read, not after"


def test_without_copied_tensors(model):
    root, _, copied = model
    prepared = mxfp4prep.load(root)
    prepared.load_all(tensors=False)
    before = prepared.bytes_read
    assert prepared.bytes_read == at_once(root).bytes_read - sum(t.nbytes for t in copied.values())
    prepared.tensor("lm_head.weight")
    assert prepared.bytes_read == before + copied["lm_head.weight"].nbytes


def test_files_are_read_in_their_order(model, monkeypatch):
    monkeypatch.setattr(reading, "thread_count", lambda nbytes: 1)
    monkeypatch.setattr(reading, "PIECE_NBYTES", PIECE)
    prepared = mxfp4prep.load(model[0])
    seen: list[tuple[str, int]] = []
    real = io.pread_into

    def note(fd, view, offset, where):
        seen.append((where, offset, len(view)))
        real(fd, view, offset, where)

    monkeypatch.setattr(io, "pread_into", note)
    first: list[int] = []  # biases and input scales are looked at before anything else is read
    prepared.load_all(lambda *_: first.append(len(seen)))
    rest = seen[first[0] :]
    assert len(rest) > 50 > first[0]
    assert rest == sorted(rest)
    assert max(nbytes for _, _, nbytes in rest) == PIECE


def test_progress_rises_and_ends_at_the_total(model, small_pieces):
    calls: list[tuple[int, int]] = []
    threads = set()

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        threads.add(threading.current_thread())

    prepared = mxfp4prep.load(model[0], lazy=False, progress=progress)
    assert threads == {threading.current_thread()}
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert len(set(done)) > 50
    assert {call[1] for call in calls} == {prepared.bytes_read}
    assert done[-1] == prepared.bytes_read


def test_progress_that_raises_stops_the_load(model, small_pieces):
    """As Ctrl-C does: threads end, files are closed, nothing is kept."""
    prepared = mxfp4prep.load(model[0])
    before = len(list(Path("/proc/self/fd").iterdir()))

    def stop(done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared.load_all(stop)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("mxfp4prep")]
    assert 0 < prepared.bytes_read <= at_once(model[0]).bytes_read
    name = f"{BLOCK}.self_attn.q_proj"
    assert prepared[name] is prepared[name]


def test_progress_of_a_lazy_load_is_refused(model):
    with pytest.raises(UsageError, match="progress"):
        mxfp4prep.load(model[0], progress=print)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_shrinks_while_it_is_read(
    model, tmp_path, small_pieces, monkeypatch, staged, verify
):
    layers = layers_of_a_model()
    build(tmp_path, layers, config=CONFIG, shards=2)
    prepared = mxfp4prep.load(tmp_path, verify=verify)
    late = LateLane()
    if staged:
        monkeypatch.setattr(reading, "lane_to", late.lane)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    pread, reads = io.pread_into, []

    def shrink(*arguments) -> None:
        reads.append(None)
        if len(reads) == 3:  # while others may be under way
            os.truncate(shard, shard.stat().st_size // 2)
        pread(*arguments)

    monkeypatch.setattr(io, "pread_into", shrink)
    with pytest.raises(IOFailed, match="shorter") as caught:
        prepared.load_all()
    assert caught.value.where == shard.name
    assert late.on_their_way == 0, "nothing may be on its way into memory that is given up"
    with pytest.raises(IOFailed, match="was changed or replaced after"):
        prepared.load_all()


@pytest.mark.parametrize("staged", [False, True])
def test_a_flipped_bit_is_found(tmp_path, small_pieces, monkeypatch, staged):
    build(tmp_path, layers_of_a_model(), config=CONFIG, shards=2)
    if staged:
        monkeypatch.setattr(reading, "lane_to", LateLane().lane)
    assert checked(tmp_path) is not None
    shard = tmp_path / "model-00002-of-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert at_once(tmp_path) is not None, "not asked for"
    with pytest.raises(InvalidCheckpoint, match="xxh3_128"):
        checked(tmp_path)


@pytest.mark.parametrize("route", [lazily, checked_lazily])
def test_what_replaces_an_opened_checkpoint_is_not_mixed_with_it(tmp_path, route):
    first, second = f"{BLOCK}.mlp.down_proj", "model.layers.1.mlp.down_proj"
    layers = [Layer(first, 64, 256), Layer(second, 64, 256)]
    for seed, name in enumerate(("old", "new")):
        build(tmp_path / name, layers, seed=seed)
    prepared = route(tmp_path / "old")
    assert prepared[first].n == 64
    (tmp_path / "old").rename(tmp_path / "gone")
    (tmp_path / "new").rename(tmp_path / "old")
    with pytest.raises(IOFailed, match="was changed or replaced after the checkpoint was opened"):
        prepared[second]
    with pytest.raises(IOFailed, match="was changed or replaced after the checkpoint was opened"):
        prepared.load_all()
    assert mxfp4prep.load(tmp_path / "old")[second].n == 64


def test_experts_that_cannot_be_loaded_say_so(tmp_path):
    build(tmp_path, [Layer("fc1", 64, 256), Layer("a.experts.w", 8, 64, "kept", experts=2)])
    prepared = mxfp4prep.load(tmp_path)
    with pytest.raises(Unsupported, match="which part of an expert"):
        prepared.load_all()
    assert prepared["fc1"] is not None


def forbidden(*_: object) -> None:
    raise AssertionError("meta reads nothing")


def test_meta_reads_nothing_and_has_every_shape(model, monkeypatch):
    root, layers, _ = model
    prepared = mxfp4prep.load(root, device="meta")
    real = at_once(root)
    for function in ("open_read", "pread_into"):
        monkeypatch.setattr(io, function, forbidden)
    prepared.load_all()
    pairs = [(prepared.experts(name), real.experts(name)) for name in (BANKED, SINGLE)]
    pairs += [(prepared[name], real[name]) for name in layers if ".experts" not in name]
    for meta, other in pairs:
        found = {name: (b.shape, b.dtype, b.device.type) for name, b in meta.named_buffers()}
        expected = {name: (b.shape, b.dtype, "meta") for name, b in other.named_buffers()}
        assert found == expected
    assert prepared.bytes_read == 0
    y = prepared[f"{BLOCK}.self_attn.q_proj"](torch.empty((2, 3, HIDDEN), device="meta"))
    assert (y.shape, y.device.type) == ((2, 3, 512), "meta")
    routing = torch.empty((5, 2), device="meta"), torch.empty((5, 2), device="meta").long()
    y = prepared.experts(SINGLE)(torch.empty((5, HIDDEN), device="meta"), *routing)
    assert (y.shape, y.device.type) == ((5, HIDDEN), "meta")


def test_a_model_of_meta_layers_is_filled_in_one_pass(model):
    root, layers, _ = model
    prepared = mxfp4prep.load(root, device="meta")
    names = [name for name in layers if ".experts" not in name]
    modules = torch.nn.ModuleList([*map(prepared.read, names), prepared.read_experts(BANKED)])
    weight = modules[0].weight
    calls: list[tuple[int, int]] = []
    prepared.materialize(modules, "cpu", lambda *call: calls.append(call))
    assert calls[-1] == (prepared.bytes_read,) * 2
    assert modules[0].weight is not weight
    x = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(1))
    assert torch.equal(modules[0](x), mxfp4prep.load(root)[names[0]](x))
    before = prepared.bytes_read
    prepared.materialize(modules, "cpu")
    assert prepared.bytes_read == before, "what is real already is left alone"


def test_layers_of_another_checkpoint_are_not_filled(model, tmp_path):
    build(tmp_path, [Layer("fc9", 64, 256), Layer(f"{BLOCK}.self_attn.q_proj", 64, HIDDEN)])
    other = mxfp4prep.load(tmp_path, device="meta")
    prepared = mxfp4prep.load(model[0])
    for name in other:
        with pytest.raises(UsageError, match="not a layer of this checkpoint"):
            prepared.materialize(other[name])
    with pytest.raises(UsageError, match="holds no bytes"):
        other.materialize(other["fc9"])


def test_a_ring_waits_for_a_buffer_before_it_gives_it_again():
    late = LateLane()
    ring, targets = Ring(late.lane(), 4), [torch.zeros(4, dtype=torch.uint8) for _ in range(5)]
    for value, target in enumerate(targets):
        buffer = ring.take(4)
        buffer.fill_(value)
        ring.send([(target, buffer)])
        assert late.on_their_way <= BUFFERS
    ring.drain()
    assert [target.tolist() for target in targets] == [[value] * 4 for value in range(5)]
    assert len(late.buffers) == BUFFERS


def test_units_are_bounded_and_cover_everything_once():
    plain = torch.zeros((6, 10), dtype=torch.uint8)
    apart = torch.zeros((4, 32), dtype=torch.uint8)[:, 5:12]
    blocks = [
        Block("a", 100, 10, 6, 10, plain),  # one run, in the file and in memory
        Block("a", 160, 20, 4, 7, apart),  # rows with gaps in both
        Block("b", 0, 3, 1, 3, torch.zeros((1, 3), dtype=torch.uint8)),
        Block("b", 3, 0, 0, 0, torch.zeros((0, 0), dtype=torch.uint8)),
    ]
    for limit in (1, 5, 7, 16, 1000):
        units = list(plain_units(blocks, limit))
        assert all(unit.nbytes <= limit for unit in units)
        assert all({piece.file for piece in unit.pieces} == {unit.file} for unit in units)
        spans = [(u.file, *run) for u in units for run in runs(u.pieces)]
        covered = [(file, at) for file, start, n in spans for at in range(start, start + n)]
        expected = [("a", at) for at in range(100, 160)]
        expected += [("a", 160 + 20 * row + column) for row in range(4) for column in range(7)]
        assert covered == expected + [("b", at) for at in range(3)]
    unit = next(plain_units(blocks, 1000))
    assert next(runs(unit.pieces)) == (100, 67), "what adjoins is read at once"


def test_new_memory_is_aligned_and_writable(tmp_path):
    large = lanes.memory.empty((3, 1 << 20), lanes.HOST)
    assert large.shape == (3, 1 << 20)
    assert large.data_ptr() % 4096 == 0
    large.fill_(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(torch.nn.Buffer(large).clone(), large)
    assert large.untyped_storage().nbytes() == 3 << 20
