"""Messages of the Python API in words of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fpmjax.cli.arguments import UsageError
from fpmjax.errors import FpmError, OptionError

HINTS = {  # code of an OptionError: what to do about it here
    "axes": "give several batches, contexts or both: --decode-requests 1:64 --kv-per-request 512:8192:x2",
    "cells": "make an axis coarser, for example 512:65536:x2 instead of 512:65536:64",
    "panels": "ask fewer models or draft lengths at once",
    "draft_length": "add --draft-length 1:4",
    "decode_requests": "add --decode-requests 1:64 --kv-per-request 512:8192:x2",
    "prefill_requests": "leave the prefill axes out",
    "tokens_per_round": "--tokens-per-round takes a list from draft length 0 to the largest one that is asked, for "
    "example 1,1.7,2.2 with --draft-length 0:2",
}
DRAFTED = "add --draft-length 1:4, or draft_length to the file of --spec"
PHRASES = {  # of messages of the Python API: how the command line says it
    "say overwrite": "add --overwrite",
    "the same call without overwrite": "the same command, without --overwrite,",
    "the same call": "the same command",
    "an integer, or a list, range or array of them": 'integers, such as [1, 8], or a text such as "1:64"',
    "give draft_length too": DRAFTED,
    "give the grid a draft_length": DRAFTED,
    "give the grid decode_requests": "add --decode-requests 1:64 --kv-per-request 512:8192:x2",
    "a picture of the coverage tells why": "`fpmjax sweep --plot FILE --show coverage` tells why",
    "such as limit_ms=50": "such as --limit-ms 50",
    "such as [0.5, 0.99]": "such as --quantiles 0.5,0.99",
    "ask for them in a call of their own": "leave --pareto out, or --limit-ms and --quantiles",
    "keep names an axis twice": "--keep names an axis twice",
    "quantiles names one twice": "--quantiles names one twice",
    "limit_ms is ": "--limit-ms is ",
    "quantiles is ": "--quantiles is ",
}


@contextmanager
def spelled_out() -> Iterator[None]:
    """Messages of the Python API in words of the command line (`PHRASES`)."""
    try:
        yield
    except FpmError as error:
        text = str(error)
        for phrase, words in PHRASES.items():
            text = text.replace(phrase, words)
        if text == str(error):
            raise
        raise type(error)(text, code=error.code) from error


@contextmanager
def in_flags() -> Iterator[None]:
    """Options of the Python API that were refused, in words of the command line."""
    try:
        yield
    except OptionError as error:
        if error.code not in HINTS:
            raise
        what = str(error).partition("\n")[0].replace("tokens_per_round", "--tokens-per-round", 1)
        raise UsageError(f"{what}\nhint: {HINTS[error.code]}", code=error.code) from None
