"""The recording gateway: it speaks OpenAI's API to agents, and records every call as token ids before it answers."""
