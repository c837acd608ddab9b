"""The recording gateway serves OpenAI's API to agents and records every call as token ids before it answers."""
