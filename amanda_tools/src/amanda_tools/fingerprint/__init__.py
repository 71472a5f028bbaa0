"""Fingerprints of all values that the operators of a run read and wrote."""

from amanda_tools.fingerprint.files import Fingerprinted, load_fingerprint
from amanda_tools.fingerprint.result import FingerprintResult
from amanda_tools.fingerprint.tool import Fingerprint

__all__ = ["Fingerprint", "FingerprintResult", "Fingerprinted", "load_fingerprint"]
