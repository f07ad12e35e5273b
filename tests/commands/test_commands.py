"""Commands around generate: saved prompts, a draft model, mlx_lm's chat, and refusals."""

import argparse
import contextlib
import importlib
import io
import json
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
from mlx_lm.generate import DEFAULT_MODEL
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_h2o
from mlx_h2o import H2OConfig, cli, load, load_prompt_cache, make_prompt_cache, stream_generate
from mlx_h2o.commands import benchmark, cache_prompt, chat, generate, options, parsing, server
from mlx_h2o.config import setting_names
from mlx_h2o.lm import saving
from paths import ROOT
from programs import ended

pytestmark = pytest.mark.downstream

FLAGS = "--max-kv-size 24 --sink-size 2 --evict-every 1 --layers equal"
TEXT = "It was a dark night, and the wind was in the trees. The captain looked at the sea and"


@pytest.mark.slow
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
    config = H2OConfig.of(max_kv_size=24, sink_size=2, policy="keydiff", evict_every=1)
    assert caches[0].config == config.with_budget(context_size=2048)
    tokens, given = tokenizer.encode(" said that"), {"max_tokens": 12, "prompt_cache": caches}
    expected = stream_generate(model, tokenizer, tokens, **given)
    assert printed.strip() == "".join(part.text for part in expected).strip()


def test_saved_prompts_that_do_not_fit(tmp_path, refused):
    file = tmp_path / "prompt.safetensors"
    saved = ["--model", "demo", "--prompt-cache-file", str(file), "--prompt", TEXT]
    assert cli.main(["cache_prompt", *saved]) == 0
    for flags, text in (
        ("--prompt-cache-file missing", "missing"),
        (f"--prompt-cache-file {file} --policy window", "brings its settings, found policy"),
        (f"--prompt-cache-file {file} --model other", "is of the model 'demo', found --model"),
    ):
        assert text in refused("generate", "-p", "x", *flags.split())
    file.write_bytes(file.read_bytes()[:-100])
    assert "is damaged" in refused("generate", "-p", "x", "--prompt-cache-file", file)


def test_a_model_that_needs_metal_is_refused_in_one_line(refused, monkeypatch):
    """Its kernels fail when they are first called; other errors of this kind are faults."""
    flags = ["generate", "--model", "demo", "--layers", "equal", "-p", "x", "--verbose", "false"]
    for of in ("mlx_lm.load", "mlx_h2o.commands.generate.stream_generate"):
        monkeypatch.setattr(of, Mock(side_effect=RuntimeError("[metal_kernel] No Metal back-end.")))
        assert refused(*flags).endswith(" No Metal back-end.\n")
        monkeypatch.undo()
    monkeypatch.setattr(of, Mock(side_effect=RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="^a fault$"):
        cli.main(flags)


@pytest.mark.slow
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


def chat_model(folder, **settings):
    """This copy of the embedded model with a chat template, which it lacks, and other settings."""
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    for name, more in (("tokenizer_config", {"chat_template": template}), ("config", settings)):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return folder


@pytest.fixture
def chatting(folder):
    """One that was made for texts of 40 tokens."""
    return chat_model(folder, max_position_embeddings=40)


def _chat(model: str, said: str = "The ship\nThe sea\nq\n") -> subprocess.CompletedProcess[str]:
    flags = ["--model", model, *FLAGS.split(), "-m", "30"]
    return ended(sys.executable, "-m", "mlx_h2o", "chat", *flags, input=said, timeout=120)


@pytest.mark.parametrize("said", [io.StringIO(""), None])  # None: it is closed
def test_the_end_of_the_input_ends_a_chat(said, monkeypatch, chatting):
    monkeypatch.setattr("sys.stdin", said)
    assert cli.main(("chat", "--model", str(chatting))) == 0


@pytest.mark.slow
def test_chat(chatting):
    run = _chat(str(chatting))
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) > 20
    assert "KV cache: 24 rows a head by keydiff, unquantised." in run.stdout.splitlines()[0]
    assert run.stdout.count(" evicted · peak ") == 2
    assert run.stdout.splitlines()[-1].startswith("KV cache: keydiff, 6 of 6 layers evict, 24 rows")
    assert run.stderr.count("the model was trained on 40") == 1  # in the second of two turns
    again = _chat(str(chatting), "The ship\nr\nh\nThe ship\n")
    first, second = again.stdout.split("A new conversation begins.")
    answers = [part.partition(" tok/s")[0].rpartition("\n")[0] for part in (first, second)]
    answers = [part.partition("an answer\n")[2] for part in answers]
    assert answers[0]
    assert again.returncode == 0 and answers[0] == answers[1]
    assert second.count("q: quit") == 1


@pytest.mark.slow
def test_a_text_beyond_the_context_of_the_model_is_said(chatting, tmp_path, capsys):
    file = str(tmp_path / "prompt.safetensors")
    flags = ["--model", str(chatting), *FLAGS.split(), "--prompt", "The ship"]
    for tokens, said in (("8", ""), ("50", "The text has 5")):
        assert cli.main(["generate", *flags, "-m", tokens, "--ignore-chat-template"]) == 0
        found = capsys.readouterr().err
        assert (said in found) if said else not found
    flags[-1] = TEXT + TEXT
    assert cli.main(["cache_prompt", *flags, "--prompt-cache-file", file]) == 0
    assert "the model was trained on 40" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_the_benchmark_runs_with_evicting_caches(batch, capsys, monkeypatch):
    made = []
    original = options.prompt_cache.make_prompt_cache

    def counting(model, **given):
        made.append(original(model, **given))
        return made[-1]

    monkeypatch.setattr(options.prompt_cache, "make_prompt_cache", counting)
    monkeypatch.setattr("time.sleep", (slept := []).append)
    flags = f"{FLAGS} -p 40 -g 8 -n 1 -b {batch} --delay 9"
    assert cli.main(f"benchmark --model demo {flags}".split()) == 0
    assert "generation_tps=" in capsys.readouterr().out
    assert len(made) == 2 * batch and slept == [9]  # one run to warm up
    assert {cache.config.max_kv_size for caches in made for cache in caches} == {24}


ALL_FLAGS = (
    "--max-kv-size 60 --policy window --sink-size 2 --heavy-size 30 --recent-size 28 --decay 0.5 "
    "--evict-every 4 --random-seed 3 --kv-bits 8 --kv-group-size 32 --light-bits 4 "
    "--dense-size 0 --sparse-v 1e-6"
)
ASKED = H2OConfig.of(
    max_kv_size=60, policy="window", sink_size=2, heavy_size=30, recent_size=28, decay=0.5,
    evict_every=4, random_seed=3, kv_bits=8, kv_group_size=32, light_bits=4,
    dense_size=0, sparse_v=1e-6,
)  # fmt: skip
MODULES = generate, chat, server, cache_prompt, benchmark
COMMANDS = {one.__name__.rpartition(".")[2]: one for one in MODULES}
NEEDED = {"cache_prompt": ["--prompt", "a", "--prompt-cache-file", "a"]}


def asked(command: str, flags: str, monkeypatch) -> options.CacheSettings:
    """What the flags of a command ask of its caches."""
    found = []
    monkeypatch.setattr(COMMANDS[command], "run", lambda args, *given: found.extend(given))
    assert cli.main([command, *NEEDED.get(command, []), *flags.split()]) == 0
    return found[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_every_flag(command, budgets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = asked(command, f"{ALL_FLAGS} --budgets {budgets}", monkeypatch)
    assert found.config == ASKED and found.given["budgets"] == budgets
    assert not found.given.keys() & {"layers", "max_kv_bytes"}
    found = asked(command, "", monkeypatch)
    assert found.config == H2OConfig() and not found.given
    assert asked(command, "--layers equal", monkeypatch).given == {"layers": "equal"}
    sized = asked(command, "--max-kv-bytes 2MB --kv-bits 8", monkeypatch)
    assert sized.given == {"max_kv_bytes": 2_000_000, "kv_bits": 8}
    found = asked(command, "--max-kv-size none --kv-bits 8 --v-bits 4", monkeypatch)
    assert found.config == H2OConfig.of(max_kv_size=None, kv_bits=8, v_bits=4)


def test_every_setting_has_a_flag_or_is_known_to_have_none():
    flags = {action.dest for action in generate.parser()._actions}
    assert {*parsing._SAID} == {*setting_names(), "kv_handed"} - flags  # which models say


def test_the_server_and_its_drafts(budgets, refused, monkeypatch):
    flags = "--prompt-cache-bytes 0 --draft-model demo --num-draft-tokens 5"
    assert asked("server", flags, monkeypatch).config == H2OConfig.of(speculative=5)
    monkeypatch.undo()
    given = "--draft-model", "demo", "--budgets", budgets
    assert "--budgets with --draft-model" in refused("server", *given)


def shown(capsys, monkeypatch, *flags: str) -> str:
    """What the flags print on a screen of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        cli.main(flags)
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_flags(command, capsys, monkeypatch):
    said, whole = (shown(capsys, monkeypatch, command, f"--{n}") for n in ("help", "help-all"))
    first, more = said.split("Other flags, which --help-all explains:")
    assert len([line for line in first.splitlines() if line.startswith("--")]) == 5
    for action in COMMANDS[command].parser()._actions:
        if action.help != argparse.SUPPRESS:
            assert max(action.option_strings, key=len) in first + more + "--help-all"
            assert max(action.option_strings, key=len) in whole
    for flag in ("--policy", "--light-bits", "--sparse-v", "--budgets", "--layers", "--model"):
        assert flag in said
    assert "a quarter of the" in " ".join(said.split())


@pytest.mark.parametrize("command", ["", *cli._COMMANDS])
def test_help_fits_a_screen(command, capsys, monkeypatch):
    said = shown(capsys, monkeypatch, *command.split(), "--help").splitlines()
    assert 10 < len(said) <= 40
    assert max(map(len, said)) <= 80
    whole = shown(capsys, monkeypatch, command, "--help-all").splitlines()
    assert not command or len(whole) >= len(said)


def flags_of(parser) -> dict[str, tuple[object, bool]]:
    """The value of each flag where it is not given, if any, and whether it has to be."""
    found = {}
    for one in parser._actions:
        value = one.default
        if value == argparse.SUPPRESS:
            value = getattr(H2OConfig(), one.dest, None)
        elif isinstance(value, str):
            value = parser._get_value(one, value)
        value = value or (DEFAULT_MODEL if one.dest == "model" else None)
        found |= dict.fromkeys(one.option_strings, (value, one.required))
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_and_defaults_of_mlx_lm(command, monkeypatch):
    """But for those of the table in docs/index.md, each of which is missing here or another."""
    ours, theirs = flags_of(COMMANDS[command].parser()), {}
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda p: theirs.update(flags_of(p)))
    with pytest.raises(AttributeError):  # of the arguments, which are None
        importlib.import_module(f"mlx_lm.{command}").main()
    lines = re.findall(r"^\| `(--\S+)` \| (.+?) \|", (ROOT / "docs/index.md").read_text(), re.M)
    other = {flag for flag, commands in lines if f"`{command}`" in commands}
    assert other == {name for name in theirs if ours.get(name) != theirs[name]}


@pytest.fixture
def budgets(tmp_path):
    file = tmp_path / "budgets.json"
    file.write_text(json.dumps({"budgets": [30, 24, 24, 24, 24, 18]}))
    return str(file)


def test_a_saved_prompt_without_the_words_of_mlx_lm(tmp_path, capsys, monkeypatch):
    """One that was saved by a program, of which the file says neither model nor tokenizer."""
    read, original = [], saving.is_whole
    monkeypatch.setattr(saving, "is_whole", lambda *given: read.append(given) or original(*given))
    file = str(tmp_path / "prompt.safetensors")
    model, tokenizer = load("demo")
    caches = make_prompt_cache(model, 24)
    assert len([*stream_generate(model, tokenizer, TEXT, max_tokens=2, prompt_cache=caches)]) == 2
    mlx_h2o.save_prompt_cache(file, caches)
    flags, told = ["-p", "x", "-m", "2", "--prompt-cache-file", file], []
    monkeypatch.setattr(
        TokenizerWrapper, "encode", lambda *_, **how: told.append(how) or [5], raising=False
    )
    assert cli.main(["generate", *flags, "--model", "demo"]) == 0
    assert told[0] == {"add_special_tokens": False}  # no token begins the text twice
    assert "KV cache: keydiff, 6 of 6" in capsys.readouterr().out
    assert len(read) == 1  # all of the file, and once


# generate


@pytest.mark.slow
def test_the_command_generates(capsys):
    flags = "--model demo --max-kv-size 32 --sink-size 2 --policy keydiff --evict-every 2 "
    flags += "--layers equal --max-tokens 60 --ignore-chat-template --seed 1 --temp 0"
    prompt = "The monster\\nlooked at me"
    assert cli.main(["generate", *flags.split(), "--prompt", prompt]) == 0
    printed = capsys.readouterr().out
    assert "Generation: 60 tokens" in printed
    last = printed.splitlines()[-1]
    assert last.startswith("KV cache: keydiff, 6 of 6 layers evict, 3")
    assert last.endswith(" bytes") and "evicted" in last


@pytest.mark.slow
def test_the_command_reads_standard_input_and_prints_only_the_text(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("It was a dark night"))
    assert cli.main(["generate", "--model=demo", "-p", "-", "-m", "20", "--verbose=False"]) == 0
    expected = mlx_h2o.generate(*load("demo"), "It was a dark night", max_tokens=20)
    assert capsys.readouterr().out.strip() == expected.strip()


@pytest.mark.slow
def test_without_a_budget_nothing_is_evicted(capsys):
    """And a threshold that nothing is below leaves the text as it is."""
    texts = []
    for flags in ("", "--sparse-v 1e-9"):
        given = f"--model demo -p night -m 60 --temp 0 --max-kv-size none --kv-bits 8 {flags}"
        assert cli.main(["generate", *given.split()]) == 0
        text, _, figures = capsys.readouterr().out.partition("Prompt:")
        assert "KV cache: 0 of 6 layers evict, 6" in figures and " 0 evicted" in figures
        texts.append(text)
    assert texts[0] == texts[1]


def test_help_and_mistakes(capsys, monkeypatch):
    assert cli.main(["sing"]) == 2
    assert "'sing' is not a command" in capsys.readouterr().err
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert ", back end " in capsys.readouterr().out
    monkeypatch.setattr("mlx_h2o.blas.slow_blas", lambda: "install another BLAS")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.endswith("\ninstall another BLAS\n")
