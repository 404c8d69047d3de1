"""The path from text to batches: text -> tokens -> .bin/.idx -> samples -> batches.

This package imports nothing else of the project.
"""
