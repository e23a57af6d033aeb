"""Position schemes for BERT, RoBERTa and their relatives in Hugging Face transformers.

Importing the package is all it takes: `AutoModel.from_pretrained(..., position_scheme="absolute+t5")`.
"""

from . import plugin
from .modeling.configuration_posenc import (
    PosencBertConfig,
    PosencCamembertConfig,
    PosencElectraConfig,
    PosencRobertaConfig,
    PosencXLMRobertaConfig,
)


__version__ = "0.1.0"

plugin.install()
