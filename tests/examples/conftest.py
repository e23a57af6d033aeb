"""Settings of the tests of examples."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from transformers.utils import logging


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
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()
