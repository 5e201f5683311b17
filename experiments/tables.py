"""Tables in Markdown."""

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first row its head, that is also readable as plain text; numbers stand on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    lines = (" | ".join(map(str.rjust, row, widths)) for row in (rows[0], rule, *rows[1:]))
    return "".join(f"| {line} |\n" for line in lines)
