"""The core tests with whatever versions are installed, and what that means where they are newer than those tested.

    python tests/newest_versions.py REPORT
    pytest $(python tests/newest_versions.py --core)

With the versions that docs/versions.md names as tested, a failure is a failure. With newer ones it is news: it is written to
REPORT, one line for each package that is newer and the tests that failed, and the exit status is 0.
"""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version


ROOT = Path(__file__).parents[1]
PACKAGES = ("transformers", "accelerate", "peft", "datasets", "sentence-transformers")
CORE = (
    "tests/integrations/test_transformers_surface.py",
    "tests/integrations/test_renamed_transformers.py",
    "tests/modeling/models/test_generation.py",
    "tests/integrations/test_entry_points.py",
    "tests/test_saving.py",
    "tests/modeling/models/test_families.py",
    "tests/modeling/models/test_losses.py",
    "tests/integrations/test_unpad_as_called.py",
    "tests/integrations/test_stock_attention_clients.py",
    "tests/integrations/test_adapters.py",
    "tests/test_readme.py",
    "tests/modeling/schemes/test_absolute.py",
    "tests/modeling/schemes/test_t5.py",
    "tests/modeling/schemes/test_deberta.py",
    "tests/pipelines/test_long_texts.py",
)


def tested(page: str) -> dict[str, Version]:
    """The newest version of each package that the page's table names."""
    rows = re.findall(r"^\| ([\w-]+) \| \S+ \| (\S+) \|", page, flags=re.M)
    return {name: Version(newest) for name, newest in rows}


def newer(installed: dict[str, Version], known: dict[str, Version]) -> list[str]:
    """Packages that are newer than any version tested."""
    return [name for name, found in installed.items() if found > known[name]]


def report(names: list[str], installed: dict[str, Version], output: str) -> str:
    """What is printed last of all."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, flags=re.M)
    told = [f"NEW {name} {installed[name]}: {len(failed)} failed" for name in names]
    return "\n".join([*told, *(f"  {test}" for test in failed)]) + "\n"


def main() -> int:
    if sys.argv[1:] == ["--core"]:
        print(*CORE)
        return 0
    known = tested((ROOT / "docs" / "versions.md").read_text(encoding="utf-8"))
    installed = {name: Version(version(name)) for name in PACKAGES}
    print(", ".join(f"{name} {found}" for name, found in installed.items()), flush=True)
    names = newer(installed, known)
    command = [sys.executable, "-m", "pytest", *CORE]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(run.stdout)
    if not names:
        return run.returncode
    Path(sys.argv[1]).write_text(report(names, installed, run.stdout), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
