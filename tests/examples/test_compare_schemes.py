"""compare_schemes.py from the command line: what it writes, that it goes on where it was stopped, and its errors."""

import csv
import json
import shutil
import statistics
from pathlib import Path

import compare_schemes
import numpy as np
import pytest
import torch
from compare_schemes import Candidate, CompareArguments, PositionTrainingArguments
from matplotlib.text import Text
from scheme_labels import parse_overrides
from scripts import save_checkpoint, tokens_kept
from transformers import BertConfig

import hf_posenc


TINY = ["--max_steps", "3", "--logging_steps", "1", "--use_cpu", "true", "--disable_tqdm", "true"]
YARN = 'rope:position_rope_scaling={"rope_type": "yarn", "factor": 4.0},position_base=500'
FILES = {"results.json", "results.csv", "results.md", "quality_and_cost.png", "learning_curves.png", "settings.json"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    subjects = ["the cat", "a small dog", "my old friend", "the tall tree", "every child"]
    blocks = [f"On that day, {a} saw {b}, and we did not. Then {b} went home." for a in subjects for b in subjects]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(blocks), encoding="utf-8")
    return file


@pytest.fixture
def punctuation(text, tmp_path) -> tuple[Path, list]:
    """An output folder, and the options of a comparison that writes into it and starts from a checkpoint, the first of them."""
    checkpoint, folder = save_checkpoint(tmp_path / "checkpoint", text.read_text()), tmp_path / "out"
    options = ["--model_name_or_path", checkpoint, "--train_file", text, "--output_dir", folder, "--length", "24"]
    return folder, options


@pytest.mark.slow
def test_punctuation_from_a_checkpoint_goes_on_where_it_was_stopped(punctuation, text, run_main, capsys):
    folder, options = punctuation
    options += [
        "--cost_rounds",
        "3",
        *TINY,
        "--schemes",
        "none",
        "deberta:position_buckets=8,position_max_distance=16",
    ]

    run_main(compare_schemes, *options, "--seeds", "1")
    runs = {file.name: file.read_bytes() for file in (folder / "runs").iterdir()}
    assert len(runs) == 2
    run_main(compare_schemes, *options, "--seeds", "1", "2")
    assert len([*(folder / "runs").iterdir()]) == 4
    assert all((folder / "runs" / name).read_bytes() == content for name, content in runs.items()), "done again"

    assert FILES <= {file.name for file in folder.iterdir()}
    results = json.loads((folder / "results.json").read_text())
    assert [(run["scheme"], run["seed"]) for run in results["runs"]].count(("none", 2)) == 1
    with (folder / "results.csv").open() as opened:
        lines = [*csv.DictReader(opened)]
    assert len(lines) == 4
    for row in results["summary"]:
        own = [float(line["f1"]) for line in lines if line["scheme"] == row["scheme"]]
        assert row["quality"]["24"] == pytest.approx([statistics.fmean(own), statistics.stdev(own)])
        assert row["relative_cost"] > 0
        assert f"| {row['scheme']} | {row['quality']['24'][0]:.3f} ± " in (folder / "results.md").read_text()
    by_scheme = {row["scheme"]: row for row in results["summary"]}
    assert by_scheme["none"]["position_parameters"] == 0
    assert by_scheme["deberta:position_buckets=8,position_max_distance=16"]["position_parameters"] == 2 * 8 * 32
    assert len(results["runs"][0]["learning_curve"]) == 3

    with pytest.raises(SystemExit, match="learning_rate.* is .* there and .* here"):
        run_main(compare_schemes, *options, "--seeds", "1", "--learning_rate", "1e-5")


@pytest.mark.slow
def test_masked_lm_from_scratch_is_evaluated_beyond_the_training_length(text, tmp_path, run_main):
    options = [
        "--task",
        "masked_lm",
        "--train_file",
        text,
        "--eval_file",
        text,
        "--length",
        "16",
        "--vocabulary",
        "80",
    ]
    options += ["--eval_lengths", "16", "32", "--seeds", "1", "--schemes", "t5", "absolute", "--cost_rounds", "0"]
    options += ["--config_overrides", "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"]
    options += ["--save_strategy", "steps", "--save_steps", "3"]
    run_main(compare_schemes, *options, *TINY, "--output_dir", tmp_path)
    assert tokens_kept(tmp_path / "checkpoint-3") == {32}, "the last scheme's table ends there"
    results = json.loads((tmp_path / "results.json").read_text())
    for run in results["runs"]:
        assert run["metrics"].keys() == {"16", "32"}
        for metrics in run["metrics"].values():
            # Nothing is learned in three steps: about the loss of guessing.
            assert 0.7 < metrics["masked_loss"] / torch.log(torch.tensor(80.0)).item() < 1.3
    assert "masked_loss at 32" in (tmp_path / "results.md").read_text()


@pytest.mark.slow
def test_rates_are_chosen_on_text_that_is_neither_trained_on_nor_scored(punctuation, text, run_main, monkeypatch):
    folder, options = punctuation
    options += ["--cost_rounds", "0", *TINY, "--position_learning_rates", "1e-4", "0.5", "0.9", "--rate_steps", "2"]
    scale = "sinusoidal:position_learn_amplitude=true"
    options += ["--schemes", "none", "t5", "relative:position_learning_rate=0.2", scale]
    trained = compare_schemes.train_and_evaluate
    seen = []

    def record(candidate, config, seed, task, training, *more):
        """Half the rate: as good as one can be, in the development runs."""
        run = trained(candidate, config, seed, task, training, *more)
        seen.append((candidate.label, candidate.position_learning_rate, training.max_steps, task))
        if candidate.position_learning_rate == 0.5:
            run.metrics["24"]["f1"] = 1.0
        return run

    monkeypatch.setattr(compare_schemes, "train_and_evaluate", record)
    run_main(compare_schemes, *options, "--seeds", "1", "2")
    assert [one[:3] for one in seen] == [
        *[("t5", rate, 2) for rate in (1e-4, 0.5, 0.9)],
        *[("none", None, 3), ("t5", 0.5, 3), ("relative:position_learning_rate=0.2", 0.2, 3), (scale, 1e-4, 3)] * 2,
    ]
    runs = json.loads((folder / "results.json").read_text())["runs"]
    rates = {run["scheme"]: run["position_learning_rate"] for run in runs}
    assert rates["t5"] == 0.5 and rates["relative:position_learning_rate=0.2"] == 0.2

    def texts(examples: list[dict]) -> set[tuple[int, ...]]:
        return {tuple(example["input_ids"]) for example in examples}

    development, task = seen[0][-1], seen[-1][-1]
    judged = texts(development.evaluate_on[24])
    assert judged and judged <= texts(task.train)
    assert not judged & texts(development.train) and not judged & texts(task.evaluate_on[24])

    seen.clear()
    run_main(compare_schemes, *options, "--seeds", "1", "2")
    assert not seen, "tried again"

    # Where the highest turns out the best, one as much above it is tried, and runs at another rate are made again.
    for file in (folder / "rates" / "runs").glob("t5-0.9-*"):
        run = json.loads(file.read_text())
        run["metrics"]["24"]["f1"] = 1.1
        file.write_text(json.dumps(run))
    run_main(compare_schemes, *options, "--seeds", "1")
    assert [one[:2] for one in seen] == [("t5", 2.0), ("t5", 0.9)]
    assert json.loads((folder / "runs" / "t5-seed1.json").read_text())["position_learning_rate"] == 0.9


@pytest.mark.slow
def test_a_learning_rate_of_all_is_chosen_for_what_has_none_of_positions(punctuation, run_main, monkeypatch):
    folder, options = punctuation
    options += ["--cost_rounds", "0", *TINY, "--learning_rates", "1e-4", "2e-4", "--rate_steps", "1", "--seeds", "1"]
    run_main(compare_schemes, *options, "--schemes", "absolute", "none:learning_rate=1e-3")
    runs = {run.scheme: run for run in compare_schemes.read_runs(folder)}
    tried = {run.learning_rate: run.metrics["24"]["f1"] for run in compare_schemes.read_runs(folder / "rates")}
    assert {1e-4, 2e-4} <= {*tried} <= {1e-4, 2e-4, 4e-4}
    assert tried[runs["absolute"].learning_rate] == max(tried.values())
    assert runs["none:learning_rate=1e-3"].learning_rate == 1e-3


@pytest.mark.slow
def test_marks_of_documents_and_memory_are_recorded(punctuation, run_main):
    folder, options = punctuation
    run_main(compare_schemes, *options, "--cost_rounds", "0", *TINY, "--seeds", "1", "--schemes", "none", "absolute")
    for run in compare_schemes.read_runs(folder):
        found, wrong, missed = map(sum, zip(*run.documents["24"]))
        assert run.metrics["24"]["f1"] == pytest.approx(2 * found / max(2 * found + wrong + missed, 1))
        assert len(run.documents["24"]) > 1 and found + missed > 0
        assert run.kept_bytes > 0 and run.seconds > run.train_seconds


def test_marks_are_counted_document_by_document():
    # Labels: nothing, comma, full stop; the first document has two examples.
    labels = np.array([[0, 1, -100], [2, 2, 0], [1, 0, 0]])
    predicted = np.array([[1, 1, 2], [1, 0, 0], [1, 0, 2]])
    counts = compare_schemes.marks_by_document(np.eye(3)[predicted], labels, [2, 1])
    assert counts == [[1, 2, 2], [1, 1, 0]]


def test_positions_begin_anywhere_up_to_the_offset_in_training_alone(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        compare_schemes.ScriptTrainer, "training_step", lambda self, model, inputs, *rest: seen.append(inputs)
    )
    trainer = object.__new__(compare_schemes.OffsetTrainer)
    inputs = {"input_ids": torch.zeros(500, 4, dtype=torch.long)}
    trainer.training_step(None, inputs)
    assert "position_ids" not in seen.pop()
    trainer.offset = 3
    trainer.training_step(None, inputs)
    ids = seen.pop()["position_ids"]
    assert ids.shape == (500, 4) and (ids.diff(dim=1) == 1).all()
    assert {*ids[:, 0].tolist()} == {0, 1, 2, 3}


def test_what_is_kept_for_the_backward_pass_is_counted_once_and_without_parameters():
    class Squared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(10))

        def forward(self, x):
            product = x * self.weight  # keeps x, and the weight
            return type("Output", (), {"loss": (product.exp() * product).sum()})  # keeps exp's result and the product

    assert compare_schemes.kept_for_backward(Squared(), {"x": torch.ones(10)}) == 4 * 10 * 3


@pytest.mark.parametrize(("rates", "next_one"), [([0.003, 0.02, 0.1], 0.5), ([0.0005, 0.01], 0.2), ([1.0, 2.0], 4.0)])
def test_the_rate_above_is_a_step_of_the_same_size(rates, next_one):
    assert compare_schemes.above(rates) == next_one


@pytest.mark.slow
def test_what_keeps_no_positions_of_the_checkpoint_is_converted_first(punctuation, text, run_main, monkeypatch):
    folder, options = punctuation
    options += ["--cost_rounds", "0", *TINY, "--conversion_steps", "2", "--seeds", "1"]
    options += ["--schemes", "absolute", "absolute+t5", "t5", "--position_learning_rates", "0.1", "--rate_steps", "1"]
    asked = []

    def convert(*arguments, **settings):
        asked.append((settings["position_scheme"], settings["text"][0].read_text()))
        return hf_posenc.convert(*arguments, trained_length=16, **settings)

    monkeypatch.setattr(compare_schemes, "convert", convert)
    monkeypatch.setattr(hf_posenc.conversion.distillation, "STEP_TOKENS", 64)
    run_main(compare_schemes, *options)
    assert [scheme for scheme, _ in asked] == ["t5"]
    train = compare_schemes.punctuation_task(
        CompareArguments(model_name_or_path=str(options[1]), train_file=str(text))
    ).text
    assert asked[0][1] == train and len(train) < len(text.read_text())
    [conversion] = (folder / "conversions").glob("t5*")
    assert json.loads((conversion / "config.json").read_text())["position_per_layer"] is True
    assert len([*(folder / "runs").iterdir()]) == 3

    shutil.rmtree(folder / "conversions")
    run_main(compare_schemes, *options)
    assert len(asked) == 1, "converted again, though nothing is to be run"
    (folder / "runs" / "t5-seed1.json").unlink()
    run_main(compare_schemes, *options)
    assert len(asked) == 2


@pytest.mark.slow
def test_the_same_seed_gives_every_scheme_the_same_data_in_the_same_order(text, tmp_path):
    """Absolute positions asked for twice, under another flag that changes nothing, come to the same numbers."""
    checkpoint = save_checkpoint(tmp_path / "checkpoint", text.read_text())
    task = compare_schemes.punctuation_task(
        CompareArguments(model_name_or_path=str(checkpoint), train_file=str(text), length=24)
    )
    training = PositionTrainingArguments(
        output_dir=str(tmp_path), max_steps=3, logging_steps=1, use_cpu=True, disable_tqdm=True, report_to="none"
    )
    first, second = (
        compare_schemes.train_and_evaluate(
            candidate, task.config(str(checkpoint), **candidate.flags), 7, task, training
        )
        for candidate in (Candidate.parse("absolute"), Candidate.parse("absolute:position_combine=add"))
    )
    assert first.learning_curve == second.learning_curve
    assert first.metrics == second.metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schemes", "t6"], "unknown scheme 't6'"),
        (["--schemes", "t5:position_max_distance=3"], "position_max_distance"),
        (["--schemes", "t5:buckets"], "'buckets' should have the form key=value"),
        (["--schemes", "t5:buckets,position_buckets=8"], "'buckets' should have the form key=value"),
        (["--schemes", "deberta:position_attention_types=[c2p,p2c]"], "strings inside of it need double quotes"),
        (["--task", "masked_lm"], "needs --train_file and --eval_file"),
        (["--train_file", "missing.txt"], "missing.txt"),
        (["--length", "4"], "at least 8"),
        (["--position_learning_rates", "0"], "nor a rate 0"),
        (["--position_learning_rates", "inf"], "position_learning_rates must be a finite number, got inf"),
        (["--schemes", "t5:position_learning_rate=NaN"], "position_learning_rate must be a finite number, got nan"),
        (["--schemes", "t5:position_learning_rate=fast"], "position_learning_rate must be a number, got 'fast'"),
        (["--rate_steps", "0"], "rate_steps must be at least 1"),
        (["--conversions", "0"], "conversions must be at least 1"),
        (["--position_offset", "-1"], "position_offset must be at least 0"),
        (["--learning_rates", "0"], "learning_rates must be positive"),
    ],
)
def test_mistakes_are_told_in_one_line(options, message, text, tmp_path, run_main):
    checkpoint = save_checkpoint(tmp_path / "checkpoint", text.read_text())
    default = [] if "--train_file" in options else ["--train_file", text]
    if "masked_lm" in options:
        default = []
    with pytest.raises(SystemExit, match=message):
        run_main(
            compare_schemes, "--model_name_or_path", checkpoint, "--output_dir", tmp_path / "out", *default, *options
        )


def test_missing_matplotlib_is_told_before_anything_is_trained(tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(compare_schemes, "find_spec", {}.get)
    with pytest.raises(SystemExit, match=r"^error: the plots need matplotlib: pip install .*\[analysis\]"):
        run_main(compare_schemes, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_flags_after_a_colon_are_json_or_strings():
    candidate = Candidate.parse("deberta:position_buckets=64,position_norm=true,position_learning_rate=0.01")
    assert candidate.flags == {"position_scheme": "deberta", "position_buckets": 64, "position_norm": True}
    assert candidate.position_learning_rate == 0.01
    assert Candidate.parse("absolute:position_combine=gate").flags["position_combine"] == "gate"


@pytest.mark.parametrize(
    ("written", "flags"),
    [
        ('position_attention_types=["c2p","p2c","p2p"]', {"position_attention_types": ["c2p", "p2c", "p2p"]}),
        (
            'position_rope_scaling={"rope_type": "yarn", "factor": 4.0}, position_base=500 ,',
            {"position_rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "position_base": 500},
        ),
        ('a="x,y=1",b=gate,c=1e-3', {"a": "x,y=1", "b": "gate", "c": 1e-3}),
        ("a=12px,b=null", {"a": "12px", "b": None}),
        ("", {}),
    ],
)
def test_values_may_have_commas_of_their_own(written, flags):
    assert parse_overrides(written) == flags


@pytest.mark.parametrize("scheme", ['deberta:position_attention_types=["c2p","p2c","p2p"]', YARN])
def test_schemes_with_lists_and_objects_can_be_asked_for(scheme):
    flags = Candidate.parse(scheme).flags
    assert BertConfig(**flags).position_scheme == flags["position_scheme"]


def test_no_two_names_of_the_plot_overlap():
    qualities = [0.5, 0.5, 0.501, 0.502, 0.1, 0.9, 0.9, 0.899, 0.12, 0.13, 0.5, 0.45]
    rows = [
        compare_schemes.Row(f"a scheme, {index}", 3, {"64": (mean, 0.02), "256": (1 - mean, 0.1)}, 0, 1 + index / 50)
        for index, mean in enumerate(qualities)
    ]
    figure = compare_schemes.draw_quality_and_cost(rows, "f1")
    figure.canvas.draw()
    for axis in figure.axes:
        boxes = [Text.get_window_extent(text) for text in axis.texts]  # without its line
        assert len(boxes) == len(rows)
        assert not any(a.overlaps(b) for index, a in enumerate(boxes) for b in boxes[:index])
        for row, text in zip(sorted(rows, key=lambda row: row.quality[axis.get_title().split()[0]][0]), axis.texts):
            assert text.get_text() == row.scheme and text.xy[0] == row.relative_cost


@pytest.mark.parametrize("places", [[0.0], [0.1, 0.1, 0.1], [0.0, 0.0, 0.99, 1.0], [0.3, 0.31, 0.9]])
def test_places_are_spread_out_no_further_than_needed(places):
    found = compare_schemes.spread_out(places, apart=0.05)
    assert all(b - a >= 0.05 - 1e-9 for a, b in zip(found, found[1:]))
    assert min(found) >= 0 and max(found) <= 1
    assert all(abs(a - b) <= 0.05 * len(places) for a, b in zip(found, places))
    if places == [0.0]:
        assert found == places
