"""Says which cases of the matrix were drawn, so that the same can be drawn again."""

import os

from matrix_cases import SEED


def pytest_terminal_summary(terminalreporter):
    ran = [each.nodeid for reports in terminalreporter.stats.values() for each in reports if hasattr(each, "when")]
    drawn = {name for name in ran if "test_a_sample_of_all_combinations" in name}
    if drawn and not os.environ.get("MATRIX_CASES"):
        terminalreporter.write_line(f"matrix: {len(drawn)} cases drawn with MATRIX_SEED={SEED}")
