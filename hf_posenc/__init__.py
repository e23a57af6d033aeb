"""Position schemes for BERT, RoBERTa and their relatives in Hugging Face transformers.

After `import hf_posenc`, Transformers understands `AutoModel.from_pretrained(..., position_scheme="absolute+t5")`. `uninstall()` removes the
hooks from Transformers, and `install()` installs them again.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .custom_schemes import register_entry_points, register_scheme
from .integrations.hooks import install, uninstall
from .integrations.peft import train_positions
from .integrations.stock_attention import set_attn_implementation
from .integrations.unpadding import unpad
from .modeling.kernels.caching import cache_projections
from .modeling.models.modeling_bert import (
    PosencBertConfig,
    PosencBertForMaskedLM,
    PosencBertForMultipleChoice,
    PosencBertForNextSentencePrediction,
    PosencBertForPreTraining,
    PosencBertForQuestionAnswering,
    PosencBertForSequenceClassification,
    PosencBertForTokenClassification,
    PosencBertLMHeadModel,
    PosencBertModel,
)
from .modeling.models.modeling_camembert import (
    PosencCamembertConfig,
    PosencCamembertForCausalLM,
    PosencCamembertForMaskedLM,
    PosencCamembertForMultipleChoice,
    PosencCamembertForQuestionAnswering,
    PosencCamembertForSequenceClassification,
    PosencCamembertForTokenClassification,
    PosencCamembertModel,
)
from .modeling.models.modeling_distilbert import (
    PosencDistilBertConfig,
    PosencDistilBertForMaskedLM,
    PosencDistilBertForMultipleChoice,
    PosencDistilBertForQuestionAnswering,
    PosencDistilBertForSequenceClassification,
    PosencDistilBertForTokenClassification,
    PosencDistilBertModel,
)
from .modeling.models.modeling_electra import (
    PosencElectraConfig,
    PosencElectraForCausalLM,
    PosencElectraForMaskedLM,
    PosencElectraForMultipleChoice,
    PosencElectraForPreTraining,
    PosencElectraForQuestionAnswering,
    PosencElectraForSequenceClassification,
    PosencElectraForTokenClassification,
    PosencElectraModel,
)
from .modeling.models.modeling_mpnet import (
    PosencMPNetConfig,
    PosencMPNetForMaskedLM,
    PosencMPNetForMultipleChoice,
    PosencMPNetForQuestionAnswering,
    PosencMPNetForSequenceClassification,
    PosencMPNetForTokenClassification,
    PosencMPNetModel,
)
from .modeling.models.modeling_roberta import (
    PosencRobertaConfig,
    PosencRobertaForCausalLM,
    PosencRobertaForMaskedLM,
    PosencRobertaForMultipleChoice,
    PosencRobertaForQuestionAnswering,
    PosencRobertaForSequenceClassification,
    PosencRobertaForTokenClassification,
    PosencRobertaModel,
)
from .modeling.models.modeling_xlm_roberta import (
    PosencXLMRobertaConfig,
    PosencXLMRobertaForCausalLM,
    PosencXLMRobertaForMaskedLM,
    PosencXLMRobertaForMultipleChoice,
    PosencXLMRobertaForQuestionAnswering,
    PosencXLMRobertaForSequenceClassification,
    PosencXLMRobertaForTokenClassification,
    PosencXLMRobertaModel,
)
from .parameters import freeze_all_but_positions, position_parameters
from .with_position_scheme import with_position_scheme


if TYPE_CHECKING:
    from .conversion import convert, extend
    from .export.stock import from_stock, to_stock
    from .inspection.descriptions import inspect, schemes


__version__ = "0.4.0"

__all__ = [
    "PosencBertConfig",
    "PosencBertForMaskedLM",
    "PosencBertForMultipleChoice",
    "PosencBertForNextSentencePrediction",
    "PosencBertForPreTraining",
    "PosencBertForQuestionAnswering",
    "PosencBertForSequenceClassification",
    "PosencBertForTokenClassification",
    "PosencBertLMHeadModel",
    "PosencBertModel",
    "PosencCamembertConfig",
    "PosencCamembertForCausalLM",
    "PosencCamembertForMaskedLM",
    "PosencCamembertForMultipleChoice",
    "PosencCamembertForQuestionAnswering",
    "PosencCamembertForSequenceClassification",
    "PosencCamembertForTokenClassification",
    "PosencCamembertModel",
    "PosencDistilBertConfig",
    "PosencDistilBertForMaskedLM",
    "PosencDistilBertForMultipleChoice",
    "PosencDistilBertForQuestionAnswering",
    "PosencDistilBertForSequenceClassification",
    "PosencDistilBertForTokenClassification",
    "PosencDistilBertModel",
    "PosencElectraConfig",
    "PosencElectraForCausalLM",
    "PosencElectraForMaskedLM",
    "PosencElectraForMultipleChoice",
    "PosencElectraForPreTraining",
    "PosencElectraForQuestionAnswering",
    "PosencElectraForSequenceClassification",
    "PosencElectraForTokenClassification",
    "PosencElectraModel",
    "PosencMPNetConfig",
    "PosencMPNetForMaskedLM",
    "PosencMPNetForMultipleChoice",
    "PosencMPNetForQuestionAnswering",
    "PosencMPNetForSequenceClassification",
    "PosencMPNetForTokenClassification",
    "PosencMPNetModel",
    "PosencRobertaConfig",
    "PosencRobertaForCausalLM",
    "PosencRobertaForMaskedLM",
    "PosencRobertaForMultipleChoice",
    "PosencRobertaForQuestionAnswering",
    "PosencRobertaForSequenceClassification",
    "PosencRobertaForTokenClassification",
    "PosencRobertaModel",
    "PosencXLMRobertaConfig",
    "PosencXLMRobertaForCausalLM",
    "PosencXLMRobertaForMaskedLM",
    "PosencXLMRobertaForMultipleChoice",
    "PosencXLMRobertaForQuestionAnswering",
    "PosencXLMRobertaForSequenceClassification",
    "PosencXLMRobertaForTokenClassification",
    "PosencXLMRobertaModel",
    "cache_projections",
    "convert",
    "extend",
    "freeze_all_but_positions",
    "from_stock",
    "inspect",
    "install",
    "position_parameters",
    "register_scheme",
    "schemes",
    "set_attn_implementation",
    "to_stock",
    "train_positions",
    "uninstall",
    "unpad",
    "with_position_scheme",
]

# What needs more libraries than a model does is imported on first use.
_LAZY = {
    "convert": "conversion",
    "extend": "conversion",
    "from_stock": "export.stock",
    "inspect": "inspection.descriptions",
    "schemes": "inspection.descriptions",
    "to_stock": "export.stock",
}


def __getattr__(name: str) -> Any:
    if name in ("analysis", "conversion"):
        return import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


install()
register_entry_points()
