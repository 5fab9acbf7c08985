"""`parity`: how far our views are from torchvision's on the same draws; exit 1 if a bound is exceeded."""

import argparse
import tempfile
from pathlib import Path

from PIL import Image

from dali.errors import InputError
from dali.sources import open_source
from pipeline import config, parity
from pipeline.arguments import writable_folder
from pipeline.differences import table
from pipeline.progress import report


def run(args: list[str]) -> int:
    """Measure, print the table, and write it with a contact sheet if asked to."""
    parser = argparse.ArgumentParser(prog="./run.sh parity", description=__doc__)
    parser.add_argument("--config", metavar="CONFIG", help="its views of its images")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override single keys of the config")
    parser.add_argument("--draws", type=int, default=24, metavar="N", help="of both views of an image (24)")
    parser.add_argument("--images", type=int, default=8, metavar="N", help="of the config's images (8)")
    parser.add_argument("--write", type=writable_folder, metavar="FOLDER", help="write parity.md and parity.png there")
    options = parser.parse_intermixed_args(args)
    for name in ("draws", "images"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} {getattr(options, name)}: must be 1 or more")
    made = config.load(options.config, options.overrides)
    spec, channels = made.views, made.data.channels
    with tempfile.TemporaryDirectory() as folder:
        if options.config is not None or made.data.paths:
            source = open_source(made.data, "train", report)
            pictures, files = parity.some_images(source, options.images, made.seed, channels)
        else:
            pictures, files = parity.photographs(Path(folder), channels)
        rows = parity.measure(pictures, files, spec, channels, options.draws, report)
    text = table(rows)
    print(text, flush=True)
    if options.write:
        (options.write / "parity.md").write_text(text + "\n")
        Image.fromarray(parity.sheet(pictures, spec, channels)).save(options.write / "parity.png")
        print(f"wrote {options.write}/parity.md and parity.png", flush=True)
    exceeded = sum(len(row.exceeded()) for row in rows)
    print(f"{exceeded} bounds exceeded" if exceeded else "every bound kept", flush=True)
    return 1 if exceeded else 0
