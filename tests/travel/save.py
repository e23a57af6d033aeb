"""Saves variants, for another version of transformers to load: python tests/travel/save.py FOLDER

See load.py. Position parameters have random values, and what the variants compute is saved beside them.
"""

import sys
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import tiny  # noqa: E402

from hf_posenc import position_parameters  # noqa: E402


# Scheme, family, head, and what else is in the config: each scheme that has a way of its own through the model, every family.
CASES = [
    ("absolute+t5", "bert", "ForSequenceClassification", {"num_labels": 3}),
    ("relative", "roberta", "ForTokenClassification", {"num_labels": 3}),
    ("deberta", "xlm-roberta", "ForMaskedLM", {}),
    ("tupe", "camembert", "ForQuestionAnswering", {}),
    ("transformer_xl", "electra", "Model", {}),
    ("rope+kerple", "distilbert", "ForMaskedLM", {}),
    ("absolute+t5", "mpnet", "ForMaskedLM", {}),
    ("sinusoidal", "bert", "Model", {"position_every_layer": True}),
    ("relative_key_query", "bert", "LMHeadModel", {"is_decoder": True}),
    ("absolute+alibi", "roberta", "ForCausalLM", {"is_decoder": True}),
    ("t5", "electra", "ForCausalLM", {"is_decoder": True}),
]


@torch.no_grad()
def save(folder: Path, scheme: str, family: str, head: str, settings: dict) -> None:
    """A variant, what it was given, and what it computed."""
    model = tiny.build(scheme, family, head, **settings)
    inputs = tiny.inputs(batch=8, length=20, family=family)
    first = model(**inputs)[0]
    if position_parameters(model):
        for parameter in position_parameters(model).values():
            parameter.zero_()
        assert (model(**inputs)[0] - first).abs().max() > 1e-2, f"{scheme}: its parameters do nothing"
        tiny.fill_positions(model)
    expected = {"output": first}
    if head in ("LMHeadModel", "ForCausalLM"):
        words = {"input_ids": inputs["input_ids"][:2, :5], "attention_mask": inputs["attention_mask"][:2, :5]}
        expected["text"] = model.generate(**words, max_new_tokens=5, do_sample=False, eos_token_id=None)
    model.save_pretrained(folder)
    served_by = next(auto for auto, name in model.config.auto_classes.items() if name == type(model).__name__)
    torch.save({"auto_class": served_by, "inputs": inputs, "expected": expected}, folder / "computed.pt")


if __name__ == "__main__":
    for scheme, family, head, settings in CASES:
        save(Path(sys.argv[1]) / f"{scheme}-{family}-{head}", scheme, family, head, settings)
    print(f"saved {len(CASES)} variants")
