"""Amounts as people read them."""

__all__ = ["bytes_text"]


def bytes_text(count: float) -> str:
    """Bytes in units of 1024: 812 MiB, 1.25 GiB."""
    power = 0
    while count >= 999.5 and power < 5:
        count, power = count / 1024, power + 1
    number = f"{count:.0f}" if count >= 100 or power == 0 else f"{count:.3g}"
    return f"{number} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"
