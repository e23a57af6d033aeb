"""Writes models as architectures of Transformers, for whoever has not hf_posenc: python tests/travel/export.py FOLDER

See load_exported.py. Position parameters have random values, and what the models with a scheme compute is saved beside what is exported:
at lengths up to 2,048 tokens, with padding on either side.
"""

import sys
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import tiny  # noqa: E402
import tiny_checkpoints  # noqa: E402
from load_exported import real  # noqa: E402

from hf_posenc import to_stock  # noqa: E402
from hf_posenc.export.stock import export  # noqa: E402


FAMILIES = ("bert", "roberta", "distilbert")
# Scheme, flags; positions are followed as far as a table of 2,048 rows goes.
ROWS = [
    ("t5", {}),
    ("absolute+t5", {}),
    ("deberta", {"position_buckets": 32, "position_max_distance": 128}),
    ("deberta", {"position_form": "paper"}),
    ("absolute+deberta", {}),
    ("rope", {}),
    ("rope", {"position_layout": "interleaved"}),
    ("absolute", {}),
]
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
LENGTHS = (7, 128, 512, 2048)
# Of heads, which read what base models compute.
SHORT = (7, 128)


def sides(scheme: str, family: str) -> tuple[str, ...]:
    """Where padding may stand: DeBERTa counts it on the left, RoBERTa does not."""
    return ("right",) if (scheme, family) == ("absolute+deberta", "roberta") else ("right", "left")


@torch.no_grad()
def save(folder: Path, scheme: str, family: str, head: str, flags: dict) -> None:
    """An exported model, what it is given, and what the model with its scheme computed of it."""
    follows = family == "roberta"
    padding = {"pad_token_id": 1} if follows else {}
    lengths = LENGTHS if head == "Model" else SHORT
    length = {"max_position_embeddings": lengths[-1] + 2 * follows}
    model = tiny.build(scheme, family, head, **length, **padding, **flags)
    calls = []
    for tokens in lengths:
        for side in sides(scheme, family):
            batch = tiny.inputs(batch=2, length=tokens, family=family, padding=side)
            calls.append((batch, side, real(model(**batch)[0], batch["attention_mask"], side)))
    # Id 1 is the padding of some, and `[unused0]` of the others.
    stock = to_stock(model, max_length=lengths[-1], single_text=True)
    stock.save_pretrained(folder)
    served_by = next(auto for auto, name in model.config.auto_classes.items() if name == type(model).__name__)
    torch.save({"auto_class": served_by, "calls": calls}, folder / "computed.pt")


def save_sentences(folder: Path, scheme: str) -> None:
    """A folder of sentence-transformers, exported, and the vectors of texts."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    source, variant = folder.with_name(f"{folder.name}-source"), folder.with_name(f"{folder.name}-variant")
    tiny_checkpoints.save(source, length=128, max_position_embeddings=128)
    model = tiny.fill_positions(AutoModel.from_pretrained(source, position_scheme=scheme))
    model.save_pretrained(source)
    SentenceTransformer(str(source), device="cpu").save(str(variant))
    export(variant, folder)
    texts = [" ".join(tiny_checkpoints.WORDS[:count]) for count in (3, 40, 90)]
    vectors = SentenceTransformer(str(variant), device="cpu").encode(texts, convert_to_tensor=True)
    torch.save({"texts": texts, "vectors": vectors}, folder / "vectors.pt")


def main() -> None:
    place, count = Path(sys.argv[1]), 0
    for number, (scheme, flags) in enumerate(ROWS):
        for family in FAMILIES:
            for head in HEADS:
                if (
                    family == "distilbert"
                    and head == HEADS[2]
                    and scheme not in ("deberta", "absolute+deberta", "absolute")
                ):
                    continue  # its classifier has relu, and theirs tanh
                save(place / f"{number}-{scheme}-{family}-{head}", scheme, family, head, flags)
                count += 1
    for scheme in ("t5", "deberta", "rope"):
        save_sentences(place / f"sentences-{scheme}", scheme)
    print(f"exported {count} models")


if __name__ == "__main__":
    main()
