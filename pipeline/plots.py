"""Curves and point clouds, drawn by matplotlib without its global state: the same input gives the same pixels."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_MOST_NAMED = 20  # classes; more have no colours that an eye tells apart
_FLOOR = 1e-8  # of the largest: below it a spectrum is rounding


def spectrum_plot(curves: Mapping[str, np.ndarray]) -> np.ndarray:
    """Spectra (descending), each as a share of its own largest value, over their rank; (height, width, 3) uint8."""
    figure = Figure(figsize=(7, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        if np.isfinite(values).all() and values.max(initial=0) > 0:
            axes.plot(np.arange(1, len(values) + 1), np.maximum(values / values[0], _FLOOR), label=name)
    axes.set(yscale="log", xlabel="direction, by size", ylabel="standard deviation / largest", title="Spectrum")
    axes.set_ylim(_FLOOR / 2, 2)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return _pixels(figure)


def scatter_plot(
    points: np.ndarray, labels: np.ndarray | None, classes: Sequence[str] | None, title: str
) -> np.ndarray:
    """Points (N, 2), classes in colour, with their names where there are 20 or fewer; (height, width, 3) uint8."""
    figure = Figure(figsize=(9, 7), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xticks=[], yticks=[])
    if labels is None:
        axes.scatter(points[:, 0], points[:, 1], s=6, linewidths=0, color="black")
        return _pixels(figure)
    count = len(classes) if classes is not None else int(labels.max()) + 1
    colours = colour_of_classes(count)
    axes.scatter(points[:, 0], points[:, 1], s=6, linewidths=0, c=colours[labels])
    if count <= _MOST_NAMED:
        for number in range(count):
            name = classes[number] if classes is not None else str(number)
            axes.scatter([], [], s=30, color=colours[number], label=name)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return _pixels(figure)


def colour_of_classes(count: int) -> np.ndarray:
    """(count, 4) colours: distinct ones for 20 classes or fewer, else round a colour wheel."""
    if count <= 10:
        return colormaps["tab10"](np.arange(count))
    if count <= _MOST_NAMED:
        return colormaps["tab20"](np.arange(count))
    return colormaps["hsv"](np.arange(count) / count)


def _pixels(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
