"""Lines of Python by folder and room, beside the most that each folder is to have.

`make lint` prints it. Docstrings, comments and blank lines count.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = {
    "supervision": 4_200,
    "runtime": 10_800,
    "cluster": 3_500,
    "actors": 9_600,
    "chaos": 4_000,
    "cli": 1_300,
    "testing": 900,
    "integrations/vllm": 1_900,
    "tests": 27_000,
}


def count(folder: Path) -> Counter[str]:
    """Return the lines of *folder* by room; "" is what lies beside the rooms."""
    lines: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        inner = path.relative_to(folder).parts[:-1]
        lines[inner[0] if inner else ""] += len(path.read_text().splitlines())
    return lines


def main() -> None:
    """Print the table."""
    for name, most in MOST.items():
        rooms = count(ROOT / name)
        print(f"{name:17}{rooms.total():8,} of {most:,}")
        if name in ("supervision", "runtime", "actors", "integrations/vllm"):
            print(
                "  " + "  ".join(f"{room or '.'} {size:,}" for room, size in sorted(rooms.items()))
            )


if __name__ == "__main__":
    main()
