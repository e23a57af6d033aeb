"""Checks an installed wheel with nothing but its own requirements: run this file with the Python it is installed in.

It is complete and typed, its command runs, a variant saved with it loads again, and loads without it too, from the code saved beside it.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoModel, BertConfig, BertModel

import hf_posenc


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
    folders = ("hf_posenc/", f"hf_posenc-{installed.version}.dist-info/")
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
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, intermediate_size=16, initializer_range=0.2)).save_pretrained(folder / "stock")
    model = AutoModel.from_pretrained(folder / "stock", position_scheme="absolute+t5")
    tokens = torch.arange(9)[None]
    silent = model(tokens).last_hidden_state
    for parameter in hf_posenc.position_parameters(model).values():
        parameter.normal_()
    output = model(tokens).last_hidden_state
    assert (output - silent).abs().max() > 1e-2, "positions make no difference, so nothing would be checked"
    model.save_pretrained(folder / "variant")
    torch.save(output, folder / "output.pt")


def main() -> None:
    check_files()
    check_command()
    with tempfile.TemporaryDirectory() as folder:
        save_variant(Path(folder))
        for without_plugin in (False, True):
            code = LOAD.format(without_plugin=without_plugin)
            subprocess.run([sys.executable, "-c", code, f"{folder}/variant", f"{folder}/output.pt"], check=True)
    print(f"hf_posenc {hf_posenc.__version__}: the wheel installs, loads, saves and reloads")


if __name__ == "__main__":
    main()
