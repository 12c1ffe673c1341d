"""Value sets that the settings share with layers that must not load the schema: the command line lists them in its help.

A leaf module without msgspec, whose import alone takes longer than `--help` should.
"""

from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "console"]
