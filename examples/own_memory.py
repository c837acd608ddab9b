"""A memory rule of your own: a class, an entry, and the `memopd` command that knows it.

python examples/own_memory.py rollout TASKS --memory last_two --index INDEX --model MODEL -o EPISODES
"""

from memopd.agent.memory import RULES, Piece
from memopd.cli import main


class LastTwo:
    """The last two responses without what they found, then the new information."""

    def context(self, turns):
        said = [Piece(turns[t].response, "memory", t) for t in range(max(0, len(turns) - 2), len(turns))]
        return [*said, Piece(turns[-1].observation, "observation", len(turns) - 1)]

    def query(self, response, keywords):
        return keywords  # what to search for when the response asks for `keywords`


RULES["last_two"] = lambda codec: LastTwo()  # `codec` encodes and decodes, for rules that rewrite text

if __name__ == "__main__":
    main()
