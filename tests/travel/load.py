"""Loads what save.py has saved, by the code beside the weights alone: python tests/travel/load.py FOLDER

    OLD/python tests/travel/save.py FOLDER && NEW/python tests/travel/load.py FOLDER

A variant carries its code, so that who has not this package can load it, by whatever version of transformers. Here the package
cannot be imported, the other Python may have another version, and what is computed must be what was.
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path


# Code that transformers copies from checkpoints comes from these alone; set before transformers is imported.
modules = tempfile.TemporaryDirectory()
os.environ |= {"HF_MODULES_CACHE": modules.name, "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402
import transformers  # noqa: E402


class Refuses:
    """A finder for which this package is not installed, whether it is or not."""

    @staticmethod
    def find_spec(fullname: str, path=None, target=None):
        if fullname.partition(".")[0] == "hf_posenc":
            raise ImportError("hf_posenc must not be needed")


@torch.no_grad()
def check(folder: Path) -> float:
    """Load a variant: the largest difference of what it computes."""
    saved = torch.load(folder / "computed.pt")
    inputs, expected = saved["inputs"], saved["expected"]
    auto_class = getattr(transformers, saved["auto_class"])
    model, loading = auto_class.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert not loading["missing_keys"] and not loading["unexpected_keys"], loading
    output = model.eval()(**inputs)[0]
    assert output.shape == expected["output"].shape
    if "text" in expected:
        words = {name: tensor[:2, :5] for name, tensor in inputs.items()}
        for use_cache in (True, False):
            text = model.generate(**words, max_new_tokens=5, do_sample=False, eos_token_id=None, use_cache=use_cache)
            assert torch.equal(text, expected["text"]), (text, expected["text"])
    difference, mask = (output - expected["output"]).abs(), inputs["attention_mask"]
    # The code beside the weights computes padding, which the package may leave out.
    return float((difference[mask.bool()] if difference.shape[:2] == mask.shape else difference).max())


def main() -> None:
    sys.meta_path.insert(0, Refuses)
    try:
        importlib.import_module("hf_posenc")
    except ImportError:
        pass
    else:
        sys.exit("hf_posenc was imported before: run this file by itself")
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/computed.pt"))
    assert folders, f"nothing was saved in {sys.argv[1]}"
    differences = {}
    for folder in folders:
        differences[folder.name] = check(folder)
        assert differences[folder.name] < 1e-5, (folder.name, differences[folder.name])
    by = json.loads((folders[0] / "config.json").read_text())["transformers_version"]
    print(
        f"{len(folders)} variants saved by transformers {by}, loaded without hf_posenc by {transformers.__version__}: "
        f"outputs differ by {max(differences.values()):.0e}"
    )


if __name__ == "__main__":
    main()
