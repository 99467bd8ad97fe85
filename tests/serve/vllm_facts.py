"""What the plugin does inside vLLM, as facts: `python vllm_facts.py DENSE FP8_ATTENTION MOE`.

Prints one JSON object. Three prepared checkpoints; no engine is started.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
import tempfile

import torch


def config_of(model, **options):
    """vLLM's config for a model, the quantization config in it."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, **options
    ).create_engine_config()


def built(model, **options):
    """The model, loaded by vLLM's default loader, with its config."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = config_of(model, **options)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def unloaded(model):
    """The model, built and not loaded, as another process would hand it its parameters; what
    processing it says, first without a word that this was done already. And whether it then passes
    and leaves the bytes alone."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.model_executor.utils import weights_already_processed
    from vllm.utils.torch_utils import set_default_torch_dtype

    from mxfp4prep.errors import InvalidCheckpoint

    config = config_of(model)
    device = torch.device("cpu")
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        built = initialize_model(config)
        before = bytes_of(built)
        said = ""
        try:
            process_weights_after_loading(built, config.model_config, device)
        except InvalidCheckpoint as error:
            said = str(error)
        with weights_already_processed():
            process_weights_after_loading(built, config.model_config, device)
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in built.modules()}
    return {"said": said, "kept": bytes_of(built) == before, "methods": sorted(methods)}


def accounts(model):
    """What is said of a model whose loading answers this and that, as a model and as a draft."""
    from mxfp4prep.integrations.vllm.accounts import check_loaded

    every = {name for name, _ in model.named_parameters()}
    answers = {
        "all": every,
        "no embeddings": every - {"model.embed_tokens.weight", "lm_head.weight"},
        "no norm": every - {"model.norm.weight"},
        "nothing said": None,
    }
    return {
        name: [said(check_loaded, model, loaded, is_draft=draft) for draft in (False, True)]
        for name, loaded in answers.items()
    }


def loaded_by_others(config):
    """What is said where the default loader is not the one of vLLM's table."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(config.load_config)
    with set_current_vllm_config(config):
        return said(loader.load_model, config, config.model_config)


def said(function, *arguments, **named):
    """The error that a call ends with, "" where it does not."""
    from mxfp4prep.errors import Mxfp4PrepError

    try:
        function(*arguments, **named)
    except Mxfp4PrepError as error:
        return str(error)
    return ""


def replaced(model, declared):
    """What is said of a prepared checkpoint whose quantization_config is `declared`."""
    from types import SimpleNamespace

    from mxfp4prep.errors import InvalidManifest
    from mxfp4prep.integrations.vllm.config import PreparedConfig

    try:
        PreparedConfig.override_quantization_method(
            declared, None, SimpleNamespace(_name_or_path=model)
        )
    except InvalidManifest as error:
        return str(error)
    return ""


def bytes_of(model):
    return {
        name: hashlib.sha256(parameter.data.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.uint8
    }


def facts(dense, mixed, moe):
    import mxfp4prep.integrations.vllm as plugin

    plugin.register()
    plugin.register()
    from vllm.model_executor import model_loader
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
    from vllm.model_executor.layers.quantization.utils.config_utils import (
        get_quark_ocp_mx_group_size,
        is_shared_expert_quant_fse_compatible,
    )
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from mxfp4prep.integrations.vllm.accounts import WatchedLoader

    found = {"registered": quantization.QUANTIZATION_METHODS.count("mxfp4prep")}
    found["loaders"] = [
        kind.__mro__.count(WatchedLoader)
        for kind in model_loader._LOAD_FORMAT_TO_MODEL_LOADER.values()
    ]

    found["replaced"] = [replaced(dense, declared) for declared in ({}, "quark", None)]
    found["unloaded experts"] = unloaded(moe)
    found["unloaded linears"] = unloaded(dense)

    model, config = built(dense)
    layer = model.model.layers[0]
    linear = layer.mlp.down_proj
    found["method"] = type(linear.quant_method).__name__
    found["pre-processed"] = linear.quant_method.supports_pre_processed_weights
    found["shapes"] = [list(linear.weight.shape), list(linear.weight_scale.shape)]
    before = bytes_of(model)
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    found["processed again"] = bytes_of(model) == before

    again = pickle.loads(pickle.dumps(config.quant_config))
    found["accounts"] = accounts(model)
    found["loaded by others"] = loaded_by_others(config_of(dense))

    found["pickled"] = again.stored.records == config.quant_config.stored.records
    found["is Quark's"] = isinstance(again, QuarkConfig)
    x = torch.randn(3, linear.quant_method.k).to(torch.bfloat16)
    dense_weight = linear.quant_method.dequantize_weight(linear)
    found["dequantized"] = list(dense_weight.shape)
    found["output"] = list(linear.quant_method.apply(linear, x.view(1, 3, -1)).shape)

    model, config = built(mixed, kv_cache_dtype="fp8")
    attention = model.model.layers[0].self_attn
    found["attention method"] = type(attention.qkv_proj.quant_method).__name__
    found["attention scheme"] = type(attention.qkv_proj.scheme).__name__
    found["cache method"] = type(attention.attn.quant_method).__name__
    found["k_scale"] = float(attention.attn._k_scale)

    config = config_of(moe)
    quant_config = config.quant_config
    quant_config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    at = "model.layers.0.mlp"
    found["fusible"] = is_shared_expert_quant_fse_compatible(
        quant_config, f"{at}.experts", f"{at}.shared_expert"
    )[0]
    found["group size"] = get_quark_ocp_mx_group_size(quant_config, f"{at}.shared_expert.down_proj")
    found["fused"] = fused(quant_config.stored, f"{at}.experts")
    return found


def fused(stored, prefix):
    """The layers in the slot behind the routed experts where vLLM fuses the shared one with them,
    or what is said against that."""
    from types import SimpleNamespace

    from mxfp4prep.errors import Unsupported
    from mxfp4prep.integrations.vllm.experts import PreparedExpertsMethod

    method = PreparedExpertsMethod(None, prefix, stored.experts(prefix), stored)
    found = []
    for count in (0, 1, 2):
        manager = SimpleNamespace(num_fused_shared_experts=count)
        try:
            gathered = method._with_shared(SimpleNamespace(expert_map_manager=manager))
        except Unsupported as error:
            found.append(str(error))
            continue
        last = [*gathered.w13[-1], *gathered.w2[-1]]
        found.append([len(gathered.w2), *(member.record.name for member in last)])
    return found


def tell(facts):
    """Prints what `facts` finds of the paths on the command line, in a world of one rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker has it
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        found = facts(*sys.argv[1:])
    print(json.dumps(found))


if __name__ == "__main__":
    tell(facts)
