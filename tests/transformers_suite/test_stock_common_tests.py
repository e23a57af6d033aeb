"""transformers' common tests of DeBERTa and MPNet, with this package's attention in the place of eager."""

import unittest

import pytest
import stock_models
from transformers import set_seed
from transformers.models.auto import modeling_auto
from transformers.testing_utils import torch_device
from transformers_suite.runner import Outcomes
from transformers_suite.test_common_tests import common_tests  # noqa: F401  the fixture

from hf_posenc.integrations.stock_attention import mpnet
from hf_posenc.modeling.kernels import fast


pytestmark = pytest.mark.slow


class Tester:
    """What the common tests ask for: a tiny config with the backend, and inputs for it."""

    is_training = True
    batch_size, seq_length, num_choices = 3, 7, 3
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, case: str, implementation: str):
        self.case, self.implementation = case, implementation

    def get_config(self):
        # With a LayerNorm on the table, which all layers share, stock cannot do reentrant gradient checkpointing.
        norm = {"norm_rel_ebd": "none"} if self.case == "v3" else {}
        config = stock_models.config(self.case, initializer_range=0.2, max_position_embeddings=64, **norm)
        config._attn_implementation = self.implementation
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple:
        inputs = stock_models.batch(self.seq_length, "left")
        return self.get_config(), {name: tensor.to(torch_device) for name, tensor in inputs.items()}

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


class CommonTests:
    def setUp(self):
        set_seed(0)
        self.model_tester = Tester(self.case, self.implementation)

    def test_retain_grad_hidden_states_attentions(self):
        # Sets `config.output_attentions`, which transformers refuses of every config that names another backend than eager.
        self.model_tester.implementation = "eager"
        super().test_retain_grad_hidden_states_attentions()


def run(modeling, case: str, implementation: str) -> Outcomes:
    """All common tests with every class of a case's family."""
    base, config_class, _ = stock_models.CASES[case]
    mappings = [v for k, v in vars(modeling_auto).items() if k.startswith("MODEL") and k.endswith("_MAPPING")]
    classes = {mapping[config_class] for mapping in mappings if config_class in mapping} | {base}
    members = {
        "case": case,
        "implementation": implementation,
        "all_model_classes": tuple(sorted(classes, key=lambda c: c.__name__)),
    }
    bases = (CommonTests, modeling.ModelTesterMixin, unittest.TestCase)
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(type(CommonTests.__name__, bases, members))
    outcomes = Outcomes({}, set())
    tests.run(outcomes)
    return outcomes


@pytest.mark.parametrize("case", stock_models.KINDS)
def test_common_tests_pass_in_blocks_and_skip_nothing_that_passes_in_eager(case, common_tests, monkeypatch):  # noqa: F811
    modeling, _ = common_tests
    calls, attend = [], fast.blockwise_attention

    def counted(*arguments):
        calls.append(arguments[0].shape)
        return attend(*arguments)

    monkeypatch.setattr(fast, "blockwise_attention", counted)
    monkeypatch.setattr(fast, "FEWEST_SCORES", 0)
    monkeypatch.setattr(fast, "FEWEST_SCORES_WITH_VIEWS", 0)
    monkeypatch.setattr(mpnet, "BLOCKS_FROM", 0)
    eager = run(modeling, case, "eager")
    assert not calls
    own = run(modeling, case, "sdpa")
    assert len(calls) > 100
    assert own.by_name["test_save_load"] == {"passed": 1}
    assert not own.failed, own.failed
    differences = own.differences(eager, passes_more=True)
    assert not differences, "\n".join(differences)
    print(
        case, *(f"{name}: {dict(found)}" for name, found in own.by_name.items() if "passed" not in found), sep="\n  "
    )
