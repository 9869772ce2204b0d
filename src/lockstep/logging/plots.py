"""Draw curves in characters, for a terminal or a log.

    print("\\n".join(curve([(10, 5.1), (20, 3.9), (30, 3.2)])))

A curve needs no package, and has an ASCII form for terminals without Unicode.
"""

import math
from collections.abc import Sequence

__all__ = ["curve"]


Point = tuple[float, float]

# The bits of a braille character's 2 x 4 dots, by column and row.
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def curve(
    points: Sequence[Point],
    width: int = 78,
    height: int = 10,
    unicode: bool = True,
) -> list[str]:
    """Draw points as lines of text: `height` of them, and two for the x axis.

    Points that are not finite are dropped; without any finite one the result is []. Points in one column are averaged.

    Args:
        points: (x, y), x rising.
        width: maximum characters of a line.
        unicode: draw with braille dots; otherwise with ASCII only.
    """
    finite = []
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            finite.append((x, y))
    if not finite:
        return []
    low, high = _range([y for _, y in finite])
    labels = {0: f"{high:.4g}", height // 2: f"{(high - (high - low) * (height // 2) / (height - 1)):.4g}"}
    labels[height - 1] = f"{low:.4g}"
    margin = max(len(label) for label in labels.values())
    columns = width - margin - 2
    dots = (2, 4) if unicode else (1, 1)
    lit = _pixels(finite, (low, high), columns * dots[0], height * dots[1])
    if unicode:
        rows = _braille(lit, columns, height)
    else:
        rows = _ascii(lit, columns, height)
    edge, corner, line = ("│", "└", "─") if unicode else ("|", "+", "-")
    lines = []
    for row, text in enumerate(rows):
        lines.append(f"{labels.get(row, ''):>{margin}} {edge}{text}".rstrip())
    first_label = f"{finite[0][0]:g}"
    last_label = f"{finite[-1][0]:g}"
    gap = columns - len(first_label) - len(last_label)
    if len(finite) > 1 and gap > 0:
        axis = first_label + " " * gap + last_label
    else:
        axis = first_label
    return [*lines, " " * (margin + 1) + corner + line * columns, " " * (margin + 2) + axis]


def _range(values: list[float]) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    # A flat line runs through the middle.
    pad = abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def _pixels(points: list[Point], span: Point, width: int, height: int) -> set[tuple[int, int]]:
    """Return the (column, row) of each lit dot, row 0 on top.

    Neighbouring columns are joined by a line.
    """
    first_x, _ = points[0]
    last_x, _ = points[-1]
    low, high = span
    columns: dict[int, list[float]] = {}
    # Several points may share a column: draw their mean.
    for x, y in points:
        columns.setdefault(round((x - first_x) / ((last_x - first_x) or 1) * (width - 1)), []).append(y)
    heights = []
    for x, ys in sorted(columns.items()):
        heights.append((x, (sum(ys) / len(ys) - low) / (high - low) * (height - 1)))
    lit: set[tuple[int, int]] = set()
    # Join neighbouring columns, so that a steep curve has no gaps.
    for (x0, y0), (x1, y1) in zip(heights, heights[1:] or heights, strict=False):
        count = max(abs(x1 - x0), math.ceil(abs(y1 - y0)), 1)
        for step in range(count + 1):
            share = step / count
            lit.add((round(x0 + (x1 - x0) * share), height - 1 - round(y0 + (y1 - y0) * share)))
    return lit


def _braille(lit: set[tuple[int, int]], columns: int, rows: int) -> list[str]:
    cells = [[0] * columns for _ in range(rows)]
    for x, y in lit:
        cells[y // 4][x // 2] |= _BRAILLE[x % 2][y % 4]
    lines = []
    for row in cells:
        lines.append("".join(chr(0x2800 + bits) if bits else " " for bits in row))
    return lines


def _ascii(lit: set[tuple[int, int]], columns: int, rows: int) -> list[str]:
    lines = []
    for y in range(rows):
        lines.append("".join("*" if (x, y) in lit else " " for x in range(columns)))
    return lines
