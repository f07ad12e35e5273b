"""`mlx_h2o plan`: its bytes match measurements, and its table matches what happens."""

import json
import re
import shutil
import tomllib
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.utils import _get_classes, quantize_model, save_model

import mlx_h2o
from mlx_h2o.cli import main
from mlx_h2o.commands.plan import model_table, parser
from mlx_h2o.lm.plan import Plan, configs, outline_of, outlined
from mlx_h2o.lm.routing import evicting_caches, routing_for
from mlx_h2o.serving.memory import Memory
from paths import ROOT

CONFIGS = configs()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
QUICK = ("Llama-3.1-8B-Instruct", "DeepSeek-V3", "DeepSeek-V3.2", "LFM2-1.2B")
TOKENS, ROWS, HEADS = 100, 48, 2

_SMALL = tomllib.loads(Path(__file__).with_name("small.toml").read_text("ascii"))


def small(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Settings of a model of a few layers, narrow but for its attention: at most HEADS KV heads, of
    as many elements as they have, and a query head for each."""
    found = {name: _SMALL.get(name, value) for name, value in config.items()}
    if "text_config" in found:
        return found | {"text_config": small(found["text_config"], layers)}
    heads = min(HEADS, config["num_key_value_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = 128 if "head_dim" in config or "kv_lora_rank" in config else heads * size
    found |= {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "hidden_size": width,
    }  # fmt: skip
    if "num_global_key_value_heads" in found:
        found["num_global_key_value_heads"] = min(heads, found["num_global_key_value_heads"])
    if "block_dim" in found:
        found["block_dim"] = width
        found["full_attn_idxs"] = [at for at in found["full_attn_idxs"] if at < layers]
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"][:layers]
    if "linear_attn_config" in found:
        kinds = {
            name: [at for at in found["linear_attn_config"][name] if at <= layers]
            for name in ("full_attn_layers", "kda_layers")
        }
        found["linear_attn_config"] = found["linear_attn_config"] | kinds
    return found


def small_model(name: str) -> tuple[Any, dict[str, Any]]:
    """A float32 model of two layers, or six where they are of several kinds, and its settings."""
    config = small(CONFIGS[name], 2 if all(outlined(CONFIGS[name]).rows) else 6)
    model_class, args = _get_classes(config)
    mx.random.seed(3)
    model = model_class(args.from_dict(config))
    model.set_dtype(mx.float32)
    model.eval()
    return model, config


def measured(model: Any, caches: list[Any]) -> int:
    """Bytes of caches that a model has filled with TOKENS tokens, the last one by one."""
    with routing_for(model, list(evicting_caches(caches))):
        for count in (TOKENS - 3, 1, 1, 1):
            logits = model(mx.random.randint(0, 96, (1, count)), cache=caches)
            mx.eval(logits, [cache.state for cache in caches])
    assert mx.isfinite(logits).all()
    return sum(cache.nbytes for cache in caches)


def served(name: str) -> str:
    """Whether a model is served, as the table in the documents says; that it is what is computed
    test_readme.py says."""
    table = (ROOT / "docs" / "models.md").read_text("utf-8")
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {name} "))
    return line.split("|")[2].strip()


def quick_and_slow() -> list[Any]:
    names, slow = [(name, name.rpartition("/")[2]) for name in CONFIGS], pytest.mark.slow
    return [pytest.param(name, id=end, marks=() if end in QUICK else slow) for name, end in names]


@pytest.mark.matrix(9)
@pytest.mark.parametrize("name", quick_and_slow())
def test_the_table_says_what_happens_and_bytes_are_right_within_a_hundredth(name):
    assert parser()._option_string_actions["--table"].const is model_table
    said = served(name.rpartition("/")[2])
    model, config = small_model(name)
    outline = Plan(model, config)
    if said.startswith("refused: "):
        with pytest.raises(ValueError, match=said.removeprefix("refused: ")):
            mlx_h2o.make_prompt_cache(model, ROWS)
        assert said.removeprefix("refused: ") in outline.refused
        return
    stock = measured(model, mlx_lm_cache.make_prompt_cache(model))
    assert outline.nbytes(TOKENS) == pytest.approx(stock, rel=0.01)
    default = measured(model, mlx_h2o.make_prompt_cache(model, ROWS))
    assert outline.nbytes(TOKENS, max_kv_size=ROWS) == pytest.approx(default, rel=0.01)
    affine = {"max_kv_size": ROWS, "kv_bits": 8, "v_bits": 5}, {"max_kv_size": None, "kv_bits": 8}
    for settings in (*affine, {"max_kv_size": ROWS, "kv_format": "turbo3"}):
        if "turbo3" in said and "kv_format" in settings:
            with pytest.raises(ValueError, match="latent"):
                mlx_h2o.make_prompt_cache(model, **settings)
            continue
        policy = "keydiff" if said.startswith("keydiff") else "h2o"
        caches = mlx_h2o.make_prompt_cache(model, layers="equal", policy=policy, **settings)
        found = outline.nbytes(TOKENS, policy=policy, **settings)
        assert found == pytest.approx(measured(model, caches), rel=0.01)
    if said.startswith("keydiff"):
        with pytest.raises(ValueError, match="its scores cannot be had"):
            measured(model, mlx_h2o.make_prompt_cache(model, ROWS, policy="h2o"))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """The folder of a small Llama whose weights have 4 bits."""
    model, config = small_model(LLAMA)
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config, 64, 4)
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def said(capsys, *arguments: object, status: int = 0) -> str:
    """What a command prints."""
    assert main(["plan", *map(str, arguments)]) == status
    return capsys.readouterr().out


def test_a_model_with_weights_is_what_loading_it_shows(capsys):
    model, _ = mlx_h2o.load("demo")
    outline = outline_of("demo")
    assert outline.weights == sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    caches = mlx_lm_cache.make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, TOKENS), mx.int32), cache=caches))
    assert outline.nbytes(TOKENS) == sum(cache.nbytes for cache in caches)
    assert sum(outline.rows) * 512 == outline.nbytes(512)
    found = said(capsys, "demo", "--memory", "1GB", "--context", "2K")
    assert said(capsys, "--model", "demo", "--memory", "1GB", "--context", "2K") == found
    assert f"{sum(outline.rows) / 1000:.1f} KB a token" in found
    assert "mlx_h2o generate --model demo --max-kv-size none" in found  # it has no chat template


def test_weights_that_are_not_there_are_estimated_from_the_settings(quantised, tmp_path):
    there = outline_of(str(quantised))
    shutil.copy(quantised / "config.json", tmp_path)
    estimated = outline_of(str(tmp_path))
    assert estimated.weights == pytest.approx(there.weights, rel=0.01)
    assert there.weights < 0.4 * outlined(small_model(LLAMA)[1]).weights
    assert estimated.nbytes(TOKENS) == pytest.approx(there.nbytes(TOKENS), rel=0.01)
    assert 13.5e9 < outline_of("gpt-oss-20b").weights < 14e9  # its experts are packed
    packed = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    assert 6.1e9 < outlined(CONFIGS["Qwen/Qwen3-8B"] | packed).weights < 6.2e9
    # As compressed-tensors and ModelOpt say it.
    for how in ({"format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}, {"quant_algo": "NVFP4"}):
        packed = {"quantization_config": {"quant_method": "theirs"} | how}
        for where in (packed, {"text_config": packed}):
            assert 6.3e9 < outlined(CONFIGS["Qwen/Qwen3-8B"] | where).weights < 6.5e9
    packed["quantization_config"]["ignore"] = ["re:.*self_attn.*"]
    assert 8.4e9 < outlined(CONFIGS["Qwen/Qwen3-8B"] | packed).weights < 8.8e9


def test_a_whole_model_is_planned_and_nothing_is_computed(capsys):
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = said(capsys, "deepseek-v3", "--memory", "2TB", "--context", "128K", "--concurrency", 4)
    assert mx.get_peak_memory() - before < 1 << 22  # a layer's rows take 151 MB
    assert "layers that grow: 61 of 61" in found
    assert "70.3 KB a token" in found
    assert "without turbo3" in found
    assert "--decode-concurrency 4" in found


def test_what_is_said_to_fit_is_let_in_by_the_server(capsys):
    outline, context = outlined(CONFIGS["Qwen/Qwen3-8B"]), 1 << 17
    found = said(capsys, "qwen3-8b", "--memory", "40GB", "--concurrency", 4, "--context", context)
    rows = int(re.search(r"([\d,]+) rows a head", found)[1].replace(",", ""))
    settings = {"kv_bits": 8, "v_bits": 5, "policy": "h2o", "layers": "equal"}

    def fits(rows: int) -> Memory:
        make = partial(mlx_h2o.make_prompt_cache, outline, rows, **settings)
        return Memory([outline], make, 40 * 10**9, decode=4, prompts=1)

    memory = fits(rows)
    assert 4 * memory.of_request(context) <= memory.free
    many, each = re.search(r"8 and 5 bits .+?\|.+?\| +(\d+)", found), fits(context // 4)
    assert int(many[1]) == each.free // each.of_request(context) > 1
    assert 4 * fits(rows * 11 // 10).of_request(context) > memory.free


def test_a_model_with_a_chat_template_is_for_chats(capsys, quantised, tmp_path):
    folder = shutil.copytree(quantised, tmp_path / "a llama")
    flags = folder, "--memory", "1GB", "--context", "1K"
    assert f"mlx_h2o generate --model '{folder}' " in said(capsys, *flags)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert f"mlx_h2o chat --model '{folder}' " in said(capsys, *flags)
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert f"mlx_h2o chat --model '{folder}' " in said(capsys, *flags)


def test_smaller_steps_of_a_prompt_leave_more_for_caches(capsys):
    flags = "qwen3-8b-4bit", "--memory", "8GB", "--concurrency", "2"
    usual, small = said(capsys, *flags), said(capsys, *flags, "--prefill-step-size", "512")

    def kept(found: str) -> int:
        return int(re.search(r"--max-kv-bytes (\d+)MB", found)[1])

    assert kept(small) > 1.1 * kept(usual)
    assert small.rstrip().endswith("--prompt-concurrency 1 --prefill-step-size 512")
    assert "--prefill-step-size" not in usual


def test_texts_of_fewer_tokens_than_there_are_sinks(capsys):
    few = said(capsys, "demo", "--memory", "1GB", "--context", 1, "--prefill-step-size", 1)
    assert "mlx_h2o generate --model demo --max-kv-size none --prefill-step-size 1" in few


def test_a_model_that_is_refused_says_why_and_what_it_takes(capsys):
    found = said(capsys, "deepseek-ai/DeepSeek-V3.2", status=1)
    assert "refused: its indexer selects rows by their slot\n" in found
    assert "GB at 128K" in found
    assert "mlx_h2o chat" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ("{", "config.json is damaged, expected an object in JSON"),
        ('{"model_type": "nothing"}', "Model type nothing not supported"),
        ('{"hidden_size": 8}', "cannot be loaded: KeyError('model_type')"),
        ('{"model_type": "llama"}', "cannot be loaded: "),
        ('{"model_type": "qwen3", "n_layers": 1000000}', "n_layers is 1000000, expected at most"),
    ],
)
def test_a_folder_without_a_model_says_what_is_wrong(refused, tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert message in refused("plan", tmp_path)


def test_a_model_of_the_hub_is_planned_from_its_settings(capsys, quantised, monkeypatch):
    usual, line = warnings.formatwarning, "mlx_h2o plan: so\n"

    def warned(*_, **__):
        assert warnings.formatwarning("so", UserWarning, "a.py", 1) == line
        return str(quantised)

    fetch = Mock(side_effect=warned)
    monkeypatch.setattr(mlx_h2o.lm.plan, "snapshot_download", fetch)
    assert "layers that grow: 2 of 2" in said(capsys, "someone/llama-4bit", "--memory", "1GB")
    fetch.assert_called_once_with("someone/llama-4bit", allow_patterns=["*.json", "*.jinja"])
    assert warnings.formatwarning is usual  # a program may go on after its call of a command


def test_the_command_has_the_name_on_the_hub(capsys):
    found = said(capsys, "qwen3-8b-4BIT", "--memory", "24GB", "--concurrency", "2")
    assert "mlx_h2o server --model mlx-community/Qwen3-8B-4bit --max-kv-" in found
    assert "each of 2: all rows, in as many bits as fit" in found
    first = "mlx-community/Qwen3-8B-4bit: qwen3, trained on 40,960 tokens, weights of 4.6 GB"
    assert found.startswith(first)
