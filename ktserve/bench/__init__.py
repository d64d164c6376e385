"""Measuring servers: a load generator for any OpenAI-compatible endpoint."""
