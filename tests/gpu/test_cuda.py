"""What the CPU tests assert, on a GPU: one worker, a few minutes. `./run.sh test-gpu`."""

import copy
import json
from contextlib import nullcontext

import numpy as np
import nvidia.dali.fn as fn
import pytest
import torch

from dali.loader import Batch, EvalLoader, TwoViewLoader
from dali.order import Shard
from dali.sources import FolderSource
from dali.spec import DecoderSpec, ViewsSpec
from pipeline import checkpoint, config, pretraining, sync_bn, training
from pipeline.guard import Guard
from pipeline.loss import BarlowTwinsLoss
from pipeline.samples import write_photographs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder, 64, 320, 240)
    return folder


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sync_bn_is_torchs(world, dtype, channels_last):
    order = torch.channels_last if channels_last else torch.contiguous_format
    x = (3 + 2 * torch.randn(16, 8, 7, 5, device="cuda", dtype=dtype)).contiguous(memory_format=order)
    dy = torch.randn_like(x)
    layer = torch.nn.BatchNorm2d(8).to("cuda", dtype)
    ours = sync_bn.convert(copy.deepcopy(layer))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(a).backward(dy)
    ours(b).backward(dy)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(b.grad, a.grad, **tolerance)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(getattr(ours, name).grad, parameter.grad, **tolerance)
    torch.testing.assert_close(ours.running_var, layer.running_var, **tolerance)


def test_a_channel_without_spread_has_variance_0(world):
    """One sample a worker, or a channel that is dead there: others' samples have spread."""
    x = torch.randn(16, 3, 5, 5, device="cuda")
    x[:, 1] = 7
    _, variance, _ = sync_bn._local_statistics(x)
    torch.testing.assert_close(variance, x.var((0, 2, 3), correction=0), rtol=1e-4, atol=0)
    mean, variance, count = sync_bn._local_statistics(x[:1, :, 0, 0])
    assert torch.equal(mean, x[0, :, 0, 0]) and not variance.any() and count == 1


def test_sync_bn_is_torchs_own_synchronised_layer(world, tmp_path):
    """torch.nn.SyncBatchNorm refuses CPU tensors; alone it does not synchronise, so its function is called."""
    x = (3 + 2 * torch.randn(16, 8, 7, 5, device="cuda", dtype=torch.float64)).requires_grad_()
    dy = torch.randn_like(x)
    ours = sync_bn.convert(torch.nn.BatchNorm2d(8).to("cuda", torch.float64))
    with torch.no_grad():
        ours.weight.uniform_(0.5, 2)
        ours.bias.normal_()
    theirs = torch.nn.SyncBatchNorm(8).to("cuda", torch.float64)
    theirs.load_state_dict(ours.state_dict())
    y = ours(x)
    y.backward(dy)
    found, x.grad = x.grad, None
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wanted = torch.nn.modules._functions.SyncBatchNorm.apply(
            x,
            theirs.weight,
            theirs.bias,
            theirs.running_mean,
            theirs.running_var,
            theirs.eps,
            theirs.momentum,
            torch.distributed.group.WORLD,
            1,
        )
        wanted.backward(dy)
    finally:
        torch.distributed.destroy_process_group()
    for a, b in (
        (y, wanted),
        (found, x.grad),
        (ours.weight.grad, theirs.weight.grad),
        (ours.bias.grad, theirs.bias.grad),
        (ours.running_mean, theirs.running_mean),
        (ours.running_var, theirs.running_var),
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["allreduce", "gather", "gram"])
def test_the_loss_is_the_cpus(world, mode):
    z = torch.randn(2, 32, 64, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda"):
        z1, z2 = (view.to(device).clone().requires_grad_() for view in z)
        terms = BarlowTwinsLoss(64, 0.005, combine=mode)(z1, z2, 32)
        terms.loss.backward()
        results.append((terms.loss.cpu(), z1.grad.cpu(), z2.grad.cpu()))
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-10, atol=1e-12)


def test_c_is_not_formed_in_tf32(world):
    torch.backends.cuda.matmul.allow_tf32 = True
    z = torch.randn(512, 512, device="cuda")
    c = BarlowTwinsLoss(512, 1.0).correlation(z, z, 512)
    n = (z.double() - z.double().mean(0)) / (z.double().var(0, correction=0) + 1e-5).sqrt()
    assert (c.double() - n.T @ n / 512).abs().max().item() < 2e-6
    assert torch.backends.cuda.matmul.allow_tf32


def test_views_are_the_cpus_within_a_few_levels(photographs):
    made = {}
    for device in ("cpu", "cuda:0"):
        with TwoViewLoader(
            FolderSource(photographs),
            ViewsSpec(mean=(0, 0, 0), std=(1, 1, 1)),
            channels=3,
            seed=0,
            global_batch=16,
            shard=Shard(0, 1),
            stop_step=2,
            device=device,
        ) as loader:
            made[device] = [batch.y1.cpu() * 255 for batch in loader]
    for cpu, gpu in zip(*made.values(), strict=True):
        difference = (cpu - gpu).abs()
        assert difference.mean().item() <= 1.0 and difference.quantile(0.95).item() <= 4.0


def test_views_are_on_the_gpu_and_stay(photographs):
    source = FolderSource(photographs)
    with TwoViewLoader(
        source, ViewsSpec(), channels=3, seed=0, global_batch=16, shard=Shard(0, 1), stop_step=12, device="cuda:0"
    ) as loader:
        kept = [(batch.y1, batch.y1.double().sum()) for batch in loader]
    torch.cuda.synchronize()
    for views, total in kept:
        assert views.is_cuda and views.double().sum() == total
    with EvalLoader(source, ViewsSpec(), channels=3, batch=10, shard=Shard(0, 1), device="cuda:0") as loader:
        assert sum(len(batch.indices) for batch in loader) == len(source)


HINTS = {"preallocate_width_hint": 320, "preallocate_height_hint": 240}


@pytest.mark.parametrize(
    "settings",
    [
        {"hw_decoder_load": 0.0},
        {"hw_decoder_load": 1.0, **HINTS},
        {"device_memory_padding": 0, "host_memory_padding": 0},
        {"hybrid_huffman_threshold": 1000},
    ],
    ids=str,
)
def test_views_do_not_depend_on_how_the_gpu_decodes(photographs, settings):
    how = {"channels": 3, "seed": 0, "global_batch": 16, "shard": Shard(0, 1), "stop_step": 2, "device": "cuda:0"}
    spec = ViewsSpec(mean=(0, 0, 0), std=(1, 1, 1))
    made = []
    for decoder in (DecoderSpec(), DecoderSpec(**settings)):
        with TwoViewLoader(FolderSource(photographs), spec, decoder=decoder, **how) as loader:
            made.append([255 * batch.y1 for batch in loader])
    for plain, other in zip(*made, strict=True):
        difference = (plain - other).abs()
        assert difference.mean().item() <= 0.5 and difference.quantile(0.95).item() <= 2.0


def test_the_decoders_settings_are_those_it_takes(photographs, monkeypatch):
    """All of them reach `fn.decoders.image` on the GPU, and none the CPU's decoder."""
    seen = []
    original = fn.decoders.image

    def record(files, **arguments):
        seen.append(arguments)
        return original(files, **arguments)

    monkeypatch.setattr(fn.decoders, "image", record)
    decoder = DecoderSpec(hw_decoder_load=0.3, **HINTS)
    for device in ("cpu", "cuda:0"):
        with EvalLoader(
            FolderSource(photographs),
            ViewsSpec(size=32),
            channels=3,
            batch=64,
            shard=Shard(0, 1),
            device=device,
            decoder=decoder,
        ) as loader:
            assert len(next(loader).indices) == 64
    cpu, gpu = seen
    assert set(cpu) == {"output_type"}
    assert gpu["device"] == "mixed" and decoder.arguments().items() <= gpu.items()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("autocast", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("rule", ["lars", "sgd", "adamw"])
def test_a_run_trains_and_its_checkpoint_is_its_state(world, photographs, tmp_path, autocast, micro_batches, rule):
    made = config.load(
        None,
        [
            f"data.path={photographs}",
            f"output={tmp_path}",
            "device=cuda",
            "views.size=96",
            "model.backbone=resnet18",
            "model.projector=[256, 256]",
            f"optimizer.name={rule}",
            "optimizer.lr_weights=0.01",
            "optimizer.lr_biases=0.01",
            "optimizer.reference_batch=null",
            "train.global_batch=32",
            f"train.micro_batches={micro_batches}",
            "train.epochs=8",
            "schedule.warmup_epochs=0",
            f"precision.autocast={autocast}",
        ],
    )
    run = pretraining.prepare(made, world)
    losses = []
    with training.open_loader(run) as loader:
        for batch in loader:
            losses.append(training.train_step(run, batch.y1, batch.y2).terms.loss)
    assert torch.isfinite(torch.stack(losses)[-4:]).all()
    assert run.step == 16 and next(run.model.parameters()).is_cuda


def test_a_bad_gradient_masks_the_update_on_the_device(world, photographs, tmp_path):
    made = config.load(
        None,
        [
            f"data.path={photographs}",
            f"output={tmp_path}",
            "device=cuda",
            "views.size=64",
            "model.backbone=resnet18",
            "model.projector=[64]",
            "train.global_batch=16",
            "schedule.warmup_epochs=0",
        ],
    )
    run = pretraining.prepare(made, world)
    before = copy.deepcopy(dict(run.model.state_dict()))
    y = torch.randn(16, 3, 64, 64, device="cuda")
    y[5] = torch.inf
    outcome = training.train_step(run, y, y)
    torch.testing.assert_close(dict(run.model.state_dict()), before, rtol=0, atol=0)
    guard = Guard(made, run.source, run.model.backbone, 0, nullcontext, 16)
    guard.after_step(1, Batch(y, y, np.arange(16)), outcome.terms._asdict(), outcome.left_out)
    assert guard.skipped == 0  # read one step later
    guard.close()
    samples = json.loads((tmp_path / "non_finite" / "step_1.json").read_text())["samples"]
    assert guard.skipped == 1
    assert [(row["index"], row["view"], row["not_finite"]) for row in samples] == [(5, 1, "pixels"), (5, 2, "pixels")]
    saved = checkpoint.snapshot(before)
    assert not any(value.is_cuda for value in saved.values()) and checkpoint.not_finite(before) == []
