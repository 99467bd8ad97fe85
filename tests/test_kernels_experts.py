"""The experts on the Triton kernels, on a GPU or in Triton's interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_cases import ported
from moe_cases import Expert, close, pairwise, routed64
from prepared_factory import LAYOUT_IDS, decode64, fake_quantize64, lay_out
from torch import Tensor

from mxfp4prep.errors import UsageError
from mxfp4prep.runtime.backends import torch_backend
from mxfp4prep.runtime.gating import GATES

pytest.importorskip("triton")
from mxfp4prep.runtime.backends import triton_backend
from mxfp4prep.runtime.kernels import grouped
from mxfp4prep.runtime.kernels.configs import FEW, MANY, SCALED, SCALED_BF16
from mxfp4prep.runtime.kernels.grouped import Gate
from mxfp4prep.runtime.kernels.launch import Stored

fused_moe, experts = ported(triton_backend.fused_moe), ported(grouped.experts)
sorted_pairs = ported(grouped.sorted_pairs)

# numpy speaks up where a GPU computes on: NaN and infinities of lanes that are masked off later
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

PLAIN: dict[str, Any] = {
    "activation": "silu",
    "limit": None,
    "gate_up": "concatenated",
    "hidden_pad": 0,
    "intermediate_pad": 0,
    "bias1": None,
    "bias2": None,
    "a1_scale": None,
    "a2_scale": None,
}
NAN_BYTE = 255

# numpy, in which Triton's interpreter computes, warns of what a GPU does without a word
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning"
)


class Model:
    """Random experts: the operator's banks, and the same in float64. Padding is poison."""

    def __init__(
        self,
        count: int = 5,
        hidden: int = 64,
        width: int = 64,
        paths: tuple[str, str] = ("kept", "kept"),
        order: str = "concatenated",
        pads: tuple[int, int] = (0, 0),
        bias: bool = False,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.width, self.paths, self.used = width, paths, hidden - pads[0]
        real = width - pads[1]
        values = torch.arange(2 * width)
        place = values // 2 if order == "interleaved" else values % width
        rows = values[place < real]
        halves = (rows[0::2], rows[1::2]) if order == "interleaved" else rows.chunk(2)
        gate_up, down = self._codes(count, 2 * width, hidden), self._codes(count, hidden, width)
        self._poison(*gate_up, values[place >= real], self.used)
        self._poison(*down, torch.arange(self.used, hidden), real)
        self.banks = [
            lay_out(part, layout)
            for matrix, path in zip((gate_up, down), paths, strict=True)
            for part, layout in zip(matrix, LAYOUT_IDS[path], strict=True)
        ]
        both = decode64(*gate_up, hidden)[:, :, : self.used]
        self.biases: dict[str, Tensor | None] = {"bias1": None, "bias2": None}
        zeros = torch.zeros(count, 2 * width), torch.zeros(count, hidden)
        bias1, bias2 = [
            torch.randn(z.shape, generator=self.generator) if bias else z for z in zeros
        ]
        bias1[:, values[place >= real]] = torch.nan
        bias2[:, self.used :] = torch.nan
        if bias:
            self.biases = {"bias1": bias1, "bias2": bias2}
        self.experts = [
            Expert(
                both[e][halves[0]],
                both[e][halves[1]],
                decode64(down[0][e], down[1][e], width)[: self.used, :real],
                bias1[e][halves[0]].double() if bias else 0.0,
                bias1[e][halves[1]].double() if bias else 0.0,
                bias2[e][: self.used].double() if bias else 0.0,
            )
            for e in range(count)
        ]

    def _codes(self, count: int, n: int, k: int) -> tuple[Tensor, Tensor]:
        random = torch.randint(
            0, 256, (count, n, k // 2), dtype=torch.uint8, generator=self.generator
        )
        shape = (count, n, -(-k // 32))
        scale = torch.randint(118, 124, shape, dtype=torch.uint8, generator=self.generator)
        return random, scale

    @staticmethod
    def _poison(packed: Tensor, scale: Tensor, rows: Tensor, columns: int) -> None:
        """Scales of NaN in rows and whole groups of padding, the largest codes in the rest."""
        scale[:, rows] = NAN_BYTE
        scale[:, :, -(-columns // 32) :] = NAN_BYTE
        packed[:, :, -(-columns // 2) :] = 0x77

    def run(
        self, x: Tensor, weights: Tensor, ids: Tensor, quant: str = "none", **kw: Any
    ) -> Tensor:
        return fused_moe(
            x, *self.banks, weights, ids, self.width, *self.paths, quant, **PLAIN | self.biases | kw
        )

    def expected(self, x: Tensor, weights: Tensor, ids: Tensor, *args: Any) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        out[:, : self.used] = routed64(self.experts, x[:, : self.used], weights, ids, *args)
        return out

    def tokens(self, tokens: int, top: int, low: int = -1) -> tuple[Tensor, Tensor, Tensor]:
        """x float32 with NaN in its padding, weights, ids with repetitions and some of -1."""
        hidden = self.banks[0].shape[-1] if self.used is None else self.used
        x = torch.randn((tokens, hidden), generator=self.generator)
        weights = torch.rand((tokens, top), generator=self.generator)
        ids = torch.randint(low, len(self.experts), (tokens, top), generator=self.generator)
        weights[ids < 0] = torch.nan
        return x, weights, ids


def padded(x: Tensor, hidden: int) -> Tensor:
    """x with columns of NaN up to `hidden`."""
    return torch.nn.functional.pad(x, (0, hidden - x.shape[1]), value=torch.nan)


def same(x: Tensor) -> Tensor:
    return x.double()


def fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x at a scale through ml_dtypes' float8_e4m3fn, float64."""
    scaled = np.clip((x.float() / scale).numpy(), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(scaled.astype(np.float64)) * scale.double()


def fp8_token(x: Tensor) -> Tensor:
    return fp8(x, x.float().abs().amax(-1, keepdim=True) / 448)


QUANT: dict[str, Callable[[Tensor], Tensor]] = {
    "none": same,
    "mxfp4": fake_quantize64,
    "fp8_token": fp8_token,
}

CASES = list(
    pairwise(
        path=[("asm", "asm"), ("triton", "kept"), ("kept", "triton"), ("asm", "triton")],
        quant=list(QUANT),
        activation=list(GATES),
        limit=[None, 1.5],
        order=["concatenated", "interleaved"],
        pads=[(0, 0), (6, 5), (32, 32)],
        bias=[False, True],
        tokens=[(1, 2), (3, 1), (33, 3)],
        ids=[torch.int32, torch.int64, torch.int16],
    )
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_pairs_of_options(case: dict[str, Any]) -> None:
    large = "asm" in case["path"]
    hidden, width = (256, 256) if large else (96, 64)
    model = Model(
        3, hidden, width, case["path"], case["order"], case["pads"], case["bias"], seed=len(case)
    )
    x, weights, ids = model.tokens(*case["tokens"])
    ids[0, 0] = 1
    weights = torch.where(ids < 0, torch.nan, weights.nan_to_num(0.5))
    x = padded(x, hidden)
    found = model.run(
        x,
        weights,
        ids.to(case["ids"]),
        case["quant"],
        activation=case["activation"],
        limit=case["limit"],
        gate_up=case["order"],
        hidden_pad=case["pads"][0],
        intermediate_pad=case["pads"][1],
    )
    expected = model.expected(
        x, weights, ids, case["activation"], case["limit"], QUANT[case["quant"]]
    )
    # a value on the border of two codes may fall to the other side
    close(found, expected, 1e-5 if case["quant"] == "none" else 2e-2)
    assert torch.equal(found[:, model.used :], torch.zeros_like(found[:, model.used :]))
    untouched = (ids < 0).all(1)
    assert torch.equal(found[untouched], torch.zeros_like(found[untouched]))


@pytest.mark.parametrize("quant", ["fp8_static", "fp8_tensor", "mxfp6_e2m3", "mxfp6_e3m2"])
def test_agrees_with_the_reference_backend(quant: str) -> None:
    model = Model(4, 64, 96)
    x, weights, ids = model.tokens(12, 3)
    weights.nan_to_num_(0.5)
    scales = {"a1_scale": None, "a2_scale": None}
    if quant == "fp8_static":
        scales = {name: torch.tensor([0.001, 0.01, 0.02, 0.5]) for name in scales}
    found = model.run(x, weights, ids, quant, **scales)
    expected = torch_backend.fused_moe(
        x, *model.banks, weights, ids, 96, *model.paths, quant, **PLAIN | scales
    )
    close(found, expected.double(), 3e-3)
    other = {"fp8_static": "fp8_token", "fp8_tensor": "fp8_token"}.get(quant, "mxfp4")
    with pytest.raises(AssertionError):
        close(model.run(x, weights, ids, other), expected.double(), 3e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [2, 40])
def test_half_precision(dtype: torch.dtype, tokens: int) -> None:
    model = Model(4, 128, 128, bias=True)
    x, weights, ids = model.tokens(tokens, 2)
    ids[0] = 1
    weights = weights.nan_to_num(0.5)
    found = model.run(x.to(dtype), weights.to(dtype), ids)
    assert found.dtype == dtype
    expected = model.expected(x.to(dtype), weights.to(dtype), ids, "silu", None, same)
    close(found, expected, 2**-7 if dtype == torch.bfloat16 else 2**-10)


@pytest.mark.parametrize(
    "tile", [FEW[8], FEW[16]._replace(splits=2), FEW[32], MANY["64 by 64"], MANY["128"]]
)
def test_every_tile_gives_the_same(tile: Any) -> None:
    model = Model(3, 256, 64)
    x, weights, ids = model.tokens(20, 2)
    weights.nan_to_num_(0.5)
    banks = [
        Stored(*model.banks[:2], None, "kept", 128, 256, 128, 256),
        Stored(*model.banks[2:], None, "kept", 256, 64, 256, 64),
    ]
    out = torch.full_like(x, torch.nan)
    experts(
        x, out, *banks, Gate("silu", None, False), weights, ids, "none", (None, None), tile
    )  # fmt: skip
    close(out, model.expected(x, weights, ids, "silu", None, same), 1e-5)


@pytest.mark.parametrize("quant", ["none", "mxfp4"])
@pytest.mark.parametrize("rows", [16, 64])
def test_experts_on_gpus_that_multiply_mxfp4(
    rows: int, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tile(*args: Any) -> Any:
        return (SCALED if quant == "mxfp4" else SCALED_BF16)[rows]

    monkeypatch.setattr(grouped, "multiplies_mxfp4", lambda device: True)
    monkeypatch.setattr(grouped, "grouped_scaled_tile", tile)
    model = Model(3, 256, 256, ("asm", "kept"), pads=(6, 37))
    x, weights, ids = model.tokens(9, 2)
    weights.nan_to_num_(0.5)
    x = padded(x, 256).bfloat16()
    quantized = QUANT[quant]
    found = model.run(x, weights, ids, quant, hidden_pad=6, intermediate_pad=37)
    close(found, model.expected(x, weights, ids, "silu", None, quantized), 2e-2)
    other = model.expected(
        x, weights, ids, "silu", None, same if quant == "mxfp4" else QUANT["mxfp4"]
    )
    with pytest.raises(AssertionError):
        close(found, other, 2e-2)


@pytest.mark.parametrize(
    ("pairs", "count", "bm"), [(1, 1, 8), (30, 3, 8), (200, 40, 16), (300, 5, 32), (90, 60, 8)]
)
def test_sorted_pairs(pairs: int, count: int, bm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "PARTS", 3)
    monkeypatch.setattr(grouped, "CHUNKS", ((32, 2), (64, 4)))  # several of them in each part
    generator = torch.Generator().manual_seed(pairs)
    ids = torch.randint(-1, count + 2, (pairs, 1), generator=generator)
    groups = sorted_pairs(ids, count, bm, 1)
    rows, expert = groups.rows.view(-1, bm), groups.expert
    used = int((expert >= 0).sum())
    assert (expert[used:] == -1).all()
    assert (expert[:used].diff() >= 0).all()
    assert expert.max() < count
    for number in range(count):
        listed = rows[:used][expert[:used] == number].flatten()
        wanted = (ids[:, 0] == number).nonzero().flatten()
        assert listed[: len(wanted)].tolist() == wanted.tolist()
        assert len(listed) == -(-len(wanted) // bm) * bm
        assert (listed[len(wanted) :] >= pairs).all()


def test_narrow_ids() -> None:
    """Nothing of the range that a narrow type has is taken for an expert: 255 is one, here."""
    count, pairs = 256, 9
    ids = torch.arange(pairs).unsqueeze(1)
    wide = sorted_pairs(ids, count, 8, 1)
    used = int((wide.expert >= 0).sum()) * 8
    assert used == pairs * 8
    for dtype in (torch.uint8, torch.int8, torch.int16):
        narrow = sorted_pairs(ids.to(dtype), count, 8, 1)
        assert torch.equal(narrow.expert, wide.expert)
        assert torch.equal(narrow.rows[:used], wide.rows[:used])


@pytest.mark.parametrize("bm", [8, 64])
def test_the_most_blocks_there_can_be(bm: int) -> None:
    """One pair more than whole blocks for all experts: no list is too short."""
    count = 6
    ids = torch.arange(count).repeat_interleave(bm + 1).unsqueeze(1)
    groups = sorted_pairs(ids, count, bm, 1)
    assert (groups.expert >= 0).sum() == 2 * count <= groups.expert.numel()
    assert sorted(groups.rows[groups.rows < ids.numel()].tolist()) == list(range(ids.numel()))


def test_sorted_or_not_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(8, 64, 64)
    x, weights, ids = model.tokens(3, 2)
    weights.nan_to_num_(0.5)
    calls: list[int] = []
    made = grouped.sorted_pairs

    def counting(*args: Any) -> Any:
        calls.append(1)
        return made(*args)

    monkeypatch.setattr(grouped, "sorted_pairs", counting)
    alone = model.run(x, weights, ids)
    assert not calls
    monkeypatch.setattr(grouped, "UNSORTED", 0)
    assert torch.equal(alone, model.run(x, weights, ids))
    assert calls


def test_no_tokens_and_no_experts_here() -> None:
    model = Model(2, 64, 64)
    x, weights, ids = model.tokens(4, 2)
    assert model.run(x[:0], weights[:0], ids[:0]).shape == (0, 64)
    nobody = torch.full_like(ids, -1)
    assert torch.equal(model.run(x, torch.full_like(weights, torch.nan), nobody), x * 0)


def test_an_expert_without_tokens_is_not_read() -> None:
    model = Model(4, 64, 64)
    x, weights, ids = model.tokens(5, 2, low=0)
    ids = ids % 2
    for bank in model.banks:
        bank[2:] = NAN_BYTE
    close(model.run(x, weights, ids), model.expected(x, weights, ids, "silu", None, same), 1e-5)


def test_rows_that_do_not_lie_side_by_side() -> None:
    model = Model(3, 64, 64, bias=True)
    x, weights, ids = model.tokens(4, 2, low=0)
    found = model.run(x.t().contiguous().t(), weights.t().contiguous().t(), ids.t().clone().t())
    assert torch.equal(found, model.run(x, weights, ids))


def test_static_inputs_need_scales() -> None:
    model = Model(2, 64, 64)
    x, weights, ids = model.tokens(2, 2, low=0)
    with pytest.raises(UsageError, match="input_scale"):
        model.run(x, weights, ids, "fp8_static")
