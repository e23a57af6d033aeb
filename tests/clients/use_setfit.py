"""SetFit fine-tunes and classifies with a variant, and with a stock model that leaves padding out."""

import tempfile

import torch
from datasets import Dataset
from observing import MINILM, TEXTS, difference, left_out
from sentence_transformers import SentenceTransformer
from setfit import SetFitModel, Trainer, TrainingArguments

import hf_posenc


LABELS = [0, 1, 0, 0, 1, 1, 0, 1]
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def setfit(**settings) -> SetFitModel:
    """A SetFit model with a pretrained body and a head of its own."""
    body = SentenceTransformer(MINILM, device="cpu", model_kwargs=settings, config_kwargs=WITHOUT_DROPOUT)
    head = SetFitModel.from_pretrained(MINILM, device="cpu").model_head
    return SetFitModel(model_body=body, model_head=head)


def trained(model: SetFitModel) -> torch.Tensor:
    """The probabilities after two contrastive steps of the body, and a fit of the head."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=2, batch_size=8, body_learning_rate=1e-3, report_to="none", save_strategy="no", seed=0
        )
        dataset = Dataset.from_dict({"text": TEXTS, "label": LABELS})
        Trainer(model=model, args=arguments, train_dataset=dataset).train()
    probabilities = torch.as_tensor(model.predict_proba(TEXTS))
    assert probabilities.std() > 0.05, probabilities
    return probabilities


def stock_without_padding() -> float:
    """Trained with padding, it predicts the same without, and trains without it too."""
    model = setfit()
    expected = trained(model)
    assert hf_posenc.unpad(model.model_body) == 1
    with left_out(model.model_body) as places:
        found = difference(model.predict_proba(TEXTS), expected)
    assert places and all(count > 50 for count in places), places
    trained(model)
    return found


def variant() -> float:
    """A variant trains its positions, and predicts the same when it is saved and loaded."""
    model = setfit(position_scheme="absolute+t5")
    assert difference(model.encode(TEXTS), setfit().encode(TEXTS)) < 1e-5
    positions = hf_posenc.position_parameters(model.model_body)
    assert positions and not any(parameter.any() for parameter in positions.values())
    with left_out(model.model_body) as places:
        expected = trained(model)
    assert sum(places) > 50, places
    assert all(parameter.any() for parameter in positions.values())
    with torch.no_grad():
        for parameter in positions.values():
            parameter.normal_(std=2.0)
    filled = torch.as_tensor(model.predict_proba(TEXTS))
    assert difference(filled, expected) > 0.01
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = SetFitModel.from_pretrained(folder, device="cpu")
    assert again.model_body[0].auto_model.config.model_type == "posenc_bert"
    return difference(again.predict_proba(TEXTS), filled)


if __name__ == "__main__":
    for check in (stock_without_padding, variant):
        found = check()
        assert found < 1e-4, (check.__name__, found)
        print(f"{check.__name__.replace('_', ' ')}: probabilities differ by {found:.0e}")
