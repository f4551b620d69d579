"""What is shown of streams that are teed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from tests.support.processes import wait_until

from phalanx.integrations.torchrun.logs import LogPlan, LogSpec, Stream, Tail, open_logs


class Teed:
    """One rank, whose stdout a console shows that knows ASCII alone."""

    def __init__(self, folder: Path, wanted: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self._shown = io.BytesIO()
        console = io.TextIOWrapper(self._shown, "ascii")
        filters: dict[Stream, tuple[str, ...]] = {"stdout": wanted}
        spec = LogSpec(redirects=(0,), tee=(1,), prefix="", filters=filters)
        self.tail = Tail(LogPlan(spec, folder), "", {"stdout": console, "stderr": console})

    def write(self, attempt: int, data: bytes) -> None:
        path = self.folder / f"attempt_{attempt}" / "0" / "stdout.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def wait_shown(self, text: bytes) -> None:
        wait_until(lambda: self._shown.getvalue() == text)

    @property
    def shown(self) -> bytes:
        return self._shown.getvalue()


@pytest.fixture
def teed(tmp_path: Path) -> Teed:
    return Teed(tmp_path)


def test_a_round_that_ended_in_its_start_hides_none_that_follows(teed: Teed) -> None:
    with teed.tail:
        teed.write(0, b"zero\n")
        teed.wait_shown(b"zero\n")
        teed.write(2, b"two\nno end")
        teed.wait_shown(b"zero\ntwo\n")

    assert teed.shown == b"zero\ntwo\nno end\n"


def test_what_the_console_cannot_show_is_replaced_and_ends_nothing(teed: Teed) -> None:
    half, other = "é\n".encode().partition(b"\xa9")[::2]
    with teed.tail:
        teed.write(0, b"a\n" + half)
        teed.wait_shown(b"a\n")
        teed.write(0, b"\xa9" + other + b"b\n")
        teed.wait_shown(b"a\n?\nb\n")


def test_a_filtered_file_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    teed = Teed(tmp_path, ("a",))
    (tmp_path / "attempt_0" / "filtered_stdout.log").mkdir(parents=True)
    with teed.tail:
        teed.write(0, b"a\n")
        teed.wait_shown(b"a\n")
        teed.write(0, b"b\n")
        teed.wait_shown(b"a\nb\n")


def test_a_tail_that_is_closed_has_shown_everything(teed: Teed) -> None:
    with teed.tail:
        teed.write(0, b"last")
        teed.tail.close()

        assert teed.shown == b"last\n"


def test_a_relative_folder_is_found_from_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    plan = open_logs(LogSpec(folder=Path("logs"), redirects=(0,), tee=(0,)), "job", 1)

    assert Path(plan.error_file(0, 0)).is_relative_to(tmp_path / "logs")
