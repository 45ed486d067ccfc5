"""Every family of questions about one scene, and how often it is asked."""

from __future__ import annotations

from training import positions, questions
from training.kinds import Family

# The weights are how often a family is asked.
FAMILIES: dict[str, tuple[Family, float]] = {
    "count all": (questions.count_all, 1.0),
    "count some": (questions.count_some, 2.0),
    "exists": (questions.exists, 1.5),
    "colour": (questions.colour_of, 1.5),
    "shape": (questions.shape_of, 1.5),
    "size": (questions.size_of, 1.2),
    "yes or no": (questions.is_it, 1.0),
    "relation": (positions.relation, 2.0),
    "which side": (positions.which_side, 2.0),
    "further": (positions.further, 2.0),
    "extreme": (positions.extreme, 2.0),
    "beside": (positions.beside, 1.2),
    "half": (positions.half, 1.0),
    "where": (positions.zone, 1.5),
    "compare sizes": (positions.compare_sizes, 1.5),
    "compare counts": (questions.compare_counts, 2.0),
    "colours": (questions.colours, 0.8),
    "background": (questions.background, 0.4),
    "describe": (questions.describe, 1.2),
}
