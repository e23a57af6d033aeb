"""One run of transformers' common tests over a family's stock classes, or over its variants with a scheme."""

import contextlib
import unittest
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import torch
from common_tests import GenerationTesterMixin
from tiny import FAMILIES, STOCK_CONFIGS, heads
from transformers import initialization as init
from transformers import set_seed
from transformers.testing_utils import torch_device

from hf_posenc import plugin
from hf_posenc.modeling.modeling_posenc import PosencPreTrainedModel


class ModelTester:
    """What the common tests ask for: a tiny config of a family, inputs for it, and their sizes."""

    is_training = True
    batch_size = 4
    seq_length = 7
    num_choices = 3
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    vocab_size = 99
    type_vocab_size = 5

    def __init__(self, config_class: type, flags: dict):
        self.config_class = config_class
        self.flags = flags

    def get_config(self):
        return self.config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            max_position_embeddings=64,
            type_vocab_size=self.type_vocab_size,
            # Weights so large that positions are felt in the outputs.
            initializer_range=0.2,
            **self.flags,
        )

    def prepare_config_and_inputs(self) -> tuple:
        shape = (self.batch_size, self.seq_length)
        attention_mask = torch.randint(0, 2, shape, device=torch_device)
        attention_mask[:, 0] = 1
        inputs = {
            "input_ids": torch.randint(0, self.vocab_size, shape, device=torch_device),
            "token_type_ids": torch.randint(0, self.type_vocab_size, shape, device=torch_device),
            "attention_mask": attention_mask,
        }
        return self.get_config(), inputs

    def prepare_config_and_inputs_for_common(self) -> tuple:
        return self.prepare_config_and_inputs()


class Outcomes(unittest.TestResult):
    """What became of every test and subtest of a run.

    Attributes:
        by_name: for each name how often it "passed", "failed", or was "skipped: " for a reason.
    """

    def __init__(self):
        super().__init__()
        self.by_name: dict[str, Counter] = defaultdict(Counter)

    def _note(self, test: unittest.TestCase, outcome: str) -> None:
        self.by_name[test.id().rpartition(f"{CommonTests.__name__}.")[2]][outcome] += 1

    def addSuccess(self, test):
        self._note(test, "passed")

    def addSkip(self, test, reason):
        self._note(test, f"skipped: {reason}")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._note(test, "failed")

    def addError(self, test, error):
        super().addError(test, error)
        self._note(test, "failed")

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        self._note(subtest, "passed" if error is None else "failed")


class CommonTests:
    """What a run is made of, beside the two modules of common tests."""

    family: str
    config_class: type
    flags: dict
    configuration: ModuleType
    # Asked of all families here; transformers asks it of its own only where they are young.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        set_seed(0)
        self.model_tester = ModelTester(self.config_class, self.flags)

    def test_config(self):
        # 48 is no default of any family, and goes with 12 heads.
        tester = self.configuration.ConfigTester(self, self.config_class, hidden_size=48, **self.flags)
        tester.run_common_tests()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class.__name__.endswith("ForPreTraining"):
            size = (self.model_tester.batch_size, self.model_tester.seq_length)
            inputs["labels"] = torch.zeros(size, dtype=torch.long, device=torch_device)
            if self.family == "bert":
                inputs["next_sentence_label"] = torch.zeros(size[0], dtype=torch.long, device=torch_device)
        return inputs


@contextlib.contextmanager
def random_positions() -> Iterator[None]:
    """Initialise position parameters at random: at their silent start many of these tests could not fail."""
    initialise = PosencPreTrainedModel._init_weights

    def initialise_randomly(self, module):
        initialise(self, module)
        for name in getattr(module, "position_initial", {}):
            with torch.no_grad():
                init.normal_(getattr(module, name), std=0.5)

    with mock.patch.object(PosencPreTrainedModel, "_init_weights", initialise_randomly):
        yield


def run(modeling: ModuleType, configuration: ModuleType, family: str, flags: dict | None) -> Outcomes:
    """Run all common tests with a family's variants, or with its stock classes where `flags` is None."""
    classes = heads(family)
    members = {
        "family": family,
        "configuration": configuration,
        "config_class": STOCK_CONFIGS[family] if flags is None else FAMILIES[family],
        "all_model_classes": tuple(c if flags is None else plugin.VARIANT_MODELS[c] for c in classes),
        "flags": flags or {},
    }
    bases = (CommonTests, modeling.ModelTesterMixin, GenerationTesterMixin, unittest.TestCase)
    outcomes = Outcomes()
    with random_positions():
        unittest.defaultTestLoader.loadTestsFromTestCase(type(CommonTests.__name__, bases, members)).run(outcomes)
    return outcomes
