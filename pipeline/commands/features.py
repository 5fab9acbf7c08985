"""`features`: embeddings of a split as a file, a map of them, nearest neighbours, and signs of collapse."""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from dali.errors import InputError
from dali.packed import Split
from dali.sources import Source, has_test_split, open_source
from pipeline import embeddings, pictures, plots
from pipeline.arguments import refuse_fewer
from pipeline.config import Config
from pipeline.cores import threads_per_worker
from pipeline.embeddings import Collapse, Compute, Embeddings
from pipeline.file_systems import check_output
from pipeline.trained import open_trained
from pipeline.workers import choose_device

NUM_NEIGHBOURS = 8
MAPS = ("pca", "tsne")


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run.sh features", description="Embed images and look at the embeddings.")
    parser.add_argument("where", metavar="RUN | CONFIG", help="output folder of a run; or a config with model.weights")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override single keys")
    parser.add_argument("--split", choices=("train", "test"), help="default: test where there is one, else train")
    parser.add_argument("--format", choices=("parquet", "npz"), default="parquet")
    parser.add_argument("--images", type=int, metavar="N", help="embed N images, chosen by the seed; default: all")
    parser.add_argument("--map-images", type=int, default=2000, metavar="N", help="points on the maps (default 2000)")
    parser.add_argument("--queries", type=int, default=8, metavar="N", help="rows of the neighbour sheet (default 8)")
    parser.add_argument("--to", metavar="FOLDER", help="default: features, in the run's folder")
    parser.add_argument("-np", "-H", "--hosts", "--hostfile", dest="workers", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(args)
    if options.workers is not None:
        raise InputError("features: one process embeds all images; leave out -np, -H and --hostfile")
    refuse_fewer(options, images=3, map_images=3, queries=1)
    return options


def run(args: list[str]) -> int:
    options = parse(args)
    trained = open_trained(options.where, options.overrides)
    config = trained.config
    split: Split = options.split or ("test" if has_test_split(config.data) else "train")
    source = open_source(config.data, split)
    if len(source) < 3:
        raise InputError(f"data: the {split} split holds {len(source)} images; at least 3 are needed")
    folder = Path(options.to) if options.to else trained.folder / "features"
    check_output(folder)
    print(f"weights: {trained.report or 'none: random features'}", flush=True)

    compute = Compute(choose_device(config.device, 0, 1), config.data.threads or threads_per_worker(1))
    model = trained.model.to(compute.device)
    indices = embeddings.choose_images(len(source), options.images, config.seed)
    found = embeddings.embed(model.backbone, source, config, compute, indices)
    about = {
        "backbone": config.model.backbone,
        "weights": trained.weights,
        "split": split,
        "images_digest": source.digest,
        "seed": str(config.seed),
    }
    embeddings.WRITERS[options.format](found, folder / f"embeddings_{split}.{options.format}", about)
    network, name = (model, "z, the projector's") if trained.has_projector else (model.backbone, "features of views")
    num_views = min(len(source), max(config.train.global_batch, config.knn.batch))
    z1, z2 = embeddings.embed_views(network, source, config, compute, num_views)
    report = embeddings.signs_of_collapse(found.x, z1, z2, config.loss.eps, name)
    draw_collapse(report, folder)
    note = {"of": name, "images": len(z1), **report.figures}
    (folder / "diagnostics.json").write_text(json.dumps(note, indent=2) + "\n")
    draw_neighbours(found, source, config, compute, folder, options.queries)
    draw_maps(found, folder, options.map_images, config.seed)
    print(summary(found, report.figures, name, folder))
    return 0


def draw_maps(found: Embeddings, folder: Path, most: int, seed: int) -> None:
    chosen = embeddings.choose_images(len(found.x), most, seed)
    labels = None if found.labels is None else found.labels[chosen]
    if not embeddings.has_spread(found.x[chosen]):
        print("map: left out: the embeddings are all alike, or not finite", flush=True)
        return
    for method in MAPS:
        print(f"map: {method} of {len(chosen):,} images", flush=True)
        points = embeddings.map_points(found.x[chosen], method, seed)
        picture = plots.scatter_plot(points, labels, found.classes, f"{method} of {len(chosen):,} images")
        Image.fromarray(picture).save(folder / f"map_{method}.png")


def draw_neighbours(
    found: Embeddings, source: Source, config: Config, compute: Compute, folder: Path, num_queries: int
) -> None:
    queries = embeddings.choose_images(len(found.x), num_queries, config.seed)
    near = embeddings.find_neighbours(found.x, queries, NUM_NEIGHBOURS)
    table = np.concatenate([near.queries[:, None], near.nearest], axis=1)
    images = embeddings.load_images(source, config, compute, found.indices[table.ravel()])
    same = None if found.labels is None else found.labels[near.nearest] == found.labels[near.queries][:, None]
    sheet = pictures.neighbour_sheet(
        images.reshape(*table.shape, *images.shape[1:]), near.cosines, same, config.views.mean, config.views.std
    )
    Image.fromarray(sheet).save(folder / "neighbours.png")


def draw_collapse(report: Collapse, folder: Path) -> None:
    Image.fromarray(plots.spectrum_plot(report.spectra)).save(folder / "spectrum.png")
    Image.fromarray(pictures.correlation_map(report.c.cpu().numpy())).save(folder / "cross_correlation.png")


def summary(found: Embeddings, figures: dict[str, float], name: str, folder: Path) -> str:
    count, width = found.x.shape
    rows = [f"{count:,} embeddings of {width} numbers; of c and its spectrum ({name}):"]
    rows += [f"  {key:<24} {value:.4g}" for key, value in figures.items()]
    return "\n".join([*rows, f"in {folder}; how to read it: docs/diagnostics.md"])
