"""docs/pictures: scikit-learn's photographs as the loader that training uses shows them, and torchvision's views
of them by the same draws. views.png: whole photographs and halves; parity.jpg: hard ones, see docs/parity.md.

./run.sh python scripts/views_picture.py [FOLDER]
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
from pipeline import parity
from pipeline.views_sheet import views_sheet

SEED = 66  # its first draws show every operator once or more: flip, jitter, grey, blur, solarize


def main(target: Path) -> None:
    spec = ViewsSpec()
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder) / "whole")
        source = FolderSource(Path(folder) / "whole")
        with TwoViewLoader(source, spec, channels=3, seed=SEED, global_batch=len(source), shard=Shard(0, 1)) as loader:
            batch = next(loader)
        views = Image.fromarray(views_sheet(source, spec, 3, SEED, 0, batch, batch.indices))
        few = views.quantize(palette=views.quantize(256), dither=Image.Dither.FLOYDSTEINBERG)
        few.save(target / "views.png", optimize=True)
        pictures, _ = parity.photographs(Path(folder) / "hard", channels=3)
        Image.fromarray(parity.sheet(pictures, spec, channels=3)).save(target / "parity.jpg", quality=90)


def write_photographs(folder: Path) -> None:
    """FOLDER/CLASS/NAME.jpg: both photographs whole, and the left half of each."""
    for name in ("china", "flower"):
        (folder / name).mkdir(parents=True)
        photograph = Image.fromarray(load_sample_image(f"{name}.jpg"))
        photograph.save(folder / name / "whole.jpg", quality=95)
        width, height = photograph.size
        photograph.crop((0, 0, width // 2, height)).save(folder / name / "half.jpg", quality=95)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures"))
