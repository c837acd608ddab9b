"""A divergence from the teacher of your own: one function of two rows of logits, named in the configuration.

PYTHONPATH=examples memopd train CONFIG --output RUN --teacher.divergence own_divergence:skewed
"""


def skewed(student, teacher, share=0.1):
    """KL(p ‖ (1 − share)·p_T + share·p): a reverse KL that stays finite where the teacher rules a token out.

    Both are [n, V], over the ids that both models have, at the sampling temperature; one number per row goes back.
    """
    p, p_T = student.softmax(-1), teacher.softmax(-1)
    return (p * (p.log() - ((1 - share) * p_T + share * p).log())).sum(-1)
