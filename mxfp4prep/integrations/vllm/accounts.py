"""Whether a model got everything: each of its parameters, and each tensor that is stored for it.

For a quantized model vLLM does not ask. A norm that the checkpoint lacks is served as ones, another
parameter as whatever its memory held, and a bias that has no place is left out, without a word. The
methods of this package see for themselves that their parameters arrive; here it is asked of all
others, whichever of vLLM's load formats brings them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.integrations.vllm.config import PreparedConfig
from mxfp4prep.integrations.vllm.messages import NO_PLACE, NOT_STORED, NOT_STORED_HINT
from mxfp4prep.integrations.vllm.receiving import UNWATCHED, Arrivals
from mxfp4prep.integrations.vllm.stored import LEFT_OUT, Stored
from mxfp4prep.marks import QUANT_METHOD

FROM_CONFIG = "input_scale_ub"
"""A parameter that vLLM makes of the config, not of the checkpoint."""


class WatchedLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM is untyped here
    """Stands before a loader of vLLM's: `watched`. Models of other methods are left to it alone."""

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:  # noqa: ANN401 - a model of vLLM's
        """What the loader does, and then nothing is missing and nothing is left over.

        Raises InvalidCheckpoint for what the checkpoint lacks, Unsupported for what the model has
        no place for.
        """
        load = super().load_weights
        config = _config_of(model) if model_config.quantization == QUANT_METHOD else None
        if config is None or str(self.load_config.load_format) in UNWATCHED:
            load(model, model_config)
            return
        # A draft has its target's embeddings, its head or both, and what it lacks costs time only
        is_draft = model_config.runner_type == "draft"
        if not is_draft:
            check_places(model, config.stored, config.packed_modules_mapping)
        with _results(model) as results:
            load(model, model_config)
        if not results:
            return  # parameters were filled in another way: methods that saw nothing arrive say so
        loaded = None if None in results else set().union(*results)
        check_loaded(model, loaded, is_draft=is_draft)
        for module in model.modules():
            arrivals = _arrivals(module)
            if arrivals is not None:
                arrivals.is_accounted = True


def watched(kind: type[BaseModelLoader]) -> type[BaseModelLoader]:
    """Loader class `kind`, which refuses a prepared model that did not get everything."""
    if issubclass(kind, WatchedLoader):
        return kind
    own = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(kind.__name__, (WatchedLoader, kind), own)


def check_places(model: nn.Module, stored: Stored, packed: Mapping[str, Sequence[str]]) -> None:
    """Nothing, for a model that is built and not loaded yet.

    packed   leaf of a fused module -> the leaves of its parts

    Raises InvalidCheckpoint for a fused module of which only some parts are stored, Unsupported for
    a stored vector that its module has no place for.
    """
    for name, module in model.named_modules():
        if _arrivals(module) is not None:
            continue
        if isinstance(module, LinearBase):
            is_whole = f"{name}.weight" in stored.tensors
            parts = [name] if is_whole else stored.parts(name, packed)
            # the names of the others only the model's own loading knows
            if any(f"{part}.weight" in stored.tensors for part in parts):
                _check_parts(module, parts, stored)
        elif "weight" in module._parameters:
            is_plain = getattr(module, "quant_method", None) is None
            for leaf in sorted(LEFT_OUT) if is_plain else ("bias",):
                if f"{name}.{leaf}" in stored.tensors and getattr(module, leaf, None) is None:
                    raise Unsupported(f"{name}.{leaf}", NO_PLACE)


def _check_parts(module: LinearBase, parts: Sequence[str], stored: Stored) -> None:
    has_bias = getattr(module, "bias", None) is not None
    for part in parts:
        for needed in ("weight", "bias") if has_bias else ("weight",):
            if f"{part}.{needed}" not in stored.tensors:
                raise InvalidCheckpoint(f"{part}.{needed}", NOT_STORED, hint=NOT_STORED_HINT)
        if not has_bias and f"{part}.bias" in stored.tensors:
            raise Unsupported(f"{part}.bias", NO_PLACE)


def check_loaded(model: nn.Module, loaded: Collection[str] | None, *, is_draft: bool) -> None:
    """Nothing, for a model whose own loading says that it loaded the parameters `loaded`.

    Raises InvalidCheckpoint for a parameter that is not among them, Unsupported for a model that
    does not say.
    """
    if loaded is None:
        if is_draft:
            return
        what = "its loading does not say which parameters it has loaded"
        raise Unsupported(type(model).__name__, what)
    exempt = {
        id(parameter) for module in model.modules() for parameter in _exempt(module, is_draft)
    }
    missing = [
        name
        for name, parameter in model.named_parameters()
        if name not in loaded and id(parameter) not in exempt and parameter.numel()
    ]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise InvalidCheckpoint(f"{missing[0]}{more}", NOT_STORED, hint=NOT_STORED_HINT)


def _exempt(module: nn.Module, is_draft: bool) -> Iterator[nn.Parameter]:
    """A module's parameters that need not be stored, or that have been seen to arrive."""
    method = getattr(module, "quant_method", None)
    has_arrivals = _arrivals(module) is not None
    # a cache's scales have defaults; a draft's heads and embeddings are another model's
    is_all = isinstance(method, BaseKVCacheMethod) or (is_draft and method is not None)
    for leaf, parameter in module.named_parameters():
        if is_all or leaf == FROM_CONFIG or (has_arrivals and leaf != "bias"):
            yield parameter


def _arrivals(module: nn.Module) -> Arrivals | None:
    """What has arrived of a module whose method is this package's, None for another's."""
    return getattr(getattr(module, "quant_method", None), "arrivals", None)


def _config_of(model: nn.Module) -> PreparedConfig | None:
    """The config that the model was built with: a draft beside it may have another."""
    for module in model.modules():
        config = getattr(module, "quant_config", None)
        if isinstance(config, PreparedConfig):
            return config
    return None


@contextmanager
def _results(model: Any) -> Iterator[list[Any]]:  # noqa: ANN401 - a model of vLLM's
    """What the model's own loading answers meanwhile, a result for each time it is asked."""
    results: list[Any] = []
    load = model.load_weights
    own = vars(model).get("load_weights")

    def note(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the model's
        results.append(load(*arguments, **named))
        return results[-1]

    model.load_weights = note
    try:
        yield results
    finally:
        del model.load_weights
        if own is not None:
            model.load_weights = own
