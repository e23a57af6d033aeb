"""Folders of exported models: complete, loaded without hf_posenc, written once both models agree; and conversions that end as such folders."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import tiny_checkpoints
import torch
import transformers
from fresh_process import ROOT, run_fresh
from hub_server import LoopbackHub
from huggingface_hub import HfApi, ModelCard, constants
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import hf_posenc
from hf_posenc import convert, from_stock, to_stock, with_position_scheme
from hf_posenc.export import stock
from hf_posenc.export.stock import export
from hf_posenc.export.stock.architectures import MPNet
from hf_posenc.hub.pushing import push
from hf_posenc_cli import main


TEXTS = ["w9 w17 w23", " ".join(tiny_checkpoints.WORDS[:25])]
SCHEMES = {
    "t5": "mpnet",
    "absolute+t5": "mpnet",
    "deberta": "deberta-v2",
    "absolute+deberta": "deberta-v2",
    "rope": "jina_embeddings_v3",
}


def saved(folder: Path, scheme: str, family: str = "bert", auto=AutoModel, dtype=None, **flags) -> Path:
    """A model with a position scheme whose parameters are random, and its tokenizer."""
    source = tiny_checkpoints.save(folder.with_name("source"), family, length=32)
    model = auto.from_pretrained(source, position_scheme=scheme, dtype=dtype or torch.float32, **flags)
    tiny.fill_positions(model)
    model.save_pretrained(folder)
    tokenizer = tiny_checkpoints.tokenizer(family, unused=family == "bert")
    if family == "bert":
        names = ["input_ids", "token_type_ids", "attention_mask"]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def states(folder: Path, auto=AutoModel) -> list[torch.Tensor]:
    """What a folder's model gives for texts, by its own tokenizer, where there is no padding."""
    model, tokenizer = auto.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    for text in TEXTS:
        found.append(model(**tokenizer(text, return_tensors="pt"))[0])
    return found


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    assert max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True)) < tolerance


@pytest.mark.parametrize("family", ["bert", pytest.param("roberta", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folder_is_loaded_without_hf_posenc(scheme, family, tmp_path):
    folder, out = saved(tmp_path / "model", scheme, family), tmp_path / "out"
    said = export(folder, out)
    assert said.startswith(f"wrote {out}: {scheme} as {SCHEMES[scheme]} (") and "largest difference" in said
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    code = f"""
import torch
from transformers import AutoModel, AutoTokenizer
model, loading = AutoModel.from_pretrained({str(out)!r}, output_loading_info=True)
assert not loading["missing_keys"] and not loading["unexpected_keys"], loading
tokenizer = AutoTokenizer.from_pretrained({str(out)!r})
assert ("token_type_ids" in tokenizer.model_input_names) == {SCHEMES[scheme] != "mpnet" and family == "bert"}
with torch.no_grad():
    states = [model.eval()(**tokenizer(text, return_tensors="pt"))[0] for text in {TEXTS!r}]
torch.save(states, {str(tmp_path / "states.pt")!r})
print(type(model).__module__)
"""
    assert run_fresh(code, tmp_path / "modules", plugin=False).startswith("transformers.models.")
    assert_equal(torch.load(tmp_path / "states.pt"), states(folder))
    assert [AutoTokenizer.from_pretrained(each)(TEXTS).input_ids for each in (folder, out)][
        0
    ] == AutoTokenizer.from_pretrained(out)(TEXTS).input_ids


def test_a_head_a_length_and_token_types_from_the_command_line(tmp_path, capsys):
    auto = AutoModelForSequenceClassification
    folder, out = saved(tmp_path / "model", "t5", auto=auto, num_labels=3), tmp_path / "out"
    command = ["export", "stock", str(folder), str(out), "--max-length", "90"]
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert "--single-text" in capsys.readouterr().err and not out.exists()
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--single-text"])
    assert "t5 as mpnet (MPNetForSequenceClassification)" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(out).model_max_length == 90
    assert auto.from_pretrained(out).config.max_position_embeddings == 92
    assert_equal(states(folder, auto), states(out, auto))
    card = ModelCard.load(out / "README.md")
    assert card.data.pipeline_tag == "text-classification" and card.data.library_name == "transformers"
    assert "AutoModelForSequenceClassification.from_pretrained" in card.text


@pytest.mark.parametrize(
    ("scheme", "flags", "said"),
    [
        ("alibi", {}, "Transformers has no architecture with"),
        ("t5", {"position_per_layer": True}, "one bias matrix for all layers"),
        ("absolute+t5", {"position_stride": 2}, "position_stride=2"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(scheme, flags, said, tmp_path, monkeypatch):
    folder, out = saved(tmp_path / "model", scheme, **flags), tmp_path / "out"
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)
    with pytest.raises(ValueError, match=said):
        export(folder, out)
    assert not out.exists()


def test_other_folders_and_places_are_refused(tmp_path, monkeypatch):
    folder, with_rows = saved(tmp_path / "model", "t5"), saved(tmp_path / "absolute", "absolute")
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)
    with pytest.raises(ValueError, match="is already a bert model of Transformers"):
        export(tmp_path / "source", tmp_path / "out")
    with pytest.raises(OSError, match="there is no such folder"):
        export(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(FileExistsError, match="not empty"):
        export(folder, folder)
    with pytest.raises(ValueError, match="the name of the output is empty"):
        export(folder, "")
    with pytest.raises(ValueError, match="max_length must be a number of tokens"):
        export(folder, tmp_path / "out", max_length=-5)
    with pytest.raises(ValueError, match="max_length must be at most 64, the number of position embeddings, got 65"):
        export(with_rows, tmp_path / "out", max_length=65)
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_where_the_two_differ(tmp_path, monkeypatch):
    folder = saved(tmp_path / "model", "t5")
    change = MPNet.change

    def wrong(self, tensors, max_length):
        change(self, tensors, max_length)
        tensors["layer.1.query.weight"] = tensors["layer.1.query.weight"] * 1.1

    monkeypatch.setattr(MPNet, "change", wrong)
    with pytest.raises(ValueError, match="the two models differ: hidden state 2 by .*nothing was written"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_in_bfloat16_stays_one(tmp_path):
    folder = saved(tmp_path / "model", "deberta", dtype=torch.bfloat16)
    export(folder, tmp_path / "out")
    assert AutoModel.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_a_model_of_0_3_reads_its_table_as_it_did(tmp_path):
    """DeBERTa reads a row beyond the largest distance that such a model does not."""
    flags = {"position_buckets": 8, "position_max_distance": 16}
    folder = saved(tmp_path / "model", "deberta", **flags)
    entries = json.loads((folder / "config.json").read_text())
    del entries["position_table_version"]
    (folder / "config.json").write_text(json.dumps(entries))
    assert AutoModel.from_pretrained(folder).config.position_table_version == 1
    export(folder, tmp_path / "out")
    before, after = states(folder), states(tmp_path / "out")
    assert before[1].shape[1] > 16
    assert_equal(before, after)
    back = from_stock(AutoModel.from_pretrained(tmp_path / "out"))
    assert back.config.position_table_version == 2
    back.save_pretrained(tmp_path / "back")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "back")
    assert_equal(states(folder), states(tmp_path / "back"))


@pytest.mark.parametrize("scheme", ["t5", "absolute+deberta", "rope"])
def test_an_exported_model_gets_its_scheme_again(scheme, tmp_path):
    folder = saved(tmp_path / "model", scheme)
    export(folder, tmp_path / "out")
    loaded = AutoModel.from_pretrained(tmp_path / "out")
    back = with_position_scheme(loaded, scheme)
    assert type(back) is hf_posenc.PosencBertModel and back.config.position_scheme == scheme
    assert type(loaded).__module__.startswith("transformers.models.")  # it stays what it is
    back.save_pretrained(tmp_path / "back")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "back")
    assert_equal(states(folder), states(tmp_path / "back"))
    other = with_position_scheme(loaded, "alibi")
    assert other.config.position_scheme == "alibi" and type(other) is type(back)


def test_an_exported_model_with_the_scheme_of_its_architecture_is_no_exported_one(tmp_path):
    """Its config has the entry of the model that was exported, with another scheme, when it is loaded."""
    export(saved(tmp_path / "model", "t5"), tmp_path / "out")
    model = AutoModel.from_pretrained(tmp_path / "out", position_scheme="absolute+t5")
    model.embeddings.position_embeddings.weight.data.normal_()
    for stock_model in (to_stock(model), with_position_scheme(model, None, copy=True)):
        assert type(stock_model) is transformers.MPNetModel and not hasattr(stock_model.config, "hf_posenc")
        again = with_position_scheme(stock_model, "deberta")
        assert type(again) is hf_posenc.PosencMPNetModel


def test_a_stock_model_that_comes_from_elsewhere_is_no_exported_one():
    model = transformers.MPNetModel(tiny.stock_config("mpnet"))
    assert with_position_scheme(model, "t5") is model
    with pytest.raises(ValueError, match="to_stock"):
        from_stock(model)


def test_it_is_pushed_with_what_belongs_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has only plain uploads
    folder, out = saved(tmp_path / "model", "deberta"), tmp_path / "out"
    export(folder, out)
    (out / "optimizer.pt").write_bytes(b"no part of it")
    with LoopbackHub() as hub:
        api = HfApi(endpoint=hub.url, token=hub.token)
        push(out, "me/stock", api=api)
        there = {*api.list_repo_files("me/stock")}
        with pytest.raises(ValueError, match="holds a bert model without a position scheme"):
            push(tmp_path / "source", "me/other", api=api)
        # A model with a scheme again, which was loaded from an exported one, goes with its code.
        export(saved(tmp_path / "t5", "t5"), tmp_path / "mpnet")
        AutoModel.from_pretrained(tmp_path / "mpnet", position_scheme="t5").save_pretrained(tmp_path / "again")
        push(tmp_path / "again", "me/again", api=api)
        assert "modeling_mpnet.py" in api.list_repo_files("me/again")
    assert there - {".gitattributes"} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }


@pytest.fixture
def sentences(tmp_path) -> Path:
    """A folder of sentence-transformers around a model with t5, which cuts at 24 tokens."""
    library = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    transformer = models.Transformer(str(saved(tmp_path / "model", "t5")), max_seq_length=24)
    model = library.SentenceTransformer(modules=[transformer, models.Pooling(32), models.Normalize()], device="cpu")
    model.save(str(tmp_path / "sentences"))
    return tmp_path / "sentences"


def vectors(folder: Path, tmp_path: Path) -> torch.Tensor:
    """What sentence-transformers makes of texts where hf_posenc cannot be imported."""
    code = f"""
import torch
from sentence_transformers import SentenceTransformer
model = SentenceTransformer({str(folder)!r}, device="cpu")
torch.save([model.encode({TEXTS!r}, convert_to_tensor=True), model.max_seq_length], {str(tmp_path / "vectors.pt")!r})
"""
    run_fresh(code, tmp_path / "modules", plugin=False)
    return torch.load(tmp_path / "vectors.pt")


def test_sentence_transformers_loads_it_and_cuts_where_it_did(sentences, tmp_path):
    from sentence_transformers import SentenceTransformer

    export(sentences, tmp_path / "out", max_length=40)
    found, length = vectors(tmp_path / "out", tmp_path)
    assert length == 40
    variant = SentenceTransformer(str(sentences), device="cpu")
    variant.max_seq_length = 40
    assert_equal([found], [variant.encode(TEXTS, convert_to_tensor=True)])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "sentence-transformers" and card.data.pipeline_tag == "sentence-similarity"


def test_modules_that_read_all_layers_get_them(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    options = {"config_args": {"output_hidden_states": True}, "max_seq_length": 24}
    transformer = models.Transformer(str(saved(tmp_path / "model", "t5")), **options)
    layers = models.WeightedLayerPooling(32, transformer.model.config.num_hidden_layers, layer_start=0)
    with torch.no_grad():
        layers.layer_weights.uniform_(0, 2)
    model = library.SentenceTransformer(modules=[transformer, layers, models.Pooling(32)], device="cpu")
    model.save(str(tmp_path / "sentences"))
    export(tmp_path / "sentences", tmp_path / "out")
    found, _ = vectors(tmp_path / "out", tmp_path)
    assert_equal([found], [model.encode(TEXTS, convert_to_tensor=True)])


def test_it_reads_what_sentence_transformers_reads_where_the_tokenizer_cuts_earlier(sentences, tmp_path):
    """Older versions of sentence-transformers wrote their length into this file alone."""
    (sentences / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 60, "do_lower_case": False}))
    assert AutoTokenizer.from_pretrained(sentences).model_max_length < 60
    export(sentences, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 62
    # A shorter one leaves what the tokenizer lets through.
    (sentences / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 10, "do_lower_case": False}))
    export(sentences, tmp_path / "shorter")
    length = AutoTokenizer.from_pretrained(sentences).model_max_length
    assert json.loads((tmp_path / "shorter" / "config.json").read_text())["max_position_embeddings"] == length + 2


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_cut_where_it_was_if_the_tokenizer_has_no_length(scheme, family, tmp_path):
    """sentence-transformers then cuts at max_position_embeddings, which in MPNet is two more than it reads."""
    library = pytest.importorskip("sentence_transformers")
    folder = saved(tmp_path / "model", scheme, family)
    tiny_checkpoints.tokenizer(family, length=10**30, unused=family == "bert").save_pretrained(folder)
    export(folder, tmp_path / "out")
    before, after = (library.SentenceTransformer(str(each), device="cpu") for each in (folder, tmp_path / "out"))
    if "absolute" in scheme and family == "roberta":  # which cuts too late before, as all of its family
        assert after.max_seq_length == 62
        before.max_seq_length = 62
    text = " ".join(tiny_checkpoints.WORDS[:80])
    assert_equal([after.encode(text, convert_to_tensor=True)], [before.encode(text, convert_to_tensor=True)])


def test_it_reads_as_far_as_the_texts_of_a_task(tmp_path):
    library, models = pytest.importorskip("sentence_transformers"), pytest.importorskip("sentence_transformers.models")
    transformer = models.Transformer(str(saved(tmp_path / "model", "t5")), document_length=60)
    model = library.SentenceTransformer(modules=[transformer, models.Pooling(32)], device="cpu")
    model.save(str(tmp_path / "sentences"))
    export(tmp_path / "sentences", tmp_path / "out")
    text = " ".join(tiny_checkpoints.WORDS[:58])
    exported = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    both = [each.encode_document(text, convert_to_tensor=True) for each in (exported, model)]
    assert_equal(both[:1], both[1:])
    with pytest.raises(ValueError, match="60 tokens by document_length, which is more than max_length=40"):
        export(tmp_path / "sentences", tmp_path / "other", max_length=40)


def test_a_folder_that_reads_in_chunks_is_refused(sentences, tmp_path, monkeypatch):
    from sentence_transformers import SentenceTransformer

    from hf_posenc.sentence import in_chunks

    model = SentenceTransformer(str(sentences), device="cpu")
    in_chunks(model, chunk_size=12).save(str(tmp_path / "chunks"))
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)
    with pytest.raises(ValueError, match="reads texts in chunks by hf_posenc, which its export would need too"):
        export(tmp_path / "chunks", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("family", "scheme"), [("bert", "absolute"), ("mpnet", "absolute+t5")])
def test_the_card_of_an_original_architecture_names_its_scheme_and_no_way_back(family, scheme, tmp_path):
    export(saved(tmp_path / "model", scheme, family), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f'position_scheme="{scheme}"' in card and "from_stock" not in card


def test_a_folder_that_pools_by_the_pooler_is_refused_where_there_is_none(tmp_path, monkeypatch):
    folder = saved(tmp_path / "model", "deberta")
    settings = {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)
    with pytest.raises(
        ValueError,
        match="reads pooler_output, which the base model of 'deberta-v2' does not have; t5 and rope keep it",
    ):
        export(folder, tmp_path / "out")


@pytest.mark.parametrize("scheme", ["rope", "t5", "deberta"])
@pytest.mark.parametrize(
    "entries",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
    ids=lambda entries: next(iter(entries)),
)
def test_a_cross_encoder_keeps_the_function_of_its_scores(scheme, entries, tmp_path):
    folder = saved(tmp_path / "model", scheme, auto=AutoModelForSequenceClassification, num_labels=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    export(folder, tmp_path / "out", single_text=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text()).items() >= entries.items()


class TestConversion:
    @pytest.fixture
    def checkpoint(self, tmp_path) -> Path:
        folder = tiny_checkpoints.save(tmp_path / "bert")
        tiny_checkpoints.tokenizer(unused=True).save_pretrained(folder)
        return folder

    @pytest.mark.parametrize("scheme", ["t5", "deberta", "rope", "absolute+t5"])
    def test_ends_as_a_folder_that_needs_no_plugin(self, scheme, checkpoint, tmp_path):
        length = None if "absolute" in scheme else 60
        settings = {"text": checkpoint.with_name("bert.txt"), "max_steps": 3, "max_length": length}
        model, report = convert(checkpoint, scheme, output=tmp_path / "out", stock=True, **settings)
        assert model.config.position_scheme == scheme
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert written["model_type"] == SCHEMES[scheme] and not [*(tmp_path / "out").glob("*.py")]
        assert (tmp_path / "out" / "conversion.json").is_file()
        card = (tmp_path / "out" / "README.md").read_text()
        assert "Agreement with it on held-out text" in card and "## Architecture" in card
        model.save_pretrained(tmp_path / "variant")
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "variant")
        assert_equal(states(tmp_path / "variant"), states(tmp_path / "out"))
        assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == (length or 32)

    def test_learned_frequencies_start_at_those_of_rope(self, checkpoint, tmp_path):
        settings = {"text": checkpoint.with_name("bert.txt"), "train": "none", "output": tmp_path / "out"}
        convert(checkpoint, "rope", position_learn_frequencies="shared", stock=True, **settings)
        rope = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
        assert rope["long_factor"] == rope["short_factor"] == [1.0] * len(rope["long_factor"])

    @pytest.mark.parametrize(
        ("scheme", "flags", "said"),
        [
            ("alibi", {}, "Transformers has no architecture with"),
            ("t5", {"position_per_layer": True}, "one bias matrix for all layers"),
            ("t5", {"position_buckets": 64}, "32 buckets up to distance 128"),
        ],
    )
    def test_what_does_not_fit_is_refused_before_weights_are_read(
        self, scheme, flags, said, checkpoint, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)
        with pytest.raises(ValueError, match=said):
            convert(
                checkpoint, scheme, output=tmp_path / "out", stock=True, text=checkpoint.with_name("bert.txt"), **flags
            )
        with pytest.raises(ValueError, match="stock need an output folder"):
            convert(checkpoint, scheme, stock=True, **flags)

    def test_heads_that_may_read_pairs_are_refused_where_there_are_no_token_types(self, tmp_path, monkeypatch):
        checkpoint = tiny_checkpoints.save(tmp_path / "bert", head="ForSequenceClassification")
        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)
        with pytest.raises(ValueError, match="no token types.*export stock --single-text"):
            convert(checkpoint, "t5", output=tmp_path / "out", stock=True, text=checkpoint.with_name("bert.txt"))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["t5", "deberta"])
def test_minilm_converted_needs_no_plugin_and_gives_the_variants_vectors(minilm, scheme, tmp_path):
    from sentence_transformers import SentenceTransformer

    model, _ = convert(
        minilm,
        scheme,
        output=tmp_path / "out",
        stock=True,
        train="none",
        text=ROOT / "docs" / "faq.md",
        trained_length=64,
    )
    found, _ = vectors(tmp_path / "out", tmp_path)
    shutil.copytree(minilm, tmp_path / "variant")
    model.save_pretrained(tmp_path / "variant")
    variant = SentenceTransformer(str(tmp_path / "variant"), device="cpu")
    assert type(variant[0].auto_model) is type(model)
    assert_equal([found], [variant.encode(TEXTS, convert_to_tensor=True)])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["t5", "absolute+t5", "deberta"])
def test_our_onnx_export_takes_it(scheme, tmp_path):
    from hf_posenc.export.onnx import exporting as onnx

    export(saved(tmp_path / "model", scheme), tmp_path / "out")
    onnx.export(str(tmp_path / "out"), tmp_path / "model.onnx")  # which compares what is computed
    assert (tmp_path / "model.onnx").is_file()


def test_it_is_public():
    assert hf_posenc.to_stock is to_stock is stock.to_stock and hf_posenc.from_stock is from_stock
