"""Checks the installed package: run this file with the Python that a wheel or an sdist was installed in.

    python tests/check_installed.py                # needs nothing but the package's own requirements
    python tests/check_installed.py --examples     # three examples of the README as well, which need the extra train

It is complete and typed, its command runs, a variant saved with it loads again, and loads without it too, from the code saved beside it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoModel, BertConfig, BertModel, DebertaV2Config, DebertaV2Model

import hf_posenc


README = Path(__file__).resolve().parents[1] / "README.md"
SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
# What the examples begin with or import, which tells them apart; they share their names.
EXAMPLES = (
    "import hf_posenc  # Transformers",
    "from hf_posenc.training import PositionTrainer",
    "from transformers import AutoModel\n",
)
LOAD = """
import sys
import torch
if {without_plugin}:
    sys.modules["hf_posenc"] = None
else:
    import hf_posenc
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code={without_plugin})
assert model.config.model_type == "posenc_bert"
expected = torch.load(sys.argv[2])
torch.testing.assert_close(model(torch.arange(9)[None]).last_hidden_state, expected, rtol=0, atol=1e-6)
"""


def check_files() -> None:
    installed = distribution("hf_posenc")
    files = {str(file) for file in installed.files}
    assert Path(hf_posenc.__file__) == Path(installed.locate_file("hf_posenc/__init__.py")), (
        "not the installed package"
    )
    assert installed.version == hf_posenc.__version__
    assert "hf_posenc/py.typed" in files
    assert any(file.endswith("/LICENSE") for file in files)
    folders = ("hf_posenc/", "hf_posenc_cli/", f"hf_posenc-{installed.version}.dist-info/")
    elsewhere = {Path(file).name for file in files if not file.startswith(folders)}
    assert elsewhere == {"hf-posenc"}, f"beside its folders the wheel installs {sorted(elsewhere)}"


def check_command() -> None:
    command = Path(sys.executable).with_name("hf-posenc")
    table = subprocess.run([command, "schemes"], check=True, capture_output=True, text=True).stdout
    assert "transformer_xl" in table


@torch.no_grad()
def save_variant(folder: Path) -> None:
    """A tiny stock checkpoint, loaded with a flag, its positions filled with random values, saved with its output."""
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES, initializer_range=0.2)).save_pretrained(folder / "stock")
    model = AutoModel.from_pretrained(folder / "stock", position_scheme="absolute+t5")
    tokens = torch.arange(9)[None]
    silent = model(tokens).last_hidden_state
    for parameter in hf_posenc.position_parameters(model).values():
        parameter.normal_()
    output = model(tokens).last_hidden_state
    assert (output - silent).abs().max() > 1e-2, "positions make no difference, so nothing would be checked"
    model.save_pretrained(folder / "variant")
    torch.save(output, folder / "output.pt")


def run_examples(folder: Path) -> None:
    """Three blocks of the README, as they are there, with tiny checkpoints under the names that they load."""
    BertModel(BertConfig(**SIZES)).save_pretrained(folder / "google-bert/bert-base-uncased")
    DebertaV2Model(DebertaV2Config(**SIZES)).save_pretrained(folder / "microsoft/deberta-v3-base")
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    os.chdir(folder)
    names = {"train_dataset": [{"input_ids": [1, 2, 3], "labels": number % 2} for number in range(8)]}
    for example in EXAMPLES:
        [block] = [block for block in blocks if example in block]
        exec(compile(block, "README.md", "exec"), names)
    assert names["model"].config._attn_implementation == "sdpa"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", action="store_true", help="Run three examples of the README.")
    arguments = parser.parse_args()
    check_files()
    check_command()
    with tempfile.TemporaryDirectory() as folder:
        save_variant(Path(folder))
        for without_plugin in (False, True):
            code = LOAD.format(without_plugin=without_plugin)
            subprocess.run([sys.executable, "-c", code, f"{folder}/variant", f"{folder}/output.pt"], check=True)
        if arguments.examples:
            run_examples(Path(folder))
            os.chdir("/")
    print(f"hf_posenc {hf_posenc.__version__}: it is installed whole, loads, saves and reloads")


if __name__ == "__main__":
    main()
