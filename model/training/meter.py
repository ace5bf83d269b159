"""Figures of several updates, averaged to one point of the learning curve."""

from __future__ import annotations

from dataclasses import dataclass

from model.training.loop import Update


@dataclass(slots=True)
class Meter:
    """Sums over the updates since the last point; skipped updates contribute only their number and time."""

    num_steps: int = 0
    num_skipped: int = 0
    loss: float = 0.0
    gradient_norm: float = 0.0
    learning_rate_factor: float = 0.0
    num_targets: int = 0
    seconds: float = 0.0

    def add(self, update: Update) -> None:
        """Adds one update."""
        self.num_steps += 1
        self.num_skipped += update.skipped
        if not update.skipped:
            self.loss += update.loss
            self.gradient_norm += update.gradient_norm
        self.learning_rate_factor = update.learning_rate_factor
        self.num_targets += update.num_targets
        self.seconds += update.seconds

    def point(self) -> dict[str, float]:
        """Means over the updates; loss and norm are missing where all were skipped."""
        applied = self.num_steps - self.num_skipped
        means = {"loss": self.loss / applied, "gradient_norm": self.gradient_norm / applied} if applied else {}
        return {
            **means,
            "learning_rate_factor": self.learning_rate_factor,
            "tokens_per_second": self.num_targets / self.seconds,
        }
