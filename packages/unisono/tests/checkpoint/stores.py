"""Stores for tests: folders, and a server that speaks S3, which a test can stop and start again with what it holds."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.runtime.remote import remote_options

BUCKET = "checkpoints"


class Server:
    """moto's S3, in threads of this process; its objects outlive a stop."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.environment = {  # as a user would have them
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._server: Any = None
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    @property
    def options(self) -> dict[str, Any]:
        return {"key": "nobody", "secret": "nothing", "endpoint_url": self.environment["AWS_ENDPOINT_URL"]}

    def system(self) -> Any:
        """Its file system, which remembers nothing."""
        import s3fs

        return s3fs.S3FileSystem(**self.options, skip_instance_cache=True, use_listings_cache=False)

    def store(self, name: str, deadline: float = 60.0) -> ObjectStore:
        return ObjectStore(f"s3://{BUCKET}/{name}", remote_options(self.options, deadline))

    def parts(self) -> list[Any]:
        """Uploads in parts that were neither finished nor aborted."""
        found: list[Any] = self.system().list_multipart_uploads(BUCKET)
        return found


@contextmanager
def serving() -> Iterator[Server]:
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    server = Server()
    try:
        if not server.system().exists(BUCKET):  # what moto holds is this process's
            server.system().mkdir(BUCKET)
        yield server
    finally:
        server.stop()
