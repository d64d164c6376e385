"""The admin plane: the mirror of the cache, the sockets that show it, and their client."""
