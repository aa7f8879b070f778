"""`PadMinTrainerMixin` for the Trainer of transformers and its subclasses.

mixin    the class; it hands everything on to an engine
engine   plans, checks, and the passes of a step
auto     from one way of running batches to the next
joint    steps as stock, with calls of models in chunks
support  what is refused, and the Trainer's methods, compared with those that were checked
"""

from lightning_padmin.integrations.transformers.mixin import PadMinTrainerMixin

__all__ = [
    "PadMinTrainerMixin",
]
