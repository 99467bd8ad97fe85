"""No derivative is computed, in whatever mode it is asked for, and none is silently zero."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from test_ops import expert_inputs, experts, linear

from mxfp4prep.errors import Unsupported


def of_linear():
    layer = linear()
    return layer, torch.randn((2, 256), generator=torch.Generator().manual_seed(0))


def of_experts():
    module = experts()
    x, weights, ids = expert_inputs(2, 3)
    return lambda rows: module(rows, weights, ids), x.float()


def of_weights():
    """The router's weights are differentiable too."""
    module = experts()
    x, weights, ids = expert_inputs(2, 3)
    return lambda routed: module(x, routed, ids), weights


def dual(call, x):
    with forward_mode.dual_level():
        return call(forward_mode.make_dual(x, torch.ones_like(x)))


MODES = {
    "dual": dual,
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda call, x: torch.func.jacfwd(call)(x),
    "linearize": lambda call, x: torch.func.linearize(call, x),
    "grad": lambda call, x: torch.func.grad(lambda rows: call(rows).sum())(x),
    "vjp": lambda call, x: torch.func.vjp(call, x),
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "hessian": lambda call, x: torch.func.hessian(lambda rows: call(rows).sum())(x),
    "backward": lambda call, x: call(x.clone().requires_grad_()).sum().backward(),
    "autograd.jacobian": lambda call, x: torch.autograd.functional.jacobian(call, x),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [of_linear, of_experts, of_weights])
def test_a_derivative_is_refused(mode, make):
    call, x = make()
    with pytest.raises(Unsupported, match=r"torch\.ops\.mxfp4prep\.\w+: has no gradient") as caught:
        MODES[mode](call, x)
    assert caught.value.hint


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [of_linear, of_experts])
def test_what_asks_for_no_derivative_of_it_is_served(make):
    call, x = make()
    wanted = call(x)
    with forward_mode.dual_level():
        assert torch.equal(call(x), wanted)
    factor = torch.tensor(2.0)
    assert torch.func.grad(lambda f: (f * call(x)).sum())(factor) == wanted.sum()
    primal, tangent = torch.func.jvp(lambda f: f * call(x), (factor,), (factor,))
    assert torch.equal(primal, tangent)
    with torch.no_grad():
        assert torch.equal(call(x.clone().requires_grad_()), wanted)
    with torch.inference_mode():
        assert torch.equal(call(x), wanted)


def test_a_tangent_in_a_compiled_graph():
    layer, x = of_linear()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda rows: torch.func.jvp(layer, (rows,), (rows,)), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="has no gradient"):
        compiled(x)
