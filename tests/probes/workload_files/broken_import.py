"""A user's file that cannot be imported."""

import a_module_nobody_has  # noqa: F401
