"""Valid calls of HotBuffer."""
