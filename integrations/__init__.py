"""Adapters to training frameworks, one folder per framework, and `common` for what they share.

This folder installs as `lightning_padmin.integrations`. Importing it under any other name would load a second copy
of the adapters, whose classes are not those of the first, so that is refused.
"""

if __name__ != "lightning_padmin.integrations":
    raise ImportError(
        f"imported as {__name__!r}: import lightning_padmin.integrations instead (a second copy of the adapters "
        "would not share its classes with the first)"
    )
