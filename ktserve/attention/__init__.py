"""Paged attention: the batch's layout, the page storage, and the backends behind one protocol."""

from ktserve.attention.backend import AttentionBackend
from ktserve.attention.batch import PagedBatch
from ktserve.attention.choice import create_backend
from ktserve.attention.register import ATTENTION_NAME, register
from ktserve.attention.storage import KVStorage

__all__ = [
    "ATTENTION_NAME",
    "AttentionBackend",
    "KVStorage",
    "PagedBatch",
    "create_backend",
    "register",
]
