"""sentence-transformers encodes, predicts and trains with variants, and with stock models that leave padding out."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import sentence_transformers
import torch
from datasets import Dataset
from observing import MINILM, TEXTS, difference, left_out
from sentence_transformers import CrossEncoder, SparseEncoder
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from transformers import AutoTokenizer, BertForMaskedLM, BertForSequenceClassification, BertModel

import hf_posenc


PAIRS = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1]))


def encoded(model) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True).float().to_dense()


def predicted(model: CrossEncoder) -> torch.Tensor:
    return model.predict(PAIRS, convert_to_tensor=True, activation_fn=torch.nn.Identity())


def splade_loss(model: SparseEncoder) -> SpladeLoss:
    inner = SparseMultipleNegativesRankingLoss(model)
    return SpladeLoss(model, inner, query_regularizer_weight=1e-3, document_regularizer_weight=1e-3)


@dataclass
class Kind:
    """A kind of model that sentence-transformers has.

    Attributes:
        name: of its class; of its trainer and of the trainer's arguments, the beginning.
        stock: the class of transformers inside.
        outputs: what it computes for some texts.
        loss: what it is trained with.
    """

    name: str
    stock: type
    outputs: object
    loss: object

    def save(self, folder: Path) -> str:
        """The pretrained BERT with this head and without dropout, as a checkpoint."""
        torch.manual_seed(0)
        settings = {"num_labels": 1} if self.stock is BertForSequenceClassification else {}
        settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.stock.from_pretrained(MINILM, **settings).save_pretrained(folder)
        AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
        return str(folder)

    def load(self, folder: str, **settings):
        return getattr(sentence_transformers, self.name)(folder, device="cpu", model_kwargs=settings)

    def train(self, model, folder: Path) -> dict[str, torch.Tensor]:
        """Two steps of its trainer: the parameters then."""
        columns = {"first": [a for a, _ in PAIRS], "second": [b for _, b in PAIRS]}
        if self.name == "CrossEncoder":
            columns["label"] = [float(i % 2) for i in range(len(PAIRS))]
        arguments = getattr(sentence_transformers, f"{self.name}TrainingArguments")(
            str(folder),
            max_steps=2,
            per_device_train_batch_size=len(PAIRS),
            optim="sgd",  # Adam's first steps are signs of gradients, which rounding may turn around
            learning_rate=0.05,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = getattr(sentence_transformers, f"{self.name}Trainer")(
            model, arguments, train_dataset=Dataset.from_dict(columns), loss=self.loss(model)
        )
        trainer.train()
        assert trainer.state.global_step == 2
        return {name: parameter.detach() for name, parameter in model.named_parameters()}


KINDS = (
    Kind("SentenceTransformer", BertModel, encoded, MultipleNegativesRankingLoss),
    Kind("CrossEncoder", BertForSequenceClassification, predicted, BinaryCrossEntropyLoss),
    Kind("SparseEncoder", BertForMaskedLM, encoded, splade_loss),
)


def same_training(kind: Kind, start: dict, expected: dict, found: dict) -> float:
    """How far two trainings are apart, as a part of how far they went."""
    went = torch.cat([(expected[name] - start[name]).flatten() for name in start]).norm()
    apart = torch.cat([(expected[name] - found[name]).flatten() for name in start]).norm()
    assert went > 1e-3, (kind.name, went)
    return float(apart / went)


def copied(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def stock_without_padding(kind: Kind, folder: str, scratch: Path) -> tuple[float, float]:
    """`hf_posenc.unpad` changes neither outputs nor a training."""
    model, other = kind.load(folder), kind.load(folder)
    expected = kind.outputs(model)
    assert hf_posenc.unpad(other) == 1
    with left_out(other) as places:
        found = difference(kind.outputs(other), expected)
    assert places and all(count > 50 for count in places), places
    with left_out(model) as places:
        kind.outputs(model)
    assert not any(places), places
    start = copied(model)
    return found, same_training(kind, start, kind.train(model, scratch), kind.train(other, scratch))


def variant(kind: Kind, folder: str, scratch: Path) -> tuple[float, float]:
    """A variant starts as the checkpoint, is saved and loaded without a flag, and trains its positions."""
    expected = kind.outputs(kind.load(folder))
    model = kind.load(folder, position_scheme="absolute+t5")
    with left_out(model) as places:
        found = difference(kind.outputs(model), expected)
    assert places and all(count > 50 for count in places), places

    positions = hf_posenc.position_parameters(model)
    with torch.no_grad():
        for parameter in positions.values():
            parameter.normal_(std=0.5)
    filled = kind.outputs(model)
    assert difference(filled, expected) > 0.01
    model.save_pretrained(str(scratch / "saved"))
    again = kind.load(str(scratch / "saved"))
    assert again[0].auto_model.config.model_type == "posenc_bert"
    assert difference(kind.outputs(again), filled) < 1e-6

    other = kind.load(str(scratch / "saved"), unpad=False)
    with left_out(other) as places:
        assert difference(kind.outputs(other), filled) < 1e-4
    assert not any(places), places
    start = copied(model)
    trained = kind.train(again, scratch)
    assert all(not torch.equal(start[name], trained[name]) for name in positions)
    return found, same_training(kind, start, trained, kind.train(other, scratch))


if __name__ == "__main__":
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as place:
            folder = kind.save(Path(place) / "checkpoint")
            for check in (stock_without_padding, variant):
                scratch = Path(place) / check.__name__
                found, apart = check(kind, folder, scratch)
                assert found < 1e-4 and apart < 1e-3, (kind.name, check.__name__, found, apart)
                name = check.__name__.replace("_", " ")
                print(f"{kind.name}, {name}: outputs differ by {found:.0e}, trainings by {apart:.0e} of their way")
