"""Which options of fsspec's file systems a configuration may set: where a store lies and how it is spoken to.

fsspec hands its options to whatever library it finds, where some of them are passwords and some name files or code.
So these are all that there are; who one is, is for the environment and the files of the store's own tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from unisono.runtime.errors import nearest

KEY = "checkpoint.upload.options"
_KNOWN: dict[str, frozenset[str] | None] = {
    **dict.fromkeys((
        "anon", "auto_mkdir", "access", "account_name", "block_size", "default_block_size", "default_cache_type",
        "default_location", "default_fill_cache", "endpoint_url", "fixed_upload_size", "host", "max_concurrency",
        "max_concurrent_requests", "port", "profile", "project", "region", "requester_pays", "requests_timeout",
        "timeout", "use_listings_cache", "use_ssl", "user", "username", "version_aware",
    )),
    "client_kwargs": frozenset({"endpoint_url", "region_name", "use_ssl", "verify", "api_version"}),
    "config_kwargs": frozenset({
        "connect_timeout", "max_pool_connections", "read_timeout", "region_name", "request_checksum_calculation",
        "response_checksum_validation", "retries", "s3", "signature_version",
    }),
    "s3_additional_kwargs": frozenset({"ACL", "RequestPayer", "SSEKMSKeyId", "ServerSideEncryption", "StorageClass"}),
}  # fmt: skip


def _check(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse an option that is not in the list; its value is not repeated."""
    for name, value in given.items():
        if name not in _KNOWN:
            raise ValueError(_unknown_option(name, _KNOWN))
        inner = _KNOWN[name]
        if inner is not None:
            if not isinstance(value, Mapping):
                raise ValueError(f"{KEY}.{name} is a group of options, e.g. {{{name}: {{{min(inner)}: …}}}}")
            for key in value:
                if key not in inner:
                    raise ValueError(_unknown_option(f"{name}.{key}", [f"{name}.{known}" for known in inner]))
        elif isinstance(value, Mapping | list):
            raise ValueError(f"{KEY}.{name} is a text, a number, true or false")
    return given


def _unknown_option(name: str, known: Any) -> str:
    return (
        f"{KEY}.{name} is not an option of a store that a configuration may set, {nearest(name, known)}. Credentials "
        "come from the environment, or from a file of the store's own tools (~/.aws, gcloud, az login)"
    )


Options = Annotated[dict[str, Any], AfterValidator(_check)]
