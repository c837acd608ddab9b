"""The recording gateway: agents that speak OpenAI's API, every call kept as token ids before it is answered."""
