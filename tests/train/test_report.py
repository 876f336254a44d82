import base64
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from types import MappingProxyType
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from weft.debug.timeline import Interval
from weft.models.pattern import LAYER_NAMES
from weft.pipeline import check, table
from weft.train.config import parse_config, to_toml
from weft.train.record.metrics import FILE
from weft.train.report import expert_figures, figures, pipeline_figure
from weft.train.report.facts import keep_facts
from weft.train.report.figures import LIGHT
from weft.train.report.numbers import median
from weft.train.report.page import write_report
from weft.train.report.pattern_figure import pattern
from weft.train.report.settings import in_use
from weft.train.report.stages import measured
from weft.train.report.timeline import computing, read_timeline, slow_ranks, write_timeline

MORE = {"lr": 1e-3, "gradient_norm": 1.0, "tokens_per_second": 10.0, "memory_bytes": 1 << 20}


def log(folder, steps=40, bytes_per_token=1.0, more=MappingProxyType({})):
    """Losses, and multiples of `more` numbers, of which each costs a picture."""
    records = []
    for step in range(1, steps + 1):
        loss = (1.5 + 4 / step) * bytes_per_token
        numbers = {name: value * step for name, value in more.items()}
        records.append({"step": step, "kind": "train", "loss": loss, **numbers})
        if step % 10 == 0:
            records.append(
                {
                    "step": step,
                    "kind": "validation",
                    "loss": loss + bytes_per_token / 10,
                    "nats_per_byte": loss / bytes_per_token + 0.1,
                    "tokens": step * 100,
                }
            )
    (folder / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))


MEMORY = {
    "persistent": {"weights": 3 << 20, "gradients": 2 << 20},
    "transient": {"gathered weights": {"live": 0, "peak": 5 << 20, "slab": 5 << 20}},
}


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def written(folder, **facts):
    """The report of a run of which these facts are known."""
    keep_facts(folder, facts)
    return write_report(folder)


def read(path):
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


def pictures(page):
    """The embedded pictures, light and dark in turn."""
    found = [value for tag, attributes in page.tags for name, value in attributes.items() if name in ("src", "srcset")]
    assert all(value.startswith("data:image/svg+xml;base64,") for value in found)
    return [base64.b64decode(value.split(",", 1)[1]) for value in found]


@pytest.mark.long
def test_the_report_is_one_page_that_needs_nothing_else_and_the_same_run_gives_the_same_bytes(tmp_path):
    log(tmp_path, more=MORE)
    (tmp_path / "config.toml").write_text('[run]\nname = "a <b> & c"\n')
    path = written(tmp_path, description="unit 0 <root>", memory=MEMORY, baseline=2.42)
    html, page = read(path)
    assert path == tmp_path / "report.html"
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r"base64,[A-Za-z0-9+/=]+", "", html))
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    embedded = set(pictures(page))
    beside = {file.read_bytes() for file in tmp_path.glob("*.svg")}
    assert embedded == beside and len(beside) == 8
    for picture in embedded:
        drawn = ElementTree.fromstring(picture)
        assert drawn.tag.endswith("svg")
        assert float(drawn.get("width").removesuffix("pt")) < 400, "10 points are not much less on a phone's screen"
    assert 'name = "a <b> & c"' in page.text and "unit 0 <root>" in page.text
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")
    for name in ("loss", "throughput", "rate"):
        assert (tmp_path / f"{name}.svg").read_bytes() != (tmp_path / f"{name}-dark.svg").read_bytes()

    assert write_report(tmp_path).read_text(encoding="utf-8") == html
    log(tmp_path, steps=50)
    assert write_report(tmp_path).read_text(encoding="utf-8") != html


def test_the_last_validation_loss_stands_beside_the_baseline(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    log(tmp_path)
    _, page = read(written(tmp_path, baseline=2.42))
    assert "1.7000" in page.text and "2.4200" in page.text
    assert "30% below" in page.text
    _, page = read(written(tmp_path, baseline=1.0))
    assert "bigram table" in page.text and "70% above" in page.text


@pytest.mark.parametrize(
    ("of_validation", "of_training", "head"),
    [
        ({"nats_per_byte": 1.0}, {}, ["", "nats per byte", "bits per byte"]),
        ({}, {}, ["", "nats per token"]),
        ({}, {"samples_per_second": 1.0}, ["", "own loss"]),
    ],
)
def test_final_losses_are_listed_under_their_unit(tmp_path, of_validation, of_training, head, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    records = [{"step": 1, "kind": "train", "loss": 2.0, **of_training}]
    records.append({"step": 0, "kind": "validation", "loss": None, **dict.fromkeys(of_validation)})
    records.append({"step": 1, "kind": "validation", "loss": 2.0, "tokens": 5, **of_validation})
    (tmp_path / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
    html, _ = read(write_report(tmp_path))
    assert re.findall("<th>(.*?)</th>", html) == head
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", html)[1:]]
    assert [row[0] for row in rows] == [
        "validation, step 1",
        "best validation, step 1",
        "training, step 1",
        "tokens seen",
    ]
    assert {len(row) for row in rows} == {len(head)}


def test_metrics_of_a_program_without_tokens_have_neither_their_unit_nor_a_configuration(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / FILE).write_text(json.dumps({"step": 1, "kind": "train", "loss": 2.0, "generator": 0.5}) + "\n")
    html, page = read(write_report(tmp_path))
    assert re.findall("<th>(.*?)</th>", html) == ["", "own loss"]
    assert "nats" not in page.text and "Configuration" not in page.text


@pytest.mark.slow
def test_the_losses_of_long_tokens_are_shown_in_nats_per_byte(tmp_path):
    log(tmp_path)
    write_report(tmp_path)
    want = (tmp_path / "loss.svg").read_bytes()
    log(tmp_path, bytes_per_token=4.0)
    write_report(tmp_path)
    assert (tmp_path / "loss.svg").read_bytes() == want


def test_a_run_without_numbers_still_has_a_report(tmp_path):
    html, page = read(write_report(tmp_path))
    assert "no numbers yet" in page.text and not pictures(page)
    assert html.rstrip().endswith("</html>")


@pytest.mark.slow
@pytest.mark.parametrize(
    "records, names",
    [
        ([{"step": 1, "kind": "train", "loss": 2.0}], {"loss"}),
        ([{"step": 1, "kind": "validation", "loss": 2.0}], {"loss"}),
        ([{"step": 1, "kind": "train", "lr": 0.1}], {"rate"}),
        ([{"step": 1, "kind": "train", "tokens_per_second": 5.0}], {"throughput"}),
        ([{"step": 1, "kind": "train", "loss": None}, {"step": 2, "kind": "train", "loss": 1.0}], {"loss"}),
        ([{"step": 1, "kind": "train", "loss": None, "tokens_per_second": None}], {"loss"}),
        ([{"step": s, "kind": "train", "loss": None if s == 50 else 2.0} for s in range(1, 99)], {"loss"}),
        ([{"step": 1, "kind": "validation", "loss": 0.0, "nats_per_byte": None}], {"loss"}),
        ([{"step": 10, "kind": "experts", "load": {name: [1, 0, 3]}} for name in ("layer", "renumbered")], {"experts"}),
    ],
)
def test_what_is_missing_is_left_out(tmp_path, records, names):
    (tmp_path / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
    written(tmp_path, baseline=2.0)
    assert {file.stem for file in tmp_path.glob("*.svg")} == names | {f"{name}-dark" for name in names}


@pytest.mark.slow
def test_memory_may_be_plain_bytes_by_role(tmp_path):
    _, page = read(written(tmp_path, memory={"weights": 1 << 30, "gradients": 0}))
    assert len(pictures(page)) == 2 and (tmp_path / "memory.svg").exists()


@pytest.mark.long
def test_tokens_per_expert_are_drawn_however_many_layers_and_experts_there_are(tmp_path):
    for layers, experts in ((3, 8), (40, 256)):
        loads = [{f"layers.{number}": [number + step] * experts for number in range(layers)} for step in (1, 2, 5)]
        records = [{"step": 10 * n, "kind": "experts", "load": load} for n, load in enumerate(loads)]
        (tmp_path / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
        _, page = read(write_report(tmp_path))
        assert "Tokens per expert over the steps" in page.text and len(pictures(page)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("moved, said", [([[100, 80], [100, 78]], "21% fewer tokens"), ([[9, 9]], None)])
def test_saved_rows_are_reported(tmp_path, moved, said):
    records = [
        {"step": step, "kind": "experts", "load": {"layer": [1, 3]}, "exchanged": {"layer": rows}}
        for step, rows in enumerate(moved)
    ]
    (tmp_path / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
    _, page = read(write_report(tmp_path))
    assert (said or "over the steps") in page.text and (said is not None) == ("fewer tokens" in page.text)


def test_the_recorded_spans_of_stages_include_the_steps_outside_of_layers():
    first = [
        Interval("compute", "microbatch 0/stage 0/forward.embed", 1.0, 1.0, 2.0),
        Interval("compute", "microbatch 0/stage 0/layer 0/forward.attend", 2.0, 2.0, 3.0),
        Interval("compute", "microbatch 0/stage 0/layer 0/backward.attend", 7.0, 7.0, 8.0),
        Interval("compute", "microbatch 0/stage 0/backward.embed", 8.0, 8.0, 9.0),
    ]
    last = [
        Interval("compute", "microbatch 0/stage 1/layer 0/forward.attend", 3.0, 3.0, 4.0),
        Interval("compute", "microbatch 0/stage 1/forward.head", 4.0, 4.0, 5.0),
        Interval("compute", "microbatch 0/stage 1/backward.head", 5.0, 5.0, 6.0),
        Interval("compute", "microbatch 0/stage 1/layer 0/backward.attend", 6.0, 6.0, 7.0),
    ]
    spans = measured(table("gpipe", 2, 1, 1), [first, last]).spans
    assert spans == (((0.0, 2000.0), (6000.0, 8000.0)), ((2000.0, 4000.0), (4000.0, 6000.0)))


@pytest.mark.slow
def test_a_recorded_step_is_drawn_and_said_in_words(tmp_path):
    intervals = [
        Interval("compute", "microbatch 1/layer 0/forward.attend", 0.0, 0.0, 0.3),
        Interval("exchange", "microbatch 1/layer 0/forward.dispatch", 0.2, 0.2, 0.4),
        Interval("wait", "microbatch 1/layer 0/forward.experts", 0.3, 0.3, 0.4),
        Interval("compute", "microbatch 0/layer 0/backward.experts", 0.4, 0.4, 0.6),
    ]
    write_timeline(tmp_path, intervals)
    assert read_timeline(tmp_path) == intervals
    assert computing(intervals) == pytest.approx(0.5)
    assert slow_ranks([1.0, 1.0, 1.3]) == "rank 2 computes for 1.18 x the mean time" and not slow_ranks([1.0, 1.1])
    keep_facts(tmp_path, {"computed": [0.5, 1.5]})
    _, page = read(write_report(tmp_path))
    assert "rank 1 computes for 1.50 x the mean time" in page.text
    assert "tokens were in transit between ranks for 200 ms, 50% of it under computation" in page.text
    assert (tmp_path / "lanes.svg").exists()


def figure_of(draw):
    figure = Figure()
    draw(figure, LIGHT)
    return figure


@pytest.mark.parametrize("draw", ["loss", "memory"])
def test_no_legend_lies_over_a_curve(draw):
    curve = [(step, 1.0) for step in range(50)]
    made = figures.loss(curve, curve, {"a table": 2.0}, "nats")
    if draw == "memory":
        made = figures.memory({"at rest": {"weights": 4.0}, "peak in a step": {"activations": 3.0}})
    figure = Figure(layout="constrained")
    made(figure, LIGHT)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    for axes in figure.axes:
        assert axes.get_legend() is None and not axes.get_window_extent().overlaps(legend.get_window_extent())


def test_the_memory_of_several_ranks_has_a_color_for_each_kind_and_names_the_rank_of_each_bar():
    groups = {f"rank {rank}, {kind}": {"weights": 4.0} for rank in range(3) for kind in ("at rest", "peak in a step")}
    figure = figure_of(figures.memory(groups))
    (axes,), (legend,) = figure.axes, figure.legends
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {n // 2}: weights" for n in range(6)]
    assert [text.get_text() for text in legend.get_texts()] == ["at rest", "peak in a step"]
    assert len({bar.get_facecolor() for bar in axes.patches}) == 2


@pytest.mark.parametrize("draw", ["loss", "memory", "experts", "stages"])
def test_no_label_is_cut_at_the_edge_of_its_picture(draw):
    curve = [(step, 1.0) for step in range(500)]
    roles = {"optimizer state": 4.0, "gathered weights": 2.0, "activations": 3.0}
    groups = {f"rank {rank}, {kind}": roles for rank in range(8) for kind in ("at rest", "peak in a step")}
    loads = {f"decoder.layers.{layer}.mlp": [[1, 1], [1, 1]] for layer in range(3)}
    simulation = check(table("dualpipev", ranks=2, microbatches=24))
    long = replace(simulation, spans=tuple(tuple((a * 7.123456, b * 7.123456) for a, b in r) for r in simulation.spans))
    made = {
        "loss": figures.loss(curve, curve, {"bigram table": 2.0}, "nats"),
        "memory": figures.memory(groups),
        "experts": expert_figures.expert_load([1, 2], loads),
        "stages": pipeline_figure.pipeline(long, "milliseconds"),
    }[draw]
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    made(figure, LIGHT)
    figure.draw_without_rendering()
    named = [text for axes in figure.axes for text in (axes.title, axes.xaxis.label, axes.yaxis.label)]
    for text in named + [text for legend in figure.legends for text in legend.get_texts()]:
        area = text.get_window_extent()
        assert area.width == 0 or (area.x0 >= 0 and area.x1 <= figure.bbox.x1 and area.y0 >= 0), text.get_text()
    if draw == "memory":  # and no bar's label lies over the next
        rows = sorted(label.get_window_extent().y0 for label in figure.axes[0].get_yticklabels())
        assert min(above - below for below, above in pairwise(rows)) > 10 / 72 * figure.dpi
    if draw == "stages":
        assert figure.axes[0].get_xlabel().startswith("milliseconds; activations of up to ")


def test_the_lowest_panel_of_each_column_has_its_steps():
    loads = {f"layer {layer}": [[1, 1], [1, 1]] for layer in range(3)}
    figure = figure_of(expert_figures.expert_load([1, 2], loads))
    assert [axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes[:3]] == [False, True, True]


def test_the_step_shows_where_computation_idles_and_which_exchange_is_exposed():
    intervals = [
        Interval("compute", "microbatch 1/layer 0/forward.attend", 0.0, 0.0, 0.3),
        Interval("compute", "microbatch 0/layer 0/backward.experts", 0.5, 0.5, 1.0),
        Interval("exchange", "microbatch 1/layer 0/forward.dispatch", 0.2, 0.2, 0.4),
        Interval("wait", "microbatch 0/layer 0/backward.experts", 0.9, 0.9, 1.0),
    ]
    legend = [text.get_text() for text in figure_of(expert_figures.lanes(intervals, 0.5)).legends[0].get_texts()]
    shares = dict(label.rsplit("  ", 1) for label in legend)
    busy = {"forward": "30%", "backward": "40%", "idle": "30%"}
    assert shares == {**busy, "hidden exchange": "10%", "exposed exchange": "10%"}


def test_loads_of_experts_are_in_multiples_of_a_balanced_one_on_one_scale():
    loads = {"layer 0": [[1, 1, 1, 1], [1, 1, 1, 1]], "layer 1": [[0, 0, 0, 8], [2, 2, 2, 2]]}
    figure = figure_of(expert_figures.expert_load([1, 2], loads))
    meshes = [axes.collections[0] for axes in figure.axes[:2]]
    assert [mesh.get_array().max() for mesh in meshes] == [1, 4]
    assert meshes[0].get_clim() == meshes[1].get_clim() == (0, 4)
    assert figure.axes[2].get_ylabel() == "times balanced"


@pytest.mark.slow
def test_resumes_are_marked_in_every_chart_over_steps(tmp_path):
    curve = [(step, float(step)) for step in range(1, 9)]
    for draw in (
        figures.loss(curve, [], {}, "nats", [3, 5]),
        figures.throughput(curve, "tokens", [3, 5]),
        figures.rate_and_norm(curve, curve, [3, 5]),
    ):
        for axes in figure_of(draw).axes:
            assert {3, 5} <= {line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2}
    log(tmp_path)
    write_report(tmp_path)
    plain = (tmp_path / "loss.svg").read_bytes()
    keep_facts(tmp_path, {"resumed": [7]})
    write_report(tmp_path)
    assert (tmp_path / "loss.svg").read_bytes() != plain


@pytest.mark.slow
def test_the_page_and_its_picture_have_one_median(tmp_path):
    speeds = [100, None, 300, 900, 200]
    records = [{"step": s, "kind": "train", "loss": 1.0, "tokens_per_second": v} for s, v in enumerate(speeds, 1)]
    (tmp_path / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "tokens per second250median" in read(write_report(tmp_path))[1].text
    curve = [(s, float("nan") if v is None else v) for s, v in enumerate(speeds, 1)]
    assert median(curve) == 250
    (axes,) = figure_of(figures.throughput(curve, "tokens")).axes
    assert axes.get_title(loc="right") == "median 250"


def test_a_long_curve_keeps_its_extremes_and_its_gap_in_few_points():
    values = [float(step % 7) for step in range(100_000)]
    values[50_000] = 1000.0
    values[70_000:70_900] = [float("nan")] * 900
    (axes,) = figure_of(figures.throughput(list(enumerate(values)), "tokens")).axes
    drawn = axes.lines[0].get_ydata()
    assert len(drawn) <= 2 * figures.POINTS and 1000.0 in drawn and any(value != value for value in drawn)


def test_the_shown_configuration_is_what_the_run_used():
    text = to_toml(parse_config('[model]\npattern = "[*-]"\nnum_experts = 4\n[train]\nskip_spikes = 5.0\n'))
    shown = in_use(text)
    for line in ('pattern = "[*-]"', "num_attention_heads = 4", "intermediate_size = 256", "skip_spikes = 5.0", "lr ="):
        assert line in shown
    for name in ("mamba", "expert", "ema_decay", "profile"):
        assert name in text and name not in shown
    assert in_use("no = toml = at all") == "no = toml = at all"


def test_the_note_of_the_shown_configuration_names_all_that_it_shows(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "config.toml").write_text(to_toml(parse_config("")))
    _, page = read(write_report(tmp_path))
    assert "steps = 1000" in page.text and "hidden_size = " in page.text, "shown at their defaults"
    assert "The main settings, the sizes of the model's layers, and all other settings that differ" in page.text


def drawn(text):
    """The lines of text in the picture of a pattern, and how many frames and boxes it has."""
    figure = Figure()
    pattern(text)(figure, LIGHT)
    (axes,) = figure.axes
    legend = [label.get_text() for label in figure.legends[0].get_texts()]
    boxes = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    return [label.get_text() for label in axes.texts], legend, len(boxes), len(axes.lines)


def test_the_pattern_is_a_box_for_each_symbol_a_frame_for_each_group_and_a_line_for_each_depth():
    labels, legend, boxes, borders = drawn("M[*-]|[*E]/[*E]/[*E]")
    depths = [["depth 1", "*", "E", "0"], ["depth 2", "*", "E", "0"]]
    assert labels == ["layers", "M", "0", "*", "-", "1", "*", "E", "2", *depths[0], *depths[1]]
    assert (boxes, borders) == (9 + 4, 1)
    assert legend == ["*  self-attention", "M  Mamba-2", "-  dense MLP", "E  mixture of experts"]


def test_every_kind_of_layer_has_a_box_and_a_line_in_the_legend():
    for symbol, name in LAYER_NAMES.items():
        _, legend, boxes, _ = drawn(symbol)
        assert (legend, boxes) == ([f"{symbol}  {name}"], 1)


@pytest.mark.slow
def test_a_long_pattern_takes_several_lines_and_loses_no_layer():
    labels, _, boxes, _ = drawn("[GE]" * 40)
    assert labels.count("G") == 40 and boxes == 3 * 40 and {str(number) for number in range(40)} <= set(labels)


@pytest.mark.slow
def test_a_run_of_a_hybrid_has_its_pattern_as_a_picture_and_others_have_none(tmp_path):
    log(tmp_path)
    plain = len(pictures(read(write_report(tmp_path))[1]))
    assert not (tmp_path / "pattern.svg").exists()
    keep_facts(tmp_path, {"pattern": "M[*E]"})
    html, page = read(write_report(tmp_path))
    assert len(pictures(page)) == plain + 2 and "The layers of the pattern M[*E]" in html
    assert (tmp_path / "pattern.svg").read_bytes() in pictures(page)
