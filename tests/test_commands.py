"""The commands around generate: saved prompts, a draft model, mlx_lm's chat, what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from mlx_h2o import H2OConfig, cli, load, load_prompt_cache, stream_generate
from mlx_h2o.demo import model_path
from mlx_h2o.lm import hosting

pytestmark = pytest.mark.downstream

FLAGS = "--max-kv-size 24 --sink-size 2"
TEXT = "It was a dark night, and the wind was in the trees. The captain looked at the sea and"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mlx_h2o", *arguments]


def test_a_saved_prompt_goes_on(tmp_path, capsys):
    file = str(tmp_path / "prompt.safetensors")
    flags = ["--model", "demo", *FLAGS.split(), "--policy", "keydiff", "--prompt-cache-file", file]
    assert cli.main(["cache_prompt", *flags, "--prompt", TEXT + TEXT]) == 0
    assert "KV cache: keydiff, 6 of 6 layers evict, 24 rows" in capsys.readouterr().out
    more = ["--prompt", " said that", "-m", "12", "--prompt-cache-file", file]
    assert cli.main(["generate", *more, "--verbose", "False"]) == 0  # the model is in the file
    printed = capsys.readouterr().out
    model, tokenizer = load("demo")
    caches = load_prompt_cache(file, model=model)
    assert caches[0].config == H2OConfig(max_kv_size=24, sink_size=2, policy="keydiff")
    expected = stream_generate(
        model, tokenizer, tokenizer.encode(" said that"), max_tokens=12, prompt_cache=caches
    )
    assert printed.strip() == "".join(part.text for part in expected).strip()


def test_saved_prompts_that_do_not_fit(tmp_path, capsys):
    file = tmp_path / "prompt.safetensors"
    saved = ["--model", "demo", "--prompt-cache-file", str(file), "--prompt", TEXT]
    assert cli.main(["cache_prompt", *saved]) == 0
    for flags, text in (
        ("--prompt-cache-file missing", "missing"),
        (f"--prompt-cache-file {file} --policy window", "brings its settings"),
        (f"--prompt-cache-file {file} --model other", "is of the model 'demo', found --model"),
        (f"--prompt-cache-file {file} --draft-model demo", "no cache of the draft model"),
    ):
        assert cli.main(["generate", "-p", "x", *flags.split()]) == 1
        assert text in capsys.readouterr().err
    file.write_bytes(file.read_bytes()[:-100])
    assert cli.main(["generate", "-p", "x", "--prompt-cache-file", str(file)]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_a_draft_model(capsys):
    flags = f"--model demo {FLAGS} --policy window -m 30 --verbose False --temp 0".split()
    printed = []
    for drafts in ([], ["--draft-model", "demo", "--num-draft-tokens", "2"]):
        # Below the budget the tokens are the same.
        size = ["--max-kv-size", "200"]
        assert cli.main(["generate", *flags, *size, *drafts, "--prompt", TEXT]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert cli.main(["generate", *flags, *drafts, "--prompt", TEXT, "--verbose", "True"]) == 0
    assert "KV cache: window, 12 of 12 layers evict" in capsys.readouterr().out


@pytest.fixture
def chatting(tmp_path):
    """The embedded model with a chat template, which it lacks."""
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    settings = folder / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    found = json.loads(settings.read_text()) | {"chat_template": template}
    settings.write_text(json.dumps(found))
    return folder


def _chat(model: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("chat", "--model", model, *FLAGS.split(), "-m", "30"),
        input="The ship\nThe sea\nq\n",
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_chat(chatting):
    run = _chat(str(chatting))
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) > 20
    refused = _chat("demo")
    assert refused.returncode == 1
    assert "mlx_h2o chat: " in refused.stderr
    assert "chat_template is not set" in refused.stderr


@pytest.mark.parametrize("batch", [1, 2])
def test_the_benchmark_runs_with_evicting_caches(batch, capsys, monkeypatch):
    made = []
    original = hosting.make_prompt_cache

    def counting(model, config):
        made.append(original(model, config))
        return made[-1]

    monkeypatch.setattr(hosting, "make_prompt_cache", counting)
    flags = f"--model demo {FLAGS} -p 40 -g 8 -n 1 -b {batch}"
    assert cli.main(["benchmark", *flags.split()]) == 0
    assert "generation_tps=" in capsys.readouterr().out
    assert len(made) == 2 * batch  # one run to warm up
    assert {cache.config.max_kv_size for caches in made for cache in caches} == {24}


def test_the_server_says_what_it_does_not_serve(capsys):
    with pytest.raises(SystemExit):
        cli.main(["server", "--kv-bits", "8", "--light-bits", "4"])
    assert "not available in batches" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["server", "--help"])
    printed = capsys.readouterr().out
    assert "--policy" in printed
    assert "--prompt-cache-bytes" in printed
