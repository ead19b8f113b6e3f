"""`ddl evaluate`: the losses of the run itself, tasks with known answers, and one line for what cannot be done."""

import dataclasses
import json
import math
from pathlib import Path
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ddl_jax import evaluate, training
from ddl_jax.config import Config
from ddl_jax.data import Windows, encode_documents, load_documents, prepare, split
from ddl_jax.errors import InputError
from ddl_jax.evaluation import paper
from ddl_jax.evaluation.report import show
from ddl_jax.published import accuracies
from ddl_jax.run import load_run
from tests.evaluation.test_scores import direct
from tests.training.runs import ROOT, environment, metrics, python

# The same float32 operations, summed otherwise. Seen: 2e-7.
CLOSE = 2e-6

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
fewshot_split: test
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture(scope="module")
def run(run_of_eight):
    return load_run(run_of_eight)


@pytest.fixture(scope="module")
def tasks(run, tmp_path_factory):
    """A folder of two tasks. The model answers three of four questions of one, and half of them by length."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = [("abcd", ["ef", "zz"]), ("bcd", ["aa", "mn"]), ("", ["q", "fghij"]), ("hello", ["xyz", "w"])]
    documents = []
    for number, (text, choices) in enumerate(questions):
        before = list(text.encode()) or [256]
        logprobs = [direct(run, before + list(choice.encode()), len(choice)).logprob for choice in choices]
        best = int(np.argmax(logprobs))
        label = 1 - best if number == 1 else best
        documents.append({"text": text, "choices": choices, "label": label, "logprobs": logprobs})
    (folder / "toy.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "toy.yaml").write_text(TASK.format(name="toy", data=folder / "toy.jsonl"))
    (folder / "all.yaml").write_text("group: all\ntask: [toy]\n")
    (folder / "gone.yaml").write_text(TASK.format(name="gone", data=folder / "gone.jsonl"))
    normalised = [
        np.argmax([p / len(c) for p, c in zip(d["logprobs"], d["choices"], strict=True)]) == d["label"]
        for d in documents
    ]
    return folder, float(np.mean(normalised))


def result(capsys, *arguments) -> dict:
    assert evaluate.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def logged(run_dir: Path) -> dict:
    return metrics(Config(run_dir=str(run_dir)))[-1]


@pytest.mark.parametrize("batch_size", [1, 7])
def test_the_loss_that_training_logged(run_of_eight, capsys, batch_size):
    """On one device, of a run of eight; over the training's batches, in batches of any size."""
    found = result(capsys, "--run", run_of_eight, "--batches", 2, "--batch-size", batch_size)
    line = logged(run_of_eight)
    assert found["step"] == line["step"] == 8 and found["tasks"] == {}
    assert found["validation_loss"] == pytest.approx(line["validation_loss"], rel=CLOSE)
    assert found["bits_per_byte"] == pytest.approx(line["validation_bits_per_byte"], rel=CLOSE)
    assert found["perplexity"] == pytest.approx(math.exp(found["validation_loss"]))


def test_all_of_the_held_out_text_or_some_batches(run_of_eight, run, capsys, tmp_path):
    """Of a run whose held-out text is longer than its training looks at."""
    config = run.config
    moved = moved_run(run_of_eight, tmp_path, copies=40)
    _, documents = split(load_documents(moved_config(config, tmp_path).data), config.data.validation_fraction)
    tokens = encode_documents(documents, run.tokenizer)
    windows = Windows(tokens, 16)
    assert len(windows) > 2 * 8
    found = result(capsys, "--run", moved, "--data.paths", f"{tmp_path}/corpus/*.txt")
    assert found["validation_tokens"] == 16 * len(windows)
    rows = windows(np.arange(len(windows)))
    nats = [direct(run, [*t.tolist(), int(y[-1])], 16).logprob for t, y in zip(*rows.values(), strict=True)]
    assert found["validation_loss"] == pytest.approx(-sum(nats) / found["validation_tokens"], rel=CLOSE)
    some = result(capsys, "--run", moved, "--data.paths", f"{tmp_path}/corpus/*.txt", "--batches", 2)
    assert some["validation_tokens"] == 16 * 2 * 8
    assert some["validation_loss"] != found["validation_loss"]


def moved_config(config: Config, folder: Path) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, paths=(f"{folder}/corpus/*.txt",)))


def moved_run(run: Path, folder: Path, copies: int = 1) -> Path:
    """A copy of a run, whose text lies elsewhere, each document so many times."""
    moved = Path(shutil.copytree(run, folder / "run"))
    (folder / "corpus").mkdir()
    for file in (run.parent / "corpus").glob("*.txt"):
        (folder / "corpus" / file.name).write_text(file.read_text() * copies)
    config = moved_config(load_run(run).config, folder)
    record = json.loads((moved / "data.json").read_text())
    (moved / "data.json").write_text(json.dumps(record | prepare(config.data, 16, moved).record()))
    text = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(text.replace(str(run.parent), "/nowhere"))
    return moved


def test_text_that_is_gone_or_another(run_of_eight, capsys, tmp_path, tasks):
    moved = moved_run(run_of_eight, tmp_path)
    with pytest.raises(InputError, match="data.paths.* matches no file.*--data.paths says where.*--no-validation goes"):
        evaluate.main(["--run", str(moved)])
    paths = ["--data.paths", f"[{tmp_path}/corpus/*.txt]"]
    assert result(capsys, "--run", moved, *paths)["validation_loss"] > 0
    (tmp_path / "corpus" / "0.txt").write_text("another text, one of which the run knows nothing")
    with pytest.raises(InputError, match="has another text_sha256 .* than when the run"):
        evaluate.main(["--run", str(moved), *paths])
    found = result(capsys, "--run", moved, "--no-validation", "--tasks", "toy", "--include-path", tasks[0])
    assert found["validation_loss"] is found["perplexity"] is found["bits_per_byte"] is None
    assert found["tasks"]["toy"]["acc"] == 0.75


def test_a_task_with_known_answers(run_of_eight, capsys, tasks):
    folder, normalised = tasks
    found = result(capsys, "--run", run_of_eight, "--tasks", "toy", "--include-path", folder, "--no-validation")
    toy = found["tasks"]["toy"]
    assert (toy["acc"], toy["acc_norm"], toy["samples"], toy["num_fewshot"]) == (0.75, normalised, 4, 0)
    arguments = ["--run", str(run_of_eight), "--tasks", "toy", "--include-path", str(folder), "--batches", "1"]
    assert evaluate.main([*arguments, "--num-fewshot", "1", "--limit", "2"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if " acc " in line)
    assert line.split()[:4] == ["toy", "1", "2", "acc"]


def test_eight_devices_give_the_numbers_of_one(run_of_eight, capsys, tasks):
    arguments = ["--run", str(run_of_eight), "--tasks", "toy", "--include-path", str(tasks[0])]
    code = "import jax, sys; jax.config.update('jax_num_cpu_devices', 8)\n"
    code += "jax.config.update('jax_default_matmul_precision', 'highest')\n"
    code += "jax.config.update('jax_disable_most_optimizations', True)\n"
    code += "from ddl_jax.evaluate import main; sys.exit(main(sys.argv[1:]))"
    ended = python(code, *arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    assert "\n" not in ended.stderr.strip()
    one, eight = result(capsys, *arguments), json.loads(ended.stdout)
    assert eight["validation_loss"] == pytest.approx(one["validation_loss"], rel=CLOSE)
    assert eight["tasks"] == one["tasks"]


REFUSED = {
    "no run": ([], "--run is missing; name the run_dir"),
    "no folder": (["--run", "nowhere"], "run_dir 'nowhere' is not a folder"),
    "batches": (
        ["--run", "x", "--batches", "0"],
        "--batches '0' must be a whole number from 1 to 999999999; nearest: 1",
    ),
    "many batches": (["--run", "x", "--batches", "9" * 5000], "from 1 to 999999999; nearest: 999999999"),
    "batch size": (["--run", "x", "--batch-size", "many"], "--batch-size 'many' must be a whole number"),
    "shots": (["--run", "x", "--tasks", "a", "--num-fewshot", "-1"], "--num-fewshot '-1' must be"),
    "no names": (["--run", "x", "--tasks", ","], "names no task"),
    "no tasks": (["--run", "x", "--limit", "3"], "--limit is of tasks; name them with --tasks"),
    "nothing": (["--run", "x", "--no-validation"], "leaves nothing to do"),
    "paper and more": (["--run", "x", "--tasks", "paper,sciq"], "stands for the paper's eight tasks"),
    "paper's shots": (["--run", "x", "--tasks", "paper", "--num-fewshot", "1"], "zero- and one-shot"),
    "no include": (["--run", "x", "--tasks", "a", "--include-path", "nowhere"], "--include-path 'nowhere' is not a"),
    "misspelt": (["--run", "x", "--task", "a"], "unknown option '--task'; did you mean '--tasks'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case):
    arguments, expected = REFUSED[case]
    with pytest.raises(InputError) as refused:
        evaluate.main(arguments)
    assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_a_local_data_set_that_is_gone(run_of_eight, tasks):
    arguments = ["--run", str(run_of_eight), "--include-path", str(tasks[0]), "--no-validation"]
    with pytest.raises(InputError, match="--tasks 'gone' cannot be loaded: .*gone.jsonl") as refused:
        evaluate.main([*arguments, "--tasks", "toy,gone"])
    assert "\n" not in str(refused.value)


def test_a_task_that_is_none_is_not_told_all_thousands():
    from ddl_jax.evaluation.tasks import _meant

    known = ["glue", "semantic_meaning", "sciq"]
    assert _meant("glue2", known) == "; did you mean 'glue'?"
    assert _meant("zqzqzq", known) == "; https://github.com/EleutherAI/lm-evaluation-harness lists them"


def test_too_many_solved_examples_and_a_task_named_twice(run_of_eight, tasks):
    arguments = ["--run", str(run_of_eight), "--include-path", str(tasks[0]), "--no-validation", "--tasks"]
    with pytest.raises(InputError, match="--num-fewshot 4: task 'toy' has 4 solved examples.*; nearest: 3"):
        evaluate.main([*arguments, "toy", "--num-fewshot", "4"])
    with pytest.raises(InputError, match="--tasks 'toy,all': Duplicate task 'toy'.*; name each once"):
        evaluate.main([*arguments, "toy,all"])


def test_where_there_is_no_hub_it_says_at_once_what_to_fetch(run_of_eight, tmp_path):
    """Also what no task is called."""
    command = [sys.executable, "-m", "ddl_jax", "evaluate", "--run", str(run_of_eight), "--tasks", "paper"]
    away = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment() | away, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("error: the data sets of arc_challenge, arc_easy, ")
    program = ended.stderr.partition('python -c "')[2].partition('"')[0]
    assert program.startswith("from datasets import load_dataset as load; ")
    loads = [
        ("allenai/ai2_arc", "ARC-Challenge"), ("allenai/ai2_arc", "ARC-Easy"), ("Rowan/hellaswag",),
        ("allenai/openbookqa", "main"), ("baber/piqa",), ("allenai/sciq",), ("lighteval/siqa",),
        ("allenai/winogrande", "winogrande_xl"),
    ]  # fmt: skip
    called = []
    exec(program.partition("; ")[2], {"load": lambda *names: called.append(names)})
    assert called == loads
    assert "HF_DATASETS_OFFLINE=1" in ended.stderr and str(tmp_path) in ended.stderr


def paper_result(config) -> dict:
    metrics = {task: {"acc": 0.25, "acc_norm": 0.5} for task in paper.TASKS}
    metrics["winogrande"] = metrics["social_iqa"] = {"acc": 0.75}
    rows = {name: paper.figures(metrics) for name in paper.SHOTS.values()}
    return {
        "run": "r", "step": 3, "validation_loss": None, "perplexity": None, "bits_per_byte": None, "tasks": {},
        "paper": rows | {"published": {n: paper.published_rows(config, k) for k, n in paper.SHOTS.items()}},
    }  # fmt: skip


def test_the_papers_columns_and_rows(run, capsys):
    small = dataclasses.replace(run.config.model, layers=12, width=768, heads=6, head_dim=128)
    found = paper_result(small)
    assert found["paper"]["one_shot"]["average"] == pytest.approx((6 * 50 + 2 * 75) / 8)
    assert found["paper"]["published"]["one_shot"] == accuracies("small", 1)
    show(found, small)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (run_row, _), (cc_row, cc_later) = (
        [line for line in lines if line[: len(name)] == name] for name in (["this", "run"], ["cc"])
    )
    assert run_row[2:] == ["50.00"] * 6 + ["75.00", "75.00", "56.25"]
    assert cc_row[1:] == [f"{figure:.2f}" for figure in accuracies("small", 0)["cc"].values()]
    assert cc_later[1:] == [f"{figure:.2f}" for figure in accuracies("small", 1)["cc"].values()]
    show(paper_result(run.config.model), run.config.model)
    assert "No published rows beside it" in capsys.readouterr().out


def test_names_are_printed_as_they_are(run, capsys):
    result = {"run": "runs/[red]a[/b]", "step": 8, "validation_loss": None, "tasks": {"[bold]toy": {"acc": 0.5}}}
    show(result, run.config.model)
    shown = capsys.readouterr().out
    assert shown.startswith("runs/[red]a[/b], step 8\n") and "[bold]toy" in shown


def test_the_eight_tasks_are_the_papers_columns_in_order():
    assert [*paper.TASKS, paper.AVERAGE] == list(accuracies("small", 0)["baseline"])


def test_the_readmes_ten_lines(run_of_eight, tasks, capsys, monkeypatch):
    """With a run that is trained already, and a task that is here."""
    readme = (ROOT / "README.md").read_text()
    (code,) = (block for block in re.findall("```python\n(.*?)```", readme, re.DOTALL) if "load_run" in block)
    assert len([line for line in code.splitlines() if line]) == 10
    trained = []
    monkeypatch.setattr(training, "train", trained.append)
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks[0]), include_defaults=False)
    code = code.replace("runs/first", str(run_of_eight)).replace('["sciq"]', '["toy"], task_manager=manager')
    exec(code, {"manager": manager})
    assert trained == [Config(run_dir=str(run_of_eight))]
    out = capsys.readouterr().out
    loss = float(re.search(r"loss=([\d.]+)", out)[1])
    assert loss == pytest.approx(logged(run_of_eight)["validation_loss"], rel=CLOSE)
    assert re.search("'acc,none': .*0.75", out)
