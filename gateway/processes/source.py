"""The configuration file with the flags of the start, as text that other processes can read too."""

from pathlib import Path

import msgspec
from msgspec import structs

from gateway.config.checks import check
from gateway.config.document import read_text
from gateway.config.errors import ConfigError
from gateway.config.loader import parse_config
from gateway.config.schema import Config
from gateway.config.values import LogLevel


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The file at `path`; the other fields are flags, None where none was given."""

    path: str
    log_level: LogLevel | None = None
    grpc: str | None = None
    processes: int | None = None

    def read(self) -> str:
        """The file's text. Raises ConfigError."""
        return read_text(Path(self.path))

    def parse(self, text: str) -> Config:
        """The checked configuration. Raises ConfigError."""
        config = parse_config(text, self.path)
        overridden = self.override(config)
        if overridden == config:
            return config
        problem = next(check(overridden), None)
        if problem is not None:
            raise ConfigError(self.path, None, None, f"{self.flags}: {problem.message}")
        return overridden

    def load(self) -> Config:
        """Read and parse. Raises ConfigError."""
        return self.parse(self.read())

    def override(self, config: Config) -> Config:
        """The configuration with the flags put in, unchecked."""
        if self.log_level is not None:
            observability = structs.replace(config.observability, log_level=self.log_level)
            config = structs.replace(config, observability=observability)
        if self.grpc is not None:
            config = structs.replace(config, listen=structs.replace(config.listen, grpc=self.grpc))
        if self.processes is not None:
            config = structs.replace(config, processes=self.processes)
        return config

    @property
    def flags(self) -> str:
        """The given flags that a check may have something against."""
        given = {"--grpc": self.grpc, "--processes": self.processes}
        return " ".join(flag for flag, value in given.items() if value is not None)
