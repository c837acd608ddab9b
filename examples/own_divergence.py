"""A divergence from the teacher of your own: one function of two rows of logits, named in the configuration.

PYTHONPATH=examples memopd train CONFIG --output RUN --teacher.divergence own_divergence:skewed
"""

from math import log

from torch import logaddexp


def skewed(student, teacher, share=0.1):
    """KL(p ‖ (1 − share)·p_T + share·p): a reverse KL that stays finite where the teacher rules a token out.

    Both are [n, V], over the ids that both models have, at the sampling temperature; one number per row goes back.
    """
    logp, logp_T = student.log_softmax(-1), teacher.log_softmax(-1)
    mixed = logaddexp(logp_T + log(1 - share), logp + log(share))
    return (logp.exp() * (logp - mixed)).sum(-1)
