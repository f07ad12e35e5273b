"""`h2o-generate`, the command of the Swift package, against generation in Python."""

import json
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

import mlx_h2o
from engines import demo as demo_model
from fetched_models import fetched, loaded
from mlx_h2o import demo
from mlx_h2o.lm.prompt_cache import budgets_of
from parity.swift_leg import SwiftLeg
from programs import ended

pytestmark = pytest.mark.swift

CHUNK, TEXT = 64, demo.text()[300:900]
CACHES: dict[str, dict[str, Any]] = {
    "full": {"max_kv_size": None},
    "8 bits": {"max_kv_size": 48, "kv_bits": 8, "policy": "h2o-ema"},
    "h2o-ema": {"max_kv_size": 48, "policy": "h2o-ema"},
    "keydiff": {"max_kv_size": 48},
    "h2o": {"max_kv_size": 48, "kv_bits": 4, "policy": "h2o"},
    "codes": {"max_kv_size": 48, "kv_format": "turbo4", "policy": "h2o-ema"},
    "all rows": {"max_kv_size": None, "kv_bits": 8, "v_bits": 4, "dense_size": 8},
}


def command() -> Path:
    parity = SwiftLeg("swift", "native").executable()
    found = parity and parity.with_name("h2o-generate")
    if found is None or not found.is_file():
        pytest.skip("h2o-generate is not built: swift build --product h2o-generate")
    return found


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """The command, with the last ``--model``."""
    return ended(command(), "--model", demo.model_path(), *words)


def tokens(*words: object) -> list[int]:
    done = run(*words, "--print-tokens")
    assert done.returncode == 0, done.stderr
    return [int(token) for token in done.stdout.split()]


def written(prompt: str, count: int, *words: object) -> list[int]:
    """So many tokens after a text that is read in chunks."""
    asked = "--prompt", prompt, "--max-tokens", count, "--prefill-step-size", CHUNK
    return tokens(*asked, *words)


def in_python(prompt: list[int], count: int, of: Any = None, **settings: Any) -> list[int]:
    given = mlx_h2o.stream_generate(
        *(of or demo_model()), prompt, max_tokens=count, prefill_step_size=CHUNK, **settings
    )
    return [one.token for one in given]


def flags(settings: dict[str, Any]) -> list[str]:
    pairs = [(f"--{key.replace('_', '-')}", str(value).lower()) for key, value in settings.items()]
    return [word for pair in pairs for word in pair]


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", CACHES)
def test_writes_what_python_writes(name: str) -> None:
    """To the last token, or to one at which Python itself wavers: with its own sums in another
    order (plain operations) it then writes what Swift writes."""
    found = written(TEXT, 200, *flags(CACHES[name]))
    asked, settings = demo_model()[1].encode(TEXT), {"layers": "equal", **CACHES[name]}
    if found != in_python(asked, 200, **settings):
        with mlx_h2o.use_backend("composed"):
            assert found == in_python(asked, 200, **settings)
    assert len(set(found)) > 10


SMOLLM2 = "smollm2-135m-instruct"
FORMATS: dict[str, dict[str, Any]] = {
    "dense": {"policy": "keydiff"},
    "8 bits": {"kv_bits": 8, "policy": "keydiff"},
    "keys of 5 bits, values of 4": {"kv_bits": 5, "v_bits": 4, "policy": "h2o"},
    "all rows": CACHES["all rows"],
}


@pytest.mark.real
@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_real_model_writes_what_python_writes(kind: str) -> None:
    """SmolLM2, all of 200 tokens."""
    of, settings = loaded(SMOLLM2), {"max_kv_size": 128, **FORMATS[kind]}
    found = written(TEXT, 200, "--model", fetched(SMOLLM2), *flags(settings))
    assert found == in_python(of[1].encode(TEXT), 200, of, layers="equal", **settings)
    assert len(found) == 200 and len(set(found)) > 10


HEADS = {"budgets": [[24, 64], 40, [64, 24], [16, 16], 40, [20, 90]], "max_kv_size": 40}
GROUPED = [True, False, True, False, False, True]


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "more", [{}, {"kv_bits": 8, "policy": "h2o"}, {"policy": "h2o-ema"}], ids=str
)
def test_heads_have_the_rows_of_a_file(more: dict[str, Any], tmp_path: Path) -> None:
    """Swift reads the file of Python, and writes what Python writes."""
    ours, tokenizer = demo_model()
    settings = HEADS | more
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"budgets": HEADS["budgets"]}))
    whole, back = mlx_h2o.make_prompt_cache(ours, **settings), tmp_path / "back.safetensors"
    assert [isinstance(one, mlx_h2o.HeadGroups) for one in whole] == GROUPED
    expected = in_python(tokenizer.encode(TEXT), 100, prompt_cache=whole)
    given = *flags(settings | {"budgets": rows}), "--save-prompt-cache", back
    assert written(TEXT, 100, *given) == expected
    read = mlx_h2o.load_prompt_cache(back, model=ours)
    assert budgets_of(read) == budgets_of(whole)
    assert [one.offset for one in read] == [one.offset for one in whole]


@pytest.mark.slow
def test_reads_text_as_python_does() -> None:
    """Tokens are compared through what the model says of them, one after the other; a long word
    takes no longer than as many short ones."""
    odd = "\nIt's 1818 -- \N{LATIN SMALL LETTER E WITH ACUTE}t\N{LATIN SMALL LETTER E WITH ACUTE}, "
    text = odd + "\t\t  two  spaces \N{SNOWMAN}\n\n<|im_start|>user 42<|im_end|>\u0301 "
    expected = demo_model()[1].encode(text)
    listed = ",".join(map(str, expected))
    count = "--max-tokens", 8
    assert tokens("--prompt", text, *count) == tokens("--prompt-tokens", listed, *count)
    for _ in range(12):  # it waits for the step that is on its way, or may crash
        done = run("--prompt", text, "--max-tokens", 0)
        assert done.returncode == 0 and f"{len(expected)} and 0 tokens" in done.stderr
    long = "--prompt", "lengthening" * 9000, "--prompt-cache-file", "none.safetensors"
    done = ended(command(), "--model", demo.model_path(), *long, timeout=60)
    assert "none.safetensors" in done.stderr


MISTAKES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text("ascii"))


@pytest.mark.parametrize(("typed", "said"), MISTAKES.items())
def test_mistakes_are_told_in_one_line(typed: str, said: str) -> None:
    done = run(*shlex.split(typed))
    assert done.returncode in (1, 2) and done.stdout == "" and said in done.stderr
    assert done.stderr.startswith("h2o-generate: error: ")
    assert done.stderr.count("\n") == 1


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    done = run("--model", tmp_path, "--prompt", "a")
    assert done.returncode == 2
    assert "holds no config.json" in done.stderr
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(demo.model_path() / name, tmp_path)
    done = run("--model", tmp_path, "--prompt", "a")
    assert "there is no " in done.stderr
    config = (tmp_path / "config.json").read_text().replace('"qwen3"', '"gemma2"')
    (tmp_path / "config.json").write_text(config)
    done = run("--model", tmp_path, "--prompt", "a")
    assert "model_type is 'gemma2', expected one of" in done.stderr


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_kv_size": 48, "layers": "equal", "policy": "h2o-ema"},
        {"max_kv_size": 48, "layers": "equal", "kv_bits": 8},
        {"max_kv_size": 48},  # which shares rows out by KV head, and anew as the text grows
        {"max_kv_bytes": "100KB"},
        CACHES["all rows"],
    ],
    ids=str,
)
def test_goes_on_from_files_of_either_language(settings: dict[str, Any], tmp_path: Path) -> None:
    """Python reads a prompt, Swift goes on and writes, and Python goes on from there."""
    ours, tokenizer = demo_model()
    cache = mlx_h2o.make_prompt_cache(ours, **settings)
    whole = mlx_h2o.make_prompt_cache(ours, **settings)
    first, last = tokenizer.encode(TEXT), tokenizer.encode(" And he said")
    given, written = tmp_path / "given.safetensors", tmp_path / "written.safetensors"
    for one in (cache, whole):
        in_python(first, 5, prompt_cache=one)
    mlx_h2o.save_prompt_cache(given, cache, model=ours)
    files = "--prompt-cache-file", given, "--save-prompt-cache", written
    found = tokens("--prompt", " And he said", "--max-tokens", 40, *files)
    assert found == in_python(last, 40, prompt_cache=whole)
    back = mlx_h2o.load_prompt_cache(written, model=ours)
    assert [one.offset for one in back] == [one.offset for one in whole]
    assert budgets_of(back) == budgets_of(whole)
    assert in_python(last, 40, prompt_cache=back) == in_python(last, 40, prompt_cache=whole)
    done = run("--prompt", "a", "--prompt-cache-file", given, "--max-kv-size", 9)
    assert "--prompt-cache-file brings the settings of the cache" in done.stderr


def test_a_file_of_another_model_is_refused_before_a_word_is_written(tmp_path: Path) -> None:
    rows, file = mx.zeros((1, 1, 3, 64)), tmp_path / "other.safetensors"
    caches = [mlx_h2o.H2OKVCache(mlx_h2o.H2OConfig.of(max_kv_size=24)) for _ in range(6)]
    for one in caches:
        one.update_and_fetch(rows, rows)
    mlx_h2o.save_prompt_cache(file, caches)
    done = run("--prompt", "a", "--prompt-cache-file", file)
    assert not done.stdout and "1 KV heads of 64 elements in layer 0, expected 2" in done.stderr


LLAMAS = json.loads(Path(__file__).with_name("llamas.json").read_text("ascii"))
"""Settings of all, and of each kind."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", LLAMAS["kinds"])
def test_llamas_of_every_kind(kind: str, tmp_path: Path) -> None:
    """Random weights, in two files; what they say depends on every bias and frequency."""
    config = LLAMAS["all"] | LLAMAS["kinds"][kind]
    mx.random.seed(7)
    made = llama.Model(llama.ModelArgs.from_dict(config))
    weights = [(name, 4 * mx.random.normal(array.shape) * array.shape[-1] ** -0.5)
               for name, array in tree_flatten(made.parameters())]  # fmt: skip
    for part, some in enumerate((weights[::2], weights[1::2]), 1):
        mx.save_safetensors(str(tmp_path / f"model-{part}-of-2.safetensors"), dict(some))
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.model_path() / name, tmp_path)
    ours, tokenizer = mlx_h2o.load(str(tmp_path))
    settings = {"max_kv_size": 24, "policy": "h2o-ema"}
    text = demo.text()[:200]
    expected = in_python(tokenizer.encode(text), 60, (ours, tokenizer), **settings)
    found = written(text, 60, "--model", tmp_path, *flags(settings))
    assert found == expected
    assert len(set(found)) > 10
