"""Bytes under a URI: a local folder or an S3 bucket, with one small interface (:class:`.store.Store`)."""
