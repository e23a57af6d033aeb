"""run_mlm.py from the command line: its masks, its inputs, and models from a checkpoint or from scratch."""

import json
import math
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import run_mlm
import torch
from datasets import Dataset, IterableDataset
from run_mlm import IGNORED, LanguageModelArguments, Masking, NewMasks, encode, mask_for_evaluation, score_tokens
from scripts import results, run_here, save_checkpoint, tokens_kept
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, EvalPrediction, Trainer, TrainingArguments

import hf_posenc


WORDS = ["the", "cat", "sees", "a", "river", "and", "dog", "who", "likes", "every", "tree"]


def text(number: int, seed: int) -> str:
    generator = random.Random(seed)
    lines = [" ".join(generator.choices(WORDS, k=generator.randint(4, 12))) for _ in range(number)]
    return "\n".join([*lines[:3], "", "   ", *lines[3:]]) + "\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), " ".join(WORDS))


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "train.txt").write_text(text(60, seed=1))
    (folder / "valid.txt").write_text(text(30, seed=2))
    for split in ("train", "valid"):
        lines = [{"text": line} for line in (folder / f"{split}.txt").read_text().splitlines()]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def of_files(files: Path, ending: str = "txt") -> list:
    return ["--train_file", files / f"train.{ending}", "--validation_file", files / f"valid.{ending}"]


STAGES = ("--do_train", "--do_eval", "--learning_rate", "3e-3", "--use_cpu", "true", "--disable_tqdm", "true")


@pytest.fixture(scope="module")
def finished(files, checkpoint, tmp_path_factory) -> Path:
    """A model from scratch that reads more than the tokenizer's 64 tokens."""
    folder = tmp_path_factory.mktemp("finished")
    sizes = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64,hidden_act=relu"
    arguments = ["--model_type", "roberta", "--tokenizer_name", checkpoint, "--config_overrides", sizes]
    arguments += ["--position_scheme", "tupe+alibi", "--max_seq_length", "150", "--num_train_epochs", "3"]
    run_here(run_mlm, *of_files(files), *arguments, *STAGES, "--output_dir", folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_a_model_from_scratch_has_the_sizes_and_the_length_that_were_asked_for(finished):
    config = AutoConfig.from_pretrained(finished)
    assert isinstance(config, hf_posenc.PosencRobertaConfig)
    assert (config.position_scheme, config.hidden_size, config.hidden_act) == ("tupe+alibi", 32, "relu")
    assert config.vocab_size == 5 + len(WORDS)
    assert config.max_position_embeddings == 150 + config.pad_token_id + 1
    assert tokens_kept(finished) == {150}


@pytest.mark.slow
def test_perplexity_is_that_of_every_masked_token(finished, files):
    model = AutoModelForMaskedLM.from_pretrained(finished).eval()
    tokenizer = AutoTokenizer.from_pretrained(finished)
    lines = {"text": (files / "valid.txt").read_text().splitlines()}
    inputs = encode(lines, "text", tokenizer, 150, line_by_line=False)
    masked = mask_for_evaluation(inputs, Masking(tokenizer, 0.15, seed=7))
    surprise, right, number = 0.0, 0, 0
    with torch.no_grad():
        for input_ids, labels in zip(masked["input_ids"], masked["labels"]):
            log_probabilities = model(torch.tensor([input_ids])).logits[0].log_softmax(-1)
            for token, label in enumerate(labels):
                if label != IGNORED:
                    surprise -= log_probabilities[token, label].item()
                    right += log_probabilities[token].argmax().item() == label
                    number += 1
    scores = results(finished)
    assert len({*map(len, inputs["input_ids"])}) > 1 and scores["eval_samples"] == len(inputs["input_ids"])
    assert scores["eval_perplexity"] == pytest.approx(math.exp(surprise / number), rel=1e-4)
    assert scores["eval_accuracy"] == pytest.approx(right / number)


@pytest.mark.slow
def test_the_model_with_the_lowest_perplexity_is_kept(finished):
    state = json.loads((finished / "trainer_state.json").read_text())
    values = [row["eval_perplexity"] for row in state["log_history"] if "eval_perplexity" in row]
    assert len({*values}) > 2 and state["best_metric"] == min(values)


@pytest.mark.slow
def test_an_evaluation_does_not_depend_on_the_seed_or_the_batch(finished, files, tmp_path, run_main):
    arguments = ["--model_name_or_path", finished, "--validation_file", files / "valid.txt", "--max_seq_length", "150"]
    for index, more in enumerate((["--seed", "1"], ["--seed", "2", "--per_device_eval_batch_size", "1"])):
        folder = tmp_path / str(index)
        run_main(run_mlm, *arguments, *more, "--do_eval", "--output_dir", folder, "--use_cpu", "true")
        scores = results(folder)
        for name in ("eval_perplexity", "eval_accuracy"):
            assert scores[name] == pytest.approx(results(finished)[name], rel=1e-5)


def test_joined_texts_fill_their_inputs_and_lose_nothing(tokenizer):
    lines = text(40, seed=3).splitlines()
    inputs = encode({"text": lines}, "text", tokenizer, 16, line_by_line=False)["input_ids"]
    assert {len(row) for row in inputs[:-1]} == {16} and 3 <= len(inputs[-1]) <= 16
    assert {(row[0], row[-1]) for row in inputs} == {(tokenizer.cls_token_id, tokenizer.sep_token_id)}
    read = [token for row in inputs for token in tokenizer.convert_ids_to_tokens(row[1:-1])]
    assert read == " ".join(lines).split()


def test_texts_are_inputs_by_themselves_where_that_is_asked_for(tokenizer):
    lines = text(5, seed=3).splitlines()
    inputs = encode({"text": lines}, "text", tokenizer, 8, line_by_line=True)["input_ids"]
    texts = [line.split() for line in lines if line.strip()]
    assert [tokenizer.convert_ids_to_tokens(row)[1:-1] for row in inputs] == [words[:6] for words in texts]
    for line_by_line in (True, False):
        assert encode({"text": ["", None, " "]}, "text", tokenizer, 8, line_by_line=line_by_line) == {"input_ids": []}


def ids(tokenizer, number: int, length: int = 40) -> list[list[int]]:
    generator = random.Random(0)
    words = [generator.choices(WORDS, k=length) for _ in range(number)]
    return tokenizer([" ".join(row) for row in words])["input_ids"]


def test_tokens_are_masked_as_in_bert(tokenizer):
    masking = Masking(tokenizer, 0.15, seed=0)
    kept = masked = other = chosen = ordinary = 0
    for input_ids in ids(tokenizer, 300):
        row = masking.mask(input_ids, 0)
        for before, after, label in zip(input_ids, row["input_ids"], row["labels"]):
            if before in (tokenizer.cls_token_id, tokenizer.sep_token_id):
                assert label == IGNORED and after == before
                continue
            ordinary += 1
            if label == IGNORED:
                assert after == before
                continue
            assert label == before
            chosen += 1
            kept += after == before
            masked += after == tokenizer.mask_token_id
            other += after not in (before, tokenizer.mask_token_id)
    assert chosen / ordinary == pytest.approx(0.15, abs=0.01)
    assert masked / chosen == pytest.approx(0.8, abs=0.03)
    # Any token: now and then the very same one.
    assert other / chosen == pytest.approx(0.1, abs=0.03) and kept / chosen == pytest.approx(0.1, abs=0.03)


def test_masks_depend_on_the_text_the_seed_and_the_epoch_only(tokenizer):
    rows = [{"input_ids": row} for row in ids(tokenizer, 4)]

    def labels(seed: int = 0, epoch: float = 0.0, order: tuple[int, ...] = (0, 1, 2, 3)) -> dict[int, list[int]]:
        masking = Masking(tokenizer, 0.15, seed)
        NewMasks(masking).on_epoch_begin(None, SimpleNamespace(epoch=epoch), None)
        torch.randint(9, (random.randrange(9),))  # whatever else draws numbers
        return dict(zip(order, masking([rows[index] for index in order])["labels"].tolist()))

    assert labels() == labels() == labels(order=(2, 0, 3, 1))
    assert labels() != labels(seed=1) and labels() != labels(epoch=1.0)
    assert labels(epoch=1.0) == labels(epoch=1.5), "a run that is resumed in an epoch sees its masks"
    once, again = (mask_for_evaluation({"input_ids": ids(tokenizer, 4)}, Masking(tokenizer, 0.15, s)) for s in (0, 1))
    assert once == again


def test_each_pass_over_a_stream_has_its_own_masks(tokenizer, checkpoint, tmp_path):
    """Of a stream, `Trainer` does not know how long it is: its epoch is the share of all steps."""
    masking = Masking(tokenizer, 0.3, seed=0)
    rows = [{"input_ids": row} for row in ids(tokenizer, 6)]
    data = IterableDataset.from_generator(lambda: iter(rows))
    seen = []

    class Keeping(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            seen.append((inputs["labels"] != IGNORED).tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    settings = TrainingArguments(
        tmp_path, max_steps=9, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    model = AutoModelForMaskedLM.from_pretrained(checkpoint)
    Keeping(model, settings, train_dataset=data, data_collator=masking, callbacks=[NewMasks(masking)]).train()
    assert len(seen) == 9 and seen[:3] != seen[3:6] != seen[6:] != seen[:3]


def test_workers_that_stay_see_the_masks_of_each_epoch(tokenizer):
    rows = [{"input_ids": row} for row in ids(tokenizer, 4)]
    masking = Masking(tokenizer, 0.15, seed=0)
    loader = DataLoader(rows, batch_size=4, collate_fn=masking, num_workers=1, persistent_workers=True)
    for epoch in (0.0, 1.0, 2.0):
        NewMasks(masking).on_epoch_begin(None, SimpleNamespace(epoch=epoch), None)
        [batch] = loader
        assert torch.equal(batch["labels"], masking(rows)["labels"])


def test_every_input_has_something_to_predict(tokenizer):
    masking = Masking(tokenizer, 0.01, seed=0)
    for input_ids in ids(tokenizer, 50, length=2):
        row = masking.mask(input_ids, 0)
        [label] = [label for label in row["labels"] if label != IGNORED] or pytest.fail("nothing is masked")
        assert label in input_ids
    assert {*masking.mask([tokenizer.cls_token_id, tokenizer.sep_token_id])["labels"]} == {IGNORED}


def test_inputs_that_are_masked_already_are_only_padded(tokenizer):
    rows = [{"input_ids": [2, 7, 3], "labels": [IGNORED, 8, IGNORED]}, {"input_ids": [2, 3], "labels": [IGNORED] * 2}]
    batch = Masking(tokenizer, 0.9, seed=0, multiple=8)(rows)
    assert batch["input_ids"].tolist() == [[2, 7, 3] + [0] * 5, [2, 3] + [0] * 6]
    assert batch["labels"].tolist() == [[IGNORED, 8] + [IGNORED] * 6, [IGNORED] * 8]
    assert batch["attention_mask"].sum(-1).tolist() == [3, 2]


def test_scores_of_tokens_are_sums_over_masked_ones():
    logits, labels = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    labels[:, ::2] = IGNORED
    sums = score_tokens(logits, labels)
    assert sums.shape == (3, 3) and sums[:, 2].tolist() == [2, 2, 2]
    expected = cross_entropy(logits.reshape(-1, 7), labels.reshape(-1), ignore_index=IGNORED)
    padded = np.concatenate([sums.numpy(), np.zeros((1, 3))])
    scores = run_mlm.perplexity(EvalPrediction(padded, None))
    assert math.log(scores["perplexity"]) == pytest.approx(expected.item(), rel=1e-5)
    hits = (logits.argmax(-1) == labels).float().sum().item()
    assert scores["accuracy"] == pytest.approx(hits / 6)


def stop_after(step: int, folder: Path) -> None:
    """Make a finished run one that was stopped after a checkpoint."""
    kept = ["run_settings.json", *(f"checkpoint-{earlier}" for earlier in range(step + 1))]
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    record = json.loads((folder / "run_settings.json").read_text())
    (folder / "run_settings.json").write_text(json.dumps({**record, "finished": False}))


@pytest.mark.slow
def test_a_run_that_goes_on_sees_the_same_masks(files, checkpoint, tmp_path, run_main, capsys):
    arguments = ["--model_name_or_path", checkpoint, "--position_scheme", "absolute+t5", "--max_seq_length", "24"]
    arguments += [*of_files(files), *STAGES, "--num_train_epochs", "3", "--position_learning_rate", "0.05"]
    # In the middle of the second epoch.
    arguments += ["--save_strategy", "steps", "--save_steps", "5", "--save_total_limit", "9"]
    arguments += ["--output_dir", tmp_path, "--line_by_line"]
    run_main(run_mlm, *arguments)
    expected, weights = results(tmp_path), (tmp_path / "model.safetensors").read_bytes()
    stop_after(10, tmp_path)
    run_main(run_mlm, *arguments)
    assert f"going on from {tmp_path / 'checkpoint-10'}" in capsys.readouterr().out
    assert json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())["epoch"] % 1 > 0
    assert results(tmp_path) == expected
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert tokens_kept(tmp_path) == {64}, "what the model reads, though training read less"


@pytest.mark.parametrize("ending", ["txt", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_streams_are_trained_on_for_as_long_as_is_asked(ending, files, checkpoint, tmp_path, run_main, monkeypatch):
    seen = []
    trainer = run_mlm.ScriptTrainer

    class Watched(trainer):
        def __init__(self, **kwargs):
            seen.append((kwargs["train_dataset"], kwargs["eval_dataset"]))
            super().__init__(**kwargs)

    monkeypatch.setattr(run_mlm, "ScriptTrainer", Watched)
    arguments = ["--model_name_or_path", checkpoint, "--position_scheme", "deberta", "--streaming", "--max_steps", "7"]
    arguments += ["--max_seq_length", "20", "--per_device_train_batch_size", "4", "--max_eval_samples", "12"]
    run_main(run_mlm, *of_files(files, ending), *arguments, *STAGES, "--output_dir", tmp_path)
    [(streamed, stored)] = seen
    assert isinstance(streamed, IterableDataset) and isinstance(stored, Dataset)
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 7
    assert 3 < results(tmp_path)["eval_samples"] <= 12
    first, second = ([row["input_ids"] for row in streamed] for _ in range(2))
    lines = (files / "train.txt").read_text().split("\n")
    in_order = encode({"text": lines}, "text", AutoTokenizer.from_pretrained(checkpoint), 20, line_by_line=False)
    assert first == second != in_order["input_ids"], "shuffled, and always alike"
    assert sum(map(len, first)) == sum(map(len, in_order["input_ids"]))


@pytest.mark.slow
def test_a_stream_that_is_cut_longer_than_before_is_read_as_long(files, checkpoint, tmp_path, run_main):
    """Texts are cut while the model is trained and saved."""
    arguments = ["--model_name_or_path", checkpoint, "--position_scheme", "alibi", "--streaming", "--line_by_line"]
    arguments += ["--max_seq_length", "100", "--max_steps", "2", "--save_steps", "1", "--output_dir", tmp_path]
    run_main(run_mlm, *of_files(files), *arguments, *STAGES)
    assert tokens_kept(tmp_path) == {100}


def test_flags_are_those_of_the_checkpoint_unless_given(checkpoint, tokenizer):
    nothing = run_mlm.PositionArguments(position_scheme=None)
    new = LanguageModelArguments(model_type="bert", tokenizer_name=str(checkpoint))
    assert new.new_config(nothing, tokenizer, 700).position_scheme == "absolute+t5"
    assert new.new_config(nothing, tokenizer, 700).max_position_embeddings == 700
    given = LanguageModelArguments(
        model_type="electra", tokenizer_name=str(checkpoint), config_overrides="max_position_embeddings=900"
    )
    assert given.new_config(nothing, tokenizer, 700).max_position_embeddings == 900


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "name a checkpoint with --model_name_or_path, or a family with --model_type"),
        ("--model_type bert --model_name_or_path {checkpoint}", "name a checkpoint with --model_name_or_path, or"),
        ("--model_type bert", "a model from scratch takes a tokenizer"),
        ("--model_name_or_path {checkpoint} --config_overrides hidden_size=3", "a checkpoint has its sizes"),
        (
            "--model_type bert --tokenizer_name {checkpoint} --config_overrides hiden_size=3",
            "bert has no 'hiden_size'",
        ),
        ("--model_type bert --tokenizer_name {checkpoint} --config_overrides hidden_size=big", "hidden_size"),
        ("--model_name_or_path {checkpoint} --train_file nowhere.txt", "nowhere.txt does not exist"),
        ("--model_name_or_path {checkpoint} --train_file empty.txt", "empty.txt is empty"),
        ("--model_name_or_path {checkpoint} --train_file words.jsonl", "no column 'text'; their columns are words"),
        (
            "--model_name_or_path {checkpoint} --max_seq_length 65",
            "ends at 64 tokens. A scheme without a table reads on",
        ),
        ("--model_name_or_path {checkpoint} --streaming", "give --max_steps with --streaming"),
        ("--model_name_or_path {checkpoint} --streaming --max_steps 3 --train_file words.jsonl", "no column 'text'"),
        (
            "--model_name_or_path {checkpoint} --mlm_probability 1.5",
            "mlm_probability must lie between 0 and 1, got 1.5",
        ),
        ("--model_name_or_path {checkpoint} --do_predict", "leave out --do_predict"),
        ("--model_name_or_path {checkpoint} --test_file train.txt", "leave out test_file"),
        ("--model_name_or_path {checkpoint} --tokenizer_name {larger}", "tokens, and the checkpoint knows 16"),
    ],
)
def test_mistakes_end_in_one_line_before_weights_are_read(
    arguments, message, checkpoint, tmp_path, monkeypatch, mistake
):
    monkeypatch.chdir(tmp_path)
    larger = save_checkpoint(tmp_path / "larger", " ".join([*WORDS, "and", "many", "more"]))
    Path("train.txt").write_text(text(5, seed=1))
    Path("empty.txt").write_text("")
    Path("words.jsonl").write_text('{"words": "the cat"}\n')
    defaults = "--train_file train.txt --do_train --use_cpu true --output_dir run".split()
    given = arguments.format(checkpoint=checkpoint, larger=larger).split()
    assert message in mistake(run_mlm, *defaults, *given)


def test_a_wrong_family_is_refused_by_the_command_line(run_main):
    with pytest.raises(SystemExit, match="^error: --model_type gpt2: must be one of bert, .*, mpnet$"):
        run_main(run_mlm, "--model_type", "gpt2", "--output_dir", os.devnull)
