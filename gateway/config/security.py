"""How the connections of the listeners are protected, and who may call. A leaf module: paths only, no secret."""

from typing import Annotated

from msgspec import Meta

from gateway.config.fields import Strict

ReloadSeconds = Annotated[float, Meta(gt=0, le=86_400)]


class Tls(Strict, frozen=True, kw_only=True):
    """TLS 1.2 or later on every listener: `grpc`, `admin` and `metrics`."""

    cert_file: Annotated[
        str, Meta(description="PEM certificates: the gateway's own first, then those that lead to its CA")
    ]
    key_file: Annotated[str, Meta(description="PEM private key of the first certificate, not encrypted")]
    client_ca_file: Annotated[
        str | None,
        Meta(description="PEM certificates of the CAs that sign clients; every client then needs one of theirs (mTLS)"),
    ] = None
    reload_interval_s: Annotated[
        ReloadSeconds, Meta(description="time between two looks at the files; new connections get what is new in them")
    ] = 10.0


class Auth(Strict, frozen=True, kw_only=True):
    """Bearer tokens. Every call but health needs one, and so does the metrics page."""

    tokens_file: Annotated[
        str,
        Meta(description="tokens of clients, one a line, `#` starts a comment; for `listen.grpc` and `listen.metrics`"),
    ]
    admin_tokens_file: Annotated[
        str | None,
        Meta(description="tokens of operators, for every listener; null: nobody may make calls on `listen.admin`"),
    ] = None
    reload_interval_s: Annotated[
        ReloadSeconds, Meta(description="time between two looks at the files; new calls need what is new in them")
    ] = 10.0
