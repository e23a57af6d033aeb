"""A checkpoint's head is what its weights have, whatever its config says; what is missing is never random numbers in silence."""

import json
from pathlib import Path

import pytest
import tiny
import tiny_checkpoints
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel

import hf_posenc
from hf_posenc import convert
from hf_posenc.conversion import compare
from hf_posenc.export.onnx import exporting as onnx
from hf_posenc.hub.cards import write_card
from hf_posenc.hub.pushing import shared_files
from hf_posenc.inspection import load_config
from hf_posenc.inspection.weights import load_whole, tensor_names
from hf_posenc.variants import VARIANT_MODELS


HEADS = [(family, stock.__name__) for family in tiny.FAMILIES for stock in tiny.heads(family)]


def names_head(folder: Path, name: str) -> Path:
    """A checkpoint whose config names another class."""
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"architectures": [name]}))
    return folder


@pytest.fixture
def headless(tmp_path) -> Path:
    """A base model of BERT with its tokenizer and a text, whose config names a head."""
    return names_head(tiny_checkpoints.save(tmp_path / "bert"), "BertForMaskedLM")


@pytest.fixture
def exported(monkeypatch):
    """What `export` would write: the model."""
    monkeypatch.setattr(onnx, "export_model", lambda model, out: model)
    return lambda folder: onnx.export(folder, folder / "model.onnx")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def as_shards(folder: Path) -> None:
    model = AutoModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    entries = (folder / "config.json").read_text()
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "config.json").write_text(entries)
    assert len([*folder.glob("*.safetensors")]) > 2


def as_pickle(folder: Path) -> None:
    torch.save(stored(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_old_pickle(folder: Path) -> None:
    torch.save(stored(folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()


def as_pickled_shards(folder: Path) -> None:
    tensors = stored(folder)
    parts = {f"pytorch_model-0000{part}-of-00002.bin": [*tensors][part - 1 :: 2] for part in (1, 2)}
    for file, names in parts.items():
        torch.save({name: tensors[name] for name in names}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def with_prefix(folder: Path) -> None:
    store(folder, {f"bert.{name}": tensor for name, tensor in stored(folder).items()})


def with_old_names(folder: Path) -> None:
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = stored(folder)
    for new, before in old.items():
        tensors = {name.replace(new, before): tensor for name, tensor in tensors.items()}
    store(folder, tensors)


def with_tied_matrix(folder: Path) -> None:
    tensors = stored(folder)
    words = next(tensor for name, tensor in tensors.items() if name.endswith("word_embeddings.weight"))
    store(folder, tensors | {"cls.predictions.decoder.weight": words})


LAYOUTS = {
    "one file": lambda folder: None,
    "shards": as_shards,
    "pickle": as_pickle,
    "old pickle": as_old_pickle,
    "pickled shards": as_pickled_shards,
    "prefix": with_prefix,
    "old names": with_old_names,
    "tied matrix": with_tied_matrix,
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class TestWhichClass:
    @pytest.mark.parametrize("variant", [False, True])
    @pytest.mark.parametrize(("family", "head"), HEADS)
    def test_a_head_is_one_that_the_weights_have(self, family, head, variant, tmp_path, said):
        prefix = tiny._stock_prefix(family)
        cls = next(stock for stock in tiny.heads(family) if stock.__name__ == head)
        base = next(stock for stock in tiny.heads(family) if stock.__name__ == f"{prefix}Model")
        config = tiny.variant_config(family) if variant else tiny.stock_config(family)
        cls, base = ((VARIANT_MODELS[each] if variant else each) for each in (cls, base))
        cls(config).save_pretrained(tmp_path / "whole")
        assert load_config(str(tmp_path / "whole")).architectures == [cls.__name__] and not said
        base(config).save_pretrained(tmp_path / "base")
        names_head(tmp_path / "base", cls.__name__)
        assert load_config(str(tmp_path / "base")).architectures == [base.__name__]
        if cls is not base:
            assert said == [
                f"{tmp_path / 'base'}: its config names {cls.__name__}, but its weights contain no such task head: it is read as {base.__name__}."
            ]

    @every_layout
    def test_however_the_weights_are_laid_out(self, layout, headless):
        expected = {*stored(headless)}
        LAYOUTS[layout](headless)
        assert load_config(str(headless)).architectures == ["BertModel"]
        names = tensor_names(headless)
        assert {name.removeprefix("bert.") for name in names} - {"cls.predictions.decoder.weight"} == expected

    @pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("prefix", "shards")])
    def test_and_a_head_stays_one(self, layout, tmp_path):
        folder = tiny_checkpoints.save(tmp_path / "bert", head="ForMaskedLM")
        LAYOUTS[layout](folder)
        assert load_config(str(folder)).architectures == ["BertForMaskedLM"]
        load_whole(type(tiny_checkpoints.stock(head="ForMaskedLM")), folder)

    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"weight_map": 3}'])
    def test_where_nothing_can_be_read_the_config_s_word_stands(self, name, content, headless):
        (headless / "model.safetensors").unlink()
        assert tensor_names(headless) is None
        (headless / name).write_bytes(content)
        assert tensor_names(headless) is None
        assert load_config(str(headless)).architectures == ["BertForMaskedLM"]


class TestCommands:
    @pytest.mark.parametrize(
        "layout",
        [pytest.param(name, marks=() if index < 3 else pytest.mark.slow) for index, name in enumerate(LAYOUTS)],
    )
    def test_convert_writes_the_base_model(self, layout, headless, tmp_path, said):
        original = AutoModel.from_pretrained(headless).eval()
        LAYOUTS[layout](headless)
        convert(headless, "absolute+t5", text=tmp_path / "bert.txt", train="none", output=tmp_path / "out")
        assert any("it is read as BertModel" in line for line in said)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["PosencBertModel"]
        kept = stored(tmp_path / "out")
        assert not [name for name in kept if name.startswith("cls")]
        for name, tensor in original.state_dict().items():
            assert torch.equal(kept[name], tensor), name
        report = json.loads((tmp_path / "out" / "conversion.json").read_text())
        assert not report["losses"] and "same_answers" not in report["rows"][-1]
        assert "outputs of a task head (there is none)" in report["not_measured"]
        assert compare(headless, tmp_path / "out", text=tmp_path / "bert.txt").final()[0]["token_cosine"] > 0.9999

    @every_layout
    def test_export_writes_the_base_model(self, layout, headless, exported):
        LAYOUTS[layout](headless)
        assert type(exported(headless)).__name__ == "BertModel"

    @pytest.mark.parametrize(
        ("head", "base"), [("DebertaV2ForMaskedLM", "DebertaV2Model"), ("DebertaForMaskedLM", "DebertaModel")]
    )
    def test_of_families_without_schemes_too(self, head, base, tmp_path, exported):
        import transformers

        sizes = {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 32,
        }
        for name in (head, base):
            cls = getattr(transformers, name)
            cls(cls.config_class(**sizes, relative_attention=True)).save_pretrained(tmp_path / name)
        assert type(exported(tmp_path / head)).__name__ == head
        assert type(exported(names_head(tmp_path / base, head))).__name__ == base

    @pytest.mark.slow
    def test_what_is_exported_answers_hidden_states(self, headless, tmp_path):
        made = onnx.export(headless, tmp_path / "model.onnx")
        assert made.outputs == ("last_hidden_state",)

    def test_inspect_card_and_push_say_what_a_variant_is(self, tmp_path):
        tiny.build("absolute+t5").save_pretrained(tmp_path / "variant")
        folder = names_head(tmp_path / "variant", "PosencBertForMaskedLM")
        assert "PosencBertModel" in str(hf_posenc.inspect(folder))
        card = write_card(folder, output=tmp_path / "card.md").read_text()
        assert "pipeline_tag: feature-extraction" in card and "AutoModelForMaskedLM" not in card
        files = shared_files(folder, tmp_path, "me/variant")
        assert json.loads(files["config.json"].read_text())["architectures"] == ["PosencBertModel"]

    def test_fine_tuning_makes_a_new_head_as_ever(self, headless):
        model = AutoModelForMaskedLM.from_pretrained(headless, position_scheme="absolute+t5")
        assert type(model).__name__ == "PosencBertForMaskedLM"


class TestWhatIsMissing:
    @pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
    def test_some_of_a_head_is_an_error(self, head, tmp_path, exported):
        folder = tiny_checkpoints.save(tmp_path / "bert", head=head)
        tensors = stored(folder)
        lost = {
            "ForMaskedLM": "cls.predictions.transform.dense.weight",
            "ForSequenceClassification": "classifier.bias",
        }[head]
        del tensors[lost]
        store(folder, tensors)
        said = f"the weights in {folder} lack 1 of the parameters of Bert{head}, which its config names, such as {lost}: they would be random"
        with pytest.raises(ValueError, match=said):
            convert(folder, "t5", text=tmp_path / "bert.txt", train="none", output=tmp_path / "out")
        with pytest.raises(ValueError, match=said):
            exported(folder)
        assert not [*tmp_path.glob("*out*")]

    def test_so_is_a_layer(self, headless, tmp_path):
        store(headless, {name: tensor for name, tensor in stored(headless).items() if "layer.1." not in name})
        with pytest.raises(ValueError, match="lack 16 of the parameters of BertModel, .*such as encoder.layer.1"):
            convert(headless, "t5", text=tmp_path / "bert.txt", train="none")

    def test_and_a_table_of_a_scheme(self, tmp_path, exported):
        tiny.build("t5").save_pretrained(tmp_path / "t5")
        store(tmp_path / "t5", {n: tensor for n, tensor in stored(tmp_path / "t5").items() if "relative" not in n})
        with pytest.raises(ValueError, match="lack 1 of the parameters of PosencBertModel"):
            exported(tmp_path / "t5")

    @pytest.mark.parametrize("family", ["bert", "xlm-roberta", "mpnet"])
    def test_a_pooler_stays_away(self, family, tmp_path):
        """It would be written with random numbers, which nobody would be told of any more."""
        folder = tiny_checkpoints.save(tmp_path / family, family)
        store(folder, {name: tensor for name, tensor in stored(folder).items() if "pooler" not in name})
        scheme = f"{tiny.FAMILIES[family].family.native_scheme}+deberta"
        model, _ = convert(folder, scheme, text=tmp_path / f"{family}.txt", train="none", output=tmp_path / "out")
        assert model.pooler is None and not [name for name in stored(tmp_path / "out") if "pooler" in name]
        ids = torch.randint(5, 99, (2, 20))
        with torch.no_grad():
            states = [one(ids).last_hidden_state for one in (AutoModel.from_pretrained(folder).eval(), model)]
        torch.testing.assert_close(*states, atol=1e-5, rtol=0)

    def test_weights_of_other_sizes_are_said(self, headless, tmp_path, exported):
        entries = json.loads((headless / "config.json").read_text())
        (headless / "config.json").write_text(json.dumps(entries | {"intermediate_size": 40}))
        for call in (lambda: convert(headless, "t5", text=tmp_path / "bert.txt"), lambda: exported(headless)):
            with pytest.raises(OSError, match=f"the weights in {headless} cannot be read"):
                call()

    def test_names_are_read_without_numbers(self, headless, monkeypatch):
        as_pickle(headless)
        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)
        assert load_config(str(headless)).architectures == ["BertModel"]
