"""The fit of `lockstep scale` on published tables, rows left out: python bench/scaling/score.py [--write]

Each table of bench/scaling/tables/*.toml is throughput by number of accelerators, as its source printed it (see the url
and the place of each). A row is left out, the fit (src/lockstep/diagnose/scale/fit.py) is made of the others, and the
error is that of the throughput which it then says of the row: its ratio to the published one, less 1. Beside it two
baselines see the same rows: Amdahl's law, X(n) = X(1) / (s + (1 - s) / n), fitted by least squares of relative errors,
and the last efficiency kept, that of the next smaller size (of the next larger one for the smallest). Left out are, in
turn, every row, and only the largest size of each table, which is what an extrapolation does.

--write puts the result into docs/inside/scale.md; --each also prints every row.
"""

import argparse
import statistics
import tomllib
from pathlib import Path

import numpy as np

from lockstep.diagnose.scale.fit import Fit, SizeMeasurement

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "inside" / "scale.md"
BEGIN, END = "<!-- score -->\n", "<!-- /score -->\n"
METHODS = ("fit", "Amdahl", "efficiency kept")


def tables():
    """(source's name, its TOML, the table) of every table."""
    for path in sorted((HERE / "tables").glob("*.toml")):
        with path.open("rb") as file:
            found = tomllib.load(file)
        for table in found["table"]:
            yield path.stem, found, table


def fitted(rows, size, table, mode):
    """The fit's throughput at `size`, and between what it should lie: (low, high)."""
    strong = table.get("mode", mode) == "strong"  # a rank's work is a share of the batch, else always the same
    points = [
        SizeMeasurement(n, 1 / n, (1 / rate,)) if strong else SizeMeasurement(n, 1.0, (n / rate,)) for n, rate in rows
    ]
    found = Fit(points, table["ranks_per_node"]).predict(size, 1 / size if strong else 1.0)
    done = 1 if strong else size
    return done / found.value, (done / found.high, done / found.low)


def amdahl(rows, size):
    """Amdahl's law, n / X(n) = (s n + 1 - s) / X(1), with neither term negative."""
    n = np.array([each for each, _ in rows], float)
    t = np.array([each / rate for each, rate in rows])
    matrix = np.stack([n / t, 1 / t], 1)
    found = np.linalg.lstsq(matrix, np.ones(len(n)), rcond=None)[0]
    if (found < 0).any():
        alone = [float(column.sum() / (column**2).sum()) for column in matrix.T]
        errors = [float(((column * each - 1) ** 2).sum()) for column, each in zip(matrix.T, alone, strict=True)]
        found = np.array([alone[0], 0.0]) if errors[0] < errors[1] else np.array([0.0, alone[1]])
    return size / float(found[0] * size + found[1])


def kept(rows, size):
    """As efficient as the next smaller size; the smallest: as the next larger."""
    n, rate = max((row for row in rows if row[0] < size), default=min(rows))
    return size * rate / n


def scores(ends=False):
    """A dict a row that is left out: where it is from, the published value, the error of each method, `inside`."""
    found = []
    for source, head, table in tables():
        rows = [(int(n), float(rate)) for n, rate in table["rows"]]
        for place, (size, rate) in enumerate(rows):
            if ends and place < len(rows) - 1:
                continue
            others = rows[:place] + rows[place + 1 :]
            mine, (low, high) = fitted(others, size, table, head["mode"])
            said = dict(zip(METHODS, (mine, amdahl(others, size), kept(others, size)), strict=True))
            errors = {name: value / rate - 1 for name, value in said.items()}
            place_of = {"source": source, "table": table["name"], "size": size, "rate": rate}
            found.append(place_of | {"errors": errors, "inside": low <= rate <= high})
    return found


def median(rows, method):
    return statistics.median(abs(row["errors"][method]) for row in rows)


def shown(every, largest):
    """The result as Markdown."""
    titles = {source: found["source"] for source, found, _ in tables()}
    urls = {source: found["url"] for source, found, _ in tables()}
    lines = [
        "| source | tables | rows | a row left out: fit | Amdahl | efficiency kept | largest left out: fit | Amdahl | "
        "efficiency kept |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for source in [*titles, ""]:
        groups = [[row for row in rows if source in ("", row["source"])] for rows in (every, largest)]
        name = f"[{titles[source]}]({urls[source]})" if source else "**all**"
        cells = [f"{median(rows, method):.1%}" for rows in groups for method in METHODS]
        lines.append(f"| {name} | {len(groups[1])} | {len(groups[0])} | {' | '.join(cells)} |")
    inside = [statistics.mean(row["inside"] for row in rows) for rows in (every, largest)]
    worst = sorted(every, key=lambda row: -abs(row["errors"]["fit"]))[:5]
    lines += [
        "",
        f"Medians of the absolute error of the throughput. The interval, which should hold 90%, held {inside[0]:.0%} "
        f"of the rows left out and {inside[1]:.0%} of the largest. The worst five rows:",
        "",
        *(f"- {row['table']} at {row['size']}: {row['errors']['fit']:+.0%}" for row in worst),
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the result into docs/inside/scale.md")
    parser.add_argument("--each", action="store_true", help="print every row")
    given = parser.parse_args()
    every, largest = scores(), scores(ends=True)
    if given.each:
        for row in sorted(every, key=lambda row: abs(row["errors"]["fit"])):
            errors = "  ".join(f"{name} {error:+7.1%}" for name, error in row["errors"].items())
            print(f"{errors}  {row['source']}: {row['table']} at {row['size']}")
    text = shown(every, largest)
    print(text)
    if given.write:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        DOCUMENT.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
