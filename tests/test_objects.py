"""Object storage without a server: what can be told before the first request."""

from penstock import objects


def test_a_connection_belongs_to_the_endpoint_it_was_made_for(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    first = objects._file_system("s3", "bucket")
    assert objects._file_system("s3", "bucket") is first
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:10")
    assert objects._file_system("s3", "bucket") is not first
