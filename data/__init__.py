"""Text to batches: text -> tokens -> .bin/.idx -> samples -> batches. Imports nothing else of this project."""
