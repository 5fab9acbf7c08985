"""The loss and its gradient on every worker against one process that holds the whole batch."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dali.order import Shard, split
from pipeline import loss, workers
from pipeline.loss import BarlowTwinsLoss

MODES = ["allreduce", "gather", "gram"]


def reference(z1, z2, lambd, eps=1e-5):
    """arXiv:2103.03230, Alg. 1, in one process, with autograd."""
    n1, n2 = ((z - z.mean(0)) / (z.var(0, correction=0) + eps).sqrt() for z in (z1, z2))
    c = n1.T @ n2 / len(z1)
    on_diag = (c.diagonal() - 1).square().sum()
    off_diag = (c - torch.diag(c.diagonal())).square().sum()
    return on_diag + lambd * off_diag, on_diag, off_diag


def unlike_shards(batch, dim, seed=0, dtype=torch.float64):
    """Two views whose samples drift along the batch, so that no worker's slice is like another's."""
    generator = torch.Generator().manual_seed(seed)
    drift = torch.linspace(-3, 3, batch, dtype=torch.float64)[:, None] * torch.linspace(-1, 1, dim, dtype=torch.float64)
    base = torch.randn(batch, dim, generator=generator, dtype=torch.float64) + drift
    noise = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    return base.to(dtype), (base + 0.3 * noise).to(dtype)


def mine(world, x):
    return x[split(len(x), world.size)[world.rank]].clone()


def run(world, z1, z2, mode, lambd=0.01, **options):
    """This worker's terms and its rows of the gradient."""
    batch = len(z1)
    z1, z2 = (mine(world, z).requires_grad_() for z in (z1, z2))
    terms = BarlowTwinsLoss(z1.shape[1], lambd, combine=mode, **options)(z1, z2, batch)
    terms.loss.backward()
    return terms, z1.grad, z2.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("batch", "dim"), [(8, 5), (10, 24), (13, 13), (4, 3)])
def test_loss_and_gradient_are_those_of_the_whole_batch(world, mode, batch, dim):
    z1, z2 = unlike_shards(batch, dim)
    terms, grad1, grad2 = run(world, z1, z2, mode)
    whole1, whole2 = z1.clone().requires_grad_(), z2.clone().requires_grad_()
    expected, on_diag, off_diag = reference(whole1, whole2, 0.01)
    expected.backward()
    for found, wanted in ((terms.loss, expected), (terms.on_diag, on_diag), (terms.off_diag, off_diag)):
        assert found.item() == pytest.approx(wanted.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(grad1, mine(world, whole1.grad), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad2, mine(world, whole2.grad), rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)  # derandomized: all workers must draw the same examples
@given(
    batch=st.integers(4, 40),
    dim=st.integers(2, 50),
    lambd=st.sampled_from([1e-3, 0.05, 1.0]),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_any_shape_agrees_with_the_whole_batch(world, batch, dim, lambd, mode, dtype, seed):
    z1, z2 = unlike_shards(batch, dim, seed, dtype)
    terms, grad1, _ = run(world, z1, z2, mode, lambd)
    whole = z1.double().requires_grad_()
    expected, *_ = reference(whole, z2.double(), lambd)
    expected.backward()
    tolerance = 1e-9 if dtype == torch.float64 else 5e-4
    assert terms.loss.item() == pytest.approx(expected.item(), rel=tolerance)
    norm = whole.grad.norm().item()
    assert (grad1.double() - mine(world, whole.grad)).norm().item() <= tolerance * max(norm, 1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_scale_multiplies_loss_and_gradient_but_not_the_terms(world, mode):
    z1, z2 = unlike_shards(8, 6)
    plain, grad, _ = run(world, z1, z2, mode)
    scaled, scaled_grad, _ = run(world, z1, z2, mode, scale=0.0625)
    assert scaled.loss.item() == pytest.approx(plain.loss.item() / 16, rel=1e-14)
    assert scaled.off_diag.item() == plain.off_diag.item()
    torch.testing.assert_close(scaled_grad * 16, grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_views_are_normalised_each_by_itself_over_the_global_batch(world, mode):
    """Case 16: an affine map of one view's features changes nothing."""
    z, _ = unlike_shards(12, 7)
    z = (z - z.mean(0)) / z.std(0, correction=0)
    a = torch.linspace(0.5, 20, 7, dtype=torch.float64)
    b = torch.linspace(-50, 50, 7, dtype=torch.float64)
    exact = run(world, z, z, mode, eps=0.0)[0].loss.item()
    assert run(world, z, a * z + b, mode, eps=0.0)[0].loss.item() == pytest.approx(exact, rel=1e-9, abs=1e-9)
    usual = run(world, z, z, mode)[0].loss.item()
    assert run(world, z, 1.5 * z + b, mode)[0].loss.item() == pytest.approx(usual, rel=1e-4, abs=1e-4)


def test_moving_samples_between_workers_changes_nothing(world):
    """Case 16: which worker holds a sample does not matter."""
    z1, z2 = unlike_shards(12, 7)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    terms, *_ = run(world, z1, z2, "allreduce")
    moved, *_ = run(world, z1[order], z2[order], "allreduce")
    assert moved.loss.item() == pytest.approx(terms.loss.item(), rel=1e-12)


def test_the_same_gradient_as_horovods_own_autograd_under_an_average(world):
    """`hvd.allreduce`'s backward is another allreduce(Sum): W equal copies of dL/dc, which an average divides by W."""
    z1, z2 = unlike_shards(9, 6)
    own1, own2 = (mine(world, z).requires_grad_() for z in (z1, z2))
    normal1, normal2 = BarlowTwinsLoss(6, 0.01).normalise(torch.cat([own1, own2])).chunk(2)
    c = hvd.allreduce(normal1.T @ normal2 / len(z1), op=hvd.Sum, name="theirs")
    (on := (c.diagonal() - 1).square().sum())
    (on + 0.01 * (c - torch.diag(c.diagonal())).square().sum()).backward()
    _, grad1, grad2 = run(world, z1, z2, "allreduce")
    torch.testing.assert_close(own1.grad / world.size, grad1, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(own2.grad / world.size, grad2, rtol=1e-10, atol=1e-13)


def test_gram_in_float32_is_within_its_error_bound(world):
    """B < D: off_diag loses no more than a few roundings of float32."""
    z1, z2 = unlike_shards(32, 256, dtype=torch.float32)
    exact, grad, _ = run(world, z1.double(), z2.double(), "gram")
    terms, grad32, _ = run(world, z1, z2, "gram")
    assert terms.off_diag.item() == pytest.approx(exact.off_diag.item(), rel=4e-6)
    assert ((grad32.double() - grad).norm() / grad.norm()).item() < 2e-5


def test_gram_never_holds_a_matrix_of_d_by_d(world):
    """At D = 65,536 c alone would be 16 GiB."""
    terms, grad, _ = run(world, *unlike_shards(8, 65536, dtype=torch.float32), "gram")
    assert torch.isfinite(terms.loss) and grad.shape[1] == 65536


def test_auto_takes_the_smaller_thing_to_send():
    assert loss.choose_combine("auto", 8192, 2048)[0] == "gram"
    assert loss.choose_combine("auto", 2048, 2048)[0] == "allreduce"
    assert loss.choose_combine("gather", 8192, 2048)[0] == "gather"


def test_c_is_the_correlation_of_the_whole_batch(world):
    z1, z2 = unlike_shards(10, 4)
    c = BarlowTwinsLoss(4, 1.0, eps=0.0).correlation(mine(world, z1), mine(world, z2), 10)
    expected = np.corrcoef(z1.numpy(), z2.numpy(), rowvar=False)[:4, 4:]
    np.testing.assert_allclose(c.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_two_half_jobs_side_by_side(world, mode, halves):
    """On a process set the loss is that of the set's samples alone."""
    members, process_set = halves
    z1, z2 = unlike_shards(9, 5, seed=members[0])
    part = split(9, len(members))[members.index(world.rank)]
    own1, own2 = z1[part].clone().requires_grad_(), z2[part].clone().requires_grad_()
    terms = BarlowTwinsLoss(5, 0.1, combine=mode, process_set=process_set)(own1, own2, 9)
    terms.loss.backward()
    whole = z1.clone().requires_grad_()
    expected, *_ = reference(whole, z2, 0.1)
    expected.backward()
    assert terms.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(own1.grad, whole.grad[part], rtol=1e-10, atol=1e-12)


def test_every_worker_sends_as_many_collectives(world):
    """Shards that differ by one sample: nobody waits for a call that another does not make."""
    assert sum(part.stop - part.start for part in split(7, world.size)) == 7
    assert Shard(world.rank, world.size).count == world.size
    run(world, *unlike_shards(7, 3), "allreduce")
    assert workers.gather_objects(world.rank, "in.step") == list(range(world.size))
