"""What people do with DeBERTa and MPNet, with this package's attention: rerankers, classifiers, training, adapters, export."""

from pathlib import Path

import pytest
import stock_models
import torch
from stock_models import batch, build, tokenizer
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    DebertaForSequenceClassification,
    DebertaV2ForSequenceClassification,
    MPNetForSequenceClassification,
)

import hf_posenc
from hf_posenc.integrations.stock_attention import attention as own_attention


CLASSIFIERS = {
    "v3": DebertaV2ForSequenceClassification,
    "v1": DebertaForSequenceClassification,
    "mpnet": MPNetForSequenceClassification,
}


@pytest.fixture
def attended(monkeypatch):
    """The calls of this package's attention."""
    calls, attend = [], own_attention.self_attend

    def counted(*arguments):
        calls.append(arguments[0])
        return attend(*arguments)

    for family in hf_posenc.integrations.stock_attention.FAMILIES:
        monkeypatch.setattr(family, "self_attend", counted)
    return calls


@pytest.fixture(params=CLASSIFIERS)
def folder(request, tmp_path) -> Path:
    """A classifier's checkpoint, with its tokenizer."""
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    model = build(
        request.param, CLASSIFIERS[request.param], id2label=labels, label2id={v: k for k, v in labels.items()}
    )
    model.save_pretrained(tmp_path / "classifier")
    tokenizer().save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def test_zero_shot_pipeline(folder, attended):
    from transformers import pipeline

    def scores(**settings) -> list[float]:
        classify = pipeline("zero-shot-classification", str(folder), model_kwargs=settings)
        found = classify("a b c d", candidate_labels=["e", "f g"], hypothesis_template="h {}")
        return [score for _, score in sorted(zip(found["labels"], found["scores"]))]

    expected = scores()
    assert not attended
    assert scores(attn_implementation="sdpa") == pytest.approx(expected, abs=1e-5)
    assert set(attended) == {"sdpa"}


def test_cross_encoder(folder, attended):
    from sentence_transformers import CrossEncoder

    pairs = [("a b", "c d e f"), ("g", "h i")]
    stock = CrossEncoder(str(folder), device="cpu")
    expected = torch.as_tensor(stock.predict(pairs))
    assert not attended
    assert hf_posenc.set_attn_implementation(stock, "sdpa") == 1
    torch.testing.assert_close(torch.as_tensor(stock.predict(pairs)), expected, rtol=0, atol=1e-5)
    assert attended
    attended.clear()
    named = CrossEncoder(str(folder), device="cpu", model_kwargs={"attn_implementation": "sdpa"})
    torch.testing.assert_close(torch.as_tensor(named.predict(pairs)), expected, rtol=0, atol=1e-5)
    assert attended


@pytest.mark.slow
@pytest.mark.parametrize("case", ["v3", "mpnet"])
def test_sentence_transformer(case, tmp_path, attended):
    from sentence_transformers import SentenceTransformer

    build(case).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    model = SentenceTransformer(str(tmp_path / "base"), device="cpu")
    model.save(str(tmp_path / "sentences"))
    model = SentenceTransformer(str(tmp_path / "sentences"), device="cpu")
    sentences = ["a b c d e", "f", "g h"]
    expected = model.encode(sentences)
    assert not attended
    assert hf_posenc.set_attn_implementation(model, "sdpa") == 1
    assert abs(model.encode(sentences) - expected).max() < 1e-5
    assert attended


class Sentences(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": batch(6 + index % 3, number=1)["input_ids"][0][:6], "labels": index % 3}


def train(model: nn.Module, folder: Path, **settings) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        **settings,
    )
    Trainer(model, arguments, train_dataset=Sentences()).train()
    return model


def classifier(case: str, **settings) -> nn.Module:
    return build(case, CLASSIFIERS[case], num_labels=3, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("case", CLASSIFIERS)
def test_trainer(case, tmp_path, attended):
    expected = train(classifier(case), tmp_path).state_dict()
    assert not attended
    model = classifier(case)
    model.set_attn_implementation("sdpa")
    found = train(model, tmp_path).state_dict()
    assert attended
    start = classifier(case).state_dict()
    moved = {name for name in start if not torch.equal(start[name], expected[name])}
    assert any("rel" in name for name in moved)
    for name in moved:
        # Adam's first steps are the signs of gradients: those that rounding decides move by the learning rate.
        difference = (found[name] - expected[name]).abs()
        assert (difference > 1e-6).float().mean() < 0.02 or "key" in name or ".k." in name, name


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_lora(case, attended):
    from peft import LoraConfig, get_peft_model

    targets = {"v3": ["query_proj", "key_proj"], "v1": ["in_proj", "pos_proj", "pos_q_proj"], "mpnet": ["q", "k"]}
    inputs, results = batch(12, "left"), []
    for implementation in ("eager", "sdpa"):
        model = get_peft_model(classifier(case), LoraConfig(target_modules=targets[case], r=2))
        assert hf_posenc.set_attn_implementation(model, implementation) == 1
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        with torch.no_grad():
            results.append([model.eval()(**inputs).logits])
        model.train()
        (model(**inputs, labels=torch.tensor([0, 1, 2])).loss * 100).backward()
        results[-1] += [p.grad for n, p in model.named_parameters() if "lora_" in n and p.grad is not None]
    assert attended
    assert len(results[0]) == len(results[1]) > 4
    for expected, found in zip(*results):
        assert float((expected - found).norm()) < 1e-4 * max(float(expected.norm()), 1.0)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("case", stock_models.KINDS)
def test_compiled(case):
    model, inputs = build(case), batch(11, "left")
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        hf_posenc.set_attn_implementation(model, "sdpa")
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("case", stock_models.KINDS)
def test_compiled_gradients(case):
    model, inputs = build(case), batch(11, "left")

    def gradients(model: nn.Module, call: nn.Module) -> dict[str, torch.Tensor]:
        model.zero_grad()
        call(**inputs).last_hidden_state.square().mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected = gradients(model, model)
    hf_posenc.set_attn_implementation(model, "sdpa")
    found = gradients(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert expected.keys() <= found.keys()
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=1e-4, atol=1e-6)


class Hidden(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


@pytest.mark.slow
@pytest.mark.parametrize("case", stock_models.KINDS)
def test_exported_for_any_length(case):
    model, inputs = build(case), batch(11, "left")
    hf_posenc.set_attn_implementation(model, "sdpa")
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=500)}
    shapes = {"input_ids": sizes, "attention_mask": sizes}
    program = torch.export.export(Hidden(model), (), inputs, dynamic_shapes=shapes)
    hf_posenc.set_attn_implementation(model, "eager")
    for length in (7, 300):
        inputs = batch(length, "left", number=2)
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
            torch.testing.assert_close(program.module()(**inputs), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", stock_models.KINDS)
def test_onnx(case, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, inputs = build(case), batch(11, "left")
    hf_posenc.set_attn_implementation(model, "sdpa")
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=500)}
    shapes = {"input_ids": sizes, "attention_mask": sizes}
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(Hidden(model), (), file, kwargs=inputs, dynamic_shapes=shapes, dynamo=True)
    hf_posenc.set_attn_implementation(model, "eager")
    session = onnxruntime.InferenceSession(file)
    for length in (11, 40):
        inputs = batch(length, "left", number=2)
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
        [found] = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-4)
