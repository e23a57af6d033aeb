"""BERT with position schemes: the original classes with embeddings, encoder and self-attention swapped."""

import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig
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

from .configuration_posenc import PositionConfigMixin
from .embeddings import PositionEmbeddings
from .family import Family, heads
from .losses import mean_over_all, number_of_labels
from .modeling_posenc import FamilyClasses, PosencPreTrainedModel, PositionEncoder, PositionLayer, PositionModel
from .self_attention import PositionSelfAttention


BERT = Family(
    "bert",
    "Bert",
    heads=heads(
        AutoModelForCausalLM="LMHeadModel",
        AutoModelForPreTraining="ForPreTraining",
        AutoModelForNextSentencePrediction="ForNextSentencePrediction",
    ),
)


class PosencBertConfig(PositionConfigMixin, BertConfig):
    """[`BertConfig`] with the config options of position schemes, see [`PositionConfigMixin`]."""

    model_type = "posenc_bert"
    family = BERT


class PosencBertEmbeddings(PositionEmbeddings, BertEmbeddings):
    """[`BertEmbeddings`] with an embedding-level scheme instead of the position embedding matrix."""

    family = BERT


class PosencBertSelfAttention(PositionSelfAttention, BertSelfAttention):
    """[`BertSelfAttention`] with attention-level schemes."""

    family = BERT


class PosencBertLayer(PositionLayer, BertLayer):
    """[`BertLayer`] that adds the embedding-level positions to its input."""


class PosencBertEncoder(PositionEncoder, BertEncoder):
    """[`BertEncoder`] that computes the positions once for all layers."""

    family = BERT


class PosencBertModel(PosencPreTrainedModel, PositionModel, BertModel):
    """[`BertModel`] with the position schemes that its [`PosencBertConfig`] names."""

    config_class = PosencBertConfig
    _no_split_modules = ["BertLayer"]


CLASSES = FamilyClasses(
    family=BERT,
    embeddings=PosencBertEmbeddings,
    encoder=PosencBertEncoder,
    layer=PosencBertLayer,
    self_attention=PosencBertSelfAttention,
    model=PosencBertModel,
    eager=eager_attention_forward,
)
PosencBertModel.position_classes = CLASSES


class PosencBertForPreTraining(PosencPreTrainedModel, BertForPreTraining):
    """[`BertForPreTraining`] with a [`PosencBertModel`] as its base model.

    The loss is the mean over masked tokens plus the mean over sequences (next sentence). If you pass `num_items_in_batch`, the first mean
    is replaced by the sum of the losses of all masked tokens divided by this number.

    `Trainer` does not pass it here, because it counts no sequences. With several processes or gradient accumulation, it takes the mean of
    the losses. For the next sentence, this is exact if all batches have the same number of sequences.
    """

    config_class = PosencBertConfig
    position_classes = CLASSES
    accepts_loss_kwargs = False  # read by Trainer

    def loss_over_all(self, values: tuple, arguments: dict, number: torch.Tensor) -> torch.Tensor:
        words, labels = values[1], arguments["labels"]
        own = number_of_labels(labels)
        mean = cross_entropy(words.view(-1, words.shape[-1]), labels.view(-1))
        # Without masked tokens their mean, and the original loss with it, is not a number.
        sequences = cross_entropy(values[2].view(-1, 2), arguments["next_sentence_label"].view(-1))
        return mean_over_all(mean, own, number) + sequences


class PosencBertLMHeadModel(PosencPreTrainedModel, BertLMHeadModel):
    """[`BertLMHeadModel`] with a [`PosencBertModel`] as its base model."""

    config_class = PosencBertConfig
    position_classes = CLASSES
    stock_loss_divides = True


class PosencBertForMaskedLM(PosencPreTrainedModel, BertForMaskedLM):
    """[`BertForMaskedLM`] with a [`PosencBertModel`] as its base model."""

    config_class = PosencBertConfig
    position_classes = CLASSES


class PosencBertForNextSentencePrediction(PosencPreTrainedModel, BertForNextSentencePrediction):
    """[`BertForNextSentencePrediction`] with a [`PosencBertModel`] as its base model."""

    config_class = PosencBertConfig
    position_classes = CLASSES


class PosencBertForSequenceClassification(PosencPreTrainedModel, BertForSequenceClassification):
    """[`BertForSequenceClassification`] with a [`PosencBertModel`] as its base model."""

    config_class = PosencBertConfig
    position_classes = CLASSES


class PosencBertForMultipleChoice(PosencPreTrainedModel, BertForMultipleChoice):
    """[`BertForMultipleChoice`] with a [`PosencBertModel`] as its base model."""

    config_class = PosencBertConfig
    position_classes = CLASSES


class PosencBertForTokenClassification(PosencPreTrainedModel, BertForTokenClassification):
    """[`BertForTokenClassification`] with a [`PosencBertModel`] as its base model."""

    config_class = PosencBertConfig
    position_classes = CLASSES


class PosencBertForQuestionAnswering(PosencPreTrainedModel, BertForQuestionAnswering):
    """[`BertForQuestionAnswering`] with a [`PosencBertModel`] as its base model."""

    config_class = PosencBertConfig
    position_classes = CLASSES
