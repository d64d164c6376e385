"""ktserve: a serving engine for language models whose prefix cache is partitioned by tenant."""

__version__ = "0.1.0"
