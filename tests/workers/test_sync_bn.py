"""Sync batch norm on every worker against torch's own on the joined batch."""

import copy

import horovod.torch as hvd
import pytest
import torch

from dali.order import split
from pipeline import sync_bn, workers
from pipeline.sync_bn import SyncBatchNorm

SHAPES = {"2d": (11, 5), "3d": (11, 5, 6), "4d": (11, 5, 4, 3), "5d": (11, 5, 2, 3, 2)}
TORCH = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}


def drifting(shape, dtype=torch.float64, seed=0):
    """Samples whose mean and scale drift along the batch: no worker's slice is like another's."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    along = torch.linspace(-2, 3, shape[0], dtype=torch.float64).view(-1, *(1,) * (len(shape) - 1))
    return (x * (1 + along.abs()) + along).to(dtype)


def mine(world, x):
    return x[split(len(x), world.size)[world.rank]].clone()


def compare(world, layer, x, dy, part, calls=2, memory_format=torch.contiguous_format, process_set=workers.everyone):
    """Two calls forward and backward of `layer` on the joined batch, and of its conversion on this worker's slice."""
    ours = sync_bn.convert(copy.deepcopy(layer), process_set)
    for call in range(calls):
        whole = (x + call).requires_grad_()
        own = (x + call)[part].contiguous(memory_format=memory_format).requires_grad_()
        expected, y = layer(whole), ours(own)
        expected.backward(dy)
        y.backward(dy[part])
    torch.testing.assert_close(y, expected[part], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(own.grad, whole.grad[part], rtol=1e-9, atol=1e-11)
    for name, parameter in ours.named_parameters():
        total = workers.sum_(parameter.grad.clone(), f"test.{name}", process_set)
        torch.testing.assert_close(total, getattr(layer, name).grad, rtol=1e-10, atol=1e-10)
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, getattr(layer, name), rtol=1e-12, atol=1e-12)
    layer.eval(), ours.eval()
    torch.testing.assert_close(ours(own), layer(whole)[part], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_as_torch_on_the_joined_batch(world, shape, affine, momentum):
    layer = TORCH[len(shape)](shape[1], momentum=momentum, affine=affine).double()
    if affine:
        torch.nn.init.uniform_(layer.weight, generator=torch.Generator().manual_seed(1))
    x, dy = drifting(shape), drifting(shape, seed=2)
    compare(world, layer, x, dy, split(len(x), world.size)[world.rank])


def test_channels_last_and_a_worker_without_samples(world):
    x, dy = drifting((6, 4, 3, 3)), drifting((6, 4, 3, 3), seed=3)
    part = slice(0, 6) if world.rank == 0 else slice(6, 6)  # everything on rank 0
    compare(world, torch.nn.BatchNorm2d(4).double(), x, dy, part, memory_format=torch.channels_last)
    part = split(6, world.size)[world.rank]
    compare(world, torch.nn.BatchNorm2d(4).double(), x, dy, part, memory_format=torch.channels_last)


def test_a_channel_that_has_no_spread_on_a_worker(world):
    """One sample a worker in most of them, and a channel that is dead on each."""
    x, dy = drifting((world.size + 1, 4, 1, 1)), drifting((world.size + 1, 4, 1, 1), seed=4)
    x[:, 1] = torch.arange(world.size + 1.0, dtype=torch.float64).clamp(max=world.size - 1).view(-1, 1, 1)
    part = slice(world.rank, world.rank + 1 + (world.rank == world.size - 1))
    if world.size > 1:
        compare(world, torch.nn.BatchNorm2d(4).double(), x, dy, part)
    invstd = torch.tensor([0.0, torch.inf, 0.5])  # a variance of 0 as CUDA writes it, and as mathematics does
    assert sync_bn._variance(invstd).tolist() == [0.0, 0.0, 4.0]


def test_slices_of_3_and_5_samples(world):
    """Case 19: unequal local batches count by their samples, not one vote a worker."""
    x, dy = drifting((8, 4)), drifting((8, 4), seed=4)
    edges = [0, 3, 8, 8, 8][: world.size] + [8]
    compare(world, torch.nn.BatchNorm1d(4).double(), x, dy, slice(edges[world.rank], edges[world.rank + 1]))


@pytest.mark.parametrize("affine", [True, False])
def test_two_views_in_one_call_are_two_calls(world, affine):
    """Each view has its own statistics; running ones are updated in turn."""
    single = SyncBatchNorm(4, affine=affine, name="single").double()
    double = SyncBatchNorm(4, affine=affine, name="double", views=2).double()
    views = [mine(world, drifting((9, 4, 3, 3), seed=seed)) + 5 * seed for seed in (0, 1)]
    dys = [mine(world, drifting((9, 4, 3, 3), seed=seed)) for seed in (2, 3)]
    apart = [view.clone().requires_grad_() for view in views]
    joined = torch.cat(views).requires_grad_()
    for x, dy in zip(apart, dys, strict=True):
        single(x).backward(dy)
    double(joined).backward(torch.cat(dys))
    torch.testing.assert_close(joined.grad, torch.cat([x.grad for x in apart]), rtol=1e-12, atol=1e-12)
    for (name, a), (_, b) in zip(single.named_parameters(), double.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12, msg=name)
    torch.testing.assert_close(dict(double.named_buffers()), dict(single.named_buffers()), rtol=1e-12, atol=1e-12)


def test_a_mean_far_larger_than_the_spread_keeps_its_digits(world):
    """E[x²] − mean² in float32 would leave nothing of a spread of 0.1 around 1,000."""
    x = (1000 + 0.1 * drifting((64, 3, 4, 4))).float()
    ours = SyncBatchNorm(3)(mine(world, x))
    exact = (x.double() - x.double().mean((0, 2, 3), keepdim=True)) / x.double().std(
        (0, 2, 3), correction=0, keepdim=True
    )
    assert (ours.double() - mine(world, exact)).abs().max().item() < 5e-3


def test_statistics_are_frozen_within_the_block(world):
    layer = sync_bn.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    with sync_bn.frozen_statistics(layer):
        layer(mine(world, drifting((8, 3), torch.float32)))
    assert layer[0].num_batches_tracked.item() == 0 and layer[0].running_mean.abs().sum().item() == 0
    layer(mine(world, drifting((8, 3), torch.float32)))
    assert layer[0].num_batches_tracked.item() == 1


def test_convert_replaces_every_layer_and_keeps_its_tensors(world):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Sequential(torch.nn.BatchNorm2d(4)), torch.nn.ReLU())
    before = {name: t.data_ptr() for name, t in model.state_dict().items()}
    sync_bn.convert(model)
    assert isinstance(model[1][0], SyncBatchNorm) and model[1][0].name == "sync_bn.1.0"
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == before


def test_state_of_horovods_layer_loads(world):
    theirs = hvd.SyncBatchNorm(4)
    theirs.running_mean += 3
    ours = SyncBatchNorm(4)
    ours.load_state_dict(theirs.state_dict())
    assert ours.running_mean.eq(3).all()


def test_two_half_jobs_side_by_side(world, halves):
    members, process_set = halves
    x, dy = drifting((9, 4), seed=members[0]), drifting((9, 4), seed=5)
    part = split(9, len(members))[members.index(world.rank)]
    compare(world, torch.nn.BatchNorm1d(4).double(), x, dy, part, process_set=process_set)


def test_bf16_input_has_float32_statistics(world):
    x = (100 + drifting((256, 3))).bfloat16()
    layer = SyncBatchNorm(3, momentum=1.0)
    y = layer(mine(world, x))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(layer.running_mean, x.float().mean(0), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(layer.running_var, x.float().var(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_narrow_types_are_float64_s_rounded(world, dtype, memory_format):
    """Weights are float32, as under autocast. Of bf16, twice rounded: 2 / 256 of the largest value at most."""
    x, dy = drifting((16, 6, 5, 4)).to(dtype), drifting((16, 6, 5, 4), seed=2).to(dtype)
    exact = torch.nn.BatchNorm2d(6).double()
    torch.nn.init.uniform_(exact.weight, 0.5, 2)
    whole = x.double().requires_grad_()
    exact(whole).backward(dy.double())
    layer = SyncBatchNorm(6)
    layer.load_state_dict(exact.state_dict())
    own = mine(world, x).contiguous(memory_format=memory_format).requires_grad_()
    layer(own).backward(mine(world, dy))
    expected = mine(world, whole.grad)
    assert own.grad.dtype == dtype and own.grad.is_contiguous(memory_format=memory_format)
    bound = {torch.bfloat16: 2 / 256, torch.float32: 1e-6}[dtype]
    assert (own.grad - expected).abs().max() <= bound * expected.abs().max()
    assert layer.weight.grad.dtype == torch.float32
    total = workers.sum_(layer.weight.grad.clone(), "test.narrow")
    torch.testing.assert_close(total, exact.weight.grad.float(), rtol=1e-4, atol=1e-3)
