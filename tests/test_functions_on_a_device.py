"""What changes, trains and calls models does so where they are, and gives what it gives on the CPU."""

import random

import numpy as np
import pretended
import pytest
import tiny
import tiny_checkpoints
import torch
import transformers
from transformers import TrainingArguments, pipeline

import hf_posenc
from hf_posenc.pipelines import LongFeatureExtractionPipeline, LongTokenClassificationPipeline
from hf_posenc.training import PositionTrainer


library = pytest.importorskip("sentence_transformers", minversion="6.0")
from hf_posenc import sentence  # noqa: E402


pytestmark = pretended.needed

TEXTS = [" ".join(random.Random(number).choices(tiny_checkpoints.WORDS, k=number)) for number in (3, 29, 70, 130)]


def states(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).last_hidden_state[inputs["attention_mask"].bool()].cpu()


@pytest.mark.parametrize("scheme", ["absolute+deberta", "t5", "rope"])
def test_with_position_scheme(scheme):
    inputs = tiny.inputs()
    changed = hf_posenc.with_position_scheme(tiny.build("absolute"), scheme)
    expected = states(changed, inputs)
    with pretended.there():
        changed = hf_posenc.with_position_scheme(tiny.build("absolute").to(pretended.DEVICE), scheme)
        assert {one.device for one in changed.state_dict().values()} == {pretended.DEVICE}
        torch.testing.assert_close(states(changed, pretended.moved(inputs)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("scheme", "options"), [("t5", {"position_per_layer": False}), ("deberta", {}), ("rope", {})])
def test_to_stock(scheme, options):
    inputs = tiny.inputs()
    expected = states(tiny.build(scheme, **options), inputs)
    with pretended.there():
        exported = hf_posenc.to_stock(tiny.build(scheme, **options).to(pretended.DEVICE))
        assert {one.device for one in exported.state_dict().values()} == {pretended.DEVICE}
        torch.testing.assert_close(states(exported, pretended.moved(inputs)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", ["absolute+t5", "deberta"])
def test_position_trainer(scheme, tmp_path, monkeypatch):
    def losses(place: torch.device) -> list[float]:
        torch.manual_seed(0)
        steps = {"max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no"}
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **steps)
        assert arguments.device.type == "cpu"  # prepares what Accelerate needs
        monkeypatch.setattr(TrainingArguments, "device", place)
        model = tiny.build(scheme, head="ForSequenceClassification").to(place)
        trainer = PositionTrainer(model, arguments, train_dataset=tiny.Sentences(), position_learning_rate=0.01)
        trainer.train()
        assert {parameter.device for parameter in model.parameters()} == {place}
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses(torch.device("cpu"))
    monkeypatch.undo()
    monkeypatch.setattr(transformers.trainer, "Accelerator", pretended.AcceleratorThere)
    with pretended.there():
        assert losses(pretended.DEVICE) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("task", "kind", "head"),
    [
        ("token-classification", LongTokenClassificationPipeline, "ForTokenClassification"),
        ("feature-extraction", LongFeatureExtractionPipeline, "Model"),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_pipelines_for_long_texts(task, kind, head, batch_size, tmp_path):
    folder = tiny_checkpoints.save(tmp_path / "model", "bert", head)
    made = pipeline(task, str(folder), pipeline_class=kind, batch_size=batch_size, device="cpu")

    def numbers() -> list[float]:
        found = made(TEXTS)
        if task == "feature-extraction":
            return [np.array(one) for one in found]
        return [np.array([token["score"] for token in one]) for one in found]

    expected = numbers()
    with pretended.there():
        made.model, made.device = made.model.to(pretended.DEVICE), pretended.DEVICE
        for one, other in zip(numbers(), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("missing", [set(), {torch.float64}], ids=["", "without float64"])
def test_embeddings_in_chunks_and_completed_ones(missing, minilm, monkeypatch):
    def embeddings(model) -> list:
        model.max_seq_length = 40
        stored = model.encode(TEXTS)
        given = [stored, torch.tensor(stored), torch.tensor(stored, device=model.device)]
        completed = [sentence.complete_embeddings(model, TEXTS, one) for one in given]
        assert isinstance(completed[0], np.ndarray)
        assert [one.device for one in completed[1:]] == [torch.device("cpu"), model.device]
        return [*(torch.as_tensor(one).cpu() for one in completed), sentence.in_chunks(model, 40).encode(TEXTS)]

    expected = embeddings(library.SentenceTransformer(minilm, device="cpu"))
    model = library.SentenceTransformer(minilm, device="cpu")
    monkeypatch.setattr(pretended, "missing", missing)
    with pretended.there():
        for one, other in zip(embeddings(model.to(pretended.DEVICE)), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
