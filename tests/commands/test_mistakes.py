"""What is wrong on the command line is told in one line, in the names that were typed."""

from __future__ import annotations

import io
import re

import pytest

from mlx_h2o import cli

GENERATE = ("generate", "--model", "demo", "--prompt", "a")
EVALUATE = ("evaluate", "--model", "demo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GENERATE, "--max-kv-size", "-5"), "--max-kv-size is -5, expected"),
        ((*GENERATE, "--max-kv-size", "64", "--kv-bits", "7"), "--kv-bits"),
        ((*GENERATE, "--light-bits", "4"), "--light-bits is 4, expected --kv-bits too"),
        ((*GENERATE, "--max-kv-size", "4"), "--sink-size is 4, expected fewer than --max-kv-size"),
        ((*GENERATE, "--heavy-size", "64", "--max-kv-size", "64"), "--recent-size = 4 + 64 + 0 ="),
        ((*GENERATE, "--kv-bits", "8", "--quantized-kv-start", "9"), "--quantized-kv-start must"),
        ((*GENERATE, "--draft-model", "demo", "--max-kv-size", "8"), "speculative + 2 = 9"),
        ((*GENERATE, "--sparse-v", "1e-6"), "--sparse-v is 1e-06, expected --kv-bits too"),
        ((*GENERATE, "--max-kv-size", "many"), "'many' is not a number of rows"),
        (
            (*GENERATE, "--max-kv-size", "none", "--kv-bits", "8", "--light-bits", "4"),
            "--light-bits is 4, expected a --max-kv-size too",
        ),
        ((*GENERATE, "--policy", "lru"), "invalid choice: 'lru'"),
        (
            (*GENERATE, "--seed", "-1"),
            "--seed: -1 is not a valid seed, expected 0 to 2^64 - 1",
        ),
        ((*GENERATE, "--seed", str(2**64)), "is not a valid seed"),
        (("chat", "--model", "demo", "--seed", "x"), "argument --seed: invalid"),
        ((*GENERATE, "--max-token", "3", "--nosuch"), "unrecognized arguments: --nosuch"),
        (("server", "--model", "demo", "--port", "x"), "argument --port: invalid int value: 'x'"),
        ((*EVALUATE, "--output", "/no/such/folder/file"), "/no/such/folder/file"),
        (("evaluate", "--model", "/no/such/folder"), "/no/such/folder is not a directory"),
        (("server", "--model", "/no/such/folder"), "/no/such/folder is not a directory"),
        (("server", "--draft-model", "./none"), "./none is not a directory"),
        ((*GENERATE, "--max-kv-sise", "5"), "unrecognized arguments: --max-kv-sise 5"),
        (("server", "--model", "demo", "--prot", "80"), "unrecognized arguments: --prot 80"),
        (("cache_prompt", "--model", "demo", "--prompt", "a"), "required: --prompt-cache-file"),
        (("benchmark", "--max-kv-size", "a"), "'a' is not a number of rows, expected one, or none"),
        (("evaluate", "--model", "demo", "--texts", "/none"), "--texts /none: No such file"),
        ((*GENERATE, "--draft-model", "demo", "--num-draft-tokens", "0"), "expected at least 1"),
        (("server", "--cache-size", "big"), "--cache-size: 'big' is not a size"),
        (("layers", "--output", "file"), "the following arguments are required: --model"),
        ((*GENERATE, "--temp", "warm"), "argument --temp: invalid float value: 'warm'"),
        ((*GENERATE, "--max-tokens", "2.5"), "--max-tokens/-m: invalid int value: '2.5'"),
        ((*GENERATE, "--max-kv-bytes=1MB", "--max-kv-size", "64"), "--max-kv-bytes with --max-kv-"),
        ((*GENERATE, "--max-kv-bytes", "big"), "argument --max-kv-bytes: 'big' is not a size in"),
        ((*GENERATE, "--budgets", "/none"), "argument --budgets: No such file or directory: '/no"),
        ((*GENERATE, "--adapter-path", "/none"), "argument --adapter-path: No such file or"),
        ((*GENERATE, "--chat-template-config", "[1]"), "'[1]' is not a JSON object"),
        ((*GENERATE, "--chat-template-config", "{"), "'{' is not JSON: Expecting"),
        ((*GENERATE, "--prompt", "\udcff"), "argument --prompt/-p: 'utf-8' codec can't encode"),
        (("server", "--cache-dir", "/proc/none"), "--cache-dir: No such file or directory: '/pr"),
        (("server", "--cache-dir", __file__), f"--cache-dir: File exists: '{__file__}'"),
        (("server", "--cache-dir="), "--cache-dir: No such file or directory: ''"),
        (("server", "--memory", "0"), "is not a size in bytes"),
        (("server", "--top-p", "0"), "--top-p"),
        (("server", "--chat-template-args", "[1]"), "is not a JSON object"),
        (
            ("server", "--prompt-cache-bytes", "x"),
            "argument --prompt-cache-bytes: 'x' is not a size",
        ),
        (("layers", "--model", "demo", "--output", "/none/a"), "argument --output: No such file"),
        ((*EVALUATE, "--output", "/"), "argument --output: Is a directory: '/'"),
        ((*EVALUATE, "--plot", "/none/a.svg"), "argument --plot: No such file or directory"),
        ((*EVALUATE, "--plot", "/tmp/a.gif"), "/tmp/a.gif is no plot, expected .svg"),
        ((*EVALUATE, "--arms", "best"), "arm 'best' is unknown, expected one of full,"),
        (
            (*EVALUATE, "--bytes", "2"),
            "argument --bytes: '2' is not a share, expected e.g.",
        ),
        ((*EVALUATE, "--length", "9"), "length is 9, expected at least 34"),
        ((*EVALUATE, "--lengths", "100"), "has 100, expected at least 640: 40 for each fact"),
        ((*EVALUATE, "--texts", __file__, "--documents", "9000"), "test_mistakes.py has"),
        ((*EVALUATE, "--documents", "0"), "--documents is 0, expected at least 1"),
        ((*EVALUATE, "--seed", "-1"), "--seed is -1, expected at least 0"),
        ((*EVALUATE, "--tasks", "loss", "ruler"), "ruler needs a file of RULER's samples"),
        ((*EVALUATE, "--tasks", "loss", "ruler", "--ruler", "/none"), "directory: '/none'"),
    ],
)
def test_a_mistake_is_a_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mlx_h2o {arguments[0]}: error: ") and said.count("\n") == 1
    assert message in said and "[H2OConfig]" not in said and "usage" not in said


OUT_OF_RANGE = (
    "generate --temp nan; generate --temp inf; generate --temp -1; generate --top-p 1.5; "
    "generate --top-k -1; generate --min-p -1; generate --xtc-probability 2; "
    "generate --xtc-threshold 1; generate --min-tokens-to-keep 0; generate -m 0; "
    "generate --max-tokens -4; generate --prefill-step-size 0; generate --num-draft-tokens -1; "
    "chat --max-tokens 0; chat --prefill-step-size 0; benchmark --batch-size 0; "
    "benchmark --num-trials 0; benchmark -p 0; benchmark -g -3; benchmark --delay -1; "
    "server --grace -1; server --max-queue 0; server --prefill-step-size 0; server --port 65536; "
    "server --max-tokens -1; server --prompt-concurrency 0; server --decode-concurrency 0; "
    "server --prompt-cache-size -1"
)


@pytest.mark.parametrize("typed", OUT_OF_RANGE.split("; "))
def test_a_number_that_is_out_of_range(typed, capsys):
    command, flag, value = typed.split()
    with pytest.raises(SystemExit) as ended:
        cli.main((*(GENERATE if command == "generate" else (command,)), flag, value))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"mlx_h2o {command}: error: argument ")
    assert re.search(rf"{flag}\S*: \S+ is out of range, expected", said)


@pytest.mark.parametrize("command", ["evaluate", "server"])
def test_an_empty_model_folder(command, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main((command, "--model", str(tmp_path)))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert f"{tmp_path} has no config.json, expected a model of mlx_lm" in said


def test_a_name_that_the_hub_does_not_give(monkeypatch, capsys):
    def load(*args, **kwargs):
        raise FileNotFoundError("cannot find\nthe files")

    monkeypatch.setattr("mlx_lm.load", load)
    assert cli.main(("generate", "--model", "none", "--prompt", "a")) == 2
    assert capsys.readouterr().err == (
        "mlx_h2o generate: none is not a directory, and could not be fetched from the hub: cannot "
        "find the files\n"
    )


def test_a_cache_that_cannot_be_written(tmp_path, capsys):
    file = tmp_path / "none" / "file.safetensors"
    arguments = ("cache_prompt", "--model", "demo", "--prompt", "a", "--prompt-cache-file")
    with pytest.raises(SystemExit) as ended:
        cli.main((*arguments, str(file)))
    found = capsys.readouterr()
    assert ended.value.code == 2 and not found.out  # nothing was read
    assert found.err.startswith("mlx_h2o cache_prompt: error: argument --prompt-cache-file: ")
    assert f"No such file or directory: '{file}'" in found.err and found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--image x.png", "--image is not available in this version"),
        ("--top-k 4096", "--top-k is 4096, expected fewer than all 4096 tokens"),
        ("--system-prompt x", "--system-prompt or --prefill-response is given, and no chat"),
        ("--prefill-response x", "--system-prompt or --prefill-response is given, and no chat"),
        ("--prompt=", "prompt is empty, expected at least one token"),
        ("--max-kv-bytes 9", "--max-kv-bytes is 9, expected at least"),
    ],
)
def test_what_does_not_go_with_the_model(flags, message, capsys):
    assert cli.main((*GENERATE, *flags.split())) == 2
    found = capsys.readouterr()
    assert found.err.startswith(f"mlx_h2o generate: {message}") and found.err.count("\n") == 1
    assert "Prompt:" not in found.out


def test_standard_input_that_is_no_text(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe text")))
    with pytest.raises(SystemExit) as ended:
        cli.main((*EVALUATE, "--texts", "-"))
    assert ended.value.code == 2
    assert "--texts -: 'utf-8' codec can't decode" in capsys.readouterr().err


def test_a_long_text_is_read_without_a_warning(capfd):
    import mlx_h2o

    tokenizer = mlx_h2o.load("demo")[1]
    assert len(tokenizer.encode("a word and another " * 2000)) > 4096
    assert "maximum" not in capfd.readouterr().err
