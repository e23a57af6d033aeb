"""What older versions of transformers cannot do by themselves, with or without hf_posenc; tests of it are skipped there."""

import re

import transformers
from packaging.version import Version


# Version from which on it works (of those that were tried), the tests of it, and what fails before.
WORKS_SINCE = (
    (
        "5.16.1",
        r"test_losses.*(xlm-roberta|camembert).*MultipleChoice|test_losses.*MultipleChoice.*(xlm-roberta|camembert)|"
        r"(test_every_class_of_a_family.*|TestVariants::test_heads_give_what_they_gave)\[(xlm-roberta|camembert)\]|"
        r"test_stock_classes_compute_and_save|test_hub.py::.*(import_closure|without_a_flag|a_trainer_pushed_load)",
        "XLMRobertaForMultipleChoice and CamembertForMultipleChoice fail in their forward pass",
    ),
    ("5.16.1", r"test_halves_is_the_attention_of_esm", "ESM's self-attention, the reference, turns queries by itself"),
    ("5.16.1", r"test_forward_may_be_called_directly\[mpnet\]", "MPNetModel takes no mask of pairs"),
    ("5.16.1", r"TestWhatStandsAgainstIt::test_tracing", "BertModel with return_dict=False cannot be traced"),
    ("5.16.1", r"TestClassesThatSomebodyReplaced::test_models", "a model class needs a module that is imported"),
    (
        "5.23.0",
        r"test_positions_of_every_scheme_are_trained_saved|test_need_the_flag_again_where_the_base_is_stock|"
        r"test_adapters_on_every_linear_layer_reach|test_adapters_that_transformers_itself_added|test_shards_adapters|"
        r"test_hub.py::.*a_trainer_pushed_load",
        "AutoModel does not load what is in an adapter's modules_to_save, and lists it as MISSING",
    ),
)


def reason_to_skip(test: str) -> str | None:
    """Why a test, by its id, cannot pass with the transformers that is here."""
    here = Version(transformers.__version__)
    for since, tests, fails in WORKS_SINCE:
        if here < Version(since) and re.search(tests, test):
            return f"transformers {here}, before {since}: {fails}"
    return None
