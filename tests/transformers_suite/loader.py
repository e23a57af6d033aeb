"""transformers' own common model tests: fetched with the source distribution of the installed version, and imported.

The source distribution carries `tests/test_modeling_common.py` and `tests/test_configuration_common.py`, but not three
neighbours that they import a name from: two mixins, whose stand-ins here are empty (generation and export have tests of
their own in this project), and a dictionary of config settings.
"""

import importlib
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

from filelock import FileLock

from hf_posenc import variants
from hf_posenc.integrations import hooks as plugin


FILES = ("test_modeling_common.py", "test_configuration_common.py")
PACKAGE = "transformers_common_tests"


class FetchError(Exception):
    """The tests of the installed version could not be had."""


class ExportTesterMixin:
    """In place of the mixin that the archive leaves out."""


class GenerationTesterMixin:
    """In place of the mixin that the archive leaves out."""


# Settings that every config has to take, none of them a default.
CONFIG_COMMON_KWARGS = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 3,
    "architectures": ["SomeModel"],
    "id2label": {0: "a", 1: "b", 2: "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
    "problem_type": "regression",
}
STAND_INS = {
    "exporters.test_export": {"ExportTesterMixin": ExportTesterMixin},
    "generation.test_utils": {"GenerationTesterMixin": GenerationTesterMixin},
    "utils.test_configuration_utils": {"config_common_kwargs": CONFIG_COMMON_KWARGS},
}


def fetch(version: str, cache: Path) -> Path:
    """The folder with the test files of a transformers version, downloaded if it is not in the cache yet.

    The folder appears whole or not at all, also when several processes ask for it at once.

    Raises:
        FetchError: pip cannot download the source distribution, or it carries no tests.
    """
    folder = cache / f"transformers-{version}"
    with FileLock(cache / f"transformers-{version}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as workspace:
                files = Path(workspace, "files")
                _unpack(_download(version, Path(workspace)), files)
                files.rename(folder)
    return folder


def _download(version: str, folder: Path) -> Path:
    """pip's download of the source distribution, from wherever pip is set up to look."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
    try:
        subprocess.run(
            [*command, "--dest", str(folder), f"transformers=={version}"],
            check=True,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return next(folder.glob("transformers-*.tar.gz"))
    except subprocess.CalledProcessError as error:
        raise FetchError(f"pip cannot download transformers=={version}: {error.stderr.strip()[-500:]}") from error
    except (OSError, StopIteration, subprocess.TimeoutExpired) as error:
        raise FetchError(f"pip cannot download transformers=={version}: {error!r}") from error


def _unpack(archive: Path, folder: Path) -> None:
    """The two test files of a source distribution, as an importable folder."""
    folder.mkdir()
    (folder / "__init__.py").touch()
    root = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        for name in FILES:
            try:
                content = tar.extractfile(f"{root}/tests/{name}").read()
            except KeyError as error:
                raise FetchError(f"{archive.name} carries no tests/{name}") from error
            (folder / name).write_bytes(content)


def marks(folder: Path) -> set[str]:
    """Names of the pytest marks that the fetched modules use; with --strict-markers they have to be declared."""
    return {
        mark for name in FILES for mark in re.findall(r"\bmark\.(\w+)", (folder / name).read_text(encoding="utf-8"))
    }


def load(folder: Path) -> tuple[ModuleType, ModuleType]:
    """Import the fetched modules: the common tests of models, and those of configs."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[PACKAGE] = package
    for name, contents in STAND_INS.items():
        module = ModuleType(f"{PACKAGE}.{name}")
        vars(module).update(contents)
        sys.modules[module.__name__] = module
    modeling, configuration = (importlib.import_module(f"{PACKAGE}.{Path(name).stem}") for name in FILES)
    _name_variants(modeling)
    return modeling, configuration


def _name_variants(modeling: ModuleType) -> None:
    """Enter the variants into the tables of names by which the tests tell base models and heads apart.

    Into the test module's own tables: transformers has to cope with the variants as they are.
    """
    names = {stock.__name__: variant.__name__ for stock, variant in variants.VARIANT_MODELS.items()}
    for table_name, table in list(vars(modeling).items()):
        if table_name.endswith("_MAPPING_NAMES"):
            named = {
                c.model_type: names[table[c.stock_model_type]] for c in plugin.CONFIGS if c.stock_model_type in table
            }
            setattr(modeling, table_name, {**table, **named})
