"""The tree of errors."""

import copy
import pickle

import grpc
import pytest

from attnd import client
from attnd.client import _errors

CLASSES = [value for value in vars(client).values() if isinstance(value, type) and issubclass(value, client.AttndError)]


def pickled(error):
    return pickle.loads(pickle.dumps(error))  # noqa: S301 (its own bytes)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [pickled, copy.copy, copy.deepcopy])
def test_errors_survive_pickling_and_copying(kind, again):
    error = kind("q is wrong.", reason="WRONG", violations=[("q", "q is wrong.")], retry_delay_s=0.5)
    got = again(error)
    assert type(got) is kind
    assert str(got) == got.message == "q is wrong."
    assert (got.code, got.reason, got.retry_delay_s) == (kind.code, "WRONG", 0.5)
    assert got.violations == (("q", "q is wrong."),)
    assert got.violations[0].field == "q"


@pytest.mark.parametrize("code", grpc.StatusCode, ids=lambda code: code.name)
def test_every_status_code_has_a_class(code):
    kind = _errors.class_of(code)
    assert issubclass(kind, client.AttndError)
    assert kind.code == code or kind is client.UnknownError


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (client.InvalidArgumentError, ValueError),
        (client.NotFoundError, LookupError),
        (client.SessionLostError, client.NotFoundError),
        (client.DeadlineExceededError, TimeoutError),
        (client.UnavailableError, ConnectionError),
        (client.UnimplementedError, NotImplementedError),
    ],
)
def test_errors_are_also_what_python_calls_them(kind, builtin):
    with pytest.raises(builtin, match=r"^why$"):
        raise kind("why")


def test_the_docstring_shows_every_class():
    shown = {word for word in _errors.__doc__.split() if word.endswith("Error")}
    assert {kind.__name__ for kind in CLASSES} <= shown
