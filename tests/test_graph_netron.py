"""The ONNX form in Netron, which is what it is for: no complaint, and the operators are drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_tools.graph import GraphResult, GraphTracing

from .browsing import BROWSER, DRIVER, started

netron = pytest.importorskip("netron", reason="netron is not installed")
pytest.importorskip("onnx", reason="onnx is not installed")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no chromium or google-chrome with a chromedriver is installed"
)
