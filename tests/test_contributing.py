"""The check-lists of CONTRIBUTING.md hold for every scheme and family that there is."""

import inspect
import re
from pathlib import Path

import pytest
import tiny
import torch
from fresh_process import ROOT
from torch import nn

import hf_posenc
from hf_posenc import position_parameters
from hf_posenc.integrations import hooks as plugin
from hf_posenc.modeling.models.family import Family
from hf_posenc.modeling.schemes.base import PositionScheme
from hf_posenc.modeling.schemes.parameters import PositionConstant
from hf_posenc.modeling.schemes.table import FLAGS, SCHEMES


README = (ROOT / "README.md").read_text(encoding="utf-8")
FAMILIES = {config.family.model_type: config.family for config in plugin.CONFIGS}


def test_every_promise_is_held_by_tests():
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    promises = re.findall(r"^(\d)\. \*\*", design, re.MULTILINE)
    first_lines = [file.read_text(encoding="utf-8").split("\n")[0] for file in (ROOT / "tests").rglob("test_*.py")]
    held = {number for line in first_lines for number in re.findall(r"[Pp]romise (\d)", line)}
    assert promises == [str(number) for number in range(1, len(promises) + 1)] and held == {*promises}


def test_a_version_is_the_same_wherever_it_stands():
    """In the package, in the citation, and as the newest release of the changelog, with its date."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    cited = [re.search(rf"^{entry}: (.+)$", citation, re.MULTILINE)[1] for entry in ("version", "date-released")]
    assert headings[:2] == ["[Unreleased]", f"[{cited[0]}] - {cited[1]}"] and cited[0] == hf_posenc.__version__


def test_a_scheme_is_a_file_with_its_source_and_a_test():
    for name, scheme in SCHEMES.items():
        file = Path(inspect.getfile(scheme))
        assert file.parent == ROOT / "hf_posenc" / "modeling" / "schemes", name
        assert (ROOT / "tests" / "modeling" / "schemes" / f"test_{file.stem}.py").is_file(), name
        assert scheme.paper == "–" or "Source: " in scheme.__doc__, name
        assert f"`{scheme.name}`" in README, name


def test_schemes_that_share_a_flag_agree_on_what_it_may_be():
    for flag in [flag for flag in FLAGS if flag != "position_scheme"]:
        assert len({own.kind for own in FLAGS[flag].values()}) == 1, flag
        for own in FLAGS[flag].values():
            assert own.help and "\n" not in own.help and not own.help.endswith("."), flag
            if own.default is not None:
                own.kind.check(flag, own.default)


def test_check_sets_nothing():
    for name, scheme in SCHEMES.items():
        config = tiny.variant_config(position_scheme=name)
        built = scheme(config)
        before = dict(vars(built))
        built.check(config)
        assert vars(built) == before, name
        assert scheme.check is PositionScheme.check or scheme.check.__annotations__.get("return") is None, name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameters_are_modules_that_schemes_call(scheme):
    model = tiny.build(scheme)
    called = set()
    for module in model.modules():
        if "position_initial" in vars(module):
            module.register_forward_hook(lambda module, arguments, output: called.add(module))
    with torch.no_grad():
        model.train()(**tiny.inputs())
    owners = {model.get_submodule(name.rpartition(".")[0]) for name in position_parameters(model)}
    constants = {module for module in model.modules() if isinstance(module, PositionConstant)}
    assert owners | constants == called


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))
@torch.no_grad()
def test_purely_relative_schemes_and_no_others_are_blind_to_a_shift(scheme):
    model, batch = tiny.build(scheme.name), tiny.inputs(padding=None)
    here, there = (model(**batch, position_ids=torch.arange(12)[None] + shift)[0] for shift in (0, 5))
    is_blind = scheme.name == "none" or getattr(scheme, "pure_relative", False)
    difference = (here - there).abs().max()
    assert difference < 1e-5 if is_blind else difference > 1e-3


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_family_s_description_names_what_its_stock_model_has(family: Family):
    stock = tiny.STOCK_CONFIGS[family.model_type]
    config = tiny.stock_config(family.model_type)
    base = next(cls for cls in tiny.heads(family.model_type) if cls.__name__ == f"{family.prefix}Model")
    model = base(config)
    embeddings, encoder = family.embeddings_of(model), family.encoder_of(model)
    assert isinstance(getattr(embeddings, family.words), nn.Embedding)
    assert isinstance(getattr(embeddings, family.table), nn.Embedding)
    assert f"{family.embeddings}.{family.table}.weight" == family.table_key and family.table_key in model.state_dict()
    sizes = family.sizes(config)
    assert getattr(embeddings, family.table).weight.shape == (sizes.max_position_embeddings, sizes.table_width)
    assert len(family.layers_of(encoder)) == tiny.SIZES["num_hidden_layers"]
    for layer in family.layers_of(encoder):
        attention = family.self_attention_of(layer)
        for projection in (family.query, family.key, family.value):
            assert getattr(attention, projection).weight.shape == (sizes.hidden_size, sizes.hidden_size)
        assert family.output_projection_of(layer).weight.shape == (sizes.hidden_size, sizes.hidden_size)
    assert set(family.native_scheme.split("+")) <= SCHEMES.keys()
    assert stock.model_type == family.model_type


def test_a_family_is_public():
    for family in FAMILIES.values():
        assert f"Posenc{family.prefix}Config" in hf_posenc.__all__
        for name in family.auto_classes.values():
            assert name in hf_posenc.__all__ and hasattr(hf_posenc, name)
        assert (ROOT / "hf_posenc" / "modeling" / "models" / family.modeling_file).is_file()


def test_every_modeling_file_is_a_family_of_configs_and_named_where_people_look():
    models = ROOT / "hf_posenc" / "modeling" / "models"
    files = {file.name for file in models.glob("modeling_*.py")} - {"modeling_posenc.py"}
    assert files == {family.modeling_file for family in FAMILIES.values()}
    for page in ("README.md", "docs/padding.md"):
        text = (ROOT / page).read_text(encoding="utf-8").lower().replace("-", "")
        assert [name for name in FAMILIES if name.replace("-", "") not in text] == [], page
