"""run_token_classification.py from the command line: its files, how tags meet tokens, and what it refuses."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import run_token_classification
from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value
from labels import Classes
from run_token_classification import TokenClassificationArguments, label_tokens, measure_tags, read_sentences, tokenize
from scripts import results, run_here, save_checkpoint, tokens_kept
from transformers import AutoConfig, AutoTokenizer, EvalPrediction


Sentence = list[tuple[str, str]]
OTHERS = ["the", "cat", "sees", "a", "river"]


def sentence(generator: random.Random) -> Sentence:
    """Words with their tags; a name in several words is in the order that gives its words away."""
    words: Sentence = []
    for _ in range(generator.randint(2, 6)):
        if generator.random() < 0.3:
            words += [("johnson", "B-PER"), ("smith", "I-PER")]
        elif generator.random() < 0.2:
            words.append(("oslo", "B-LOC"))
        else:
            words.append((generator.choice(OTHERS), "O"))
    return words


def conll(sentences: list[Sentence]) -> str:
    blocks = ["\n".join(f"{word} NN {tag}" for word, tag in words) for words in sentences]
    return "-DOCSTART- -X- O\n\n" + "\n\n\n".join(blocks) + "\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), f"john smith oslo {' '.join(OTHERS)}", "##son", "##s"
    )


@pytest.fixture(scope="module")
def sentences() -> dict[str, list[Sentence]]:
    generator = random.Random(0)
    made = {split: [sentence(generator) for _ in range(number)] for split, number in (("train", 40), ("dev", 16))}
    # One that is longer than the model reads, and a word that leaves no token.
    made["test"] = [sentence(generator) for _ in range(6)] + [
        [("oslo", "B-LOC")] * 40,
        [("\u200b", "O"), ("oslo", "B-LOC")],
    ]
    return made


@pytest.fixture(scope="module")
def finished(checkpoint, sentences, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    for split, rows in sentences.items():
        (folder / f"{split}.conll").write_text(conll(rows), encoding="utf-8")
    arguments = ["--model_name_or_path", checkpoint, "--position_scheme", "rope", "--label_all_tokens"]
    arguments += ["--train_file", folder / "train.conll", "--validation_file", folder / "dev.conll"]
    arguments += ["--test_file", folder / "test.conll", "--max_seq_length", "32", "--output_dir", folder / "run"]
    stages = ["--do_train", "--do_eval", "--do_predict", "--num_train_epochs", "3", "--learning_rate", "3e-3"]
    said = run_here(run_token_classification, *arguments, *stages)
    assert "warning: 2 sentences of the test data lose words at 32 tokens" in said
    return folder / "run"


@pytest.mark.slow
def test_a_run_trains_evaluates_and_saves_the_variant(finished):
    scores = results(finished)
    assert {f"eval_{name}" for name in ("precision", "recall", "f1", "accuracy", "loss", "samples")} <= scores.keys()
    config = AutoConfig.from_pretrained(finished)
    assert config.position_scheme == "rope"
    assert list(config.id2label.values()) == ["B-LOC", "B-PER", "I-PER", "O"]
    state = json.loads((finished / "trainer_state.json").read_text())
    assert state["best_metric"] == scores["eval_f1"] == max(row.get("eval_f1", 0) for row in state["log_history"])
    assert scores["eval_f1"] > 0.5, "three epochs should teach it something"


@pytest.mark.slow
def test_every_word_has_a_predicted_tag_in_its_line(finished, sentences):
    lines = [line.split() for line in (finished / "predict_results.txt").read_text().splitlines()]
    assert [len(tags) for tags in lines] == [len(words) for words in sentences["test"]]
    assert lines[-2][30:] == ["O"] * 10 and lines[-1][0] == "O"
    right = sum(
        tag == true for tags, words in zip(lines[:-2], sentences["test"]) for tag, (_, true) in zip(tags, words)
    )
    right += sum(tag == "B-LOC" for tag in [*lines[-2][:30], lines[-1][1]])
    number = sum(map(len, sentences["test"][:-2])) + 31
    assert results(finished)["predict_accuracy"] == pytest.approx(right / number)


@pytest.mark.parametrize("ending", [".conll", ".txt", ".json", ".jsonl", ".csv", ".tsv"])
def test_all_files_hold_the_same_sentences(ending, sentences, tmp_path):
    rows = [{"tokens": [w for w, _ in words], "ner_tags": [t for _, t in words]} for words in sentences["train"]]
    file = tmp_path / f"train{ending}"
    if ending in (".conll", ".txt"):
        text = conll(sentences["train"])
    elif ending in (".json", ".jsonl"):
        text = "\n".join(map(json.dumps, rows)) if ending == ".jsonl" else json.dumps(rows)
    else:
        separator = "," if ending == ".csv" else "\t"
        cells = [separator.join((" ".join(row["tokens"]), " ".join(row["ner_tags"]))) for row in rows]
        text = "\n".join([f"tokens{separator}ner_tags", *cells])
    file.write_text(text)
    read = read_sentences(str(file), TokenClassificationArguments())
    assert read.select_columns(["tokens", "ner_tags"]).to_list() == rows


def test_columns_of_conll_files_have_the_names_that_are_given(tmp_path):
    file = tmp_path / "train.conll"
    file.write_text("B-LOC\tNNP\tOslo\nO\tVBZ\tis\n\nO\tDT\tthe\n")
    named = TokenClassificationArguments(column_names=["tags", "pos", "tokens"])
    assert read_sentences(str(file), named).to_list() == [
        {"tags": ["B-LOC", "O"], "pos": ["NNP", "VBZ"], "tokens": ["Oslo", "is"]},
        {"tags": ["O"], "pos": ["DT"], "tokens": ["the"]},
    ]
    file.write_text("Oslo\nis\n")
    assert read_sentences(str(file), TokenClassificationArguments()).to_list() == [{"tokens": ["Oslo", "is"]}]


def test_a_tag_is_on_the_first_token_of_its_word_or_on_all(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    classes = Classes(["B-PER", "I-PER", "IN", "NN", "O"], {})
    rows = {"tokens": [["johnson", "\u200b", "johns", "cat"]], "tags": [["B-PER", "O", "NN", "O"]]}
    common = {"text_column": "tokens", "label_column": "tags", "tokenizer": tokenizer, "classes": classes}
    first = tokenize(rows, **common, length=32, label_all_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(first["input_ids"][0])
    assert tokens == ["[CLS]", "john", "##son", "john", "##s", "cat", "[SEP]"]
    assert first["labels"] == [[-100, 0, -100, 3, -100, 4, -100]]
    assert first["starts"] == [[1, -1, 3, 5]]
    # Inside a name, but a noun is no preposition.
    assert tokenize(rows, **common, length=32, label_all_tokens=True)["labels"] == [[-100, 0, 1, 3, 3, 4, -100]]
    cut = tokenize(rows, **common, length=5, label_all_tokens=False)
    assert cut["starts"] == [[1, -1, 3, -1]] and cut["labels"] == [[-100, 0, -100, 3, -100]]
    assert label_tokens([None, 0, 0, None], [0], ["B-PER", "O"], True) == [-100, 0, 0, -100], "no I-PER to go on with"


def test_only_labelled_tokens_are_scored():
    names = ["O", "B-PER", "I-PER"]
    labels = np.array([[-100, 1, 2, 0, -100], [-100, 0, 1, -100, -100]])
    predicted = np.array([[2, 1, 2, 0, 0], [1, 1, 1, 2, 2]])
    scores = measure_tags("span_f1", names)(EvalPrediction(predicted, labels))
    assert scores == {"precision": pytest.approx(2 / 3), "recall": 1.0, "f1": 0.8, "accuracy": 4 / 5}
    assert measure_tags("accuracy", names)(EvalPrediction(predicted, labels)) == {"accuracy": 4 / 5}


def test_a_data_set_with_named_tags_keeps_their_order(checkpoint, sentences, tmp_path, monkeypatch, run_main):
    names = ["O", "B-PER", "I-PER", "B-LOC"]
    features = Features({"tokens": Sequence(Value("string")), "pos": Sequence(ClassLabel(names=names))})

    def rows(split: str) -> Dataset:
        columns = {"tokens": [[w for w, _ in words] for words in sentences[split]]}
        columns["pos"] = [[names.index(tag) for _, tag in words] for words in sentences[split]]
        return Dataset.from_dict(columns, features=features)

    def named(name, configuration):
        assert (name, configuration) == ("some/data", "english")
        return DatasetDict({"train": rows("train"), "validation": rows("dev"), "test": rows("test")})

    monkeypatch.setattr("data_files.load_dataset", named)
    arguments = ["--model_name_or_path", checkpoint, "--position_scheme", "none", "--label_column", "pos"]
    arguments += ["--dataset_name", "some/data", "--dataset_config_name", "english", "--metric", "accuracy"]
    stages = ["--do_train", "--do_eval", "--max_steps", "2", "--use_cpu", "true", "--output_dir", tmp_path]
    run_main(run_token_classification, *arguments, *stages)
    saved = AutoConfig.from_pretrained(tmp_path)
    assert [saved.id2label[index] for index in range(4)] == names
    assert {"eval_accuracy", "eval_loss", "eval_samples"} == results(tmp_path).keys()
    assert tokens_kept(tmp_path) == {128}, "the length that is cut at if none is named; the checkpoint's is 64"


WRONG_FILES = {
    "train.conll": "Oslo B-LOC\nis O\n",
    "other.conll": "Oslo B-CITY\nis O\n",
    "pos.conll": "Oslo NNP\nis VBZ\n",
    "ragged.conll": "Oslo B-LOC\n\nis\n",
    "blank.conll": "\n-DOCSTART- O\n\n",
    "lengths.jsonl": '{"tokens": ["a"], "tags": ["O"]}\n{"tokens": ["a", "b"], "tags": ["O"]}\n',
    "strings.jsonl": '{"tokens": "a", "tags": "O"}\n',
    "untagged.jsonl": '{"tokens": "a b"}\n',
    "words.jsonl": '{"words": ["a"], "tags": ["O"]}\n',
}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--train_file nowhere.conll", "nowhere.conll does not exist"),
        ("--train_file train.ner", "must end in one of .conll"),
        ("--train_file ragged.conll", "ragged.conll, line 3: 1 columns, where the first line has 2"),
        ("--train_file blank.conll", "blank.conll has no rows"),
        ("--train_file lengths.jsonl", "row 2 of the train data has 2 words, but 1 tags"),
        ("--train_file strings.jsonl", "words and tags must be lists, in row 1 of the train data"),
        ("--train_file train.conll --test_file untagged.jsonl --do_predict", "in row 1 of the test data"),
        ("--train_file words.jsonl", "no column 'tokens'; their columns are words, tags"),
        ("--train_file train.conll --column_names tokens", "train.conll has 2 columns, and 1 names for them: tokens"),
        ("--train_file train.conll --label_column pos --column_names tokens tags", "no column 'pos'"),
        ("--train_file pos.conll", "span_f1 reads the tags O, B-... and I-..., and the data have NNP, VBZ"),
        (
            "--train_file train.conll --validation_file other.conll --do_eval",
            "'B-CITY'; the training data have B-LOC, O",
        ),
        ("--train_file train.conll --max_seq_length 99", "ends at 64 tokens"),
        ("--train_file train.conll --position_scheme rop", "did you mean 'rope'"),
    ],
)
def test_mistakes_end_in_one_line_before_weights_are_read(arguments, message, checkpoint, mistake_in_training):
    assert message in mistake_in_training(run_token_classification, checkpoint, WRONG_FILES, arguments)
