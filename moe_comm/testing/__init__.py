"""For tests of this package and of backends made elsewhere: ranks, cases, conformance."""
