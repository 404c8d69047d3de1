"""A training run: settings, model, trainer, checkpoints, monitoring, planning."""

from zero import require_siblings

require_siblings("gpt", "data", "parallel")
