"""A config that holds what no model has is one line and exit code 2, whatever reads it, and before weights are read."""

import json
from pathlib import Path

import pytest
import tiny
import tiny_checkpoints
import transformers
from transformers import PreTrainedModel

from hf_posenc import analysis, convert
from hf_posenc.hub.pushing import shared_files
from hf_posenc_cli import main


# By BERT's names; what is said begins with the entry's own name.
ODD = {
    "num_attention_heads": [0, -1, None, "4", [4], {"a": 4}, 1.5, 5, True, 10**9],
    "num_hidden_layers": [0, -1, None, "2", 10**9, 10**30],
    "hidden_size": [0, -8, None, "32", 31],
    "vocab_size": [0, -1, None, "99", [99]],
    "intermediate_size": [0, -1, None],
    "max_position_embeddings": [0, -1, None, "64"],
    "hidden_act": ["swirl", None, 3],
}
PADDING = {
    "pad_token_id": [99, 10**9, -1, "0", [0], 1.5],
}
CASES = [(family, name, value) for family in tiny.FAMILIES for name in ODD for value in ODD[name][:2]]
CASES += [("bert", name, value) for name in ODD for value in ODD[name][2:]]
CASES += [
    (family, "pad_token_id", value) for family in ("bert", "roberta", "mpnet") for value in PADDING["pad_token_id"]
]
CASES += [("bert", "dtype", value) for value in (5, 1.5, True, "x", "nn", {"a": 1})]
CASES += [("roberta", "pad_token_id", None), ("roberta", "max_position_embeddings", 2)]
CASES += [("bert", "type_vocab_size", value) for value in (0, -1, None, "2")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A saved variant of each family with its tokenizer."""
    folder = tmp_path_factory.mktemp("variants")
    for family in tiny.FAMILIES:
        scheme = "rope" if family == "mpnet" else "absolute+t5"
        padding = tiny_checkpoints.SPECIAL[tiny.FAMILIES[family].family.positions_follow_padding]["pad"]
        tiny.build(scheme, family, pad_token_id=padding).save_pretrained(folder / family)
        tiny_checkpoints.tokenizer(family).save_pretrained(folder / family)
    return {family: folder / family for family in tiny.FAMILIES}


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command, which is to end before weights are read; returns its exit code and the last line of its errors."""
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)

    def run(*words) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err and not printed.out
        return ended.value.code, printed.err.splitlines()[-1]

    return run


def commands(folder: Path, text: Path, out: Path) -> list[tuple]:
    return [
        ("inspect", folder),
        ("card", folder, "--out", out / "card.md"),
        ("export", "onnx", folder, out / "model.onnx"),
        ("convert", folder, "--out", out / "out", "--position-scheme", "alibi", "--text", text),
        ("extend", folder, "--out", out / "out", "--max-length", 200, "--method", "tile", "--text", text),
        ("compare", folder, folder, "--text", text),
        ("plot", "order", folder, "--out", out / "x.png"),
        ("push", folder, "me/x"),
    ]


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of a family's variant whose config has an entry changed, or lies elsewhere."""

    def odd(family: str, name: str, value) -> Path:
        place = tmp_path / family
        place.mkdir()
        for file in saved[family].iterdir():
            (place / file.name).write_bytes(file.read_bytes())
        entries = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(entries | {name: value}))
        return place

    return odd


@pytest.mark.parametrize(("family", "name", "value"), CASES, ids=str)
def test_is_said_in_a_line_by_every_command(family, name, value, folder, run, tmp_path):
    entry = tiny.FAMILIES[family].family.config_names.get(name, name)
    place, text = folder(family, entry, value), tmp_path / "text.txt"
    text.write_text(tiny_checkpoints.text(60))
    lines = commands(place, text, tmp_path)
    # One command after the other, so that each is tried with some; the first with all.
    turn = CASES.index((family, name, value)) % len(lines)
    for words in (lines[0], lines[turn]):
        code, said = run(*words)
        assert code == 2 and said.startswith("hf-posenc: ")
        assert f"{place}: " in said and entry in said and len(said) < 600, said


@pytest.mark.parametrize(
    "name", ["architectures", "dtype", "id2label", "layer_norm_eps", "torch_dtype", "transformers_version"]
)
@pytest.mark.parametrize("value", [5, 1.5, "x", {"a": [1]}, [1], None, True], ids=str)
def test_what_makes_no_number_of_a_model_leaves_no_traceback(name, value, folder, capsys, tmp_path):
    place = folder("bert", name, value)
    for words in (["inspect", place], ["card", place, "--out", tmp_path / "card.md"]):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        assert ended.value.code in (0, None, 2)


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", '"x"', "{", "", "{}", '{"model_type": ["bert"]}', '{"model_type": 3}']
)
def test_what_is_no_config_at_all(content, saved, folder, run, tmp_path):
    place, text = folder("bert", "x", 1), tmp_path / "text.txt"
    text.write_text(tiny_checkpoints.text(60))
    (place / "config.json").write_text(content)
    for words in commands(place, text, tmp_path):
        code, said = run(*words)
        assert code == 2 and (str(place) in said or "model type" in said), words


@pytest.mark.parametrize(
    ("name", "value"), [("num_attention_heads", 0), ("vocab_size", "x"), ("pad_token_id", 99), ("hidden_act", "swirl")]
)
def test_of_a_family_without_schemes_that_is_exported(name, value, tmp_path, run):
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    transformers.DebertaV2Model(transformers.DebertaV2Config(**sizes)).save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(entries | {name: value}))
    code, said = run("export", "onnx", tmp_path, tmp_path / "model.onnx")
    assert code == 2 and name in said


class TestEmptyNames:
    @pytest.mark.parametrize(
        "words",
        [
            ["inspect", ""],
            ["inspect", " "],
            ["convert", "", "--out", "x", "--position-scheme", "t5"],
            ["convert", "x", "--out", "", "--position-scheme", "t5"],
            ["convert", "x", "--out=", "--position-scheme", "t5"],
            ["convert", "x", "--out", "y", "--position-scheme", "t5", "--text", ""],
            ["extend", "", "--out", "x", "--max-length", "99"],
            ["extend", "x", "--out", "", "--max-length", "99"],
            ["compare", "", "x"],
            ["compare", "x", "x", "--out", ""],
            ["push", "", "me/x"],
            ["push", ".", ""],
            ["card", ""],
            ["card", ".", "--results", ""],
            ["card", ".", "--out="],
            ["export", "onnx", "", "x"],
            ["export", "onnx", "x", ""],
            ["plot", "spaces", "", "--out", "x.png"],
            ["report", "", "--out", "x.html"],
            ["check-scheme", ""],
            ["schemes", "--scheme-file", ""],
            ["schemes", "--scheme-file="],
        ],
        ids=" ".join,
    )
    def test_of_the_command_line(self, words, saved, run, monkeypatch):
        """They would stand for the folder that one is in: here, one that would do."""
        monkeypatch.chdir(saved["bert"])
        before = {file.name for file in saved["bert"].iterdir()}
        code, said = run(*words)
        assert code == 2 and "empty" in said
        assert {file.name for file in saved["bert"].iterdir()} == before

    def test_of_functions(self, saved, tmp_path, monkeypatch):
        from hf_posenc import hub, inspect
        from hf_posenc.conversion import compare
        from hf_posenc.export.onnx import exporting as onnx
        from hf_posenc.hub.cards import write_card

        monkeypatch.chdir(saved["bert"])
        for call in (
            lambda: inspect(""),
            lambda: convert("", "alibi"),
            lambda: convert(saved["bert"], "alibi", output=""),
            lambda: compare("", saved["bert"]),
            lambda: hub.push("", "me/x"),
            lambda: write_card(""),
            lambda: write_card(saved["bert"], results=""),
            lambda: write_card(saved["bert"], output=""),
            lambda: onnx.export("", tmp_path / "x"),
            lambda: onnx.export(saved["bert"], ""),
            lambda: analysis.study(""),
        ):
            with pytest.raises(ValueError, match="the name of .+ is empty"):
                call()


def test_shared_files_are_checked_too(folder, tmp_path):
    with pytest.raises(ValueError, match="num_attention_heads must be an integer from 1"):
        shared_files(folder("bert", "num_attention_heads", 0), tmp_path, "me/x")
