"""Convert a checkpoint of sentence-transformers to positions without an end, embed passages with it, and search them.

    python examples/convert_and_search.py --passages passages.txt --query "how long do eggs boil" --output_dir outputs/t5
    accelerate launch --num_processes 2 examples/convert_and_search.py --passages passages.txt --query "how long do eggs boil" \\
        --output_dir outputs/t5

The file has a passage in each line; the model learns from it how to compute with its new positions what it computed before, so a
few thousand passages, or more text of their kind (`--text`), suit it. A model that is in the folder already is used as it is.
Afterwards, with hf_posenc imported: `SentenceTransformer("outputs/t5")`.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from sentence_transformers import SentenceTransformer

import hf_posenc


POSITION_SCHEME = "t5"
MAX_LENGTH = 2048  # tokens; longer passages are cut off
STEPS = 800  # of distillation: minutes for MiniLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", required=True)
    parser.add_argument("--query", action="append", required=True, help="may be given several times")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--text", action="append", help="files or folders to learn from; default: the passages")
    parser.add_argument("--max_steps", type=int, default=STEPS)
    parser.add_argument("--top", type=int, default=5, help="passages to show for each query")
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())

    # Convert: distilled on all processes, written by the first.
    if not Path(options.output_dir, "config.json").exists():
        _, report = hf_posenc.convert(
            options.model,
            position_scheme=POSITION_SCHEME,
            max_length=MAX_LENGTH,
            text=options.text or [options.passages],
            max_steps=options.max_steps,
            output=options.output_dir,
        )
        accelerator.print(report)
    accelerator.wait_for_everyone()

    # Embed: each process its share of the passages.
    model = SentenceTransformer(options.output_dir, device=str(accelerator.device))
    lines = Path(options.passages).read_text(encoding="utf-8").splitlines()
    passages = [line for line in lines if line.strip()]
    with accelerator.split_between_processes(passages) as share:
        vectors = model.encode(share, normalize_embeddings=True, convert_to_tensor=True)
    vectors = torch.cat(gather_object([vectors.cpu()]))

    # Search: the cosine of every query and passage.
    queries = model.encode(options.query, normalize_embeddings=True, convert_to_tensor=True).cpu()
    found = (queries @ vectors.T).topk(min(options.top, len(passages)))
    for query, scores, numbers in zip(options.query, found.values.tolist(), found.indices.tolist()):
        accelerator.print(f"\n{query}")
        for score, number in zip(scores, numbers):
            accelerator.print(f"  {score:.3f}  {passages[number]}")


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # of several processes
