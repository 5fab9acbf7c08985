"""`bench`: measurements behind choices this project makes. Run them on a machine that does nothing else."""

import argparse
import os

from dali.errors import InputError
from pipeline.arguments import numbers, refuse_fewer, writable_folder
from pipeline.launching import run_again_with_workers

COUNTS = ("size", "batch", "np", "dims", "batches", "counts", "steps", "rounds", "images", "threads", "epochs")


def run(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run.sh bench", description=__doc__)
    verbs = parser.add_subparsers(dest="what", required=True)
    autocast = verbs.add_parser("autocast", help="bf16 against float32, a backbone at a time")
    autocast.add_argument("backbones", nargs="*", default=["convnet4", "resnet18", "resnet50", "mobilenet_v3_small"])
    autocast.add_argument("--device", default="cpu")
    autocast.add_argument("--size", type=int, default=64, help="pixels")
    autocast.add_argument("--batch", type=int, default=16)
    combine = verbs.add_parser("combine", help="what each loss.combine sends, holds and takes, against D")
    combine.add_argument("-np", type=int, default=2, metavar="N", help="workers (2)")
    combine.add_argument("--dims", type=numbers, default=[1024 << k for k in range(7)], metavar="D,D,...")
    combine.add_argument("--batches", type=numbers, default=[256, 2048], metavar="B,B,...")
    combine.add_argument("--write", type=writable_folder, metavar="FOLDER", help="also write combine.md, combine.png")
    micro = verbs.add_parser("micro-batches", help="memory and time of a step against train.micro_batches")
    micro.add_argument("--backbone", default="resnet18")
    micro.add_argument("--size", type=int, default=64, help="pixels")
    micro.add_argument("--batch", type=int, default=128)
    micro.add_argument("--counts", type=numbers, default=[1, 2, 4, 8], metavar="k,k,...")
    micro.add_argument("--device", default="cpu")
    resilience = verbs.add_parser("resilience", help="what checkpoints, journal, watchdog and the like take of a step")
    resilience.add_argument("-np", type=int, default=1, metavar="N", help="workers (1)")
    resilience.add_argument("--steps", type=int, default=40, metavar="N", help="training steps that are timed (40)")
    resilience.add_argument("words", nargs="*", metavar="key.path=value", help="of configs/fashion_mnist.yaml")
    elastic = verbs.add_parser("elastic", help="a run whose workers come and go, laid over one of one worker")
    elastic.add_argument("--write", type=writable_folder, metavar="FOLDER", help="also write elastic.md, elastic.png")
    loader = verbs.add_parser("loader", help="images a second: ours, its stages, and torchvision's with PIL")
    loader.add_argument("--seconds", type=float, default=5, metavar="S", help="of each measurement (5)")
    loader.add_argument("--rounds", type=int, default=5, metavar="N", help="in which all take turns (5)")
    loader.add_argument("--batch", type=int, default=64)
    loader.add_argument("--hw-decoder-load", type=float, metavar="X", help="data.decoder.hw_decoder_load, with cuda")
    memory = verbs.add_parser("loader-memory", help="resident memory and open files of the loaders, an epoch at a time")
    memory.add_argument("--epochs", type=int, default=20, metavar="N", help="after a warm-up (20)")
    for verb, images in ((loader, 256), (memory, 1024)):
        verb.add_argument(
            "--images", type=int, default=images, metavar="N", help=f"500x375 JPEGs, made for this ({images})"
        )
        verb.add_argument("--threads", type=int, metavar="N", help="also processes of torchvision's (all cores)")
        verb.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(args)
    refuse_fewer(options, **dict.fromkeys(COUNTS, 1))
    if "HOROVOD_RANK" not in os.environ and getattr(options, "np", 1) > 1:
        return run_again_with_workers(options.np, ["bench", *args], {})
    kinds = {
        "autocast": _autocast,
        "combine": _combine,
        "elastic": _elastic,
        "loader": _loader,
        "loader-memory": _loader_memory,
        "micro-batches": _micro_batches,
        "resilience": _resilience,
    }
    return kinds[options.what](options)


def _autocast(options: argparse.Namespace) -> int:
    import torch

    from pipeline.bench_autocast import measure_autocast

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {options.device}: no GPU is usable here")
    print("| backbone | float32, s | bf16, s | bf16 is faster by | `auto` takes |\n|---|---|---|---|---|")
    for row in measure_autocast(options.backbones, options.device, options.size, options.batch):
        print(
            f"| {row.backbone} | {row.float32:.4f} ± {row.float32_spread / 2:.4f} | "
            f"{row.bf16:.4f} ± {row.bf16_spread / 2:.4f} | {row.speedup:.2f} | {row.auto} |",
            flush=True,
        )
    return 0


def _combine(options: argparse.Namespace) -> int:
    from pipeline import bench_combine

    rows = bench_combine.measure(options.dims, options.batches)
    if os.environ.get("HOROVOD_RANK", "0") == "0":
        text = "\n".join([bench_combine.table(rows), "", *bench_combine.speedups(rows)])
        print(text, flush=True)
        if options.write:
            bench_combine.figure(rows, options.write / "combine.png")
            (options.write / "combine.md").write_text(text + "\n")
    return 0


def _elastic(options: argparse.Namespace) -> int:
    from pipeline import bench_elastic

    found = bench_elastic.measure(lambda text: print(text, flush=True))
    text = bench_elastic.table(found)
    print(text, flush=True)
    if options.write:
        bench_elastic.figure(found, options.write / "elastic.png")
        (options.write / "elastic.md").write_text(text + "\n")
    return 0 if all(row.kept for row in found) else 1


def _loader(options: argparse.Namespace) -> int:
    from pipeline import config
    from pipeline.bench_loader import measure, table
    from pipeline.cores import usable_cores
    from pipeline.workers import choose_device

    if options.images < options.batch:
        raise InputError(f"--images {options.images}: are fewer than --batch {options.batch}; give as many or more")
    threads = options.threads or usable_cores()
    device = choose_device(options.device, 0, 1)
    words = [] if options.hw_decoder_load is None else [f"data.decoder.hw_decoder_load={options.hw_decoder_load}"]
    decoder = config.load(None, [f"device={options.device}", *words]).data.decoder
    rows = measure(device, threads, options.seconds, options.rounds, options.batch, options.images, decoder)
    print(table(rows), flush=True)
    return 0


def _loader_memory(options: argparse.Namespace) -> int:
    from pipeline.bench_loader import HEIGHT, WIDTH
    from pipeline.bench_loader_memory import BOUND, measure, slope
    from pipeline.cores import usable_cores
    from pipeline.workers import choose_device

    device, threads = choose_device(options.device, 0, 1), options.threads or usable_cores()
    rows = []
    print("| epoch | resident, MiB | open files | threads |\n|---|---|---|---|")
    for row in measure(device, threads, options.epochs, options.images, min(64, options.images), 224, WIDTH, HEIGHT):
        rows.append(row)
        print(f"| {len(rows)} | {row.resident / 2**20:,.1f} | {row.files} | {row.threads} |", flush=True)
    growth = slope(rows)
    print(f"\n{100 * growth:+.3f} % an epoch; the bound is {100 * BOUND:.1f} %")
    return 0 if growth <= BOUND and rows[-1].files <= rows[0].files else 1


def _micro_batches(options: argparse.Namespace) -> int:
    from pipeline.bench_micro_batches import measure

    print("| micro_batches | held, MiB | seconds a step |\n|---|---|---|")
    for row in measure(options.backbone, options.size, options.batch, options.counts, options.device):
        print(f"| {row.micro_batches} | {row.held / 2**20:,.0f} | {row.seconds:.2f} |", flush=True)
    return 0


def _resilience(options: argparse.Namespace) -> int:
    from pipeline.bench_resilience import measure, table

    cost = measure(options.words, options.steps)
    if os.environ.get("HOROVOD_RANK", "0") == "0":
        print(table(cost), flush=True)
    return 0
