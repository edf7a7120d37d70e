"""Which implementations of the audio functions there are here."""

import pytest

from unisono_audio import native_core

BACKENDS = ["numpy", *(["native"] if native_core.module() else [])]
native = pytest.mark.skipif(native_core.module() is None, reason="the native core was not built")
