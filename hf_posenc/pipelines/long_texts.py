"""Transformers' pipelines for token classification and feature extraction, for texts of any length."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from transformers.pipelines.base import ChunkPipeline
from transformers.pipelines.token_classification import TokenClassificationPipeline

from .. import inspection
from ..variants import CONFIG_CLASSES
from .windows import most_central, windows_of


# What a window brings along that is no input of the model.
OWN = ("window", "document", "is_last")


class _Windows:
    """Reading a text in windows, and the outputs of all its tokens from the windows in which they lie most central."""

    # Of the pipeline.
    tokenizer: Any
    model: Any

    @cached_property
    def longest(self) -> int | None:
        """Number of tokens at which the model's positions end; None where they have no end, or nobody knows it."""
        config = self.model.config
        return inspection.longest_sequence(config) if config.model_type in CONFIG_CLASSES else None

    def given_sizes(self, window: int | None, overlap: int | None) -> dict[str, int]:
        """The sizes that are given, checked with those that were given before."""
        given = {name: value for name, value in (("window", window), ("overlap", overlap)) if value is not None}
        before = getattr(self, "_preprocess_params", None)
        if given or before is None:  # called with nothing as a text is read
            sizes = (before or {}) | given
            self.checked_windows(sizes.get("window"), sizes.get("overlap"))
        return given

    def checked_windows(self, window: int | None, overlap: int | None) -> tuple[int, int]:
        """Sizes in tokens, special tokens counted.

        Raises:
            TypeError: one is no integer.
            ValueError: the model cannot read such windows, or nothing says how long they may be.
        """
        for name, value in (("window", window), ("overlap", overlap)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be a number of tokens, got {value!r}")
        if not self.tokenizer.is_fast:
            raise ValueError("long texts need a fast tokenizer, which knows the boundaries of words")
        longest = self.longest or inspection.NO_LENGTH
        limit = min(longest, self.tokenizer.model_max_length)
        if window is None and limit >= inspection.NO_LENGTH:
            raise ValueError(
                "the model and its tokenizer have no maximum sequence length: set window to a number of tokens"
            )
        window = limit if window is None else window
        special = self.tokenizer.num_special_tokens_to_add()
        if not special + 2 <= window <= longest:
            most = f" and at most {longest}, the model's maximum" if longest < inspection.NO_LENGTH else ""
            raise ValueError(f"window must be at least {special + 2} tokens{most}, got {window}")
        overlap = window // 2 if overlap is None else overlap
        if not 0 <= overlap < window - special:
            raise ValueError(
                f"overlap must be at least 0 and less than the {window - special} tokens of a window, got {overlap}"
            )
        return window, overlap

    def windows(self, text: str | list[str], window: int, overlap: int) -> Iterator[dict[str, Any]]:
        """The inputs of each window; the first brings the encoding of the whole text."""
        split = isinstance(text, list)
        encoding = self.tokenizer(
            text,
            is_split_into_words=split,
            truncation=False,
            padding=False,
            return_special_tokens_mask=True,
            return_offsets_mapping=True,
            verbose=False,  # of a text that is longer than the model reads
        )
        ids, special, words = encoding["input_ids"], encoding["special_tokens_mask"], encoding.word_ids()
        # Special tokens around a text stand around each window. One within a text is a token as others are.
        first = next((number for number, one in enumerate(special) if not one), len(ids))
        end = len(ids) - next((number for number, one in enumerate(reversed(special)) if not one), 0)
        end = max(end, first)
        parts = windows_of(words[first:end], window - first - (len(ids) - end), overlap)
        document = {
            "input_ids": ids,
            "offset_mapping": encoding["offset_mapping"],
            "special_tokens_mask": special,
            "word_ids": words,
            "first": first,
            "end": end,
        }
        for number, (start, stop) in enumerate(parts):
            places = [*range(first), *range(first + start, first + stop), *range(end, len(ids))]
            inputs = {
                name: torch.tensor([[encoding[name][place] for place in places]])
                for name in self.tokenizer.model_input_names
                if name in encoding
            }
            yield {
                **inputs,
                "window": (start, stop),
                "document": document if number == 0 else None,
                "is_last": number == len(parts) - 1,
            }

    def joined(self, outputs: Sequence[dict[str, Any]], name: str) -> torch.Tensor:
        """The outputs of all tokens of a text, (tokens, width)."""
        document = outputs[0]["document"]
        first, end, number = document["first"], document["end"], len(document["input_ids"])
        parts = [output["window"] for output in outputs]
        owners = torch.tensor(most_central(document["word_ids"][first:end], parts), dtype=torch.long)
        around = first + number - end
        states = [
            self.without_padding(output[name][0], stop - start + around)
            for (start, stop), output in zip(parts, outputs, strict=True)
        ]
        found = states[0].new_zeros(number, states[0].shape[-1])
        for index, ((start, stop), of_window) in enumerate(zip(parts, states)):
            own = (owners[start:stop] == index).nonzero()[:, 0]
            found[first + start + own] = of_window[first + own]
        found[:first] = states[0][:first]
        found[end:] = states[-1][len(states[-1]) - (number - end) :]
        return found

    def without_padding(self, states: torch.Tensor, tokens: int) -> torch.Tensor:
        """The states of a window's own tokens, which a batch has padded on the tokenizer's side."""
        return states[len(states) - tokens :] if self.tokenizer.padding_side == "left" else states[:tokens]


class LongTokenClassificationPipeline(_Windows, TokenClassificationPipeline):
    """[`TokenClassificationPipeline`] for texts of any length, also beyond the model's maximum sequence length.

    A text is read in overlapping windows. The scores of a word come from the window in which it is most central: the one with the most
    context on the side that has less. Windows do not split words. Entities are grouped after all windows are read, so they can cross windows.
    A text that fits in one window gets the same result as from [`TokenClassificationPipeline`]. With `batch_size`, windows of several texts
    share a batch.

    Args:
        window: tokens of a window, including special tokens. Default: the maximum of the model and its tokenizer.
        overlap: tokens that a window shares with the previous one, rounded to words. Default: half a window.
        kwargs: arguments of `TokenClassificationPipeline` (`aggregation_strategy`, `ignore_labels`, ...), except `stride`.

    Raises:
        TypeError, ValueError: a wrong size, `stride`, or a tokenizer that is not fast.
    """

    def _sanitize_parameters(self, window: int | None = None, overlap: int | None = None, **kwargs: Any):
        if kwargs.get("stride") is not None:
            raise ValueError("stride belongs to the windows of Transformers: set overlap to a number of tokens")
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        return preprocess | self.given_sizes(window, overlap), forward, postprocess

    def preprocess(
        self,
        sentence: str | list[str],
        offset_mapping: Any = None,
        *,
        window: int | None = None,
        overlap: int | None = None,
        is_split_into_words: bool = False,
        delimiter: str = " ",
    ) -> Iterator[dict[str, Any]]:
        if is_split_into_words != isinstance(sentence, list):
            wanted = "a list of words" if is_split_into_words else "a string"
            raise ValueError(
                f"with is_split_into_words={is_split_into_words}, a text must be {wanted}, got {type(sentence).__name__}"
            )
        for inputs in self.windows(sentence, *self.checked_windows(window, overlap)):
            document = inputs["document"]
            if document is not None:
                document["sentence"] = delimiter.join(sentence) if is_split_into_words else sentence
                if offset_mapping is not None:
                    document["offset_mapping"] = offset_mapping
                if is_split_into_words:
                    ends = [0]
                    for word in sentence:
                        ends.append(ends[-1] + len(word) + len(delimiter))
                    document["word_to_chars_map"] = [(start, start + len(word)) for start, word in zip(ends, sentence)]
            yield inputs

    def _forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        kept = {name: model_inputs.pop(name) for name in OWN}
        output = self.model(**model_inputs)
        return {"logits": output["logits"] if isinstance(output, dict) else output[0], **kept}

    def postprocess(self, all_outputs: Sequence[dict[str, Any]], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        document = all_outputs[0]["document"]
        whole = {
            "logits": self.joined(all_outputs, "logits").float()[None],
            "input_ids": torch.tensor([document["input_ids"]]),
            "offset_mapping": [document["offset_mapping"]],
            "special_tokens_mask": torch.tensor([document["special_tokens_mask"]]),
            "sentence": document["sentence"],
            "word_ids": document["word_ids"],
            "word_to_chars_map": document.get("word_to_chars_map"),
        }
        return super().postprocess([whole], *args, **kwargs)


class LongFeatureExtractionPipeline(_Windows, ChunkPipeline):
    """[`FeatureExtractionPipeline`] for texts of any length: the last hidden states of all tokens, each from the window in which its word is most central.

    Args:
        window, overlap: as for [`LongTokenClassificationPipeline`].
        return_tensors: return a tensor (1, tokens, hidden_size) instead of nested lists. Special tokens are those of the first and the last window.
    """

    default_input_names = "sequences"

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(
        self, window: int | None = None, overlap: int | None = None, return_tensors: bool | None = None
    ):
        postprocess = {} if return_tensors is None else {"return_tensors": return_tensors}
        return self.given_sizes(window, overlap), {}, postprocess

    def preprocess(self, text: str, window: int | None = None, overlap: int | None = None) -> Iterator[dict[str, Any]]:
        yield from self.windows(text, *self.checked_windows(window, overlap))

    def _forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        kept = {name: model_inputs.pop(name) for name in OWN}
        return {"states": self.model(**model_inputs)[0], **kept}

    def postprocess(self, all_outputs: Sequence[dict[str, Any]], return_tensors: bool = False) -> Any:
        states = self.joined(all_outputs, "states")[None]
        return states if return_tensors else states.tolist()
