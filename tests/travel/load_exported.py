"""Loads what export.py has written, where hf_posenc cannot be imported and no code beside weights is run.

    NEW/python tests/travel/export.py FOLDER && OLD/python tests/travel/load_exported.py FOLDER

The other Python may have another version of Transformers: 4.57 has MPNet and DeBERTa-v2, and from 5.4 on there is Jina Embeddings v3.
"""

import os
import sys
from pathlib import Path


os.environ |= {"HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402


# Of numbers up to 1, and of greater ones in proportion.
TOLERANCE = 1e-5


class Refuses:
    """A finder for which this package is not installed, whether it is or not."""

    @staticmethod
    def find_spec(fullname: str, path=None, target=None):
        if fullname.partition(".")[0] == "hf_posenc":
            raise ImportError("hf_posenc must not be needed")


def real(output: torch.Tensor, mask: torch.Tensor, side: str) -> torch.Tensor:
    """A model's output at tokens that are no padding; of whole texts with padding on the left, that of the first, which has none."""
    return output[mask.bool()] if output.shape[:2] == mask.shape else output[: 1 if side == "left" else None]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / max(1.0, expected.abs().max()))


@torch.no_grad()
def check(folder: Path) -> float:
    """Load a model: the largest difference of what it computes."""
    saved = torch.load(folder / "computed.pt")
    auto_class = getattr(transformers, saved["auto_class"])
    model, loading = auto_class.from_pretrained(folder, trust_remote_code=False, output_loading_info=True)
    assert type(model).__module__.startswith("transformers.models."), type(model)
    assert not loading["missing_keys"] and not loading["unexpected_keys"], loading
    worst = 0.0
    for inputs, side, expected in saved["calls"]:
        found = real(model.eval()(**inputs)[0], inputs["attention_mask"], side)
        worst = max(worst, difference(found, expected))
    return worst


def check_sentences(folder: Path) -> float:
    """Load a folder of sentence-transformers: the largest difference of its vectors."""
    from sentence_transformers import SentenceTransformer

    saved = torch.load(folder / "vectors.pt")
    return difference(
        SentenceTransformer(str(folder), device="cpu").encode(saved["texts"], convert_to_tensor=True), saved["vectors"]
    )


def main() -> None:
    assert "hf_posenc" not in sys.modules, "run this file by itself"
    sys.meta_path.insert(0, Refuses)
    place, differences, unknown = Path(sys.argv[1]), {}, set()
    for file in sorted(place.glob("*/computed.pt")) + sorted(place.glob("*/vectors.pt")):
        folder = file.parent
        model_type = transformers.PretrainedConfig.get_config_dict(folder)[0]["model_type"]
        if model_type not in CONFIG_MAPPING_NAMES:
            unknown.add(model_type)
            continue
        differences[folder.name] = (check if file.name == "computed.pt" else check_sentences)(folder)
        assert differences[folder.name] < TOLERANCE, (folder.name, differences[folder.name])
    assert differences and unknown <= {"jina_embeddings_v3"}, (len(differences), unknown)
    major, minor = map(int, transformers.__version__.split(".")[:2])
    assert not unknown or (major, minor) < (5, 4), unknown
    print(
        f"{len(differences)} exported models loaded without hf_posenc by transformers {transformers.__version__}: outputs differ by "
        f"{max(differences.values()):.0e}{', without ' * bool(unknown)}{', '.join(unknown)}"
    )


if __name__ == "__main__":
    main()
