# SPDX-License-Identifier: Apache-2.0
"""What names a block of vLLM: real configurations of vLLM, the environment, the machine and the files of the model.
A setting that changes bytes makes other names, and nothing else does (docs/vllm-identity.md)."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here (make setup-engines)")
pytest.importorskip("torch")

import torch
import vllm.config
import vllm.envs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvferry._weights import folder_digest
from kvferry.vllm import identity, influence

DOCS = Path(__file__).parents[2] / "docs" / "vllm-identity.md"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 100, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048, "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    files = {"model.safetensors": b"w" * 1000, "config.json": json.dumps(LLAMA).encode(), "tokenizer.json": b"{}"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        os.utime(folder / name, (1, 1))
    return folder


# ---- settings


def described(folder, **args):
    """vLLM's own configuration for these arguments, and one group of layers."""
    from vllm.engine.arg_utils import EngineArgs

    args = {"dtype": "float32", "max_model_len": 1024, "block_size": 32, "enforce_eager": True, **args}
    config = EngineArgs(model=str(folder), skip_tokenizer_init=True, **args).create_engine_config()
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["model.layers.0", "model.layers.1"])]
    return config, SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="LBHNC", hash_block_size=32)


@pytest.fixture
def plain(model):
    return identity.fields_of(*described(model))


NAMES = {
    "chunks of prompts": {"max_num_batched_tokens": 2000},
    "no chunks": {"enable_chunked_prefill": False},
    "requests in a batch": {"max_num_seqs": 7},
    "long prompts": {"long_prefill_token_threshold": 64},
    "compiled": {"enforce_eager": False},
    "compilation mode": {"enforce_eager": False, "compilation_config": {"mode": 1}},
    "custom ops": {"compilation_config": {"custom_ops": ["none"]}},
    "inductor": {"compilation_config": {"inductor_compile_config": {"epilogue_fusion": False}}},
    "block size": {"block_size": 64},
    "dtype": {"dtype": "bfloat16"},
    "dtype of pages": {"kv_cache_dtype": "fp8_e5m2"},
    "hashes": {"prefix_caching_hash_algo": "sha256_cbor"},
    "implementation": {"model_impl": "transformers"},
    "overrides": {"hf_overrides": {"rms_norm_eps": 1e-5}},
    "lora": {"enable_lora": True},
    "no sliding window": {"disable_sliding_window": True},
    "optimisation": {"optimization_level": 0},
    "files": {"load_format": "safetensors"},
    "code of the repository": {"code_revision": "other"},
}
SAME = {
    "the same": {},
    "longest prompt": {"max_model_len": 512},
    "room": {"num_gpu_blocks_override": 77, "kv_cache_memory_bytes": 1 << 20},
    "memory": {"gpu_memory_utilization": 0.5},
    "seed": {"seed": 7},
    "name": {"served_model_name": ["other"]},
    "own cache": {"enable_prefix_caching": False},
    "logs": {"disable_log_stats": True},
    "events": {"kv_events_config": {"enable_kv_cache_events": True}},
    "log-probabilities": {"max_logprobs": 3},
}


@pytest.mark.parametrize("args", NAMES.values(), ids=NAMES.keys())
def test_a_setting_that_changes_bytes_is_another_name(model, plain, args):
    assert identity.fields_of(*described(model, **args)) != plain


@pytest.mark.parametrize("args", SAME.values(), ids=SAME.keys())
def test_a_setting_that_changes_no_bytes_is_the_same_name(model, plain, args):
    assert identity.fields_of(*described(model, **args)) == plain


def test_each_process_and_place_has_the_same_name(model, plain, tmp_path):
    """Nothing of the process, of its random numbers or of where the model lies is in the name."""
    moved = tmp_path / "elsewhere"
    model.rename(moved)
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import test_vllm_identity as t;"
        "print(json.dumps(t.identity.fields_of(*t.described(sys.argv[2]))))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PORT": "4242"}
    run = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), str(moved)], env=env,
                         capture_output=True, text=True, check=True)  # fmt: skip
    assert json.loads(run.stdout.splitlines()[-1]) == plain


def test_an_epoch_and_the_seed_of_hashes_are_in_the_name(model, plain, monkeypatch):
    config, kv_config = described(model)
    assert identity.fields_of(config, kv_config, "epoch") != plain
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert identity.fields_of(config, kv_config) != plain


def spec_with(**changes):
    def change(config, kv_config):
        group = kv_config.kv_cache_groups[0]
        group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, **changes)

    return change


@pytest.mark.parametrize("change", [
    spec_with(dtype=torch.bfloat16), spec_with(num_kv_heads=2), spec_with(head_size=64),
    lambda c, k: k.kv_cache_groups[0].layer_names.pop(),
    lambda c, k: setattr(k, "kv_cache_layout", "other"),
    lambda c, k: setattr(c.parallel_config, "tensor_parallel_size", 2),
    lambda c, k: setattr(c.parallel_config, "data_parallel_size", 2),
    lambda c, k: setattr(c.parallel_config, "enable_expert_parallel", True),
    lambda c, k: setattr(c.model_config, "quantization", "awq"),
    lambda c, k: setattr(c.compilation_config, "cudagraph_mode", vllm.config.CUDAGraphMode.PIECEWISE),
    lambda c, k: setattr(c.model_config, "quantization_config", {"bits": 4}),
    lambda c, k: setattr(c.model_config.hf_text_config, "rope_parameters", {"rope_type": "longrope"}),
    lambda c, k: setattr(c.scheduler_config, "a_new_setting", 1) or add_field(c.scheduler_config),
])  # fmt: skip
def test_what_is_set_otherwise_is_another_name(model, plain, change):
    config, kv_config = described(model)
    change(config, kv_config)
    assert identity.fields_of(config, kv_config) != plain


def add_field(config):
    """As a new version of vLLM does."""
    fields = {**type(config).__dataclass_fields__, "a_new_setting": dataclasses.field(default=None)}
    fields["a_new_setting"].name = "a_new_setting"
    fields["a_new_setting"]._field_type = dataclasses._FIELD
    config.__class__ = type(type(config).__name__, (type(config),), {"__dataclass_fields__": fields})


def test_vllm_has_what_is_ignored():
    """A name that vLLM does not have any more may come back with another meaning."""
    config = {f.name for f in dataclasses.fields(vllm.config.VllmConfig)}
    assert set(influence.IGNORED_CONFIGS) | set(influence.IGNORED_FIELDS) <= config
    kinds = {
        "model_config": "ModelConfig", "cache_config": "CacheConfig", "parallel_config": "ParallelConfig",
        "scheduler_config": "SchedulerConfig", "compilation_config": "CompilationConfig", "load_config": "LoadConfig",
        "lora_config": "LoRAConfig",
    }  # fmt: skip
    for part, ignored in influence.IGNORED_FIELDS.items():
        names = {f.name for f in dataclasses.fields(getattr(vllm.config, kinds[part]))}
        assert ignored <= names, f"{part}: {sorted(ignored - names)}"


# ---- variables


def test_every_variable_of_vllm_is_classified_in_the_docs():
    """A new version of vLLM has new variables. Until they are classified they count, which costs misses at most."""
    sections = re.split(r"^## ", DOCS.read_text(), flags=re.MULTILINE)
    named = {
        title: set(re.findall(r"`([A-Z][A-Z0-9_]+)`", section))
        for title, section in ((s.split("\n", 1)[0], s) for s in sections)
    }
    known = set(vllm.envs.environment_variables)
    assert named["Variables without influence"] == influence.IGNORED_VARIABLES
    assert named["Variables that are refused"] == set(influence.REFUSED_VARIABLES)
    counted = known - influence.IGNORED_VARIABLES - set(influence.REFUSED_VARIABLES)
    assert named["Variables in the name"] == counted, "docs/vllm-identity.md has other variables than this vLLM"


def test_what_is_ignored_exists():
    assert influence.IGNORED_VARIABLES | set(influence.REFUSED_VARIABLES) <= set(vllm.envs.environment_variables)


@pytest.mark.parametrize("name", [
    "VLLM_CPU_ATTN_SPLIT_KV", "VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_BATCH_INVARIANT", "VLLM_DISABLED_KERNELS",
    "ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_FREEZING",
])  # fmt: skip
def test_a_variable_that_chooses_kernels_is_in_the_name(name):
    assert influence.variables({"HOME": "/", name: "1"}) == f"{name}=1"


@pytest.mark.parametrize("name", [
    "VLLM_PORT", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL", "ONEDNN_VERBOSE", "TORCH_HOME",
    "GOMP_CPU_AFFINITY", "OMP_NUM_THREADS", "TORCH_LOGS", "PATH",
])  # fmt: skip
def test_a_variable_without_influence_is_not(name):
    assert influence.variables({name: "1"}) == ""


def test_a_variable_that_makes_other_weights_is_refused():
    for name in influence.REFUSED_VARIABLES:
        assert name in (influence.refused_variable({name: "1"}) or "")
    assert influence.refused_variable({"VLLM_USE_MODELSCOPE": "False"}) is None


# ---- the machine

SWITCHES = {
    "threads": "torch.set_num_threads(3)",
    "precision": "torch.set_float32_matmul_precision('medium')",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "oneDNN": "torch.backends.mkldnn.enabled = False",
    "subnormals": "torch.set_flush_denormal(True)",
}


@pytest.fixture(scope="module")
def machines():
    """What a fresh process says of itself, after each of the switches."""
    code = "import json, sys, torch\nfrom kvferry.vllm import influence\nout = []\n"
    code += "".join(f"{switch}\nout.append(influence.machine())\n" for switch in ("pass", "pass", *SWITCHES.values()))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", code + "print(json.dumps(out))"], env=env, capture_output=True,
                         text=True, check=True)  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


def test_a_machine_is_the_same_when_asked_again(machines):
    assert machines[0] == machines[1]
    assert machines[0]["threads"] == "2"


@pytest.mark.parametrize("index", range(len(SWITCHES)), ids=SWITCHES.keys())
def test_each_switch_of_torch_is_in_the_name(machines, model, index):
    assert machines[index + 2] != machines[index + 1]
    config, kv_config = described(model)
    names = [identity.fields_of(config, kv_config, "", [machines[i]]) for i in (index + 1, index + 2)]
    assert names[0] != names[1]


def test_ranks_that_agree_are_named_once(machines, model):
    config, kv_config = described(model)
    one, other = machines[1], machines[2]
    names = [identity.fields_of(config, kv_config, "", ranks) for ranks in ([one], [one, one], [one, other])]
    assert names[0] == names[1] != names[2]


def test_the_processor_names_its_instructions_and_caches():
    text = influence.processor()
    assert torch.backends.cpu.get_cpu_capability() in text
    assert "index" in text or not Path("/sys/devices/system/cpu/cpu0/cache").exists()


# ---- the model's files


def test_every_byte_of_a_model_counts_and_its_tokenizer_does_not(model):
    digest = folder_digest(str(model), identity.log)
    (model / "tokenizer.json").write_bytes(b"other")
    assert folder_digest(str(model), identity.log) == digest
    for name in ("model.safetensors", "config.json"):
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[:-1] + b"!")
        assert folder_digest(str(model), identity.log) != digest
        (model / name).write_bytes(content)
    assert folder_digest(str(model), identity.log) == digest
    (model / "more.safetensors").write_bytes(b"")
    assert folder_digest(str(model), identity.log) != digest


def test_what_is_named_like_a_tokenizer_counts_if_it_is_weights_or_code(model):
    seen = {folder_digest(str(model), identity.log)}
    (model / "layers").mkdir()
    names = ["tokenizer.safetensors", "vocab_embedding.bin", "merges.py", "layers/attention.py"]
    for name in names:
        (model / name).write_bytes(b"x")
        seen.add(folder_digest(str(model), identity.log))
    (model / "tokenizer.model").write_bytes(b"x")
    seen.add(folder_digest(str(model), identity.log))
    assert len(seen) == 1 + len(names)


def test_files_that_change_while_the_engine_starts_name_nothing(model, monkeypatch):
    """It may have read the old ones. Their times of writing say nothing: they can be set."""
    config, _ = described(model)
    started = SimpleNamespace(create_time=lambda: os.stat(model / "config.json").st_ctime + 0.5)
    monkeypatch.setattr(identity.psutil, "Process", lambda: started)
    assert identity.changed_files(config) is None
    started.create_time = lambda: os.stat(model / "model.safetensors").st_ctime - 0.5
    assert "has changed since the engine began to start" in str(identity.changed_files(config))


@pytest.mark.parametrize("parts", [{"text_model_id": "meta-llama/Llama-3.2-1B"}, {"model_type": "kimi_audio"}])
def test_a_model_with_weights_elsewhere_is_refused(parts):
    assert identity._has_foreign_weights(SimpleNamespace(hf_config=SimpleNamespace(**parts)))
    plain = SimpleNamespace(hf_config=SimpleNamespace(model_type="llama", text_model_id=None))
    assert not identity._has_foreign_weights(plain)


def test_a_folder_without_weights_is_refused(model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no weights"):
        folder_digest(str(model), identity.log)


# ---- a GPU

GPU = {"name": "H", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 1}
BACKENDS = {"model.layers.0": dict, "model.layers.1": dict}
PAGES = [["torch.bfloat16", 0, [1, 2, 16, 128], [1, 3, 2, 4]]]


def accelerator(monkeypatch, gpu=GPU, backends=BACKENDS, pages=PAGES):
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**gpu))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 1)  # the one of cuda_stub.py has none
    layers = {name: SimpleNamespace(get_attn_backend=lambda b=b: b) for name, b in backends.items()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    return influence.accelerator(config, torch.device("cuda"), list(backends), pages)


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": {**GPU, "name": "B"}},
        {"gpu": {**GPU, "minor": 1}},
        {"gpu": {**GPU, "multi_processor_count": 114}},
        {"backends": {**BACKENDS, "model.layers.1": list}},
        {"pages": [["torch.bfloat16", 0, [1, 16, 2, 128], [1, 2, 3, 4]]]},
        "cuda",
        "driver",
    ],
    ids=str,
)
def test_another_gpu_or_backend_is_another_name(monkeypatch, model, change):
    one = accelerator(monkeypatch)
    assert one == accelerator(monkeypatch, gpu={**GPU, "total_memory": 2}), "how much memory there is changes nothing"
    if change == "cuda":
        monkeypatch.setattr(torch.version, "cuda", "99.9")
    if change == "driver":
        monkeypatch.setattr(influence, "_driver", lambda: "another")
    other = accelerator(monkeypatch, **(change if isinstance(change, dict) else {}))
    config, kv_config = described(model)
    names = [identity.fields_of(config, kv_config, "", [machine]) for machine in (one, other)]
    assert names[0] != names[1]


def platform(monkeypatch, kind):
    there = SimpleNamespace(
        is_cpu=lambda: kind == "cpu", is_cuda=lambda: kind == "cuda", device_type=kind, get_device_name=lambda: kind
    )
    monkeypatch.setattr(identity, "current_platform", there)


@pytest.mark.parametrize("spec", [FullAttentionSpec, MLAAttentionSpec])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
def test_a_gpu_may_have_any_layout(monkeypatch, model, layout, spec):
    config, kv_config = described(model)
    config.kv_transfer_config = SimpleNamespace(kv_role="kv_both")
    kv_config.kv_cache_layout = layout
    kv_config.kv_cache_groups[0].kv_cache_spec = spec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    platform(monkeypatch, "cuda")
    assert identity.refusal(config, kv_config) is None
    platform(monkeypatch, "xpu")
    assert "the platform xpu" in identity.refusal(config, kv_config)
    platform(monkeypatch, "cpu")
    is_proven = layout == "LBHNC" and spec is FullAttentionSpec
    assert (identity.refusal(config, kv_config) is None) == is_proven


def warnings_of(monkeypatch, warn, *args):
    warnings = []
    monkeypatch.setattr(identity.log, "warning", lambda text, *values: warnings.append(text % values))
    warn(*args)
    return warnings


def test_who_starts_on_a_gpu_is_told_what_was_tested(monkeypatch):
    for kind, num in (("cpu", 0), ("cuda", 1)):
        platform(monkeypatch, kind)
        assert len(warnings_of(monkeypatch, identity.warn_of_platform)) == num


@pytest.mark.parametrize("kind, bind, reserved, num", [
    ("cpu", "auto", None, 1), ("cpu", "auto", "2", 0), ("cpu", "nobind", None, 0), ("cpu", "0-1", None, 0),
    ("cuda", "auto", None, 0),
])  # fmt: skip
def test_fewer_threads_because_of_a_connector_are_told(monkeypatch, kind, bind, reserved, num):
    platform(monkeypatch, kind)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bind)
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    if reserved is not None:
        monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", reserved)
    config = SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=2))
    told = warnings_of(monkeypatch, identity.warn_of_threads, config)
    assert len(told) == num and all("VLLM_CPU_NUM_OF_RESERVED_CPU=2" in text for text in told)


def test_what_the_warning_says_of_vllm_is_so(monkeypatch):
    """With one core more in use than vLLM reserves by itself, it computes with as many threads as without a
    connector."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    monkeypatch.setattr(OMPProcessManager, "_parse_omp_threads_bind_env", lambda self: setattr(self, "auto_setup", 1))
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    parallel = SimpleNamespace(local_world_size=2, data_parallel_rank_local=0, _api_process_count=1)

    def reserved(transfer):
        config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
        return OMPProcessManager(config).reserve_cpu_num

    without = reserved(None)
    assert reserved(object()) == without + 2
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "2")
    assert reserved(object()) == without == 2
