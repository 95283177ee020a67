"""Fuzzing of every public operator; see README.md beside this file."""
