"""`safe_text`: escapes the control characters of foreign text, which becomes one line."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def safe_text(text: str) -> str:
    """Return *text* as one line; control characters but tab, and direction marks, are escaped."""
    return text if text.isprintable() else _CONTROL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    found = match[0]
    return f"\\x{ord(found):02x}" if found < "\u0100" else f"\\u{ord(found):04x}"
