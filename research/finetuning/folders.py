"""Three converted models as folders that are ready to upload, with cards that have what this study measured.

    python research/finetuning/folders.py --data DATA --mpnet MPNET --out outputs/models
    hf-posenc push outputs/models/minilm-t5-stock me/minilm-t5-stock

DATA holds wikitext2/valid.txt and stsb/stsb-en-test.csv, MPNET is the folder of all-mpnet-base-v2 (--only leaves it out). A folder that is there is not made again, but what its card
has measured is.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from finetuning_tables import CONTROL, ROWS, counts_of, difference, recall
from huggingface_hub import ModelCard
from minilm import packaged_minilm
from tagging import WHOLE
from transformers import AutoModel, AutoTokenizer

from hf_posenc import convert
from hf_posenc._utils import as_markdown
from hf_posenc.files import write_whole


sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from embedding_quality import sts_spearman  # noqa: E402


@dataclass(frozen=True)
class Folder:
    """How a model is made.

    Attributes:
        name: of the checkpoint on the Hub.
        arm: of the study, whose figures its card has.
        unlike: how the arm's conversion was made otherwise.
    """

    name: str
    scheme: str
    stock: bool
    trained_length: int
    max_length: int
    steps: int
    arm: str | None = None
    unlike: str = "converted with 400 steps"


MINILM, MPNET = "sentence-transformers/all-MiniLM-L6-v2", "sentence-transformers/all-mpnet-base-v2"
FOLDERS = {
    "minilm-t5-stock": Folder(
        MINILM, "t5", True, 256, 4096, 800, "t5 converted", "converted with 400 steps, and a bias for each layer"
    ),
    "minilm-deberta": Folder(MINILM, "deberta", False, 256, 4096, 800, "deberta converted"),
    "mpnet-deberta-stock": Folder(MPNET, "deberta", True, 384, 2048, 400),
}


MEASURED = "\n\n## Measured\n\n"


def measured(folder: Folder, source: str, output: Path, data: Path) -> str:
    """The section of a card: STS-B of the original and of the converted, and the figures of the study."""
    file, tokenizer = data / "stsb" / "stsb-en-test.csv", AutoTokenizer.from_pretrained(source)
    with torch.no_grad():
        scores = [sts_spearman(AutoModel.from_pretrained(where).eval(), tokenizer, file) for where in (source, output)]
    table = as_markdown(
        ["STS-B (English), test, Spearman", ""],
        [[folder.name, f"{scores[0]:.3f}"], ["this model", f"{scores[1]:.3f}"]],
    )
    text = f"{table}\n"
    own, control = (folder.arm and counts_of("minilm", *row) for row in ((folder.arm, WHOLE), CONTROL))
    if own and control:
        less = difference(own.part(1), control.part(1), recall)
        row = [f"{recall(own.part(1)).mean():.3f}", f"{recall(control.part(1)).mean():.3f}", less.written()]
        label = ROWS[folder.arm, WHOLE]
        header = [
            "recall of LitBank's entities beyond the 512th token",
            "its own positions, windows of 256",
            "difference (95 %)",
        ]
        text += f"\nFine-tuned on pieces of 256 tokens ({label}; {folder.unlike}), five folds:\n\n{as_markdown(header, [row])}\n"
    return text


def make(name: str, source: str, out: Path, data: Path) -> None:
    folder, output = FOLDERS[name], out / name
    if not output.is_dir():
        convert(
            source,
            folder.scheme,
            text=[data / "wikitext2" / "valid.txt"],
            trained_length=folder.trained_length,
            max_length=folder.max_length,
            max_steps=folder.steps,
            stock=folder.stock,
            output=output,
            resume=True,
        )
    path = output / "README.md"
    card = ModelCard.load(path)
    card.data["base_model"] = folder.name
    text = card.text.partition(MEASURED)[0].replace(f"Of {Path(source).name}.", f"Of {folder.name}.")
    # What the original's card says of itself.
    text = re.sub(r"(?<=input text longer than )\d+(?= word pieces is truncated)", str(folder.max_length), text)
    card.text = text.rstrip() + MEASURED + measured(folder, source, output, data)
    write_whole({path: str(card)})
    print(f"wrote {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--mpnet", help="folder of all-mpnet-base-v2")
    parser.add_argument("--only", nargs="+", choices=FOLDERS, default=[*FOLDERS])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sources = {MINILM: packaged_minilm(), MPNET: options.mpnet}
    if missing := [name for name in options.only if not sources[FOLDERS[name].name]]:
        parser.error(f"{', '.join(missing)} needs --mpnet")
    for name in options.only:
        make(name, sources[FOLDERS[name].name], options.out, options.data)


if __name__ == "__main__":
    main()
