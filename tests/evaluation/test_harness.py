"""lm-evaluation-harness with our unbounded caches has the same numbers as mlx_lm's own wrapper."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fetched_models import fetched
from mlx_h2o import demo

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is missing: pip install '.[eval]'")
tasks = pytest.importorskip("lm_eval.tasks")
MODEL = "smollm2-135m-instruct"
ITEMS = 100

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of fifty beginnings of a text, each with two ends, and its items."""
    folder, words = tmp_path_factory.mktemp("task"), demo.text().split()
    step = (len(words) - 60) // (ITEMS // 2)
    found = [words[step * item : step * item + 60] for item in range(ITEMS // 2)]
    items = [
        {"text": " ".join(one[:40]), "ends": [f" {one[40]} {one[41]}", f" {one[58]}"], "label": 0}
        for one in found
    ]
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, items)))
    (folder / "task.yaml").write_text(
        "task: ends\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {folder / 'items.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ntarget_delimiter: ''\n"
        'doc_to_text: "{{text}}"\ndoc_to_choice: "{{ends}}"\ndoc_to_target: label\n'
        "metric_list:\n  - metric: acc\n"
    )
    return folder


def evaluated(model: Any, folder: Path) -> list[float]:
    """The log likelihoods of all items."""
    manager = tasks.TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=["ends"], task_manager=manager, bootstrap_iters=0)
    return [float(end[0][0]) for one in found["samples"]["ends"] for end in one["resps"]]


def test_unbounded_caches_have_the_numbers_of_mlx_lm(task: Path) -> None:
    from mlx_lm.evaluate import MLXLM

    from mlx_h2o.evaluation.harness import MLXH2O

    ours, stock = MLXH2O(fetched(MODEL), max_kv_size="none"), MLXLM(fetched(MODEL))
    stock._model = ours._model  # in float32, as load makes it on a CPU
    found, expected = evaluated(ours, task), evaluated(stock, task)
    assert len(found) == ITEMS
    assert found == pytest.approx(expected, abs=1e-4)

    parts = demo.text()[:300], demo.text()[5000:5300], "A"  # one token has nothing to predict
    texts = [SimpleNamespace(args=(text,)) for text in parts]
    found, expected = (one.loglikelihood_rolling(texts) for one in (ours, stock))
    assert found == pytest.approx(expected, abs=2e-3)

    def asked(until: Any) -> list[Any]:
        return [SimpleNamespace(args=(one, {"until": until, "max_gen_toks": 8})) for one in parts]

    assert ours.generate_until(asked(["\n\n"])) == stock.generate_until(asked(["\n\n"]))
    whole = ours.generate_until(asked([]))  # as IFEval asks; others give one text
    assert ours.generate_until(asked("e ")) == [one.partition("e ")[0] for one in whole] != whole

    given = f"pretrained={fetched(MODEL)},max_kv_size=24,prefill_step_size=32"
    small = MLXH2O.create_from_arg_string(given)
    pairs = [SimpleNamespace(args=(demo.text()[at : at + 400], " the")) for at in (0, 5000)]
    cut, whole = (one.loglikelihood(pairs) for one in (small, stock))
    assert [one[0] for one in cut] != pytest.approx([one[0] for one in whole], abs=1e-2)
    for wrong in ("max_kv_size", "policies", "prefill_step_size"):  # before any task is read
        with pytest.raises(ValueError, match=wrong):
            MLXH2O.create_from_arg_string(f"pretrained=demo,{wrong}=0")
