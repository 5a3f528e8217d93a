# SPDX-License-Identifier: Apache-2.0
"""Everything about a model that changes the bytes of its keys and values: what names a block, and what is refused."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import logging
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import transformers

from .._kvferry import RefusedError

logger = logging.getLogger("kvferry")

FORMAT = "kvferry-hf-1"  # raised when what a block holds changes
SAMPLES = 16  # elements of each tensor that are looked at to see whether it was changed in place
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Their frequencies depend on how long the prompt becomes, so a block is not a function of its tokens.
MOVING_ROPE = ("dynamic", "longrope")
# They choose the kernels of the libraries that torch computes with.
KERNEL_VARIABLES = ("MKL_", "ONEDNN_", "DNNL_", "ATEN_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_", "TORCH_")
# What is proven: config.layer_types (absent: all alike), and implementations of attention.
PROVEN_LAYERS = {"full_attention", "sliding_attention"}
PROVEN_ATTENTION = ("eager", "sdpa", "flash_attention")


def base_of(model: Any) -> Any:
    """The Transformers model: itself, or the one inside a PEFT model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def short(value: object) -> str:
    """The digest of anything that JSON can tell, or whose str tells it."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


# ---- what is refused


def refusal(model: Any, named: Mapping[str, str]) -> str | None:
    """Why blocks of this model, as it is now, must not be reused; None if nothing is known against it."""
    base = base_of(model)
    if not isinstance(base, transformers.PreTrainedModel):
        return f"{type(model).__name__} is not a model of Transformers: pass the model itself, before torch.compile"
    config = base.config.get_text_config(decoder=True)
    if base.config.is_encoder_decoder:
        return f"{type(base).__name__} has an encoder: only decoder-only models are proven"
    if any(module.training for module in model.modules()):
        return "the model is in training mode, in which dropout changes every result: call model.eval()"
    if getattr(base, "hf_quantizer", None) is not None:
        return "the weights are quantised, which is not proven"
    if any(getattr(each, "_compiled_call_impl", None) is not None for each in (model, base)):
        return "the model is compiled, which is not proven: pass it before model.compile()"
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        return "attention is not causal: the keys of a token depend on later tokens"
    if any(kind in MOVING_ROPE for kind in rope_kinds(config)):
        return f"rope of the kinds {' and '.join(MOVING_ROPE)} depends on the length of the prompt"
    kinds = set(getattr(config, "layer_types", None) or ()) - PROVEN_LAYERS
    if kinds or getattr(config, "attention_chunk_size", None) or getattr(config, "num_kv_shared_layers", None):
        names = ", ".join(sorted(kinds)) or "chunked or shared attention"
        return f"layers of the kinds {names} are not proven, only full and sliding attention"
    if not str(config._attn_implementation).startswith(PROVEN_ATTENTION):
        return f"the attention implementation {config._attn_implementation} is not proven"
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in getattr(model, "peft_config", {}).values()):
        return "the adapter changes the prompt (prompt learning), not the weights"
    return refused_tensors(model) or (None if "hooks" in named else refused_hooks(model))


def rope_kinds(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters, *(group for group in parameters.values() if isinstance(group, dict))]
    return {str(group.get("rope_type")) for group in groups}


def refused_tensors(model: Any) -> str | None:
    devices = set()
    for name, tensor in all_tensors(model):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
            return f"{name} is a {type(tensor).__name__}, which is not proven"
        devices.add(str(tensor.device))
    if "meta" in devices:
        return "some weights are offloaded, which is not proven"
    if len(devices) > 1:
        return f"the model is spread over {', '.join(sorted(devices))}, which is not proven"
    return None


def recorders() -> set[CodeType]:
    """The code of the hooks that Transformers leaves on a model once it was asked for hidden states or attentions. They
    only note what they see (and return None), and do nothing unless they are asked."""
    try:
        from transformers.utils.output_capturing import install_output_capuring_hook as install
    except ImportError:
        return set()
    return {code for code in install.__code__.co_consts if isinstance(code, CodeType)}


def is_hooked(module: Any) -> bool:
    harmless = recorders()
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return "forward" in vars(module) or any(getattr(hook, "__code__", None) not in harmless for hook in hooks)


def refused_hooks(model: Any) -> str | None:
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return (
            "a hook of all modules (torch.nn.modules.module.register_module_forward_hook) may change what they compute"
        )
    for name, module in model.named_modules():
        if is_hooked(module):
            return (
                f"a hook or a patch of {name or 'the model'} may change what it computes: if it always does so in one "
                'way, name that with PrefixCache(..., identity={"hooks": "NAME"})'
            )
    return None


# ---- weights


def all_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def tensors_in_use(model: Any) -> list[tuple[str, torch.Tensor]]:
    """All but those of adapters that are loaded and not active, so that loading another adapter changes nothing."""
    idle = {id(tensor) for layer in adapter_layers(model) for tensor in idle_tensors(layer)}
    return [(name, tensor) for name, tensor in all_tensors(model) if id(tensor) not in idle]


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of their size, which every device can compare and concatenate."""
    flat = tensor.detach().reshape(-1)
    return flat if flat.element_size() not in INTEGERS else flat.view(INTEGERS[flat.element_size()])


def digest_of(tensor: torch.Tensor) -> bytes:
    host = tensor.detach().contiguous().cpu()
    num_bytes = host.numel() * host.element_size()
    memory = (ctypes.c_char * num_bytes).from_address(host.data_ptr()) if num_bytes else b""
    return hashlib.sha256(memory).digest()


def marks_of(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """A cheap digest that changes when a tensor is replaced or written to: address, version and some elements of each.

    The elements are for writes through `.data` (PEFT merges so), which leave address and version as they are."""
    samples: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
    marks = []
    for name, tensor in tensors:
        version = None if tensor.is_inference() else tensor._version
        marks.append((name, tensor.data_ptr(), version, tuple(tensor.shape), str(tensor.dtype)))
        if tensor.numel():
            sample = integers(tensor)[:: max(1, tensor.numel() // SAMPLES)]
            samples[tensor.element_size(), str(tensor.device)].append(sample)
    return short([marks, [digest_of(torch.cat(group)).hex() for group in samples.values()]])


def numbers_of(model: Any) -> str:
    """A digest of the plain attributes of all modules, such as the epsilon of a norm, or the factor of a scale."""
    plain = (bool, int, float, str)
    modules = model.named_modules()
    return short([(name, {k: v for k, v in vars(module).items() if type(v) in plain}) for name, module in modules])


def hash_weights(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, shapes, types and bytes of what is in memory, whatever file it came from."""
    start = time.monotonic()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(digest_of, (tensor for _, tensor in tensors)))
    total = hashlib.sha256()
    for (name, tensor), digest in zip(tensors, digests, strict=True):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + digest)
    logger.info("hashed %d tensors of the model in %.1f s", len(tensors), time.monotonic() - start)
    return total.hexdigest()


# ---- adapters (PEFT)


def adapter_layers(model: Any) -> list[Any]:
    """The layers that PEFT has put in, known by what they have, so that PEFT need not be there."""
    return [module for module in model.modules() if hasattr(module, "adapter_layer_names")]


def active_names(layer: Any) -> list[str]:
    return [] if layer.disable_adapters else list(layer.active_adapters)


def idle_tensors(layer: Any) -> Iterator[torch.Tensor]:
    active = active_names(layer)
    for attribute in layer.adapter_layer_names:
        group = getattr(layer, attribute, None)
        for name, part in group.items() if group is not None and hasattr(group, "items") else ():
            if name not in active:
                yield from [part] if isinstance(part, torch.Tensor) else part.parameters()


def adapters_of(model: Any) -> str:
    """Which adapters act, how strongly, and which are merged into the weights; "none" without any."""
    layers = adapter_layers(model)
    names = sorted({name for layer in layers for name in active_names(layer)})
    merged = [list(getattr(layer, "merged_adapters", [])) for layer in layers]
    if not names and not any(merged):
        return "none"
    scaling = [{name: getattr(layer, "scaling", {}).get(name) for name in active_names(layer)} for layer in layers]
    configs = getattr(model, "peft_config", {})
    settings = {name: configs[name].to_dict() for name in names if name in configs}
    return f"{','.join(names)[:200]} {short([scaling, merged, settings])}"


# ---- settings


def class_of(model: Any) -> str:
    """The class, and its source if it does not come with Transformers."""
    kind = type(base_of(model))
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("transformers."):
        return name
    try:
        return f"{name} {short(inspect.getsource(inspect.getmodule(kind) or kind))}"
    except (OSError, TypeError):
        raise RefusedError(f"the source of {name} can't be read, so a change of it would not be seen") from None


def config_of(model: Any) -> str:
    settings = base_of(model).config.to_dict()
    return short({name: settings[name] for name in settings if name not in ("_name_or_path", "transformers_version")})


def attention_of(model: Any) -> str:
    config = base_of(model).config
    configs = [config, config.get_text_config(decoder=True)]
    kinds = [str(getattr(each, f"_{what}_implementation", None)) for each in configs for what in ("attn", "experts")]
    kernels = str(bool(getattr(base_of(model), "use_kernels", False)))
    return " ".join([*dict.fromkeys(kinds), "kernels", kernels])


def machine_of(device: torch.device) -> str:
    """The kind of processor: libraries choose other kernels on another."""
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()} {processor()}"
    if device.type == "cuda":
        runtime = torch.version.cuda or torch.version.hip
        return f"cuda {torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)} {runtime}"
    return f"{device.type} {platform.platform()}"


def processor() -> str:
    """Vendor, model and features of the CPU, as a digest where the system tells them."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    return f"{platform.machine()} {short([value for name, value in facts.items() if name.strip() in wanted])[:12]}"


def arithmetic_of(device: torch.device) -> str:
    """Settings of the process that choose other kernels or another precision."""
    cuda = torch.backends.cuda
    attention = [getattr(cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "mem_efficient", "math", "cudnn")]
    variables = {name: value for name, value in os.environ.items() if name.startswith(KERNEL_VARIABLES)}
    settings = {
        "autocast": str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else "off",
        "float32": float32_precision(),
        "bfloat16": str(cuda.matmul.allow_bf16_reduced_precision_reduction),
        "float16": str(cuda.matmul.allow_fp16_reduced_precision_reduction),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "mkldnn": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "sdpa": "".join("ny"[on] for on in attention),
        "default": str(torch.get_default_dtype()),
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "any",
        "variables": short(variables)[:12],
    }
    return " ".join(f"{name}={value}" for name, value in settings.items())


def float32_precision() -> str:
    """Of products of matrices. Where torch has a setting for each library, the one for all of them may not be read."""
    backends = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return str(torch.get_float32_matmul_precision())
    names = [backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision]
    return ",".join("ieee" if name == "none" else name for name in names)


def versions() -> str:
    names = [f"transformers-{transformers.__version__}", f"torch-{torch.__version__}"]
    peft = sys.modules.get("peft")
    return " ".join([*names, *([f"peft-{peft.__version__}"] if peft else []), FORMAT])


def settings_of(model: Any) -> dict[str, str]:
    """All fields of a space but the weights' hash, the shapes and the probe; cheap enough for every call."""
    device = base_of(model).device
    return {
        "engine": versions(),
        "class": class_of(model),
        "config": config_of(model),
        "attention": attention_of(model),
        "adapters": adapters_of(model),
        "machine": machine_of(device),
        "arithmetic": arithmetic_of(device),
    }
