"""A module some of whose buffers are float32 facts: `.half()` and `.to(dtype)` leave them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import nn

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor


class ExactScales(nn.Module):
    """Buffers named in `exact_buffers` move with the module but keep their dtype and value.

    A static FP8 scale that is rounded to bfloat16 moves every result by up to 0.4 %.
    """

    exact_buffers: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {name: self._buffers[name] for name in self.exact_buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self
