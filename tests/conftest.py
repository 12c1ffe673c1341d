"""What all tests have in common."""

from hypothesis import settings

# How long an example takes says more of the machine than of the code.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")
