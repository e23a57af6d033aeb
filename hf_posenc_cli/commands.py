"""The commands: a thin layer over the functions of hf_posenc, which is imported only after the command line was parsed.

hf-posenc schemes
hf-posenc check-scheme mine.py
hf-posenc inspect me/minilm-t5
hf-posenc card outputs/absolute_t5 --results results.json
hf-posenc push outputs/absolute_t5 me/minilm-t5
hf-posenc convert path/to/checkpoint --out outputs/t5 --position-scheme t5 --text corpus/
hf-posenc extend path/to/checkpoint --out outputs/longer --max-length 1024
hf-posenc compare path/to/checkpoint outputs/t5 --text other.txt
hf-posenc export onnx outputs/t5 model.onnx
hf-posenc export stock outputs/t5 outputs/mpnet
hf-posenc plot phase-shift me/minilm-t5 --out shift.svg
hf-posenc report me/minilm-t5 --out report.html

The options of `convert` are read from options.json, which `python tools/generate.py` writes from `ConversionArguments` and the files of the schemes.
With custom schemes (`--scheme-file`, or of installed packages), the schemes themselves are read.
"""

import inspect as introspection
import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer


# What is wrong with a command line; typer has had this class under several names.
UsageError = typer.BadParameter.__base__
OPTIONS = json.loads(Path(__file__).with_name("options.json").read_text(encoding="utf-8"))
# Config option -> kind, help, and an example where one is needed.
FLAGS: dict[str, dict[str, str]] = OPTIONS["flags"]
# Of a conversion: name -> kind, what it is for, and the default.
SETTINGS: dict[str, dict[str, Any]] = OPTIONS["convert"]
TYPES = {"boolean": bool, "integer": int, "number": float}

app = typer.Typer(
    help="Position schemes for BERT, RoBERTa and their relatives in Hugging Face transformers.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]


def _version(is_asked_for: bool) -> None:
    if is_asked_for:
        source = Path(find_spec("hf_posenc").origin).read_text(encoding="utf-8")
        [own] = re.findall(r'^__version__ = "(.+)"', source, flags=re.M)
        others = ", ".join(f"{name} {installed_version(name)}" for name in ("transformers", "torch"))
        typer.echo(f"hf_posenc {own}, {others}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print versions and exit.")
    ] = False,
    scheme_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--scheme-file",
            help="A Python file with custom position schemes. May be given several times, also after the command.",
        ),
    ] = None,
) -> None:
    """Position schemes for BERT, RoBERTa and their relatives in Hugging Face transformers."""


@app.command()
def schemes() -> None:
    """List the position schemes and their config options.

    Shows the number of parameters that each scheme adds to bert-base, whether it reads sequences longer than in training, its paper and
    its formula.
    """
    from hf_posenc.inspection import descriptions

    typer.echo(descriptions.schemes())


@app.command()
def check_scheme(
    files: Annotated[list[Path], typer.Argument(help="Python files that define position schemes.")],
) -> None:
    """Check custom position schemes.

    Checks initialization, gradients, attention implementations, padding, packed documents, caches, dtypes, saving and export, and prints a
    sentence for each. The exit code is 1 if a check fails. To compare with a formula, use Python:
    `hf_posenc.testing.check_scheme(MyScheme, formula=...)`.
    """
    from hf_posenc.custom_schemes import register_files
    from hf_posenc.testing import check_scheme

    reports = [check_scheme(scheme) for scheme in register_files(files)]
    typer.echo("\n\n".join(map(str, reports)))
    if not all(report.passed for report in reports):
        raise typer.Exit(1)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A folder, or a name on the Hub: a model or an adapter.")],
    revision: Revision = None,
) -> None:
    """Describe the positions of a model.

    Shows the scheme, its config options and parameters, where the tokenizer truncates, and how Transformers loads the model without
    hf_posenc. Reads configs and the parameter names in local weights. Reads no values, and runs no code of the checkpoint.
    """
    from hf_posenc.inspection import descriptions

    typer.echo(descriptions.inspect(model, revision))


@app.command()
def push(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A folder that save_pretrained or a Trainer wrote: a model with a position scheme, or an adapter."
        ),
    ],
    repo: Annotated[
        str, typer.Argument(help="The repository, such as me/minilm-t5. It is created if it does not exist.")
    ],
    private: Annotated[bool | None, typer.Option("--private/--public", help="Visibility of a new repository.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Fail if the repository exists.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch to push to. It is created if it does not exist.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
) -> None:
    """Push a saved model or adapter to the Hub.

    One commit with weights, modeling code, tokenizer, card, results.json and the modules of sentence-transformers. Uses HF_TOKEN or
    the login saved by `hf auth login`. Other files of a training run (optimizers, checkpoints, metrics, data) and pickled files are not
    uploaded.
    """
    from hf_posenc import hub

    typer.echo(hub.push(folder, repo, private=private, exist_ok=not new, revision=revision, message=message))


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="A saved model with a position scheme.")],
    results: Annotated[
        Path | None, typer.Option(help="JSON file with measurements (format: hf_posenc/hub/cards.py).")
    ] = None,
    repo: Annotated[str | None, typer.Option(help="The model's name on the Hub. Default: the folder's name.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The checkpoint that it was trained from, a name on the Hub.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Its license, as the Hub names it, such as apache-2.0.")] = None,
    language: Annotated[str | None, typer.Option(help="Code of its language, such as en.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: README.md in the folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the whole card, including text by others.")] = False,
) -> None:
    """Write the model card of a saved model.

    The card is made from the config and from measurements. What is not known is left out. In an existing card, text and metadata
    (license, library_name, ...) that others wrote stay, except for metadata that you give by an option. Tags, data sets and results are
    added to theirs. What this command wrote before, between two comments, is replaced.
    """
    from hf_posenc.hub.cards import write_card

    known = {"base_model": base_model, "license": license, "language": language}
    typer.echo(write_card(folder, results, repo, out, force, **known))


def _setting(name: str) -> Any:
    """The type of an option for a setting of a conversion, with its help."""
    one = SETTINGS[name]
    kind = list[str] if one["kind"] == "list" else TYPES.get(one["kind"], str)
    kind = kind | None if one["default"] is None else kind
    return Annotated[kind, typer.Option(f"--{name.replace('_', '-')}", help=one["help"])]


def _flag(name: str) -> Any:
    """The type of an option for a config option; lists and objects are written as one word."""
    kind, dashed = TYPES.get(FLAGS[name]["kind"], str), name.replace("_", "-")
    names = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    return Annotated[kind | None, typer.Option(names, help=FLAGS[name]["help"])]


def _keyword(name: str, annotation: Any, default: Any = None) -> introspection.Parameter:
    return introspection.Parameter(name, introspection.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_settings_and_flags(command: Callable) -> Callable:
    """A command that takes `**flags`, with an option for each setting of a conversion and for each registered config option except `position_scheme`."""
    vars(command).pop("__signature__", None)
    own = [
        parameter
        for parameter in introspection.signature(command).parameters.values()
        if parameter.kind is not introspection.Parameter.VAR_KEYWORD
    ]
    options = [_keyword(name, _setting(name), one["default"]) for name, one in SETTINGS.items()]
    options += [_keyword(name, _flag(name)) for name in FLAGS]
    command.__signature__ = introspection.Signature().replace(parameters=[*own, *options])
    command.__annotations__ = {p.name: p.annotation for p in (*own, *options)} | {"return": None}
    return command


def _flags_of(given: dict[str, Any]) -> dict[str, Any]:
    """Config options from their values on the command line."""
    flags = {name: value for name, value in given.items() if value is not None}
    for name, value in flags.items():
        if FLAGS[name]["kind"] == "list":
            flags[name] = [item.strip() for item in value.split(",")]
        elif FLAGS[name]["kind"] == "object":
            try:
                flags[name] = json.loads(value)
            except ValueError as error:
                option = name.replace("_", "-")
                example = FLAGS[name]["example"]
                raise ValueError(f"--{option} must be a JSON object such as {example}, got {value!r}") from error
    return flags


Text = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="A file (.jsonl: the 'text' of each row), a folder or the name of a data set (NAME or NAME:CONFIG). May be given several times. Use text "
        "of the model's domain. Default: the Python language reference.",
    ),
]


@app.command()
@_with_settings_and_flags
def convert(
    model: Annotated[str, typer.Argument(help="A folder (of sentence-transformers, too), or a name on the Hub.")],
    *,
    out: Annotated[Path | None, typer.Option(help="The folder to write, atomically. Required.")] = None,
    position_scheme: Annotated[
        str, typer.Option("--position-scheme", help="The new scheme. `hf-posenc schemes` lists them.")
    ],
    **flags: Any,
) -> None:
    """Change the position scheme of a trained model.

    The converted model keeps what the original knows.

    The new parameters are computed from the old ones, fitted to the attention scores, and then distilled on unlabeled text. Use --text to
    give text of your domain. With `--position-scheme absolute` and a larger --max-length, the result is a checkpoint of Transformers'
    own class with a longer position embedding matrix.
    """
    if out is None:
        raise typer.BadParameter("Missing option '--out'.")
    from hf_posenc.conversion import ConversionArguments, convert
    from hf_posenc.conversion.distillation import is_first_process

    settings = {name: flags.pop(name) for name in SETTINGS}
    _, report = convert(model, position_scheme, ConversionArguments(output=out, **settings), **_flags_of(flags))
    if is_first_process():
        typer.echo(f"{report.table()}\n\nwrote {out}")


@app.command()
def extend(
    model: Annotated[str, typer.Argument(help="A folder (of sentence-transformers, too), or a name on the Hub.")],
    *,
    out: Annotated[Path | None, typer.Option(help="The folder to write. Required.")] = None,
    max_length: Annotated[int, typer.Option("--max-length", help="The new maximum sequence length, in tokens.")],
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="chunks (average the vectors of chunks; needs sentence-transformers), trained (a longer position embedding matrix whose new "
            "rows are trained), or tile, mean, interpolate (a longer matrix, not trained).",
        ),
    ] = "chunks",
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="Your texts: a file (.jsonl: the 'text' of each row), a folder or the name of a data set (NAME or NAME:CONFIG). May be given several "
            "times. Used to count texts longer than the old length, and to train by 'trained'. Default: none; 'trained' uses the Python "
            "language reference.",
        ),
    ] = None,
    trained_length: _setting("trained_length") = None,
    max_steps: _setting("max_steps") = None,
    max_minutes: _setting("max_minutes") = None,
    seed: _setting("seed") = 0,
    resume: _setting("resume") = False,
) -> None:
    """Let a model read longer texts. Short texts keep their vectors.

    This is verified before anything is written. Texts beyond the old length are no longer truncated, and their vectors change. For models
    with learned absolute positions (BERT, RoBERTa, MPNet and their relatives).
    """
    if out is None:
        raise typer.BadParameter("Missing option '--out'.")
    from hf_posenc.conversion import extend
    from hf_posenc.conversion.distillation import is_first_process

    training = {"max_steps": max_steps, "max_minutes": max_minutes, "seed": seed, "resume": resume}
    found = extend(model, max_length, output=out, method=method, text=text, trained_length=trained_length, **training)
    if is_first_process():
        typer.echo(f"{found}\n\nwrote {out}")


@app.command()
def compare(
    original: Annotated[str, typer.Argument(help="The model before conversion: a folder, or a name on the Hub.")],
    converted: Annotated[str, typer.Argument(help="The converted model: a folder, or a name on the Hub.")],
    text: Text = None,
    trained_length: Annotated[
        int | None,
        typer.Option(
            "--trained-length",
            help="Training length of the original, in tokens. Default: that of the conversion, or as for convert.",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", help="The longest text to measure, in tokens. Default: that of the conversion."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the metrics to.")] = None,
) -> None:
    """Measure how well a conversion agrees with the original."""
    from hf_posenc.conversion import compare
    from hf_posenc.files import check_file, write_whole

    if out is not None:
        check_file(out)
    found = compare(original, converted, text=text, trained_length=trained_length, max_length=max_length)
    if out is not None:
        write_whole({out: found.to_json()})
    typer.echo(found.table())


exports = typer.Typer(help="Write a model in another format.", rich_markup_mode=None)
app.add_typer(exports, name="export")


@exports.command("stock")
def export_stock(
    checkpoint: Annotated[str, typer.Argument(help="A folder or a name on the Hub: a model with a position scheme.")],
    out: Annotated[Path, typer.Argument(help="The folder to write, atomically.")],
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length", help="Maximum sequence length of the new model, in tokens. Default: the tokenizer's."
        ),
    ] = None,
    single_text: Annotated[
        bool,
        typer.Option("--single-text", help="The model is never given pairs of texts, so it needs no token types."),
    ] = False,
    revision: Revision = None,
) -> None:
    """Write a model as an architecture of Transformers, which loads without hf_posenc and without custom code.

    t5 becomes MPNet, deberta becomes DeBERTa-v2, and rope becomes Jina Embeddings v3 (Transformers 5.4 and newer). t5 and deberta may be
    combined with absolute; absolute alone becomes the original architecture. The folder is only written if both models give the same outputs.
    Models that the architecture cannot represent exactly are refused.
    """
    from hf_posenc.export import stock

    typer.echo(stock.export(checkpoint, out, max_length=max_length, single_text=single_text, revision=revision))


@exports.command("onnx")
def export_onnx(
    checkpoint: Annotated[
        str, typer.Argument(help="A folder or a name on the Hub: a model with or without a position scheme.")
    ],
    out: Annotated[Path, typer.Argument(help="The file to write, atomically, such as model.onnx.")],
    revision: Revision = None,
) -> None:
    """Write a model as ONNX, for ONNX Runtime.

    Exports all families and schemes with their task heads, the same families without a position scheme, and DeBERTa (v1, v2, v3), for any batch
    size and length. What depends on parameters alone is computed in advance. The file is only written if ONNX Runtime gives PyTorch's
    outputs at several shapes, with padding. Needs the extra `export`.
    """
    from hf_posenc.export.onnx import exporting as onnx

    typer.echo(onnx.export(checkpoint, out, revision))


@app.command()
def plot(
    what: Annotated[str, typer.Argument(help="Name of a figure. The error for a wrong name lists them.")],
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_SCHEME",
            help="A folder, a name on the Hub or, where no text is read, the name of a scheme such as alibi.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write: .png or .svg.")],
) -> None:
    """Draw a figure of what positions do in a model.

    Prints a sentence that says what it shows. The file is written atomically. Needs the extra `analysis`.
    """
    from hf_posenc import analysis

    typer.echo(f"{out}: {analysis.plot_to_file(what, model, out)}")


@app.command()
def report(
    models: Annotated[
        list[str],
        typer.Argument(help="Folders or names on the Hub, shown side by side. NAME=MODEL gives one another name."),
    ],
    out: Annotated[
        Path, typer.Option(help="The page to write, such as report.html. The numbers are written to report.html.json.")
    ],
    figure: Annotated[list[str] | None, typer.Option(help="Only this figure. May be given several times.")] = None,
    text: Text = None,
) -> None:
    """Write a page about what positions do in models.

    Contains every figure, with a sentence that says what it shows for the model. Writes one HTML file that loads nothing else, and
    a JSON file with the numbers, which only ever replaces the numbers of another report. Needs the extra `analysis`.
    """
    from hf_posenc import analysis

    analysis.check_page(out)
    texts = None if text is None else analysis.read_texts(*text)
    made = analysis.report(*models, texts=texts, figures=figure)
    typer.echo("\n".join(map(str, made.save(out))))


def split_scheme_files(arguments: list[str]) -> tuple[list[str], list[str]]:
    """A command line without `--scheme-file`, at any position, and the files."""
    kept, files, left = [], [], iter(arguments)
    for argument in left:
        if argument == "--scheme-file":
            files.append(next(left, None))
        elif argument.startswith("--scheme-file="):
            files.append(argument.partition("=")[2])
        else:
            kept.append(argument)
    if None in files or "" in files:
        raise typer.BadParameter("Option '--scheme-file' requires an argument.")
    return kept, files


def check_not_empty(arguments: list[str]) -> None:
    """Raise typer's usage error for an empty argument: as a path, it would be the current folder."""
    for before, argument in zip(["", *arguments], arguments):
        option, has_value, value = argument.partition("=")
        if not argument.strip() or (option.startswith("--") and has_value and not value.strip()):
            option = option.strip() or before
            what = f"Option '{option}'" if option.startswith("--") else "An argument"
            raise typer.BadParameter(f"{what} is empty: give a value, or leave it out.")


def _register_schemes(files: list[str]) -> None:
    """Register the schemes of files, and give `convert` the config options of all schemes that are not in options.json."""
    if not files and not entry_points(group="hf_posenc.schemes"):
        return
    from hf_posenc.custom_schemes import register_files
    from hf_posenc.inspection import flags_by_name

    register_files(files)
    FLAGS.update(flags_by_name())
    _with_settings_and_flags(convert)


def main(arguments: list[str] | None = None) -> None:
    """Run a command, by default that of the command line.

    An error is printed as one line. The exit code is 2, or 1 if training diverged.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # Options with underscores, as configs and scripts have them, are the same options. Behind -- there are none.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [
        re.sub(r"^--[a-z0-9_]+", lambda option: option[0].replace("_", "-"), given) for given in arguments[:end]
    ]
    arguments = options + arguments[end:]
    try:
        check_not_empty(arguments)
        arguments, files = split_scheme_files(arguments)
        _register_schemes(files)
        code = app(args=arguments or ["--help"], prog_name="hf-posenc", standalone_mode=False)
    except (UsageError, OSError, ValueError, TypeError, ImportError) as error:
        message = error.format_message() if isinstance(error, UsageError) else str(error)
        typer.echo(f"hf-posenc: {' '.join(message.split())}", err=True)
        sys.exit(2)
    except FloatingPointError as error:  # such as `hf_posenc.conversion.Diverged`
        typer.echo(f"hf-posenc: {error}", err=True)
        sys.exit(1)
    sys.exit(code or 0)
