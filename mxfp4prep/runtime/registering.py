"""An operator as torch knows it: the function, the fake that tracers run, and no gradient.

An input that requires a gradient is served; what is refused is to compute one: a backward pass,
torch.compile of a graph that would have one, a tangent of forward mode, and torch.func's transforms
of either kind. A tangent that is lost is no error that anything else would show: it reads as zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor

from mxfp4prep.errors import Unsupported

if TYPE_CHECKING:
    from torch._C import DispatchKeySet
    from torch._ops import OpOverload

NAMESPACE = "mxfp4prep"

SERVE = "run the model under torch.inference_mode() or torch.no_grad()"
OUTSIDE = "call it outside of torch.func's transforms and of torch.autograd.forward_ad"

FAKES: dict[str, Callable[..., Tensor]] = {}
"""Operator name -> its fake, for tests that compare signatures."""

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


class Output(NamedTuple):
    """What an operator returns: a new contiguous tensor of `shape`, with `like`'s dtype, there."""

    shape: tuple[int | torch.SymInt, ...]
    like: Tensor


def fake_of(
    real: Callable[..., Tensor], output: Callable[[Mapping[str, Any]], Output]
) -> Callable[..., Tensor]:
    """A function with `real`'s signature that only makes the tensor that `real` would return.

    output   what `real` returns, from its arguments by name, defaults filled in
    """
    signature = inspect.signature(real)

    def fake(*args: object, **kwargs: object) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        shape, like = output(bound.arguments)
        return like.new_empty(shape)

    fake.__signature__ = signature  # type: ignore[attr-defined]
    fake.__name__ = f"{real.__name__}_fake"
    return fake


def register(real: Callable[..., Tensor], output: Callable[[Mapping[str, Any]], Output]) -> None:
    """Registers `real` as torch.ops.mxfp4prep.<its name> together with its fake."""
    name = real.__name__
    fake = FAKES[name] = fake_of(real, output)
    schema = torch.library.infer_schema(real, mutates_args=())
    tags = (torch.Tag.pt2_compliant_tag,)
    _LIBRARY.define(f"{name}{schema}", tags=tags)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    operator: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    # not torch.compiler.disable, which imports the compiler
    opaque = torch._disable_dynamo(real)  # type: ignore[attr-defined]
    upper = _without_gradient(operator, name)
    _LIBRARY.impl(name, opaque, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, upper, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def _without_gradient(operator: OpOverload, name: str) -> Callable[..., Tensor]:
    """The operator's kernel for inputs that a gradient may be asked of."""
    where = f"torch.ops.{NAMESPACE}.{name}"

    def kernel(keyset: DispatchKeySet, *args: object, **kwargs: object) -> Tensor:
        def below() -> Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                after = keyset & torch._C._after_autograd_keyset
                result: Tensor = operator.redispatch(after, *args, **kwargs)
                return result

        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if forward_mode._current_level >= 0 and any(map(_has_tangent, tensors)):
            _refuse(where, OUTSIDE)
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return below()
        if torch._C._are_functorch_transforms_active():
            _refuse(where, OUTSIDE)
        result: Tensor = _Refused.apply(where, below, *tensors)  # type: ignore[no-untyped-call]
        return result

    return kernel


def _has_tangent(tensor: Tensor) -> bool:
    pair = forward_mode.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return pair.tangent is not None


class _Context(Protocol):
    where: str


class _Refused(torch.autograd.Function):
    """What `below` returns, in a graph whose backward pass raises Unsupported."""

    @staticmethod
    def forward(ctx: _Context, where: str, below: Callable[[], Tensor], *_: Tensor) -> Tensor:
        ctx.where = where
        return below()

    @staticmethod
    def backward(ctx: _Context, *_: Tensor) -> NoReturn:
        _refuse(ctx.where)


def _refuse(where: str, hint: str = SERVE) -> NoReturn:
    raise Unsupported(where, "has no gradient", hint=hint)
