"""A card says what a variant is and what was measured; every figure in it equals the results it came from."""

import ast
import copy
import json
import math
import re
import shlex
import shutil
import statistics
import sys
from pathlib import Path

import pytest
import torch
import yaml
from fresh_process import ROOT
from hub_server import LoopbackHub, card_errors
from huggingface_hub import HfApi, ModelCard, constants
from tiny import FAMILIES, Sentences, aligned, build, heads, inputs, stock_config
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification, Trainer, TrainingArguments

import hf_posenc
from hf_posenc import variants
from hf_posenc.hub.cards import ModelCardCallback, Results, make_card, write_card, written
from hf_posenc.modeling.schemes.table import SCHEMES
from hf_posenc.training import PositionTrainer


# What the Hub accepts, as far as cards from here may use it.
PIPELINE_TAGS = {
    *("fill-mask", "text-generation", "text-classification", "token-classification", "question-answering"),
    "feature-extraction",
}
LICENSES = {"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "cc0-1.0", "other", "unknown"}
REQUIRED = {
    "base_model",
    "datasets",
    "language",
    "library_name",
    "license",
    "metrics",
    "pipeline_tag",
    "tags",
    "model-index",
}
SECTIONS = ["Position scheme", "How it was made", "How well it does", "Limits", "How to load it"]

RESULTS = {
    "base_model": "sentence-transformers/all-MiniLM-L6-v2",
    "license": "apache-2.0",
    "language": "en",
    "datasets": ["nyu-mll/glue"],
    "data": "MRPC, 3,668 pairs | deduplicated",
    "command": "python train.py --position_scheme absolute+t5",
    "training": {"max_steps": 240, "learning_rate": 0.0005},
    "seeds": [42, 43, 44],
    "versions": {"hf_posenc": "0.1.0", "torch": "2.13.0"},
    "machine": "2 CPU cores",
    "limits": ["Trained on English only."],
    "windows": {"train": 696},  # what else a benchmark writes down
    "results": [
        {
            "model": model,
            "dataset": "MRPC",
            "dataset_id": "nyu-mll/glue",
            "split": "validation",
            "length": length,
            "metrics": {"f1": [start, start + 0.0123, start + 0.02], "accuracy": start / 3, "recall": None},
        }
        for model, start in (("variant", 0.6023166023166023), ("checkpoint", 0.598434004474273), ("none", 0.13186))
        for length in (512, 128, 2048)
    ]
    + [{"model": "variant", "dataset": "Wiki pages", "metrics": {"perplexity": 12.25, "loss": 0.0012345}}],
}


def variant(scheme: str = "absolute+t5", family: str = "bert", architecture: str | None = None, **flags):
    prefix = FAMILIES[family].__name__.removesuffix("Config")
    architectures = [architecture or f"{prefix}ForSequenceClassification"]
    return FAMILIES[family](position_scheme=scheme, architectures=architectures, num_hidden_layers=2, **flags)


@pytest.fixture
def card() -> ModelCard:
    return make_card(variant(), Results.from_json(RESULTS), "me/minilm-t5", "hf-posenc card . --results results.json")


def tables(card: ModelCard) -> dict[str, list[list[str]]]:
    """The tables of figures by their title, without header."""
    section = card.text.split("## How well it does")[1].split("##")[0]
    found = {}
    for title, rows in re.findall(r"On (.+):\n\n((?:\|.*\n)+)", section):
        lines = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
        found[title] = [dict(zip(lines[0], line)) for line in lines[2:]]
    return found


class TestMetadata:
    def test_has_the_required_fields_and_values_that_the_hub_knows(self, card):
        metadata = card.data.to_dict()
        assert metadata.keys() == REQUIRED
        assert metadata["pipeline_tag"] in PIPELINE_TAGS and metadata["license"] in LICENSES
        assert {"hf_posenc", "position-encoding", "bert", "absolute", "t5"} <= {*metadata["tags"]}
        assert metadata["library_name"] == "transformers"
        assert card_errors(card.content) == []

    def test_survives_saving_and_loading_with_every_field(self, card, tmp_path):
        card.save(tmp_path / "README.md")
        again = ModelCard.load(tmp_path / "README.md")
        assert again.data.to_dict() == card.data.to_dict()
        assert again.data.eval_results == card.data.eval_results
        assert again.text == card.text
        for name in ("base_model", "license", "language", "datasets"):
            assert getattr(again.data, name) == RESULTS[name]
        assert again.data.model_name == "minilm-t5"

    def test_has_every_measurement_of_the_variant_and_of_nothing_else(self, card):
        expected = {
            (row["dataset"], row.get("length"), name, statistics.fmean(v) if isinstance(v, list) else v)
            for row in RESULTS["results"]
            if row["model"] == "variant"
            for name, v in row["metrics"].items()
            if v is not None
        }
        got = {
            (r.dataset_name, (r.metric_args or {}).get("length"), r.metric_type, r.metric_value)
            for r in card.data.eval_results
        }
        assert got == expected and len(card.data.eval_results) == len(expected) == 8
        assert {r.task_type for r in card.data.eval_results} == {"text-classification"}
        assert {r.dataset_type for r in card.data.eval_results} == {"nyu-mll/glue", "wiki-pages"}
        assert {r.dataset_split for r in card.data.eval_results} == {"validation", None}
        assert "f1 at 512 tokens, mean of 3 seeds" in {r.metric_name for r in card.data.eval_results}

    @pytest.mark.parametrize(
        "family", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "bert")]
    )
    def test_every_head_has_a_tag_that_the_hub_knows_or_none(self, family):
        tags = {}
        for stock in heads(family):
            name = variants.VARIANT_MODELS[stock].__name__
            card = make_card(variant("rope", family, name), repo_id="me/x")
            tags[stock.__name__] = card.data.pipeline_tag
            assert f"`{card.text.split('Load it with `')[1].split('`')[0]}`" in card.text
            assert f"{card.text.split('Load it with `')[1].split('`')[0]}.from_pretrained" in card.text
            assert card.data.tags[:3] == ["hf_posenc", "position-encoding", family]
        decoder = set() if any("CausalLM" in auto for auto in FAMILIES[family].auto_classes) else {"text-generation"}
        assert {tag for tag in tags.values() if tag} == PIPELINE_TAGS - decoder
        without = {name for name, tag in tags.items() if tag is None}
        assert all(name.endswith(("MultipleChoice", "NextSentencePrediction", "ForPreTraining")) for name in without)

    def test_what_is_not_known_is_left_out(self):
        card = make_card(variant())
        assert card.data.to_dict().keys() == {"library_name", "pipeline_tag", "tags"}
        assert "Nothing was measured" in card.text
        assert "How it was made" not in card.text
        assert not tables(card)
        assert "None" not in card.text and "nan" not in card.text


class TestText:
    def test_has_every_section_once_in_order(self, card):
        assert re.findall(r"^## (.+)$", card.text, flags=re.MULTILINE) == SECTIONS

    def test_figures_equal_the_results_file(self, card):
        for title, model_rows in tables(card).items():
            dataset, _, split = title.partition(", ")
            rows = [r for r in RESULTS["results"] if r["dataset"] == dataset]
            assert len(model_rows) == len(rows) > 0
            for row in rows:
                name = {"variant": "**this model**", "checkpoint": "the checkpoint"}.get(row["model"], row["model"])
                length = f"{row['length']:,}" if "length" in row else ""
                [line] = [r for r in model_rows if (r["model"], r["tokens"]) == (name, length)]
                for metric, value in row["metrics"].items():
                    if value is None:
                        assert metric not in line
                        continue
                    shown = [float(part) for part in line[metric].split(" ± ")]
                    values = value if isinstance(value, list) else [value]
                    assert math.isclose(shown[0], statistics.fmean(values), abs_tol=5e-5, rel_tol=5e-3)
                    assert len(shown) == 1 + isinstance(value, list)
                    if len(shown) == 2:
                        assert math.isclose(shown[1], statistics.stdev(values), abs_tol=5e-5, rel_tol=5e-3)
        assert {*tables(card)} == {"MRPC, validation", "Wiki pages"}

    def test_lengths_ascend(self, card):
        lengths = [int(row["tokens"].replace(",", "")) for row in tables(card)["MRPC, validation"]]
        assert lengths == sorted(lengths) and len({*lengths}) == 3

    def test_no_other_figure_is_in_the_section_of_results(self, card):
        section = card.text.split("## How well it does")[1].split("##")[0]
        cells = [cell for rows in tables(card).values() for row in rows for cell in row.values()]
        rest = section
        for cell in sorted(cells, key=len, reverse=True):
            rest = rest.replace(cell, "") if cell else rest
        assert re.findall(r"\d[\d.]*", rest.replace("f1", "")) == ["3"]  # the number of seeds

    def test_says_what_every_scheme_is(self):
        for name, scheme in SCHEMES.items():
            text = make_card(variant(name)).text
            assert f"`{scheme.formula}`" in text and scheme.extrapolates[1:] in text, name
            assert scheme.paper in text or name == "none", name
            parameters = hf_posenc.position_parameters(build(name, head="ForSequenceClassification"))
            assert ("The scheme adds no parameters" in text) == (not parameters), name

    def test_counts_the_parameters(self):
        model = build("t5+transformer_xl", head="ForSequenceClassification")
        model.config.architectures = [type(model).__name__]
        text = make_card(model.config).text
        added = sum(parameter.numel() for parameter in hf_posenc.position_parameters(model).values())
        total = sum(parameter.numel() for parameter in model.parameters())
        assert f"{added:,} of the {total:,} parameters" in text
        assert "| `bert.encoder.layer.N.attention.self.linear_pos.weight` | 32 × 32 | 2 |" in text
        assert "| `bert.encoder.relative_attention_bias.weight` | 32 × 4 | shared |" in text

    def test_has_the_flags_with_their_meaning(self):
        text = make_card(variant("deberta", position_attention_types=["c2p"], position_norm=True)).text
        assert "| `position_attention_types` | `['c2p']` | deberta: which score terms (default c2p, p2c) |" in text
        assert (
            "| `position_norm` | `True` | deberta: LayerNorm on the relative position embeddings (v2, v3) (default False) |"
            in text
        )
        assert "position_buckets" not in text
        assert "| config option |" not in make_card(variant("deberta")).text

    def test_says_how_it_was_made(self, card):
        made = card.text.split("## How it was made")[1].split("\n## ")[0]
        for value in (
            RESULTS["data"],
            RESULTS["command"],
            RESULTS["machine"],
            "nyu-mll/glue",
            "42, 43, 44",
            "torch 2.13.0",
        ):
            assert value in made
        assert "max_steps 240, learning_rate 0.0005" in made

    @pytest.mark.parametrize(
        "scheme, family, limit", [("absolute+t5", "bert", "512"), ("tupe", "roberta", "510"), ("t5", "bert", None)]
    )
    def test_says_how_far_it_reads(self, scheme, family, limit):
        limits = make_card(variant(scheme, family)).text.split("## Limits")[1]
        assert ("any length" in limits) == (limit is None)
        if limit:
            assert f"maximum sequence length is {limit} tokens" in limits

    def test_says_what_was_not_measured_and_the_limits_that_were_given(self, card):
        limits = card.text.split("## Limits")[1]
        assert "longer than 2,048 tokens were not measured" in limits and RESULTS["limits"][0] in limits

    def test_its_code_loads_the_model_with_the_package_and_without(self, tmp_path, monkeypatch):
        model = build("absolute+t5", head="ForSequenceClassification")
        model.save_pretrained(tmp_path / "variant")
        (tmp_path / "variant/vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
        card = make_card(model.config, repo_id="variant")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
        blocks = re.findall(r"```python\n(.+?)```", card.text, flags=re.DOTALL)
        assert ["import hf_posenc" in block for block in blocks] == [True, False]
        assert "trust_remote_code=True" in blocks[1] and "revision=" in blocks[1]
        for block in blocks:
            names: dict = {}
            exec(block, names)
            with torch.no_grad():
                got = aligned(names["model"]).eval()(**inputs()).logits
                assert (got - model(**inputs()).logits).abs().max() < 1e-6

    @pytest.mark.parametrize(
        "command",
        [
            "echo `date`",
            "a\n```\n## Injected\n```bash",
            "a\r```\r## Injected",
            "````\n## Injected\n```",
            "~~~\n`````` x",
            "a\n\n</pre>\n# b",
        ],
    )
    @pytest.mark.parametrize("which", ["command", "regenerate"])
    def test_no_command_leaves_its_block(self, which, command):
        results = Results.from_json({"command": command if which == "command" else "python train.py"})
        card = make_card(variant(), results, "me/x", command if which == "regenerate" else "hf-posenc card .")
        blocks = re.findall(r"^(`{3,})bash\n(.*?)\n\1$", card.text, re.MULTILINE | re.DOTALL)
        [fence] = [fence for fence, text in blocks if text == command]
        assert fence not in command
        before, after = card.text.split(f"{fence}bash\n{command}\n{fence}\n")
        assert [line for line in (before + after).splitlines() if line.startswith("## ")] == [
            f"## {s}" for s in SECTIONS
        ]

    @pytest.mark.parametrize("name", ['a"b', "a\\", "a\n```\n# b", "it's <b>"])
    def test_no_name_leaves_its_string(self, name):
        """That of a folder, where no other is given."""
        card = make_card(variant(), repo_id=name)
        blocks = re.findall(r"^```python\n(.*?)^```$", card.text, re.MULTILINE | re.DOTALL)
        assert len(blocks) == 2
        for block in blocks:
            calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call) and node.args]
            assert [ast.literal_eval(call.args[0]) for call in calls] == [name, name]

    @pytest.mark.parametrize("entry", ["command", "data", "machine"])
    def test_a_mark_of_ours_in_the_results_is_refused(self, entry):
        """The card could not be read again."""
        with pytest.raises(ValueError, match="the results contain a comment that marks cards"):
            make_card(variant(), Results.from_json({entry: "x <!-- hf_posenc: end --> y"}))

    def test_tells_no_paths_of_this_machine(self, card):
        assert str(Path.home()) not in card.content and str(Path(hf_posenc.__file__).parent) not in card.content


class TestResultsFile:
    @pytest.mark.parametrize(
        "change, said",
        [
            ({"licence": "mit"}, "did you mean 'license'"),
            ({"base_model": "/home/me/minilm"}, "name on the Hub"),
            ({"seeds": 3}, "'seeds' must be a list"),
            ({"training": []}, "'training' must be an object"),
            ({"results": [{"metrics": {"f1": 1.0}}]}, r"results\[0\] lacks 'model'"),
            ({"results": [{"model": "variant"}]}, r"results\[0\] lacks 'metrics'"),
            ({"results": [{"model": "variant", "metric": {}, "metrics": {}}]}, "did you mean 'metrics'"),
            ({"results": [{"model": "variant", "metrics": {"f1": "0.9"}}]}, "'f1' must be a finite number"),
            ({"results": [{"model": "variant", "metrics": {"f1": math.nan}}]}, "'f1' must be a finite number"),
            ({"results": [{"model": "variant", "metrics": {"f1": True}}]}, "'f1' must be a finite number"),
            ({"results": [{"model": "variant", "metrics": {"f1": [0.9, 0.8]}}]}, "2 values for 3 seeds"),
            ({"results": [{"model": "variant", "length": "512", "metrics": {}}]}, "'length' must be an integer"),
            ({"results": ["variant"]}, r"results\[0\] must be a JSON object"),
        ],
    )
    def test_that_is_wrong_is_refused(self, change, said, tmp_path):
        (tmp_path / "results.json").write_text(json.dumps({**RESULTS, **change}))
        with pytest.raises(ValueError, match=f"results.json.*{said}"):
            Results.read(tmp_path / "results.json")

    def test_that_is_no_json_is_refused(self, tmp_path):
        (tmp_path / "results.json").write_text("{")
        with pytest.raises(ValueError, match="results.json is not JSON"):
            Results.read(tmp_path / "results.json")

    def test_that_calls_two_data_sets_the_same_is_refused(self):
        rows = [
            {"model": "variant", "dataset": name, "dataset_id": "a/b", "metrics": {"f1": 1.0}} for name in ("A", "B")
        ]
        with pytest.raises(ValueError, match="'a/b' has two names, 'A' and 'B'"):
            make_card(variant(), Results.from_json({"results": rows}))

    def test_a_missing_figure_stays_missing(self):
        rows = [
            {"model": "variant", "dataset": "D", "metrics": {"f1": None, "accuracy": 0.5}},
            {"model": "checkpoint", "dataset": "D", "metrics": {"f1": [], "accuracy": 0.25}},
        ]
        card = make_card(variant(), Results.from_json({"results": rows}))
        assert [r.metric_type for r in card.data.eval_results] == ["accuracy"]
        assert "f1" not in card.text.split("## How well it does")[1].split("##")[0]

    def test_the_example_of_the_module_makes_a_card(self):
        example = re.search(
            r"^    (\{.+?^    \})", sys.modules["hf_posenc.hub.cards"].__doc__, flags=re.MULTILINE | re.DOTALL
        )[1]
        card = make_card(variant(), Results.from_json(json.loads(example)))
        assert {r.metric_type for r in card.data.eval_results} == {"f1", "accuracy"}

    @pytest.mark.parametrize(
        "value, text",
        [
            (0.60231, "0.6023"),
            (12.25, "12.2500"),
            (3, "3"),
            (0.0012345, "0.00123"),
            (-0.5, "-0.5000"),
            ([0.5], "0.5000"),
        ],
    )
    def test_figures_are_written_for_people(self, value, text):
        assert written(value) == text


class TestWriteCard:
    def test_the_command_in_a_card_writes_it_again(self, tmp_path, monkeypatch):
        from hf_posenc_cli import main

        monkeypatch.chdir(tmp_path)
        model = build("absolute+t5", head="ForSequenceClassification")
        model.save_pretrained("variant")
        Path("my results.json").write_text(json.dumps(RESULTS))
        path = write_card("variant", "my results.json", "me/minilm-t5", license="mit")
        assert path == Path("variant/README.md")
        first = path.read_text()
        assert "license: mit" in first
        command = re.search(r"This card was written by:\n\n```bash\nhf-posenc (.+)\n```", first)[1]
        path.unlink()
        with pytest.raises(SystemExit) as exit:
            main(shlex.split(command))
        assert exit.value.code == 0 and path.read_text() == first

    @pytest.mark.parametrize("known", [{"language": ["en", "de"]}, {"limits": ["English only."]}])
    def test_there_is_no_command_where_an_entry_has_no_option(self, known, tmp_path):
        build("t5").save_pretrained(tmp_path)
        path = write_card(tmp_path, license="mit", **known)
        assert "hf-posenc card" not in path.read_text()

    def test_stock_models_and_wrong_arguments_are_refused(self, tmp_path):
        BertForSequenceClassification(stock_config()).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="bert model without a position scheme"):
            write_card(tmp_path)
        build("t5").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="did you mean 'license'"):
            write_card(tmp_path, licence="mit")
        with pytest.raises(FileNotFoundError, match="no folder"):
            write_card(tmp_path / "absent")


# As sentence-transformers writes it, with an entry and a remark of the owner's.
THEIRS = """---
language:
- en
license: mit  # asked for
tags:
- sentence-transformers
- sentence-similarity
- bert
datasets: a/pairs
pipeline_tag: sentence-similarity
library_name: sentence-transformers
inference: false
widget:
- source_sentence: "Who?"
  sentences: ["Me: you", 'no']
model-index:
- name: variant
  results:
  - task: {type: semantic-similarity}
    dataset: {name: sts dev, type: sts-dev}
    metrics: [{type: pearson, value: 0.875}]
---

# My sentences

What nobody else knows.

```python
# no heading
```
"""
BODY = THEIRS.split("---\n", 2)[2].rstrip()
ROW = {"model": "variant", "dataset": "D", "length": 64}


def figures(card: ModelCard) -> set[tuple[str, float]]:
    return {(result.metric_type, result.metric_value) for result in card.data.eval_results}


class TestCardThatIsThere:
    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        build("absolute+t5", head="ForSequenceClassification").save_pretrained(folder)
        return folder

    @pytest.fixture
    def folder(self, saved, tmp_path) -> Path:
        """A saved variant, without the code that is beside it."""
        (tmp_path / "variant").mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(saved / name, tmp_path / "variant")
        return tmp_path / "variant"

    def write(self, folder: Path, metrics: dict | None = None, **known) -> str:
        """Write the card, with results if there are some."""
        results = folder.with_name("results.json")
        rows = [{**ROW, "metrics": metrics}] if metrics else []
        results.write_text(json.dumps({"results": rows, "license": "apache-2.0", "datasets": ["b/more"]}))
        write_card(folder, results, **known)
        return (folder / "README.md").read_text(encoding="utf-8")

    def test_keeps_its_text_and_its_metadata_and_gets_ours(self, folder):
        (folder / "README.md").write_text(THEIRS)
        content = self.write(folder, {"f1": 0.5})
        card, before = ModelCard(content), ModelCard(THEIRS).data.to_dict()
        assert card.text.lstrip().startswith(BODY.lstrip())
        after = card.data.to_dict()
        for name in ("language", "license", "pipeline_tag", "library_name", "inference", "widget"):
            assert after[name] == before[name], name
        assert after["tags"] == [*before["tags"], "hf_posenc", "position-encoding", "absolute", "t5"]
        assert after["datasets"] == ["a/pairs", "b/more"] and after["metrics"] == ["f1"]
        assert figures(card) == {("pearson", 0.875), ("f1", 0.5)}
        assert card.text.count("## Position scheme") == card.text.count("## How to load it") == 1
        assert re.findall(r"^# (.+)$", re.sub(r"```.*?```", "", card.text, flags=re.DOTALL), re.M) == ["My sentences"]
        assert "license: mit  # asked for\n" in content and """sentences: ["Me: you", 'no']\n""" in content
        assert card_errors(content) == []

    @pytest.mark.parametrize(
        "there",
        [
            None,
            "",
            "\n",
            "Mine.",
            "# Mine\n\nText.\n",
            "---\n---\n",
            "---\nlicense: mit\n---\n",
            "---\ntags:\n---\nx\n",
        ]
        + [THEIRS, THEIRS.replace("---\n", "---  \n"), "---\ntags: [t5, mine, bert]\nmodel-index: []\n---\n\n## A\n"],
    )
    @pytest.mark.slow
    def test_the_same_again_gives_the_same(self, there, folder):
        if there is not None:
            (folder / "README.md").write_text(there)
        known = {"license": "mit"}
        once = self.write(folder, {"f1": 0.5, "accuracy": [0.25, 0.5]}, **known)
        assert self.write(folder, {"f1": 0.5, "accuracy": [0.25, 0.5]}, **known) == once
        assert {path.name for path in folder.iterdir()} >= {"README.md", "config.json"}
        assert not [*folder.glob(".README*")]

    @pytest.mark.parametrize("there", [None, THEIRS])
    def test_what_was_written_from_here_is_replaced_and_nothing_of_it_stays(self, there, folder):
        if there is not None:
            (folder / "README.md").write_text(there)
        self.write(folder, {"f1": 0.5, "recall": 0.75})
        again = self.write(folder, {"f1": 0.625})
        other = folder.with_name("other") / "variant"
        build("rope", head="ForTokenClassification").save_pretrained(other)
        (other / "README.md").write_text(again)
        changed = self.write(other, {"f1": 0.625})
        (other / "README.md").unlink()
        if there is not None:
            (other / "README.md").write_text(there)
        # As if the first two had never been.
        assert changed == self.write(other, {"f1": 0.625})
        assert "recall" not in again and "0.75" not in again and ("f1", 0.625) in figures(ModelCard(again))
        assert not {"absolute", "t5"} & {*ModelCard(changed).data.tags}

    def test_what_is_written_around_ours_and_into_its_metadata_stays(self, folder):
        first = self.write(folder, {"f1": 0.5})
        head, text = first.split("---\n\n", 1)
        head = head.replace("license: apache-2.0", "license: cc0-1.0").replace("tags:\n", "tags:\n- mine\n")
        (folder / "README.md").write_text(f"{head}new: entry\n---\n\nAbove.\n\n{text}\n\nBelow.\n")
        again = self.write(folder, {"f1": 0.625})
        card = ModelCard(again)
        assert card.text.lstrip().startswith("Above.\n\n<!--") and card.text.endswith("-->\n\nBelow.\n")
        assert (card.data.license, card.data.to_dict()["new"], card.data.tags[0]) == ("cc0-1.0", "entry", "mine")
        assert figures(card) == {("f1", 0.625)}

    def test_what_is_given_by_an_argument_wins(self, folder):
        (folder / "README.md").write_text(THEIRS)
        card = ModelCard(self.write(folder, license="cc0-1.0", language="fr", base_model="a/b"))
        assert (card.data.license, card.data.language, card.data.base_model) == ("cc0-1.0", "fr", "a/b")

    def test_is_made_anew_if_asked(self, folder):
        new = self.write(folder, {"f1": 0.5})
        (folder / "README.md").write_text(THEIRS)
        assert self.write(folder, {"f1": 0.5}, force=True) == new

    def test_keeps_its_ends_of_lines_and_its_mode(self, folder):
        path = folder / "README.md"
        path.write_bytes(THEIRS.replace("\n", "\r\n").encode("utf-8-sig"))
        path.chmod(0o604)
        self.write(folder)
        written = path.read_bytes()
        assert written.count(b"\n") == written.count(b"\r\n") > 50 and path.stat().st_mode & 0o777 == 0o604
        path.write_text(THEIRS)
        assert written.replace(b"\r\n", b"\n").decode() == self.write(folder)

    def test_a_link_stays_a_link(self, folder):
        folder.with_name("kept.md").write_text(THEIRS)
        (folder / "README.md").symlink_to(folder.with_name("kept.md"))
        self.write(folder)
        assert (folder / "README.md").is_symlink() and "Position scheme" in folder.with_name("kept.md").read_text()

    @pytest.mark.parametrize(
        "there, said",
        [
            ("---\nlicense: [mit\n---\nMine.\n", "cannot be read as a card"),
            ("---\n- a list\n---\nMine.\n", "must be a mapping"),
            ("---\nmodel-index: mine\n---\n", "'model-index' must be a list"),
            ("end cut", "is missing or changed"),
            ("twice", "is missing or changed"),
            ("latin", "utf-8"),
        ],
    )
    def test_that_cannot_be_read_is_left_as_it_is(self, there, said, folder):
        ours = self.write(folder)
        there = {
            "end cut": ours.replace("<!-- hf_posenc: end -->", ""),
            "twice": ours + ours.split("---\n", 2)[2],
            "latin": "Müller",
        }.get(there, there)
        (folder / "README.md").write_text(there, encoding="latin-1" if there == "Müller" else "utf-8")
        before = (folder / "README.md").read_bytes()
        with pytest.raises(ValueError, match=rf"(?s)README.md.*{said}.*--out.*--force") as raised:
            write_card(folder)
        assert "\n" not in str(raised.value) and (folder / "README.md").read_bytes() == before
        assert self.write(folder, force=True) == ours

    @pytest.mark.parametrize("force", [False, True])
    def test_is_written_whole_or_not_at_all(self, force, folder, monkeypatch):
        (folder / "README.md").write_text(THEIRS)
        names = {path.name for path in folder.iterdir()}
        write = Path.write_bytes

        def full(self, content):
            write(self, content[: len(content) // 2])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            write_card(folder, force=force)
        assert (folder / "README.md").read_text() == THEIRS and {path.name for path in folder.iterdir()} == names

    def test_is_kept_where_output_leads_too(self, folder, tmp_path):
        (tmp_path / "other.md").write_text("Mine.\n")
        write_card(folder, output=tmp_path / "other.md")
        assert (tmp_path / "other.md").read_text().count("Mine.\n\n<!-- hf_posenc") == 1

    @pytest.mark.parametrize(
        "settings, name, tag",
        [
            (None, "SentenceTransformer", "sentence-similarity"),
            ({"__version__": {}}, "SentenceTransformer", "sentence-similarity"),
            ({"model_type": "SparseEncoder"}, "SparseEncoder", "feature-extraction"),
            ({"model_type": "CrossEncoder"}, "CrossEncoder", "text-classification"),
        ],
    )
    def test_one_for_sentence_transformers_names_it(self, settings, name, tag, folder):
        (folder / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Transformer"}]')
        if settings is not None:
            (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        card = ModelCard(self.write(folder))
        assert (card.data.library_name, card.data.pipeline_tag) == ("sentence-transformers", tag)
        assert "sentence-transformers" in card.data.tags and f'model = {name}("variant")' in card.text
        assert "sentence_transformers" not in make_card(variant()).text


class TestCallback:
    def trainer(self, folder: Path, scheme: str = "absolute+t5", **arguments) -> Trainer:
        model = build(scheme, head="ForSequenceClassification")
        settings = {"report_to": "none", "use_cpu": True, "max_steps": 4, "save_strategy": "no", "disable_tqdm": True}
        return Trainer(
            model,
            TrainingArguments(str(folder), **{**settings, **arguments}),
            train_dataset=Sentences(),
            eval_dataset=Sentences(),
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        )

    def test_writes_what_the_run_was_and_what_it_measured(self, tmp_path):
        trainer = self.trainer(tmp_path / "mine", learning_rate=0.01, seed=7)
        trainer.model.config.name_or_path = "a/b"
        known = {"license": "mit", "training": {"position_learning_rate": 0.1}}
        trainer.add_callback(ModelCardCallback(trainer, dataset="Sentences", split="held out", length=12, **known))
        trainer.train()
        card = ModelCard.load(tmp_path / "mine/README.md")
        assert card.data.eval_results is None  # nothing was evaluated yet
        metrics = trainer.evaluate()
        card = ModelCard.load(tmp_path / "mine/README.md")
        got = {r.metric_type: r.metric_value for r in card.data.eval_results}
        assert got == {"loss": metrics["eval_loss"], "accuracy": metrics["eval_accuracy"]}
        assert {r.dataset_name for r in card.data.eval_results} == {"Sentences"}
        assert (
            card.data.base_model == "a/b" and card.data.license == "mit" and "generated_from_trainer" in card.data.tags
        )
        assert "steps 4, " in card.text and "learning_rate 0.01" in card.text and "Seed: 7" in card.text
        assert "position_learning_rate 0.1" in card.text
        assert f"hf_posenc {hf_posenc.__version__}" in card.text and f"torch {torch.__version__}" in card.text

    @pytest.mark.slow
    def test_evaluations_of_other_weights_are_not_the_model_s(self, tmp_path):
        trainer = self.trainer(tmp_path)
        trainer.add_callback(ModelCardCallback(trainer, dataset="Sentences"))
        assert "eval_loss" in trainer.evaluate()  # of the weights before training
        trainer.train()
        assert ModelCard.load(tmp_path / "README.md").data.eval_results is None
        metrics = trainer.evaluate()
        assert figures(ModelCard.load(tmp_path / "README.md")) == {
            (name, metrics[f"eval_{name}"]) for name in ("loss", "accuracy")
        }
        trainer.train()  # as many steps again
        assert ModelCard.load(tmp_path / "README.md").data.eval_results is None

    def test_evaluations_under_other_names_add_theirs_or_nothing(self, tmp_path):
        trainer = self.trainer(tmp_path, max_steps=1)
        trainer.eval_dataset = {"near": Sentences(), "far": Sentences()}
        trainer.add_callback(ModelCardCallback(trainer, dataset="Sentences"))
        trainer.train()
        trainer.evaluate()
        trainer.evaluate(Sentences(), metric_key_prefix="test")
        names = {name for name, _ in figures(ModelCard.load(tmp_path / "README.md"))}
        assert names == {"near_loss", "near_accuracy", "far_loss", "far_accuracy"}

    def test_the_batch_and_the_rate_of_positions_are_those_of_the_trainer(self, tmp_path):
        trainer = PositionTrainer(
            build("absolute+t5", head="ForSequenceClassification"),
            TrainingArguments(
                str(tmp_path),
                max_steps=1,
                gradient_accumulation_steps=2,
                report_to="none",
                use_cpu=True,
                save_strategy="no",
            ),
            train_dataset=Sentences(),
            position_learning_rate=0.05,
            max_tokens_per_batch=600,
        )
        trainer.add_callback(ModelCardCallback(trainer))
        trainer.train()
        card = ModelCard.load(tmp_path / "README.md").text
        assert "tokens per step at most 1,200, " in card and "batch size" not in card
        assert "position_learning_rate 0.05" in card

    def test_the_batch_is_the_one_that_fitted(self, tmp_path):
        trainer = self.trainer(tmp_path, max_steps=1, auto_find_batch_size=True)
        step = trainer.training_step

        def fits(model, inputs, *args):
            if len(inputs["input_ids"]) > 4:
                raise RuntimeError("CUDA out of memory.")
            return step(model, inputs, *args)

        trainer.training_step = fits
        trainer.add_callback(ModelCardCallback(trainer))
        trainer.train()
        size = trainer.state.train_batch_size
        assert size <= 4 and f"batch size {size}, " in ModelCard.load(tmp_path / "README.md").text

    def test_each_run_of_model_init_has_its_own_config(self, tmp_path):
        schemes = iter(["absolute+t5", "absolute+t5", "absolute+alibi"])
        trainer = Trainer(
            model_init=lambda: build(next(schemes), head="ForSequenceClassification"),
            args=TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, save_strategy="no"),
            train_dataset=Sentences(),
        )
        trainer.add_callback(ModelCardCallback(trainer))
        for scheme in ("absolute+t5", "absolute+alibi"):
            trainer.train()
            card = ModelCard.load(tmp_path / "README.md")
            assert f"with the position scheme `{scheme}` of" in card.text and scheme[9:] in card.data.tags

    @pytest.mark.slow
    def test_what_others_wrote_stays_and_figures_of_an_earlier_run_do_not(self, tmp_path):
        (tmp_path / "README.md").write_text(THEIRS)
        trainer = self.trainer(tmp_path)
        trainer.add_callback(ModelCardCallback(trainer, dataset="Sentences", base_model="a/b"))
        trainer.train()
        trainer.evaluate()
        assert {name for name, _ in figures(ModelCard.load(tmp_path / "README.md"))} == {"pearson", "loss", "accuracy"}
        trainer = self.trainer(tmp_path, max_steps=2)
        trainer.add_callback(ModelCardCallback(trainer, dataset="Sentences"))
        trainer.train()
        card = ModelCard.load(tmp_path / "README.md")
        assert card.text.lstrip().startswith(BODY.lstrip()) and card.text.count("## Position scheme") == 1
        assert "steps 2, " in card.text and "steps 4, " not in card.text
        assert figures(card) == {("pearson", 0.875)} and card.data.base_model is None
        assert card.data.library_name == "sentence-transformers" and "generated_from_trainer" in card.data.tags

    def test_a_card_that_cannot_be_read_is_said_before_training(self, tmp_path):
        (tmp_path / "README.md").write_text("---\nlicense: [mit\n---\n")
        with pytest.raises(ValueError, match="README.md exists and cannot be read as a card"):
            ModelCardCallback(self.trainer(tmp_path))

    @pytest.mark.slow
    def test_figures_that_are_no_numbers_and_folders_of_this_machine_are_left_out(self, tmp_path):
        build("absolute+t5", head="ForSequenceClassification").save_pretrained(tmp_path / "here")
        trainer = self.trainer(tmp_path / "mine")
        trainer.model.config.name_or_path = str(tmp_path / "here")
        trainer.compute_metrics = lambda prediction: {"accuracy": math.nan, "classes": [0.5, 0.5], "report": {"a": 1}}
        trainer.add_callback(ModelCardCallback(trainer, dataset="Sentences"))
        trainer.train()
        trainer.evaluate()
        card = ModelCard.load(tmp_path / "mine/README.md")
        assert [result.metric_type for result in card.data.eval_results] == ["loss"]
        assert card.data.base_model is None and str(tmp_path) not in card.content

    @pytest.mark.slow
    def test_the_best_weights_have_their_own_evaluation(self, tmp_path):
        strategy = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
        trainer = self.trainer(tmp_path, learning_rate=0.02, **strategy, **best)
        trainer.add_callback(ModelCardCallback(trainer, dataset="Sentences"))
        trainer.train()
        losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        [loss] = [
            r.metric_value for r in ModelCard.load(tmp_path / "README.md").data.eval_results if r.metric_type == "loss"
        ]
        assert loss == max(losses.values()) != losses[4]
        few = torch.utils.data.Subset(Sentences(), [0, 1])
        metrics = trainer.evaluate(few)
        assert metrics["eval_loss"] != loss
        assert ("loss", metrics["eval_loss"]) in figures(ModelCard.load(tmp_path / "README.md"))

    @pytest.mark.parametrize("command", ["finetune.py --seed 7", "/opt/bin/notebook"])
    @pytest.mark.slow
    def test_results_of_a_file_stand_beside_those_of_the_run(self, tmp_path, monkeypatch, command):
        monkeypatch.setattr("sys.argv", command.split())
        (tmp_path / "results.json").write_text(json.dumps(RESULTS))
        trainer = self.trainer(tmp_path / "mine", seed=7)
        trainer.add_callback(ModelCardCallback(trainer, tmp_path / "results.json", dataset="Sentences"))
        trainer.train()
        metrics = trainer.evaluate()
        card = ModelCard.load(tmp_path / "mine/README.md")
        assert len(card.data.eval_results) == 2 + 8
        assert metrics["eval_loss"] in [r.metric_value for r in card.data.eval_results]
        assert card.data.base_model == RESULTS["base_model"]
        # What the run did is the run's to say.
        assert f"learning_rate {trainer.args.learning_rate}" in card.text and RESULTS["command"] not in card.text
        assert ("python finetune.py --seed 7" in card.text) == command.startswith("finetune.py")
        assert "Seeds (the weights here are the first's): 7, 42, 43, 44" in card.text

    @pytest.mark.slow
    def test_what_a_trainer_pushes_has_the_card_and_can_be_loaded_at_every_commit(self, tmp_path, monkeypatch):
        with LoopbackHub() as hub:
            for name, value in {"ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}.items():
                monkeypatch.setattr(constants, name, value)
            monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
            monkeypatch.setenv("HF_TOKEN", hub.token)
            hub_arguments = {"push_to_hub": True, "hub_model_id": "me/run", "hub_always_push": True}
            saving = {"save_strategy": "steps", "save_steps": 2}
            trainer = self.trainer(tmp_path / "run", **hub_arguments, **saving)
            trainer.add_callback(ModelCardCallback(trainer, dataset="Sentences", license="mit"))
            trainer.train()
            metrics = trainer.evaluate()
            trainer.push_to_hub(tags=["mine"], language="en")
            repository = hub.repositories["me/run"]
            commits = [files for files in repository.commits.values() if "model.safetensors" in files]
            assert len(commits) >= 2
            for number, files in enumerate(commits):
                folder = tmp_path / f"commit{number}"
                folder.mkdir()
                for path, file in files.items():
                    folder.joinpath(path).write_bytes(file.content)
                assert {"modeling_bert.py", "configuration_posenc.py"} <= files.keys()
                AutoModelForSequenceClassification.from_pretrained(folder)
            card = ModelCard(repository.files()["README.md"].decode())
            assert metrics["eval_loss"] in [r.metric_value for r in card.data.eval_results]
            assert {"hf_posenc", "mine"} <= {*card.data.tags} and card.data.language == "en"
            assert '"me/run"' in card.text and card.data.license == "mit"
            HfApi(endpoint=hub.url)._validate_yaml(card.content)

    def test_a_stock_model_and_wrong_entries_are_refused(self, tmp_path):
        trainer = self.trainer(tmp_path)
        with pytest.raises(ValueError, match="did you mean 'license'"):
            ModelCardCallback(trainer, licence="mit")
        stock = copy.copy(trainer)
        stock.model = BertForSequenceClassification(stock_config())
        with pytest.raises(TypeError, match="got a BertForSequenceClassification"):
            ModelCardCallback(stock)


PUBLISHED = sorted((ROOT / "model_cards").glob("*/README.md"))


def test_the_card_of_a_real_run_is_published():
    assert [path.parent.name for path in PUBLISHED] == ["minilm-absolute-t5"]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
class TestPublishedCards:
    def test_is_what_its_command_writes(self, path, monkeypatch):
        from hf_posenc_cli import main

        monkeypatch.chdir(ROOT)
        before = path.read_text(encoding="utf-8")
        command = re.search(r"This card was written by:\n\n```bash\nhf-posenc (.+)\n```", before)[1]
        try:
            with pytest.raises(SystemExit, match="0"):
                main(shlex.split(command))
            assert path.read_text(encoding="utf-8") == before
        finally:
            path.write_text(before, encoding="utf-8")

    def test_has_every_field_and_section(self, path):
        card = ModelCard.load(path)
        assert REQUIRED - {"datasets"} <= card.data.to_dict().keys()
        assert card.data.pipeline_tag in PIPELINE_TAGS and card.data.license in LICENSES
        assert card.data.eval_results and tables(card)
        assert re.findall(r"^## (.+)$", card.text, flags=re.MULTILINE) == SECTIONS
        assert card_errors(card.content) == []


def test_the_metadata_is_plain_yaml(card):
    block = card.content.split("---")[1]
    assert yaml.safe_load(block)["model-index"][0]["name"] == "minilm-t5"


def test_the_template_travels_with_the_package():
    from hf_posenc.hub.cards import TEMPLATE

    assert TEMPLATE.is_file() and TEMPLATE.parent == Path(hf_posenc.__file__).parent / "hub"
