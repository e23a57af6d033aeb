"""Pipelines for texts of any length, with any checkpoint and without training: overlapping windows, of which the most central one answers for a token.

    from transformers import pipeline
    from hf_posenc.pipelines import LongTokenClassificationPipeline

    tagger = pipeline(
        "token-classification", "path/to/tagger", pipeline_class=LongTokenClassificationPipeline, aggregation_strategy="simple"
    )
    tagger("a book " * 100_000)

`windows` says where a text is cut and which window answers; `long_texts` has the pipelines.
"""

from .long_texts import LongFeatureExtractionPipeline, LongTokenClassificationPipeline


__all__ = ["LongFeatureExtractionPipeline", "LongTokenClassificationPipeline"]
