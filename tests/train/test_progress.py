import io
import re

import pytest
from rich.console import Console

from weft.train.record import progress as progress_module
from weft.train.record.progress import Progress, format_bytes, format_count, format_own, format_step, format_time


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def plain():
    return Console(file=io.StringIO(), width=30)


def terminal(width=90):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30)


def screen(console):
    """What stands in the last panel, without colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return text[text.rindex("╭") :]


def test_without_a_terminal_there_is_a_line_every_so_many_steps_and_for_the_last():
    console = plain()
    with Progress(25, console, log_every=10) as progress:
        for step in range(1, 26):
            progress.update(step, loss=1 / step)
    lines = console.file.getvalue().splitlines()
    assert [line.split("  loss")[0].split() for line in lines] == [
        ["step", "10/25"],
        ["step", "20/25"],
        ["step", "25/25"],
    ]
    assert "\x1b" not in console.file.getvalue()


def test_a_line_is_not_broken_and_its_values_have_names_and_units():
    console = plain()
    with Progress(10, console, log_every=1) as progress:
        progress.update(
            1,
            loss=2.5,
            lr=3e-4,
            gradient_norm=0.5,
            tokens_per_second=12_345.0,
            memory_bytes=3 << 29,
            balance=0.25,
        )
    (line,) = console.file.getvalue().splitlines()
    for part in ("loss 2.5000", "learning rate 3.00e-04", "gradient norm 0.500", "tokens/s 12.3k"):
        assert part in line
    assert "memory 1.5 GiB" in line and "balance 0.25" in line


def test_validations_and_notes_have_lines_of_their_own_at_any_step():
    console = plain()
    with Progress(100, console, log_every=50) as progress:
        progress.update(7, loss=1.0)
        progress.update(7, validation_loss=2.25)
        progress.note("checkpoint [7] saved")
    assert console.file.getvalue().splitlines() == [
        "step   7/100  validation loss 2.2500  left 0:00",
        "checkpoint [7] saved",
    ]


def test_a_terminal_shows_one_panel_with_the_last_of_every_value_and_the_notes():
    console = terminal()
    with Progress(40, console, title="my run") as progress:
        for step in range(1, 21):
            progress.update(step, loss=5 - step / 10, lr=1e-3)
            if step == 10:
                progress.update(10, validation_loss=4.125)
                progress.note("checkpoint 10 saved")
    shown = screen(console)
    for part in ("my run", "20 / 40", "50%", "3.0000", "4.1250", "1.00e-03", "checkpoint 10 saved"):
        assert part in shown
    assert shown.count("╭") == 1


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_fits_narrow_and_wide_terminals(width):
    console = terminal(width)
    with Progress(10, console, units={"loss": "nats/byte", "validation_loss": "nats/byte"}) as progress:
        progress.update(3, loss=1.5, validation_loss=2.5, lr=1e-3, gradient_norm=0.5, tokens_per_second=10)
    shown = screen(console)
    assert max(map(len, shown.splitlines())) <= width
    assert all(part in shown for part in ("1.5000 nats/byte", "2.5000 nats/byte", "0.500"))


def test_the_time_left_follows_the_steps_of_this_process(clock):
    with Progress(100, plain(), first_step=40) as progress:
        assert progress.seconds_left is None
        for step in range(41, 51):
            clock.now += 2
            progress.update(step, loss=1.0)
        assert progress.seconds_left == pytest.approx(100)
        for step in range(51, 99):
            clock.now += 0.5
            progress.update(step, loss=1.0)
        progress.update(98, validation_loss=1.0)
        assert 1.0 <= progress.seconds_left < 1.2


def test_other_ranks_show_nothing():
    for console in (plain(), terminal()):
        with Progress(10, console, enabled=False) as progress:
            progress.update(10, loss=1.0)
            progress.note("hello")
        assert console.file.getvalue() == ""


def test_an_error_leaves_the_terminal_usable():
    console = terminal()
    with pytest.raises(KeyboardInterrupt), Progress(10, console) as progress:
        progress.update(1, loss=1.0)
        raise KeyboardInterrupt
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")


def test_numbers_are_written_for_people():
    counts = {
        0.5: "0.5",
        7: "7",
        999: "999",
        60.98: "61.0",
        999.6: "1.00k",
        1300: "1.30k",
        12_345: "12.3k",
        999_600: "1.00M",
        3e9: "3.00G",
    }
    assert {value: format_count(value) for value in counts} == counts
    steps = {0.123: "123 ms", 0.9996: "1.00 s", 1.5: "1.50 s", 9.996: "10.0 s", 123.4: "123 s", 1234: "1234 s"}
    assert {value: format_step(value) for value in steps} == steps
    own = {87.5: "87.5", 1234.6: "1235", 9999.6: "10,000", -11672.3: "-11,672", 2e-7: "2e-07", 3e9: "3e+09"}
    assert {value: format_own(value) for value in own} == own
    sizes = {5: "5 B", 1536: "1.5 KiB", 5 << 20: "5.0 MiB", 3 << 29: "1.5 GiB"}
    assert {value: format_bytes(value) for value in sizes} == sizes
    times = {5: "0:05", 65: "1:05", 3725: "1:02:05"}
    assert {value: format_time(value) for value in times} == times
