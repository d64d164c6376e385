"""The commands of `ktserve`: one file each, which imports its work only when it runs."""
