"""The notebook runs from top to bottom, and the outputs that it is kept with are those that it gives, but for numbers."""

import re
from pathlib import Path

import pytest
from fresh_process import ROOT


nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: the extra 'test' brings it")
nbformat = pytest.importorskip("nbformat")

NOTEBOOK = ROOT / "examples" / "tour.ipynb"
# Numbers differ from machine to machine in their last digits, and with them how many digits and dashes a table's column takes.
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]\d+)?%?")
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|work|opt|Users|private|mnt|var)\b|site-packages|[A-Z]:\\")
KEPT = nbformat.read(NOTEBOOK, as_version=4)
CODE = [cell for cell in KEPT.cells if cell.cell_type == "code"]


def form(cell) -> list[tuple[str, str]]:
    """What a cell put out: the kind of each output, and its text without the numbers in it; one stream may come in parts."""
    found: list[tuple[str, str]] = []
    for output in cell.outputs:
        is_stream = output.output_type == "stream"
        kind = output.name if is_stream else ", ".join(sorted(output.data))
        text = output.text if is_stream else output.data.get("text/plain", "")
        if is_stream and found and found[-1][0] == kind:
            text = found.pop()[1] + text
        found.append((kind, text))
    return [(kind, re.sub(r"-{3,}", "---", re.sub(r" +", " ", NUMBER.sub("#", text)))) for kind, text in found]


@pytest.mark.slow
def test_it_runs_and_gives_what_it_is_kept_with(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(
        "OMP_NUM_THREADS", "1"
    )  # other tests run beside it: threads that wait for each other take minutes
    notebook = nbformat.from_dict(KEPT)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    executed = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    again = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [form(cell) for cell in again] == [form(cell) for cell in CODE]


def test_it_is_kept_as_it_was_run_from_top_to_bottom():
    nbformat.validate(KEPT)
    assert [cell.execution_count for cell in CODE] == [*range(1, len(CODE) + 1)]
    outputs = [output for cell in CODE for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_its_outputs_say_what_the_text_around_them_does():
    printed = "".join(output.text for cell in CODE for output in cell.outputs if output.output_type == "stream")
    assert printed.count("same outputs: True") == 2 and "False" not in printed
    assert "BertModel -> PosencBertModel" in printed and "PosencBertModel t5" in printed
    assert "reads a text in the same way wherever it begins" in printed and "matters to MiniLM" in printed
    assert re.search(r"^stock: (IndexError|RuntimeError), its table ends at 512$", printed, flags=re.MULTILINE)
    assert re.search(r"^converted: \(1, \d{4}, 384\)$", printed, flags=re.MULTILINE)
    pictures = [output for cell in CODE for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 2


def test_nothing_of_a_machine_is_in_it():
    text = Path(NOTEBOOK).read_text(encoding="utf-8")
    without_pictures = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not MACHINE.search(without_pictures)
    assert len(text) < 600_000
