"""The terminal interface of `ktserve inspect`: screens, widgets and styles."""
