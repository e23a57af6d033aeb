"""Tag a book with any token classifier: every entity with its place in the text, as a line of JSON.

    python examples/tag_long_text.py --model dslim/bert-base-NER --file book.txt --output entities.jsonl

Nothing is trained. The model reads the text in windows that overlap, and the scores of a word are those of the window in which it lies most central.
Several files may be given: windows of different files are in a batch.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

import hf_posenc
from hf_posenc.files import check_file, write_whole
from hf_posenc.pipelines import LongTokenClassificationPipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dslim/bert-base-NER")
    parser.add_argument("--file", nargs="+", required=True, help="text files in UTF-8")
    parser.add_argument(
        "--output", required=True, help="a JSON object for each entity: file, label, text, start, end, score"
    )
    parser.add_argument("--window", type=int, help="tokens of a window; default: as many as the model reads")
    parser.add_argument("--batch_size", type=int, default=8)
    options = parser.parse_args()
    check_file(Path(options.output))
    # Bytes, because reading as text would shorten the ends of lines that Windows writes, and move what is behind them.
    texts = [Path(file).read_bytes().decode() for file in options.file]

    model = AutoModelForTokenClassification.from_pretrained(options.model).eval()
    if not torch.accelerator.is_available():
        hf_posenc.unpad(model)  # the last window of a text is short: on CPUs its padding is not computed
    tagger = LongTokenClassificationPipeline(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(options.model),
        aggregation_strategy="simple",
        window=options.window,
        batch_size=options.batch_size,
    )
    lines = []
    for file, text, entities in zip(options.file, texts, tagger(text for text in texts)):
        for entity in entities:
            start, end = entity["start"], entity["end"]
            line = {"file": file, "label": entity["entity_group"], "text": text[start:end]}
            lines.append(line | {"start": start, "end": end, "score": round(float(entity["score"]), 4)})
        print(f"{file}: {len(entities)} entities in {len(text):,} characters")
    write_whole({Path(options.output): "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)})


if __name__ == "__main__":
    main()
