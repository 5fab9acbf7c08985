"""Signs of collapse: known spectra, known ranks, c against NumPy."""

import math

import numpy as np
import pytest
import torch

from pipeline.diagnostics import correlation, effective_rank, figures, spectrum
from pipeline.plots import colour_of_classes, scatter_plot, spectrum_plot


def embeddings(count, deviations, seed=0):
    """(count, D) float32 whose spectrum is exactly `deviations`, turned at random, far from zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, len(deviations), generator=generator, dtype=torch.float64)
    orthonormal = torch.linalg.qr(rows - rows.mean(dim=0)).Q
    turn = torch.linalg.qr(torch.randn(len(deviations), len(deviations), generator=generator, dtype=torch.float64)).Q
    return ((orthonormal * torch.tensor(deviations) * math.sqrt(count - 1)) @ turn + 5).float()


@pytest.mark.parametrize("count", [4, 6, 200])
def test_the_spectrum_is_the_known_one(count):
    wanted = [3.0, 1.0, 0.5]
    found = spectrum(embeddings(count, wanted))
    assert found.shape == (3,) and found.dtype == torch.float64
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_fewer_images_than_numbers_have_one_direction_less_than_images():
    x = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    found = spectrum(x)
    centred = (x - x.mean(dim=0)).double()
    np.testing.assert_allclose(found, torch.linalg.svdvals(centred)[:4] / 2, rtol=1e-6)
    assert len(found) == 4 and found[-1] > 0.1


def test_effective_rank_counts_directions():
    assert effective_rank(torch.tensor([2.0] * 7)) == pytest.approx(7)
    assert effective_rank(torch.tensor([2.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.zeros(5)) == 0
    shares = np.array([0.5, 0.3, 0.2])
    assert effective_rank(torch.from_numpy(10 * shares)) == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))


def test_collapse_is_seen():
    """To one point; to three of sixteen directions; and no collapse."""
    point = torch.ones(50, 16)
    assert effective_rank(spectrum(point)) == 0
    three = embeddings(50, [1.0] * 3 + [0.0] * 13)
    assert effective_rank(spectrum(three)) == pytest.approx(3, rel=1e-3)
    assert effective_rank(spectrum(embeddings(50, [1.0] * 16))) == pytest.approx(16, rel=1e-6)


def test_embeddings_that_are_not_finite_give_nan():
    x = torch.randn(9, 4)
    x[2, 1] = math.inf
    found = spectrum(x)
    assert found.shape == (4,) and found.isnan().all()
    assert math.isnan(figures(torch.eye(4), found)["effective_rank"])


def test_c_and_its_figures_are_numpys():
    draws = np.random.default_rng(0)
    z1 = draws.standard_normal((40, 6)) * [1, 2, 3, 4, 5, 6] + 7
    z2 = z1 + 0.5 * draws.standard_normal((40, 6))
    c = correlation(torch.from_numpy(z1), torch.from_numpy(z2), eps=0.0)
    wanted = np.corrcoef(z1.T, z2.T)[:6, 6:]
    np.testing.assert_allclose(c, wanted, rtol=1e-10)
    off = np.abs(wanted[~np.eye(6, dtype=bool)])
    before = c.clone()
    found = figures(c, torch.ones(6))
    assert torch.equal(c, before), "c is drawn afterwards"
    assert found == pytest.approx(
        {
            "c_diag_mean": wanted.diagonal().mean(),
            "c_diag_min": wanted.diagonal().min(),
            "c_off_rms": np.sqrt((off**2).mean()),
            "c_off_max": off.max(),
            "effective_rank": 6,
        }
    )


def test_a_constant_feature_has_zeros_in_c():
    z = torch.randn(30, 3, generator=torch.Generator().manual_seed(1))
    z[:, 1] = 4.0
    c = correlation(z, z, eps=1e-5)
    assert c[1].abs().max() == 0 and c[0, 0] == pytest.approx(1, abs=1e-4)


def colours(picture):
    return {(code >> 16, code >> 8 & 255, code & 255) for code in np.unique(picture.astype(int) @ [1 << 16, 1 << 8, 1])}


def test_the_spectrums_plot_shows_its_curves_and_survives_collapse():
    full = spectrum_plot({"a": np.array([1.0, 0.5, 0.1]), "b": np.array([3.0, 1e-12, 0.0])})
    assert full.dtype == np.uint8 and full.shape == (450, 700, 3)
    blue, orange = (31, 119, 180), (255, 127, 14)
    assert {blue, orange} <= colours(full)
    for dead in (np.zeros(4), np.full(4, np.nan)):
        assert not {blue, orange} & colours(spectrum_plot({"a": dead}))
    assert np.array_equal(full, spectrum_plot({"a": np.array([2.0, 1.0, 0.2]), "b": np.array([1.0, 1e-12, 0.0])}))


def test_points_have_their_classs_colour_at_their_place():
    points = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    picture = scatter_plot(points.repeat(50, axis=0), np.array([0, 1, 0, 1]).repeat(50), ["cat", "dog"], "map")
    blue, orange = ((picture == colour).all(axis=2) for colour in ((31, 119, 180), (255, 127, 14)))
    legend = picture.shape[1] * 9 // 10
    left, right = (np.nonzero(mask[:, :legend])[1].mean() for mask in (blue, orange))
    assert left < legend * 0.2 and right > legend * 0.7
    assert blue[:, legend:].any() and orange[:, legend:].any(), "the legend names both"
    without = scatter_plot(points, None, None, "map")
    assert (0, 0, 0) in colours(without) and (31, 119, 180) not in colours(without)


@pytest.mark.parametrize("count", [2, 10, 11, 20, 21, 1000])
def test_classes_have_colours_of_their_own(count):
    assert len({tuple(colour) for colour in colour_of_classes(count).round(6)}) >= min(count, 250)
