"""Certified gaps of plans that have a lower bound."""

from oper.plan.certificate import Certificate


def known_gap(certificate: Certificate) -> float:
    """Return the gap; AssertionError if the bound proves nothing."""
    assert certificate.certified_gap is not None
    return certificate.certified_gap
