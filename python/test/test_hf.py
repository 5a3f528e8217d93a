# SPDX-License-Identifier: Apache-2.0
"""kvferry.hf: answers do not depend on the store, a block is named by all that changes it, the rest is refused.

The models are toys of real classes. Needs torch and Transformers (make setup-engines)."""

from __future__ import annotations

import copy
import importlib.util
import linecache
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import RedisServer

import kvferry

torch = pytest.importorskip("torch", reason="torch is not installed: make setup-engines")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed: make setup-engines")

import hf_toys  # noqa: E402
from transformers.cache_utils import QuantizedLayer  # noqa: E402

from kvferry.hf import PrefixCache, _prefix  # noqa: E402

BLOCK = 32
TOKENS = 130  # four blocks and two tokens
SETTINGS = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Toys are faster so, most of all on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(params=[(kind, dtype) for kind in hf_toys.KINDS for dtype in ("float32", "bfloat16")], ids="-".join)
def model(request: pytest.FixtureRequest):
    return hf_toys.make(*request.param)


@pytest.fixture
def llama():
    return hf_toys.make("llama", "float32")


def prefix_of(model, store: kvferry.Store, **options) -> PrefixCache:
    return PrefixCache(model, store, block_tokens=BLOCK, **options)


def logits(generate: Callable, batch: dict, **options):
    answer = generate(**batch, **SETTINGS, **options, output_logits=True, return_dict_in_generate=True)
    return torch.stack(answer.logits)


def counted(prefix: PrefixCache, batch: dict, **options):
    """The logits, and how many tokens were loaded and computed for them."""
    before = copy.copy(prefix.counters)
    answer = logits(prefix.generate, batch, **options)
    assert prefix.why is None
    assert prefix.store.flush(60) == (True, 0)
    now = prefix.counters
    return answer, now.loaded_tokens - before.loaded_tokens, now.computed_tokens - before.computed_tokens


def without_store(model, batch: dict, **options):
    """The answer of a PrefixCache whose store is empty."""
    with kvferry.Store("mem:") as store:
        return logits(prefix_of(model, store).generate, batch, **options)


def layers_of(cache) -> list:
    """What a cache has to give back: keys, values and the number of tokens of each layer."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return [*tensors, torch.tensor([int(layer.get_seq_length()) for layer in cache.layers])]


def equal(ones: list, others: list) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


# ---- a hit changes nothing


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("rows", [1, 4])
def test_answers_do_not_depend_on_the_store(model, mem: kvferry.Store, rows: int, implementation: str) -> None:
    batch = hf_toys.batch(rows, TOKENS)
    blocks = sum((int(tokens) - 1) // BLOCK for tokens in batch["attention_mask"].sum(dim=1))
    shared = TOKENS // 2 // BLOCK if rows == 4 else 0
    cold, loaded, computed = counted(prefix_of(model, mem), batch, cache_implementation=implementation)
    assert (loaded, computed) == (shared * BLOCK, (blocks - shared) * BLOCK)
    warm, loaded, computed = counted(prefix_of(model, mem), batch, cache_implementation=implementation)
    assert (loaded, computed) == (blocks * BLOCK, 0)
    assert torch.equal(cold, warm)
    plain = logits(model.generate, batch, cache_implementation=implementation)
    tolerance = 1e-5 if model.dtype == torch.float32 else 5e-2
    assert torch.allclose(cold[0], plain[0], rtol=0, atol=tolerance)


def calls_of(server: RedisServer) -> dict[str, int]:
    """How often the server has executed each command."""
    lines = server.command("INFO", "commandstats").decode().splitlines()
    found = (line.removeprefix("cmdstat_").split(":calls=") for line in lines if line.startswith("cmdstat_"))
    return {name: int(rest.split(",")[0]) for name, rest in found}


def test_rows_are_loaded_together(llama, redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a batch take one question and one round of loads; what they share is asked for and loaded once."""
    batch, order = hf_toys.batch(4, TOKENS), []
    mask = batch["attention_mask"]
    blocks = sum((int(tokens) - 1) // BLOCK for tokens in mask.sum(dim=1)) - TOKENS // 2 // BLOCK

    class Spied(kvferry._kvferry.Queue):
        def submit_load(self, *args, **options):
            order.append("submit")
            return super().submit_load(*args, **options)

        def reap(self, *args):
            order.append("reap")
            return super().reap(*args)

    with kvferry.Store(redis.unix_url) as store:
        cold = counted(prefix_of(llama, store), batch)[0]
    with kvferry.Store(redis.unix_url) as store:
        prefix = prefix_of(llama, store)
        redis.command("CONFIG", "RESETSTAT")
        monkeypatch.setattr(_prefix, "Batches", Spied)
        assert torch.equal(counted(prefix, batch)[0], cold)
        assert store.stats()["lookup_round_trips"] == 1
        calls = calls_of(redis)
        assert (calls["getrange"], calls["get"]) == (blocks, blocks)
    rows = sum(int(tokens) > BLOCK for tokens in mask.sum(dim=1))
    assert rows == 3 and order[:3] == ["submit"] * rows and order.count("submit") == rows


@pytest.mark.parametrize("kind", hf_toys.OTHERS)
def test_other_kinds_of_models(mem: kvferry.Store, kind: str) -> None:
    """Other positions, other sliding windows, experts, keys and values of different widths."""
    model, batch = hf_toys.make(kind, "float32"), hf_toys.batch(4, TOKENS)
    cold, _, computed = counted(prefix_of(model, mem), batch)
    warm, _, computed_again = counted(prefix_of(model, mem), batch)
    assert computed > 0 and computed_again == 0
    assert torch.equal(cold, warm)
    assert torch.allclose(cold, logits(model.generate, batch), rtol=0, atol=1e-5)


def test_a_part_that_is_stored_changes_nothing(model, mem: kvferry.Store) -> None:
    batch = hf_toys.batch(1, TOKENS)
    shorter = {name: tensor[:, : 2 * BLOCK + 1] for name, tensor in batch.items()}
    counted(prefix_of(model, mem), shorter)
    answer, loaded, computed = counted(prefix_of(model, mem), batch)
    assert (loaded, computed) == (2 * BLOCK, 2 * BLOCK)
    assert torch.equal(answer, without_store(model, batch))


def test_the_cache_is_what_computing_leaves(model, mem: kvferry.Store) -> None:
    """Bit for bit, sliding layers too: what Transformers itself has after computing in the same pieces."""
    batch = hf_toys.batch(1, TOKENS)
    expected = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for start in range(0, 4 * BLOCK, BLOCK):
            model(batch["input_ids"][:, start : start + BLOCK], past_key_values=expected, use_cache=True)
    for prefix in (prefix_of(model, mem), prefix_of(model, mem)):
        cache, num = prefix.prefill(**batch)
        assert num == 4 * BLOCK
        assert equal(layers_of(cache), layers_of(expected))
        assert mem.flush(60).done


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=["beams", "sequences"]
)
def test_several_sequences_of_a_prompt(llama, mem: kvferry.Store, options: dict) -> None:
    batch = hf_toys.batch(4, TOKENS)
    answers = []
    for prefix in (prefix_of(llama, mem), prefix_of(llama, mem)):
        torch.manual_seed(3)
        answers.append(prefix.generate(**batch, **{**SETTINGS, **options}))
        assert prefix.why is None
        assert mem.flush(60).done
    torch.manual_seed(3)
    plain = llama.generate(**batch, **{**SETTINGS, **options})
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], plain)


def test_a_second_process_loads_what_the_first_has_stored(folder_url: str, tmp_path: Path) -> None:
    batch = hf_toys.batch(4, TOKENS)
    with kvferry.Store(folder_url) as store:
        cold = logits(prefix_of(hf_toys.make("gemma", "bfloat16"), store).generate, batch)
    program = (
        "import sys, torch, kvferry, hf_toys\n"
        "from test_hf import BLOCK, TOKENS, counted, prefix_of\n"
        "torch.set_num_threads(1)\n"
        "with kvferry.Store(sys.argv[1]) as store:\n"
        "    prefix = prefix_of(hf_toys.make('gemma', 'bfloat16'), store)\n"
        "    torch.save(counted(prefix, hf_toys.batch(4, TOKENS)), sys.argv[2])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program, folder_url, tmp_path / "warm"], env=environment, check=True)
    warm, loaded, computed = torch.load(tmp_path / "warm")
    assert loaded > 0 and computed == 0
    assert torch.equal(cold, warm)


def test_the_example(folder_url: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).resolve().parents[2] / "examples/python/prefix_cache.py"
    monkeypatch.setattr(sys, "argv", [str(example), folder_url])
    outputs = []
    for _ in range(2):
        runpy.run_path(str(example), run_name="__main__")
        outputs.append(capsys.readouterr().out.splitlines())
    first, second = outputs
    assert first[0] == "0 tokens loaded, 512 computed"
    assert second[0] == "512 tokens loaded, 0 computed"
    assert first[1:] == second[1:]
    assert first[2].startswith("512 tokens in the cache, next token ") and first[2].split()[-1] in first[1]


# ---- faults


def block_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096)


def flip(files: list[Path]) -> None:
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def swap(files: list[Path]) -> None:
    """Each block where another one belongs."""
    contents = [path.read_bytes() for path in files]
    for path, data in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)


def cut(files: list[Path]) -> None:
    for path in files:
        os.truncate(path, path.stat().st_size // 2)


def remove(files: list[Path]) -> None:
    for path in files:
        path.unlink()


@pytest.mark.parametrize("fault", [flip, swap, cut, remove], ids=lambda fault: fault.__name__)
def test_a_bad_block_is_computed_and_replaced(model, tmp_path: Path, fault: Callable[[list[Path]], None]) -> None:
    batch = hf_toys.batch(1, TOKENS)
    expected = without_store(model, batch)
    with kvferry.Store(f"file:{tmp_path}") as store:
        counted(prefix_of(model, store), batch)
    files = block_files(tmp_path)
    assert len(files) == 4
    fault(files[:3])
    with kvferry.Store(f"file:{tmp_path}") as store:
        answer, loaded, computed = counted(prefix_of(model, store), batch)
        assert torch.equal(answer, expected)
        assert computed > 0 and loaded + computed == 4 * BLOCK
        answer, loaded, computed = counted(prefix_of(model, store), batch)
        assert torch.equal(answer, expected)
        assert (loaded, computed) == (4 * BLOCK, 0)


def test_a_server_that_is_gone_is_a_miss(llama, own_redis) -> None:
    batch = hf_toys.batch(4, TOKENS)
    expected = without_store(llama, batch)
    with kvferry.Store(own_redis.unix_url, drain=0) as store:
        assert torch.equal(counted(prefix_of(llama, store), batch)[0], expected)
        own_redis.stop()
        prefix = prefix_of(llama, store)
        assert torch.equal(logits(prefix.generate, batch), expected)
        assert prefix.why is None and prefix.counters.computed_tokens > 0


def test_generate_after_the_store_is_closed(llama) -> None:
    batch = hf_toys.batch(1, TOKENS)
    with kvferry.Store("mem:") as store:
        prefix = prefix_of(llama, store)
    assert torch.equal(logits(prefix.generate, batch), logits(llama.generate, batch))
    assert "closed" in prefix.why
    with pytest.raises(kvferry.ClosedError):
        prefix.load(**batch)


# ---- load and save


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_callers_cache_comes_back_as_it_was(model, mem: kvferry.Store, kind: str) -> None:
    ids = hf_toys.batch(1, hf_toys.WINDOW - 1)["input_ids"]  # a sliding layer still has all of them

    def new_cache():
        if kind == "dynamic":
            return transformers.DynamicCache(config=model.config)
        return transformers.StaticCache(config=model.config, max_cache_len=TOKENS)

    filled = new_cache()
    with torch.no_grad():
        model(ids, past_key_values=filled, use_cache=True)
    assert prefix_of(model, mem).save(ids, filled) == 1
    assert mem.flush(60) == (True, 0)
    prefix = prefix_of(model, mem)
    cache, num = prefix.load(ids, cache=new_cache())
    assert num == BLOCK and int(cache.get_seq_length()) == BLOCK
    for layer, source in zip(cache.layers, filled.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :BLOCK], source.keys[:, :, :BLOCK])
        assert torch.equal(layer.values[:, :, :BLOCK], source.values[:, :, :BLOCK])
    # Such blocks were computed in pieces that generate does not compute in.
    assert counted(prefix, {"input_ids": ids})[1:] == (0, BLOCK)


def test_a_callers_cache_may_be_shorter_and_in_any_order_of_memory(llama, mem: kvferry.Store) -> None:
    """Only what it holds is stored, whatever the strides of its tensors are."""
    batch = hf_toys.batch(2, TOKENS)
    filled = transformers.DynamicCache(config=llama.config)
    columns = 2 * BLOCK + 6  # after its padding the second row has no whole block in them
    with torch.no_grad():
        llama(
            batch["input_ids"][:, :columns],
            attention_mask=batch["attention_mask"][:, :columns],
            past_key_values=filled,
            use_cache=True,
        )
    for layer in filled.layers:
        layer.keys, layer.values = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in (layer.keys, layer.values))
    assert prefix_of(llama, mem).save(cache=filled, **batch) == 2
    assert mem.flush(60) == (True, 0)
    assert prefix_of(llama, mem).load(batch["input_ids"][1, TOKENS // 3 :])[1] == 0
    cache, num = prefix_of(llama, mem).load(batch["input_ids"][0])
    assert num == 2 * BLOCK
    for layer, source in zip(cache.layers, filled.layers, strict=True):
        assert torch.equal(layer.keys[0], source.keys[0, :, :num])
        assert torch.equal(layer.values[0], source.values[0, :, :num])


def test_a_callers_row_with_padding_is_not_stored(llama, mem: kvferry.Store) -> None:
    """Without position_ids the model counts the padding, so the keys of such a row are those of other positions."""
    batch = hf_toys.batch(2, TOKENS)
    filled = transformers.DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(**batch, past_key_values=filled, use_cache=True)
    assert prefix_of(llama, mem).save(cache=filled, **batch) == TOKENS // BLOCK  # of the first row
    assert mem.flush(60) == (True, 0)
    assert prefix_of(llama, mem).load(batch["input_ids"][1, TOKENS // 3 :])[1] == 0


def test_load_gives_a_batch_what_all_rows_have(model, mem: kvferry.Store) -> None:
    batch = hf_toys.batch(4, TOKENS)
    prefix_of(model, mem).prefill(**batch)
    assert mem.flush(60).done
    loaded, num = prefix_of(model, mem).load(**batch)
    with kvferry.Store("mem:") as store:
        expected, columns = prefix_of(model, store).prefill(**batch)
    assert num == columns == 5 + 3 * BLOCK  # where the last block of the last row ends
    assert equal(layers_of(loaded), layers_of(expected))


def test_a_block_that_did_not_load_leaves_nothing_in_a_static_cache(llama, tmp_path: Path) -> None:
    """Attention multiplies what is masked by zero, and zero times NaN is NaN."""
    batch = hf_toys.batch(1, TOKENS)
    with kvferry.Store(f"file:{tmp_path}") as store:
        expected, _ = prefix_of(llama, store).prefill(**batch)
        assert store.flush(60).done
    for path in block_files(tmp_path):
        content = path.read_bytes()
        last = expected.layers[1].values[0, -1, 2 * BLOCK : 3 * BLOCK].contiguous().view(torch.uint8).numpy().tobytes()
        path.write_bytes(content.replace(last, b"\xff" * len(last)))  # all NaN, in the third block only
    with kvferry.Store(f"file:{tmp_path}") as store:
        cache, num = prefix_of(llama, store).load(
            **batch, cache=transformers.StaticCache(config=llama.config, max_cache_len=TOKENS)
        )
    assert num == 2 * BLOCK
    for layer in cache.layers:
        assert not layer.keys[:, :, num:].any() and not layer.values[:, :, num:].any()


def test_nothing_stored_is_an_empty_cache(llama, mem: kvferry.Store) -> None:
    cache, num = prefix_of(llama, mem).load(torch.arange(3, 103))
    assert num == 0 and cache.get_seq_length() == 0


def test_settings_of_the_model_itself(llama, mem: kvferry.Store) -> None:
    """A static cache that generation_config asks for, and inference mode."""
    batch = hf_toys.batch(1, TOKENS)
    llama.generation_config.cache_implementation = "static"
    prefix = prefix_of(llama, mem)
    cold, _, computed = counted(prefix, batch)
    with torch.inference_mode():
        warm, loaded, _ = counted(prefix, batch)
    assert (computed, loaded) == (4 * BLOCK, 4 * BLOCK)
    assert torch.equal(cold, warm)
    llama.generation_config.cache_implementation = None
    dynamic = transformers.GenerationConfig(**SETTINGS)
    answer = prefix.generate(batch["input_ids"], dynamic)
    assert prefix.why is None
    assert torch.equal(answer, llama.generate(**batch, generation_config=dynamic))


def test_the_models_settings_fill_what_a_generation_config_leaves_open(llama, mem: kvferry.Store) -> None:
    ids = hf_toys.batch(1, TOKENS)["input_ids"]
    given = transformers.GenerationConfig(do_sample=False)
    prefix = prefix_of(llama, mem)
    llama.generation_config.update(cache_implementation="static", max_length=TOKENS + 8)
    assert prefix.generate(ids, given).shape == (1, TOKENS + 8)
    assert prefix.why is None
    llama.generation_config.update(cache_implementation=None, pad_token_id=0)
    padded = torch.cat([torch.zeros(1, 7, dtype=ids.dtype), ids[:, 7:]], dim=1)
    assert torch.equal(prefix.generate(padded, given), llama.generate(padded, given))
    assert "no attention_mask" in prefix.why


def test_a_static_cache_holds_an_answer_whose_length_nobody_has_chosen(llama, mem: kvferry.Store) -> None:
    ids = hf_toys.batch(1, TOKENS)["input_ids"]
    prefix = prefix_of(llama, mem)
    arguments = {"do_sample": False, "cache_implementation": "static"}
    assert prefix.generate(ids, **arguments).shape == llama.generate(ids, **arguments).shape
    assert prefix.why is None


def test_blocks_are_separate_by_secret(llama, mem: kvferry.Store) -> None:
    batch = hf_toys.batch(1, TOKENS)
    counted(prefix_of(llama, mem, secret=b"0123456789abcdef"), batch)
    assert counted(prefix_of(llama, mem), batch)[1] == 0
    assert counted(prefix_of(llama, mem, secret=b"0123456789abcdef"), batch)[1] == 4 * BLOCK
    new = {"secret": b"fedcba9876543210"}
    assert prefix_of(llama, mem, **new).load(**batch)[1] == 0
    assert prefix_of(llama, mem, **new, previous_secret=b"0123456789abcdef").load(**batch)[1] == 4 * BLOCK


# ---- what names a block


def write(tensor) -> None:
    with torch.no_grad():
        tensor.add_(0.5)


def write_data(tensor) -> None:
    """The version of the tensor does not tell."""
    tensor.data += 0.5


CHANGES = {
    "written weight": lambda model: write(model.model.layers[1].mlp.up_proj.weight),
    "written data": lambda model: write_data(model.model.layers[1].mlp.up_proj.weight),
    "written buffer": lambda model: write(model.model.rotary_emb.inv_freq),
    "replaced weight": lambda model: setattr(
        model.model.norm, "weight", torch.nn.Parameter(model.model.norm.weight * 2)
    ),
    "number in a module": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.1),
    "dtype": lambda model: model.to(torch.bfloat16),
    "config": lambda model: setattr(model.config, "rms_norm_eps", 1e-4),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "float32 precision": lambda model: torch.set_float32_matmul_precision("medium"),
    "precision of one library": lambda model: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "threads": lambda model: torch.set_num_threads(2),
    "sdpa kernels": lambda model: torch.backends.cuda.enable_flash_sdp(False),
    "default dtype": lambda model: torch.set_default_dtype(torch.float64),
    "bfloat16 sums": lambda model: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "float16 sums": lambda model: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "deterministic": lambda model: torch.use_deterministic_algorithms(True),
    "mkldnn": lambda model: setattr(torch.backends.mkldnn, "enabled", False),
    "variable": lambda model: os.environ.__setitem__("ONEDNN_MAX_CPU_ISA", "AVX2"),
}


@pytest.fixture
def settings_restored():
    yield
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.use_deterministic_algorithms(False)
    torch.backends.mkldnn.enabled = True
    os.environ.pop("ONEDNN_MAX_CPU_ISA", None)


@pytest.mark.usefixtures("settings_restored")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_the_model_is_another_name(llama, mem: kvferry.Store, change: Callable) -> None:
    prefix = prefix_of(llama, mem)
    before = prefix.fields
    assert prefix.fields == before
    change(llama)
    assert prefix.fields != before
    assert prefix.fields == prefix_of(llama, mem).fields


def test_autocast_is_another_name(llama, mem: kvferry.Store) -> None:
    prefix = prefix_of(llama, mem)
    before = prefix.fields
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert prefix.fields != before
    assert prefix.fields == before


def test_own_names_and_block_sizes_are_other_names(llama, mem: kvferry.Store) -> None:
    plain, named = prefix_of(llama, mem).fields, prefix_of(llama, mem, identity={"steering": "a"}).fields
    assert named == {**plain, "own.steering": "a"}
    assert prefix_of(llama, mem, weights="sha256:1").fields != plain
    assert PrefixCache(llama, mem, block_tokens=2 * BLOCK).fields != plain


def test_code_that_was_replaced_shows_in_the_probe(llama, mem: kvferry.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = prefix_of(llama, mem).fields
    kind = type(llama.model.layers[0].mlp)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: original(self, x) * 2)
    after = prefix_of(llama, mem).fields
    assert {name for name in after if after[name] != before[name]} == {"probe"}


def test_the_source_of_an_own_class_is_part_of_the_name(mem: kvferry.Store, tmp_path: Path) -> None:
    """A change that the probe does not see, such as one for long prompts only."""

    def fields_of(source: str) -> dict[str, str]:
        path = tmp_path / "own_model.py"
        path.write_text(f"import transformers\n\nclass Own(transformers.LlamaForCausalLM):\n    {source}\n")
        linecache.clearcache()
        spec = importlib.util.spec_from_file_location("own_model", path)
        module = sys.modules["own_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(7)
        return prefix_of(module.Own(hf_toys.llama_config()).eval(), mem).fields

    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        one, again, other = fields_of("limit = 1"), fields_of("limit = 1"), fields_of("limit = 22")
    finally:
        sys.dont_write_bytecode = before
        sys.modules.pop("own_model", None)
    assert one == again
    assert {name for name in one if one[name] != other[name]} == {"class"}


def test_one_model_in_two_objects_has_one_name(mem: kvferry.Store) -> None:
    one, other = hf_toys.make("gemma", "bfloat16"), hf_toys.make("gemma", "bfloat16")
    assert prefix_of(one, mem).fields == prefix_of(other, mem).fields


def test_adapters(llama, mem: kvferry.Store) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: make setup-engines")
    settings = {"r": 2, "target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": False}
    batch = hf_toys.batch(1, TOKENS)
    base = without_store(llama, batch)
    model = peft.get_peft_model(llama, peft.LoraConfig(**settings), adapter_name="a").eval()
    prefix = prefix_of(model, mem)
    first = prefix.fields
    answer, loaded, _ = counted(prefix, batch)
    assert loaded == 0 and not torch.equal(answer, base)
    assert torch.equal(answer, without_store(model, batch))

    # One that is loaded beside it and does not act changes nothing.
    model.add_adapter("b", peft.LoraConfig(**settings))
    model.eval()
    assert prefix.fields == first
    again, loaded, _ = counted(prefix, batch)
    assert loaded == 4 * BLOCK and torch.equal(again, answer)

    model.set_adapter("b")
    assert prefix.fields != first
    assert not torch.equal(counted(prefix, batch)[0], answer)
    model.set_adapter("a")
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["a"] *= 2
    assert prefix.fields != first
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["a"] /= 2
    assert prefix.fields == first
    with model.disable_adapter():
        disabled, loaded, _ = counted(prefix, batch)
        assert loaded == 0 and torch.allclose(disabled, base, atol=1e-5)
    model.merge_adapter()
    assert prefix.fields != first
    model.unmerge_adapter()

    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(kvferry.RefusedError, match="prompt learning"):
        prefix_of(peft.get_peft_model(hf_toys.make("llama", "float32"), prompt).eval(), mem)


# ---- what is refused


def hooked():
    model = hf_toys.make("llama", "float32")
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: None)
    return model


def compiled():
    model = hf_toys.make("llama", "float32")
    model.compile()
    return model


def partly_meta():
    model = hf_toys.make("llama", "float32")
    model.model.norm.to("meta")
    return model


def of_config(**settings):
    return transformers.LlamaForCausalLM(hf_toys.llama_config(**settings)).eval()


def encoder():
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config).eval()


def recurrent():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    return transformers.MambaForCausalLM(config).eval()


def linear():
    config = transformers.Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    return transformers.Lfm2ForCausalLM(config).eval()


def quantised():
    model = hf_toys.make("llama", "float32")
    model.hf_quantizer = object()
    return model


def flexible():
    model = hf_toys.make("llama", "float32")
    model.config._attn_implementation = "flex_attention"
    return model


def bidirectional():
    model = hf_toys.make("gemma", "float32")
    model.config.use_bidirectional_attention = True
    return model


def shared():
    """As Gemma 3n: some layers have no keys of their own."""
    model = hf_toys.make("llama", "float32")
    model.config.num_kv_shared_layers = 1
    return model


def partly_training():
    """As after a training loop that calls eval() on a part only."""
    model = hf_toys.make("llama", "float32")
    model.model.layers[1].train()
    return model


REFUSED = {
    "shared layers": (shared, "shared attention"),
    "a part in training": (partly_training, r"call model\.eval"),
    "encoder": (encoder, "has an encoder"),
    "recurrent": (recurrent, "linear_attention"),
    "linear layers": (linear, "conv"),
    "training": (lambda: hf_toys.make("llama", "float32").train(), r"call model\.eval"),
    "hook": (hooked, "hook"),
    "compiled": (compiled, "compiled"),
    "wrapped": (lambda: torch.nn.Sequential(hf_toys.make("llama", "float32")).eval(), "not a model of Transformers"),
    "offloaded": (partly_meta, "offloaded"),
    "quantised": (quantised, "quantised"),
    "flex attention": (flexible, "flex_attention"),
    "bidirectional": (bidirectional, "not causal"),
    "dynamic rope": (
        lambda: of_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        "length of the prompt",
    ),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_models(mem: kvferry.Store, make: Callable, reason: str) -> None:
    with pytest.raises(kvferry.RefusedError, match=reason):
        prefix_of(make(), mem)


def test_a_named_hook_is_accepted(mem: kvferry.Store) -> None:
    assert prefix_of(hooked(), mem, identity={"hooks": "none that changes anything"}).fields["own.hooks"]


@pytest.mark.parametrize("kind", hf_toys.KINDS)
def test_hooks_that_transformers_leaves_are_harmless(mem: kvferry.Store, kind: str) -> None:
    """Whoever asks for hidden states once leaves hooks on the model that note what they see, and only when asked."""
    model, batch = hf_toys.make(kind, "float32"), hf_toys.batch(1, TOKENS)
    cold, _, computed = counted(prefix_of(model, mem), batch)
    model.generate(**batch, **SETTINGS, output_hidden_states=True, output_attentions=True, return_dict_in_generate=True)
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert hooks
    assert all(hook(None, None, torch.ones(1)) is None for hook in hooks)
    prefix = prefix_of(model, mem)
    warm, loaded, _ = counted(prefix, batch)
    assert loaded == computed
    assert torch.equal(cold, warm)
    assert torch.equal(warm, without_store(model, batch))
    handle = model.register_forward_hook(lambda module, inputs, output: None)  # one that is not theirs
    with pytest.raises(kvferry.RefusedError, match="name that with PrefixCache"):
        prefix.load(**batch)
    handle.remove()


def test_a_hook_of_all_modules_is_refused(llama, mem: kvferry.Store) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        with pytest.raises(kvferry.RefusedError, match="hook of all modules"):
            prefix_of(llama, mem)
    finally:
        handle.remove()
    prefix_of(llama, mem)


def test_a_model_that_is_refused_later_answers_alone(llama, mem: kvferry.Store) -> None:
    prefix = prefix_of(llama, mem)
    batch = hf_toys.batch(1, TOKENS)
    handle = llama.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)
    assert torch.equal(logits(prefix.generate, batch), logits(llama.generate, batch))
    assert "hook" in prefix.why
    with pytest.raises(kvferry.RefusedError, match="hook"):
        prefix.load(**batch)
    handle.remove()
    counted(prefix, batch)


class OtherLayer(transformers.cache_utils.DynamicLayer):
    """As the layers of quantised caches: it has the keys and values, but may keep them in another way."""


def dropped(model, tokens: int):
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(hf_toys.batch(1, tokens)["input_ids"], past_key_values=cache, use_cache=True)
    return cache


def test_refused_caches(llama, mem: kvferry.Store) -> None:
    prefix, ids = prefix_of(llama, mem), hf_toys.batch(1, TOKENS)["input_ids"]
    other, offloaded, recording = (transformers.DynamicCache(config=llama.config) for _ in range(3))
    other.layers[0] = OtherLayer()
    offloaded.offloading = True  # a constructor with offloading=True needs an accelerator
    recording.layers[0].record_past = True
    for cache in (other, offloaded, recording, transformers.EncoderDecoderCache(other, other)):
        with pytest.raises(kvferry.RefusedError, match="not proven"):
            prefix.load(ids, cache=cache)
        with pytest.raises(kvferry.RefusedError, match="not proven"):
            prefix.save(ids, cache)
    gemma = hf_toys.make("gemma", "float32")
    with pytest.raises(kvferry.RefusedError, match="dropped"):
        prefix_of(gemma, mem).save(ids, dropped(gemma, TOKENS))


class Rounding(QuantizedLayer):
    """As Transformers' own, with the simplest kind of quantising: nothing that it needs is a package of its own."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax(dim=(-2, -1), keepdim=True) / 7
        return torch.round(tensor / scale), scale

    def _dequantize(self, quantised):
        return quantised[0] * quantised[1]


def test_a_quantised_cache_is_refused_for_this_reason(llama, mem: kvferry.Store) -> None:
    """The bits that it holds for a token depend on the pieces in which the others came."""
    prefix, batch = prefix_of(llama, mem), hf_toys.batch(1, TOKENS)
    keys = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(3))
    at_once, by_piece = Rounding(residual_length=8), Rounding(residual_length=8)
    at_once.update(keys, keys)
    for piece in keys.split(16, dim=2):
        by_piece.update(piece, piece)
    held = [layer._dequantize(layer._quantized_keys)[:, :, :16] for layer in (at_once, by_piece)]
    assert not torch.equal(*held)
    cache = transformers.DynamicCache(config=llama.config)
    cache.layers[0] = at_once
    for call in (lambda: prefix.load(batch["input_ids"], cache=cache), lambda: prefix.save(batch["input_ids"], cache)):
        with pytest.raises(kvferry.RefusedError, match="quantised cache holds other bits"):
            call()
    if importlib.util.find_spec("optimum") or importlib.util.find_spec("hqq"):
        prefix.generate(**batch, **SETTINGS, cache_implementation="quantized")
    else:  # Transformers says itself what it needs
        with pytest.raises(ImportError):
            prefix.generate(**batch, **SETTINGS, cache_implementation="quantized")
    assert "quantised cache holds other bits" in str(prefix.why)


def started_static(model, rows: int):
    cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS)
    with torch.no_grad():
        model(torch.arange(3, 3 + rows)[:, None], past_key_values=cache, use_cache=True)
    cache.reset()
    return cache


def test_arguments_that_do_not_fit(llama, mem: kvferry.Store) -> None:
    prefix, batch = prefix_of(llama, mem), hf_toys.batch(1, TOKENS)
    ids, full = batch["input_ids"], dropped(llama, TOKENS)
    for arguments in (
        {"input_ids": ids.float()},
        {"input_ids": ids[:, :0]},
        {"input_ids": ids[None]},
        {"input_ids": ids, "attention_mask": torch.ones(1, 3)},
        {"input_ids": ids, "cache": full},
        {"input_ids": ids, "cache": transformers.DynamicCache()},
        {"input_ids": ids, "cache": transformers.StaticCache(config=llama.config, max_cache_len=BLOCK)},
        {"input_ids": ids.repeat(2, 1), "cache": started_static(llama, rows=1)},
    ):
        with pytest.raises(kvferry.LimitError):
            prefix.prefill(**arguments)
    with pytest.raises(kvferry.LimitError):
        prefix.save(ids.repeat(2, 1), full)
    for no_tensor in (batch, ids.tolist(), "a prompt"):
        with pytest.raises(TypeError, match="input_ids must be a tensor, not "):
            prefix.prefill(no_tensor)
    right = {"input_ids": ids, "attention_mask": batch["attention_mask"].clone()}
    right["attention_mask"][0, -3:] = 0
    with pytest.raises(kvferry.RefusedError, match="padding_side"):
        prefix.load(**right)
    nothing = {"input_ids": ids.repeat(2, 1), "attention_mask": batch["attention_mask"].repeat(2, 1)}
    nothing["attention_mask"][1] = 0
    with pytest.raises(kvferry.RefusedError, match="padding_side"):
        prefix.load(**nothing)


ALONE = {
    "use_cache": ({"use_cache": False}, "use_cache"),
    "hidden states": ({"output_hidden_states": True}, "hidden states"),
    "early exit": ({"assistant_early_exit": 1}, "assisted decoding"),
    "positions": ({"position_ids": torch.arange(TOKENS)[None]}, "position_ids"),
    "chunks": ({"prefill_chunk_size": 64}, "prefill_chunk_size"),
    "beams in a static cache": ({"num_beams": 2, "cache_implementation": "static"}, "static"),
    "right padding": (
        {"attention_mask": torch.tensor([[1] * (TOKENS - 1) + [0]])},
        "padding_side",
    ),
    "padding without a mask": ({"attention_mask": None, "pad_token_id": 11}, "no attention_mask"),
}


@pytest.mark.parametrize(("options", "reason"), ALONE.values(), ids=ALONE.keys())
def test_generate_leaves_to_the_model_what_is_not_proven(llama, mem: kvferry.Store, options: dict, reason: str) -> None:
    batch = hf_toys.batch(1, TOKENS)
    batch["input_ids"][0, 5] = 11
    arguments = {**batch, **SETTINGS, **options}
    prefix = prefix_of(llama, mem)
    for _ in range(2):
        assert torch.equal(prefix.generate(**arguments), llama.generate(**arguments))
        assert reason in prefix.why
    assert (prefix.counters.bypassed, prefix.counters.computed_tokens) == (2, 0)
