"""Memory rules of your own: a class that says what the next call reads.

PYTHONPATH=examples memopd rollout TASKS --memory own_memory:LastTwo --index INDEX --model MODEL -o EPISODES
PYTHONPATH=examples memopd train CONFIG --output RUN --tasks.memory own_memory:LastTwo
"""

from memopd.agent import Ask, Piece


class LastTwo:
    """The last two responses without what they found, then the new information."""

    def context(self, turns):
        said = [Piece(turn.response, "memory", turn.call) for turn in turns[-2:]]
        return [*said, Piece(turns[-1].observation, "observation", turns[-1].call)]


class Notes:
    """A note that the model writes of each search, in place of its responses; then the new information."""

    def __init__(self, codec):
        self.codec = codec

    def context(self, turns):
        found = self.codec.decode(turns[-1].observation)
        note = yield Ask(f"Note in a few words what matters here: {found}", purpose="note", max_tokens=24)
        notes = [reply for turn in turns for reply in turn.replies] + [note]
        kept = [Piece(reply.ids, "memory", reply.call) for reply in notes]
        return [*kept, Piece(turns[-1].observation, "observation", turns[-1].call)]
