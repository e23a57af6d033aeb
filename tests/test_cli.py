"""The command line says what the functions know, and says what is wrong in one line."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
import typer
from fresh_process import ROOT
from hub_server import LoopbackHub
from huggingface_hub import ModelCard, constants
from peft import LoraConfig, get_peft_model
from saved_before import unpacked
from tiny import build, stock_config
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizerFast, GPT2Config, RobertaModel

import hf_posenc
from hf_posenc import position_parameters
from hf_posenc.modeling.schemes.table import ALIASES, SCHEMES
from hf_posenc_cli import app, main


@pytest.fixture
def run(capsys):
    """Run a command line; returns exit code, output and error output."""

    def run(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main(shlex.split(line))
        printed = capsys.readouterr()
        return exit.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def variant(tmp_path) -> Path:
    build("absolute+t5", head="ForSequenceClassification", position_buckets=8).save_pretrained(tmp_path / "variant")
    return tmp_path / "variant"


def save_tokenizer(folder: Path, **entries: int | None) -> None:
    """A tokenizer whose config has some entries and no other length; without its config if there are none."""
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["model_max_length"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | entries))
    if not entries:
        (folder / "tokenizer_config.json").unlink()


def without_spaces(text: str) -> str:
    """Lines may be broken at hyphens too."""
    return "".join(text.split())


def commands() -> dict:
    return typer.main.get_command(app).commands


class TestHelp:
    def test_lists_every_command_with_a_sentence(self, run):
        code, out, _ = run("--help")
        assert code == 0 and [*commands()] == [
            "schemes",
            "check-scheme",
            "inspect",
            "push",
            "card",
            "convert",
            "extend",
            "compare",
            "plot",
            "report",
            "export",
        ]
        widest = max(map(len, commands()))
        for name, command in commands().items():
            assert f"{name:{widest}}  {command.get_short_help_str(200)}" in out
        assert "..." not in out.replace("[ARGS]...", "")
        assert run("") == (code, out, "")

    @pytest.mark.parametrize(
        "command",
        ["schemes", "check-scheme", "inspect", "push", "card", "convert", "extend", "compare", "plot", "report"],
    )
    def test_explains_every_argument_and_option(self, command, run):
        code, out, _ = run(f"{command} --help")
        assert code == 0
        parameters = [p for p in commands()[command].params if p.name != "help" and not p.hidden]
        least = {
            "schemes": 0,
            "check-scheme": 1,
            "inspect": 2,
            "push": 6,
            "card": 8,
            "convert": 20,
            "extend": 10,
            "compare": 4,
            "plot": 3,
            "report": 4,
        }
        assert len(parameters) >= least[command]
        for parameter in parameters:
            assert parameter.help, parameter.name
            assert without_spaces(parameter.help) in without_spaces(out)

    def test_explains_every_format_of_an_export(self, run):
        code, out, _ = run("export --help")
        assert code == 0 and "onnx" in out
        code, out, _ = run("export onnx --help")
        parameters = [p for p in commands()["export"].commands["onnx"].params if p.name != "help"]
        assert code == 0 and len(parameters) >= 3
        for parameter in parameters:
            assert parameter.help and without_spaces(parameter.help) in without_spaces(out), parameter.name

    def test_nothing_heavy_is_imported_before_a_command_is_understood(self):
        code = (
            "import sys\nfrom hf_posenc_cli import main\n"
            "for arguments in (['--help'], ['--version'], ['convert', '--help'], ['plot'], ['convert', 'a', '--no-such-option']):\n"
            "    try: main(arguments)\n"
            "    except SystemExit: pass\n"
            "print({'torch', 'transformers', 'hf_posenc', 'numpy'} & {*sys.modules})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.endswith("\nset()\n") and f"transformers {transformers.__version__}" in done.stdout

    def test_the_command_is_installed_with_the_package(self):
        project = (ROOT / "pyproject.toml").read_text()
        assert 'hf-posenc = "hf_posenc_cli:main"' in project


class TestErrors:
    def test_a_name_that_is_nowhere_is_named_offline_too(self, run, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        code, _, err = run("inspect nope")
        assert code == 2 and "nope: there is no such folder and no such model in the cache" in err

    @pytest.mark.parametrize(
        "line, said",
        [
            ("nonsense", "nonsense"),
            ("push", "folder"),
            ("inspect --bogus x", "bogus"),
            ("inspect --position_2_sided x", "No such option: --position-2-sided"),
            ("inspect {tmp}/absent", "absent: there is no such folder, and this is not a valid name on the Hub"),
            ("inspect nope", "nope: there is no such folder, and http://127.0.0.1:9 cannot be reached"),
            ("inspect {tmp}", "no config.json"),
            ("inspect {tmp}/gpt2", "'gpt2'; the families that have position schemes are bert, roberta"),
            ("inspect {tmp}/misspelt", "did you mean 'position_scheme'"),
            ("push {tmp}/absent me/x", "no folder"),
            ("push {tmp}/stock me/x", "push it with push_to_hub"),
            ("push {tmp}/variant me/x", "failed"),  # nobody answers there
            ("card {tmp}/absent", "no folder"),
            ("card {tmp}/stock", "bert model without a position scheme"),
            ("card {tmp}/variant --results {tmp}/absent.json", "absent.json"),
            ("card {tmp}/variant --results {tmp}/wrong.json", "wrong.json: results[0] lacks 'model'"),
            ("card {tmp}/variant --base-model /a/folder", "name on the Hub"),
        ],
    )
    def test_are_one_line_and_exit_code_2(self, line, said, run, variant, tmp_path, monkeypatch):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        GPT2Config().save_pretrained(tmp_path / "gpt2")
        BertModel(stock_config()).save_pretrained(tmp_path / "stock")
        entries = {**BertConfig().to_dict(), "postion_scheme": "t5", "model_type": "posenc_bert"}
        (tmp_path / "misspelt").mkdir()
        (tmp_path / "misspelt/config.json").write_text(json.dumps(entries))
        (tmp_path / "wrong.json").write_text('{"results": [{"metrics": {}}]}')
        code, out, err = run(line.format(tmp=tmp_path))
        lines = [text for text in err.splitlines() if text.startswith("hf-posenc: ")]
        assert code == 2 and out == "" and len(lines) == 1 and lines[0] == err.splitlines()[-1]
        assert said.lower() in lines[0].lower()
        assert "Traceback" not in err
        if line.startswith("inspect"):  # nothing is asked again and again
            assert len(err.splitlines()) == 1


def test_versions_are_printed(run):
    code, out, _ = run("--version")
    assert (
        code == 0
        and out
        == f"hf_posenc {hf_posenc.__version__}, transformers {transformers.__version__}, torch {torch.__version__}\n"
    )


@pytest.mark.slow
def test_python_says_what_the_command_line_says(run, variant):
    assert run("schemes")[1] == f"{hf_posenc.schemes()}\n" == f"{hf_posenc.schemes()!r}\n"
    said = hf_posenc.inspect(variant)
    assert run(f"inspect {variant}")[1] == f"{said}\n"
    page = said._repr_html_()
    assert page.count("<tr>") == len(str(said).splitlines()) and "absolute+t5</td>" in page


class TestSchemes:
    def test_has_a_row_for_each_with_its_facts(self, run):
        code, out, _ = run("schemes")
        assert code == 0
        rows = {line.split()[0]: line for line in out.splitlines()[1:] if line}
        for name, scheme in SCHEMES.items():
            assert all(fact in rows[name] for fact in (scheme.formula, scheme.paper, scheme.extrapolates))
        assert all(f"{alias} is {name}" in out for alias, name in ALIASES.items())
        assert rows["t5"].split()[1] == "384" and rows["rope"].split()[1] == "0"


class TestInspect:
    def test_says_what_a_variant_is(self, run, variant):
        code, out, _ = run(f"inspect {variant}")
        assert code == 0
        model = AutoModel.from_pretrained(variant)
        added = sum(parameter.numel() for parameter in position_parameters(model).values())
        assert f"{variant} (posenc_bert, PosencBertForSequenceClassification)" in out
        for fact in ("absolute+t5", "position_buckets=8", "at most 64:", f"{added} of ", SCHEMES["t5"].formula):
            assert fact in out
        assert "bert.encoder.relative_attention_bias.weight (8, 4)" in out
        assert "trust_remote_code=True" in out and "the classes of" in out and "ask [y/N]" in out

    def test_counts_equal_layers_once_and_finds_no_end(self, run, tmp_path):
        build("relative+alibi").save_pretrained(tmp_path)
        _, out, _ = run(f"inspect {tmp_path}")
        assert "encoder.layer.N.attention.self.relative_key_embeddings.weight (129, 8) × 2" in out
        assert "any number" in out and "config options     defaults" in out

    def test_sees_that_the_code_is_missing(self, run, variant):
        (variant / "t5.py").unlink()
        assert "the modeling code is missing" in run(f"inspect {variant}")[1]

    def test_reads_what_others_write_about_code(self, run, variant):
        file = variant / "config.json"
        entries = json.loads(file.read_text())
        entries["auto_map"]["AutoTokenizer"] = ["tokenization.Slow", None]
        file.write_text(json.dumps(entries))
        assert "equal outputs" in run(f"inspect {variant}")[1]
        file.write_text(json.dumps(entries | {"auto_map": None}))
        assert "the modeling code is missing" in run(f"inspect {variant}")[1]

    def test_says_that_transformers_5_misreads_checkpoints_of_4(self, run):
        code, out, _ = run(f"inspect {unpacked('v4') / 'roberta-relative_key_query'}")
        assert code == 0 and "relative_key_query: " in out
        assert "plain roberta with absolute positions, whose outputs differ; the load report only lists" in out
        assert "UNEXPECTED" in out and "no warning" not in out

    def test_says_that_a_stock_model_has_no_scheme(self, run, tmp_path):
        BertModel(stock_config()).save_pretrained(tmp_path)
        code, out, _ = run(f"inspect {tmp_path}")
        assert code == 0 and "does not change this model" in out and "with learned absolute positions" in out
        # What reads as a scheme's name there must be the model's scheme.
        [row] = [line for line in out.splitlines() if line.startswith("position_scheme")]
        assert row.split()[1].rstrip(":") not in SCHEMES

    def test_follows_an_adapter_to_its_variant(self, run, variant, tmp_path):
        get_peft_model(AutoModel.from_pretrained(variant), LoraConfig()).save_pretrained(tmp_path / "adapter")
        code, out, _ = run(f"inspect {tmp_path / 'adapter'}")
        assert code == 0 and f"is an adapter of {variant}" in out and "absolute+t5" in out

    @pytest.mark.parametrize(
        "scheme, entries, said",
        [
            (
                "t5",
                {"model_max_length": 48},
                "truncates at 48 tokens (model_max_length); the model accepts any number",
            ),
            (
                "absolute+t5",
                {"model_max_length": 48},
                "truncates at 48 tokens (model_max_length); the model accepts 64",
            ),
            ("absolute", {"model_max_length": 64}, "truncates at 64 tokens (model_max_length), like the model"),
            ("absolute", {"max_len": 99}, "truncates at 99 tokens (model_max_length); the model's maximum is 64"),
            ("absolute", {"model_max_length": 10**30}, "no limit; the model's maximum is 64"),
            ("absolute", {"model_max_length": None}, "no limit; the model's maximum is 64"),
            ("tupe", {}, "no limit; the model's maximum is 64"),
            ("rope", {}, "no limit, like the model"),
        ],
    )
    @pytest.mark.slow
    def test_says_what_the_tokenizer_will_do(self, scheme, entries, said, run, tmp_path):
        build(scheme).save_pretrained(tmp_path)
        save_tokenizer(tmp_path, **entries)
        code, out, _ = run(f"inspect {tmp_path}")
        assert code == 0 and [line.split("  ")[-1].strip() for line in out.splitlines() if "tokenizer  " in line] == [
            said
        ]
        cut = len(AutoTokenizer.from_pretrained(tmp_path)("a " * 200, truncation=True)["input_ids"])
        assert f"truncates at {cut} tokens" in said or (cut == 202 and "no limit" in said)
        assert ("drop the rest" in out, "is an error" in out) == ("model accepts" in said, "maximum is" in said)
        assert ("model_max_length=64" in out) == (("accepts" in said or "maximum is" in said) and scheme != "t5")

    def test_says_that_there_is_no_tokenizer(self, run, variant):
        assert "tokenizer          none" in run(f"inspect {variant}")[1]

    def test_knows_where_a_stock_table_ends(self, run, tmp_path):
        RobertaModel(stock_config("roberta")).save_pretrained(tmp_path)
        save_tokenizer(tmp_path, model_max_length=64)
        _, out, _ = run(f"inspect {tmp_path}")
        # RoBERTa counts from the id of padding, 1.
        assert "at most 62:" in out and "truncates at 64 tokens (model_max_length); the model's maximum is 62" in out

    @pytest.mark.slow
    def test_says_that_an_adapter_names_no_base_model(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
        with pytest.raises(ValueError, match="an adapter that names no base model"):
            hf_posenc.inspect(tmp_path)

    def test_tells_an_adapters_tokenizer_from_its_variants(self, run, variant, tmp_path):
        get_peft_model(AutoModel.from_pretrained(variant), LoraConfig()).save_pretrained(tmp_path / "adapter")
        save_tokenizer(variant, model_max_length=32)
        _, out, _ = run(f"inspect {tmp_path / 'adapter'}")
        assert "adapter's" not in out and "tokenizer          truncates at 32 tokens" in out
        save_tokenizer(tmp_path / "adapter", model_max_length=64)
        _, out, _ = run(f"inspect {tmp_path / 'adapter'}")
        assert (
            "adapter's tokenizer  truncates at 64 tokens" in out
            and "tokenizer            truncates at 32 tokens" in out
        )

    @pytest.mark.parametrize("content", ["{", "[]", '{"model_max_length": "many"}'])
    def test_a_tokenizers_config_that_is_none_is_named(self, content, run, variant):
        (variant / "tokenizer_config.json").write_text(content)
        code, out, err = run(f"inspect {variant}")
        assert (code, out) == (2, "") and "tokenizer_config.json cannot be read" in err and len(err.splitlines()) == 1

    def test_runs_no_code_that_lies_beside_the_weights(self, run, variant):
        for path in variant.glob("*.py"):
            path.write_text("raise SystemExit('this code was run')")
        code, out, _ = run(f"inspect {variant}")
        assert code == 0 and "absolute+t5" in out


class TestCardAndPush:
    def test_a_card_is_written_and_pushed_with_its_model(self, run, variant, tmp_path, monkeypatch):
        save_tokenizer(variant, model_max_length=48)
        rows = [{"model": "variant", "dataset": "D", "length": 64, "metrics": {"f1": 0.625}}]
        (tmp_path / "results.json").write_text(json.dumps({"results": rows}))
        options = "--base-model a/b --license mit --language en --repo me/shown"
        code, out, _ = run(f"card {variant} --results {tmp_path / 'results.json'} {options}")
        assert (code, out.strip()) == (0, str(variant / "README.md"))
        card = ModelCard.load(variant / "README.md")
        assert (card.data.base_model, card.data.license, card.data.language) == ("a/b", "mit", "en")
        assert [result.metric_value for result in card.data.eval_results] == [0.625]
        with LoopbackHub() as hub:
            monkeypatch.setattr(constants, "ENDPOINT", hub.url)
            monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
            monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
            template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
            monkeypatch.setenv("HF_TOKEN", hub.token)
            code, out, _ = run(f"push {variant} me/shown --private --message 'Show it'")
            repository = hub.repositories["me/shown"]
            assert code == 0 and out.strip() == f"{hub.url}/me/shown/commit/{repository.sha()}"
            assert repository.private and repository.messages[-1] == "Show it"
            assert repository.files()["README.md"] == (variant / "README.md").read_bytes()
            code, _, err = run(f"push {variant} me/shown --new")
            assert code == 2 and "already exists" in err
            code, out, _ = run("inspect me/shown")
            assert code == 0 and "absolute+t5" in out and "run the modeling code" in out
            assert "truncates at 48 tokens (model_max_length); the model accepts 64" in out

    @pytest.mark.slow
    def test_a_card_that_is_there_is_lost_by_force_only(self, run, variant):
        path = variant / "README.md"
        path.write_text("---\nlibrary_name: sentence-transformers\nlicense: mit\n---\nMine.\n")
        assert run(f"card {variant}")[0] == 0
        assert "Mine." in path.read_text() and ModelCard.load(path).data.library_name == "sentence-transformers"
        assert run(f"card {variant} --license apache-2.0")[0] == 0
        card = ModelCard.load(path)
        assert (card.data.license, card.data.library_name) == ("apache-2.0", "sentence-transformers")
        path.write_text("---\n[\n---\nMine.\n")
        code, out, err = run(f"card {variant}")
        assert (
            code == 2 and out == "" and len(err.splitlines()) == 1 and "--force" in err and "Mine." in path.read_text()
        )
        assert run(f"card {variant} --force")[0] == 0
        assert "Mine." not in path.read_text() and ModelCard.load(path).data.library_name == "transformers"

    def test_output_goes_where_it_is_asked_to(self, run, variant, tmp_path):
        code, out, _ = run(f"card {variant} --out {tmp_path / 'cards' / 'x.md'}")
        assert code == 0 and ModelCard.load(tmp_path / "cards/x.md").data.library_name == "transformers"
        assert not (variant / "README.md").exists()
