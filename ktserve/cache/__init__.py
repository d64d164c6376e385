"""The prefix cache: a radix tree for each namespace over one pool of pages.

Nothing is imported here, so that a process without numpy or torch can load `records` and `shadow`.
"""
