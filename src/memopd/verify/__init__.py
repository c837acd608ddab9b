"""Checks and measurements: equivalence of packing, the audit of flattened training, support of model families."""

from memopd.verify.equivalence import EquivalenceReport, GradientReport, equivalence, gradient_equivalence
from memopd.verify.structure import structural_problems

__all__ = ["EquivalenceReport", "GradientReport", "equivalence", "gradient_equivalence", "structural_problems"]
