import numpy as np
import torch

from pipeline.pictures import contact_sheet, correlation_map

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HEADER, GAP = 28, 4


def normalise(pixels):
    """(N, H, W, 3) uint8 → (N, 3, H, W) float32, as the loader does."""
    return ((pixels / 255 - np.array(MEAN)) / np.array(STD)).transpose(0, 3, 1, 2).astype(np.float32)


def test_sheet_shows_each_view_of_each_image_with_its_own_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 40, 48, 3), dtype=np.uint8)
    y1, y2, y3 = map(normalise, pixels)
    sheet = contact_sheet({"view 1": y1, "view 2": torch.from_numpy(y2), "a third": y3}, MEAN, STD, rows=4)
    height, width = 120, 144  # three times 40 x 48: the smallest multiple of 96 px and more
    assert sheet.dtype == np.uint8
    assert sheet.shape == (HEADER + 4 * (height + GAP), 3 * (width + GAP) + GAP, 3)
    headings = set()
    for view in (0, 1, 2):
        left = GAP + view * (width + GAP)
        for row in range(4):
            top = HEADER + row * (height + GAP)
            cell = sheet[top : top + height, left : left + width]
            assert np.array_equal(cell[1::3, 1::3], pixels[view, row])
            assert np.array_equal(cell, pixels[view, row].repeat(3, 0).repeat(3, 1))
        assert (sheet[:HEADER, left : left + width] < 100).any()  # a heading over each column
        headings.add(sheet[:HEADER, left : left + width].tobytes())
    assert len(headings) == 3


def test_headings_stay_over_their_columns():
    y = np.zeros((1, 3, 96, 96), np.float32)
    headings = ("view 1", "view 2", "torchvision's 1", "torchvision's 2")
    sheet = contact_sheet(dict.fromkeys(headings, y), MEAN, STD)
    for column in range(1, 4):
        left = GAP + column * (96 + GAP)
        assert (sheet[:HEADER, left - GAP : left - 1] == 255).all()


def test_sheet_of_one_channel_and_fewer_images_than_rows():
    pixels = np.arange(2 * 28 * 28, dtype=np.int64).reshape(2, 1, 28, 28) % 256
    y = ((pixels / 255 - 0.3) / 0.4).astype(np.float32)
    sheet = contact_sheet({"view 1": y, "view 2": y[:, :, :, ::-1]}, (0.3,), (0.4,))
    assert sheet.shape == (HEADER + 2 * (112 + GAP), 2 * (112 + GAP) + GAP, 3)
    cell = sheet[HEADER : HEADER + 112, GAP : GAP + 112]
    assert np.array_equal(cell[::4, ::4], pixels[0, 0][..., None].repeat(3, -1))
    mirrored = sheet[HEADER : HEADER + 112, GAP + 116 : GAP + 228]
    assert np.array_equal(mirrored, cell[:, ::-1])


def test_sheet_clips_what_lies_outside_the_range():
    y = np.full((1, 3, 96, 96), 50, np.float32)
    sheet = contact_sheet({"1": y, "2": -y}, MEAN, STD)
    assert (sheet[HEADER + 1, [GAP + 1, 2 * GAP + 97]] == [[255] * 3, [0] * 3]).all()


def cells(picture, count):
    """The middle pixel of each cell of a map."""
    size = picture.shape[0] - HEADER
    middle = (np.arange(count) * (size // count)) + size // count // 2
    return picture[HEADER:][middle][:, middle].astype(int)


def red(pixels):
    """How much redder than blue: c's sign and size."""
    return pixels[..., 0] - pixels[..., 2]


def test_map_of_identity_has_a_red_diagonal_on_white():
    picture = correlation_map(np.eye(16))
    assert picture.dtype == np.uint8 and picture.shape == (HEADER + 512, 512 + 96, 3)
    redness = red(cells(picture, 16))
    assert (redness.diagonal() > 120).all()
    assert (redness[~np.eye(16, dtype=bool)] == 0).all()


def test_map_is_centred_at_zero_and_symmetric_in_sign():
    c = np.zeros((8, 8))
    c[0, 1], c[0, 2], c[1, 0], c[2, 0] = 0.5, -0.5, 0.25, np.nan
    shown = cells(correlation_map(torch.from_numpy(c)), 8)
    assert red(shown)[0, 1] > red(shown)[1, 0] > 0 > red(shown)[0, 2]
    assert shown[3, 3].min() > 240  # zero
    assert shown[2, 0].max() == 0  # not a number


def test_reduced_map_keeps_the_diagonal_and_single_large_entries():
    d, blocks = 1000, 250  # 256 cells at most: blocks of 4
    c = 0.02 * np.random.default_rng(0).standard_normal((d, d))
    np.fill_diagonal(c, 0.9)
    c[100, 901] = -0.8  # one decorrelation failure among 16 entries of its block
    redness = red(cells(correlation_map(c), blocks))
    off = ~np.eye(blocks, dtype=bool)
    assert (redness.diagonal() > 100).all()
    assert redness[25, 225] < -80
    assert np.median(np.abs(redness[off])) < 15


def test_diagonal_cell_is_the_mean_of_its_block():
    c = np.diag(np.tile([1.0, 0.0], 256))  # half the features have not learned: no cell may look finished
    shown = red(cells(correlation_map(c), 256)).diagonal()
    assert np.array_equal(shown, red(cells(correlation_map(0.5 * np.eye(256)), 256)).diagonal())


def test_ragged_last_block_counts_as_itself():
    c = np.zeros((10, 10))
    np.fill_diagonal(c, 1)
    assert (red(cells(correlation_map(c, max_cells=4), 4)).diagonal() > 120).all()  # blocks of 3, 3, 3 and 1


def test_colour_bar_runs_from_red_to_blue():
    picture = correlation_map(np.zeros((4, 4))).astype(int)
    bar = red(picture[HEADER:, 512 + 28])
    assert bar[0] > 120 and bar[-1] < -120 and abs(bar[256]) < 3
    assert (np.diff(bar) <= 1).all()  # 1: rounding of the two channels
    assert (picture[HEADER:, 512 + 46 :] < 100).any()  # values beside it


def test_same_input_same_bytes():
    c = np.random.default_rng(1).uniform(-1, 1, (300, 300))
    assert correlation_map(c).tobytes() == correlation_map(c).tobytes()
