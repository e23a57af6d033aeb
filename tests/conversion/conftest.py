"""Text for pretrained models."""

from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoTokenizer


@pytest.fixture(scope="session")
def python_text(minilm: str) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Batches of the Python reference's paragraphs, at most 128 tokens each, and others of other pages."""
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    pages = [topics[name] for name in sorted(topics)]
    return tuple(
        [
            tokenizer(chosen[start : start + 8], padding=True, truncation=True, max_length=128, return_tensors="pt")
            for start in range(0, 16, 8)
        ]
        for chosen in (paragraphs(pages[0::2]), paragraphs(pages[1::2]))
    )


def paragraphs(pages: list[str]) -> list[str]:
    """One of some length from each page."""
    long = [[part for part in page.split("\n\n") if len(part) > 200] for page in pages]
    return [parts[len(parts) // 2] for parts in long if parts]
