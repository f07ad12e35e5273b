"""Calibration: the documents, what is measured, interruptions, the command, the file in use."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import mlx.core as mx
import mlx_lm.server
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o import H2OConfig, Profile, calibrate, cli
from mlx_h2o.commands import calibrate as command
from mlx_h2o.evaluation.arms import Footprint, resolve
from mlx_h2o.evaluation.strategies import parse
from mlx_h2o.lm import calibration
from mlx_h2o.lm.calibration import planted_documents
from mlx_h2o.lm.hosting import hosting
from mlx_h2o.lm.profile import fingerprint
from models import tiny
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

TEXT = " ".join(f"t{token}" for token in random_prompt(600))
GIVEN = {"length": 320, "documents": 1, "policy": "keydiff"}


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3()


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A profile that was measured without an interruption, and its file."""
    file = tmp_path_factory.mktemp("whole") / "profile"
    return calibrate(model, tiny_tokenizer(), TEXT, file=file, **GIVEN), file


class InterruptError(Exception):
    pass


def after(runs: int):
    """Progress that is interrupted once so many runs were begun."""
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) > runs:
            raise InterruptError

    return progress


class Words:
    """A tokenizer of "w0" to "w999", and of any other word, digit or sign as it comes."""

    def __init__(self) -> None:
        self.others: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        found = re.findall(r"w\d+|[A-Za-z]+|\S|\n", text)
        return [
            int(part[1:])
            if re.fullmatch(r"w\d+", part)
            else self.others.setdefault(part, 1000 + len(self.others))
            for part in found
        ]

    def decode(self, token_ids: list[int]) -> str:
        names = {number: part for part, number in self.others.items()}
        return " ".join(names.get(token, f"w{token}") for token in token_ids)

    def get_vocab(self) -> dict[str, int]:
        return {}


def words(count: int) -> str:
    return " ".join(f"w{number}" for number in range(count))


def test_documents_repeat_what_the_first_half_says():
    tokenizer = Words()
    found, again = planted_documents(tokenizer, words(1000), 640, 3)
    assert found.shape == again.shape == (3, 640)
    assert {int(line[0]) for line in found} == {0, 260, 520}  # from all over the text
    for line, mask in zip(found.tolist(), again, strict=True):
        first = {tuple(line[place - 2 : place + 1]) for place in range(2, 320)}
        assert not mask[:320].any() and 100 < mask.sum() < 200
        for place in np.flatnonzero(mask):
            assert tuple(line[place - 2 : place + 1]) in first
        for fact in (r"secret \w+( \d){4} \.", r"The \w+ is [a-z]+ \."):
            early, late = (
                {one.group() for one in re.finditer(fact, tokenizer.decode(half))}
                for half in (line[:320], line[320:])
            )
            assert early == late and len(early) == 2
        new = [token for token in line if token < 1000]
        assert len(set(new)) > 400
    np.testing.assert_array_equal(planted_documents(Words(), words(1000), 640, 3)[0], found)
    planted_documents(tokenizer, words(480), 640, 2)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_is_measured_is_what_the_layer_alone_loses(model, whole):
    """A run of its own, token by token of the definition: expected losses, half by half."""
    profile, _ = whole
    texts, again = planted_documents(tiny_tokenizer(), TEXT, 320, 1)
    tokens = mx.array(texts)
    layer, rows, share = 1, 1, 1
    size, recent = profile.rows[rows], profile.recent(profile.rows[rows], SHARES[share])
    assert (size, recent) == (20, 8)
    budgets = [H2OConfig(max_kv_size=400, policy="window"), H2OConfig(max_kv_size=18, recent_size=6,
               heavy_size=8, policy="keydiff")]  # fmt: skip
    logs = []
    for caches in (mlx_h2o.make_prompt_cache(model, 400), mlx_h2o.make_prompt_cache(
        model, budgets=budgets)):  # fmt: skip
        parts = [model(tokens[:, at : at + 4], cache=caches)[0] for at in range(0, 320, 4)]
        logits = np.array(mx.concatenate(parts), np.float64)
        logs.append(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    lost = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)[160:-1]
    repeats = again[0, 161:]
    expected = (lost[repeats].mean() + lost[~repeats].mean()) / 2
    assert expected > 1e-3
    np.testing.assert_allclose(profile.loss[layer, rows, share], expected, rtol=1e-3)


SHARES = calibration.SHARES


@pytest.mark.slow
def test_a_profile_says_what_it_is_of(model, whole):
    profile, file = whole
    assert profile.rows == (10, 20, 40, 80, 160) and profile.shares == SHARES
    assert profile.loss.shape == (2, 5, 3) and np.isfinite(profile.loss).all()
    about = profile.about
    assert (about["model"], about["fingerprint"]) == ("qwen3", fingerprint(model))
    assert about["versions"].keys() == {"mlx-h2o", "mlx", "mlx-lm"}
    assert (about["policy"], about["tokens"], about["documents"]) == ("keydiff", 320, 1)
    np.testing.assert_array_equal(Profile.load(file).loss, profile.loss)
    # The smallest windows are measured once: all shares of 10 rows are 4 or 6 recent rows.
    assert (profile.loss[:, 0, 0] == profile.loss[:, 0, 1]).all()
    caches = mlx_h2o.make_prompt_cache(model, 40, profile=file)
    assert sum(cache.config.max_kv_size for cache in caches) == 80


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("runs", [9, 1, 0])
def test_an_interrupted_calibration_goes_on(model, whole, tmp_path, runs, recwarn):
    file = tmp_path / "profile"
    with pytest.raises(InterruptError):
        calibrate(model, tiny_tokenizer(), TEXT, file=file, progress=after(runs), **GIVEN)
    assert not file.exists()
    begun = []
    calibrate(
        model, tiny_tokenizer(), TEXT, file=file, progress=lambda *of: begun.append(of), **GIVEN
    )
    assert begun[0][0] >= runs and begun[-1] == (30, 30)
    assert file.read_bytes() == whole[1].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]
    assert not recwarn.list


@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "other", [{"policy": "window"}, {"documents": 2}, {"length": 400}, {"text": TEXT[3:]}, None]
)
def test_other_settings_start_anew_and_say_so(model, tmp_path, other):
    file = tmp_path / "profile"
    with pytest.raises(InterruptError):
        calibrate(model, tiny_tokenizer(), TEXT, file=file, progress=after(2), **GIVEN)
    if other is None:
        (tmp_path / "profile.partial").write_bytes(b"damaged")
    given = {"text": TEXT} | GIVEN | (other or {})
    said = "profile.partial is of other settings: starting anew"
    with pytest.warns(UserWarning, match=said), pytest.raises(InterruptError):
        calibrate(model, tiny_tokenizer(), file=file, progress=after(0), **given)


def test_where_a_layer_loses_nothing_more_rows_are_not_tried(model, monkeypatch):
    asked = []

    def loss(self, layer, rows, recent):
        asked.append((layer, rows, recent))
        return 1.0 if layer == 0 else 0.5e-4 if rows >= 40 else 0.01

    monkeypatch.setattr(calibration._Run, "loss", loss)
    found = calibrate(model, tiny_tokenizer(), TEXT, **GIVEN)
    recents = {10: (4, 6), 20: (4, 8, 16), 40: (4, 18, 36), 80: (10, 38, 76), 160: (20, 78, 156)}
    expected = [(0, rows, recent) for rows in recents for recent in recents[rows]]
    assert [one for one in asked if one[0] == 0] == expected
    assert {rows for layer, rows, _ in asked if layer == 1} == {10, 20, 40}
    np.testing.assert_array_equal(found.loss[1, 2:], np.float32(0.5e-4))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"text": ""}, "the text has 0 tokens, expected at least 240 for documents of 320"),
        ({"text": "t3 " * 239}, "the text has 239 tokens"),
        ({"length": 319}, "found 1 documents of 319 tokens"),
        ({"documents": 0}, "found 0 documents"),
        ({"policy": "best"}, "policy is 'best'"),
    ],
)
def test_what_cannot_be_measured(model, given, text):
    with pytest.raises(ValueError, match=text):
        calibrate(model, tiny_tokenizer(), **{"text": TEXT} | GIVEN | given)


def test_a_model_whose_attention_is_not_called_needs_a_policy_without_scores():
    with pytest.raises(ValueError, match="gemma2 does not call mlx_lm's attention function"):
        calibrate(tiny.build("gemma2"), tiny_tokenizer(), TEXT, **GIVEN | {"policy": "merge"})


@pytest.mark.exhaustive
def test_latent_attention_is_measured(monkeypatch):
    monkeypatch.setattr(calibration, "PARTS", (8,))
    model = tiny.build("deepseek_v3", num_hidden_layers=2)
    found = calibrate(model, tiny_tokenizer(), TEXT, **GIVEN | {"policy": "merge"})
    assert found.loss.shape == (2, 1, 3) and (found.loss > 0).any()


@pytest.fixture
def tiny_model(model, monkeypatch):
    """Commands load the tiny model."""

    def load(name):
        if name != "tiny":
            raise ValueError(f"[load] {name} is not a directory")
        return model, tiny_tokenizer()

    monkeypatch.setattr(command, "load", load)


def calibrated(tmp_path, **given) -> list[str]:
    text = tmp_path / "text"
    text.write_text(TEXT)
    flags = {"model": "tiny", "text": text, "output": tmp_path / "out", "length": 320}
    flags |= {"documents": 1, "policy": "keydiff"} | given
    return ["calibrate", *[f"--{name}={value}" for name, value in flags.items()]]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_command_writes_the_profile(tiny_model, whole, tmp_path, capsys):
    (tmp_path / "out.partial").write_text("damaged")
    assert cli.main(calibrated(tmp_path)) == 0
    assert (tmp_path / "out").read_bytes() == whole[1].read_bytes()
    said = capsys.readouterr()
    assert "--profile" in said.out
    assert "is of other settings: starting anew" in " ".join(said.err.split())
    assert "30/30" in said.err


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"text": "/no/such/file"}, "/no/such/file"),
        ({"text": "."}, "directory"),
        ({"text": "empty"}, "the text has 0 tokens"),
        (
            {"output": "/no/such/folder/file"},
            "/no/such/folder/file is not a file in an existing directory",
        ),
        ({"output": "."}, "is not a file in an existing directory"),
        ({"length": 100}, "of 100 tokens"),
        ({"model": "/none"}, "/none is not a directory"),
        ({"length": 900}, "the text has 600 tokens, expected at least 675"),
    ],
)
def test_mistakes_are_told_in_a_line(tiny_model, tmp_path, monkeypatch, given, text, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("")
    assert cli.main(calibrated(tmp_path, **given)) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("mlx_h2o calibrate: ") and text in said[-1]
    assert "Traceback" not in "".join(said)


def test_an_interruption_keeps_what_was_measured(tiny_model, tmp_path, monkeypatch, capsys):
    measure, runs = calibration._Run.loss, []

    def loss(self, *given):
        runs.append(given)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return measure(self, *given)

    monkeypatch.setattr(calibration._Run, "loss", loss)
    assert cli.main(calibrated(tmp_path)) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    assert np.isfinite(Profile.load(tmp_path / "out.partial", whole=False).loss).sum() >= 3


@pytest.fixture(scope="module")
def demo_profile(tmp_path_factory):
    """Of the demo model, made up: the fifth layer needs far rows."""
    model, _ = mlx_h2o.load("demo")
    losses = np.full((6, 2, 3), [[[0.002], [0.0005]]], np.float32)
    losses[4] = [[0.9], [0.1]]
    about = {"model": "qwen3", "fingerprint": fingerprint(model), "policy": "merge"}
    about |= {"tokens": 320, "sink_size": 4, "recent_size": 4}
    file = tmp_path_factory.mktemp("profile") / "demo"
    Profile(losses, (20, 60), SHARES, about).save(file)
    return str(file)


@pytest.mark.exhaustive
def test_commands_take_the_profile(demo_profile, tmp_path, capsys):
    prompt = ["--model", "demo", "--prompt", mlx_h2o.demo.text()[:600], "--profile", demo_profile]
    assert cli.main(["generate", *prompt, "--max-kv-size", "30", "-m", "3"]) == 0
    assert "KV cache: merge, 6 of 6 layers evict, 8" in capsys.readouterr().out
    given = f"--model demo --max-kv-size 30 -p 60 -g 4 -n 1 -b 2 --profile {demo_profile}"
    assert cli.main(["benchmark", *given.split()]) == 0
    text, file = tmp_path / "text", tmp_path / "json"
    text.write_text(mlx_h2o.demo.text()[:900])
    given = f"--model demo --text {text} --length 100 --documents 1 --no-controls --json {file}"
    found = {}
    for more in ((), ("--profile", demo_profile)):
        size = ("--max-kv-size", "30", "--policy", "merge")
        assert cli.main(["evaluate", *given.split(), *size, *more]) == 0
        said = json.loads(file.read_text())
        found |= {one["name"]: one["bytes"] for one in said["strategies"]}
        found |= {
            f"loss of {one['strategy']}": one["value"]
            for one in said["summary"]
            if one["measure"] == "loss"
        }
    alike, shared = "merge:30", f"merge:30:profile={Path(demo_profile).name}"
    assert found[alike] == pytest.approx(found[shared], rel=0.1)
    assert found[f"loss of {alike}"] != found[f"loss of {shared}"]


def test_bytes_are_kept_where_layers_differ(demo_profile):
    footprint = Footprint(mlx_h2o.load("demo")[0])
    for limit in (100_000, 400_000):
        arm = resolve(footprint, parse(f"merge:bytes={limit}:profile={demo_profile}"), 4000)
        rows = [cache.config.max_kv_size for cache in arm.make(0)]
        assert max(rows) > 2 * arm.rows or len(set(rows)) > 1
        assert 0.95 * limit < arm.nbytes <= limit


@pytest.mark.parametrize("name", ["generate", "evaluate", "chat", "server"])
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--profile /no/such/file", "/no/such/file"),
        ("--profile {text}", "is no safetensors file, expected a profile"),
        ("--profile {profile} --policy keydiff", "--policy must be merge"),
        ("--profile {profile} --budgets b.json", "--profile with --budgets"),
    ],
)
def test_profiles_that_cannot_be_used(name, flags, text, demo_profile, tmp_path, capsys):
    (tmp_path / "text").write_text("A text that is no profile.")
    flags = flags.format(profile=demo_profile, text=tmp_path / "text")
    given = [name, "--model", "demo", *flags.split()]
    with pytest.raises(SystemExit) as end:
        cli.main(given + (["--text", str(tmp_path / "text")] if name == "evaluate" else []))
    assert end.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_a_profile_of_another_model_is_refused(name, whole, tmp_path, capsys):
    given = [name, "--model", "demo", "--profile", str(whole[1]), "--max-kv-size", "30"]
    (tmp_path / "text").write_text(mlx_h2o.demo.text()[:600])
    given += ["--text", str(tmp_path / "text")] if name == "evaluate" else ["--prompt", "x"]
    try:
        status = cli.main(given)
    except SystemExit as end:
        status = end.code
    assert status == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "is of the model" in line]
    assert "with 2 evicting layers, expected qwen3" in said


@pytest.mark.slow
def test_the_server_is_told_before_the_first_request(whole):
    with hosting(H2OConfig(), profile=Profile.load(whole[1])):
        given = argparse.Namespace(
            model="demo", draft_model=None, adapter_path=None, trust_remote_code=False,
            chat_template=None, use_default_chat_template=False, pipeline=False,
        )  # fmt: skip
        provider = mlx_lm.server.ModelProvider(given)
        with pytest.raises(ValueError, match="with 2 evicting layers, expected qwen3"):
            provider.load("demo")
