"""Pipelines for texts of any length, with any checkpoint and without training. They read overlapping windows, and each token takes its output from
the window in which it is most central.

    from transformers import pipeline
    from hf_posenc.pipelines import LongTokenClassificationPipeline

    tagger = pipeline(
        "token-classification", "path/to/tagger", pipeline_class=LongTokenClassificationPipeline, aggregation_strategy="simple"
    )
    tagger("a book " * 100_000)

`windows` computes where a text is cut and which window a token uses. `long_texts` has the pipelines.
"""

from .long_texts import LongFeatureExtractionPipeline, LongTokenClassificationPipeline


__all__ = ["LongFeatureExtractionPipeline", "LongTokenClassificationPipeline"]
