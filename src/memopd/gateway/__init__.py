"""The recording gateway serves OpenAI's API to agents and records every call as token ids before it answers."""

TOKEN = "MEMOPD_GATEWAY_TOKEN"  # the environment variable with the secret that clients must send
