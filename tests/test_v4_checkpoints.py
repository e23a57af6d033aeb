"""Checkpoints that transformers 4 wrote with relative_key and relative_key_query compute what they computed there."""

import copy
import json
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from fresh_process import run_fresh
from safetensors.torch import load_file
from saved_before import unpacked
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

import hf_posenc  # noqa: F401


V4 = unpacked("v4")
FOLDERS = sorted(path for path in V4.iterdir() if path.is_dir())
TENSORS = load_file(V4 / "outputs.safetensors")
DECODERS = [folder for folder in FOLDERS if "decoder" in folder.name]
LENGTHS = (5, 11, 18)
TOLERANCE = 1e-5

# Both schemes, an encoder and a decoder; the other families by `--all`.
FEW = ("bert-relative_key", "bert-decoder-relative_key_query")
each_checkpoint = pytest.mark.parametrize(
    "folder",
    [pytest.param(f, id=f.name, marks=() if f.name in FEW else pytest.mark.slow) for f in FOLDERS],
)


def entry(folder: Path, name: str):
    return json.loads((folder / "config.json").read_text())[name]


def auto_head(folder: Path) -> type:
    return AutoModelForCausalLM if folder in DECODERS else AutoModelForMaskedLM


def stock_classes(folder: Path) -> tuple[type, type]:
    """The base model and the head that the checkpoint names, as transformers has them."""
    head = getattr(transformers, entry(folder, "architectures")[0])
    return getattr(transformers, head.config_class.__name__.removesuffix("Config") + "Model"), head


def largest_error(model: torch.nn.Module, folder: Path, output: str) -> float:
    """Largest difference from what 4.57 computed, over all lengths and all tokens that are not padding."""
    errors = []
    for length in LENGTHS:
        inputs = {name: TENSORS[f"{folder.name}.{length}.{name}"] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            result = tiny.aligned(model).eval()(**inputs)[output]
        expected = TENSORS[f"{folder.name}.{length}.{output}"]
        errors.append(tiny.difference_where_attended(result, expected, inputs["attention_mask"]))
    return max(errors)


# The families that had the two schemes in transformers 4.
FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra")


def test_there_is_a_checkpoint_of_every_family_and_scheme():
    made = {(entry(folder, "model_type"), entry(folder, "position_embedding_type")) for folder in FOLDERS}
    assert made == {(family, scheme) for family in FAMILIES for scheme in ("relative_key", "relative_key_query")}
    assert len(DECODERS) == 2


@each_checkpoint
def test_the_auto_classes_compute_what_v4_computed(folder):
    model = AutoModel.from_pretrained(folder)
    assert largest_error(model, folder, "last_hidden_state") < TOLERANCE
    assert largest_error(auto_head(folder).from_pretrained(folder), folder, "logits") < TOLERANCE
    # Not so without the distances, nor with their order turned round.
    for change in (torch.zeros_like, lambda weight: weight.flip(0)):
        other = copy.deepcopy(model)
        for layer in other.encoder.layer:
            table = layer.attention.self.distance_embedding
            table.weight.data = change(table.weight.data)
        assert largest_error(other, folder, "last_hidden_state") > 100 * TOLERANCE


@each_checkpoint
def test_the_stock_classes_compute_what_v4_computed(folder):
    base, head = stock_classes(folder)
    model = base.from_pretrained(folder)
    assert isinstance(model, base)
    assert largest_error(model, folder, "last_hidden_state") < TOLERANCE
    assert largest_error(head.from_pretrained(folder), folder, "logits") < TOLERANCE


@tiny.cross(
    implementation=["eager", "flex_attention"],
    name=["bert-relative_key", "roberta-relative_key_query", "bert-decoder-relative_key_query"],
    rest=pytest.mark.slow,
)
def test_every_backend_computes_what_v4_computed(name, implementation):
    folder = next(folder for folder in FOLDERS if folder.name == name)
    model = AutoModel.from_pretrained(folder, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    assert largest_error(model, folder, "last_hidden_state") < TOLERANCE


@each_checkpoint
def test_restoring_is_said_in_one_line_and_nothing_else_is_claimed(folder, said):
    for _ in range(2):
        auto_head(folder).from_pretrained(folder)
    [line] = said
    assert "restored" in line and f"{entry(folder, 'position_embedding_type')!r}" in line


def test_an_absolute_checkpoint_is_still_told_that_its_positions_are_left_out(tmp_path, said):
    transformers.BertModel(tiny.stock_config()).save_pretrained(tmp_path)
    AutoModel.from_pretrained(tmp_path, position_scheme="relative_key")
    [line] = said
    assert "leaves out the absolute positions" in line


def test_another_scheme_on_a_v4_checkpoint_takes_no_absolute_positions_away(said):
    AutoModel.from_pretrained(FOLDERS[0], position_scheme="t5")
    assert not any("absolute positions" in line for line in said)


@pytest.mark.parametrize("folder", FOLDERS[::3], ids=lambda folder: folder.name)
def test_sequences_longer_than_the_table_share_its_ends(folder):
    model = AutoModel.from_pretrained(folder).eval()
    table_length = model.config.max_position_embeddings
    longer = {**model.config.to_dict(), "max_position_embeddings": 2 * table_length}
    reference = type(model)(type(model.config).from_dict(longer)).eval()
    weights = model.state_dict()
    for key in [key for key in weights if key.endswith("distance_embedding.weight")]:
        ends = weights[key][[0, -1]].repeat_interleave(table_length, dim=0)
        weights[key] = torch.cat([ends[:table_length], weights[key], ends[table_length:]])
    reference.load_state_dict(weights)

    input_ids = torch.randint(5, 40, (2, table_length + 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        result, expected = (m(input_ids).last_hidden_state for m in (model, reference))
    torch.testing.assert_close(result, expected, atol=TOLERANCE, rtol=0)


@each_checkpoint
def test_it_saves_as_a_variant_and_reloads_equal(folder, tmp_path):
    model = auto_head(folder).from_pretrained(folder)
    model.save_pretrained(tmp_path)
    assert entry(tmp_path, "model_type") == f"posenc_{entry(folder, 'model_type').replace('-', '_')}"
    assert entry(tmp_path, "position_scheme") == entry(folder, "position_embedding_type")
    assert "position_embedding_type" not in json.loads((tmp_path / "config.json").read_text())

    saved, written_by_v4 = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    assert written_by_v4.keys() - saved.keys() == {
        key for key in written_by_v4 if key.endswith("position_embeddings.weight")
    }
    assert not saved.keys() - written_by_v4.keys()

    reloaded = auto_head(folder).from_pretrained(tmp_path)
    assert type(reloaded) is type(model)
    assert largest_error(reloaded, folder, "logits") == largest_error(model, folder, "logits") < TOLERANCE


@pytest.mark.parametrize("folder", DECODERS, ids=lambda folder: folder.name)
def test_a_cache_gives_what_v4_computed_without_one(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, use_cache=True).eval()
    length = LENGTHS[-1]
    input_ids, expected = (TENSORS[f"{folder.name}.{length}.{name}"][:1] for name in ("input_ids", "logits"))
    cache, logits = None, []
    for tokens in input_ids.split([7, *[1] * (length - 7)], dim=1):  # a prompt, then one token at a time
        with torch.no_grad():
            outputs = model(tokens, **{tiny.CACHE: cache})
        cache = getattr(outputs, tiny.CACHE)
        logits.append(outputs.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=TOLERANCE, rtol=0)


# Prints, per checkpoint, how far stock transformers is from what 4.57 computed; the first row has no padding. Before that, what
# transformers says when it loads one.
STOCK_ERRORS = """
import json
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, logging

logging.disable_progress_bar()
AutoModelForMaskedLM.from_pretrained({masked_lm})
logging.set_verbosity_error()
errors = {{}}
for folder in map(Path, {folders}):
    tensors = load_file(folder.parent / "outputs.safetensors")
    ids, expected = (tensors[folder.name + ".11." + name][:1] for name in ("input_ids", "last_hidden_state"))
    result = AutoModel.from_pretrained(folder).eval()(ids).last_hidden_state
    errors[folder.name] = (result - expected).abs().max().item()
print(json.dumps(errors))
"""


@pytest.mark.slow
def test_without_the_plugin_transformers_5_computes_something_else_and_only_lists_the_tables(tmp_path):
    masked_lm = next(folder for folder in FOLDERS if folder.name == "bert-relative_key")
    code = STOCK_ERRORS.format(folders=[str(folder) for folder in FOLDERS], masked_lm=repr(str(masked_lm)))
    printed = run_fresh(code, tmp_path, plugin=False).splitlines()
    rows = [line.split(" | ") for line in printed if " | " in line and not line.startswith("Key")]
    assert [(key.strip(), status.strip()) for key, status, *_ in rows] == [
        ("bert.encoder.layer.{0, 1}.attention.self.distance_embedding.weight", "UNEXPECTED")
    ]
    assert not any("position_embedding_type" in line for line in printed)
    errors = json.loads(printed[0])
    assert errors.keys() == {folder.name for folder in FOLDERS}
    assert min(errors.values()) > 0.1, errors
