"""`bench`: measurements behind choices this project makes. Run them on a machine that does nothing else."""

import argparse

from dali.errors import InputError


def run(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run.sh bench", description=__doc__)
    verbs = parser.add_subparsers(dest="what", required=True)
    autocast = verbs.add_parser("autocast", help="bf16 against float32, a backbone at a time")
    autocast.add_argument("backbones", nargs="*", default=["convnet4", "resnet18", "resnet50", "mobilenet_v3_small"])
    autocast.add_argument("--device", default="cpu")
    autocast.add_argument("--size", type=int, default=64, help="pixels")
    autocast.add_argument("--batch", type=int, default=16)
    options = parser.parse_args(args)
    return _autocast(options)


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
