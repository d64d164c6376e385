"""The engine: it schedules sequences, runs the model over paged keys and values, and samples."""
