"""lemon-mlflow: fine-tune open language models on your own machine, as MLflow runs that can be trusted later.

Public names, kept stable: `Refusal`, `Failure` and `Stopped` (how a run ends without its adapter), `Recipe` and
`load_recipe` (what a run depends on). Everything else is reached through the `lemon` command and the entry points of the
root `MLproject`.
"""

from .config import Recipe, load_recipe
from .errors import Failure, Refusal, Stopped

__all__ = ["Failure", "Recipe", "Refusal", "Stopped", "load_recipe"]
__version__ = "0.1.0"
