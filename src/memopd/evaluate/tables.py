"""Tables for a terminal: the columns of the paper's Tables 1 and 2, and costs as we and as MEM1 count them.

Programs use `Result.as_dict`, which has every metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from memopd.evaluate.statistics import Comparison, Estimate
from memopd.evaluate.summary import Metric, Result, Setting

# Heading, metric, unit, digits. The units are the paper's.
Column = tuple[str, Metric, float, int]
EM: Column = ("EM ↑", "em", 1, 3)
F1: Column = ("F1 ↑", "f1", 1, 3)
PEAK: Column = ("peak ↓ ×10²", "peak", 1e2, 2)
DEPENDENCY: Column = ("dependency ↓ ×10⁵", "dependency", 1e5, 3)
TIME: Column = ("time ↓ s", "seconds", 1, 2)
_TABLE_1 = (EM, F1, PEAK, TIME)
_TABLE_2 = (EM, F1, PEAK, DEPENDENCY, TIME)
COSTS: tuple[Column, ...] = (
    ("valid answers ↑ %", "valid", 1e-2, 1),
    PEAK,
    ("peak without q ↓ ×10²", "peak_without_q", 1e2, 2),
    ("peak without q, EM = 0 dropped ↓ ×10²", "peak_without_q_em0_dropped", 1e2, 2),
    DEPENDENCY,
    ("dependency without q ↓ ×10⁵", "dependency_without_q", 1e5, 3),
)


def table_1(results: Sequence[Result]) -> Table:
    """One row per system; for every k: EM, F1, peak, and time if one trajectory ran at a time."""
    return _table(results, _TABLE_1, "k questions at once")


def table_2(results: Sequence[Result]) -> Table:
    """One row per system; for every k: the same and dependency. The paper's table has k = 1 (Wiki-RAG)."""
    return _table(results, _TABLE_2, "Answers and what they cost")


def costs_table(results: Sequence[Result]) -> Table:
    """One column per system and k: valid answers, and costs with and without q. Its names are too long for columns."""
    caption = (
        "Valid: there is an answer with one part for each question. MEM1 counts peak and dependency without q, and "
        "drops trajectories with EM = 0 from its peak, but not from its dependency."
    )
    title = "Valid answers, and costs with and without q"
    table = Table("", title=title, title_justify="left", caption=caption, caption_justify="left")
    for result in results:
        table.add_column(f"{escape(result.system)}, Q{result.k}", justify="right")
    for column in COSTS:
        table.add_row(column[0], *(_cell(result, column) for result in results))
    return table


def comparison_table(a: str, b: str, comparisons: Mapping[str, Comparison]) -> Table:
    tasks = max((c.tasks for c in comparisons.values()), default=0)
    title = escape(f"{a} minus {b}, paired bootstrap over {tasks} tasks")
    table = Table(title=title, title_justify="left")
    for heading in ("metric", "difference", "95 % interval", "p"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for metric, c in comparisons.items():
        table.add_row(metric, f"{c.difference:+.4g}", f"{c.low:+.4g} to {c.high:+.4g}", f"{c.p:.4f}")
    return table


def _table(results: Sequence[Result], columns: Sequence[Column], title: str) -> Table:
    if len(gradings := sorted({r.setting.grading for r in results})) != 1:
        raise ValueError(f"a table compares results of one grading, got {gradings}")
    found = {(r.system, r.k): r for r in results}
    if len(found) < len(results):
        raise ValueError("a system has two results for one k; give the systems different names")
    horizons = sorted({r.k for r in results})
    if not any(r.setting.is_alone for r in results):
        columns = [column for column in columns if column is not TIME]
    table = Table(title=title, title_justify="left", caption=_caption(results), caption_justify="left")
    table.add_column("system")
    for k in horizons:
        for heading, *_ in columns:
            table.add_column(f"Q{k} {heading}", justify="right")
    for system in dict.fromkeys(r.system for r in results):
        cells = [_cell(found.get((system, k)), column) for k in horizons for column in columns]
        table.add_row(escape(system), *cells)
    return table


def _cell(result: Result | None, column: Column) -> str:
    _, metric, unit, digits = column
    if result is None or (metric == "seconds" and not result.setting.is_alone):
        return "-"
    return shown(result.metrics[metric], unit, digits)


def shown(estimate: Estimate | None, unit: float = 1, digits: int = 3) -> str:
    """
    >>> shown(Estimate(729.4, 3.1, 512), 1e2, 2)
    '7.29 ± 0.03'
    """
    if estimate is None:
        return "-"
    mean = f"{estimate.mean / unit:.{digits}f}"
    return mean if estimate.spread is None else f"{mean} ± {estimate.spread / unit:.{digits}f}"


def _caption(results: Sequence[Result]) -> str:
    """The conditions that a reader must know to compare these numbers with others."""
    lines = [
        f"EM and F1 are sums over the questions, grading {results[0].setting.grading}. "
        "Peak counts prompt and completion in the model's own tokens."
    ]
    for system in dict.fromkeys(r.system for r in results):
        of_system = [r for r in results if r.system == system]
        tasks = ", ".join(f"{r.tasks} tasks of Q{r.k}" for r in of_system)
        spreads = {f"standard deviation over {r.seeds} seeds" if r.seeds > 1 else "standard error" for r in of_system}
        times = " and ".join(sorted({time_shown(r.setting) for r in of_system}))
        lines.append(f"{system}: {tasks}; ± {' or '.join(sorted(spreads))}; {times}.")
    return escape("\n".join(lines))


def time_shown(setting: Setting) -> str:
    """What a table says about time: a trajectory that shared the engine waited for others.

    >>> time_shown(Setting("squad", "local, cpu", batch_size=64))
    'no time, because 64 trajectories shared the engine (local, cpu): --batch 1 measures it'
    """
    if setting.is_alone:
        return f"time on {setting.engine}, one trajectory at a time"
    count = setting.batch_size * setting.processes
    return f"no time, because {count} trajectories shared the engine ({setting.engine}): --batch 1 measures it"
