"""PreparedLinear: numbers against float64 by ml_dtypes, shapes, dtypes, schemes, refusals."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from prepared_factory import ACTIVATIONS, LAYOUT_IDS, decode64, fake_quantize64, lay_out

import mxfp4prep
from mxfp4prep.errors import LayoutError, Unsupported, UsageError
from mxfp4prep.manifest import ActivationRecord
from mxfp4prep.runtime.input_quant import INPUT_QUANT, input_quant_of
from mxfp4prep.runtime.linear import PreparedLinear

SHAPES = [("asm", 64, 512), ("asm", 128, 256), ("triton", 48, 672), ("kept", 5, 96)]


def raw(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(118, 130, (n, -(-k // 32)), dtype=torch.uint8, generator=generator)
    return packed, scale


def make(packed, scale, path="asm", scheme="w4a4", activation=None, **kwargs) -> PreparedLinear:
    weight_layout, scale_layout = LAYOUT_IDS[path]
    return PreparedLinear(
        lay_out(packed, weight_layout),
        lay_out(scale, scale_layout),
        n=packed.shape[0],
        k=2 * packed.shape[1],
        path=path,
        scheme=scheme,
        activation=ActivationRecord(**(activation or ACTIVATIONS[scheme])),
        **kwargs,
    )


def inputs(m: int, k: int, dtype=torch.float32) -> torch.Tensor:
    x = torch.randn((m, k), generator=torch.Generator().manual_seed(m))
    return (x * torch.logspace(-3, 3, k, base=2)).to(dtype)


@pytest.mark.parametrize("scheme", ["w4a4", "w4a16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("path", "n", "k"), SHAPES)
def test_one_hot_inputs_give_the_decoded_weight(path, n, k, dtype, scheme):
    packed, scale = raw(n, k)
    layer = make(packed, scale, path, scheme)
    dense = decode64(packed, scale, k)
    y = layer(torch.eye(k, dtype=dtype))
    assert y.dtype == dtype
    assert torch.equal(y.double(), dense.T)


@pytest.mark.parametrize(("path", "n", "k"), SHAPES)
def test_w4a4_equals_float64(path, n, k):
    packed, scale = raw(n, k)
    bias = torch.linspace(-3, 3, n)
    layer = make(packed, scale, path, bias=bias)
    x = inputs(33, k)
    expected = fake_quantize64(x) @ decode64(packed, scale, k).T + bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-3)


def test_weights_only_does_not_touch_the_input():
    packed, scale = raw(64, 256)
    layer = make(packed, scale)
    x = inputs(7, 256)
    dense = decode64(packed, scale, 256)
    with_quantization = layer(x)
    layer.quantize_activations = False
    torch.testing.assert_close(layer(x).double(), x.double() @ dense.T, rtol=1e-5, atol=1e-3)
    assert not torch.allclose(layer(x), with_quantization, rtol=1e-3)


def test_w4a8_static_rounds_and_saturates_like_ml_dtypes():
    packed, scale = raw(64, 256)
    activation = {"dtype": "fp8_e4m3", "static": True}
    layer = make(packed, scale, "asm", "w4a8", activation, input_scale=torch.tensor(0.01))
    x = inputs(5, 256)
    step = np.float32(0.01)
    scaled = np.clip(x.numpy() / step, -448, 448)
    rounded = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * step
    assert (np.abs(scaled) == 448).any(), "some inputs saturate"
    expected = torch.from_numpy(rounded) @ decode64(packed, scale, 256).T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("mode", ["per_token", "per_tensor"])
def test_w4a8_dynamic_has_one_scale_per_token_or_for_all(mode):
    packed, scale = raw(64, 256)
    activation = {"dtype": "fp8_e4m3", "scale_mode": mode, "static": False}
    layer = make(packed, scale, "asm", "w4a8", activation)
    x = inputs(5, 256) * torch.tensor([[1.0], [1e-3], [1e3], [7.0], [0.0]])
    step = (x.abs().amax(-1 if mode == "per_token" else (0, 1), keepdim=True) / 448).numpy()
    step[step == 0] = 1
    rounded = (x.numpy() / step).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * step
    expected = torch.from_numpy(rounded) @ decode64(packed, scale, 256).T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "element", "power"),
    [("fp6_e2m3", ml_dtypes.float6_e2m3fn, -1), ("fp6_e3m2", ml_dtypes.float6_e3m2fn, -3)],
)
def test_w4a6_rounds_to_fp6(dtype, element, power):
    """Each block's largest is 2: its scale is 2^(1 - largest exponent of the element)."""
    packed, scale = raw(64, 256)
    activation = {"dtype": dtype, "scale_mode": "even", "static": False}
    layer = make(packed, scale, "asm", "w4a6", activation)
    x = 4 * torch.rand((4, 256), generator=torch.Generator().manual_seed(0)) - 2
    x[:, ::32] = 2.0
    rounded = (x.numpy() / 2.0**power).astype(element).astype(np.float64) * 2.0**power
    assert (rounded != x.numpy()).mean() > 0.5
    expected = torch.from_numpy(rounded) @ decode64(packed, scale, 256).T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-3)


def test_casting_the_module_leaves_its_static_scale_exact():
    packed, scale = raw(64, 256)
    activation = {"dtype": "fp8_e4m3", "static": True}
    exact = torch.tensor(0.0123456)
    layer = make(packed, scale, "asm", "w4a8", activation, input_scale=exact)
    x = inputs(5, 256)
    before = layer(x)
    for cast in (torch.nn.Module.half, torch.nn.Module.bfloat16):
        cast(layer)
        assert torch.equal(layer.input_scale, exact)
        assert torch.equal(layer(x), before)


def test_autocast_does_not_reach_into_the_gemm():
    packed, scale = raw(64, 256)
    layer = make(packed, scale)
    x = inputs(5, 256)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("lead", [(), (0,), (3,), (2, 5), (2, 0, 3)])
def test_leading_dimensions_are_kept(lead):
    packed, scale = raw(64, 256)
    layer = make(packed, scale)
    x = torch.ones((*lead, 256), dtype=torch.bfloat16)
    y = layer(x)
    assert y.shape == (*lead, 64)
    assert y.dtype == torch.bfloat16


def test_inputs_need_not_be_contiguous():
    packed, scale = raw(64, 256)
    layer = make(packed, scale)
    x = inputs(6, 512)[:, ::2]
    assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("path", ["asm", "triton"])
def test_scale_bytes_255_and_0(path):
    packed, scale = raw(64, 256)
    scale[3, 2], scale[5, :] = 255, 0
    packed[5, :] = 0x77  # 6.0
    layer = make(packed, scale, path, "w4a16")
    dense = layer.dequantize()
    assert dense[3, 64:96].isnan().all()
    assert int(dense.isnan().sum()) == 32
    assert (dense[5] == 6 * 2.0**-127).all()
    x = torch.ones((1, 256))
    assert layer(x)[0, 3].isnan()
    assert int(layer(x).isnan().sum()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("path", "n", "k"), [*SHAPES, ("triton", 4, 80)])
def test_dequantize(path, n, k, dtype):
    packed, scale = raw(n, k)
    dense = make(packed, scale, path).dequantize(dtype)
    assert dense.dtype == dtype
    assert torch.equal(dense.double(), decode64(packed, scale, k))


def test_short_last_group():
    packed, scale = raw(16, 80)
    layer = make(packed, scale, "triton")
    x = inputs(3, 80)
    expected = fake_quantize64(x) @ decode64(packed, scale, 80).T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-3)


def test_large_weights_are_decoded_in_parts(monkeypatch):
    from mxfp4prep.runtime.backends import torch_backend

    packed, scale = raw(64, 256)
    layer, x = make(packed, scale), inputs(5, 256)
    whole = layer(x)
    monkeypatch.setattr(torch_backend, "CHUNK_ELEMENTS", 256 * 24)
    torch.testing.assert_close(layer(x), whole)
    monkeypatch.setattr(torch_backend, "CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(layer(x), whole)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(2, 255, dtype=torch.bfloat16), ["(2, 255)", "(..., 256)"]),
        (torch.zeros((), dtype=torch.bfloat16), ["()", "(..., 256)"]),
        (torch.zeros(2, 256, dtype=torch.float64), ["float64", "bfloat16"]),
        (torch.zeros(2, 256, dtype=torch.int32), ["int32", "bfloat16"]),
        (torch.zeros(2, 256, device="meta"), ["meta", "cpu"]),
    ],
)
def test_wrong_inputs_are_named(x, words):
    layer = make(*raw(64, 256), name="model.layers.3.o_proj")
    with pytest.raises(UsageError) as caught:
        layer(x)
    for word in ["model.layers.3.o_proj", *words]:
        assert word in str(caught.value)


def test_state_dict_round_trip():
    first, second = make(*raw(64, 256, 1), bias=torch.ones(64)), make(*raw(64, 256, 2))
    second.bias = torch.zeros(64)
    second.load_state_dict(first.state_dict())
    x = inputs(4, 256)
    assert torch.equal(second(x), first(x))
    assert set(first.state_dict()) == {"weight", "scale", "bias"}


def test_state_dict_of_another_layout_is_refused():
    packed, scale = raw(64, 256)
    with pytest.raises(RuntimeError, match="size mismatch"):
        make(packed, scale, "asm").load_state_dict(make(packed, scale, "triton").state_dict())


def test_casting_the_module_keeps_the_bytes():
    layer = make(*raw(64, 256), bias=torch.ones(64))
    before = layer.weight.clone()
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == layer.scale.dtype == torch.uint8
    assert torch.equal(layer.weight, before)
    assert layer.bias.dtype == torch.bfloat16


def test_wrong_bytes_are_refused():
    packed, scale = raw(64, 256)
    weight = lay_out(packed, "tile16x16")
    record = ActivationRecord(**ACTIVATIONS["w4a4"])
    for bad_weight, bad_scale in ((packed, lay_out(scale, "tile32x8")), (weight, scale)):
        with pytest.raises(LayoutError):
            PreparedLinear(
                bad_weight, bad_scale, n=64, k=256, path="asm", scheme="w4a4", activation=record
            )


def test_repr_says_what_it_is():
    text = repr(make(*raw(64, 256), name="x"))
    for word in ("n=64", "k=256", "path=asm", "scheme=w4a4", "backend=torch"):
        assert word in text


def test_it_is_an_nn_module_with_linear_names():
    layer = make(*raw(64, 256))
    assert isinstance(layer, torch.nn.Module)
    assert (layer.in_features, layer.out_features) == (256, 64)
    assert layer.layouts == ("tile16x16", "tile32x8")
    assert list(layer.parameters()) == []
    assert isinstance(layer, mxfp4prep.PreparedLinear)


@pytest.mark.parametrize(
    ("scheme", "activation"),
    [
        ("w4a4", {"dtype": None}),
        ("w4a4", {"dtype": "fp4", "scale_mode": "floor"}),
        ("w4a6", {"dtype": "fp6_e2m3", "scale_mode": "ceil"}),
        ("w4a4", {"dtype": "fp4", "static": True}),
        ("w4a16", {"dtype": "fp8_e4m3"}),
        ("w4a8", {"dtype": "int8"}),
    ],
)
def test_unknown_activations_are_refused(scheme, activation):
    with pytest.raises(Unsupported, match="layer"):
        input_quant_of(scheme, ActivationRecord(**activation), "layer")


def test_static_fp8_without_scale_is_refused():
    with pytest.raises(UsageError, match="input_scale"):
        INPUT_QUANT["fp8_static"](torch.zeros(1, 32), None)


def test_forward_warns_of_nothing():
    layer = make(*raw(64, 256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.zeros(1, 256))
