"""`check_scheme` passes what is right, the package's own schemes among them, and says what is wrong with the rest."""

import math
import re

import pytest
import test_custom_schemes
import torch

import hf_posenc_cli as cli
from hf_posenc import testing
from hf_posenc.custom_schemes import register_files
from hf_posenc.modeling.schemes.kerple import SMALLEST
from hf_posenc.modeling.schemes.table import SCHEMES
from hf_posenc.testing import CHECKS, check_scheme


pytestmark = pytest.mark.usefixtures("schemes_of_the_package")
files = test_custom_schemes.files

BEGIN = """
import torch
from hf_posenc.scheme import AttentionScheme, PositionParameter, ones, zeros
class Mine(AttentionScheme):
    name, formula, paper, extrapolates = "mine", "q·k/√d + b", "unpublished", "yes"
"""
RIGHT = """
    def add_layer_parameters(self, attention, config):
        attention.mine = PositionParameter((attention.num_heads,), zeros)
    def terms(self, context):
        slope = context.attention.mine()[:, None]
        return [context.positions.bias(lambda r: slope * r[..., None, :].abs().to(slope.dtype))]
"""
WRONG_GRADIENT = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
"""
# What is wrong: how the right one is changed, what is said of it, and which sentences must be among the failed.
FAULTS = {
    "a wrong gradient": (
        "context.attention.mine()[",
        "Twice.apply(context.attention.mine())[",
        r"gradient of .*mine.weight is wrong",
    ),
    "no gradient": (
        "context.attention.mine()[",
        "context.attention.mine().detach()[",
        "along a random direction it is 0, and",
    ),
    "padding leaks": ("slope * r", "slope / context.positions.key.shape[1] * r", "by itself and padded"),
    "no silent start": ("zeros)", "ones)", r"claims to be output-preserving at initialization \(silent = True\)"),
    "a start that never learns": ("slope * r", "slope ** 2 * r", "At initialization no parameter has a gradient"),
    "a parameter of its own kind": ("PositionParameter(", "Bare(", "not parameters of PositionParameter"),
    "not relative": ("slope * r", "slope * context.positions.key[:1, :1].to(slope.dtype) * r", "moved by 7"),
    "float32": ("(slope.dtype))", "(torch.float32)).float()", "has outputs|dtype|differ|wrong"),
    "nothing": ("slope * r", "0 * slope * r", "it computes nothing"),
    "a state": ("def terms", "def read(self, config): self.x = torch.ones(1)\n    def terms", "keeps tensors"),
    "a table that ends": ("def terms", "ends_with_table = True\n    def terms", "accepts longer sequences"),
    "no second family": ("attention.num_heads,)", "attention.num_attention_heads,)", "num_attention_heads"),
}
BARE = """
class Bare(torch.nn.Module):
    def __init__(self, shape, initial):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape))
    def forward(self):
        return self.weight.clone()
"""


@pytest.fixture
def defined(tmp_path):
    """A scheme from its text."""

    def define(text: str) -> type:
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
        [scheme] = register_files([tmp_path / "mine.py"])
        return scheme

    return define


def positive(name: str, parameter: torch.Tensor) -> None:
    """Where Kerple's r1 and r2 are projected, a change changes nothing, and their gradients pass as they are."""
    if "kerple" in name:
        parameter.abs_().add_(SMALLEST)


# Where something else is looked for; `export` is tested for every scheme elsewhere, and here for one of each kind.
BUT_EXPORT = tuple(check for check in CHECKS if "exports" not in check.__name__)
ONE_OF_EACH_KIND = {"sinusoidal", "deberta", "rope", "cable"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_the_package_s_own_schemes_pass(name, monkeypatch):
    checks = CHECKS if name in ONE_OF_EACH_KIND else BUT_EXPORT
    monkeypatch.setattr(testing, "CHECKS", checks)
    report = check_scheme(SCHEMES[name], fill=positive)
    assert report.passed, str(report)
    assert len(report.held) == len(checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (
            "deberta",
            {"position_form": "paper", "position_attention_types": ["c2p", "p2c", "p2p"], "position_norm": True},
        ),
        ("deberta", {"position_share_projections": False, "position_buckets": 8, "position_max_distance": 16}),
        ("t5", {"position_per_layer": True, "position_buckets": 8}),
        ("kerple", {"position_kernel": "power"}),
        ("rope", {"position_learn_frequencies": "layer"}),
        ("rope", {"position_learn_frequencies": "shared", "position_rotary_fraction": 0.5}),
        ("relative", {"position_max_distance": 3}),
        ("sinusoidal", {"position_combine": "gate", "position_every_layer": True}),
        ("sinusoidal", {"position_combine": "attention", "position_layout": "halves"}),
    ],
)
def test_with_other_flags_they_pass_too(name, flags, monkeypatch):
    monkeypatch.setattr(testing, "CHECKS", BUT_EXPORT)
    report = check_scheme(SCHEMES[name], fill=positive, **flags)
    assert report.passed, str(report)


def forgotten(context, head, i, j) -> float:
    """What `fox` subtracts: the sum over the tokens after the first of a pair, up to the other."""
    gates = context.attention.forget_gate(context.hidden_states)[0, min(i, j) + 1 : max(i, j) + 1, head]
    return sum(-math.log(1 / (1 + math.exp(-float(gate)))) for gate in gates)


def product(context, head, i, j) -> float:
    query, key = context.query[0, head, i], context.key[0, head, j]
    return float(query @ key) / math.sqrt(len(query))


FORMULAS = {
    "alibi": lambda context, head, i, j: product(context, head, i, j) - 2.0 ** (-8 * (head + 1) / 4) * abs(i - j),
    "key_decay": lambda context, head, i, j: (
        product(context, head, i, j)
        + float(context.key[0, head, j] @ context.attention.key_decay()[int(j > i), head]) * math.log(1 + abs(i - j))
    ),
    "fox": lambda context, head, i, j: product(context, head, i, j) - forgotten(context, head, i, j),
    "sinusoidal": lambda embeddings, i: torch.tensor(
        [
            float(embeddings.position_scale.weight)
            * (math.cos if k % 2 else math.sin)(i / 10000 ** ((k - k % 2) / embeddings.words.embedding_dim))
            for k in range(embeddings.words.embedding_dim)
        ],
        dtype=torch.float64,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_compared_number_by_number(name, files, monkeypatch):
    if name in SCHEMES:  # which have passed the other checks
        monkeypatch.setattr(testing, "CHECKS", [testing.computes_its_formula])
    if name not in SCHEMES:
        register_files([files / f"{name}.py"])
    report = check_scheme(SCHEMES[name], formula=FORMULAS[name])
    assert report.passed and any("agree with the formula" in sentence for sentence in report.held), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
def test_another_formula_is_not_it(name, files, monkeypatch):
    monkeypatch.setattr(testing, "CHECKS", [testing.matters, testing.computes_its_formula])
    if name not in SCHEMES:
        register_files([files / f"{name}.py"])
    report = check_scheme(SCHEMES[name], formula=lambda *where: 1.01 * FORMULAS[name](*where))
    assert len(report.failed) == 1 and "the formula differ by" in report.failed[0], str(report)


def with_fault(fault: str) -> str:
    old, new, _ = FAULTS[fault]
    assert old in RIGHT
    return BEGIN.replace("class Mine", f"{WRONG_GRADIENT}{BARE}class Mine") + RIGHT.replace(old, new)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_found_and_said(fault, defined, monkeypatch):
    monkeypatch.setattr(testing, "CHECKS", BUT_EXPORT)
    report = check_scheme(defined(with_fault(fault)))
    assert not report.passed and re.search(FAULTS[fault][-1], " ".join(report.failed)), str(report)


@pytest.mark.parametrize(
    ("fault", "check"), [("a wrong gradient", "has_right_gradients"), ("padding leaks", "padding_changes_nothing")]
)
def test_one_check_finds_what_it_is_for(fault, check, defined, monkeypatch):
    monkeypatch.setattr(testing, "CHECKS", [getattr(testing, check)])
    report = check_scheme(defined(with_fault(fault)))
    assert not report.held and re.search(FAULTS[fault][-1], *report.failed)
    report = check_scheme(SCHEMES["t5"])
    assert report.passed, str(report)


def test_one_check_compares_the_formula(files, monkeypatch):
    monkeypatch.setattr(testing, "CHECKS", [testing.computes_its_formula])
    [scheme] = register_files([files / "key_decay.py"])
    assert check_scheme(scheme, formula=FORMULAS["key_decay"]).passed
    assert not check_scheme(scheme, formula=product).passed


@pytest.mark.slow
def test_the_right_one_passes(defined):
    report = check_scheme(defined(BEGIN + RIGHT))
    assert report.passed, str(report)
    assert str(report).startswith(f"mine: {len(CHECKS)} checks passed, 0 failed.\n- Its file, mine.py, only imports")


@pytest.mark.slow
def test_the_command_ends_with_what_it_found(tmp_path, capsys):
    for text, code in ((RIGHT, 0), (RIGHT.replace("zeros)", "ones)"), 1)):
        (tmp_path / "mine.py").write_text(BEGIN + text, encoding="utf-8")
        with pytest.raises(SystemExit) as ended:
            cli.main(["check-scheme", str(tmp_path / "mine.py")])
        said = capsys.readouterr().out
        assert ended.value.code == code and ("FAILED" in said) == bool(code)


def test_a_wrong_flag_is_the_caller_s():
    with pytest.raises(ValueError, match="position_buckets must be even"):
        check_scheme(SCHEMES["t5"], position_buckets=7)
    with pytest.raises(TypeError, match="subclass"):
        check_scheme(int)
