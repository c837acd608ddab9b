"""Table 2: the models of Table 1 on tasks of one question, with dependency."""

from __future__ import annotations

from typing import Any

from memopd.evaluate.tables import DEPENDENCY, Column
from paper import main
from paper.page import Findings
from paper.settings import Shown
from paper.suite import Work
from paper.trained import COLUMNS as TABLE_1
from paper.trained import (
    Collected,
    costs,
    results_caption,
    results_table,
    settings_of,
)

COLUMNS: tuple[Column, ...] = (*TABLE_1, DEPENDENCY)


def findings(found: Collected, shown: Shown, work: Work) -> Findings:
    text = body(found, shown, settings_of(work))
    return Findings({}, text, lambda output: main.draw(found, shown, work.split, output))


def body(found: Collected, shown: Shown, settings: dict[str, Any]) -> list[str]:
    return [results_table(found, shown, COLUMNS), results_caption(found, settings), *costs(found)]
