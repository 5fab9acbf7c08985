"""docs/pictures/views.png: two views each of scikit-learn's photographs, by the loader that training uses.

./run.sh python scripts/views_picture.py [PICTURE.png]
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_image

from dali.loader import TwoViewLoader
from dali.order import Shard
from dali.sources import FolderSource
from dali.spec import ViewsSpec
from pipeline.pictures import contact_sheet

SEED = 66  # its first draws show every operator once or more: flip, jitter, grey, blur, solarize


def main(picture: Path) -> None:
    spec = ViewsSpec()
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder))
        source = FolderSource(folder)
        with TwoViewLoader(source, spec, channels=3, seed=SEED, global_batch=len(source), shard=Shard(0, 1)) as loader:
            batch = next(loader)
    sheet = Image.fromarray(contact_sheet(batch.y1, batch.y2, spec.mean, spec.std))
    sheet.quantize(palette=sheet.quantize(256), dither=Image.Dither.FLOYDSTEINBERG).save(picture, optimize=True)


def write_photographs(folder: Path) -> None:
    """FOLDER/CLASS/NAME.jpg: both photographs whole, and the left half of each."""
    for name in ("china", "flower"):
        (folder / name).mkdir()
        photograph = Image.fromarray(load_sample_image(f"{name}.jpg"))
        photograph.save(folder / name / "whole.jpg", quality=95)
        width, height = photograph.size
        photograph.crop((0, 0, width // 2, height)).save(folder / name / "half.jpg", quality=95)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures/views.png"))
