"""Every block of code in README and docs runs as it is written.

Names on the Hub and path/to/... are folders here: the packaged MiniLM where a pretrained BERT is asked for, tiny models elsewhere.
The Python blocks of a page share their names. One with a block of text after it raises that error; `...` at the end of a
text stands for more. Conversions without a budget of their own take 20 steps. Shell commands of the package are run, other
scripts get as far as their arguments. Comments before a block:

    <!-- file: NAME -->          is a file of the folder in which the others run, and not run itself
    <!-- without hf_posenc -->   runs in a process of its own, where the package cannot be imported
    <!-- needs: PACKAGE -->      the page's Python is run where PACKAGE is installed
    <!-- parsed: REASON -->      the commands are only parsed
    <!-- not run: REASON -->
"""

import argparse
import ast
import io
import json
import re
import runpy
import shlex
import sys
import tomllib
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import arguments as command_line
import pytest
import tiny_checkpoints
import typer
from fresh_process import ROOT, run_fresh
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    TrainingArguments,
)

import hf_posenc
import hf_posenc_cli
from hf_posenc.conversion import distillation
from hf_posenc.training import PositionTrainer


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
# Where names on the Hub lead.
PRETRAINED = (
    "google-bert/bert-base-uncased",
    "google-bert/bert-base-cased",
    "path/to/all-MiniLM-L6-v2",
)
CONVERTED = ("path/to/checkpoint", "sentence-transformers/all-MiniLM-L6-v2")
DEBERTA = ("microsoft/deberta-v3-base", "path/to/deberta-v3")
CLASSIFIERS = ("MoritzLaurer/deberta-v3-base-zeroshot-v2.0", "path/to/reranker", "cross-encoder/ms-marco-MiniLM-L6-v2")
TAGGER = "path/to/tagger"
VARIANTS = ("path/to/my-model", "me/minilm-t5")


@dataclass
class Block:
    """A block of code, with the comment before it and the error that the page says it raises."""

    code: str
    language: str
    note: str
    raises: str | None

    @classmethod
    def of_page(cls, page: Path) -> list["Block"]:
        text = page.read_text(encoding="utf-8")
        found = [*BLOCK.finditer(text)]
        after = [*found[1:], None]
        is_next = [
            late is not None and not text[early.end() : late.start()].strip() for early, late in zip(found, after)
        ]
        return [
            cls(
                block["code"],
                block["language"],
                block["note"] or "",
                late["code"].strip() if is_followed and late["language"] == "text" else None,
            )
            for block, late, is_followed in zip(found, after, is_next)
        ]


def commands(code: str) -> list[list[str]]:
    """The words of each command of a shell block."""
    lines = code.replace("\\\n", " ").splitlines()
    found = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    return [command for command in found if command]


BLOCKS = {page.name: Block.of_page(page) for page in PAGES}


def named(language: str) -> list[str]:
    return [page for page, blocks in BLOCKS.items() if any(block.language == language for block in blocks)]


@pytest.fixture(scope="module")
def world(tmp_path_factory, minilm) -> Path:
    """A folder in which the names of the pages lead somewhere."""
    folder = tmp_path_factory.mktemp("world")

    def place(name: str) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        return folder / name

    for name in PRETRAINED:
        place(name).symlink_to(minilm)
    for name in CONVERTED:
        tiny_checkpoints.save(place(name))
    tiny_checkpoints.save(place(TAGGER), head="ForTokenClassification")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = DebertaV2Config(
        vocab_size=len(tiny_checkpoints.tokenizer()), relative_attention=True, pos_att_type=["c2p", "p2c"], **sizes
    )
    for name in (*DEBERTA, *CLASSIFIERS):
        config.num_labels = 1 if "zeroshot" not in name else 2
        config.label2id = {"entailment": 0, "not_entailment": 1} if "zeroshot" in name else {"score": 0}
        config.id2label = {number: label for label, number in config.label2id.items()}
        kind = DebertaV2ForSequenceClassification if name in CLASSIFIERS else DebertaV2Model
        kind(config).save_pretrained(place(name))
        tiny_checkpoints.tokenizer().save_pretrained(folder / name)
    variant = AutoModelForSequenceClassification.from_pretrained(
        folder / "path/to/checkpoint", position_scheme="absolute+t5"
    )
    for name in VARIANTS:
        variant.save_pretrained(place(name))
        tiny_checkpoints.tokenizer().save_pretrained(folder / name)
    (folder / "my_corpus").mkdir()
    for number in range(20):
        (folder / "my_corpus" / f"{number}.txt").write_text(tiny_checkpoints.text(40, seed=number), encoding="utf-8")
    for name in ("examples", "benchmarks", "research", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture
def here(world, monkeypatch, page, schemes_of_the_package) -> Path:
    monkeypatch.chdir(world)
    monkeypatch.syspath_prepend(world)
    for block in BLOCKS[page]:
        if block.note.startswith("file: "):
            (world / block.note.removeprefix("file: ")).write_text(block.code, encoding="utf-8")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The rest of a conversion's hundreds of steps shows nothing more of the code on a page.
    monkeypatch.setattr(distillation, "DEFAULT_STEPS", 20)
    return world


def given(text: str) -> dict:
    """What the blocks of a page take as given."""
    names = {}
    if "train_dataset" in text or "trainer." in text:
        tokenizer = AutoTokenizer.from_pretrained("google-bert/bert-base-uncased")
        names["train_dataset"] = [{**tokenizer("Dog bites man."), "labels": number % 2} for number in range(8)]
    if "trainer." in text:
        model = AutoModelForSequenceClassification.from_pretrained("path/to/my-model")
        names["trainer"] = PositionTrainer(model, TrainingArguments("outputs/given"))
    return names


# Prints the error of code between two marks.
MARK = "=== error ==="
CAUGHT = f"""
try:
    exec({{code!r}})
except Exception as error:
    print("{MARK}", type(error).__name__ + ":", error, "{MARK}")
"""


def error_of(code: str, names: dict) -> str:
    """The error that code ends with, as a traceback's last line has it."""
    with pytest.raises(Exception) as raised:
        exec(code, names)
    return f"{raised.type.__name__}: {raised.value}"


def assert_says(found: str, expected: str) -> None:
    start, more, _ = " ".join(expected.split()).partition(" ...")
    found = " ".join(found.split())
    assert (found[: len(start)] if more else found) == start


@pytest.mark.slow
@pytest.mark.parametrize("page", named("python"))
def test_python(page, here, tmp_path):
    others = "not run: ", "file: "
    blocks = [block for block in BLOCKS[page] if block.language == "python" and not block.note.startswith(others)]
    for package in [block.note.removeprefix("needs: ") for block in blocks if block.note.startswith("needs: ")]:
        pytest.importorskip(package)
    names = given("".join(block.code for block in blocks))
    try:
        for block in blocks:
            code = compile(block.code, page, "exec")
            if block.note == "without hf_posenc":
                printed = run_fresh(CAUGHT.format(code=block.code), tmp_path, plugin=False)
                errors = printed.split(MARK)[1:2]
                assert_says("".join(errors), block.raises or "")
            elif block.raises is not None:
                assert_says(error_of(code, names), block.raises)
            else:
                exec(code, names)
    finally:
        hf_posenc.install()
        hf_posenc.cache_projections(True)


class Parsed(BaseException):
    """A script has parsed its arguments."""


def parse_script(script: str, words: list[str], monkeypatch) -> None:
    """Run a script of examples/ until its arguments are parsed, or one of benchmarks/ and research/ with --help, which must name them.

    `...` stands for arguments that are not given: there is nothing to parse then.
    """
    if "..." in words:
        assert Path(script).is_file()
        return
    is_example = script.startswith("examples/")
    # The scripts to copy have the parser of Python.
    stands_alone = is_example and "argparse.ArgumentParser(" in Path(script).read_text(encoding="utf-8")
    parser, method = (argparse.ArgumentParser, "parse_args") if stands_alone else (command_line.ScriptParser, "parse")
    parse = getattr(parser, method)

    def stop(parser):
        raise Parsed(parse(parser))

    monkeypatch.setattr(parser, method, stop)
    monkeypatch.syspath_prepend(ROOT / Path(script).parent)
    monkeypatch.setattr(sys, "argv", [script, *(words if is_example else ["--help"])])
    written = io.StringIO()
    with pytest.raises(Parsed if is_example else SystemExit) as ended, redirect_stdout(written):
        runpy.run_path(script, run_name="__main__")
    if not is_example:
        assert not ended.value.code
        options = [word for word in words if word.startswith("--")]
        assert [option for option in options if not re.search(rf"{option}\b", written.getvalue())] == []


def parse_posenc(words: list[str]) -> None:
    words, files = hf_posenc_cli.commands.split_scheme_files(words)
    assert all(Path(file).is_file() for file in files)
    group = typer.main.get_command(hf_posenc_cli.app)
    with group.make_context("hf-posenc", [*words], resilient_parsing=False) as context:
        name, command, rest = group.resolve_command(context, words)
        command.make_context(name, rest, parent=context).close()


def check_command(words: list[str], note: str, monkeypatch) -> None:
    program, *rest = words
    if program == "hf-posenc":
        parse_posenc(rest)
        if not note.startswith("parsed: "):
            with pytest.raises(SystemExit) as ended:
                hf_posenc_cli.main(rest)
            assert not ended.value.code
    elif program == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        assert rest.pop(0) == "launch"
        parsed = launch_command_parser().parse_args(rest)
        if parsed.training_script_args:
            parse_script(parsed.training_script, parsed.training_script_args, monkeypatch)
        if parsed.config_file is not None:
            assert Path(parsed.config_file).is_file()
    elif program == "python" and rest[0].endswith(".py"):
        parse_script(rest[0], rest[1:], monkeypatch)
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = {extra for word in rest for extra in "".join(re.findall(r"\[(.*)\]", word)).split(",") if extra}
        assert extras <= project["optional-dependencies"].keys()
        assert all(Path(word).is_file() for word in rest if word.endswith(".txt"))
    else:
        assert program in ("python3", ".", "pytest", "ruff", "mypy", "mkdocs")


@pytest.mark.slow
@pytest.mark.parametrize("page", named("bash"))
def test_shell(page, here, monkeypatch):
    for block in BLOCKS[page]:
        if block.language == "bash" and not block.note.startswith("not run: "):
            for words in commands(block.code):
                with monkeypatch.context() as patch:
                    check_command(words, block.note, patch)


def test_blocks_are_written_well():
    for page, block in [(page, block) for page, blocks in BLOCKS.items() for block in blocks]:
        assert block.language in ("", "python", "bash", "text", "json", "toml"), page
        assert block.note == "" or re.fullmatch(
            r"without hf_posenc|(file|needs): [\w.]+|(parsed|not run): .{10,}", block.note
        ), page
        if block.language == "python":
            ast.parse(block.code)
        elif block.language == "json":
            json.loads(block.code)
        elif block.language == "toml":
            tomllib.loads(block.code)
        elif block.language == "bash":
            assert commands(block.code)
