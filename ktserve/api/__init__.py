"""The HTTP process: OpenAI's routes, authentication, tokenizing, text and server-sent events.

It holds no model and imports no torch; the engine is reached through `ktserve.messages` alone.
"""
