"""`ForwardPassPerfModel`: the peer's method names and result shapes over any model of this package.

Code that calls the Rust peer moves over by one import.
"""

from fpmjax.facade.model import ForwardPassPerfModel

__all__ = ["ForwardPassPerfModel"]
