"""Take pictures for what-positions-do.md out of pages that `hf-posenc report` wrote, and make them small.

hf-posenc report MiniLM=path/to/all-MiniLM-L6-v2 --out minilm.html
python docs/pictures.py minilm.html spaces terms probes order phase-shift
"""

import base64
import io
import re
import sys
from pathlib import Path

from PIL import Image


FOLDER = Path(__file__).parent / "pictures"
WIDTH, COLOURS = 900, 128
SECTION = re.compile(r'<section id="([^"]+)".*?</section>', re.DOTALL)
IMAGE = re.compile(r'<img src="data:image/png;base64,([^"]+)" alt="([^".]+)\.')


def pictures(page: str) -> dict[str, bytes]:
    """The images of a page as PNG files, by names of figure and model: "order-minilm.png"."""
    return {
        f"{section[1]}-{model.lower().replace(' ', '-')}.png": base64.b64decode(data)
        for section in SECTION.finditer(page)
        for data, model in IMAGE.findall(section[0])
    }


def small(picture: bytes) -> bytes:
    """A PNG of `WIDTH` pixels and as many colours as a drawing needs."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()


def main() -> None:
    page, *figures = sys.argv[1:]
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures(Path(page).read_text(encoding="utf-8")).items():
        if name.startswith(tuple(f"{figure}-" for figure in figures)):
            (FOLDER / name).write_bytes(small(picture))
            print(FOLDER / name)


if __name__ == "__main__":
    main()
