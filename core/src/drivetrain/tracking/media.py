"""Images, figures, tables and histograms: snapshots in one form each, and the nearest other kind for trackers that lack one.

Taken at the call, so that later changes of the arrays don't change what is stored. Tensors on an accelerator are copied to the host, which
waits for them.
"""

from __future__ import annotations

import copy
import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.errors import TrackerError
from drivetrain.tracking.values import Snapshot, local_tensor

__all__ = [
    "describe_histogram",
    "figure_bytes",
    "figure_image",
    "normalize_images",
    "normalize_table",
    "snapshot_figure",
    "snapshot_histogram",
    "table_csv",
    "table_markdown",
]

_CHANNELS = (1, 3, 4)


def normalize_images(images: Any, *, dataformats: str | None = None) -> list[Any]:
    """Make uint8 arrays of shape (height, width, 3 or 4) of one image or several.

    Args:
        images: A PIL image, an array or tensor, or a list of those. An array has two dimensions (gray), three (one image) or four (a batch).
            Integers are values from 0 to 255, floats from 0 to 1 (beyond is clipped, NaN is black), bool is black and white.
        dataformats: The order of the dimensions: "HW", "HWC", "CHW", "NHWC", "NCHW". Default: the channels are where 1, 3 or 4 is the
            size; if both ends have such a size, tensors are CHW and arrays HWC.

    Returns:
        The images, copies of the given ones.

    Raises:
        TrackerError: If it isn't an image.

    Example:
        >>> import numpy as np
        >>> [image] = normalize_images(np.full((3, 8, 5), 0.5))
        >>> image.shape, image.dtype.name, int(image[0, 0, 0])
        ((8, 5, 3), 'uint8', 128)
    """
    if isinstance(images, (list, tuple)):
        return [image for each in images for image in normalize_images(each, dataformats=dataformats)]
    is_tensor = hasattr(images, "detach")
    array = _to_numpy(images)
    layout = dataformats or _guess_layout(array, is_tensor)
    if sorted(layout) not in (["H", "W"], ["C", "H", "W"], ["C", "H", "N", "W"], ["H", "N", "W"]) or array.ndim != len(
        layout
    ):
        raise TrackerError(
            f"An array of shape {array.shape} isn't an image of layout {layout!r}. Give arrays of shape (height, width), "
            "(height, width, channels) or (channels, height, width), with 1, 3 or 4 channels, or say dataformats='CHW'."
        )
    return [_to_rgb(image) for image in _batch(array, layout)]


def snapshot_figure(figure: Any) -> Any:
    """Copy a matplotlib figure (free of pyplot, so that another thread may draw it) or any other figure.

    A figure that can't be copied is drawn now: the result is then an RGBA array.

    Example:
        >>> from matplotlib.figure import Figure
        >>> figure = Figure()
        >>> snapshot_figure(figure) is figure
        False
    """
    canvas: Any = getattr(figure, "canvas", None)
    manager = getattr(canvas, "manager", None)
    if hasattr(figure, "gcf"):  # the module pyplot itself, which is easily passed by mistake
        return snapshot_figure(figure.gcf())
    if not hasattr(figure, "savefig"):
        return copy.deepcopy(figure)
    if manager is not None:
        canvas.manager = None  # a figure that pyplot manages is registered again when it is copied
    try:
        return copy.deepcopy(figure)
    except Exception:
        return figure_image(figure)
    finally:
        if manager is not None:
            canvas.manager = manager


def figure_image(figure: Any) -> Any:
    """Draw a matplotlib figure: a uint8 array of shape (height, width, 4). None for other figures.

    Example:
        >>> from matplotlib.figure import Figure
        >>> figure_image(Figure(figsize=(2, 1), dpi=50)).shape
        (50, 100, 4)
    """
    import numpy as np

    if isinstance(figure, np.ndarray):
        return figure
    if not hasattr(figure, "savefig"):
        return None
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba", dpi=figure.dpi)
    width, height = (int(n) for n in figure.bbox.size)
    return np.frombuffer(buffer.getvalue(), np.uint8).reshape(height, width, 4).copy()


def figure_bytes(figure: Any) -> tuple[bytes, str]:
    """A figure as the content of a file, with the file's suffix.

    Raises:
        TrackerError: If it isn't a figure.

    Example:
        >>> from matplotlib.figure import Figure
        >>> figure_bytes(Figure())[1]
        '.png'
    """
    from drivetrain.tracking.png import encode_png

    image = figure_image(figure)
    if image is not None:
        return encode_png(image), ".png"
    if hasattr(figure, "to_html"):
        return str(figure.to_html()).encode(), ".html"
    raise TrackerError(
        f"A {type(figure).__name__} is neither a matplotlib nor a plotly figure. Log a picture of it with log_images."
    )


def normalize_table(
    columns: Sequence[str] | None, rows: Any, dataframe: Any, snapshot: Snapshot
) -> tuple[list[str], list[list[Any]]]:
    """Make columns and rows of plain values.

    Args:
        columns: Names; with mappings as rows, default: their keys.
        rows: Sequences or mappings.
        dataframe: Instead of both: anything with ``columns`` and ``itertuples`` (pandas) or ``rows()`` (polars).
        snapshot: Reads the cells.

    Raises:
        TrackerError: If rows and columns don't fit.

    Example:
        >>> normalize_table(None, [{"x": 1, "y": "a"}, {"x": 2}], None, Snapshot())
        (['x', 'y'], [[1, 'a'], [2, None]])
    """
    if dataframe is not None:
        if columns is not None or rows is not None:
            raise TrackerError("A table is given by a dataframe or by columns and data, not by both.")
        columns = [str(c) for c in dataframe.columns]
        rows = dataframe.itertuples(index=False) if hasattr(dataframe, "itertuples") else dataframe.rows()
    rows = list(rows if rows is not None else ())
    if rows and isinstance(rows[0], Mapping):
        names: Sequence[Any] = columns if columns is not None else list(dict.fromkeys(k for row in rows for k in row))
        rows = [[row.get(name) for name in names] for row in rows]
    elif columns is None:
        names = range(len(rows[0])) if rows else ()
    else:
        names = columns
    cells = [[snapshot.cell(value) for value in row] for row in rows]
    for index, row in enumerate(cells):
        if len(row) != len(names):
            raise TrackerError(f"Row {index} of the table has {len(row)} cells, but there are {len(names)} columns.")
    return [str(name) for name in names], cells


def table_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    r"""A table as CSV.

    Example:
        >>> table_csv(["x", "y"], [[1, "a, b"]])
        'x,y\n1,"a, b"\n'
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return buffer.getvalue()


def table_markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    r"""A table as Markdown.

    Example:
        >>> print(table_markdown(["x"], [["a|b"]]))
        | x |
        | --- |
        | a\|b |
    """

    def line(cells: Sequence[Any]) -> str:
        texts = (str(c).replace("|", "\\|").replace("\n", "<br>") for c in cells)
        return "| " + " | ".join(texts) + " |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)])


def snapshot_histogram(values: Any) -> Any:
    """Copy numbers into a 1-d float array.

    Example:
        >>> snapshot_histogram([[1, 2], [3, 4]])
        array([1., 2., 3., 4.])
    """
    import numpy as np

    array = _to_numpy(values)
    if array.dtype.kind in "biu":
        array = array.astype(np.float64)
    if array.dtype.kind != "f":
        raise TrackerError(f"A histogram is made of numbers, not of {array.dtype}.")
    return array.reshape(-1).astype(np.float32 if array.dtype.itemsize < 4 else array.dtype, copy=True)


def describe_histogram(values: Any) -> dict[str, float | int]:
    """What stands for a distribution where histograms can't be stored; NaN and infinities are counted, not mixed in.

    Example:
        >>> import numpy as np
        >>> describe_histogram(np.array([1.0, 3.0, np.nan]))
        {'min': 1.0, 'max': 3.0, 'mean': 2.0, 'std': 1.0, 'count': 3, 'nonfinite': 1}
    """
    import numpy as np

    finite = values[np.isfinite(values)].astype(np.float64)
    if finite.size:
        stats = [float(f()) for f in (finite.min, finite.max, finite.mean, finite.std)]
    else:
        stats = [math.nan] * 4
    out: dict[str, float | int] = dict(zip(("min", "max", "mean", "std"), stats, strict=True))
    return {**out, "count": int(values.size), "nonfinite": int(values.size - finite.size)}


def _to_numpy(value: Any) -> Any:
    import numpy as np

    if hasattr(value, "detach"):
        value = local_tensor(value.detach()).cpu()
        if str(value.dtype) in ("torch.bfloat16", "torch.float16"):
            value = value.float()
        return value.numpy()
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # PIL: palettes, CMYK and so on become RGB
        value = value if value.mode in ("L", "RGB", "RGBA") else value.convert("RGBA" if "A" in value.mode else "RGB")
    return np.asarray(value)


def _guess_layout(array: Any, is_tensor: bool) -> str:
    if array.ndim == 2:
        return "HW"
    if array.ndim not in (3, 4):
        return "?"
    first, last = array.shape[-3] in _CHANNELS, array.shape[-1] in _CHANNELS
    if not first and not last:
        return "?"
    layout = "CHW" if first and (is_tensor or not last) else "HWC"
    return layout if array.ndim == 3 else "N" + layout


def _batch(array: Any, layout: str) -> list[Any]:
    """Arrays of shape (height, width, channels)."""
    if "C" not in layout:
        array, layout = array[..., None], layout + "C"
    if "N" not in layout:
        array, layout = array[None], "N" + layout
    array = array.transpose([layout.index(d) for d in "NHWC"])
    if array.shape[-1] not in _CHANNELS:
        raise TrackerError(f"An image has 1, 3 or 4 channels, not {array.shape[-1]} (layout {layout!r}).")
    return list(array)


def _to_rgb(image: Any) -> Any:
    import numpy as np

    if image.dtype == np.bool_:
        image = image.astype(np.uint8) * 255
    elif image.dtype.kind in "iu":
        image = np.clip(image, 0, 255).astype(np.uint8)
    else:
        scaled = np.nan_to_num(image.astype(np.float64), nan=0.0) * 255.0
        image = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
    if image.shape[-1] == 1:
        image = np.repeat(image, 3, axis=-1)
    return np.array(image, order="C", copy=True)
