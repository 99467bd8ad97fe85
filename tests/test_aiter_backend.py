"""The AITER backend against a stand-in of each release that checks every call and answers right."""

from __future__ import annotations

import aiter_recorder as recorder
import pytest
import torch
from aiter_stub import NEWEST, USABLE, forget, install
from prepared_factory import LAYOUT_IDS, decode64, fake_quantize64, lay_out

from mxfp4prep.errors import BackendUnavailable
from mxfp4prep.manifest import ActivationRecord
from mxfp4prep.runtime import ops
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.linear import PreparedLinear

W4A4 = ActivationRecord(dtype="fp4", scale_mode="even", static=False)
OLDEST = USABLE[0]
PRESHUFFLE = ("gemm_afp4wfp4_preshuffle", "gemm_afp4wfp4_preshuffled_weight_scales")


@pytest.fixture
def aiter(tmp_path, monkeypatch):
    """Installs the stand-in of a release."""
    forget()
    recorder.calls.clear()
    recorder.tables.clear()

    def installed(version: str, **changes):
        folder = tmp_path / "site"
        install(folder, version, **changes)
        monkeypatch.syspath_prepend(str(folder))

    yield installed
    forget()


def matrix(n: int, k: int, path: str, *lead: int, seed: int = 0, low: int = 118, high: int = 130):
    """Stored weight and scale, and the numbers they stand for, float64."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, generator=generator)
    shape = (*lead, n, k // 32)
    scale = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
    weight_layout, scale_layout = LAYOUT_IDS[path]
    dense = decode64(packed, scale, k)
    return lay_out(packed, weight_layout), lay_out(scale, scale_layout), dense


def rows(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn((m, k), generator=torch.Generator().manual_seed(m)).to(dtype)


def close(y: torch.Tensor, expected: torch.Tensor, rounding: float = 2.0**-8) -> None:
    """Both roundings of an answer, to bfloat16 and to x's dtype, and nothing more."""
    assert y.shape == expected.shape
    error = (y.double() - expected).abs()
    assert (error <= rounding * expected.abs() + 1e-9 * expected.abs().max()).all()


def gemm(x, weight, scale, n, path, **more):
    arguments = {"bias": None, "input_scale": None, "backend": "aiter"} | more
    return torch.ops.mxfp4prep.gemm(x, weight, scale, n, path, "mxfp4", **arguments)


@pytest.mark.parametrize("version", USABLE)
@pytest.mark.parametrize(
    ("path", "n", "k"),
    [("asm", 256, 256), ("asm", 96, 768), ("triton", 50, 512), ("kept", 48, 256)],
)
def test_every_release_answers_right_for_every_path_and_m(aiter, version, path, n, k):
    aiter(version)
    weight, scale, dense = matrix(n, k, path)
    for m in (1, 31, 32, 33, 64, 65, 100):
        x = rows(m, k)
        close(gemm(x, weight, scale, n, path), fake_quantize64(x) @ dense.T)


@pytest.mark.parametrize(
    ("path", "n", "m", "expected"),
    [
        ("asm", 512, 65, "gemm_a4w4"),
        ("asm", 512, 64, "preshuffle"),
        ("asm", 512, 1, "preshuffle"),
        ("asm", 96, 65, "preshuffle"),  # no whole tile of 256 columns
        ("asm", 320, 300, "preshuffle"),
        ("triton", 512, 65, "gemm_afp4wfp4"),
        ("triton", 512, 1, "gemm_afp4wfp4"),
        ("kept", 512, 33, "gemm_afp4wfp4"),
    ],
)
def test_which_kernel_runs(aiter, path, n, m, expected):
    aiter(NEWEST)
    weight, scale, _ = matrix(n, 256, path)
    gemm(rows(m, 256), weight, scale, n, path)
    ran = [name for name in recorder.names() if name not in ("dynamic_mxfp4_quant", "_get_config")]
    assert ran == ["gemm_afp4wfp4_preshuffle" if expected == "preshuffle" else expected]


def test_the_older_name_of_the_preshuffle_gemm_is_used_where_it_is_the_only_one(aiter):
    aiter("0.1.7.post2.dev18")
    weight, scale, _ = matrix(64, 256, "asm")
    gemm(rows(4, 256), weight, scale, 64, "asm")
    assert recorder.names()[-1] == "gemm_afp4wfp4_preshuffled_weight_scales"


@pytest.mark.parametrize(("version", "has_out"), [("0.1.8", True), ("0.1.9", False)])
def test_gemm_a4w4_with_and_without_out(aiter, version, has_out):
    aiter(version)
    weight, scale, _ = matrix(256, 512, "asm")
    gemm(rows(70, 512), weight, scale, 256, "asm")
    seen = recorder.last("gemm_a4w4")
    assert seen["A"] == ((96, 256), (256, 1), torch.float4_e2m1fn_x2)
    assert seen["B"] == ((256, 256), (256, 1), torch.float4_e2m1fn_x2)
    assert seen["A_scale"] == ((96, 16), (16, 1), torch.float8_e8m0fnu)
    assert seen["B_scale"] == ((256, 16), (16, 1), torch.float8_e8m0fnu)
    assert seen["bias"] is None
    if has_out:
        assert seen["out"] == ((96, 256), (256, 1), torch.bfloat16)
    else:
        assert "out" not in seen


@pytest.mark.parametrize(
    ("m", "x_shape", "scale_shape", "scale_stride"),
    [
        (2, (2, 256), (2, 16), (1, 2)),
        (31, (31, 256), (31, 16), (1, 31)),  # untiled, as the quantizer made it
        (32, (32, 256), (1, 512), (512, 1)),
        (33, (64, 256), (2, 512), (512, 1)),
    ],
)
def test_p15_input_scales_are_tiled_from_32_rows_on_and_rows_filled_up(
    aiter, m, x_shape, scale_shape, scale_stride
):
    aiter(NEWEST)
    weight, scale, _ = matrix(96, 512, "asm")
    y = gemm(rows(m, 512), weight, scale, 96, "asm")
    seen = recorder.last("gemm_afp4wfp4_preshuffle")
    assert seen["x_fp4"].shape == x_shape
    assert seen["x_scales"] == (scale_shape, scale_stride, torch.uint8)
    assert seen["w_preshuf"] == ((6, 4096), (4096, 1), torch.uint8)
    assert seen["w_scales"] == ((3, 512), (512, 1), torch.uint8)
    assert y.shape == (m, 96)
    assert y.is_contiguous()


def test_scales_of_the_triton_path_are_handed_over_transposed(aiter):
    aiter(NEWEST)
    for path, stride in (("triton", (1, 48)), ("kept", (8, 1))):
        weight, scale, _ = matrix(48, 256, path)
        gemm(rows(40, 256), weight, scale, 48, path)
        seen = recorder.last("gemm_afp4wfp4")
        assert seen["w_scales"] == ((48, 8), stride, torch.uint8)
        assert seen["x"].shape == (40, 128)


@pytest.mark.parametrize("version", USABLE)
def test_blocks_divide_n_and_k_and_the_shared_table_is_left_alone(aiter, version):
    aiter(version)
    weight, scale, _ = matrix(96, 768, "asm")
    gemm(rows(4, 768), weight, scale, 96, "asm")
    config = recorder.last(next(name for name in recorder.names() if name in PRESHUFFLE))["config"]
    assert (config["BLOCK_SIZE_N"], config["BLOCK_SIZE_K"]) == (32, 256)
    assert recorder.tables == [recorder.TABLE | {"BLOCK_SIZE_M": 16}]
    assert recorder.last("_get_config") == {"m": 4, "n": 96, "k": 384}


@pytest.mark.parametrize(("version", "splits"), [("0.1.12.post1", 4), ("0.1.16", 1), (NEWEST, 1)])
def test_split_k_is_off_where_it_is_wrong(aiter, version, splits):
    aiter(version)
    weight, scale, _ = matrix(64, 512, "asm")
    gemm(rows(4, 512), weight, scale, 64, "asm")
    config = recorder.last("gemm_afp4wfp4_preshuffle")["config"]
    assert config["NUM_KSPLIT"] == splits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("path", "m"), [("asm", 1), ("asm", 65), ("triton", 3)])
def test_the_answer_has_xs_dtype_and_the_bias_comes_after(aiter, dtype, path, m):
    aiter(NEWEST)
    weight, scale, dense = matrix(256, 512, path, low=112, high=122)
    x, bias = rows(m, 512, dtype), torch.linspace(-3, 3, 256)
    y = gemm(x, weight, scale, 256, path, bias=bias)
    assert y.dtype == dtype
    quantized = x.bfloat16() if dtype == torch.float32 else x
    product = (fake_quantize64(quantized) @ dense.T).bfloat16()
    torch.testing.assert_close(y, (product.float() + bias).to(dtype))
    assert recorder.last("dynamic_mxfp4_quant")["x"].dtype == quantized.dtype


@pytest.mark.parametrize("path", ["asm", "triton"])
def test_no_rows(aiter, path):
    aiter(NEWEST)
    weight, scale, _ = matrix(64, 256, path)
    y = gemm(torch.empty((0, 256), dtype=torch.float16), weight, scale, 64, path)
    assert (y.shape, y.dtype) == ((0, 64), torch.float16)
    assert recorder.calls == []


def test_rows_that_are_not_contiguous(aiter):
    aiter(NEWEST)
    weight, scale, dense = matrix(256, 512, "asm")
    for m in (2, 40, 96):
        x = rows(512, m).T
        close(gemm(x, weight, scale, 256, "asm"), fake_quantize64(x) @ dense.T)


@pytest.mark.parametrize("quant", ["none", "fp8_static", "fp8_token", "mxfp6_e2m3"])
def test_only_w4a4(aiter, quant):
    aiter(NEWEST)
    weight, scale, _ = matrix(64, 256, "asm")
    with pytest.raises(BackendUnavailable, match=f"input quantization {quant}"):
        torch.ops.mxfp4prep.gemm(
            rows(1, 256), weight, scale, 64, "asm", quant, None, torch.ones(()), "aiter"
        )


def test_a_k_that_this_aiter_answers_with_nan_is_refused(aiter):
    aiter(OLDEST)
    weight, scale, _ = matrix(64, 640, "triton")
    with pytest.raises(BackendUnavailable, match=r"NaN where 256 does not divide k \(k 640\)"):
        gemm(rows(1, 640), weight, scale, 64, "triton")


@pytest.mark.parametrize("version", ["0.1.12.post1", NEWEST])
def test_any_whole_k_where_the_fault_is_mended(aiter, version):
    aiter(version)
    weight, scale, dense = matrix(48, 544, "triton")
    x = rows(7, 544)
    close(gemm(x, weight, scale, 48, "triton"), fake_quantize64(x) @ dense.T)


def test_a_short_last_group_is_refused(aiter):
    aiter(NEWEST)
    with pytest.raises(BackendUnavailable, match="short last group"):
        gemm(
            rows(1, 80),
            torch.zeros((16, 40), dtype=torch.uint8),
            torch.zeros((16, 3), dtype=torch.uint8),
            16,
            "kept",
        )


def test_a_layer_as_a_module_and_under_opcheck(aiter):
    aiter(NEWEST)
    weight, scale, dense = matrix(64, 256, "asm")
    layer = PreparedLinear(
        weight, scale, n=64, k=256, path="asm", scheme="w4a4", activation=W4A4, backend="aiter"
    )
    x = rows(6, 256).view(2, 3, 256)
    close(layer(x).view(6, 64), fake_quantize64(x.view(6, 256)) @ dense.T)
    arguments = (rows(33, 256), weight, scale, 64, "asm", "mxfp4", None, None, "aiter")
    torch.library.opcheck(torch.ops.mxfp4prep.gemm.default, arguments)


EXPERTS, HIDDEN, INTER = 3, 256, 256


def banks(**more):
    w13, w13_scale, dense13 = matrix(2 * INTER, HIDDEN, "asm", EXPERTS, seed=1, low=116, high=122)
    w2, w2_scale, dense2 = matrix(HIDDEN, INTER, "asm", EXPERTS, seed=2, low=116, high=122)
    arguments = {"hidden": HIDDEN, "intermediate": INTER, "w13_path": "asm", "w2_path": "asm"}
    arguments |= {"scheme": "w4a4", "input_activation": W4A4, "backend": "aiter"} | more
    return PreparedExperts(w13, w13_scale, w2, w2_scale, **arguments), (dense13, dense2)


def routing(tokens: int = 5, dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((tokens, HIDDEN), generator=generator).to(dtype)
    weights = torch.rand((tokens, 2), generator=generator)
    return x, weights, torch.randint(0, EXPERTS, (tokens, 2), generator=generator)


def near(y, expected):
    """Norms: a rounding of the hidden vector that falls the other way moves single values."""
    assert y.shape == expected.shape
    assert (y.double() - expected).norm() <= 2.0**-8 * expected.norm()


@pytest.mark.parametrize("version", USABLE)
def test_experts_of_every_release(aiter, version):
    aiter(version)
    moe, dense = banks()
    x, weights, ids = routing()
    near(moe(x, weights, ids), recorder.moe64(x, *dense, weights, ids))
    seen = recorder.last("fused_moe")
    assert seen["hidden_states"] == ((5, 256), (256, 1), torch.bfloat16)
    assert seen["w1"] == ((3, 512, 128), (65536, 128, 1), torch.float4_e2m1fn_x2)
    assert seen["w2"] == ((3, 256, 128), (32768, 128, 1), torch.float4_e2m1fn_x2)
    assert seen["w1_scale"] == ((1536, 8), (8, 1), torch.float8_e8m0fnu)
    assert seen["w2_scale"] == ((768, 8), (8, 1), torch.float8_e8m0fnu)
    assert (seen["topk_weight"].dtype, seen["topk_ids"].dtype) == (torch.float32, torch.int32)
    assert seen["expert_mask"] is None
    assert (seen["activation"].name, seen["quant_type"].name) == ("Silu", "per_1x32")


def test_experts_under_opcheck(aiter):
    aiter(NEWEST)
    moe, _ = banks()
    x, weights, ids = routing()
    arguments = (x, moe.w13, moe.w13_scale, moe.w2, moe.w2_scale, weights, ids, INTER)
    named = {"w13_path": "asm", "w2_path": "asm", "input_quant": "mxfp4", "backend": "aiter"}
    torch.library.opcheck(torch.ops.mxfp4prep.fused_moe.default, arguments, named)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_experts_answer_in_xs_dtype(aiter, dtype):
    aiter(NEWEST)
    moe, dense = banks()
    x, weights, ids = routing(dtype=dtype)
    y = moe(x, weights, ids)
    assert y.dtype == dtype
    near(y, recorder.moe64(x.bfloat16(), *dense, weights, ids))


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_an_expert_that_is_elsewhere_adds_nothing(aiter, version):
    aiter(version)
    moe, dense = banks()
    x, weights, ids = routing()
    ids[0, 1] = ids[3] = -1
    weights[3] = torch.nan
    y = moe(x, weights.bfloat16(), ids.to(torch.int16))
    near(y, recorder.moe64(x, *dense, weights.bfloat16(), ids))
    assert (y[3] == 0).all()
    assert recorder.last("fused_moe")["expert_mask"] == ((EXPERTS + 1,), (1,), torch.int32)


def test_a_graph_being_captured_gets_no_mask(aiter, monkeypatch):
    """What decides needs a look at the ids, which would end the capture."""
    aiter(NEWEST)
    from mxfp4prep.runtime.backends import aiter_backend

    monkeypatch.setattr(aiter_backend, "_is_capturing", lambda ids: True)
    moe, dense = banks()
    x, weights, ids = routing()
    ids[2, 0] = -1
    weights[2, 0] = torch.nan
    near(moe(x, weights, ids), recorder.moe64(x, *dense, weights, ids))
    assert recorder.last("fused_moe")["expert_mask"] is None


def test_no_tokens(aiter):
    aiter(NEWEST)
    moe, _ = banks()
    y = moe(*(tensor[:0] for tensor in routing()))
    assert (y.shape, y.dtype) == ((0, HIDDEN), torch.bfloat16)
    assert recorder.calls == []


def test_swigluoai_with_biases_where_gate_and_up_may_stand_apart(aiter):
    aiter(NEWEST)
    generator = torch.Generator().manual_seed(3)
    bias1 = torch.randn((EXPERTS, 2 * INTER), generator=generator).bfloat16()
    bias2 = torch.randn((EXPERTS, HIDDEN), generator=generator).bfloat16()
    moe, dense = banks(activation="swigluoai", limit=7.0, bias1=bias1, bias2=bias2)
    x, weights, ids = routing()
    near(moe(x, weights, ids), recorder.moe64(x, *dense, weights, ids, "Swiglu", bias1, bias2))
    seen = recorder.last("fused_moe")
    assert (seen["activation"].name, seen["gate_mode"]) == ("Swiglu", "separated")
    assert seen["bias1"] == ((EXPERTS, 2 * INTER), (2 * INTER, 1), torch.float32)


BIAS = torch.zeros((EXPERTS, HIDDEN))


@pytest.mark.parametrize(
    ("version", "layer", "words"),
    [
        (NEWEST, {"bias2": BIAS}, "drops the biases of experts with silu"),
        (NEWEST, {"limit": 7.0}, "does not clamp before silu"),
        (NEWEST, {"activation": "gelu"}, "activation gelu"),
        (NEWEST, {"activation": "gelu_tanh"}, "activation gelu_tanh"),
        (NEWEST, {"gate_up": "interleaved"}, "interleaved gate and up"),
        (NEWEST, {"activation": "swigluoai", "limit": 5.0}, "clamps swigluoai at 7.0, not at 5.0"),
        (NEWEST, {"activation": "swigluoai"}, "clamps swigluoai at 7.0, not at None"),
        ("0.1.12.post1", {"activation": "swigluoai", "limit": 7.0}, "gate_mode"),
    ],
)
def test_experts_that_it_would_answer_wrongly_are_refused(aiter, version, layer, words):
    aiter(version)
    moe, _ = banks(**layer)
    with pytest.raises(BackendUnavailable, match=words):
        moe(*routing())


def test_experts_on_another_path_are_refused(aiter):
    aiter(NEWEST)
    w13, w13_scale, _ = matrix(64, 64, "triton", 1)
    w2, w2_scale, _ = matrix(64, 32, "triton", 1)
    moe = PreparedExperts(
        w13, w13_scale, w2, w2_scale, hidden=64, intermediate=32, w13_path="triton",
        w2_path="triton", scheme="w4a4", input_activation=W4A4, backend="aiter",
    )  # fmt: skip
    with pytest.raises(BackendUnavailable, match=r"path triton\+triton, only asm"):
        moe(torch.zeros((1, 64)), torch.ones((1, 1)), torch.zeros((1, 1), dtype=torch.int64))


def padded_call(hidden_pad=0, intermediate_pad=0):
    w13, w13_scale, dense13 = matrix(2 * INTER, HIDDEN, "asm", EXPERTS, low=116, high=122)
    w2, w2_scale, dense2 = matrix(HIDDEN, INTER, "asm", EXPERTS, low=116, high=122)
    x, weights, ids = routing()
    y = ops.fused_moe(
        x, w13, w13_scale, w2, w2_scale, weights, ids, INTER, "asm", "asm", "mxfp4",
        hidden_pad=hidden_pad, intermediate_pad=intermediate_pad, backend="aiter",
    )  # fmt: skip
    return y, (x, dense13, dense2, weights, ids)


def test_padding_is_handed_over_ignored_in_x_and_zero_in_the_answer(aiter):
    aiter(NEWEST)
    y, (x, *dense, weights, ids) = padded_call(hidden_pad=64, intermediate_pad=32)
    x[:, -64:] = 0
    expected = recorder.moe64(x, *dense, weights, ids)
    expected[:, -64:] = 0
    near(y, expected)
    assert (y[:, -64:] == 0).all()
    seen = recorder.last("fused_moe")
    assert (seen["hidden_pad"], seen["intermediate_pad"]) == (64, 32)


WITHOUT_PADS = """
import aiter_recorder
from enum import Enum
ActivationType = Enum("ActivationType", "Silu")
QuantType = Enum("QuantType", "per_1x32")
def fused_moe(hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=None,
              quant_type=None, w1_scale=None, w2_scale=None):
    return aiter_recorder.call("fused_moe", "old", locals())
"""


def test_what_the_installed_fused_moe_has_not_is_refused_only_where_it_is_needed(aiter):
    aiter(NEWEST, changes={"fused_moe.py": WITHOUT_PADS})
    padded_call()
    with pytest.raises(BackendUnavailable, match="has no hidden_pad"):
        padded_call(hidden_pad=32)
    with pytest.raises(BackendUnavailable, match="has no intermediate_pad"):
        padded_call(intermediate_pad=32)
