"""Pictures of a run, drawn with PIL alone: the same input gives the same bytes, and no plotting state is shared."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_SMALLEST_CELL = 96  # pixels; smaller views are enlarged, or nobody sees what the augmentation did
_GAP = 4
_HEADER = 28
_WHITE = (255, 255, 255)
_BLACK = (0, 0, 0)
# Blue, white, red, after ColorBrewer's RdBu (colorbrewer2.org): both ends equally dark, so neither sign stands out.
_MINUS, _ZERO, _PLUS = np.array([(33, 102, 172), (247, 247, 247), (178, 24, 43)], dtype=np.float32)
_NOT_A_NUMBER = (0, 0, 0)
_SMALLEST_MAP = 512  # pixels
_NAMED_CLASSES = 40
_CELL_WITH_NUMBERS = 30  # pixels


def contact_sheet(columns: Mapping[str, Any], mean: Sequence[float], std: Sequence[float], rows: int = 8) -> np.ndarray:
    """The first `rows` images of a batch, a row each, and a column for each view of them, under its heading.

    Args:
        columns: by heading, (N, C, H, W) normalised views in CPU memory, arrays or tensors; C is 1 or 3.
        mean, std: per channel, of pixels in [0, 1], as the views were normalised.

    Returns:
        (height, width, 3) uint8. Cells are H x W, times the smallest integer that makes them 96 px or more.
    """
    cells = [_pixels(views, mean, std, rows) for views in columns.values()]
    count, height, width = cells[0].shape[:3]
    sheet = Image.new("RGB", (len(cells) * (width + _GAP) + _GAP, _HEADER + count * (height + _GAP)), _WHITE)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(16)
    if max(map(font.getlength, columns)) > width:
        font = ImageFont.load_default(13)
    for column, (heading, images) in enumerate(zip(columns, cells, strict=True)):
        left = _GAP + column * (width + _GAP)
        draw.text((left, 5), heading, fill=_BLACK, font=font)
        for row, image in enumerate(images):
            sheet.paste(Image.fromarray(image), (left, _HEADER + row * (height + _GAP)))
    return np.asarray(sheet)


def correlation_map(c: Any, max_cells: int = 256) -> np.ndarray:
    """The cross-correlation matrix as a heat map: blue -1, white 0, red 1; black where it is not a number.

    Above `max_cells` rows it is reduced by blocks. A cell is the entry of its block that is farthest from zero, so
    that no correlated pair is averaged away; a cell on the diagonal is the mean of its block's diagonal entries.

    Args:
        c: (D, D) in CPU memory, array or tensor.

    Returns:
        (height, width, 3) uint8, with a colour bar. The scale is fixed, so that steps can be compared.
    """
    c = np.asarray(c, dtype=np.float32)
    d = len(c)
    assert c.shape == (d, d), c.shape
    block = -(-d // max_cells)
    colours = _diverging(_reduce(c, block))
    cell = -(-_SMALLEST_MAP // len(colours))
    heat = colours.repeat(cell, axis=0).repeat(cell, axis=1)
    size = len(heat)
    sheet = Image.new("RGB", (size + 96, _HEADER + size), _WHITE)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(16)
    note = f"c, {d} x {d}" + (f", in blocks of {block} x {block}: largest entries" if block > 1 else "")
    draw.text((_GAP, 5), note, fill=_BLACK, font=font)
    sheet.paste(Image.fromarray(heat), (0, _HEADER))
    bar = _diverging(np.linspace(1, -1, size, dtype=np.float32)[:, None]).repeat(24, axis=1)
    sheet.paste(Image.fromarray(bar), (size + 16, _HEADER))
    for value in (1, 0.5, 0, -0.5, -1):
        # The text's middle at its value, kept inside the picture at both ends.
        y = _HEADER + min(max((1 - value) / 2 * size, 9), size - 9)
        draw.text((size + 46, y), f"{value:g}", fill=_BLACK, font=font, anchor="lm")
    return np.asarray(sheet)


def neighbour_sheet(
    images: Any, cosines: np.ndarray, same: np.ndarray | None, mean: Sequence[float], std: Sequence[float]
) -> np.ndarray:
    """A row a query: the query, then its neighbours with their cosines, framed blue (same class) or red (another).

    Args:
        images: (Q, 1 + k, C, H, W), normalised by `mean` and `std`, in CPU memory.
        cosines: (Q, k).
        same: (Q, k) whether a neighbour has the query's class; None without labels: no frames.

    Returns:
        (height, width, 3) uint8.
    """
    rows, columns = np.shape(images)[:2]
    pixels = _pixels(np.reshape(images, (rows * columns, *np.shape(images)[2:])), mean, std, rows * columns)
    height, width = pixels.shape[1:3]
    step_x, step_y = width + 3 * _GAP, height + 2 * _GAP + _HEADER
    sheet = Image.new("RGB", (columns * step_x + 2 * _GAP, _HEADER + rows * step_y), _WHITE)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(16)
    for column, text in ((0, "query"), (1, "nearest first, with their cosines")):
        draw.text((2 * _GAP + column * step_x, 5), text, fill=_BLACK, font=font)
    for number, image in enumerate(pixels):
        row, column = divmod(number, columns)
        left, top = 2 * _GAP + column * step_x, _HEADER + _GAP + row * step_y
        if column:
            if same is not None:
                colour = tuple(int(part) for part in (_MINUS if same[row, column - 1] else _PLUS))
                draw.rectangle((left - _GAP, top - _GAP, left + width + _GAP - 1, top + height + _GAP - 1), colour)
            draw.text((left, top + height + _GAP), f"{cosines[row, column - 1]:.3f}", fill=_BLACK, font=font)
        sheet.paste(Image.fromarray(image), (left, top))
    return np.asarray(sheet)


def confusion_map(shares: Any, classes: Sequence[str], max_cells: int = 256) -> np.ndarray:
    """What share of each class's images (row) is taken for which class (column): white 0, blue 1.

    Classes are named where there are at most 40. Above `max_cells` classes it is reduced as `correlation_map` is.

    Args:
        shares: (K, K) in [0, 1].

    Returns:
        (height, width, 3) uint8.
    """
    shares = np.asarray(shares, dtype=np.float32)
    count = len(shares)
    assert shares.shape == (count, count) and len(classes) == count, (shares.shape, len(classes))
    block = -(-count // max_cells)
    cells = _reduce(shares, block)
    colours = _diverging(-cells)
    cell = -(-_SMALLEST_MAP // len(cells))
    heat = colours.repeat(cell, axis=0).repeat(cell, axis=1)
    font = ImageFont.load_default(min(16, cell - 2) if count <= _NAMED_CLASSES else 16)
    names = list(classes) if count <= _NAMED_CLASSES else []
    margin = max([_GAP, *(int(font.getlength(name)) + 2 * _GAP for name in names)])
    sheet = Image.new("RGB", (margin + len(heat), _HEADER + len(heat) + (margin if names else 0)), _WHITE)
    sheet.paste(Image.fromarray(heat), (margin, _HEADER))
    draw = ImageDraw.Draw(sheet)
    note = f"rows: true class; columns: named as; {count} classes"
    draw.text(
        (_GAP, 5), note + (f", in blocks of {block}" if block > 1 else ""), fill=_BLACK, font=ImageFont.load_default(16)
    )
    below = Image.new("RGB", (margin, len(heat)), _WHITE)  # the columns' names, turned afterwards
    for place, name in enumerate(names):
        middle = int((place + 0.5) * cell)
        draw.text((margin - _GAP, _HEADER + middle), name, fill=_BLACK, font=font, anchor="rm")
        ImageDraw.Draw(below).text((margin - _GAP, len(heat) - middle), name, fill=_BLACK, font=font, anchor="rm")
        if cell >= _CELL_WITH_NUMBERS:
            for column, share in enumerate(shares[place]):
                at = (margin + int((column + 0.5) * cell), _HEADER + middle)
                fill = _WHITE if share > 0.5 else _BLACK
                draw.text(at, f"{100 * share:.0f}", fill=fill, font=font, anchor="mm")
    if names:
        sheet.paste(below.rotate(-90, expand=True), (margin, _HEADER + len(heat)))
    return np.asarray(sheet)


def _pixels(views: Any, mean: Sequence[float], std: Sequence[float], rows: int) -> np.ndarray:
    """(N, C, H, W) normalised → (rows, height, width, 3) uint8, enlarged by repeating pixels."""
    images = np.asarray(views[:rows], dtype=np.float32).transpose(0, 2, 3, 1)
    images = images * np.asarray(std, dtype=np.float32) + np.asarray(mean, dtype=np.float32)
    images = np.rint(images.clip(0, 1) * 255).astype(np.uint8)
    factor = -(-_SMALLEST_CELL // min(images.shape[1:3]))
    images = images.repeat(factor, axis=1).repeat(factor, axis=2)
    return np.broadcast_to(images, (*images.shape[:3], 3))


def _reduce(c: np.ndarray, block: int) -> np.ndarray:
    if block == 1:
        return c
    starts = np.arange(0, len(c), block)
    # Blocks of the last row and column may be smaller. NaN goes through both.
    largest = np.maximum.reduceat(np.maximum.reduceat(c, starts, axis=0), starts, axis=1)
    smallest = np.minimum.reduceat(np.minimum.reduceat(c, starts, axis=0), starts, axis=1)
    reduced = np.where(largest >= -smallest, largest, smallest)
    diagonal = np.add.reduceat(c.diagonal(), starts) / np.diff([*starts, len(c)])
    np.fill_diagonal(reduced, diagonal)
    return reduced


def _diverging(values: np.ndarray) -> np.ndarray:
    """(H, W) in [-1, 1] → (H, W, 3) uint8."""
    share = np.nan_to_num(values.clip(-1, 1))[..., None]
    colours = _ZERO + np.where(share >= 0, share * (_PLUS - _ZERO), -share * (_MINUS - _ZERO))
    pixels = np.rint(colours).astype(np.uint8)
    pixels[np.isnan(values)] = _NOT_A_NUMBER
    return pixels
