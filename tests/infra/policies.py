"""Evaluates IAM policies as AWS does within one account: an explicit Deny wins, else an Allow, else nothing is allowed.

Only the conditions that our templates use are known; another one is an error and never passes for true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Statement = Mapping[str, Any]

S3_ACTIONS = {
    "HeadBucket": "s3:ListBucket",
    "ListObjectsV2": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "HeadObject": "s3:GetObject",
    "GetObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListParts": "s3:ListMultipartUploadParts",
    "DeleteObject": "s3:DeleteObject",
}
"""Permission that each request needs (S3 user guide, "Required permissions for Amazon S3 API operations")."""


def allowed(statements: Iterable[Statement], action: str, resource: str, context: Mapping[str, str]) -> bool:
    """Whether ``action`` on the ARN ``resource`` is allowed; ``context`` has the condition keys of the request."""
    effects = {each["Effect"] for each in statements if _applies(each, action, resource, context)}
    return "Allow" in effects and "Deny" not in effects


def _applies(statement: Statement, action: str, resource: str, context: Mapping[str, str]) -> bool:
    unknown = statement.keys() - {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
    assert not unknown, f"this evaluator does not know {unknown}"
    return (
        any(_like(pattern.lower(), action.lower()) for pattern in _list(statement["Action"]))
        and any(_like(pattern, resource) for pattern in _list(statement["Resource"]))
        and all(
            _holds(operator, key, _list(wanted), context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
    )


def _holds(operator: str, key: str, wanted: list[str], context: Mapping[str, str]) -> bool:
    if key not in context:
        return False
    if operator in ("StringEquals", "Bool"):
        return context[key] in [str(each) for each in wanted]
    assert operator == "StringLike", f"this evaluator does not know {operator}"
    return any(_like(pattern, context[key]) for pattern in wanted)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _like(pattern: str, text: str) -> bool:
    parts = (".*" if char == "*" else "." if char == "?" else re.escape(char) for char in pattern)
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None
