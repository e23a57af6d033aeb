"""What the plugin might change, before and after; imports nothing of the plugin, for processes that have not yet either."""

import sys

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from transformers.models.bert import configuration_bert, modeling_bert
from transformers.models.camembert import modeling_camembert
from transformers.models.electra import modeling_electra
from transformers.models.roberta import modeling_roberta
from transformers.models.xlm_roberta import modeling_xlm_roberta


def modules_of_peft() -> list:
    return [module for name, module in sys.modules.items() if name.split(".")[0] == "peft"]


def snapshot() -> dict:
    """Everything in transformers, PEFT and Python that the plugin might change, by name; the values are the objects themselves."""
    modules = [modeling_bert, modeling_camembert, modeling_electra, modeling_roberta, modeling_xlm_roberta]
    owners = {PreTrainedModel, PreTrainedConfig, configuration_bert.BertConfig}
    owners |= {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    seen = {("sys", "meta_path"): list(sys.meta_path)}
    for owner in [*owners, *modules]:
        seen |= {(owner, name): value for name, value in vars(owner).items() if not name.startswith("__abc")}
    # Python cannot take this off again; what stays is tested by what it does.
    for owner in (PreTrainedModel, PreTrainedConfig):
        seen.pop((owner, "__new__"), None)
    registries = {"config": CONFIG_MAPPING, "tokenizer": TOKENIZER_MAPPING}
    registries |= {name: getattr(auto, "_model_mapping", None) for name, auto in vars(modeling_auto).items()}
    for name, registry in registries.items():
        seen |= {(name, key): value for key, value in getattr(registry, "_extra_content", {}).items()}
    for module in modules_of_peft():
        for name, value in vars(module).items():
            if name.startswith("TRANSFORMERS_MODELS_TO_"):
                seen[module, name] = dict(value)
            elif callable(value):
                seen[module, name] = value
    return seen


def differences(before: dict, after: dict) -> list:
    """What is not the same object any more, or equal where it is a container."""

    def same(a, b) -> bool:
        return a is b or (isinstance(a, (dict, list)) and a == b)

    return [
        key for key in {**before, **after} if not (key in before and key in after and same(before[key], after[key]))
    ]
