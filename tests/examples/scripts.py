"""Small checkpoints and files for scripts, and the scripts in a process of their own; fixtures for folders of tests of scripts."""

import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from distributed_worker import loopback
from fresh_process import ROOT
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertConfig, BertModel, BertTokenizerFast
from transformers.utils import logging as transformers_logging


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# What every run on `Trainer` adds: no progress bars in its output, and no GPU to differ from the next machine.
QUIET = ("--disable_tqdm", "true", "--use_cpu", "true")
# What stands between Python and a script to run it in two processes on the CPU: replicas of a model, and shards of one.
LAUNCH_TWO, LAUNCH_TWO_SHARDS = (
    ("-m", "accelerate.commands.launch", "--config_file", str(ROOT / "examples" / f"accelerate_{kind}_cpu.yaml"))
    for kind in ("ddp", "fsdp2")
)


def save_checkpoint(folder: Path, text: str, *pieces: str, dropout: float = 0.1) -> Path:
    """A tiny stock BERT of random weights, and a tokenizer that knows the words of a text and some pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*sorted({*re.findall(r"\w+|[^\w\s]", text.lower())}), *pieces]
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *words]), encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def tokens_kept(folder: Path, text: str = "the ") -> set[int]:
    """How many tokens the tokenizers of a run and of its checkpoints leave of a text that is too long for all of them.

    Only where they are asked to cut: tokenizer.json, as other libraries read it, must cut and pad nothing by itself.
    """
    kept = set()
    for saved in (folder, *folder.glob("checkpoint-*")):
        tokenizer = AutoTokenizer.from_pretrained(saved)
        by_itself = Tokenizer.from_file(str(saved / "tokenizer.json"))
        assert len(by_itself.encode(text * 2000)) >= 2000 and len(by_itself.encode(text)) < 9
        kept.add(len(tokenizer(text * 2000, truncation=True)["input_ids"]))
    return kept


def command(script: str, *arguments: str | Path | float) -> list[str]:
    """How a person runs a script."""
    return [sys.executable, str(ROOT / "examples" / script), *map(str, arguments), *QUIET]


def environment(folder: Path) -> dict[str, str]:
    """The environment of a script that reads nothing from the network and caches in a folder."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder),
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": loopback(),  # for those that start two processes
    }


def run_here(script: ModuleType, *arguments: object) -> str:
    """The `main` of a script with a command line, in this process and to its end; returns what it says on stderr and warns of."""
    before, said = transformers_logging.get_verbosity(), io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger().addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
            patch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments), *QUIET])
            script.main()
    finally:
        logging.getLogger().removeHandler(handler)
        transformers_logging.set_verbosity(before)
        transformers_logging.enable_progress_bar()
    return said.getvalue()


def results(folder: Path, prefix: str | tuple[str, ...] = ("eval_", "predict_")) -> dict[str, Any]:
    """The metrics that a run wrote, without those of time."""
    metrics = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    is_time = re.compile(r"_(runtime|per_second|preparation_time)$")
    return {name: value for name, value in metrics.items() if name.startswith(prefix) and not is_time.search(name)}


@pytest.fixture(autouse=True, scope="session")
def data_sets_are_cached_in_a_temporary_folder(tmp_path_factory):
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    datasets.disable_progress_bars()
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture
def run_main(monkeypatch) -> Callable[..., None]:
    """The `main` of a script with a command line, in this process: seconds quicker than in its own."""

    def run(script: ModuleType, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
        script.main()

    return run


@pytest.fixture
def mistake(run_main, monkeypatch) -> Callable[..., str]:
    """What a script says of a wrong command line: it ends with `error: ...` on one line before weights are read."""
    from transformers import PreTrainedModel

    def refuse(*args, **kwargs):
        raise AssertionError("weights were about to be read")

    def run(script: ModuleType, *arguments: object) -> str:
        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(refuse))
        with pytest.raises(SystemExit) as stopped:
            run_main(script, *arguments)
        message = str(stopped.value)
        assert message.startswith("error: ") and "\n" not in message
        return message

    return run


@pytest.fixture
def mistake_in_training(mistake, tmp_path, monkeypatch) -> Callable[..., str]:
    """What a script says of a command line to train with that follows right arguments, in a folder of files."""

    def run(script: ModuleType, checkpoint: object, files: dict[str, str], arguments: str) -> str:
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        monkeypatch.chdir(tmp_path)
        right = ["--model_name_or_path", checkpoint, "--do_train", "--use_cpu", "true", "--output_dir", "run"]
        return mistake(script, *right, *arguments.split())

    return run


@pytest.fixture(autouse=True)
def transformers_as_talkative_as_before():
    """Scripts say for their process what transformers logs; here they share one."""
    before = transformers_logging.get_verbosity()
    yield
    transformers_logging.set_verbosity(before)
    transformers_logging.enable_progress_bar()
