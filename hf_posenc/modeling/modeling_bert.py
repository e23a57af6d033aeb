"""BERT with position schemes: the stock classes with embeddings, encoder and self-attention swapped."""

from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertEncoder,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLayer,
    BertLMHeadModel,
    BertModel,
    BertSelfAttention,
    eager_attention_forward,
)

from .attention import PositionSelfAttention
from .configuration_posenc import PosencBertConfig
from .embeddings import PositionEmbeddings
from .modeling_posenc import Parts, PosencPreTrainedModel, PositionEncoder, PositionLayer


class PosencBertEmbeddings(PositionEmbeddings, BertEmbeddings):
    """[`BertEmbeddings`] with an embedding-level scheme in place of the table of positions."""


class PosencBertSelfAttention(PositionSelfAttention, BertSelfAttention):
    """[`BertSelfAttention`] with attention-level schemes."""


class PosencBertLayer(PositionLayer, BertLayer):
    """[`BertLayer`] that adds the embedding-level positions to its input."""


class PosencBertEncoder(PositionEncoder, BertEncoder):
    """[`BertEncoder`] that works the positions out once for all layers."""


class PosencBertModel(PosencPreTrainedModel, BertModel):
    """[`BertModel`] with the position schemes of its [`PosencBertConfig`]."""

    config_class = PosencBertConfig
    _auto_class = "AutoModel"
    _no_split_modules = ["BertLayer"]


PARTS = Parts(
    embeddings=PosencBertEmbeddings,
    encoder=PosencBertEncoder,
    layer=PosencBertLayer,
    self_attention=PosencBertSelfAttention,
    model=PosencBertModel,
    eager=eager_attention_forward,
)
PosencBertModel.position_parts = PARTS


class PosencBertForPreTraining(PosencPreTrainedModel, BertForPreTraining):
    """[`BertForPreTraining`] over a [`PosencBertModel`].

    Its loss is the mean over masked words plus the mean over sequences (next sentence). `num_items_in_batch` counts the
    masked words of all parts of a step, and nothing counts their sequences: a part's share of the sequences is taken to
    be its share of the masked words. So the shares of all parts add up to 1 for both, and those of sequences are exact
    where every part has as many masked words per sequence. A part without masked words adds nothing.
    """

    config_class = PosencBertConfig
    _auto_class = "AutoModelForPreTraining"
    position_parts = PARTS


class PosencBertLMHeadModel(PosencPreTrainedModel, BertLMHeadModel):
    """[`BertLMHeadModel`] over a [`PosencBertModel`]."""

    config_class = PosencBertConfig
    _auto_class = "AutoModelForCausalLM"
    position_parts = PARTS


class PosencBertForMaskedLM(PosencPreTrainedModel, BertForMaskedLM):
    """[`BertForMaskedLM`] over a [`PosencBertModel`]."""

    config_class = PosencBertConfig
    _auto_class = "AutoModelForMaskedLM"
    position_parts = PARTS


class PosencBertForNextSentencePrediction(PosencPreTrainedModel, BertForNextSentencePrediction):
    """[`BertForNextSentencePrediction`] over a [`PosencBertModel`]."""

    config_class = PosencBertConfig
    _auto_class = "AutoModelForNextSentencePrediction"
    position_parts = PARTS


class PosencBertForSequenceClassification(PosencPreTrainedModel, BertForSequenceClassification):
    """[`BertForSequenceClassification`] over a [`PosencBertModel`]."""

    config_class = PosencBertConfig
    _auto_class = "AutoModelForSequenceClassification"
    position_parts = PARTS


class PosencBertForMultipleChoice(PosencPreTrainedModel, BertForMultipleChoice):
    """[`BertForMultipleChoice`] over a [`PosencBertModel`]."""

    config_class = PosencBertConfig
    _auto_class = "AutoModelForMultipleChoice"
    position_parts = PARTS


class PosencBertForTokenClassification(PosencPreTrainedModel, BertForTokenClassification):
    """[`BertForTokenClassification`] over a [`PosencBertModel`]."""

    config_class = PosencBertConfig
    _auto_class = "AutoModelForTokenClassification"
    position_parts = PARTS


class PosencBertForQuestionAnswering(PosencPreTrainedModel, BertForQuestionAnswering):
    """[`BertForQuestionAnswering`] over a [`PosencBertModel`]."""

    config_class = PosencBertConfig
    _auto_class = "AutoModelForQuestionAnswering"
    position_parts = PARTS
