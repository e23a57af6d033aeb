"""`hf-posenc export onnx`: files that ONNX Runtime computes the same with, in few nodes, or none."""

import collections
from pathlib import Path

import pytest
import tiny
import torch
from transformers import (
    DebertaConfig,
    DebertaForTokenClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    MPNetForQuestionAnswering,
)

from hf_posenc.export.onnx import attention, exporting
from hf_posenc.export.onnx.graph import OPSET, constant_nodes
from hf_posenc.integrations.stock_attention import attention as stock_attention
from hf_posenc_cli import main


onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TOLERANCE = 1e-4
SCHEMES = [*tiny.SCHEMES, "absolute+t5", "tupe+t5", "sinusoidal+deberta", "alibi+rope"]
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
V2 = {"position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True, "max_relative_positions": 100}


def deberta_v2(**own) -> torch.nn.Module:
    torch.manual_seed(0)
    config = DebertaV2Config(**{**tiny.SIZES, "type_vocab_size": 0, **DEBERTA, **V2, **own})
    return DebertaV2ForSequenceClassification(config).eval()


def deberta_v1(**own) -> torch.nn.Module:
    torch.manual_seed(0)
    return DebertaForTokenClassification(
        DebertaConfig(**{**tiny.SIZES, "type_vocab_size": 2, **DEBERTA, **own})
    ).eval()


def stock(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return tiny.heads(family)[0](tiny.stock_config(family)).eval()


def check(model: torch.nn.Module, folder: Path, longest: int = 85) -> "onnx.ModelProto":
    """Export, and compare at other shapes than the exporter does, with padding on either side, and at it: heads may read it."""
    file = folder / "model.onnx"
    made = exporting.export_model(model, file)
    if hasattr(model.config, "unpad"):
        model.config.unpad = False
    session = onnxruntime.InferenceSession(file)
    for batch, length in ((1, 1), (1, 3), (2, 8), (4, 9), (5, 33), (2, longest)):
        length = min(length, made.longest or length)
        for side in ("right", "left"):
            inputs = exporting._example(model, batch, length, seed=7, side=side)
            with torch.no_grad():
                expected = model(**inputs)
            found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
            for name, output in zip(made.outputs, map(torch.from_numpy, found), strict=True):
                assert expected[name].shape == output.shape
                assert (expected[name] - output).abs().max() < TOLERANCE, (name, batch, length, side)
    return onnx.load(file)


def test_a_model_that_gives_tuples(tmp_path):
    model = tiny.build("t5", head="ForTokenClassification")
    model.config.return_dict = False
    assert exporting.export_model(model.eval(), tmp_path / "model.onnx").outputs == ("logits",)


def kinds(program: "onnx.ModelProto") -> collections.Counter:
    return collections.Counter(node.op_type for node in program.graph.node)


@pytest.mark.slow
@tiny.cross(scheme=SCHEMES, family=tiny.FAMILIES, strength=1)
def test_variants(family, scheme, tmp_path):
    program = check(tiny.build(scheme, family), tmp_path)
    assert not constant_nodes(program)


def test_a_position_embedding_matrix_with_a_stride(tmp_path):
    check(tiny.build("absolute", position_stride=3), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("buckets, max_distance", [(8, 16), (7, 21), (16, 28)])
def test_rows_of_deberta_from_the_largest_distance_on(buckets, max_distance, tmp_path):
    types = ["c2p", "p2c", "p2p"]
    flags = {"position_buckets": buckets, "position_max_distance": max_distance, "position_attention_types": types}
    check(tiny.build("deberta", **flags), tmp_path, longest=3 * max_distance)


@pytest.mark.slow
@tiny.cross(
    scheme=["absolute", "t5", "relative", "deberta", "rope", "tupe", "fire", "cable"],
    head=["Model", "ForSequenceClassification", "ForTokenClassification"],
    family=tiny.FAMILIES,
    window=[5, 30],
    strength=1,
)
def test_windows(scheme, head, family, window, tmp_path):
    check(tiny.build(scheme, family, head=head, position_window=window, position_global_every=2), tmp_path)


@pytest.mark.parametrize("scheme, flags", [
    ("rope", {"position_global_base": 50.0}),
    pytest.param("t5+rope", {"position_global_scheme": "t5"}, marks=pytest.mark.slow),
    pytest.param("alibi", {"position_global_scheme": "deberta"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_global_layers_with_schemes_of_their_own(scheme, flags, tmp_path):
    check(tiny.build(scheme, position_window=5, position_global_every=2, **flags), tmp_path)


@pytest.mark.parametrize("scheme", ["t5", pytest.param("relative", marks=pytest.mark.slow)])
def test_a_head_reads_padding_that_a_window_keeps_from_all_tokens(scheme, tmp_path):
    flags = {
        "head": "ForSequenceClassification",
        "position_window": 4,
        "position_global_every": 0,
        "num_hidden_layers": 1,
    }
    check(tiny.build(scheme, **flags), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head", ["ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForMaskedLM"]
)
def test_heads(head, tmp_path):
    check(tiny.build("deberta", head=head), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_stock_models(family, tmp_path):
    check(stock(family), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: deberta_v1(), id="v1"),
        pytest.param(lambda: deberta_v1(pos_att_type=["p2c"]), id="v1 p2c"),
        pytest.param(lambda: deberta_v2(position_buckets=-1), id="v2 without buckets"),
        pytest.param(lambda: deberta_v2(share_att_key=False, pos_att_type=["c2p"]), id="v2 c2p"),
        pytest.param(lambda: deberta_v2(conv_kernel_size=3, conv_act="gelu"), id="v2 with a convolution"),
        pytest.param(lambda: deberta_v2(relative_attention=False), id="v2 without relative attention"),
    ],
)
def test_deberta(model, tmp_path):
    check(model(), tmp_path)


@pytest.mark.slow
def test_mpnet_answers_questions(tmp_path):
    torch.manual_seed(0)
    check(MPNetForQuestionAnswering(tiny.stock_config("mpnet")).eval(), tmp_path)


def test_deberta_is_few_nodes_and_its_tables_are_numbers(tmp_path):
    program = check(deberta_v2(), tmp_path)
    assert not constant_nodes(program)
    found, layers = kinds(program), tiny.SIZES["num_hidden_layers"]
    assert found["MultiHeadAttention"] == found["QueryKeyScores"] == layers
    assert found["PairRows"] == 1
    assert not {"Softmax", "GatherElements"} & {*found}
    # Query, key, value, output and two of the feed-forward; pooler and classifier are Gemms. None is left for the table.
    assert found["MatMul"] == 6 * layers
    assert found["LayerNormalization"] == 2 * layers + 1


def test_the_file_says_how_it_was_made(tmp_path):
    program = check(deberta_v2(), tmp_path)
    says = {entry.key: entry.value for entry in program.metadata_props}
    assert says["opset"] == str(OPSET)
    assert says["operators of ONNX Runtime"] == "MultiHeadAttention"
    assert {"PairRows", "QueryKeyScores"} <= {*says["functions"].split(", ")}
    assert "QueryScores" not in says["functions"].split(", ")  # which nothing calls
    assert float(says["largest difference from PyTorch"]) < TOLERANCE


def run(*arguments, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        main(["export", "onnx", *map(str, arguments)])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_command(tmp_path, capsys):
    deberta_v2().save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit) as end:
        main(["export", "onnx", str(tmp_path / "model"), str(tmp_path / "there" / "model.onnx")])
    assert end.value.code == 0
    assert "input_ids, attention_mask -> logits" in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "there").iterdir()] == ["model.onnx"]
    assert "exists" in run(tmp_path / "model", tmp_path / "there" / "model.onnx", capsys=capsys)


def test_what_is_no_such_checkpoint_is_refused(tmp_path, capsys):
    assert "there is no such folder" in run(tmp_path / "nothing", tmp_path / "model.onnx", capsys=capsys)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "'gpt2' cannot be exported" in run(tmp_path, tmp_path / "model.onnx", capsys=capsys)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "is_decoder": true}')
    assert "decoder" in run(tmp_path, tmp_path / "model.onnx", capsys=capsys)


def test_what_is_not_installed_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(exporting, "LIBRARIES", ("onnx", "no_such_library"))
    error = run(tmp_path, tmp_path / "model.onnx", capsys=capsys)
    assert "exporting needs no_such_library: pip install 'hf_posenc[export]'" in error


@pytest.mark.parametrize(
    "module, name, other",
    [
        (attention, "score_bias", lambda query, key, terms, products: None),
        # Padding is read from the left alone, by the head.
        (stock_attention, "_of_padding", lambda value, words, dropout: torch.zeros_like(value).transpose(1, 2)),
    ],
)
def test_nothing_is_written_where_results_differ(module, name, other, tmp_path, monkeypatch):
    monkeypatch.setattr(module, name, other)
    with pytest.raises(ValueError, match="logits of ONNX Runtime and PyTorch differ"):
        exporting.export_model(deberta_v2(), tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]


def test_an_export_that_fails_is_one_line_and_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    def fails(*arguments, **settings):
        raise RuntimeError("no such operator\nand a page more")

    model = deberta_v2()
    model.set_attn_implementation("eager")
    monkeypatch.setattr(torch.onnx, "export", fails)
    with pytest.raises(ValueError, match="failed: RuntimeError: no such operator$"):
        exporting.export_model(model, tmp_path / "model.onnx")
    assert model.config._attn_implementation == "eager"
    assert not [*tmp_path.iterdir()]


def test_what_is_there_is_not_replaced(tmp_path, device):
    """A file, and a device, which gets the model and stays what it is."""
    stock("bert").save_pretrained(tmp_path / "model")
    (tmp_path / "null").symlink_to(device(3))
    exporting.export(tmp_path / "model", tmp_path / "null")
    assert (tmp_path / "null").is_symlink() and not (tmp_path / "null").is_file()
    (tmp_path / "a").write_text("mine")
    for path, said in (
        (tmp_path / "a", "exists"),
        (tmp_path / "a" / "b", "is not a folder"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(OSError, match=said):
            exporting.export("no/model", path)
    assert (tmp_path / "a").read_text() == "mine"
