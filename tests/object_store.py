"""An S3 server on loopback (moto's), with faults to order: `with serve() as store: store.url, store.fail(...)`."""

import contextlib
import os
import re
import threading
import time
from collections import Counter

import fsspec
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

SECRET = "planted-s3cret-value"


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_):
        pass


class Store:
    """The server.

    Attributes:
        endpoint: its address.
        requests: count of each "METHOD key".
        delay: seconds that each write takes.
    """

    def __init__(self):
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Quiet)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._faults: list[list] = []
        self.requests: Counter[str] = Counter()
        self.delay = 0.0
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __call__(self, environ, start):
        method, key = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests[f"{method} {key}"] += 1
        for fault in self._faults:
            verb, pattern, code, status, left = fault
            if left and re.match(verb, method) and re.search(pattern, key):
                fault[-1] -= 1
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no {SECRET}</Message></Error>".encode()
                start(f"{status} X", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
                return [body if method != "HEAD" else b""]
        if method in ("PUT", "POST"):
            time.sleep(self.delay)
        return self._app(environ, start)

    def fail(self, method, pattern, code, status, times=10**9):
        """Answer matching requests with an error of S3, `times` times; its message has the secret."""
        self._faults.append([method, pattern, code, status, times])

    def heal(self):
        self._faults.clear()
        self.delay = 0.0

    def clear(self):
        """Remove all objects."""
        s3_backends["123456789012"]["aws"].reset()
        make_bucket()
        self.requests.clear()

    def names(self, bucket="bucket"):
        return sorted(s3_backends["123456789012"]["aws"].buckets[bucket].keys)

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def serve(monkeypatch):
    """Serve a store with the bucket "bucket", named in this process's environment with its credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    store = Store()
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    store.clear()
    try:
        yield store
    finally:
        store.close()


def make_bucket(name="bucket"):
    fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False).mkdir(name)
